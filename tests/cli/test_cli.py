"""The command as a person or a script meets it."""

import dataclasses
import hashlib
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.cli import main
from offbeat.run.progress import Status, make_display, say

RECIPE_FILE = """
import sys; sys.path.insert(0, {tests!r})
from helpers import toy_recipe
recipe = toy_recipe()
import torch
def bad_loss(model, batch):
    return model(batch[0]).sum() * float("nan")
diverging = toy_recipe(loss=bad_loss)
no_model = toy_recipe(model=lambda: torch.nn.ReLU())
no_data = toy_recipe(data=lambda config: 1 / 0)
one_model = toy_recipe().model()
same_model = toy_recipe(model=lambda: one_model)
exits = toy_recipe(model=lambda: sys.exit(3))
on_meta = toy_recipe(model=lambda: torch.nn.Linear(6, 3, device="meta"))
bad_schedule = toy_recipe(schedule=lambda version: 1.0)
from offbeat import SGD
no_group = toy_recipe(optimizer=SGD(groups={{"*.bais": {{"lr": 1.0}}}}))
def data_beside(config):
    import beside
    return beside.data, None
lazy = toy_recipe(data=data_beside)
"""


TRAIN = ["train", "--engine", "inproc"]
"""Threads, where nothing depends on the engine: processes take seconds to start."""


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "recipes.py"
    file.write_text(RECIPE_FILE.format(tests=str(Path(__file__).parents[1] / "support")))
    return str(file)


def test_train_prints_progress_and_ends_with_the_three_lines(
    recipes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([*TRAIN, "--recipe", f"{recipes}:recipe", "--discipline", "bounded:2", "--seed=4"])
    assert code == 0
    lines = capsys.readouterr().out.splitlines()
    assert "bounded:2" in lines[0] and "1 server, 2 workers" in lines[0]
    assert any(re.search(r"gradient 48/48, .*gradients/s.*loss .*staleness", li) for li in lines)
    assert re.fullmatch(r"Test-Accuracy: [01]\.\d{4}", lines[-3])
    assert re.fullmatch(r"Total Time: \d+\.\d\ds", lines[-2])
    assert re.fullmatch(r"Final Cost: \d+\.\d{4}", lines[-1])
    (run,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-recipes-recipe-bounded-2", run.name)
    assert json.loads((run / "config.json").read_text())["config"]["seed"] == 4


@pytest.mark.parametrize(
    ("metric", "value", "line"),
    [
        ("accuracy", 0.5, "Test-Accuracy: 0.5000"),
        ("accuracy", math.nan, "Test-Accuracy: nan"),
        ("loss", 0.12345, "Test-Loss: 0.1235"),
        ("bits", 2.0, "Test-Metric: 2.0000 (bits)"),
        ("bits", None, "Total Time: 1.00s"),
    ],
)
def test_the_first_of_the_last_lines(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    metric: str,
    value: float | None,
    line: str,
) -> None:
    is_nan = value is not None and math.isnan(value)
    summary = {"status": "finished", "metric": metric, "metric_is_nan": is_nan, "final_cost": None}
    summary |= {"test_metric": None if is_nan else value, "total_time_s": 1.0}
    result = offbeat.Result(Path("run"), summary)
    monkeypatch.setattr("offbeat.api.train_config", lambda *args, **kwargs: result)
    assert main([*TRAIN]) == 0
    assert capsys.readouterr().out.splitlines()[0] == line


def test_other_scores_come_before_the_last_three_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {"status": "finished", "metric": "accuracy", "metric_is_nan": False}
    summary |= {"test_metric": 0.5, "total_time_s": 1.0, "final_cost": 2.0}
    summary |= {"test_scores": {"accuracy": 0.5, "top5": 0.9, "loss": None}}
    result = offbeat.Result(Path("run"), summary)
    monkeypatch.setattr("offbeat.api.train_config", lambda *args, **kwargs: result)
    assert main([*TRAIN]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Test-Metric: 0.9000 (top5)",
        "Test-Loss: nan",
        "Test-Accuracy: 0.5000",
        "Total Time: 1.00s",
        "Final Cost: 2.0000",
    ]


def test_a_line_shows_all_scores(capsys: pytest.CaptureFixture[str]) -> None:
    display = make_display("title", 1000, quiet=False)
    scores = {"accuracy": 0.88125, "loss": 0.25}
    display.update(dataclasses.replace(status(500, 0.1), scores=scores))
    assert "test accuracy 0.8812 at version 480, test loss 0.2500" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["=0.9", "top5=", "top5=x", "top5"])
def test_a_target_is_a_number_or_a_metrics_name_and_a_number(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path), "--target", target]) == 2
    assert "offbeat: error: argument --target:" in capsys.readouterr().err


