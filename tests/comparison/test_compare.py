"""Comparisons: grids of runs, what they share, and what happens when some of them fail."""

import copy
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import toy_recipe

import offbeat
from offbeat import Recipe
from offbeat.api import Result
from offbeat.cli import main
from offbeat.comparison import runs, subjects
from offbeat.comparison.grid import DISCIPLINES, Cell, Grid, check_grid, make_grid
from offbeat.comparison.runs import expected_s
from offbeat.config import make_config
from offbeat.errors import ConfigError, NonFiniteLossError, RecipeError, RunDirError
from offbeat.roles.control import Control
from offbeat.roles.faults import make_faults
from offbeat.run.events import read_events
from offbeat.run.orders import Standing
from offbeat.run.progress import Status, make_overview, minutes
from offbeat.scripts import change_of, describe_script

SMALL: dict[str, Any] = {
    "disciplines": ["sync", "lock-free"],
    "workers": [1, 2],
    "seeds": 2,
    "steps": 6,
    "engine": "inproc",
    "quiet": True,
}

FLAGS = ["--disciplines", "sync,lock-free", "--seeds", "1", "--steps", "3", "--engine", "inproc"]


def test_every_cell_is_run_and_reported(tmp_path: Path) -> None:
    done = offbeat.compare(toy_recipe(), out=tmp_path / "c", **SMALL)
    assert len(done.summaries) == 8 and not done.failed and not done.interrupted
    assert done.report == tmp_path / "c" / "report.html"
    text = (tmp_path / "c" / "report.md").read_text()
    assert "8 runs: sync, lock-free in 2 settings, 2 seeds." in text
    for name in done.summaries:
        assert name in text and (tmp_path / "c" / name / "config.json").exists()


def of_width(width: int = 4) -> Recipe:
    layers = (torch.nn.Linear(6, width), torch.nn.Linear(width, 3))
    return toy_recipe(lambda: torch.nn.Sequential(*copy.deepcopy(layers)))


def test_parameters_of_a_recipe_are_an_axis(tmp_path: Path) -> None:
    out = tmp_path / "c"
    small = {**SMALL, "workers": [1], "seeds": 1, "steps": 2}
    done = offbeat.compare(of_width, set={"width": [4, 8]}, out=out, **small)
    assert sorted(done.summaries) == [
        f"{discipline}-1w-1s-width={width}/seed-0"
        for discipline in ("lock-free", "sync")
        for width in (4, 8)
    ]
    text = (out / "report.md").read_text()
    assert "in 2 settings" in text and "1 worker, 1 server, set width 8" in text
    kept = json.loads((out / "sync-1w-1s-width=8" / "seed-0" / "config.json").read_text())
    assert kept["config"]["set"] == {"width": 8}
    more = offbeat.compare(of_width, set={"width": ["8", "16"]}, out=out, resume=True)
    assert len(more.summaries) == 6
    with pytest.raises(ConfigError, match="depth was not set when the comparison began"):
        offbeat.compare(of_width, set={"depth": [1]}, out=out, resume=True)
    with pytest.raises(RecipeError, match="no parameter 'widht'; did you mean 'width'"):
        offbeat.compare(of_width, set={"widht": 3}, out=tmp_path / "d", **small)
    assert not (tmp_path / "d").exists()


def test_a_flag_has_the_values_of_a_parameter_in_turn() -> None:
    given = make_grid({}, {"set": ["width=4, 8", "name=x"], "seeds": 1, "workers": [1]})
    assert given.set == {"width": ("4", "8"), "name": ("x",)}
    assert [cell.set for cell in given.cells()[:: len(DISCIPLINES)]] == [
        (("width", "4"), ("name", "x")),
        (("width", "8"), ("name", "x")),
    ]
    from_file = make_grid({"set": {"width": [4, 8], "depth": 2}}, {"set": ["width=16"]})
    assert from_file.set == {"width": ("16",), "depth": (2,)}
    with pytest.raises(ConfigError, match=r"set must be of the form NAME=VALUE,VALUE, not"):
        make_grid({}, {"set": ["width"]})


