"""Steps that workers take by themselves: beside loops that are written out here."""

import itertools
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DROPPING, Spiced, cross_entropy, toy_data, toy_job, toy_recipe
from processes import LocalRun
from torch import nn

import offbeat
from offbeat import SGD, AdamW
from offbeat.config import DISCIPLINES
from offbeat.errors import ConfigError
from offbeat.local_steps import LocalTowers
from offbeat.optim import Optimizer
from offbeat.run.events import read_events
from offbeat.run.job import Job


def train(run_dir: Path, recipe: offbeat.Recipe | None = None, **options: Any) -> offbeat.Result:
    shape = {"workers": 1, "device": "cpu", **options}
    if "devices" in shape:
        del shape["device"]
    return offbeat.train(
        recipe or toy_recipe(), run_dir=run_dir, engine="inproc", quiet=True, threads=1, **shape
    )


def assert_close(found: nn.Module | offbeat.Result, other: nn.Module | offbeat.Result) -> None:
    one, two = found.state_dict(), other.state_dict()
    for name, value in two.items():
        torch.testing.assert_close(one[name], value, rtol=1e-4, atol=1e-6)


def in_rounds(job: Job, inner: Optimizer, outer: Optimizer, scales: Sequence[float]) -> nn.Module:
    """Each worker takes H steps from the same parameters with an optimizer of its own, and the mean
    of what they moved by is the gradient of another one. `scales`: of the inner rate, by step."""
    everybody = job.make_model().module
    outside = make(outer, everybody)
    replicas = [job.make_model().module for _ in range(job.config.workers)]
    inside = [make(inner, module) for module in replicas]
    batches = [list(job.batches(rank)) for rank in range(job.config.workers)]
    several = job.config.local_steps or 1
    for start in range(0, len(batches[0]), several):
        for module, optimizer, mine in zip(replicas, inside, batches, strict=True):
            module.load_state_dict(everybody.state_dict())
            for number in range(start, min(start + several, len(mine))):
                optimizer.param_groups[0]["lr"] = inner.options["lr"] * scales[number]
                optimizer.zero_grad()
                cross_entropy(module, mine[number][1]).backward()
                optimizer.step()
        for param, *theirs in zip(
            everybody.parameters(), *(m.parameters() for m in replicas), strict=True
        ):
            moved = [param.detach() - other.detach() for other in theirs]
            param.grad = torch.stack(moved).mean(dim=0)
        outside.step()
    return everybody


def make(spec: Optimizer, module: nn.Module) -> torch.optim.Optimizer:
    maker: Any = spec.maker
    made: torch.optim.Optimizer = maker(module.parameters(), **spec.options)
    return made


ROUNDS = {
    "local SGD": (SGD(lr=0.1), SGD(lr=1.0), "SGD:lr=1"),
    "momentum inside": (SGD(lr=0.05, momentum=0.9), SGD(lr=1.0), "SGD:lr=1"),
    "DiLoCo": (
        AdamW(lr=0.01, weight_decay=0.1),
        SGD(lr=0.7, momentum=0.9, nesterov=True),
        None,
    ),
}


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("servers", [1, 2])
def test_sync_is_what_the_papers_write(
    tmp_path: Path, name: str, workers: int, servers: int
) -> None:
    """240 examples: 24 batches an epoch for one worker, eight for each of three."""
    inner, outer, flag = ROUNDS[name]
    recipe = toy_recipe(optimizer=inner)
    shape: dict[str, Any] = {"workers": workers, "local_steps": 4, "discipline": "sync"}
    found = train(tmp_path / "r", recipe, servers=servers, outer_optimizer=flag, epochs=2, **shape)
    job = toy_job(recipe, epochs=2, threads=1, **shape)
    assert_close(found, in_rounds(job, inner, outer, [1.0] * 48))
    assert found.summary["gradients"] == 12 // workers * workers


ONE = {"local_steps": 1, "outer_optimizer": "SGD:lr=1"}


