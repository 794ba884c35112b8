"""Training in one process, from the configuration to the run's folder."""

import dataclasses
import json
import logging
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import (
    DROPPING,
    IN_AN_UPDATE,
    batches_of,
    cross_entropy,
    make_plain_optimizer,
    num_dealt_with,
    plain_loop,
    toy_data,
    toy_job,
    toy_model,
    toy_recipe,
)
from own_optimizers import Signs, Together, Trusting
from scripted import ScriptedServer, run_master
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import Dataset, IterableDataset

import offbeat
from offbeat import SGD, Adagrad, Adam, AdamW, Recipe, RMSprop
from offbeat.api import named
from offbeat.cli import main
from offbeat.config import DISCIPLINES, make_config
from offbeat.engines.inproc import InprocEngine
from offbeat.errors import (
    ConfigError,
    ConnectionClosedError,
    NonFiniteLossError,
    RecipeError,
    RoleError,
    RunDirError,
)
from offbeat.optim import KINDS, Optimizer
from offbeat.recipes.base import load_recipe
from offbeat.roles.calls import Status
from offbeat.roles.worker import Worker
from offbeat.run.checkpoint import load_checkpoint, newest_checkpoint
from offbeat.run.events import EventLog, read_events
from offbeat.run.making import make_job
from offbeat.run.rundir import RunFolder, describe_run
from offbeat.transport.base import ReplyHeader, WelcomeHeader
from offbeat.transport.inproc import InprocListener, InprocNetwork

OPTIMIZERS = {
    "sgd": SGD(lr=0.1),
    "momentum": SGD(lr=0.1, momentum=0.9),
    "nesterov": SGD(lr=0.1, momentum=0.9, nesterov=True),
    "adam": Adam(lr=0.01),
    "adamw": AdamW(lr=0.01, weight_decay=0.1),
    "adagrad": Adagrad(lr=0.05),
    "rmsprop": RMSprop(lr=0.01),
}


def train(recipe: offbeat.Recipe, run_dir: Path, **options: Any) -> offbeat.Result:
    return offbeat.train(recipe, run_dir=run_dir, quiet=True, threads=1, **options)


def assert_same(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert state.keys() == other.keys()
    for name, value in state.items():
        assert torch.equal(value, other[name]), name


# -- equal to plain PyTorch --------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("discipline", ["apply-reply", "sync", "bounded:0"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_gives_the_bits_of_a_plain_loop(
    run_dir: Path, name: str, discipline: str, servers: int
) -> None:
    recipe = toy_recipe(optimizer=OPTIMIZERS[name])
    result = train(recipe, run_dir, discipline=discipline, workers=1, servers=servers, steps=40)
    job = toy_job(recipe, workers=1, steps=40)
    torch.set_num_threads(1)
    module = job.make_model().module
    plain_loop(job, make_plain_optimizer(OPTIMIZERS[name], module), module)
    assert_same(result.state_dict(), module.state_dict())


@pytest.mark.parametrize(
    "optimizer",
    [
        *(Optimizer(kind=kind, options={"lr": 0.01}) for kind in KINDS),
        SGD(lr=0.1, momentum=0.9, dampening=0.3, maximize=True),
    ],
    ids=[*KINDS, "dampening"],
)
def test_other_numbers_of_servers_on_the_way_give_the_bits_too(
    run_dir: Path, optimizer: Optimizer
) -> None:
    recipe = toy_recipe(optimizer=optimizer)
    train(recipe, run_dir, discipline="apply-reply", workers=1, servers=2, steps=15)
    result = offbeat.resume(run_dir, recipe, servers=3, steps=30)
    job = toy_job(recipe, workers=1, steps=30)
    torch.set_num_threads(1)
    module = job.make_model().module
    plain_loop(job, make_plain_optimizer(optimizer, module), module)
    assert_same(result.state_dict(), module.state_dict())


EVERY: dict[str, Any] = {kind: kind for kind in KINDS}
EVERY |= {"one's own": Signs, "by its name": "own_optimizers:Signs"}


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("discipline", ["apply-reply", "sync"])
@pytest.mark.parametrize("name", EVERY)
def test_every_optimizer_gives_the_bits_of_a_plain_loop(
    run_dir: Path, name: str, discipline: str, servers: int
) -> None:
    spec = offbeat.optimizer(EVERY[name], lr=0.02)
    recipe = toy_recipe(optimizer=spec)
    result = train(recipe, run_dir, discipline=discipline, workers=1, servers=servers, steps=12)
    assert_plain(result, recipe, steps=12)


@pytest.mark.parametrize("discipline", ["apply-reply", "sync"])
@pytest.mark.parametrize("kind", [Signs, Trusting, "Adafactor"])
def test_resuming_gives_the_bits_whatever_an_optimizer_keeps(
    run_dir: Path, kind: Any, discipline: str
) -> None:
    """With another number of servers, too."""
    recipe = toy_recipe(optimizer=offbeat.optimizer(kind, lr=0.02))
    train(recipe, run_dir, discipline=discipline, workers=1, servers=2, steps=15)
    assert_plain(offbeat.resume(run_dir, recipe, servers=3, steps=30), recipe, steps=30)


@pytest.mark.parametrize(
    "spec",
    [
        offbeat.optimizer(Signs, lr=0.01),
        offbeat.optimizer("Muon", lr=0.02, groups={"*.bias": AdamW(lr=0.01)}),
    ],
    ids=str,
)
def test_lock_free_sessions_share_what_an_optimizer_keeps(run_dir: Path, spec: Optimizer) -> None:
    recipe = toy_recipe(optimizer=spec)
    result = train(recipe, run_dir, discipline="lock-free", workers=3, servers=2, steps=40)
    assert result.test_accuracy is not None and result.test_accuracy > 0.8
    assert result.summary["gradients"] == 120
    for shard in newest_checkpoint(run_dir / "checkpoints").shards:
        assert shard.version == 120


def assert_plain(result: offbeat.Result, recipe: offbeat.Recipe, steps: int) -> None:
    """A plain loop comes to the same bits."""
    job = toy_job(recipe, workers=1, steps=steps)
    torch.set_num_threads(1)
    module = job.make_model().module
    plain_loop(job, make_plain_optimizer(recipe.optimizer, module), module)
    assert_same(result.state_dict(), module.state_dict())


@pytest.mark.parametrize("kind", ["adam", "Adafactor"])
def test_another_optimizer_begins_anew_when_a_run_is_resumed(run_dir: Path, kind: str) -> None:
    """Its state, not the parameters; and with its own it goes on."""
    recipe = toy_recipe()
    train(recipe, run_dir, workers=1, steps=15, optimizer="momentum")
    offbeat.resume(run_dir, recipe, steps=16, optimizer=kind)
    result = offbeat.resume(run_dir, recipe, steps=30)
    job = toy_job(recipe, workers=1, steps=30, optimizer=kind)
    torch.set_num_threads(1)
    module = job.make_model().module
    momentum = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    after = make_plain_optimizer(job.optimizer, module)
    for step, batch in enumerate(batches_of(job, 0)):
        module.zero_grad()
        recipe.loss(module, batch).backward()
        (momentum if step < 15 else after).step()
    assert_same(result.state_dict(), module.state_dict())


@pytest.mark.parametrize(
    ("split", "first", "then", "batch_size", "more"),
    [
        ("disjoint", (3, 4), (1, 8), 50, 4 * 5),  # 2 batches an epoch, the second one short; then 5
        ("disjoint", (2, 4), (3, 4), 70, 0),
        ("disjoint", (2, 4), (3, 5), 70, 3 * 2),
        ("shared", (2, 2), (4, 2), 70, 4 * 4),  # 4 of 8 passes are done
    ],
)
def test_with_other_shares_a_run_goes_on_after_as_many_epochs(
    run_dir: Path,
    split: str,
    first: tuple[int, int],
    then: tuple[int, int],
    batch_size: int,
    more: int,
) -> None:
    recipe, (workers, epochs) = toy_recipe(batch_size=batch_size), first
    before = train(recipe, run_dir, workers=workers, epochs=epochs, split=split, discipline="sync")
    workers, epochs = then
    after = offbeat.resume(run_dir, recipe, workers=workers, epochs=epochs)
    assert after.summary["gradients"] - before.summary["gradients"] == more


SCHEDULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum too": (lr_scheduler.OneCycleLR, {"max_lr": [0.1, 0.2], "total_steps": 30}),
    "up and down": (lr_scheduler.CyclicLR, {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 7}),
    "by group": (lr_scheduler.LambdaLR, {"lr_lambda": [lambda s: 0.9**s, lambda s: 1 / (s + 1)]}),
    "not in closed form": (lr_scheduler.CosineAnnealingLR, {"T_max": 20}),
}


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), AdamW(lr=0.01)], ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_schedules_give_the_bits_of_a_plain_loop(
    run_dir: Path, name: str, optimizer: Optimizer
) -> None:
    """Also after a resume, with other servers, and where the optimizer would be plain SGD."""
    kind, options = SCHEDULES[name]
    spec = dataclasses.replace(optimizer, groups={"*.bias": {"weight_decay": 0.1, "lr": 0.03}})
    recipe = toy_recipe(optimizer=spec, schedule=offbeat.schedule(kind, **options))
    train(recipe, run_dir, workers=1, servers=1, steps=15)
    result = offbeat.resume(run_dir, recipe, servers=2, steps=30)
    job = toy_job(recipe, workers=1, steps=30)
    torch.set_num_threads(1)
    module = job.make_model().module
    groups = [{"params": [p for p in module.parameters() if p.dim() == d]} for d in (2, 1)]
    groups[1] |= {"weight_decay": 0.1, "lr": 0.03}
    plain = spec.maker(groups, **spec.options)
    scheduler = kind(plain, **options)
    for batch in batches_of(job, 0):
        plain.zero_grad()
        recipe.loss(module, batch).backward()
        plain.step()
        scheduler.step()
    assert_same(result.state_dict(), module.state_dict())


@pytest.mark.parametrize(("discipline", "per_epoch"), [("sync", 12), ("apply-reply", 24)])
def test_a_schedule_by_epochs_falls_at_the_same_epoch_in_every_discipline(
    tmp_path: Path, discipline: str, per_epoch: int
) -> None:
    """240 examples in batches of 10, by two workers; and where the run is cut anew on its way."""
    decay = offbeat.step_decay(every_epochs=2, factor=0.1)
    for schedule in (decay, offbeat.schedule("StepLR", per="epoch", step_size=2, gamma=0.1)):
        recipe = toy_recipe(schedule=schedule, epochs=5)
        rates = toy_job(recipe, workers=2, discipline=discipline).make_rates()
        seen = [rates.at(version)[0]["lr"] for version in range(5 * per_epoch)]
        halves = [0.1] * 2 * per_epoch + [0.01] * 2 * per_epoch + [0.001] * per_epoch
        assert seen == pytest.approx(halves)
    run_dir = tmp_path / "run"
    train(recipe, run_dir, workers=2, discipline=discipline, epochs=1)
    checkpoint = newest_checkpoint(run_dir / "checkpoints")
    config = make_config({"workers": 1, "discipline": discipline, "epochs": 5})
    rates = make_job(config, recipe, checkpoint).make_rates()
    seen = [rates.at(per_epoch + later)[0]["lr"] for later in range(4 * 24)]
    assert seen == pytest.approx([0.1] * 24 + [0.01] * 48 + [0.001] * 24)


def test_a_schedule_by_epochs_needs_to_know_how_long_one_is(run_dir: Path) -> None:
    recipe = toy_recipe(
        data=lambda config: (Stream(), None), schedule=offbeat.step_decay(every_epochs=1, factor=1)
    )
    with pytest.raises(ConfigError, match="needs data whose length is known"):
        train(recipe, run_dir, steps=3)


def test_a_schedule_as_long_as_the_run_need_not_be_told_so(run_dir: Path) -> None:
    recipe = toy_recipe(schedule=offbeat.schedule("OneCycleLR", max_lr=0.2))
    job = toy_job(recipe, workers=1, steps=40)
    assert job.make_rates().at(39)[0]["lr"] == pytest.approx(0.2 / 25 / 1e4)
    short = toy_recipe(schedule=offbeat.schedule("OneCycleLR", max_lr=0.2, total_steps=39))
    with pytest.raises(ConfigError, match="ends after 39 steps, the run has 40"):
        toy_job(short, workers=1, steps=40)
    train(recipe, run_dir, steps=5)
    described = json.loads((run_dir / "config.json").read_text())
    assert described["resolved"]["schedule"] == "OneCycleLR(max_lr=0.2)"


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("discipline", ["apply-reply", "sync"])
@pytest.mark.parametrize("kind", ["Adafactor", Trusting, "Adam"])
def test_whole_tensors_give_the_bits_too(
    run_dir: Path, kind: Any, discipline: str, servers: int
) -> None:
    recipe = toy_recipe(optimizer=offbeat.optimizer(kind, lr=0.02))
    options = {"partition": "tensors"} if kind == "Adam" else {}
    result = train(
        recipe, run_dir, discipline=discipline, workers=1, servers=servers, steps=12, **options
    )
    described = json.loads((run_dir / "config.json").read_text())
    assert described["resolved"]["partition"] == "tensors"
    assert_plain(result, recipe, steps=12)


@pytest.mark.parametrize("servers", [1, 3])
def test_muon_trains_matrices_and_another_optimizer_the_rest(run_dir: Path, servers: int) -> None:
    """Also across a resume with another number of servers."""
    spec = offbeat.optimizer("Muon", lr=0.02, groups={"*.bias": AdamW(lr=0.01)})
    recipe = toy_recipe(optimizer=spec)
    train(recipe, run_dir, workers=1, servers=2, steps=8)
    result = offbeat.resume(run_dir, recipe, servers=servers, steps=16)
    job = toy_job(recipe, workers=1, steps=16)
    torch.set_num_threads(1)
    module = job.make_model().module
    matrices, biases = ([p for p in module.parameters() if p.dim() == d] for d in (2, 1))
    optimizers = (torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(biases, lr=0.01))
    for batch in batches_of(job, 0):
        module.zero_grad()
        recipe.loss(module, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_same(result.state_dict(), module.state_dict())


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (offbeat.optimizer("Adafactor"), {"servers": 5}, "5 servers for 4 tensors"),
        (offbeat.optimizer(Trusting), {"partition": "elements"}, "Trusting needs whole tensors"),
        (offbeat.optimizer(Together), {"servers": 2}, "Together needs all parameters in one place"),
        (offbeat.optimizer("Muon"), {}, r"Muon only supports 2D.*groups=\{'\*\.bias'"),
        (SGD(), {"partition": "tensor"}, "did you mean 'tensors'"),
    ],
)
def test_slices_that_an_optimizer_cannot_work_with_are_refused(
    run_dir: Path, spec: Optimizer, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        train(toy_recipe(optimizer=spec), run_dir, workers=1, **options)
    assert "\n" not in str(caught.value) and not run_dir.exists()


def test_channels_last_is_what_a_whole_tensor_looks_like(run_dir: Path) -> None:
    def net() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (3, 2, 1)), nn.Conv2d(3, 4, (2, 1)), nn.Flatten(), nn.Linear(4, 3)
        ).to(memory_format=torch.channels_last)

    recipe = toy_recipe(net, offbeat.optimizer("Adafactor", lr=0.02))
    train(recipe, run_dir, workers=1, servers=2, steps=8)
    assert_plain(offbeat.resume(run_dir, recipe, steps=16), recipe, steps=16)


@pytest.mark.parametrize("servers", [1, 3])
def test_a_convnet_with_batchnorm_and_unused_parts_gives_the_bits_too(
    run_dir: Path, servers: int
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 2)
            self.norm = nn.BatchNorm2d(4)
            self.unused = nn.Linear(3, 3)
            self.head = nn.Linear(8, 3)
            self.head.bias.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.conv(x.view(-1, 1, 2, 3))).flatten(1))

    recipe = toy_recipe(Net, SGD(lr=0.05, momentum=0.9, weight_decay=0.01))
    result = train(recipe, run_dir, discipline="apply-reply", workers=1, servers=servers)
    job = toy_job(recipe, workers=1)
    torch.set_num_threads(1)
    module = job.make_model().module.train()
    trained = [p for p in module.parameters() if p.requires_grad]
    plain_loop(job, torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=0.01), module)
    assert_same(result.state_dict(), module.state_dict())