def test_a_run_goes_on_where_its_terminal_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what was learned is kept."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        display = make_display("title", 1000, quiet=False)
        display.update(status(1, 0.1))
        os.close(ours)
        for at_s in (1.0, 2.0):
            display.update(status(2, at_s))
            display.notice("stopping")
            say("a line")
        display.close()


def test_a_score_that_is_no_number_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    display = make_display("title", 1000, quiet=False)
    for at_s in (0.1, 0.2, 0.3):  # read from a line of JSON each time, and so another object
        score = (480, float("nan"))
        display.update(dataclasses.replace(status(500, at_s), score=score))
    assert capsys.readouterr().out.count("test accuracy nan at version 480") == 1


def test_the_best_can_be_scored_again(
    tmp_path: Path, recipes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = str(tmp_path / "r")
    flags = ["--engine", "inproc", "--eval-every", "10", "--quiet", "--run-dir", run_dir]
    assert main(["train", "--recipe", f"{recipes}:recipe", "--keep-best", *flags]) == 0
    found = json.loads((tmp_path / "r" / "summary.json").read_text())["best"]
    printed = capsys.readouterr().out
    assert f"Best: {found['metric']:.4f} at version {found['version']}\n" in printed
    assert main(["eval", run_dir, "--best"]) == 0
    line = f"version {found['version']}: precision @ 1 = {found['metric']:.3f}, loss = "
    assert line in capsys.readouterr().out
    assert main(["export", run_dir, str(tmp_path / "m.safetensors"), "--best"]) == 0


def test_quiet_prints_the_result_only(recipes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TRAIN, "--recipe", f"{recipes}:recipe", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "Test-Loss",
        "Test-Accuracy",
        "Total Time",
        "Final Cost",
    ]


def test_flags_beat_the_file_also_where_they_exclude_each_other(
    recipes: str, tmp_path: Path
) -> None:
    Path("c.toml").write_text(f'recipe = "{recipes}:recipe"\nepochs = 5\nworkers = 1\n')
    assert main([*TRAIN, "--config", "c.toml", "--steps=3", "--run-dir", "r", "--quiet"]) == 0
    summary = json.loads(Path("r/summary.json").read_text())
    assert (summary["gradients"], summary["num_workers"]) == (3, 1)
    assert main([*TRAIN, "--config", "r/config.json", "--quiet"]) == 0, "not into the old folder"
    (again,) = Path("runs").iterdir()
    assert json.loads((again / "summary.json").read_text())["gradients"] == 3


@pytest.mark.parametrize(
    ("flags", "staleness"),
    [
        (["--discipline", "bounded:2"], 2.0),
        (["--discipline", "bounded"], 5.0),
        (["--staleness", "3"], 3.0),
        (["--discipline", "sync"], None),
    ],
)
def test_a_discipline_on_the_command_line_beats_what_the_file_says_of_another(
    recipes: str, flags: list[str], staleness: float | None
) -> None:
    text = f'recipe = "{recipes}:recipe"\ndiscipline = "bounded"\nstaleness = 5\nsteps = 1\n'
    Path("c.toml").write_text(text)
    assert main([*TRAIN, "--config", "c.toml", "--run-dir", "r", "--quiet", *flags]) == 0
    assert json.loads(Path("r/config.json").read_text())["config"]["staleness"] == staleness


def test_a_diverging_run_exits_with_1_and_names_step_and_worker(
    recipes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TRAIN, "--recipe", f"{recipes}:diverging", "--run-dir", "r"]) == 1
    message = capsys.readouterr().err
    assert re.search(r"the loss became nan in worker \d at step 1; a lower --lr", message)
    assert len(message.splitlines()) == 1
    assert json.loads(Path("r/summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_model", "no trainable parameter"),
        ("no_data", "the recipe's data function failed: ZeroDivisionError"),
        ("recipee", "did you mean 'recipe'"),
        ("same_model", "the same model twice"),
        ("exits", "the recipe's model function failed: SystemExit"),
        ("on_meta", "is on meta, where it has no values"),
        ("bad_schedule", "the recipe's schedule function failed: TypeError"),
        ("no_group", "'*.bais' matches no parameter"),
    ],
)
def test_a_bad_recipe_is_one_line_and_leaves_nothing(
    recipes: str, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TRAIN, "--recipe", f"{recipes}:{name}"]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert not Path("runs").exists()


