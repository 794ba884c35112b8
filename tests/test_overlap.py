"""Computing while an exchange is under way: on what, in which order, and how it ends."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DROPPING, Spiced, cross_entropy, num_dealt_with, toy_job, toy_recipe
from processes import LocalRun
from torch import nn

import offbeat
from offbeat import SGD
from offbeat.config import DISCIPLINES
from offbeat.run.events import read_events


def train(run_dir: Path, recipe: offbeat.Recipe | None = None, **options: Any) -> offbeat.Result:
    shape = {"workers": 1, "device": "cpu", "overlap": True, **options}
    return offbeat.train(
        recipe or toy_recipe(), run_dir=run_dir, engine="inproc", quiet=True, threads=1, **shape
    )


def pushes(result: offbeat.Result) -> list[dict[str, Any]]:
    found = [e for e in read_events(result.run_dir / "events") if e["kind"] == "push"]
    return sorted(found, key=lambda event: (event["shard"], event["worker"], event["sequence"]))


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("discipline", ["apply-reply", "reply-apply", "sync"])
def test_a_gradient_is_of_the_parameters_before_the_last_ones(
    tmp_path: Path, discipline: str, servers: int
) -> None:
    """To the bit a loop in which every gradient is one update late, or two."""
    late = 2 if discipline == "reply-apply" else 1
    recipe = toy_recipe(optimizer=SGD(lr=0.1, momentum=0.9))
    found = train(tmp_path / "r", recipe, discipline=discipline, servers=servers)
    job = toy_job(recipe, workers=1)
    module, behind = job.make_model().module, job.make_model().module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    history = []
    for number, (_, batch) in enumerate(job.batches(0)):
        history.append({name: value.clone() for name, value in module.state_dict().items()})
        behind.load_state_dict(history[max(0, number - late)])
        grads = torch.autograd.grad(cross_entropy(behind, batch), list(behind.parameters()))
        for param, grad in zip(module.parameters(), grads, strict=True):
            param.grad = grad
        optimizer.step()
    for name, value in module.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    staleness = [event["staleness"] for event in pushes(found)[:48]]
    assert staleness == [min(number, late) for number in range(48)]


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_it_goes_with_every_discipline_and_counts_right(tmp_path: Path, discipline: str) -> None:
    result = train(
        tmp_path / "r", toy_recipe(Spiced), workers=2, servers=2, discipline=discipline, epochs=3
    )
    assert result.summary["gradients"] == 72
    assert [num_dealt_with(kept, discipline) for kept in result.summary["kept"]] == [72, 72]
    steps = [e for e in read_events(result.run_dir / "events") if e["kind"] == "step"]
    assert sorted((e["worker"], e["step"]) for e in steps) == [
        (worker, step) for worker in range(2) for step in range(1, 37)
    ]
    may_be = {"applied", "dropped"} if discipline in DROPPING else {"applied"}
    assert {event["outcome"] for event in steps} <= may_be
    assert result.test_accuracy is not None and result.test_accuracy > 0.5


def test_it_goes_with_local_steps(tmp_path: Path) -> None:
    """A worker that moves by itself ends where the reply says, not where it was."""
    result = train(tmp_path / "r", local_steps=4, workers=2, discipline="sync", epochs=8)
    assert result.summary["gradients"] == 48
    assert result.test_accuracy is not None and result.test_accuracy > 0.8


def test_a_run_goes_on_with_every_step_once(tmp_path: Path) -> None:
    train(tmp_path / "r", steps=7)
    result = offbeat.resume(tmp_path / "r", toy_recipe(), steps=20)
    assert [event["sequence"] for event in pushes(result)] == list(range(1, 21))


@pytest.mark.slow
def test_a_gradient_in_the_making_is_left_when_a_run_is_stopped(tmp_path: Path) -> None:
    """What was pushed is in, and what was computed meanwhile is not."""
    run = LocalRun(tmp_path, "--overlap", "--slow-worker", "0:30x,1:30x", "--servers", "2")
    run.wait_for_steps(5)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()
    for shard in run.summary()["kept"]:
        assert shard["applied"] == shard["gradients"] == run.num_steps(0) + run.num_steps(1)


@pytest.mark.slow
@pytest.mark.parametrize("discipline", ["sync", "lock-free"])
def test_a_server_that_dies_costs_no_more_than_without(tmp_path: Path, discipline: str) -> None:
    slowly = ("--slow-worker", "0:20x,1:20x", "--steps", "60", "--checkpoint-every", "10")
    run = LocalRun(tmp_path, "--overlap", "--discipline", discipline, "--servers", "2", *slowly)
    run.wait_for_steps(20)
    run.kill("ps --index 1")
    assert run.wait() == 0, run.text()
    for shard in run.summary()["kept"]:
        counted = sum(shard[name] for name in ("applied", "dropped", "rejected", "lost"))
        assert counted == shard["gradients"] == 120


def test_statistics_are_those_of_every_other_batch(tmp_path: Path) -> None:
    """As they travel with gradients: the next one's are computed before the last ones are back."""
    recipe = toy_recipe(lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)))
    result = train(tmp_path / "r", recipe, steps=9)
    assert int(result.state_dict()["1.num_batches_tracked"]) == 5