@pytest.mark.parametrize("rule", ["mean", "sum"])
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("workers", [2, 3])
def test_sync_equals_one_step_on_the_joint_batch(
    run_dir: Path, workers: int, servers: int, rule: str
) -> None:
    recipe = toy_recipe(optimizer=SGD(lr=0.05, momentum=0.9))
    result = train(
        recipe, run_dir, discipline="sync", workers=workers, servers=servers, rule=rule, steps=8
    )
    job = toy_job(recipe, workers=workers, steps=8)
    module = job.make_model().module
    optimizer = make_plain_optimizer(SGD(lr=0.05, momentum=0.9), module)
    for parts in zip(*(batches_of(job, rank) for rank in range(workers)), strict=True):
        joint = tuple(torch.cat(column) for column in zip(*parts, strict=True))
        optimizer.zero_grad()
        scale = workers if rule == "sum" else 1
        (cross_entropy(module, joint) * scale).backward()
        optimizer.step()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(result.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def test_the_same_seed_gives_the_same_sync_run_twice(tmp_path: Path) -> None:
    states = []
    for attempt in ("a", "b", "c"):
        seed = 5 if attempt != "c" else 6
        result = train(
            toy_recipe(), tmp_path / attempt, discipline="sync", workers=3, servers=2, seed=seed
        )
        states.append(result.state_dict())
    assert_same(states[0], states[1])
    assert not torch.equal(states[0]["0.weight"], states[2]["0.weight"])


def test_sync_gives_the_same_bits_with_any_number_of_servers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"discipline": "sync", "workers": 2}
    one = train(toy_recipe(), tmp_path / "one", servers=1, **options)
    four = train(toy_recipe(), tmp_path / "four", servers=4, **options)
    assert_same(one.state_dict(), four.state_dict())


@pytest.mark.parametrize(("scale", "factor"), [("none", 1.0), ("linear", 3.0), ("sqrt", 3**0.5)])
@pytest.mark.parametrize("discipline", ["sync", "lock-free"])
def test_the_rate_goes_with_the_number_of_workers(
    run_dir: Path, scale: str, factor: float, discipline: str
) -> None:
    recipe = toy_recipe(optimizer=SGD(lr=0.1, groups={"*.bias": {"lr": 0.02}}))
    shape = {"workers": 3, "discipline": discipline}
    job = toy_job(recipe, lr_scale=scale, **shape)
    assert job.optimizer.options["lr"] == 0.1 * factor
    assert job.optimizer.groups["*.bias"]["lr"] == 0.02 * factor
    assert toy_job(recipe, lr=0.2, lr_scale=scale, **shape).optimizer.options["lr"] == 0.2 * factor
    result = train(recipe, run_dir, lr_scale=scale, steps=2, **shape)
    described = json.loads((run_dir / "config.json").read_text())
    for told in (result.summary, described["resolved"]):
        assert (told["lr"], told["lr_scale"]) == (0.1 * factor, scale)


def test_a_rate_that_is_torchs_own_is_scaled_too() -> None:
    assert offbeat.optimizer("NAdam").scaled(3.0).options["lr"] == 0.002 * 3.0


def test_fused_comes_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    build = Optimizer.build

    def spy(self: Optimizer, *args: Any, fused: bool = False) -> torch.optim.Optimizer:
        built.append(fused)
        return build(self, *args, fused=fused)

    monkeypatch.setattr(Optimizer, "build", spy)
    recipe = toy_recipe(optimizer=Adam(lr=0.01))
    plain = train(recipe, tmp_path / "plain", workers=1).state_dict()
    assert not any(built)
    built.clear()
    fused = train(recipe, tmp_path / "fused", workers=1, fused=True).state_dict()
    assert built and all(built)
    for name, value in plain.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-3, atol=1e-4)