@pytest.mark.parametrize(("discipline", "workers"), [("apply-reply", 1), ("sync", 2)])
def test_one_local_step_of_plain_sgd_is_a_gradient_to_the_bit(
    tmp_path: Path, discipline: str, workers: int
) -> None:
    shape: dict[str, Any] = {"discipline": discipline, "workers": workers}
    recipe = toy_recipe(optimizer=SGD(lr=0.3), schedule=offbeat.cosine(warmup=5))
    plain = train(tmp_path / "p", recipe, **shape)
    local = train(tmp_path / "l", recipe, **ONE, **shape)
    for name, value in plain.state_dict().items():
        assert torch.equal(local.state_dict()[name], value), name


def test_it_is_the_same_job_then_for_several_asynchronous_workers() -> None:
    """Who come in another order each time."""
    recipe = toy_recipe(optimizer=SGD(lr=0.3))
    plain, local = toy_job(recipe, workers=4), toy_job(recipe, workers=4, **ONE)
    assert local.inner is None
    assert local.optimizer.is_plain_sgd
    assert local.make_rates().at(3) == plain.make_rates().at(3)


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({}, 0.25),
        ({"workers": 3}, 0.333333),
        ({"discipline": "bounded:2"}, 0.25),
        ({"rule": "staleness-aware"}, 0.25),
        ({"rule": "dana"}, 0.175),
        ({"rule": "delayed-nesterov"}, 0.7),
        ({"discipline": "sync", "rule": "dana"}, 0.7),
        ({"local_steps": 1}, 1.0),
    ],
)
def test_servers_go_as_far_as_workers_did_on_average(options: dict[str, Any], rate: float) -> None:
    """While each of them pushes once, unless the rule sees to that."""
    job = toy_job(**{"workers": 4, "local_steps": 2, **options})
    inside = job.recipe.optimizer.options["lr"] if job.inner is None else 1.0
    assert job.optimizer.is_plain_sgd
    assert job.optimizer.options["lr"] == pytest.approx(rate * inside)


@pytest.mark.parametrize("discipline", ["apply-reply", "sync"])
def test_a_schedule_counts_local_steps(tmp_path: Path, discipline: str) -> None:
    """As a plain loop's would; the servers' rate stays."""
    recipe = toy_recipe(optimizer=SGD(lr=0.3, momentum=0.5), schedule=offbeat.cosine(warmup=7))
    shape: dict[str, Any] = {"local_steps": 6, "discipline": discipline, "epochs": 2}
    found = train(tmp_path / "r", recipe, outer_optimizer="SGD:lr=1", **shape)
    job = toy_job(recipe, workers=1, threads=1, **shape)
    scales = [job.recipe.schedule(step, 48) for step in range(48)]
    assert len(set(scales)) > 40
    assert_close(found, in_rounds(job, recipe.optimizer, SGD(lr=1.0), scales))
    rates = [e["lr"] for e in read_events(found.run_dir / "events") if e["kind"] == "push"]
    assert set(rates) == {1.0}


def test_several_asynchronous_workers_go_along_one_schedule() -> None:
    """A version of four workers' stands for a fourth of what one does between two exchanges."""
    shape: dict[str, Any] = {"workers": 4, "local_steps": 2, "epochs": 4}
    for discipline, several in (("apply-reply", 0.5), ("sync", 2.0)):
        job = toy_job(discipline=discipline, **shape)
        towers = job.make_towers(0, job.make_model())
        assert isinstance(towers, LocalTowers)
        assert towers._inner.steps_per_update == several
        assert towers._inner.total_steps == 24


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_it_goes_with_every_discipline_and_counts_right(tmp_path: Path, discipline: str) -> None:
    shape: dict[str, Any] = {"workers": 2, "local_steps": 5, "discipline": discipline, "epochs": 3}
    job = toy_job(toy_recipe(Spiced), **shape)
    assert job.num_steps(0) == 9, "twelve batches an epoch"
    result = train(tmp_path / "r", toy_recipe(Spiced), servers=2, **shape)
    assert result.summary["gradients"] == 18
    if discipline not in DROPPING:
        assert result.summary["updates"] == job.facts.total_updates
    assert [worker["examples"] for worker in result.summary["workers"]] == [360, 360]
    assert result.test_accuracy is not None and result.test_accuracy > 0.5