def test_options_of_train_are_an_axis(tmp_path: Path) -> None:
    out = tmp_path / "c"
    small = {**SMALL, "workers": [2], "seeds": 1, "steps": 2}
    vary = {"rule": ["mean", "median"], "local-steps": ["default", 2]}
    done = offbeat.compare("toy:recipe", vary=vary, out=out, **small)
    assert sorted(done.summaries) == [
        f"{discipline}-2w-1s-rule={rule}-local_steps={steps}/seed-0"
        for discipline, rules in (("lock-free", ["mean"]), ("sync", ["mean", "median"]))
        for rule in rules
        for steps in (2, "default")
    ]
    text = (out / "report.md").read_text()
    for variant in ("sync, median, 2 local steps", "lock-free, 2 local steps", "sync, median"):
        assert f"| {variant} |" in text, "in one table"
    more = offbeat.compare("toy:recipe", vary={"rule": "dana:0.5"}, out=out, resume=True)
    assert len(more.summaries) == 10
    with pytest.raises(ConfigError, match="lr was not varied when the comparison began"):
        offbeat.compare("toy:recipe", vary={"lr": 1}, out=out, resume=True)


def test_what_is_varied_is_written_with_commas_outside_of_brackets() -> None:
    given = make_grid({}, {"vary": ["optimizer=adamw:betas=[0.9,0.95], sgd", "local-steps=8"]})
    assert given.vary == {
        "optimizer": ("adamw:betas=[0.9,0.95]", "sgd"),
        "local_steps": ("8",),
    }


