"""The benchmarks run, and their figures are what they say. How fast anything is, no test asks."""

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from recording import Pretender

from offbeat.bench import bars, contenders, exchange, gpu, network, recipes, rig
from offbeat.cli import main
from offbeat.cli.flags import BENCH_RECIPES, PEER_RECIPES, PEERS
from offbeat.config import make_config
from offbeat.errors import RunError
from offbeat.recipes.base import load_recipe
from offbeat.run.making import make_job


@pytest.mark.slow
def test_exchanges_are_timed_over_every_transport(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    arguments = ["--sizes", "0.01", "--rounds", "3", "--json", str(file)]
    assert main(["bench", "exchange", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "cores" in lines[0] and "n = 3" in lines[-1]
    assert [line.split()[0] for line in lines[2:-1]] == ["unix", "tcp", "inproc"]
    assert max(map(len, lines)) <= 80
    for row in json.loads(file.read_text())["rows"]:
        times = zip(row["exchange, ms"]["rounds"], row["two copies, ms"]["rounds"], strict=True)
        assert row["ratio"]["rounds"] == pytest.approx([a / b for a, b in times])
        assert sorted(row["ratio"]["rounds"])[1] == row["ratio"]["median"]


def test_an_update_that_was_lost_on_the_way_is_noticed() -> None:
    with exchange.joined("inproc", 0.01) as pair:
        pair.time_round()
        pair.check()
        pair.num_done += 1
        with pytest.raises(RunError, match="not what the exchanges should have made"):
            pair.check()


@pytest.mark.slow
def test_training_is_compared_with_the_ceiling_and_ddp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rig.CALIBRATION_STEPS, "mnist-sigmoid", 30)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    # torch keeps a cache of its own where temporary files are, and may make it at any time
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path.parent / "torch"))
    file = tmp_path / "found.json"
    arguments = ["--disciplines", "bounded:1", "--rounds", "1", "--seconds", "1"]
    assert main(["bench", "train", *arguments, "--batch-size", "8", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:-1]] == ["ceiling", "bounded:1", "ddp"]
    assert max(map(len, lines)) <= 80
    rows = json.loads(file.read_text())["rows"]
    assert all(row["gradients/s"]["median"] > 0 for row in rows)
    assert [rows[0]["of the ceiling"]["median"], rows[2]["times ddp"]["median"]] == [1.0, 1.0]
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"], "nothing is left behind"


@pytest.mark.slow
def test_promises_are_timed_beside_runs_without(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rig.CALIBRATION_STEPS, "mnist-sigmoid", 50)
    arguments = ["--disciplines", "sync,buffer", "--rounds", "1", "--seconds", "0.5"]
    assert main(["bench", "durable", *arguments]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:-1]] == [
        ["sync", "applied"],
        ["sync", "durable"],
        ["buffer", "applied"],
        ["buffer", "durable"],
    ]


@pytest.mark.slow
def test_a_loop_of_ones_own_is_timed_beside_a_recipe(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rig.CALIBRATION_STEPS, "mnist-sigmoid", 50)
    arguments = ["--disciplines", "lock-free", "--rounds", "1", "--seconds", "0.5"]
    assert main(["bench", "launch", *arguments]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:-1]] == [
        ["lock-free", "recipe"],
        ["lock-free", "script"],
        ["lock-free", "script,"],
    ]
    assert max(map(len, lines)) <= 80


@pytest.mark.slow
def test_disciplines_are_timed_beside_what_else_there_is(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(rig.CALIBRATION_STEPS, "mnist-sigmoid", 100)
    plot, others = tmp_path / "peers.svg", "ddp,hogwild,rpc,rpc-async"
    arguments = ["--disciplines", "allreduce", "--others", others, "--plot", str(plot)]
    arguments += ["--recipes", "mnist-sigmoid", "--rounds", "1", "--seconds", "2"]
    assert main(["bench", "peers", *arguments]) == 0
    lines = capfd.readouterr().out.splitlines()
    names = [line.split()[1] for line in lines[2:-1]]
    assert names == ["ceiling", "allreduce", *others.split(",")]
    assert max(map(len, lines)) <= 80
    root = ElementTree.fromstring(plot.read_text())
    shown = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"allreduce", *others.split(",")} < shown


def test_all_that_there_is_to_be_beside_has_a_flag() -> None:
    assert {contenders.CEILING, *PEERS} == set(contenders.CONTENDERS)
    assert set(PEER_RECIPES) | set(BENCH_RECIPES) == set(rig.CALIBRATION_STEPS)


def test_bars_are_as_long_as_medians_and_whiskers_reach_from_least_to_greatest() -> None:
    panel = bars.Bars("a < b", {"one": [0.5, 2.0, 1.0], "two": [0.25]})
    root = ElementTree.fromstring(bars.draw([panel, panel]))
    first, _ = root.findall("{*}g")
    one, two = (float(rect.attrib["width"]) for rect in first.findall("{*}rect"))
    assert (one / two, first.findtext("{*}text")) == (pytest.approx(4, rel=0.01), "a < b")
    line, whisker, _ = (path.attrib["d"] for path in first.findall("{*}path"))
    low, high = (float(x) - bars.LEFT for x in re.findall(r"[MH]([\d.]+)", whisker))
    at_one = float(line[1:].split()[0]) - bars.LEFT
    assert (low, high, at_one) == pytest.approx((one / 2, 2 * one, one), abs=0.2)