def test_batches_may_be_several_to_a_local_step(tmp_path: Path) -> None:
    """A rate of 0.1 on the mean of two batches of five is that on one of ten."""
    recipe = toy_recipe(optimizer=SGD(lr=0.1, momentum=0.9))
    shape: dict[str, Any] = {"local_steps": 3, "epochs": 2}
    two = train(tmp_path / "2", recipe, batch_size=5, accumulate=2, **shape)
    one = train(tmp_path / "1", recipe, batch_size=10, **shape)
    assert_close(two, one)
    assert two.summary["gradients"] == one.summary["gradients"] == 16


def test_towers_step_together(tmp_path: Path) -> None:
    recipe = toy_recipe(optimizer=SGD(lr=0.1, momentum=0.9))
    shape: dict[str, Any] = {"local_steps": 3, "epochs": 2}
    two = train(tmp_path / "2", recipe, batch_size=5, devices="cpu,cpu", **shape)
    one = train(tmp_path / "1", recipe, batch_size=10, **shape)
    assert_close(two, one)


def test_each_local_gradient_is_clipped(tmp_path: Path) -> None:
    """In sync too, where it is the mean that is clipped otherwise."""
    recipe = toy_recipe(optimizer=SGD(lr=0.1, momentum=0.1))
    for discipline in ("apply-reply", "sync"):
        shape: dict[str, Any] = {"local_steps": 4, "discipline": discipline, "epochs": 1}
        found = train(
            tmp_path / discipline, recipe, clip_norm=0.05, outer_optimizer="SGD:lr=1", **shape
        )
        job = toy_job(recipe, workers=1, **shape)
        module = job.make_model().module
        optimizer = make(recipe.optimizer, module)
        for _, batch in job.batches(0):
            optimizer.zero_grad()
            cross_entropy(module, batch).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.05)
            optimizer.step()
        assert_close(found, module)
        assert found.summary["clipped"] == 1.0


def test_an_unusable_gradient_is_left_out(tmp_path: Path) -> None:
    """The third batch's is not finite, though its loss is: the others go in."""
    calls = iter(range(10**6))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value = cross_entropy(model, batch)
        if next(calls) == 2:
            value = value + 0.0 * torch.sqrt(model[0].weight.sum() * 0.0)  # type: ignore[index]
        return value

    recipe = toy_recipe(loss=loss, optimizer=SGD(lr=0.1, momentum=0.1))
    result = train(tmp_path / "r", recipe, local_steps=4, steps=2)
    assert result.summary["gradients"] == 2
    assert result.summary["rejected"] == 0
    assert "a local step was left out" in (tmp_path / "r/logs/worker-0.log").read_text()
    assert all(bool(value.isfinite().all()) for value in result.state_dict().values())