@pytest.mark.parametrize(
    ("options", "vary", "message"),
    [
        ({"lr": 1.0}, {"lr": (1, 2)}, "lr is varied, and 1.0 besides: say it once"),
        ({}, {"workers": (1, 2)}, "workers is none of the options that can be varied"),
        ({}, {"rul": ("mean",)}, "unknown option 'rul' to vary; did you mean 'rule'"),
        ({}, {"local_steps": ("x",)}, "local_steps must be a whole number"),
        ({}, {"rule": ("man",)}, "unknown rule 'man'; did you mean 'mean'"),
        ({}, {"rule": ("a:b", "a-b")}, "two values of a name are written alike"),
    ],
)
def test_what_cannot_be_varied_is_refused(
    options: dict[str, Any], vary: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_grid(Grid("r", ("sync",), (2,), (1,), 1, options, vary=vary), tmp_path)


def test_with_the_same_seed_weights_and_data_are_the_same(tmp_path: Path) -> None:
    batches: list[float] = []

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if torch.is_grad_enabled():  # the test data has its loss too
            batches.append(float(batch[0].sum()))
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    out = tmp_path / "c"
    offbeat.compare(toy_recipe(loss=loss), out=out, **{**SMALL, "workers": [1]}, keep=100)
    sync_0, lock_free_0, sync_1, lock_free_1 = (batches[i : i + 6] for i in range(0, 24, 6))
    assert sync_0 == lock_free_0 != sync_1 == lock_free_1
    weights = [
        [
            path.read_bytes()
            for path in sorted((out / name).glob("checkpoints/00000000/*.safetensors"))
        ]
        for name in ("sync-1w-1s/seed-0", "lock-free-1w-1s/seed-0", "sync-1w-1s/seed-1")
    ]
    assert weights[0] and weights[0] == weights[1] != weights[2]


def test_every_checkpoint_of_a_cell_is_scored_and_one_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "c"
    options = {**SMALL, "disciplines": ["sync"], "workers": [1], "seeds": 1, "steps": 60}
    offbeat.compare(toy_recipe(), out=out, **options, eval_every=10)
    run = out / "sync-1w-1s/seed-0"
    scored = [e["version"] for e in read_events(run / "events") if e["kind"] == "score"]
    committed = [
        e["version"] for e in read_events(run / "events") if e.get("phase") == "checkpoint"
    ]
    assert sorted(scored) == sorted(committed)[1:], "also those that were skipped"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["00000060"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["test_accuracy"] == next(
        e["metric"] for e in read_events(run / "events") if e.get("version") == 60 and "metric" in e
    )


def test_a_cell_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = subjects.train_config

    def fail_sometimes(config: Any, *args: Any, **options: Any) -> Result:
        if config.discipline == "lock-free" and config.workers == 2:
            raise NonFiniteLossError("the loss became nan")
        return train(config, *args, **options)

    monkeypatch.setattr(subjects, "train_config", fail_sometimes)
    out = tmp_path / "c"
    command = ["compare", "--recipe", "toy:recipe", *FLAGS, "--out", str(out)]
    assert main(command) == 1
    shown = capsys.readouterr()
    assert "lock-free-2w-1s/seed-0 failed: the loss became nan" in shown.err
    assert re.search(r"\[3/4\] sync, 2 workers, 1 server, seed 0: test accuracy [\d.]+", shown.out)
    text = (out / "report.md").read_text()
    assert "1 did not finish" in text and "failed: the loss became nan" in text

    monkeypatch.setattr(subjects, "train_config", train)
    kept = (out / "sync-1w-1s/seed-0/events/engine.jsonl").stat().st_mtime_ns
    assert main([*command, "--resume"]) == 0
    assert "did not finish" not in (out / "report.md").read_text()
    assert (out / "sync-1w-1s/seed-0/events/engine.jsonl").stat().st_mtime_ns == kept


def test_a_comparison_goes_on_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train, started = subjects.train_config, list[str]()

    def interrupt_third(config: Any, *args: Any, **options: Any) -> Result:
        started.append(config.run_dir)
        result = train(config, *args, **options)
        if len(started) == 3:
            return Result(result.run_dir, {**result.summary, "status": "interrupted"})
        return result

    monkeypatch.setattr(subjects, "train_config", interrupt_third)
    out = tmp_path / "c"
    assert main(["compare", "--recipe", "toy:recipe", *FLAGS, "--out", str(out)]) == 130
    assert f"offbeat compare --resume --out {out}" in capsys.readouterr().err
    end = out / "sync-2w-1s/seed-0/events/engine.jsonl"
    end.write_text(end.read_text().replace("finished", "interrupted"))
    assert main(["compare", "--out", str(out)]) == 2
    assert "go on with --resume" in capsys.readouterr().err
    assert main(["compare", "--resume", "--out", str(out), "--lr", "0.5"]) == 2
    assert "lr was None when the comparison began" in capsys.readouterr().err
    assert main(["compare", "--resume", "--out", str(out)]) == 0
    assert [Path(name).parent.name for name in started] == [
        "sync-1w-1s",
        "lock-free-1w-1s",
        "sync-2w-1s",
        "sync-2w-1s",  # anew: one that was broken off says nothing about time
        "lock-free-2w-1s",
    ]
    assert main(["compare", "--resume", "--out", str(out), "--seeds", "2"]) == 0
    assert len(started) == 9, "a grid may grow"


def test_two_comparisons_do_not_share_a_folder(tmp_path: Path) -> None:
    grid = Grid("toy:recipe", ("sync",), (1,), (1,), 1, {"steps": 1, "engine": "inproc"})
    with (
        runs.RunFolder(tmp_path).locked(),
        pytest.raises(RunDirError, match="is in use"),
    ):
        runs.run_grid(grid, tmp_path, resume=True)


# -- grids -----------------------------------------------------------------------------------------


def test_a_grid_goes_seed_by_seed() -> None:
    cells = Grid("r", ("sync", "bounded:2"), (1, 2), (1,), 2, {"seed": 7}).cells()
    assert [cell.name for cell in cells[:3]] == [
        "sync-1w-1s/seed-7",
        "bounded-2-1w-1s/seed-7",
        "sync-2w-1s/seed-7",
    ]
    assert [cell.seed for cell in cells] == [7] * 4 + [8] * 4


def test_options_go_to_the_cells_that_they_are_for(tmp_path: Path) -> None:
    options = {"rule": "sum", "slow_worker": "1:3x,3:2x", "lr": 0.2}
    grid = Grid("r", ("sync", "sync:1", "lock-free", "bounded:2"), (1, 2, 4), (1,), 1, options)
    configs, left_out = check_grid(grid, tmp_path)
    assert {(cell.discipline, cell.workers) for cell in left_out} == {("sync:1", 1)}
    by = {(cell.discipline, cell.workers): config for cell, config in configs.items()}
    assert by["sync", 2].rule == "sum" and by["lock-free", 2].rule == "mean"
    assert by["sync:1", 4].backup_workers == 1 and by["bounded:2", 2].staleness == 2
    slow = [by["sync", n].slow_worker for n in (1, 2, 4)]
    assert slow == [None, "1:3x", "1:3x,3:2x"], "one worker alone is nobody's straggler"
    assert all(config.lr == 0.2 for config in configs.values())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--disciplines", "sync,snyc"], "unknown discipline 'snyc'; did you mean 'sync'?"),
        (["--workers", "0"], "'0' is no whole number above 0"),
        (["--seeds", "none"], "'none' is no whole number"),
        (["--resume"], "say in which folder"),
        (["--resume", "--out", "/nowhere"], "there is no comparison in /nowhere"),
        (["--slow-worker", "1-3"], "must be of the form 1:3x"),
        (["--slow-worker", "4:3x", "--workers", "1,2"], "names worker 4, but there are 2"),
        (["--discipline", "sync"], "did you mean '--disciplines'"),
        (["--steps", "2", "--epochs", "2"], "give one of the two"),
        (["--target", "x"], "'x' is no number"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_option_that_the_grid_stands_in_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run_dir is not an option of a comparison"):
        offbeat.compare(toy_recipe(), out=tmp_path / "c", run_dir="x", **SMALL)
    with pytest.raises(ConfigError, match="say in which folder"):
        offbeat.compare(toy_recipe(), resume=True, **SMALL)
    file = tmp_path / "f"
    file.touch()
    with pytest.raises(RunDirError, match="is a file"):
        offbeat.compare(toy_recipe(), out=file, **SMALL)


def test_what_has_no_meaning_for_a_script_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = str(tmp_path / "train.py"), str(tmp_path / "c")
    Path(script).write_text("")
    for flags in (["--epochs", "3"], ["--set", "a=1,2"], ["--recipe", "fashion-cnn"]):
        assert main(["compare", *flags, "--out", out, "--", script, "--epochs", "3"]) == 2
        said = capsys.readouterr().err
        assert f"{flags[0][2:]} is for recipes: in a launched run that is the script's own" in said
    assert main(["compare", "--out", out, "--", str(tmp_path / "none.py")]) == 2
    assert "there is no script" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_a_comparison_of_a_script_goes_on_with_the_same_one(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("")
    script = describe_script(str(file), ["--lr", "1"])
    begun = make_grid({"seed": 3}, {"seeds": 1}, script=script)
    assert next(cell.seed for cell in begun.cells()) == 3 and begun.recipe == "train.py"
    assert begun.engine == "local"
    assert not any(config.eval_skipped for config in check_grid(begun, tmp_path)[0].values())
    (tmp_path / "compare.json").write_text(json.dumps(dataclasses.asdict(begun)))
    now = make_grid({}, {"seeds": 2}, tmp_path)
    assert now.script == script and now.seeds == 2
    assert make_grid({}, {}, tmp_path, script).script == script
    with pytest.raises(ConfigError, match=r"is of .*train.py --lr 1, not of .*train.py --lr 2"):
        make_grid({}, {}, tmp_path, describe_script(str(file), ["--lr", "2"]))
    with pytest.raises(ConfigError, match="epochs is for recipes"):
        make_grid({"epochs": 2}, {}, tmp_path)
    with pytest.raises(ConfigError, match=r"is of train.py, not of fashion-cnn"):
        make_grid({"recipe": "fashion-cnn"}, {}, tmp_path)
    assert change_of(script) is None
    file.write_text("pass")
    assert "has changed since the start" in str(change_of(script))


def test_one_discipline_under_two_names_is_refused(tmp_path: Path) -> None:
    for names in (("bounded", "bounded:1"), ("sync", "sync:0")):
        with pytest.raises(ConfigError, match="are the same"):
            check_grid(Grid("toy:recipe", names), tmp_path)


@pytest.mark.parametrize("option", [{"seed": "x"}, {"keep": "x"}, {"keep": 0}])
def test_what_is_wrong_is_told_before_anything_is_trained(
    option: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError):
        offbeat.compare("toy:recipe", out=tmp_path / "c", **{**SMALL, **option})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"target": ("los", 0.3)}, "target goes by 'los', which nothing .* did you mean 'loss'"),
        ({"target": "loss=0.3"}, "a metric's name and a number, not 'loss=0.3'"),
        ({"stop_at": "los=0.3"}, "stop_at goes by 'los', which nothing .* did you mean 'loss'"),
    ],
)
def test_a_metric_that_nothing_is_scored_by_is_told_before_anything_is_trained(
    option: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        offbeat.compare(toy_recipe(), out=tmp_path / "c", **{**SMALL, **option})
    assert not (tmp_path / "c").exists()


def test_python_goes_on_with_what_was_not_said_again(tmp_path: Path) -> None:
    out = tmp_path / "c"
    options: dict[str, Any] = {"data_dir": tmp_path, "round_timeout": math.inf, **SMALL}
    offbeat.compare("toy:recipe", out=out, **{**options, "workers": [1], "seeds": 1})
    done = offbeat.compare("toy:recipe", out=out, resume=True, steps="06", seed=0)
    assert len(done.summaries) == 2, "no larger than it was"


def test_a_comparison_goes_on_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = tmp_path / "mine.py", tmp_path / "other"
    file.write_text("from helpers import toy_recipe\nown = toy_recipe()\n")
    other.mkdir()
    monkeypatch.chdir(tmp_path)
    flags = ["compare", *FLAGS, "--workers", "1", "--out", str(tmp_path / "c")]
    assert main([*flags, "--recipe", "mine.py:own"]) == 0
    monkeypatch.chdir(other)
    again = ["compare", "--resume", "--out", str(tmp_path / "c")]
    assert main([*again, "--seeds", "2"]) == 0
    assert "has changed" not in capsys.readouterr().out
    file.write_text(file.read_text() + "# a thought\n")
    assert main([*again, "--seeds", "3", "--recipe", "../mine.py:own"]) == 0
    told = f"the recipe's file {file} has changed since the start"
    assert capsys.readouterr().out.splitlines().count(told) == 1
    configs = [json.loads(path.read_text()) for path in (tmp_path / "c").glob("*/*/config.json")]
    assert {(c["config"]["recipe"], c["recipe_file"]["path"]) for c in configs} == {
        ("mine.py:own", str(file))
    }
    assert len(configs) == 6
    (other / "mine.py").write_text("from toy import recipe as own\n")
    for wrong in ("../mine.py:recipe", "../other/mine.py:own"):
        assert main([*again, "--recipe", wrong]) == 2
        assert f"the comparison is of mine.py:own, not of {wrong}" in capsys.readouterr().err
    file.rename(other / "moved.py")
    assert main(again) == 2
    assert "say where it is: --recipe FILE.py:own" in capsys.readouterr().err
    assert main([*again, "--recipe", "moved.py:own"]) == 0


def test_a_file_that_compares_when_it_is_imported_does_not_start_itself_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Control, "in_a_role", True)
    with pytest.raises(RecipeError, match="if __name__"):
        offbeat.compare("toy:recipe", **SMALL)
    monkeypatch.setattr(Control, "in_a_role", False)
    with pytest.raises(RecipeError, match="cannot find this recipe"):
        offbeat.compare(toy_recipe(), **{**SMALL, "engine": "local"})