def test_a_rate_is_that_of_the_time_in_which_all_workers_were_at_work() -> None:
    early = [0.1 * step for step in range(1, 101)]  # 10 a second, until 10.0
    late = [5.0 + 0.5 * step for step in range(1, 21)]  # 2 a second; warm at 6.5
    assert rig.rate([early, late]) == pytest.approx(12, rel=0.05)
    with pytest.raises(RunError, match="give more --seconds"):
        rig.rate([early, [11.0, 12.0]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["exchange", "--transports", "unix,tpc"], "unknown 'tpc'; did you mean 'tcp'?"),
        (["exchange", "--sizes", "4,0"], "'0' is no number above 0"),
        (["exchange", "--round", "3"], "unknown argument '--round'; did you mean '--rounds'?"),
        (["train", "--disciplines", "synk"], "unknown discipline 'synk'; did you mean 'sync'?"),
        (["train", "--workers", "0"], "'0' is no whole number above 0"),
        (["train", "--json", "no/such/folder"], "there is no such folder"),
    ],
)
def test_what_is_wrong_with_the_flags_is_said_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("recipe", "size"), [("mnist_sigmoid", 79_510), ("convnet", 1_070_186), ("wide", 25_071_430)]
)
def test_the_models_are_as_large_as_they_should_be(recipe: str, size: int) -> None:
    model = getattr(recipes, recipe).model()
    assert sum(parameter.numel() for parameter in model.parameters()) == size


@pytest.mark.slow
def test_workers_on_a_gpu_are_timed_beside_bare_loops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On a CPU that pretends, and a smaller model."""
    monkeypatch.setattr(gpu, "find_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(gpu, "make_recorder", lambda device: Pretender())
    monkeypatch.setattr(gpu, "RECIPE", "offbeat.bench.recipes:mnist_sigmoid")
    monkeypatch.setattr(gpu, "CALIBRATION_STEPS", 40)
    file = tmp_path / "found.json"
    options = ["--workers", "1,2", "--disciplines", "lock-free", "--seconds", "0.1"]
    assert main(["bench", "gpu", *options, "--rounds", "2", "--json", str(file)]) == 0
    names = ["bare, eager", "bare, captured", "bare, 1 thread", "bare, 2 threads"]
    names += ["1 worker, lock-free", "2 workers, lock-free"]
    rows = json.loads(file.read_text())["rows"]
    assert [row[""] for row in rows] == names
    assert rows[1]["of the captured loop"]["rounds"] == [1, 1]
    assert rows[3]["of bare threads"]["rounds"] == [1, 1] and rows[1]["of bare threads"] == ""
    assert all(row["CPU ms per gradient"]["median"] > 0 for row in rows)
    assert "2 workers, lock-free" in capsys.readouterr().out


def test_a_bare_loop_learns() -> None:
    """Or it would be no yardstick: its rate is that of the same work."""
    job = make_job(make_config({"steps": 1, "lr": 0.3}), load_recipe("fashion-cnn"))
    assert job.train is not None
    batch = next(job.train.in_order(500))
    bare = gpu._Bare(job, torch.device("cpu"), Pretender())
    before = job.recipe.loss(bare._model.module, batch).item()
    for _ in range(60):
        bare.step()
    assert job.recipe.loss(bare._model.module, batch).item() < before - 0.3


def test_the_normalisations_are_timed_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "norm", "--batch-size", "2", "--rounds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["normalisation", "torch's", "offbeat's"]
    assert lines[2].split()[-2:] == ["1.00", "(1.00..1.00)"]


def test_a_report_is_timed_and_the_files_are_weighed(capsys: pytest.CaptureFixture[str]) -> None:
    """Files that are full are packed: what is read of them is the same."""
    assert main(["bench", "report", "--runs", "1", "--gradients", "3000", "--rounds", "1"]) == 0
    header, row = capsys.readouterr().out.splitlines()[1:3]
    assert header.split("  ")[0] == "runs"
    runs, servers, gradients, num_mb, *_ = row.split()
    assert (runs, servers, gradients) == ("1", "2", "3,000")
    assert 0.1 < float(num_mb) < 3


@pytest.mark.slow
def test_a_long_run_is_weighed_at_its_beginning_and_at_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    assert main(["bench", "long", "--updates", "8000", "--json", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("8,000")
    (row,) = json.loads(file.read_text())["rows"]
    first, last = row["first tenth, /s"]["median"], row["last tenth, /s"]["median"]
    assert row["last of first"]["median"] == last / first
    for who in ("command", "evaluator 0", "master 0", "ps 0", "worker 1"):
        assert row[f"{who}, MB at the end"]["median"] > 10


@pytest.mark.slow
def test_starts_are_timed_forked_and_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    assert main(["bench", "start", "--workers", "2", "--rounds", "1", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:-1]] == [["2", "forked"], ["2", "anew"]]
    assert max(map(len, lines)) <= 80
    forked, anew = json.loads(file.read_text())["rows"]
    work, back = "all at work, s", "back again, s"
    assert forked["of anew"]["median"] == forked[work]["median"] / anew[work]["median"]
    assert anew["of anew"]["median"] == 1.0
    assert all(0 < row[back]["median"] < row[work]["median"] for row in (forked, anew))


def test_networks_are_timed_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("zmq")
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    file = tmp_path / "found.json"
    arguments = ["--sizes", "0.01", "--rounds", "2", "--json", str(file)]
    assert main(["bench", "network", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:-1]] == ["tcp", "gloo", "pyzmq", "tls"]
    rows = json.loads(file.read_text())["rows"]
    ours = rows[0]["there and back, ms"]["rounds"]
    for row in rows:
        times = zip(row["there and back, ms"]["rounds"], ours, strict=True)
        assert row["times tcp's"]["rounds"] == pytest.approx([a / b for a, b in times])
    with pytest.raises(RunError, match="did not bring"):
        network.check("tcp", torch.ones(2), network.ANSWER)