def test_a_step_without_a_usable_gradient_is_refused(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(model, batch) + 0.0 * torch.sqrt(model[0].weight.sum() * 0.0)  # type: ignore[index]

    recipe = toy_recipe(loss=loss, optimizer=SGD(lr=0.1, momentum=0.1))
    result = train(tmp_path / "r", recipe, local_steps=4, steps=2)
    assert result.summary["rejected"] == 2
    for name, value in result.state_dict().items():
        first = toy_job(recipe, workers=1).make_model().module.state_dict()[name]
        assert torch.equal(value, first), name


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    data = toy_data()
    data[0][::30] = math.nan
    recipe = toy_recipe(data=lambda config: (data, None))
    with pytest.raises(offbeat.RunError, match="numbers in its batch are NaN or infinite"):
        train(tmp_path / "r", recipe, local_steps=4)


INSIDE = {
    "SGD": SGD(lr=0.1),
    "momentum": SGD(lr=0.05, momentum=0.9),
    "AdamW": AdamW(lr=0.01),
}


@pytest.mark.parametrize("inside", INSIDE)
def test_a_run_goes_on_where_it_was(tmp_path: Path, inside: str) -> None:
    """To the bit, whatever the inner optimizer keeps; in the middle of an epoch, with an odd step
    at its end."""
    shape: dict[str, Any] = {"local_steps": 5}
    recipe = toy_recipe(
        optimizer=INSIDE[inside],
        model=lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)),
        augment=lambda batch, generator: (
            batch[0] + torch.randn(batch[0].shape, generator=generator),
            batch[1],
        ),
    )
    whole = train(tmp_path / "whole", recipe, steps=13, **shape)
    train(tmp_path / "cut", recipe, steps=7, **shape)
    cut = offbeat.resume(tmp_path / "cut", recipe, steps=13)
    assert_same(cut, whole)
    assert "begins anew" not in (tmp_path / "cut/logs/master.log").read_text()


def assert_same(found: offbeat.Result, other: offbeat.Result) -> None:
    for name, value in other.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


def test_every_worker_goes_on_with_what_it_kept(tmp_path: Path) -> None:
    """Sums of a sync round are made in rank order, and rates go by local steps."""
    shape: dict[str, Any] = {"local_steps": 3, "workers": 3, "servers": 2, "discipline": "sync"}
    recipe = toy_recipe(optimizer=AdamW(lr=0.01), schedule=lambda step, total: 1 / (1 + step))
    whole = train(tmp_path / "whole", recipe, steps=9, **shape)
    train(tmp_path / "cut", recipe, steps=4, **shape)
    cut = offbeat.resume(tmp_path / "cut", recipe, steps=9)
    assert_same(cut, whole)
    states = sorted(path.name for path in (tmp_path / "cut/states").iterdir())
    assert states == ["worker-0", "worker-1", "worker-2"]


def log_of(run: Path) -> str:
    return "".join(path.read_text() for path in sorted((run / "logs").iterdir()))


ANEW = {
    "asked for": ({"fresh_worker_state": True}, "--fresh-worker-state"),
    "other shares": ({"workers": 2}, "shared out in another way"),
    "another optimizer": ({"optimizer": "adam"}, "another model, or another optimizer"),
}


@pytest.mark.parametrize("name", ANEW)
def test_what_does_not_fit_begins_anew_and_is_told(tmp_path: Path, name: str) -> None:
    options, line = ANEW[name]
    recipe = toy_recipe(optimizer=SGD(lr=0.05, momentum=0.9))
    whole = train(tmp_path / "whole", recipe, steps=13, local_steps=5)
    train(tmp_path / "cut", recipe, steps=8, local_steps=5)
    cut = offbeat.resume(tmp_path / "cut", recipe, steps=13, **options)
    assert line in log_of(tmp_path / "cut")
    assert not torch.equal(cut.state_dict()["0.weight"], whole.state_dict()["0.weight"])


def test_a_checkpoint_that_is_a_little_older_finds_its_state(tmp_path: Path) -> None:
    """Servers and workers all died: the newest checkpoint is not of the last push."""
    shape: dict[str, Any] = {"local_steps": 5, "eval_every": 0, "keep": 9}
    recipe = toy_recipe(optimizer=SGD(lr=0.05, momentum=0.9))
    whole = train(tmp_path / "whole", recipe, steps=13, **shape)
    train(tmp_path / "cut", recipe, steps=5, **shape)
    offbeat.resume(tmp_path / "cut", recipe, steps=8)
    shutil.rmtree(tmp_path / "cut/checkpoints/00000008")
    cut = offbeat.resume(tmp_path / "cut", recipe, steps=13)
    assert log_of(tmp_path / "cut").count("going on after step 5") == 2, "and not after step 8"
    assert "begins anew" not in log_of(tmp_path / "cut")
    assert_same(cut, whole)


