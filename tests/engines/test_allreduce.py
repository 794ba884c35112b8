"""Workers without servers: the same as sync to within rounding, and a run like any other, whoever
is stopped, killed or through before the others."""

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import SUPPORT, LocalRun, leftovers

import offbeat
from offbeat.api import train_config
from offbeat.cli import main
from offbeat.config import make_config
from offbeat.engines.forkserver import ForkServer, fork_server
from offbeat.errors import ConfigError, NonFiniteLossError
from offbeat.run.checkpoint import newest_checkpoint
from offbeat.run.events import read_events
from offbeat.run.rundir import RunFolder

RECIPES = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
import torch
from torch import nn
from helpers import cross_entropy, toy_data, toy_recipe
from offbeat import SGD, Adam, cosine, plateau
odd = toy_data(241)  # of two workers one has a batch more than the other
class Norm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) if len(x) > 1 else x
def normed():
    return nn.Sequential(nn.Linear(6, 16), Norm(16), nn.ReLU(), nn.Linear(16, 3))
def make(**fields):
    return toy_recipe(model=normed, data=lambda config: (odd, odd), epochs=3, **fields)
momentum = make(optimizer=SGD(lr=0.05, momentum=0.9), ema=0.9, schedule=cosine())
adam = make(optimizer=Adam(lr=0.01, eps=1e-4))  # or it would make steps of rounding alone
falling = make(optimizer=SGD(lr=0.1), schedule=plateau(patience=0, threshold=0.5))
class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.common = nn.Linear(6, 3)
        self.more = nn.Linear(6, 3)
        self.never = nn.Linear(6, 3)
    def forward(self, x):
        return self.common(x) + (self.more(x) if x[0, 0] > 0 else 0)
halves = toy_recipe(model=Halves, optimizer=SGD(lr=0.05, weight_decay=0.1), epochs=3)
def losing(model, batch):
    losing.count = getattr(losing, "count", 0) + 1
    return cross_entropy(model, batch) * (float("nan") if losing.count > 9 else 1)
nan = toy_recipe(loss=losing, epochs=20)
def huge(model, batch):
    huge.count = getattr(huge, "count", 0) + 1
    loss = cross_entropy(model, batch)
    return loss * 1e25 - (loss * 1e25).detach() + loss.detach() if huge.count == 4 else loss
