"""offbeat simulate: from a run's folder to a table, the same to the byte each time."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.bench import simulate as bench
from offbeat.bench.report import write_run
from offbeat.cli import main
from offbeat.errors import ConfigError
from offbeat.family import BUILT_IN
from offbeat.simulation.prediction import named


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two workers: 8 ms of computing, 1 of preparing, 0.3 at the server, 1 of exchange."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    write_run(folder, gradients=600, workers=2, servers=1, seed=0, discipline="apply-reply")
    return folder


def test_what_the_run_was_comes_out_again(run: Path) -> None:
    found = offbeat.simulate(run)
    (prediction,) = found.predictions
    measured = found.recorded.figures.gradients_per_s
    assert prediction.gradients_per_s == pytest.approx(measured, rel=0.03)
    assert prediction.gradients_per_s == found.again.gradients_per_s
    assert prediction.staleness["mean"] == pytest.approx(1, abs=0.05)


def test_more_workers_of_machines_of_their_own_are_so_much_quicker(run: Path) -> None:
    found = offbeat.simulate(run, workers=[2, 4, 8], steps=200)
    rates = [prediction.gradients_per_s for prediction in found.predictions]
    assert rates[1] / rates[0] == pytest.approx(2, rel=0.03)
    assert rates[2] / rates[0] == pytest.approx(4, rel=0.03)
    shared = offbeat.simulate(run, workers=[4, 8], cores=2, steps=200).predictions
    assert shared[1].gradients_per_s == pytest.approx(shared[0].gradients_per_s, rel=0.03)


def test_a_straggler_is_waited_for_in_sync_alone(run: Path) -> None:
    asked: dict[str, Any] = {"disciplines": ["sync", "apply-reply"], "workers": [4], "steps": 200}
    even = offbeat.simulate(run, **asked).predictions
    uneven = offbeat.simulate(run, slow_worker="3:3x", **asked).predictions
    kept = [b.gradients_per_s / a.gradients_per_s for a, b in zip(even, uneven, strict=True)]
    assert kept[0] < 0.4 < 0.8 < kept[1] < 0.87


def test_all_are_all_of_offbeat_s_own_that_have_servers() -> None:
    found = named(["bounded:3", "all"])
    assert found[0] == "bounded:3" and len(found) == len(set(found))
    kinds = {name.partition(":")[0] for name in found}
    assert kinds == {name for name, kind in BUILT_IN.items() if kind.served}


def test_a_discipline_of_one_s_own_is_simulated(run: Path, tmp_path: Path) -> None:
    file = Path(__file__).parents[2] / "examples" / "drop_stale.py"
    found = offbeat.simulate(run, disciplines=[f"{file}:DropStale:1"], workers=[8], steps=100)
    assert max(found.predictions[0].staleness["max"] or 0, 1) == 1
    assert found.predictions[0].dropped > 0.5


ASKED = ["--workers", "1,5", "--servers", "1,2", "--disciplines", "sync:1,bounded,lock-free"]


def test_the_command_prints_a_table_and_writes_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = [*ASKED, "--rates", "inf,1", "--steps", "30", "--seed", "3", "--out", str(out)]
    assert main(["simulate", str(run), *arguments, "--delays", "5"]) == 2
    assert "how many bytes a gradient has" in capsys.readouterr().err
    del arguments[arguments.index("--rates") : arguments.index("--rates") + 2]
    assert main(["simulate", str(run), *arguments, "--delays", "0,20"]) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[0].split()[:3] == ["discipline", "workers", "servers"]
    rows = [line.split() for line in lines[1:-4]]
    assert len(rows) == 2 * 2 * 5 and rows[0][0] == "bounded:1"
    assert told.err.count("left out sync:1, 1 workers") == 2
    assert "gradients/s measured" in lines[-4]
    written = {path.name for path in out.iterdir()}
    assert written == {"simulation.html", "simulation.md", "simulation.json"}
    cells = json.loads((out / "simulation.json").read_text())["cells"]
    assert len(cells) == len(rows)
    assert {cell["delay_ms"] for cell in cells} == {0.0, 20.0}
    page = (out / "simulation.html").read_text()
    assert page.count("<svg viewBox") >= 3 * 4 and "nan" not in page.lower().replace("nano", "")


def test_the_same_question_has_the_same_answer_to_the_byte(run: Path, tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate(("0", "0", "1")):
        out = tmp_path / str(number)
        arguments = [*ASKED, "--steps", "20", "--seed", seed, "--out", str(out)]
        command = [sys.executable, "-m", "offbeat", "simulate", str(run), *arguments]
        environment = {**os.environ, "PYTHONHASHSEED": str(number + 1)}
        done = subprocess.run(command, capture_output=True, timeout=60, env=environment)
        assert done.returncode == 0, done.stderr
        files = {path.name: path.read_bytes() for path in sorted(out.iterdir())}
        found.append((done.stdout.replace(str(out).encode(), b"OUT"), files))
    assert found[0] == found[1]
    assert found[0] != found[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "0"], "no whole number above 0"),
        (["--servers", "2,x"], "no whole number above 0"),
        (["--disciplines", "snyc"], "did you mean"),
        (["--disciplines", "allreduce"], "has no servers"),
        (["--disciplines", "sync:2"], "leave nobody to wait for"),
        (["--cores", "0"], "no whole number above 0"),
        (["--rates", "0"], "no number above 0"),
        (["--delays", "-1"], "no number of milliseconds"),
        (["--slow-worker", "5:3x"], "slow_worker"),
        (["--slow-worker", "fast"], "slow_worker"),
        (["--worker", "4"], "did you mean"),
    ],
)
def test_wrong_flags_are_told_in_one_line(
    run: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(run), *arguments]) == 2
    told = capsys.readouterr()
    assert words in told.err and told.err.count("\n") == 1, told.err
    assert not told.out


def test_no_run_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(tmp_path)]) == 2
    assert "is that a run?" in capsys.readouterr().err


# -- the benchmark ---------------------------------------------------------------------------------


def test_the_benchmark_asks_for_six_runs_at_least_that_do_not_calibrate() -> None:
    for suite in bench.SUITES.values():
        assert suite.calibration not in suite.cells and len(suite.cells) >= 6
        assert len({cell.name for cell in suite.cells}) == len(suite.cells)
    assert bench.SUITES["apart"].cores == math.inf
    with pytest.raises(ConfigError, match="no cell is like"):
        bench.bench_simulate(recipes=["apart"], cells=["snyc-*"], seconds=1, rounds=1)


@pytest.mark.slow
def test_the_benchmark_measures_what_it_predicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    arguments = ["--recipes", "apart", "--cells", "sync-4w-1s,apply-reply-8w-*"]
    arguments += ["--rounds", "1", "--seconds", "1", "--json", str(file)]
    assert main(["bench", "simulate", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[3:-1]] == [
        "sync-4w-1s",
        "apply-reply-8w-1s",
        "apply-reply-8w-2s",
    ]
    for row in json.loads(file.read_text())["rows"]:
        assert row["ratio"]["median"] == pytest.approx(
            row["predicted"]["median"] / row["gradients/s"]["median"]
        )
        assert 0.5 < row["ratio"]["median"] < 2
