"""A worker's devices: several towers are one step on a larger batch; GPUs where there are any."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import toy_job, toy_model, toy_recipe
from torch import Tensor, nn

import offbeat
from offbeat.config import DISCIPLINES
from offbeat.data.batches import map_tensors, prepared_ahead
from offbeat.errors import ConfigError, RecipeError
from offbeat.towers import CPU, Towers, find_devices
from offbeat.transport.staging import CudaStaging, PlainStaging, Staging, make_staging

HAS_GPU = torch.cuda.is_available()


class LateStaging(Staging):
    """As asynchronous as it may be: copies nothing before it is waited for."""

    def __init__(self) -> None:
        self.uploads: list[tuple[Tensor, Tensor]] = []
        self.downloads: list[tuple[Tensor, Tensor]] = []

    def upload(self, source: Tensor, target: Tensor) -> None:
        self.uploads.append((source, target))

    def ready(self) -> None:
        self._copy(self.uploads)

    def download(self, source: Tensor, target: Tensor) -> None:
        self.downloads.append((source, target))

    def done(self) -> None:
        assert not self.uploads, "the devices were never ready"
        self._copy(self.downloads)

    def forget(self) -> None:
        assert not (self.uploads or self.downloads), "the memory goes away under a copy"

    def _copy(self, begun: list[tuple[Tensor, Tensor]]) -> None:
        for source, target in begun:
            target.copy_(source)
        begun.clear()


@pytest.fixture(params=["cpu", "late"])
def staging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What towers that are made in a test have."""
    if request.param == "late":
        monkeypatch.setattr("offbeat.towers.make_staging", lambda devices, slots: LateStaging())
    return str(request.param)


def train(**options: Any) -> dict[str, torch.Tensor]:
    recipe = options.pop("recipe", None) or toy_recipe()
    result = offbeat.train(recipe, engine="inproc", quiet=True, threads=1, **options)
    return offbeat.load(result.run_dir)


@pytest.mark.parametrize("towers", [2, 3])
def test_n_towers_are_one_step_on_the_n_fold_batch(
    towers: int, staging: str, tmp_path: Path
) -> None:
    options = {"workers": 1, "epochs": 3}
    devices = ",".join(["cpu"] * towers)
    many = train(**options, batch_size=7, devices=devices, run_dir=tmp_path / "many")
    one = train(**options, batch_size=7 * towers, device="cpu", run_dir=tmp_path / "one")
    for name, tensor in one.items():
        torch.testing.assert_close(many[name], tensor)
    start = toy_job().make_model().module.state_dict()
    assert not torch.allclose(one["0.weight"], start["0.weight"], atol=1e-2), "nothing was learned"


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_towers_train_under_every_discipline(discipline: str, staging: str, tmp_path: Path) -> None:
    result = offbeat.train(
        toy_recipe(epochs=15),
        discipline=discipline,
        workers=2,
        servers=2,
        batch_size=5,
        devices="cpu,cpu",
        engine="inproc",
        quiet=True,
        run_dir=tmp_path / "r",
    )
    assert (result.test_accuracy or 0) > 0.85
    assert result.summary["gradients"] == 2 * 15 * 12, "an example is used once per epoch"


@pytest.mark.slow
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_towers_train_in_processes(discipline: str, tmp_path: Path) -> None:
    result = offbeat.train(
        "fashion-cnn",
        discipline=discipline,
        workers=2,
        servers=2,
        steps=6,
        batch_size=10,
        devices="cpu,cpu",
        quiet=True,
        run_dir=tmp_path / "r",
    )
    assert result.summary["gradients"] == 12
    examples = sum(worker["examples"] for worker in result.summary["workers"])
    assert examples == 12 * 2 * 10, "each tower has a batch of its own"


def test_a_batch_of_fewer_examples_than_towers_is_dealt_out(staging: str) -> None:
    job = toy_job()
    towers = Towers([job.make_model() for _ in range(3)], [CPU, CPU, CPU])
    x, y = torch.randn(2, 6), torch.tensor([0, 1])
    parts = towers.deal((x, y))
    assert [weight for weight, _ in parts] == [0.0, 0.5, 0.5]
    towers.compute(job.recipe.loss, parts)
    found = torch.empty(job.manifest.num_elements)
    assert all(towers.take_gradient([found]))
    loss, is_usable = towers.wait()
    alone = Towers([job.make_model()], [CPU])
    alone.compute(job.recipe.loss, alone.deal((x, y)))
    expected = torch.empty_like(found)
    alone.take_gradient([expected])
    assert (pytest.approx(loss), is_usable) == alone.wait()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e20])