unusable = toy_recipe(loss=huge, epochs=1)
sparse = toy_recipe(model=lambda: nn.Embedding(4, 3, sparse=True))
long = toy_recipe(model=normed, optimizer=SGD(lr=0.05, momentum=0.9), epochs=20)
plain = toy_recipe(optimizer=SGD(lr=0.05, momentum=0.9), epochs=3)
class Zeros(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1 << 20))
counting = toy_recipe(
    model=Zeros,
    loss=lambda model, batch: model.weight.sum(),
    metric=lambda model, batch: (float(model.weight[0]), 1),
    optimizer=SGD(lr=1.0),
)
"""
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
Train = Callable[..., offbeat.Result]


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer | None]:
    with fork_server("local") as server:
        yield server


@pytest.fixture
def train(forks: ForkServer | None, tmp_path: Path) -> Train:
    """Runs of one thread each, in folders that are numbered."""
    file = tmp_path / "recipes.py"
    file.write_text(RECIPES)
    numbers = itertools.count()

    def train(recipe: str, discipline: str, **options: Any) -> offbeat.Result:
        given: dict[str, Any] = {"recipe": f"{file}:{recipe}", "discipline": discipline}
        given |= {"run_dir": str(tmp_path / f"run-{next(numbers)}"), "threads": 1, "quiet": True}
        given |= {} if discipline == "allreduce" else {"engine": "inproc"}
        return train_config(make_config(given, options), forks=forks)

    return train


def assert_close(one: offbeat.Result, other: offbeat.Result) -> None:
    for ema in (False, True) if one.summary["recipe"].endswith("momentum") else (False,):
        mine = offbeat.load(one.run_dir, ema=ema)
        theirs = offbeat.load(other.run_dir, ema=ema)
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], **TOLERANCE, msg=name)


def log_of(run: offbeat.Result) -> str:
    return (run.run_dir / "logs" / "master.log").read_text()


# -- the same as sync ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("recipe", ["momentum", "adam"])
def test_it_learns_what_sync_learns_to_within_rounding(
    train: Train, recipe: str, workers: int
) -> None:
    """With batch norm, a schedule, a moving average, and a worker that has a batch more."""
    mine, theirs = (train(recipe, kind, workers=workers) for kind in ("allreduce", "sync"))
    assert_close(mine, theirs)
    one, other = mine.summary, theirs.summary
    for key in ("gradients", "updates", "dropped", "not_kept", "status", "kept"):
        assert one[key] == other[key], key
    assert one["test_accuracy"] == pytest.approx(other["test_accuracy"], abs=0.01)
    assert (one["num_servers"], one["staleness"]["max"]) == (0, 0)
    assert leftovers(mine.run_dir) == [] and not RunFolder(mine.run_dir).meetings()
    where = "with gloo, in the CPU's memory: worker 0 computes on the CPU"
    assert ("gradients are added up" in log_of(mine)) is (workers > 1)
    assert (where in log_of(mine)) is (workers > 1)


@pytest.mark.parametrize(
    "options",
    [{"clip_norm": 0.3}, {"clip_value": 0.01}, {"accumulate": 2}, {"rule": "sum", "lr": 0.01}],
)
def test_so_it_does_with_whatever_makes_a_gradient_another_one(
    train: Train, options: dict[str, Any]
) -> None:
    mine, theirs = (train("momentum", kind, workers=2, **options) for kind in ("allreduce", "sync"))
    assert_close(mine, theirs)
    assert mine.summary["clipped"] == theirs.summary["clipped"]


def test_a_tensor_that_one_worker_lacks_is_zero_there_and_one_that_all_lack_is_left_alone(
    train: Train,
) -> None:
    mine, theirs = (
        train("halves", kind, workers=3, batch_size=1) for kind in ("allreduce", "sync")
    )
    assert_close(mine, theirs)
    assert torch.equal(*(offbeat.load(run.run_dir)["never.weight"] for run in (mine, theirs)))


def test_an_unusable_gradient_counts_as_having_come(train: Train) -> None:
    mine = train("unusable", "allreduce", workers=2)
    assert mine.summary["rejected"] == 2, "the fourth of each, in one round, which makes no update"
    assert mine.summary["updates"] == mine.summary["gradients"] // 2 - 1
    (kept,) = mine.summary["kept"]
    assert kept["gradients"] == kept["applied"] + kept["rejected"] == mine.summary["gradients"]


@pytest.mark.slow
def test_a_rate_that_goes_by_scores_falls_everywhere(train: Train) -> None:
    result = train("falling", "allreduce", workers=2, epochs=200, eval_every=20)
    rates: dict[int, set[float]] = {}
    for push in read_events(result.run_dir / "events", "worker-*"):
        if push["kind"] == "push":
            rates.setdefault(push["version"], set()).add(push["lr"])
    assert all(len(found) == 1 for found in rates.values()), "every update has one rate"
    assert min(min(found) for found in rates.values()) < 0.1


# -- what makes no sense ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": 2}, "allreduce has no servers: leave servers 2 out"),
        ({"engine": "inproc"}, "allreduce needs the engine local, .*; not inproc"),
        ({"engine": "cluster"}, "allreduce needs the engine local, .*; not cluster"),
        ({"partition": "tensors"}, "leave partition tensors out"),
        ({"backup_workers": 1}, "backup_workers belongs to the discipline sync"),
        ({"round_timeout": 1.0}, "round_timeout belongs to the discipline sync"),
        ({"staleness": 1.0}, "staleness belongs to the discipline bounded"),
        ({"discipline": "allreduce:1"}, "allreduce takes no number behind its name"),
        ({"rule": "a.b:Rule"}, "rule must be mean or sum"),
    ],
)
def test_what_takes_servers_is_refused_in_a_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        make_config({"discipline": "allreduce", "workers": 3}, options)
    assert "\n" not in str(refused.value)


def test_a_role_of_a_cluster_refuses_it_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--ps", "127.0.0.1:1", "--worker", "127.0.0.1:2", "--discipline", "allreduce"]
    assert main(["role", "master", *flags, "--run-dir", str(tmp_path / "run")]) == 2
    assert "allreduce needs the engine local" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_rows_are_refused(train: Train) -> None:
    with pytest.raises(ConfigError, match="adds up whole gradients, not rows"):
        train("sparse", "allreduce", engine="local")


def test_a_loop_of_ones_own_is_told_of_ddp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    assert main(["launch", "--discipline", "allreduce", str(script)]) == 2
    assert "torch's DistributedDataParallel does the same there" in capsys.readouterr().err


# -- failing, dying, stopping ----------------------------------------------------------------------


def test_a_loss_that_is_no_number_ends_the_run_at_once(train: Train) -> None:
    began_s = time.monotonic()
    with pytest.raises(NonFiniteLossError, match=r"worker \d at step 10"):
        train("nan", "allreduce", workers=3)
    assert time.monotonic() - began_s < 30, "nobody waits for a worker that is gone"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LocalRun]]:
    runs: list[LocalRun] = []

    def start(*flags: str, recipe: str = "long", run: str = "r") -> LocalRun:
        given = flags if "--resume" in flags else ("--discipline", "allreduce", *flags)
        runs.append(LocalRun(tmp_path, *given, recipe=recipe, run=run, source=RECIPES))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
        for pid in run.pids():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["worker --index 1", "master"])
def test_when_one_is_killed_all_go_on_from_the_newest_checkpoint(
    start: Callable[..., LocalRun], role: str
) -> None:
    flags = ("--workers", "3", "--steps", "500", "--checkpoint-every", "20", "--eval-every", "0")
    run = start(*flags)
    run.wait_for_steps(60, 0, 1, 2)
    run.kill(role)
    assert run.wait() == 0, run.text()
    assert "was killed by SIGKILL: starting all workers again (1 of 3)" in run.text()
    assert leftovers(run.run_dir) == []
    summary = run.summary()
    assert (summary["status"], summary["restarts"], summary["updates"]) == ("finished", 1, 500)
    assert summary["kept"][0]["gradients"] == summary["kept"][0]["applied"] == 1500
    assert {push["incarnation"] for push in run.events("push")} == {0, 1}
    whole = start(*flags, run="whole")
    assert whole.wait() == 0
    mine, theirs = offbeat.load(run.run_dir), offbeat.load(whole.run_dir)
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), f"{name}: as if nobody had died"


@pytest.mark.slow
def test_a_hung_worker_is_killed_and_all_are_started_again(
    start: Callable[..., LocalRun],
) -> None:
    run = start("--steps", "1500", "--worker-timeout", "1.5", "--checkpoint-every", "50")
    run.wait_for_steps(100)
    run.kill("worker --index 1", signal.SIGSTOP)
    assert run.wait() == 0, run.text()
    assert "worker 1 was silent for 1.5 s: starting all workers again" in run.text()
    assert run.summary()["updates"] == 1500


@pytest.mark.slow
def test_when_restarts_are_used_up_a_line_says_who_died_and_how_to_go_on(
    start: Callable[..., LocalRun],
) -> None:
    run = start("--steps", "100000", "--max-restarts", "0")
    run.wait_for_steps(100)
    run.kill("worker --index 1")
    assert run.wait() == 1
    assert "worker 1 was killed by SIGKILL, and was started again 0 times before" in run.text()
    assert "offbeat train --resume" in run.text()
    assert leftovers(run.run_dir) == []
    assert newest_checkpoint(run.run_dir / "checkpoints").version > 0, "what there is was kept"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(
    start: Callable[..., LocalRun], number: signal.Signals
) -> None:
    flags = ("--steps", "400", "--eval-every", "0", "--checkpoint-every", "400")
    run = start(*flags)
    run.wait_for_steps(50)
    run.process.send_signal(number)
    assert run.wait() == 130, run.text()
    assert "killed" not in run.text() and leftovers(run.run_dir) == []
    assert 50 <= newest_checkpoint(run.run_dir / "checkpoints").version < 400
    resumed, whole = start("--resume", str(run.run_dir)), start(*flags, run="whole")
    assert (resumed.wait(), whole.wait()) == (0, 0), resumed.text()
    mine, theirs = offbeat.load(run.run_dir), offbeat.load(whole.run_dir)
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name
    assert run.summary()["updates"] == 400 and run.summary()["not_kept"] == 0


@pytest.mark.slow
def test_it_goes_on_what_sync_began_and_ends_when_it_is_good_enough(train: Train) -> None:
    first = train("long", "sync", workers=2, steps=50)
    options = {"discipline": "allreduce", "engine": "auto", "steps": 100}
    second = offbeat.resume(first.run_dir, **options)
    assert second.summary["updates"] == 100
    third = train("long", "allreduce", workers=2, steps=100000, eval_every=50, stop_at=0.8)
    assert third.summary["status"] == "finished" and third.summary["reason"]
    assert third.summary["updates"] < 100000


# -- on a GPU --------------------------------------------------------------------------------------

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
SHARED = {"workers": 2, "devices": "cuda:0", "server_device": "cuda"}
"""Two of one GPU, whose parameters lie there all the same."""


def assert_about_equal(one: offbeat.Result, other: offbeat.Result) -> None:
    """As a GPU's sums are a CPU's."""
    mine, theirs = offbeat.load(one.run_dir), offbeat.load(other.run_dir)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=1e-3, msg=name)


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize(
        ("options", "backend", "how"),
        [
            ({"workers": 1, "devices": "cuda:0"}, "nccl", ""),
            (SHARED, "gloo", "with gloo, from the GPU by way of the CPU's memory: workers 0 and 1"),
            ({**SHARED, "capture": "off"}, "gloo", "with gloo, from the GPU"),
            ({**SHARED, "server_device": "auto"}, "gloo", "with gloo, in the CPU's memory: work"),
            ({**SHARED, "clip_norm": 0.3}, "gloo", "with gloo, from the GPU"),
            ({**SHARED, "accumulate": 2}, "gloo", "with gloo, from the GPU"),
            ({**SHARED, "overlap": True}, "gloo", "with gloo, from the GPU"),
        ],
    )
    def test_it_learns_what_sync_learns_on_the_cpu(
        self, train: Train, options: dict[str, Any], backend: str, how: str
    ) -> None:
        mine = train("momentum", "allreduce", **options)
        here = {k: v for k, v in options.items() if k not in ("devices", "server_device")}
        theirs = train("momentum", "sync", device="cpu", **here)
        assert_about_equal(mine, theirs)
        assert mine.summary["updates"] == theirs.summary["updates"]
        resolved = json.loads((mine.run_dir / "config.json").read_text())["resolved"]
        assert resolved["backend"] == backend and resolved["devices"][0] == "cuda:0"
        assert how in log_of(mine)

    @pytest.mark.parametrize("devices", ["cuda:0,cuda:0", "cuda:0,cpu"])
    def test_so_do_two_towers(self, train: Train, devices: str) -> None:
        mine = train("plain", "allreduce", workers=1, devices=devices, batch_size=6)
        theirs = train("plain", "sync", workers=1, device="cpu", batch_size=12)
        assert_about_equal(mine, theirs)

    @pytest.mark.parametrize("options", [{"workers": 1, "devices": "cuda:0"}, SHARED])
    def test_every_gradient_is_in(self, train: Train, options: dict[str, Any]) -> None:
        """Each of them ones, at a rate of one: the parameters count them."""
        result = train("counting", "allreduce", steps=200, rule="sum", **options)
        (weight,) = offbeat.load(result.run_dir).values()
        assert bool((weight == -200 * options["workers"]).all())

    def test_a_run_is_resumed_on_the_other_kind_of_memory(self, train: Train) -> None:
        whole = train("long", "allreduce", steps=60, **{**SHARED, "server_device": "cpu"})
        part = train("long", "allreduce", steps=30, **SHARED)
        resumed = offbeat.resume(part.run_dir, steps=60)
        assert resumed.summary["updates"] == 60
        assert_about_equal(resumed, whole)
        again = train("long", "allreduce", steps=30, **SHARED)
        assert_about_equal(offbeat.resume(again.run_dir, steps=60, server_device="cpu"), whole)

    def test_when_one_is_killed_all_go_on(
        self, train: Train, start: Callable[..., LocalRun]
    ) -> None:
        flags = ("--workers", "2", "--devices", "cuda:0", "--server-device", "cuda")
        run = start(*flags, "--steps", "2000", "--checkpoint-every", "20", "--eval-every", "0")
        run.wait_for_steps(60, 0, 1)
        run.kill("worker --index 1")
        assert run.wait() == 0, run.text()
        assert "was killed by SIGKILL: starting all workers again (1 of 3)" in run.text()
        assert leftovers(run.run_dir) == []
        summary = run.summary()
        assert (summary["status"], summary["updates"]) == ("finished", 2000)
        whole = train("long", "allreduce", steps=2000, eval_every=0, **SHARED)
        mine, theirs = offbeat.load(run.run_dir), offbeat.load(whole.run_dir)
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-2, atol=1e-2, msg=name)

    @pytest.mark.parametrize("workers", [1, 2])
    def test_ctrl_c_keeps_what_there_is(self, start: Callable[..., LocalRun], workers: int) -> None:
        here = ("--devices", "cuda:0")
        flags = ("--workers", str(workers), *here, "--server-device", "cuda")
        run = start(*flags, "--steps", "2000", "--eval-every", "0", "--checkpoint-every", "2000")
        run.wait_for_steps(50, *range(workers))
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.text()
        assert "killed" not in run.text() and leftovers(run.run_dir) == []
        assert 50 <= newest_checkpoint(run.run_dir / "checkpoints").version < 2000
        resumed = start("--resume", str(run.run_dir), *here)
        assert resumed.wait() == 0, resumed.text()
        assert run.summary()["updates"] == 2000