def test_remains_of_a_cell_make_place(tmp_path: Path) -> None:
    out = tmp_path / "c"
    offbeat.compare("toy:recipe", out=out, **{**SMALL, "seeds": 1})
    (out / "sync-1w-1s/seed-0/config.json").write_text("{")
    (out / "sync-2w-1s/seed-0").rename(tmp_path / "moved")
    end = tmp_path / "moved/events/engine.jsonl"
    end.write_text(end.read_text().replace("finished", "failed"))
    (out / "sync-2w-1s/seed-0").symlink_to(tmp_path / "moved")
    done = offbeat.compare("toy:recipe", out=out, resume=True)
    assert len(done.summaries) == 4 and not done.failed
    assert not (out / "sync-2w-1s/seed-0").is_symlink()


def test_a_cell_that_could_not_begin_changes_no_other_figure(tmp_path: Path) -> None:
    def data(config: Any) -> Any:
        if config.workers == 1:
            raise RuntimeError("not for one")
        return toy_recipe().data(config)

    def bits(model: torch.nn.Module, batch: Any) -> tuple[float, float]:
        return float(torch.nn.functional.cross_entropy(model(batch[0]), batch[1])), 1.0

    done = offbeat.compare(toy_recipe(data=data, metric=bits), out=tmp_path / "c", **SMALL)
    assert len(done.failed) == 4 and len(done.summaries) == 4
    text = done.report.with_suffix(".md").read_text()
    assert "test bits" in text and "accuracy" not in text
    assert "| 2 workers, 1 server | sync |" in text


