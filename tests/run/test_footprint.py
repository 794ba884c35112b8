"""A GPU that is out of memory: what is said of it, by arithmetic on a pretended one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cross_entropy, toy_job, toy_model, toy_recipe
from torch import Tensor, nn

import offbeat
from offbeat import SGD, Adam
from offbeat.capture import RECORDINGS, Captured, Recorder
from offbeat.config import make_config
from offbeat.data.batches import Tensors
from offbeat.errors import DeviceMemoryError, RoleError
from offbeat.optim import KINDS, Optimizer
from offbeat.run.footprint import Usage, describe, explained, in_units, parts_of, remedies
from offbeat.run.job import Job
from offbeat.run.making import make_job
from offbeat.shard import Shard, Updater

GPU = torch.device("cuda", 0)
MIB, GIB = 1 << 20, 1 << 30
VECTOR = 4 * (6 * 7 + 7 + 7 * 3 + 3)
"""Bytes of the toy model's parameters."""
NO_MEMORY = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 8.00 GiB"


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that can be talked of, but not used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.fixture
def full_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (MIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6 * GIB)


def test_all_is_said_in_one_line_and_adds_up() -> None:
    usage = Usage(free=GIB, total=10 * GIB, reserved=7 * GIB)
    parts = {"models": 2 * GIB, "nothing": 0, "data": 3 * GIB}
    line = describe("cuda:1", "2.50 GiB", usage, parts, ["less", "--data-device cpu"])
    assert line == (
        "cuda:1 is out of memory: 2.50 GiB was asked for, 1.0 GiB of 10.0 GiB are free; what takes "
        "how much there: models 2.0 GiB, data 3.0 GiB, activations, captured steps and spare "
        "memory 2.0 GiB, other processes and CUDA itself 2.0 GiB; try less or --data-device cpu"
    )