@pytest.mark.parametrize("count", [1, 2])
def test_a_gradient_that_no_optimizer_can_work_with_is_found_out(bad: float, count: int) -> None:
    job = toy_job()
    towers = Towers([job.make_model() for _ in range(count)], [CPU] * count)
    gradient = torch.empty(job.manifest.num_elements)

    def loss(model: Any, batch: Any) -> Tensor:
        return (model[0].weight * batch[0].mean()).sum()

    for value, is_usable in ((1.0, True), (bad, False)):
        towers.compute(loss, towers.deal((torch.full((4, 6), value), torch.zeros(4))))
        towers.take_gradient([gradient])
        assert towers.wait()[1] == is_usable


def test_buffers_of_towers_are_averaged(staging: str) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(6), toy_model())

    job = toy_job(toy_recipe(model=model))
    towers = Towers([job.make_model() for _ in range(2)], [CPU, CPU])
    towers.train()
    x, y = torch.randn(8, 6), torch.zeros(8, dtype=torch.long)
    towers.compute(job.recipe.loss, towers.deal((x, y)))
    floats, ints = torch.zeros(12), torch.zeros(1, dtype=torch.int64)
    towers.write_buffers(floats, ints)
    means = [x[:4].mean(dim=0), x[4:].mean(dim=0)]
    torch.testing.assert_close(floats[:6], 0.1 * (means[0] + means[1]) / 2)
    assert ints.item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_there_when_models_show_them(dtype: torch.dtype, staging: str) -> None:
    """Also in a model that keeps them in another dtype, and has to convert what has come."""
    job = toy_job(toy_recipe(model=lambda: toy_model().to(dtype)))
    many = Towers([job.make_model() for _ in range(2)], [CPU, CPU])
    many.landing.fill_(0.5)
    assert many.refresh() == []
    for model in many.models:
        assert all(bool((p == 0.5).all()) for p in model.parameters)


def test_one_tower_on_the_cpu_computes_in_the_slots_themselves() -> None:
    class Unused(LateStaging):
        def upload(self, source: Tensor, target: Tensor) -> None:
            raise AssertionError

        download = upload

    job = toy_job()
    alone = Towers([job.make_model()], [CPU], staging=Unused())
    reply, gradient = torch.full_like(alone.landing, 0.5), torch.empty_like(alone.landing)
    alone.adopt(reply)
    reply.fill_(0.25)
    alone.refresh()
    first = alone.model.parameters[0]
    assert first.data_ptr() == reply.data_ptr() and bool((first == 0.25).all())
    alone.compute(job.recipe.loss, alone.deal((torch.randn(2, 6), torch.tensor([0, 1]))))
    assert all(alone.take_gradient([gradient])) and bool(gradient.isfinite().all())


def test_staging_goes_by_the_devices() -> None:
    gpu = torch.device("cuda", 0)
    assert isinstance(make_staging([CPU, CPU], CPU), PlainStaging)
    assert isinstance(make_staging([gpu], CPU), CudaStaging)
    assert isinstance(make_staging([CPU, gpu], CPU), CudaStaging)
    assert isinstance(make_staging([gpu], gpu), PlainStaging)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "'tpu' is no device; known: cpu, cuda"),
        ({"device": "meta"}, "cannot train on 'meta'"),
        ({"device": "cuda:99"}, "there is no device cuda:99 here: torch sees"),
        ({"devices": "cpu,,cpu"}, "'' is no device"),
        ({"devices": "cpu,cpu", "device": "cpu"}, "give one of the two"),
        ({"device": "cpu,cpu"}, "as --devices cpu,cpu"),
        ({"amp": "fp8"}, "unknown amp 'fp8'"),
    ],
)
def test_wrong_devices_are_one_line(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        toy_job(**options)


def test_without_a_gpu_the_cpu_is_what_workers_compute_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_devices(None, 3) == [CPU]


def test_gpus_are_dealt_out_to_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = [str(find_devices(None, rank)[0]) for rank in range(3)]
    assert found == ["cuda:0", "cuda:1", "cuda:0"]
    assert [str(d) for d in find_devices("cuda:1, cuda", 0)] == ["cuda:1", "cuda:0"]


def test_bf16_trains_and_keeps_float32_parameters(tmp_path: Path) -> None:
    seen = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch[0])
        if torch.is_grad_enabled():  # scored in float32
            seen.append(logits.dtype)
        return nn.functional.cross_entropy(logits.float(), batch[1])

    recipe = toy_recipe(loss=loss, epochs=10)
    result = offbeat.train(
        recipe, engine="inproc", amp="bf16", device="cpu", quiet=True, run_dir=tmp_path / "r"
    )
    assert set(seen) == {torch.bfloat16}
    assert (result.test_accuracy or 0) > 0.85
    assert offbeat.load(result.run_dir)["0.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("suggested", "flag", "expected"),
    [(None, None, None), ("bf16", None, "bf16"), ("bf16", "off", None), (None, "bf16", "bf16")],
)
def test_a_recipe_suggests_a_number_format_and_the_flag_decides(
    suggested: str | None, flag: str | None, expected: str | None, tmp_path: Path
) -> None:
    seen = set()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch[0])
        if torch.is_grad_enabled():
            seen.add(logits.dtype)
        return nn.functional.cross_entropy(logits.float(), batch[1])

    options = {"engine": "inproc", "device": "cpu", "steps": 2, "quiet": True}
    recipe = toy_recipe(loss=loss, amp=suggested)
    offbeat.train(recipe, amp=flag, run_dir=tmp_path / "r", **options)
    assert seen == {torch.float32 if expected is None else torch.bfloat16}
    described = json.loads((tmp_path / "r" / "config.json").read_text())
    assert described["resolved"]["amp"] == expected