def test_a_broken_description_is_refused(tmp_path: Path) -> None:
    (tmp_path / "compare.json").write_text('{"recipe": 1}')
    with pytest.raises(RunDirError, match="describes no comparison"):
        make_grid({}, {}, tmp_path)


# -- what a person sees ----------------------------------------------------------------------------


def test_what_is_left_is_judged_by_the_same_cell_first() -> None:
    took = {Cell("sync", 1, 1, 0): 10.0, Cell("sync", 4, 1, 0): 40.0}
    assert expected_s(Cell("sync", 4, 1, 1), took) == 40.0
    assert expected_s(Cell("lock-free", 2, 1, 0), took) == 25.0
    assert [minutes(s) for s in (45, 89, 100, 3540, 7260)] == [
        "45 s",
        "89 s",
        "2 min",
        "59 min",
        "2 h 1 min",
    ]


def test_a_pipe_gets_a_line_for_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    overview = make_overview("toy", 2, quiet=False)
    overview.begin(1, "sync, 1 worker", None)
    display = overview.display("title", 10)
    display.update(
        Status(
            num_gradients=5,
            num_examples=5,
            at_s=1.0,
            loss=None,
            staleness=None,
            metric_name="accuracy",
            score=None,
        )
    )
    display.notice("worker 1 was killed")
    display.close()
    overview.end("sync, 1 worker: done")
    overview.begin(2, "lock-free, 1 worker", 100)
    overview.close()
    assert capsys.readouterr().out.splitlines() == [
        "toy: 2 runs",
        "[1/2] sync, 1 worker",
        "worker 1 was killed",
        "[1/2] sync, 1 worker: done",
        "[2/2] lock-free, 1 worker; about 2 min left",
    ]