def test_sizes_are_worded_for_people() -> None:
    assert [in_units(n) for n in (0, 1023, 1536, 3 * MIB, 5 * GIB // 2)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "3.0 MiB",
        "2.5 GiB",
    ]


def test_in_one_process_servers_and_all_workers_are_known(pretended_gpu: None) -> None:
    recipe = toy_recipe(optimizer=Adam(), ema=0.9)
    job = make_job(make_config({"engine": "inproc", "workers": 3}), recipe)
    assert parts_of(job, GPU, range(3)) == {
        "the servers' parameters": VECTOR,
        "their optimizer state": 2 * VECTOR,
        "their moving average": VECTOR,
        "their slots": 0,  # gradients lie with the workers
        "updates in the making": VECTOR,
        "3 models of workers": 3 * VECTOR,
        "3 gradients": 3 * VECTOR,
        "training data": 0,
    }
    assert remedies(job, GPU) == [
        "a smaller --batch-size than 10",
        "--data-device cpu",
        "--server-device cpu",
        "--capture off",
        "fewer --workers than 3",
    ]
    lock_free = make_config({"engine": "inproc", "workers": 3, "discipline": "lock-free"})
    assert parts_of(make_job(lock_free, recipe), GPU, [0])["updates in the making"] == 3 * VECTOR


def test_a_process_knows_its_own_worker_only(pretended_gpu: None) -> None:
    options = {"engine": "local", "workers": 1, "data_device": "cpu", "capture": "off"}
    job = toy_job(**options)
    found = parts_of(job, GPU, [0])
    assert found == {"1 model of workers": VECTOR, "1 gradient": VECTOR, "training data": 0}
    more = parts_of(toy_job(**options, accumulate=2), GPU, [0])
    assert more == {**found, "gradients of several batches": VECTOR}
    assert remedies(job, GPU) == ["a smaller --batch-size than 10"]
    two_towers = toy_job(engine="local", devices="cuda:0,cuda:0")
    assert parts_of(two_towers, GPU, [1])["2 models of workers"] == 2 * VECTOR
    assert set(parts_of(job, torch.device("cuda", 1), [0]).values()) == {0}


def test_what_is_frozen_counts_with_the_model(pretended_gpu: None) -> None:
    def half_frozen() -> nn.Module:
        model = nn.Sequential(toy_model(), nn.BatchNorm1d(3))
        model[0][0].requires_grad_(False)
        return model

    job = toy_job(toy_recipe(model=half_frozen), engine="local", workers=1)
    model = job.make_model()
    tensors = [*model.module.parameters(), *model.module.buffers()]
    num_bytes = sum(t.numel() * t.element_size() for t in tensors)
    assert parts_of(job, GPU, [0], model)["1 model of workers"] == num_bytes
    frozen = 4 * (6 * 7 + 7)
    assert parts_of(job, GPU, [0])["1 model of workers"] == num_bytes - frozen, "not known before"


def test_data_counts_where_it_was_put(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Tensors((torch.zeros(10, 3), torch.zeros(10, dtype=torch.uint8)))
    assert data.bytes_on(GPU) == 0 and data.bytes_on(torch.device("cpu")) == 130
    meta = torch.device("meta")
    data._elsewhere[meta] = Tensors((torch.zeros(10, 3, device=meta),))
    assert data.bytes_on(meta) == 120
    data._elsewhere[GPU] = data
    assert data.bytes_on(GPU) == 0, "it was too large, and stayed"


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_keep_what_is_said_that_they_keep(kind: str) -> None:
    optimizer = Optimizer(kind=kind, options={"lr": 0.1})
    job = toy_job(toy_recipe(optimizer=optimizer), servers=1, workers=1)
    shard: Shard = job.make_shard(0)
    shard.load(job.initial_state(0, job.make_model()))
    updater: Updater = shard.make_updater(shared=True)
    kept = {key: v for key, v in updater.optimizer_state().items() if v.numel() * 4 == VECTOR}
    assert optimizer.state_per_element() == [len(kept)]


def test_groups_of_parameters_keep_different_things() -> None:
    optimizer = SGD(momentum=0.9, groups={"*.bias": {"momentum": 0.0}})
    assert optimizer.state_per_element() == [1, 0]


def test_other_errors_stay_what_they_are() -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert explained(error, toy_job(), [0]) is error


def test_what_torch_says_is_understood(pretended_gpu: None) -> None:
    job = toy_job(engine="inproc")
    looked_at = []

    def look(device: torch.device) -> Usage:
        looked_at.append(str(device))
        return Usage(free=MIB, total=8 * GIB, reserved=6 * GIB)

    error = torch.OutOfMemoryError(NO_MEMORY.replace("GPU 0", "GPU 3"))
    better = explained(error, job, [0, 1], look=look)
    assert isinstance(better, DeviceMemoryError) and better.__cause__ is error
    assert str(better).startswith("cuda:3 is out of memory: 2.50 GiB was asked for, 1.0 MiB of")
    unknown = explained(torch.OutOfMemoryError("no memory"), job, [0], look=look)
    assert "cuda:0 is out of memory: more was asked for" in str(unknown)
    assert looked_at == ["cuda:3", "cuda:0"]


# -- where it happens ------------------------------------------------------------------------------


def fail(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError(NO_MEMORY)


def fail_in_steps(model: nn.Module, batch: Any) -> Tensor:
    return fail() if model.training else cross_entropy(model, batch)


def test_a_step(full_gpu: None, run_dir: Path) -> None:
    recipe = toy_recipe(loss=fail_in_steps)
    with pytest.raises(RoleError, match="failed at step 1: cuda:0 is out of memory: ") as caught:
        offbeat.train(recipe, engine="inproc", run_dir=run_dir, quiet=True)
    assert "2.50 GiB was asked for, 1.0 MiB of 8.0 GiB are free" in str(caught.value)
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "failed"


STARVING = f"""
import torch
from helpers import toy_recipe

def loss(model, batch):
    torch.cuda.mem_get_info = lambda device: ({MIB}, {8 * GIB})
    torch.cuda.memory_reserved = lambda device: {6 * GIB}
    raise torch.OutOfMemoryError({NO_MEMORY!r})

recipe = toy_recipe(loss=loss, metric=lambda model, batch: (0.0, 1))
"""


@pytest.mark.slow
def test_a_step_in_a_process_of_its_own(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "starving.py").write_text(STARVING)
    options = {"engine": "local", "workers": 1, "run_dir": run_dir, "quiet": True}
    with pytest.raises(RoleError, match="failed at step 1: cuda:0 is out of memory: ") as caught:
        offbeat.train(f"{tmp_path / 'starving.py'}:recipe", **options)
    assert "2.50 GiB was asked for, 1.0 MiB of 8.0 GiB are free" in str(caught.value)


@pytest.mark.parametrize(
    ("owner", "name", "who"),
    [
        (Job, "step_batches", "worker 0 failed at step 1"),
        (Updater, "apply", "server 0 failed"),
        (Shard, "load", "server 0 failed"),
    ],
)
def test_data_and_servers(
    owner: type, name: str, who: str, full_gpu: None, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(RoleError, match=f"{who}: cuda:0 is out of memory"):
        offbeat.train(toy_recipe(), engine="inproc", workers=1, run_dir=run_dir, quiet=True)


@pytest.mark.parametrize("name", ["make_towers", "make_shard"])
def test_what_is_made_before_the_start(
    name: str, full_gpu: None, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, name, fail)
    with pytest.raises(DeviceMemoryError, match="cuda:0 is out of memory") as caught:
        offbeat.train(toy_recipe(), engine="inproc", run_dir=run_dir, quiet=True)
    assert "\n" not in str(caught.value)


class OutOfMemory(Recorder):
    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        return fail()


def test_a_recording() -> None:
    told: list[str] = []
    captured = Captured(
        "the step",
        lambda batch: batch,
        OutOfMemory(),
        parts=lambda batch: ([batch], None),
        mark_random=lambda: lambda: None,
        tell=told.append,
        gate=RECORDINGS.make_gate(),
    )
    for _ in range(3):
        assert captured.replay(torch.zeros(1)) is None, "anew it may well fit"
    assert len(told) == 1 and "Tried to allocate" in told[0]