def test_a_folder_that_cannot_be_made_is_one_line(
    recipes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TRAIN, "--recipe", f"{recipes}:recipe", "--run-dir", "/proc/nobody/run"]) == 2
    error = capsys.readouterr().err
    assert "choose another --run-dir" in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_from_outside_ends_cleanly_with_a_checkpoint(
    recipes: str, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "offbeat", *TRAIN, "--recipe", f"{recipes}:recipe"]
    process = subprocess.Popen(
        [*command, "--steps", "10000000", "--run-dir", "r"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "gradients/s" in line:
                break
        process.send_signal(number)
        out, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, error
    assert "interrupted; go on with: offbeat train --resume r" in error
    assert "Ctrl-C again to give up" in out
    assert "Final Cost" in out and "Traceback" not in error
    summary = json.loads(Path("r/summary.json").read_text())
    assert summary["status"] == "interrupted" and summary["gradients"] > 0
    assert list(Path("r/checkpoints").iterdir())


@pytest.mark.slow
def test_output_in_a_closed_pipe_is_no_traceback(recipes: str) -> None:
    offbeat = f"{sys.executable} -m offbeat {' '.join(TRAIN)}"
    command = f"{offbeat} --recipe {recipes}:recipe --run-dir r | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr


def status(num_gradients: int, at_s: float) -> Status:
    return Status(
        num_gradients=num_gradients,
        num_examples=num_gradients * 50,
        at_s=at_s,
        loss=0.5,
        staleness=1.0,
        metric_name="accuracy",
        score=(480, 0.88125),
    )


def test_the_bar_fits_into_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    display = make_display("title", 1000, quiet=False)
    display.update(status(0, 0.0))
    display.update(status(499, 1.9))
    display.update(status(500, 2.0))  # too soon to be drawn by itself; the end draws it
    display.notice("stopping")
    display.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert "250 grad/s · 12,500 ex/s · loss 0.500 · staleness 1.0 · test accuracy 0.8812" in shown
    assert "500/1000" in shown
    assert max(len(line.rstrip()) for line in re.split(r"[\r\n]", shown)) <= 80


def test_a_recipe_may_import_what_lies_beside_it_when_it_needs_it(
    recipes: str, tmp_path: Path
) -> None:
    beside = tmp_path / "beside.py"
    beside.write_text("from helpers import toy_data\ndata = toy_data()\n")
    try:
        assert main([*TRAIN, "--recipe", f"{recipes}:lazy", "--run-dir", "r", "--quiet"]) == 0
    finally:
        sys.modules.pop("beside", None)


# -- recipes that are found again ------------------------------------------------------------------


@pytest.fixture
def run(recipes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One whose recipe has a relative name; and then one is elsewhere."""
    name = Path(recipes).name
    assert main([*TRAIN, "--recipe", f"{name}:recipe", "--run-dir", "r", "--steps", "2"]) == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    return tmp_path / "r"


def described(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "config.json").read_text())
    return found


def test_a_run_goes_on_from_any_folder(
    run: Path, recipes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = hashlib.sha256(Path(recipes).read_bytes()).hexdigest()
    kept = {"path": recipes, "sha256": digest, "folder": None}
    assert described(run)["recipe_file"] == kept
    assert main(["eval", str(run)]) == 0
    assert main(["train", "--resume", str(run), "--steps", "3"]) == 0
    assert described(run)["recipe_file"] == kept
    assert described(run)["config"]["recipe"] == "recipes.py:recipe", "what people are shown"
    flags = ["--config", str(run / "config.json"), "--run-dir", "again"]
    assert main([*TRAIN, *flags]) == 0
    assert described(Path("again"))["recipe_file"] == kept
    assert capsys.readouterr().err == ""


def test_the_processes_of_a_run_find_the_recipe_from_any_folder(run: Path) -> None:
    flags = ["--engine", "local", "--steps", "3", "--workers", "1"]
    assert main(["train", "--resume", str(run), *flags]) == 0
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"


def test_a_recipe_that_has_changed_is_told_in_a_line(
    run: Path,
    recipes: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Path(recipes).open("a") as file:
        file.write("# a thought\n")
    line = f"the recipe's file {recipes} has changed since the start"
    assert main(["eval", str(run)]) == 0
    assert caplog.messages == [line]
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--steps", "3"]) == 0
    assert line in capsys.readouterr().out.splitlines()
    assert main(["train", "--resume", str(run), "--steps", "4"]) == 0
    assert line not in capsys.readouterr().out, "that is what it was when it went on"


def test_a_recipe_that_is_gone_can_be_given(
    run: Path, recipes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "moved.py"
    Path(recipes).rename(moved)
    remedy = f"file {recipes} is not there any more; say where it is: --recipe FILE.py:recipe"
    for command in (["eval", str(run)], ["train", "--resume", str(run), "--steps", "3"]):
        capsys.readouterr()
        assert main(command) == 2
        error = capsys.readouterr().err
        assert remedy in error and len(error.splitlines()) == 1
        assert main([*command, "--recipe", "../moved.py:recipe"]) == 0
    assert described(run)["recipe_file"]["path"] == str(tmp_path / "elsewhere" / "../moved.py")
    assert offbeat.evaluate(run, recipe=f"{moved}:recipe") == offbeat.evaluate(run)
    result = offbeat.resume(run, f"{moved}:recipe", steps=4, quiet=True)
    assert result.summary["gradients"] == 8


def test_a_recipe_that_moved_with_the_run_is_found_by_its_name(
    run: Path, recipes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    Path(recipes).rename(there / "recipes.py")
    monkeypatch.chdir(there)
    assert main(["eval", str(run.rename(there / "r"))]) == 0
    Path("recipes.py").write_text(Path("recipes.py").read_text() + "# another one\n")
    assert main(["eval", "r"]) == 2, "who knows what that is"


def test_a_module_is_imported_again_from_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    package = tmp_path / "project" / "zoo"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "sizes.py").write_text("STEPS = 2\n")
    text = "from helpers import toy_recipe\nfrom .sizes import STEPS\nrecipe = toy_recipe()\n"
    (package / "toys.py").write_text(text)
    monkeypatch.chdir(package.parent)
    assert main([*TRAIN, "--recipe", "zoo.toys:recipe", "--run-dir", "r", "--steps", "2"]) == 0
    run = package.parent / "r"
    kept = described(run)["recipe_file"]
    assert (kept["path"], kept["folder"]) == (str(package / "toys.py"), str(package.parent))
    monkeypatch.chdir(tmp_path)

    def forget() -> None:
        sys.path.remove(str(package.parent))
        for name in ("zoo", "zoo.toys", "zoo.sizes"):
            del sys.modules[name]

    forget()
    assert main(["eval", str(run)]) == 0
    forget()
    package.rename(tmp_path / "zoo_of_old")
    capsys.readouterr()
    assert main(["eval", str(run)]) == 2
    error = capsys.readouterr().err
    assert "importing zoo.toys failed" in error and "say where it is with --recipe" in error


@pytest.mark.slow
@pytest.mark.parametrize("where", [">&-", "> /dev/full"])
def test_an_output_that_cannot_be_written_to_does_not_end_the_run(recipes: str, where: str) -> None:
    offbeat = f"{sys.executable} -m offbeat {' '.join(TRAIN)}"
    command = f"{offbeat} --recipe {recipes}:recipe --run-dir r {where}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert json.loads(Path("r/summary.json").read_text())["status"] == "finished"


def test_rates_are_those_of_the_time_in_which_gradients_came(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = make_display("title", 100, quiet=False)
    display.update(status(0, 0.0))
    display.update(status(100, 2.0))
    display.update(status(100, 60.0))
    line = capsys.readouterr().out.splitlines()[-1]
    assert "gradient 100/100, 50.0 gradients/s, 2,500 examples/s" in line, "no decay while scoring"
    assert "test accuracy 0.8812 at version 480" in line
    display.close()
    stalled = make_display("title", 200, quiet=False)
    for count, at_s in ((0, 0.0), (100, 2.0), (100, 60.0)):
        stalled.update(status(count, at_s))
    line = capsys.readouterr().out.splitlines()[-1]
    assert "gradient 100/200, 0.0 gradients/s, 0.0 examples/s" in line, "but while nothing moves"