# -- unlike machines, on one -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slow_worker": "2:3x"}, "names worker 2, but there are 2, counted from 0"),
        (
            {"slow_worker": "4:3x", "workers": "2..4", "engine": "ray"},
            "names worker 4, but there are 4, counted from 0",
        ),
        ({"slow_worker": "1:0.5x"}, "must say 1 or more, not 0.5"),
        ({"slow_worker": "1:3"}, "must be of the form 1:3x, not '1:3'"),
        ({"kill_worker": "1@0"}, "must say 1 or more"),
        ({"kill_worker": "1:200"}, "must be of the form 1@200"),
        ({"kill_worker": "1@2", "engine": "inproc"}, "needs the engine local"),
        ({"lying_worker": "2:-3x"}, "names worker 2, but there are 2, counted from 0"),
        ({"lying_worker": "1:-3"}, "must be of the form 1:-100x, not '1:-3'"),
    ],
)
def test_what_cannot_be_injected_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_config({"workers": 2, **given})


def test_a_slow_worker_takes_so_many_times_as_long(tmp_path: Path) -> None:
    """By the time that it measured for itself, not by how quick this machine is."""

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(0.01)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    result = offbeat.train(
        toy_recipe(loss=loss),
        workers=2,
        steps=8,
        slow_worker="1:4x",
        run_dir=tmp_path / "r",
        quiet=True,
    )
    steps = [e for e in read_events(result.run_dir / "events") if e["kind"] == "step"]
    slow = [event["compute_s"] for event in steps if event["worker"] == 1]
    assert len(slow) == 8 and min(slow) >= 4 * 0.01
    quick = sorted(event["compute_s"] for event in steps if event["worker"] == 0)
    assert quick[0] < 4 * 0.01, "the other one is not held up"