# -- every discipline --------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("discipline", [*DISCIPLINES, "bounded:0", "bounded:inf"])
def test_every_discipline_learns_and_loses_no_update(
    run_dir: Path, discipline: str, workers: int, servers: int
) -> None:
    in_an_update = workers if discipline == "sync" else IN_AN_UPDATE.get(discipline, 1)
    result = train(
        toy_recipe(optimizer=SGD(lr=0.02 * IN_AN_UPDATE.get(discipline, 1))),
        run_dir,
        discipline=discipline,
        workers=workers,
        servers=servers,
        epochs=12,
    )
    summary = result.summary
    assert result.test_accuracy is not None and result.test_accuracy > 0.9
    assert summary["gradients"] == 12 * 24
    assert summary["rejected"] == 0
    pushes = [e for e in read_events(run_dir / "events") if e["kind"] == "push"]
    assert len({(p["shard"], p["worker"], p["sequence"]) for p in pushes}) == len(pushes)
    assert len(pushes) == 12 * 24 * servers
    for shard, row in enumerate(summary["kept"]):
        assert num_dealt_with(row, discipline) == 12 * 24
        assert row["version"] == -(-row["applied"] // in_an_update)
        made = Counter(p["version"] for p in pushes if p["shard"] == shard and p["applied_s"])
        assert sorted(made) == list(range(1, row["version"] + 1))
        assert max(made.values()) == in_an_update and sum(made.values()) == row["applied"]
    check_staleness(discipline, workers, result.staleness)


def check_staleness(discipline: str, workers: int, staleness: offbeat.api.Staleness) -> None:
    if discipline in ("sync", "rennala") or (
        workers == 1 and not discipline.endswith(("reply", "free", "apply"))
    ):
        assert staleness.max == 0
    if discipline.startswith("bounded") and not discipline.endswith("inf"):
        bound = 0 if discipline.endswith("0") else 1
        assert staleness.max <= (workers - 1) * (2 * bound + 1)
    if discipline in ("apply-reply", "bounded:inf"):
        assert staleness.mean <= workers - 1
    if discipline == "ringmaster":
        assert staleness.max < 16
    if discipline in ("reply-apply", "lock-free"):  # what is applied between a reply and the
        assert staleness.mean <= workers + 1  # own apply behind it counts for two gradients


# -- data and metrics of other kinds -----------------------------------------------------------


class Pairs(Dataset[Any]):
    def __init__(self) -> None:
        self.x, self.y = toy_data()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.x[index], int(self.y[index])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        x, y = toy_data()
        return ((row, int(label)) for row, label in zip(x, y, strict=True))


@pytest.mark.parametrize("data", [Pairs(), Stream()])
@pytest.mark.parametrize("length", [{"epochs": 3}, {"steps": 40}])
def test_datasets_of_both_styles_train(run_dir: Path, data: Any, length: dict[str, int]) -> None:
    recipe = toy_recipe(data=lambda config: (data, data))
    result = train(recipe, run_dir, discipline="sync", workers=2, **length)
    expected = 3 * 24 if "epochs" in length else 80
    assert result.summary["gradients"] == expected
    assert [w["examples"] for w in result.summary["workers"]] == [expected * 5] * 2
    assert result.test_accuracy is not None and result.test_accuracy > 0.8


def test_another_metric_is_reported_as_such(run_dir: Path) -> None:
    def mean_error(model: nn.Module, batch: Any) -> tuple[float, int]:
        probabilities = model(batch[0]).softmax(-1)
        missed = 1 - probabilities[torch.arange(len(batch[1])), batch[1]]
        return missed.sum().item(), len(batch[1])

    result = train(toy_recipe(metric=mean_error), run_dir, workers=1)
    assert result.test_accuracy is None
    assert result.summary["metric"] == "mean_error"
    assert result.test_metric is not None and 0 < result.test_metric < 0.5


def regression(data: Any, loss: Any, **fields: Any) -> offbeat.Recipe:
    model = fields.pop("model", lambda: nn.Linear(6, 1))
    return toy_recipe(model, data=lambda config: (data, data), loss=loss, **fields)


def squared(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def test_without_a_metric_a_regression_is_judged_by_its_loss(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.roles.scoring.BATCH_SIZE", 100)  # the last one has 40
    x = toy_data()[0] / 10  # or the rate would be too high for it
    data = x, x.sum(dim=1, keepdim=True).square()
    recipe = regression(data, squared, model=lambda: nn.Sequential(nn.Linear(6, 1), nn.Dropout()))
    result = train(recipe, run_dir, workers=1, steps=30)
    assert result.summary["metric"] == "loss" and result.test_accuracy is None
    assert json.loads((run_dir / "config.json").read_text())["metric"] == "loss"
    module = recipe.model().eval()
    module.load_state_dict(result.state_dict())
    assert result.test_metric == pytest.approx(squared(module, data).item(), rel=1e-5)
    assert offbeat.evaluate(run_dir, recipe=recipe) == result.test_metric
    lines: list[str] = []
    offbeat.evaluate(run_dir, recipe=recipe, say=lines.append)
    assert lines == [f"loss = {result.test_metric:.3f}"]


def one_logit(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch[0])[:, 0]
    return nn.functional.binary_cross_entropy_with_logits(logits, (batch[1] > 0).float())


def of_dict(model: nn.Module, batch: Any) -> torch.Tensor:
    return squared(model, (batch["x"], batch["y"][:, None]))


def with_weights(model: nn.Module, batch: Any) -> torch.Tensor:
    return squared(model, (batch[0], batch[1][:, None]))


X, Y = toy_data()


@pytest.mark.parametrize(
    ("data", "loss", "message"),
    [
        ((X, X[:, :1]), squared, r"whole numbers, not float32 \[2, 1\]"),
        ((X, Y), one_logit, r"a value for each class: labels are int64 \[2\], .* \[2, 1\]"),
        ({"x": X, "y": Y}, of_dict, r"\(inputs, labels\), not a dict of 2"),
        ((X, Y, Y), with_weights, r"\(inputs, labels\), not a tuple of 3"),
    ],
)
def test_accuracy_is_for_classes_alone(tmp_path: Path, data: Any, loss: Any, message: str) -> None:
    result = train(regression(data, loss), tmp_path / "default", workers=1, steps=2)
    assert result.summary["metric"] == "loss" and result.test_metric is not None
    with pytest.raises(RecipeError, match=message):
        train(regression(data, loss, metric=offbeat.accuracy), tmp_path / "asked")
    assert not (tmp_path / "asked").exists()


def test_a_model_that_only_its_loss_can_call_is_judged_by_it(run_dir: Path) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.layer(x), y)

    recipe = toy_recipe(Pair, loss=lambda model, batch: model(*batch))
    assert train(recipe, run_dir, workers=1, steps=2).summary["metric"] == "loss"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_metric_that_is_no_number_is_shown_and_no_failure(
    run_dir: Path, capsys: pytest.CaptureFixture[str], bad: float
) -> None:
    def odd(model: nn.Module, batch: Any) -> tuple[float, int]:
        return bad, 1

    result = offbeat.train(toy_recipe(metric=odd), run_dir=run_dir, workers=1, threads=1)
    assert result.summary["status"] == "finished"
    assert result.test_metric is not None and math.isnan(result.test_metric)
    assert (result.summary["test_metric"], result.summary["metric_is_nan"]) == (None, True)
    shown = capsys.readouterr().out
    assert f"warning: the metric odd is {bad}, no number, at version 48; look at" in shown


def top2(model: nn.Module, batch: Any) -> tuple[float, int]:
    best = model(batch[0]).topk(2).indices
    return float((best == batch[1][:, None]).any(dim=1).sum()), len(batch[1])


def missed(model: nn.Module, batch: Any) -> tuple[float, int]:
    right, count = offbeat.accuracy(model, batch)
    return count - right, count


SEVERAL: dict[str, Any] = {
    "accuracy": offbeat.accuracy,
    "top2": offbeat.metric(top2, higher_is_better=True),
    "missed": missed,
}


def test_several_metrics_and_the_loss_are_scored_by_name(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.roles.scoring.BATCH_SIZE", 100)  # the last one has 40
    recipe = toy_recipe(metrics=SEVERAL)
    result = offbeat.train(recipe, run_dir=run_dir, workers=1, threads=1, steps=10)
    module = toy_model().eval()
    module.load_state_dict(result.state_dict())
    data = toy_data()
    wanted = {name: total / n for name, m in SEVERAL.items() for total, n in [m(module, data)]}
    wanted["loss"] = cross_entropy(module, data).item()
    assert list(result.test_scores) == ["accuracy", "top2", "missed", "loss"]
    assert result.test_scores == pytest.approx(wanted, rel=1e-5)
    assert result.test_loss == result.summary["test_loss"] == result.test_scores["loss"]
    assert result.test_accuracy == result.test_metric == result.test_scores["accuracy"]
    ways = {"accuracy": True, "top2": True, "missed": None, "loss": False}
    assert result.summary["higher_is_better"] == ways
    assert json.loads((run_dir / "config.json").read_text())["metrics"] == ways
    *_, event = [e for e in read_events(run_dir / "events") if e["kind"] == "score"]
    assert event["scores"] == result.test_scores and event["metric"] == result.test_accuracy
    lines: list[str] = []
    assert offbeat.evaluate(run_dir, recipe=recipe, say=lines.append) == result.test_accuracy
    words = [f"{name} = {value:.3f}" for name, value in list(wanted.items())[1:]]
    assert lines == [", ".join([f"precision @ 1 = {wanted['accuracy']:.3f}", *words])]
    logged = (run_dir / "logs" / "evaluator.log").read_text()
    assert f"version 10: accuracy {wanted['accuracy']:.4f}, top2 {wanted['top2']:.4f}, " in logged


def test_a_metric_called_loss_takes_the_place_of_the_recipes(run_dir: Path) -> None:
    metrics = {"accuracy": offbeat.accuracy, "loss": lambda model, batch: (3.0, 1)}
    assert train(toy_recipe(metrics=metrics), run_dir, workers=1, steps=2).test_loss == 3.0


def test_a_single_metric_may_say_which_way_it_is_better(run_dir: Path) -> None:
    recipe = toy_recipe(metric=offbeat.metric(missed, higher_is_better=False))
    summary = train(recipe, run_dir, workers=1, steps=2).summary
    assert summary["metric"] == "missed"
    assert summary["higher_is_better"] == {"missed": False, "loss": False}


def test_a_loss_that_fails_on_test_data_is_left_out_and_told_once(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            raise KeyError("what only training has")
        return cross_entropy(model, batch)

    recipe = toy_recipe(loss=loss)
    result = offbeat.train(recipe, run_dir=run_dir, workers=1, threads=1, eval_every=5)
    assert result.test_loss is None and result.summary["test_loss"] is None
    assert list(result.test_scores) == ["accuracy"]
    assert capsys.readouterr().out.count("no test loss: the recipe's loss fails on the test") == 1


def test_a_test_loss_that_is_no_number_is_shown_and_no_failure(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        found = cross_entropy(model, batch)
        return found if torch.is_grad_enabled() else found * math.inf

    result = offbeat.train(toy_recipe(loss=loss), run_dir=run_dir, workers=1, threads=1)
    assert result.test_loss is not None and math.isnan(result.test_loss)
    assert result.summary["test_scores"]["loss"] is None and result.test_accuracy is not None
    shown = capsys.readouterr().out
    assert "warning: the metric loss is inf, no number, at version 48; look at" in shown
    assert "the recipe's loss" in shown


def test_metrics_of_the_users_that_fail_end_the_run(run_dir: Path) -> None:
    def broken(model: nn.Module, batch: Any) -> tuple[float, int]:
        raise KeyError("x")

    with pytest.raises(RoleError, match="KeyError"):
        train(toy_recipe(metrics={**SEVERAL, "loss": broken}), run_dir, workers=1, steps=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metric": missed, "metrics": SEVERAL}, "either a metric or metrics"),
        ({"metrics": {"a=b": missed}}, "name must be made of letters.*'a=b'"),
        ({"metrics": {"top5": 5}}, "metric top5 must be a function"),
    ],
)
def test_metrics_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        toy_recipe(**fields)
    with pytest.raises(RecipeError, match="must be a function"):
        offbeat.metric(0.5, higher_is_better=True)  # type: ignore[arg-type]


def test_accuracy_among_several_is_for_classes_too(run_dir: Path) -> None:
    with pytest.raises(RecipeError, match="whole numbers"):
        train(regression((X, X[:, :1]), squared, metrics=SEVERAL), run_dir)


def test_without_test_data_there_is_no_score(run_dir: Path) -> None:
    result = train(toy_recipe(data=lambda config: (toy_data(), None)), run_dir)
    assert result.test_accuracy is None and result.test_metric is None


class Idle(offbeat.Callback):
    pass


@pytest.mark.parametrize(
    ("made", "options", "says"),
    [
        (toy_model, {}, "train takes a Recipe, not a model"),
        (toy_recipe, {"callbacks": Idle()}, "callbacks must be a list of them"),
        (toy_recipe, {"stop_at": 90}, "stop_at 90 is never reached: an accuracy is 1 at most"),
        (
            toy_recipe,
            {"optimizer": offbeat.Adam()},
            "optimizer must be text, not an object of class Optimizer",
        ),
        (toy_recipe, {"set": "width"}, "set must be of the form NAME=VALUE, not 'width'"),
        (
            lambda: toy_recipe(model=lambda: _with_nan(toy_model())),
            {},
            "a parameter with NaN or infinite values: 0.weight",
        ),
        (lambda: toy_recipe(metrics=[offbeat.accuracy]), {}, "metrics must be functions by their"),
        (
            lambda: toy_recipe(schedule=lr_scheduler.StepLR),
            {},
            r"as offbeat.schedule\(torch.optim.lr_scheduler.StepLR, step_size=30\)",
        ),
    ],
    ids=["model", "callback", "percent", "optimizer", "set", "nan", "metrics", "scheduler"],
)
def test_what_people_may_give_by_mistake_is_said_in_a_line(
    made: Any, options: dict[str, Any], says: str, run_dir: Path
) -> None:
    with pytest.raises((ConfigError, RecipeError), match=says):
        offbeat.train(made(), run_dir=run_dir, quiet=True, **options)
    assert not run_dir.exists()


def _with_nan(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        next(model.parameters())[0, 0] = math.nan
    return model


def test_none_is_what_was_not_given(run_dir: Path) -> None:
    options = {"workers": None, "discipline": None, "servers": None, "callbacks": lambda: [Idle()]}
    result = train(toy_recipe(), run_dir, steps=3, engine="inproc", **options)
    assert result.summary["gradients"] == 3 * make_config({}).workers


def test_a_schedule_that_needs_a_length_says_so(run_dir: Path) -> None:
    recipe = toy_recipe(data=lambda config: (Stream(), None), schedule=offbeat.cosine())
    with pytest.raises(ConfigError, match="--steps"):
        train(recipe, run_dir)
    assert not run_dir.exists()
    train(recipe, run_dir, steps=5)


def test_the_evaluator_scores_the_moving_average(run_dir: Path) -> None:
    recipe = toy_recipe(ema=0.5)
    result = train(recipe, run_dir, workers=1, steps=30)
    averaged, plain = result.state_dict(ema=True), result.state_dict()
    assert not torch.equal(averaged["0.weight"], plain["0.weight"])
    module = toy_model()
    module.load_state_dict(averaged)
    x, y = toy_data()
    expected = (module(x).argmax(-1) == y).float().mean().item()
    assert result.test_accuracy == pytest.approx(expected)


# -- the run's folder --------------------------------------------------------------------------


def test_the_folder_holds_what_it_should(run_dir: Path) -> None:
    result = train(toy_recipe(), run_dir, discipline="bounded:1", servers=2, seed=3, eval_every=10)
    assert sorted(p.name for p in run_dir.iterdir()) == [
        "checkpoints",
        "config.json",
        "events",
        "logs",
        "state.json",
        "summary.json",
    ]
    described = json.loads((run_dir / "config.json").read_text())
    assert described["config"]["staleness"] == 1.0
    assert described["config"]["batch_size"] == 10, "resolved"
    assert {"torch", "python", "offbeat", "git"} <= set(described["environment"])
    logs = sorted(p.name for p in (run_dir / "logs").iterdir())
    roles = ["evaluator", "master", "ps-0", "ps-1", "worker-0", "worker-1"]
    assert logs == [f"{role}.log" for role in roles]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary == result.summary
    assert {
        "recipe", "discipline", "engine", "num_servers", "num_workers", "seed", "gradients",
        "updates", "total_time_s", "train_time_s", "gradients_per_s", "updates_per_s",
        "examples_per_s", "test_accuracy", "test_metric", "final_cost", "staleness", "dropped",
        "rejected", "workers",
    } <= set(summary)  # fmt: skip
    assert set(summary["staleness"]) == {"mean", "p50", "p95", "p99", "max"}
    assert (summary["engine"], summary["num_servers"], summary["seed"]) == ("inproc", 2, 3)
    assert [w["gradients"] for w in summary["workers"]] == [24, 24]
    assert [w["examples"] for w in summary["workers"]] == [240, 240]
    assert 0 < summary["train_time_s"] <= summary["total_time_s"]
    scores = [e for e in read_events(run_dir / "events") if e["kind"] == "score"]
    assert scores[-1]["version"] == summary["updates"] == 48
    assert scores[-1]["count"] == 240


def halved(version: int, total: int | None) -> float:
    return 0.5


class Halving:
    def __call__(self, version: int, total: int | None) -> float:
        return 0.5


RESOLVED: dict[str, Any] = {
    "local_steps": None,
    "outer_optimizer": None,
    "overlap": False,
    "compress": None,
    "compress_always": False,
    "compress_replies": None,
    "optimizer": "SGD(lr=0.1)",
    "lr": 0.1,
    "lr_scale": "none",
    "schedule": "constant()",
    "partition": "elements",
    "batch_size": 10,
    "accumulate": 1,
    "epochs": 2,
    "steps": None,
    "devices": ["cpu", "cpu"],
    "engine": "inproc",
    "crews": None,
    "threads": 1,
    "amp": None,
    "server_device": "cpu",
    "backend": None,
    "feed": "direct",
    "ema": None,
    "eval_every": 24,
    "checkpoint_every": 24,
}


@pytest.mark.parametrize(
    ("fields", "options", "expected"),
    [
        ({}, {}, {}),
        ({}, {"steps": 4, "lr": 0.3}, {"optimizer": "SGD(lr=0.3)", "lr": 0.3, "steps": 4}),
        (
            {"optimizer": AdamW(weight_decay=0, groups={"*.bias": {"lr": 0.0}}), "ema": 0.9},
            {"batch_size": 20, "eval_every": 7, "checkpoint_every": 3, "devices": "cpu,cpu"},
            {
                "optimizer": "AdamW(lr=0.001, weight_decay=0, groups={'*.bias': {'lr': 0.0}})",
                "lr": 0.001,
                "batch_size": 20,
                "ema": 0.9,
                "eval_every": 7,
                "checkpoint_every": 3,
                "devices": [["cpu", "cpu"]] * 2,
            },
        ),
        ({}, {"optimizer": "momentum"}, {"optimizer": "SGD(lr=0.05, momentum=0.9)", "lr": 0.05}),
        ({"schedule": halved, "feed": "batching"}, {}, {"schedule": "halved", "feed": "batching"}),
        ({"schedule": Halving()}, {}, {"schedule": "Halving"}),
        ({"schedule": offbeat.cosine(warmup=3)}, {}, {"schedule": "cosine(warmup=3)"}),
        (
            {"schedule": offbeat.step_decay(every=5, factor=0.5)},
            {},
            {"schedule": "step_decay(every=5, factor=0.5)"},
        ),
    ],
)
def test_the_folder_tells_what_was_really_used(
    run_dir: Path, fields: dict[str, Any], options: dict[str, Any], expected: dict[str, Any]
) -> None:
    train(toy_recipe(**fields), run_dir, **options)
    described = json.loads((run_dir / "config.json").read_text())
    epochs = {"epochs": None} if "steps" in options else {}
    assert described["resolved"] == {**RESOLVED, **epochs, **expected}
    assert described["config"]["optimizer"] == options.get("optimizer"), "resuming reads this one"


def test_the_folder_tells_of_the_machine(
    recipe: offbeat.Recipe, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe, run_dir, steps=1)
    found = json.loads((run_dir / "config.json").read_text())["environment"]
    assert found["cores"] == len(os.sched_getaffinity(0)) and found["cpu"] and found["gpus"] == {}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the one at {device}")
    devices = [torch.device("cpu"), torch.device("cuda:1")]
    described = describe_run(make_config({}), devices)
    assert described["environment"]["gpus"] == {"cuda:1": "the one at cuda:1"}


def test_the_final_checkpoint_counts_every_push(run_dir: Path) -> None:
    train(toy_recipe(), run_dir, discipline="reply-apply", workers=3, servers=2, keep=1)
    (path,) = (run_dir / "checkpoints").iterdir()
    manifest = json.loads((path / "manifest.json").read_text())
    assert [s["version"] for s in manifest["shards"]] == [48, 48]
    counts = [
        0,
        16,
        16,
        0,
        0,
        0,
        16,
    ]  # incarnation, sequence; applied, dropped, rejected, lost; batches
    assert manifest["shards"][0]["accounts"] == {str(w): counts for w in range(3)}


def test_a_used_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    train(toy_recipe(), tmp_path / "run", workers=1, steps=1)
    before = (tmp_path / "run" / "summary.json").read_bytes()
    with pytest.raises(RunDirError, match="holds another run"):
        train(toy_recipe(), tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").read_bytes() == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    with pytest.raises(RunDirError, match="not empty"):
        train(toy_recipe(), tmp_path / "full")
    with pytest.raises(RunDirError, match="is a file"):
        train(toy_recipe(), tmp_path / "full" / "mine.txt")
    with pytest.raises(RunDirError, match="choose another --run-dir"):
        train(toy_recipe(), tmp_path / "full" / "mine.txt" / "run")


def test_two_runs_in_one_second_get_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("offbeat.run.rundir.time.strftime", lambda form: "20260101-000000")
    for _ in range(2):
        offbeat.train(toy_recipe(), quiet=True, workers=1, steps=1)
    names = sorted(p.name for p in (tmp_path / "runs").iterdir())
    assert names == ["20260101-000000-custom-apply-reply", "20260101-000000-custom-apply-reply-2"]


# -- when something goes wrong -----------------------------------------------------------------


def spoil(at_step: int, value: float, *, only_gradient: bool = False) -> Any:
    """A loss that becomes `value`, or whose gradient does, at a worker's step so and so."""
    calls = {"n": 0}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        result = cross_entropy(model, batch)
        if not torch.is_grad_enabled():
            return result
        calls["n"] += 1
        if calls["n"] != at_step:
            return result
        if only_gradient:
            result.register_hook(lambda gradient: gradient * value)
            return result
        return result * value

    return loss


@pytest.mark.parametrize("data", ["tuple", "dict"])
def test_a_loss_that_the_data_spoils_is_blamed_on_the_data(run_dir: Path, data: str) -> None:
    x, y = toy_data()
    x[7, 2], x[7, 3] = math.nan, math.inf
    given: Any = (x, y) if data == "tuple" else {"x": x, "y": y}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(model, tuple(batch.values()) if data == "dict" else batch)

    recipe = toy_recipe(data=lambda config: (given, None), loss=loss, batch_size=240)
    with pytest.raises(NonFiniteLossError, match=r"2 of the 1,440 numbers in its batch") as caught:
        train(recipe, run_dir, workers=1)
    assert "--lr" not in str(caught.value)


def test_a_loss_that_the_parameters_spoil_is_blamed_on_the_rate(run_dir: Path) -> None:
    x, y = toy_data()
    data = torch.cat([x, torch.full((240, 1), -math.inf)], dim=1), y  # a mask that does no harm

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(model, (batch[0][:, :6] * 1e10, batch[1]))

    recipe = toy_recipe(
        lambda: nn.Linear(6, 3), SGD(lr=1e30), data=lambda config: (data, None), loss=loss
    )
    with pytest.raises(NonFiniteLossError, match="parameters are not finite any more: a lower"):
        train(recipe, run_dir, workers=1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("discipline", ["sync", "apply-reply", "lock-free"])
def test_a_non_finite_loss_stops_the_run_and_keeps_the_last_good_state(
    run_dir: Path, discipline: str, value: float
) -> None:
    recipe = toy_recipe(loss=spoil(9, value))
    with pytest.raises(NonFiniteLossError, match=r"in worker \d at step \d") as caught:
        train(recipe, run_dir, discipline=discipline, workers=2)
    assert caught.value.exit_code == 1
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert 4 <= summary["gradients"] < 48
    state = offbeat.Result(run_dir, summary).state_dict()
    assert all(bool(v.isfinite().all()) for v in state.values())


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_a_non_finite_gradient_is_refused_whole_and_counted(
    run_dir: Path, discipline: str, servers: int
) -> None:
    """Only one element of it is bad, and lies in one slice; no other slice may take its part."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        result = cross_entropy(model, batch)
        if torch.is_grad_enabled() and bool((batch[0] == marked).all(-1).any()):
            bias = model[2].bias
            spoilt = torch.zeros(3)
            spoilt[1] = math.nan
            bias.register_hook(lambda gradient: gradient + spoilt) if not seen else None
            seen.append(1)
        return result

    seen: list[int] = []
    marked = toy_data()[0][17]
    recipe = toy_recipe(loss=loss)
    recipe_options: dict[str, Any] = {"discipline": discipline, "workers": 2, "servers": servers}
    result = train(recipe, run_dir, steps=24, **recipe_options)
    summary = result.summary
    assert summary["rejected"] >= 1
    pushes = [e for e in read_events(run_dir / "events") if e["kind"] == "push"]
    for worker in range(2):
        for sequence in range(1, 25):
            outcomes = {
                p["outcome"] for p in pushes if (p["worker"], p["sequence"]) == (worker, sequence)
            }
            assert not {"applied", "rejected"} <= outcomes, "no slice takes its part"
            assert len(outcomes) == 1 or discipline in DROPPING
    assert all(bool(v.isfinite().all()) for v in result.state_dict().values())


def test_an_error_in_the_users_code_names_worker_step_and_place(run_dir: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise KeyError("no such column")

    with pytest.raises(RoleError, match=r"worker \d failed at step 1: KeyError.*test_train.py"):
        train(toy_recipe(loss=loss), run_dir)
    text = "".join((run_dir / "logs" / f"worker-{w}.log").read_text() for w in range(2))
    assert "Traceback" in text and "no such column" in text


def test_an_error_in_the_evaluator_does_not_stop_training_but_fails_the_run(run_dir: Path) -> None:
    def metric(model: nn.Module, batch: Any) -> tuple[float, int]:
        raise ValueError("cannot score")

    with pytest.raises(RoleError, match="the evaluator failed: ValueError: cannot score"):
        train(toy_recipe(metric=metric), run_dir, workers=2, eval_every=5)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["gradients"] == 48
    assert "Traceback" in (run_dir / "logs" / "evaluator.log").read_text()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"loss": lambda model, batch: 0.5},
            "loss must return a tensor of one number, not a float",
        ),
        ({"loss": lambda model, batch: model(batch[0])}, r"not a tensor of shape \(10, 3\)"),
        ({"loss": lambda model, batch: torch.tensor(1.0)}, "depends on no parameter"),
        ({"metric": lambda model, batch: 0.5}, "metric must return a sum and a count"),
    ],
)
def test_functions_that_return_something_else_are_named(
    run_dir: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RoleError, match=message):
        train(toy_recipe(**fields), run_dir)


def test_load_gives_the_newest_weights_of_a_run(run_dir: Path) -> None:
    result = train(toy_recipe(), run_dir, workers=1, steps=5)
    assert_same(offbeat.load(run_dir), result.state_dict())
    toy_model().load_state_dict(offbeat.load(str(run_dir)))
    with pytest.raises(offbeat.RunError, match="no valid checkpoint"):
        offbeat.load(run_dir / "nowhere")


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run in threads gets a Ctrl-C when its workers are well under way."""
    original = InprocEngine.status
    done: list[bool] = []

    def interrupt(self: InprocEngine) -> Any:
        if not done and min(p["steps"] for p in self._progress("master", "worker")) > 20:
            done.append(True)
            raise KeyboardInterrupt
        return original(self)

    monkeypatch.setattr(InprocEngine, "status", interrupt)


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_after_ctrl_c_what_was_done_is_what_is_kept(
    run_dir: Path, interrupted: None, discipline: str
) -> None:
    options = {"discipline": discipline, "servers": 2, "workers": 3}
    result = train(toy_recipe(), run_dir, steps=1_000_000, **options)
    assert result.interrupted
    summary = result.summary
    kept = newest_checkpoint(run_dir / "checkpoints")
    steps = [e for e in read_events(run_dir / "events") if e["kind"] == "step"]
    assert len(steps) == summary["gradients"] > 60
    assert (summary["lost_updates"], summary["not_kept"]) == (0, 0)
    for shard, row in zip(kept.shards, summary["kept"], strict=True):
        assert num_dealt_with(row, discipline) == row["gradients"] == summary["gradients"]
        assert row["version"] == shard.version
        assert discipline in DROPPING or shard.version == summary["updates"]
        assert sum(account.applied for account in shard.accounts.values()) == row["applied"]

    again = offbeat.resume(run_dir, toy_recipe(), steps=len(steps), quiet=True)
    summary = again.summary
    assert summary["gradients"] == 3 * len(steps)
    assert num_dealt_with(summary["kept"][1], discipline) == 3 * len(steps)
    assert (summary["lost_updates"], summary["not_kept"]) == (0, 0)


def test_torchs_generator_and_threads_are_the_callers_own(run_dir: Path) -> None:
    torch.manual_seed(77)
    expected = torch.rand(3)
    torch.manual_seed(77)
    threads = torch.get_num_threads()
    train(toy_recipe(), run_dir, workers=2)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_each_server_sees_only_its_slice() -> None:
    job = toy_job(servers=3, workers=1)
    model = job.make_model()
    shards = [job.make_shard(k) for k in range(3)]
    for k, shard in enumerate(shards):
        shard.load(job.initial_state(k, model))
    assert torch.equal(torch.cat([shard.params for shard in shards]), model.params)
    sizes = [job.layout(k).num_elements for k in range(3)]
    assert sizes == [len(shard.params) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


def test_a_worker_goes_on_only_when_every_server_has_replied(tmp_path: Path) -> None:
    """Two slices; the second server's replies are held back, so no second push comes."""
    job = toy_job(servers=2, workers=1, steps=2)
    listeners = [InprocListener(), InprocListener()]
    stop = threading.Event()
    events = EventLog(tmp_path / "worker-0.jsonl")

    worker = Worker(
        job,
        0,
        job.make_towers(0, job.make_model()),
        InprocNetwork(listeners),
        events=events,
        log=logging.Logger("test"),
        clock=lambda: 0.0,
        stop=stop,
    )
    thread = threading.Thread(target=worker.run)
    thread.start()
    ends = []
    for listener in listeners:
        end = listener.accept(10)
        assert end is not None
        end.welcome(WelcomeHeader(version=0))
        ends.append(end)
    pushes = [end.receive(10) for end in ends]
    assert [p.sequence for p in pushes if p] == [1, 1]
    ends[0].send(ReplyHeader(1, version=1))
    assert ends[0].receive(0.3) is None, "not before the other server has answered"
    ends[1].send(ReplyHeader(1, version=1))
    assert [end.receive(10).sequence for end in ends] == [2, 2]
    stop.set()
    thread.join(10)
    events.close()


def test_in_sync_a_checkpoint_holds_the_same_round_of_every_shard(run_dir: Path) -> None:
    recipe = toy_recipe(epochs=100)
    train(recipe, run_dir, discipline="sync", servers=3, workers=2, eval_every=1, keep=1000)
    rounds = []
    for path in sorted((run_dir / "checkpoints").iterdir()):
        manifest = json.loads((path / "manifest.json").read_text())
        versions = {shard["version"] for shard in manifest["shards"]}
        assert len(versions) == 1, f"{path.name} mixes rounds {versions}"
        rounds.append(versions.pop())
    assert rounds[0] == 0 and rounds[-1] == 1200
    assert len(set(rounds)) == len(rounds) > 2


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_the_last_checkpoint_is_what_the_shards_hold(run_dir: Path, discipline: str) -> None:
    """Also when one was asked for a moment before the end."""
    result = train(
        toy_recipe(), run_dir, discipline=discipline, servers=2, workers=4, steps=10, eval_every=7
    )
    (*_, newest) = sorted((run_dir / "checkpoints").iterdir())
    manifest = json.loads((newest / "manifest.json").read_text())
    total = {"sync": 10, "buffer": 10}.get(discipline, 40)
    if discipline in DROPPING:
        total = manifest["shards"][0]["version"]
    else:
        assert [shard["version"] for shard in manifest["shards"]] == [total, total]
    for worker in range(4):
        counts = manifest["shards"][0]["accounts"][str(worker)]
        dropped = counts[3] if discipline in DROPPING else 0
        assert counts == [0, 10, 10 - dropped, dropped, 0, 0, 10]
    scores = [e["version"] for e in read_events(run_dir / "events") if e["kind"] == "score"]
    assert scores[-1] == total and len(set(scores)) == len(scores), "each is scored once"
    assert result.state_dict()


def test_parameters_that_blow_up_are_not_committed(run_dir: Path) -> None:
    recipe = toy_recipe(optimizer=SGD(lr=100.0, weight_decay=10.0))
    with pytest.raises(offbeat.RunError):
        train(recipe, run_dir, workers=2)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "failed"
    state = offbeat.Result(run_dir, summary).state_dict()
    assert all(bool(v.isfinite().all()) for v in state.values())


def test_a_metric_that_is_no_number_is_null_in_json(run_dir: Path) -> None:
    result = train(toy_recipe(metric=lambda model, batch: (math.inf, 1)), run_dir, workers=1)
    assert result.test_metric is not None and math.isnan(result.test_metric)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["metric"], summary["test_metric"]) == ("metric", None)


@pytest.mark.parametrize("discipline", ["sync", "bounded:0", "lock-free", "apply-reply"])
def test_a_schedule_that_fails_in_the_middle_ends_the_run_at_once(
    run_dir: Path, discipline: str
) -> None:
    recipe = toy_recipe(schedule=lambda version, total: [1.0, 0.1][version // 5])
    with pytest.raises(RoleError, match=r"server \d failed: IndexError"):
        train(recipe, run_dir, discipline=discipline, workers=4, servers=2)
    assert json.loads((run_dir / "summary.json").read_text())["total_time_s"] < 20


@pytest.mark.parametrize("place", ["loss", "log_line", "metric"])
def test_a_keyboard_interrupt_in_the_users_code_is_a_failure(run_dir: Path, place: str) -> None:
    def interrupting(*arguments: Any) -> Any:
        raise KeyboardInterrupt("in the recipe")

    with pytest.raises(RoleError, match="KeyboardInterrupt: in the recipe"):
        train(toy_recipe(**{place: interrupting}), run_dir, log_every=1)


def test_sys_exit_in_the_users_code_is_a_failure(run_dir: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise SystemExit(3)

    with pytest.raises(RoleError, match="SystemExit"):
        train(toy_recipe(loss=loss), run_dir)


def test_a_batch_may_be_skipped_by_a_loss_without_gradient(run_dir: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if bool((batch[1] == 0).sum() % 2):
            return torch.zeros((), requires_grad=True)
        return cross_entropy(model, batch)

    result = train(toy_recipe(loss=loss), run_dir, workers=2, servers=2)
    assert result.summary["gradients"] == result.summary["updates"] == 48


def test_a_stream_of_exactly_as_many_batches_as_steps_is_enough(run_dir: Path) -> None:
    class Once(IterableDataset[Any]):
        def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
            x, y = toy_data()
            yield from ((x[i], int(y[i])) for i in range(40))
            raise AssertionError("asked for more than was needed")

    recipe = toy_recipe(data=lambda config: (Once(), None))
    result = train(recipe, run_dir, workers=1, steps=4)
    assert result.summary["gradients"] == 4


def test_a_module_with_extra_state_trains(run_dir: Path) -> None:
    class Extra(nn.Sequential):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

        def set_extra_state(self, state: dict[str, int]) -> None:
            pass

    recipe = toy_recipe(lambda: Extra(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)))
    assert train(recipe, run_dir).test_accuracy is not None


def test_a_compiled_model_leaves_plain_names_behind(run_dir: Path) -> None:
    """And parameter groups are found by them."""
    recipe = toy_recipe(
        model=lambda: torch.compile(toy_model(), backend="eager"),
        optimizer=SGD(lr=0.1, groups={"0.bias": {"lr": 0.0}}),
    )
    result = train(recipe, run_dir, workers=1, steps=3)
    toy_model().load_state_dict(result.state_dict())
    assert result.test_accuracy == offbeat.evaluate(run_dir, recipe=recipe)


def test_tensors_that_lose_digits_are_named_and_keep_their_dtype(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = toy_model()
            self.register_buffer("scale", torch.tensor([1 / 3], dtype=torch.float64))
            self.register_buffer("shift", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * self.scale.float() + self.shift)

    recipe = toy_recipe(model=Scaled)
    result = offbeat.train(recipe, run_dir=run_dir, threads=1, steps=2)
    told = [line for line in capsys.readouterr().out.splitlines() if "float64" in line]
    assert told == ["rounded to float32's precision, though float64 in the model: scale"]
    scale = result.state_dict()["scale"]
    assert scale.dtype == torch.float64
    assert scale.item() == torch.tensor(1 / 3).item() != 1 / 3
    offbeat.train(toy_recipe(), run_dir=run_dir / "other", threads=1, steps=2)
    assert "float64" not in capsys.readouterr().out


def test_data_sees_the_resolved_configuration(run_dir: Path) -> None:
    seen = []

    def data(config: offbeat.TrainConfig) -> Any:
        seen.append((config.batch_size, config.epochs, config.workers))
        return toy_data(), None

    train(toy_recipe(data=data), run_dir, workers=2)
    assert seen == [(10, 2, 2)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": torch.optim.SGD}, r"one of torch's as offbeat.optimizer\(torch"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"loss": None}, "loss must be a function"),
        ({"batch_size": "a"}, "batch_size must be at least 1, not 'a'"),
        ({"model": toy_model()}, "must be a function that makes a new one"),
    ],
)
def test_a_recipe_is_checked_where_it_is_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        toy_recipe(**fields)


def test_the_master_commits_no_mixture_of_versions_but_asks_further_ahead(tmp_path: Path) -> None:
    servers = [ScriptedServer([0, 10, 21, 40]), ScriptedServer([0, 11, 20, 40])]
    folder = RunFolder(tmp_path)
    assert run_master(folder, toy_job(servers=2, workers=1, eval_every=10), servers) == "finished"
    names = sorted(path.name for path in folder.checkpoints.iterdir())
    assert names == ["00000000", "00000040"]
    assert servers[0].asked == servers[1].asked == [0, 10, 20, 30, 0]
    assert folder.read_json(folder.state)["last_checkpoint"] == "00000040"


def test_the_first_checkpoint_is_no_mixture_either(tmp_path: Path) -> None:
    servers = [ScriptedServer([0, 9]), ScriptedServer([1, 9])]
    folder = RunFolder(tmp_path)
    job = toy_job(servers=2, workers=1, discipline="sync")
    assert run_master(folder, job, servers) == "finished"
    first = load_checkpoint(folder.checkpoints / "00000000")
    assert [shard.version for shard in first.shards] == [0, 0]
    initial = [job.initial_state(k, job.make_model()).tensors for k in range(2)]
    assert all(
        torch.equal(s.tensors["params"], i["params"])
        for s, i in zip(first.shards, initial, strict=True)
    )


def test_a_server_that_dies_before_the_first_checkpoint_is_looked_for(tmp_path: Path) -> None:
    class Dying(ScriptedServer):
        deaths = 1

        def call(self, message: Any, tensors: Any, timeout_s: float) -> tuple[Any, Any]:
            if message["ask"] == "want" and self.deaths:
                self.deaths -= 1
                raise ConnectionClosedError("the connection broke")
            return super().call(message, tensors, timeout_s)

    servers = [Dying([0, 9])]
    folder = RunFolder(tmp_path)
    assert run_master(folder, toy_job(workers=1), servers) == "finished"
    assert (folder.checkpoints / "00000000").exists() and not servers[0].deaths


def test_a_master_that_fails_lets_the_servers_go(tmp_path: Path) -> None:
    servers = [ScriptedServer([0, 10, 20]), ScriptedServer([0, 10, 20])]

    def watch(statuses: Sequence[Status]) -> None:
        raise RuntimeError("the pen broke")

    with pytest.raises(RuntimeError, match="the pen broke"):
        run_master(RunFolder(tmp_path), toy_job(servers=2, workers=1), servers, watch)
    for server in servers:
        assert server.reason.startswith("the master failed: RuntimeError: the pen broke")


def test_train_takes_recipes_and_names_only() -> None:
    for wrong in (5, None):
        with pytest.raises(RecipeError, match="train takes a Recipe, a function that makes one"):
            offbeat.train(wrong)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"toy_model\(\) returned a Sequential, not an offbeat"):
        offbeat.train(toy_model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (None, "custom"),  # python -c, a notebook
        ("<stdin>", "custom"),  # python - < script.py
        ("app.pyz/__main__.py", "custom"),
        ("script", "custom"),
        ("script.py", "script.py:made"),
    ],
)
def test_a_script_that_nobody_can_import_again_gives_a_recipe_no_name(
    recipe: offbeat.Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str | None,
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for script in ("script", "script.py"):
        Path(script).touch()
    main = ModuleType("__main__")
    main.__dict__.update({"made": recipe} if file is None else {"made": recipe, "__file__": file})
    monkeypatch.setitem(sys.modules, "__main__", main)
    found, options = named(recipe, {"steps": 3})
    assert found == name
    assert options == ({"steps": 3, "engine": "inproc"} if name == "custom" else {"steps": 3})


WITH_PARAMETERS = """
import torch
from torch import nn

import offbeat

def make(width: int, classes: int = 2) -> offbeat.Recipe:
    def data(config):
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
        return (x, (x.sum(1) > 0).long()), (x, (x.sum(1) > 0).long())

    return offbeat.Recipe(
        model=lambda: nn.Sequential(nn.Linear(4, width), nn.Linear(width, classes)),
        data=data,
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batch_size=10,
    )
"""


@pytest.mark.parametrize("engine", ["inproc", pytest.param("local", marks=pytest.mark.slow)])
def test_a_recipe_may_have_parameters(tmp_path: Path, run_dir: Path, engine: str) -> None:
    file = tmp_path / "params.py"
    file.write_text(WITH_PARAMETERS)
    flags = ["--recipe", f"{file}:make", "--set", "width=3", "--set", "classes=4", "--quiet"]
    flags += ["--engine", engine, "--run-dir", str(run_dir), "--steps", "2", "--device", "cpu"]
    assert main(["train", *flags]) == 0
    described = json.loads((run_dir / "config.json").read_text())
    assert described["config"]["set"] == {"width": 3, "classes": 4}
    assert offbeat.load(run_dir)["1.weight"].shape == (4, 3)
    assert main(["eval", str(run_dir)]) == 0
    assert main(["train", "--resume", str(run_dir), "--steps", "3", "--set", "classes=4"]) == 0
    assert offbeat.load(run_dir)["1.weight"].shape == (4, 3)
    again = ["--config", str(run_dir / "config.json"), "--set", "width=5"]
    assert main(["train", *again, "--run-dir", str(tmp_path / "again")]) == 0
    assert offbeat.load(tmp_path / "again")["1.weight"].shape == (4, 5)


def test_python_takes_a_function_with_its_parameters(run_dir: Path) -> None:
    def make(width: int) -> Recipe:
        return toy_recipe(lambda: nn.Linear(6, width))

    options = {"engine": "inproc", "quiet": True, "steps": 2}
    with pytest.raises(RecipeError, match="custom needs a value for width: --set width=VALUE"):
        offbeat.train(make, **options)
    result = offbeat.train(make, set={"width": 5}, run_dir=run_dir, **options)
    assert result.state_dict()["weight"].shape == (5, 6)
    assert offbeat.evaluate(run_dir, recipe=make) == pytest.approx(result.test_accuracy)
    again = offbeat.resume(run_dir, make, steps=3)
    assert again.state_dict()["weight"].shape == (5, 6)


@pytest.mark.parametrize("text", ["width", "=3"])
def test_a_parameter_is_given_with_its_value(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--set", text]) == 2
    assert "set must be of the form NAME=VALUE" in capsys.readouterr().err


def test_a_recipe_that_was_found_in_a_file_is_named_by_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from helpers import toy_recipe\nown = toy_recipe()\n")
    name, _ = named(load_recipe("mine.py:own"), {})
    assert name == "mine.py:own"