def test_a_recipe_suggests_no_number_format_that_is_unknown() -> None:
    with pytest.raises(RecipeError, match="amp must be 'bf16' or None, not 'fp8'"):
        toy_recipe(amp="fp8")


# -- input ways ------------------------------------------------------------------------------------


def test_both_feeds_give_the_same_batches() -> None:
    made = {
        feed: [batch for _, batch in toy_job(feed=feed, workers=1).batches(0)]
        for feed in ("direct", "batching")
    }
    assert len(made["direct"]) == 48
    for one, other in zip(made["direct"], made["batching"], strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_a_recipe_may_differ_by_feed() -> None:
    recipe = toy_recipe(feed="batching", by_feed={"direct": {"batch_size": 4}})
    assert toy_job(recipe).config.batch_size == 10
    assert toy_job(recipe, feed="direct").config.batch_size == 4


def test_what_fails_in_the_thread_is_raised_where_batches_are_used() -> None:
    def items() -> Any:
        yield 1
        raise KeyError("the second")

    ahead = prepared_ahead(items(), 2)
    assert next(ahead) == 1
    with pytest.raises(KeyError, match="the second"):
        next(ahead)


def test_batches_that_nobody_wants_any_more_end_their_thread() -> None:
    def items() -> Any:
        number = 0
        while True:
            yield number
            number += 1

    ahead = prepared_ahead(items(), 2)
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    ahead.close()
    assert not [t for t in threading.enumerate() if t.name == "batches"]


def test_map_tensors_keeps_the_form() -> None:
    batch = {"x": torch.ones(2), "rest": [torch.ones(1), "name", (torch.ones(1),)]}
    doubled = map_tensors(batch, lambda t: 2 * t)
    assert doubled["rest"][1] == "name" and isinstance(doubled["rest"][2], tuple)
    assert doubled["x"].tolist() == [2, 2] and doubled["rest"][2][0].item() == 2


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="there is no GPU here")
@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,cuda:0", "cuda:0,cpu"])
def test_a_gpu_learns_what_the_cpu_learns(devices: str, tmp_path: Path) -> None:
    options = {"workers": 1, "epochs": 3}
    towers = len(devices.split(","))
    there = train(**options, batch_size=12 // towers, devices=devices, run_dir=tmp_path / "there")
    here = train(**options, batch_size=12, device="cpu", run_dir=tmp_path / "here")
    for name, tensor in here.items():
        torch.testing.assert_close(there[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="there is no GPU here")
@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize(("chosen", "crews"), [("inproc", []), ("local", []), ("local", [[0, 1]])])
def test_workers_share_a_gpu_as_threads_as_processes_and_as_a_crew(
    discipline: str,
    chosen: str,
    crews: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offbeat.run.making.choose_engine", lambda config, devices: (chosen, crews))
    result = offbeat.train(
        "fashion-cnn",
        discipline=discipline,
        workers=2,
        servers=2,
        steps=60,
        device="cuda",
        quiet=True,
        run_dir=tmp_path / "r",
    )
    assert (result.summary["gradients"], result.summary["engine"]) == (120, chosen)