def test_a_state_of_something_else_is_not_taken() -> None:
    """Sizes and types are looked at before anything is put into an optimizer."""
    adam, momentum = (
        toy_job(toy_recipe(optimizer=optimizer), workers=1, local_steps=2)
        for optimizer in (AdamW(lr=0.01), SGD(lr=0.1, momentum=0.9))
    )
    towers = adam.make_towers(0, adam.make_model())
    assert towers.restore({}, {"position": 0}), "before the first step there is nothing"
    trained = trained_towers(adam)
    tensors, numbers = trained.state()
    assert numbers == {"position": 2}
    for name, tensor in tensors.items():
        for other in (tensor[:-1], tensor.double(), tensor.view(1, -1)):
            assert not towers.restore({**tensors, name: other}, numbers), name
        assert not towers.restore({k: v for k, v in tensors.items() if k != name}, numbers)
    assert not towers.restore({**tensors, "optimizer.element.more": torch.ones(3)}, numbers)
    for position in (-1, 0.5, None):
        assert not towers.restore(tensors, {} if position is None else {"position": position})
    assert towers.state()[0] == {}, "nothing was taken of all that"
    assert towers.restore(tensors, numbers)
    found, at = towers.state()
    assert at == numbers
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert not trained_towers(momentum).restore(tensors, numbers)
    plain = toy_job(toy_recipe(), workers=1, local_steps=2)
    assert not plain.make_towers(0, plain.make_model()).keeps


def trained_towers(job: Job) -> LocalTowers:
    """After one exchange."""
    towers = job.make_towers(0, job.make_model())
    assert isinstance(towers, LocalTowers) and towers.keeps
    towers.begin(0)
    (_, first), (_, second) = itertools.islice(job.batches(0), 2)
    towers.compute(cross_entropy, towers.deal(first))
    towers.accumulate(10)
    towers.compute(cross_entropy, towers.deal(second))
    towers.take_gradient([torch.empty_like(towers.model.params)], 10)
    towers.wait()
    return towers


@pytest.mark.slow
def test_a_worker_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """To the bit: one worker, whose server applies all that it pushes. A round would have closed
    without it."""
    flags = ("--workers", "1", "--servers", "2", "--local-steps", "5", "--steps", "40")
    recipe = toy_recipe(optimizer=SGD(lr=0.05, momentum=0.9), ema=0.99)
    whole = train(tmp_path / "whole", recipe, servers=2, local_steps=5, steps=40)
    killed = LocalRun(tmp_path, *flags, "--kill-worker", "0@23", recipe="momentum")
    assert killed.wait() == 0, killed.text()
    assert killed.summary()["restarts"] == 1
    log = log_of(killed.run_dir)
    assert "going on after step 22" in log
    assert "begins anew" not in log
    found = offbeat.load(killed.run_dir)
    for name, value in whole.state_dict().items():
        assert torch.equal(found[name], value), name


def test_what_cannot_be_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match="give --local-steps H too"):
        toy_job(outer_optimizer="SGD:lr=1")
    with pytest.raises(ConfigError, match="local_steps must be at least 1"):
        toy_job(local_steps=0)
    recipe = toy_recipe(lambda: nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3)))
    with pytest.raises(ConfigError, match="local_steps move whole tensors"):
        toy_job(recipe, local_steps=2)
    with pytest.raises(ConfigError, match="LBFGS"):
        toy_job(local_steps=2, outer_optimizer="LBFGS")


@pytest.mark.parametrize(
    ("discipline", "rate"), [("buffer:2", 0.5), ("buffer:4", 1.0), ("buffer:9", 1.0)]
)
def test_servers_go_no_further_than_the_mean_of_what_they_gathered(
    discipline: str, rate: float
) -> None:
    job = toy_job(discipline=discipline, workers=4, local_steps=5)
    assert job.optimizer.options["lr"] == rate