class Watched(threading.Event):
    """Remembers how long it was waited for, and lets nobody wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return self.is_set()


@pytest.mark.parametrize(
    ("rank", "incarnation", "waits", "killed", "pushed"),
    [
        (0, 0, [], False, 2.0),
        (1, 0, [6.0], True, 2.0),
        (1, 1, [6.0], False, 2.0),
        (2, 0, [], True, -20.0),
    ],
)
def test_faults_are_injected_into_the_workers_that_are_named_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    incarnation: int,
    waits: list[float],
    killed: bool,
    pushed: float,
) -> None:
    """By what they did themselves: computing from 1 s to 2 s, and 2 s of preparing before."""
    kills: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: kills.append((pid, number)))
    config = make_config(
        {
            "workers": 3,
            "slow_worker": "1:3x",
            "kill_worker": "1@30,2@30",
            "lying_worker": "2:-10x",
        }
    )
    stop = Watched()
    faults = make_faults(config, rank, incarnation, clock=lambda: 2.0, stop=stop)
    for step in (29, 31):
        faults.begin(step)
    assert kills == []
    faults.begin(30)
    assert kills == ([(os.getpid(), signal.SIGKILL)] if killed else [])
    faults.computed(1.0, prepare_s=2.0)
    assert stop.waits == waits
    gradient = [torch.full((3,), 2.0), torch.full((1,), 2.0)]
    faults.pushing(gradient)
    assert torch.cat(gradient).tolist() == [pushed] * 4


def test_who_looks_on_slows_a_worker_down_in_the_midst_of_it() -> None:
    stop, orders = Watched(), Standing()
    config = make_config({"workers": 2, "slow_worker": "1:3x"})
    for rank in (0, 1):
        faults = make_faults(config, rank, 0, clock=lambda: 2.0, stop=stop, orders=orders)
        faults.computed(1.0, prepare_s=0.0)
        orders.tell({"order": {"what": "slow", "worker": rank, "factor": 5}})
        faults.computed(1.0, prepare_s=0.0)
        orders.tell({"order": {"what": "slow", "worker": rank, "factor": 1}})
        faults.computed(1.0, prepare_s=0.0)
    assert stop.waits == [4.0, 2.0, 4.0], "and then it is as quick as it can be"


@pytest.mark.slow
def test_a_straggler_holds_up_sync_alone_and_a_backup_worker_helps(tmp_path: Path) -> None:
    """In gradients that the quick worker makes while it and the slow one are both at work: counted,
    not timed."""

    def share_of_quick(discipline: str) -> float:
        result = offbeat.train(
            "toy:recipe",
            discipline=discipline,
            workers=3,
            steps=60,
            slow_worker="2:20x",
            run_dir=tmp_path / discipline.replace(":", "-"),
            quiet=True,
        )
        steps = [e for e in read_events(result.run_dir / "events") if e["kind"] == "step"]
        quick = [e["start_s"] for e in steps if e["worker"] == 0]
        slow = [e["start_s"] for e in steps if e["worker"] == 2]
        return sum(s <= max(quick) for s in slow) / len(slow)

    assert share_of_quick("sync") > 0.9, "side by side to the end"
    assert share_of_quick("apply-reply") < 0.5
    assert share_of_quick("lock-free") < 0.5
    assert share_of_quick("sync:1") < 0.7


@pytest.mark.slow
def test_a_worker_that_is_killed_on_purpose_comes_back_and_nothing_is_lost(tmp_path: Path) -> None:
    result = offbeat.train(
        "toy:recipe",
        workers=2,
        steps=60,
        kill_worker="1@30",
        run_dir=tmp_path / "r",
        quiet=True,
    )
    assert result.summary["restarts"] == 1 and result.summary["status"] == "finished"
    applied = [
        (event["worker"], event["sequence"])
        for event in read_events(result.run_dir / "events")
        if event["kind"] == "push" and event["outcome"] == "applied"
    ]
    assert sorted(applied) == [(rank, step) for rank in (0, 1) for step in range(1, 61)]


@pytest.mark.slow
def test_a_comparison_in_processes_is_stopped_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "c"
    command = [sys.executable, "-m", "offbeat", "compare", "--recipe", "toy:recipe"]
    flags = [
        "--disciplines",
        "sync,apply-reply",
        "--workers",
        "2",
        "--seeds",
        "1",
        "--steps",
        "400",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    running = subprocess.Popen(
        [*command, *flags, "--out", str(out)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("[2/2]"):
            break
    events = out / "apply-reply-2w-1s/seed-0/events"
    deadline_s = time.monotonic() + 60
    while not list(events.glob("worker*")) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    rest = running.stdout.read()
    running.stdout.close()
    assert running.wait(60) == 130, rest
    assert "go on with: offbeat compare --resume" in rest
    done = subprocess.run(
        [*command[:-2], "--resume", "--out", str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "[1/2]" not in done.stdout, "what has finished is kept"
    described = json.loads((out / "compare.json").read_text())
    assert described["disciplines"] == ["sync", "apply-reply"]
