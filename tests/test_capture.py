"""Captured steps: the logic on the CPU, with a recorder that only pretends; the rest on a GPU."""

import contextlib
import functools
import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Spiced, cross_entropy, toy_data, toy_job, toy_recipe
from recording import Pretender
from rig import in_threads
from torch import Tensor, nn

import offbeat
from offbeat.capture import (
    MAX_RECORDINGS,
    RECORDINGS,
    Captured,
    CapturedAugment,
    Recorder,
    Recordings,
    T,
    make_recorder,
)
from offbeat.config import make_config
from offbeat.flat import FlatModel
from offbeat.recipes.base import load_recipe
from offbeat.run.making import make_job
from offbeat.towers import CPU, Result, Towers


class Stuck(Pretender):
    """A recording in which something is missing: nothing comes of it."""

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        return lambda: None, work()


class Unable(Recorder):
    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        raise RuntimeError("operation not permitted when stream is capturing")


def squares(recorder: Recorder) -> tuple[Captured[Result], Tensor, list[str], list[Tensor]]:
    """The gradient of a sum of squares, counted in a buffer."""
    gradient, counter, told = torch.zeros(3), torch.zeros(1), list[str]()

    def compute(batch: Any) -> Result:
        counter.add_(1)
        gradient.copy_(2 * batch[0][0])
        return batch[0].square().sum(), [True]

    steps = Captured(
        "the step",
        compute,
        recorder,
        parts=lambda result: ([result[0], gradient], result[1]),
        buffers=lambda: [counter],
        mark_random=lambda: lambda: None,
        tell=told.append,
        gate=RECORDINGS.make_gate(),
    )
    return steps, gradient, told, [counter]


def batch_of(*values: float, rows: int = 1) -> list[Tensor]:
    return [torch.tensor([values] * rows, dtype=torch.float32)]


def test_a_shape_that_comes_again_is_recorded_and_replayed_on_other_numbers() -> None:
    recorder = Pretender()
    steps, gradient, told, _ = squares(recorder)
    assert steps.replay(batch_of(1, 2, 3)) is None, "it may be the only one of its kind"
    for scale in (1.0, 5.0):
        replayed = steps.replay(batch_of(scale, 2 * scale, 3 * scale))
        assert replayed is not None
        assert replayed[0].item() == 14 * scale**2 and replayed[1] == [True]
        assert gradient.tolist() == [2 * scale, 4 * scale, 6 * scale]
    assert recorder.num_replayed == 3 and told == [], "one of them to look whether it is right"


def test_what_was_recorded_is_not_the_batch_itself() -> None:
    steps, _, _, _ = squares(Pretender())
    steps.replay(batch_of(1, 2, 3))
    given = batch_of(1, 2, 3)
    steps.replay(given)
    steps.replay(batch_of(7, 8, 9))
    assert given[0].tolist() == [[1, 2, 3]]


def test_the_odd_last_batch_is_recorded_too_when_it_comes_again() -> None:
    recorder = Pretender()
    steps, gradient, told, _ = squares(recorder)
    for scale in (1.0, 2.0, 3.0, 4.0):
        whole = steps.replay(batch_of(scale, 2, 3))
        odd = steps.replay(batch_of(7, 8, scale, rows=2))
        assert (whole is None) == (odd is None) == (scale == 1.0)
        if odd is not None and whole is not None:
            assert odd[0].item() == 2 * (49 + 64 + scale**2), "each has a result of its own"
            assert gradient.tolist() == [14, 16, 2 * scale]
            assert whole[0].item() == scale**2 + 13
    assert told == []


def test_ragged_batches_are_computed_as_ever_once_there_are_many_shapes() -> None:
    steps, _, told, _ = squares(Pretender())
    kinds = range(1, 2 * MAX_RECORDINGS + 1)
    for _ in range(3):
        last = [steps.replay(batch_of(1, 2, 3, rows=rows)) for rows in kinds]
    found = [replayed is not None for replayed in last]
    assert found == [rows <= MAX_RECORDINGS for rows in kinds] and told == []


class OnceAble(Pretender):
    """It has room for one."""

    num_recorded = 0

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        self.num_recorded += 1
        if self.num_recorded > 1:
            raise RuntimeError("out of memory")
        return super().record(work)


def test_where_another_shape_cannot_be_recorded_the_first_one_still_is() -> None:
    steps, _, told, _ = squares(OnceAble())
    for number in range(4):
        whole = steps.replay(batch_of(1, 2, 3))
        assert steps.replay(batch_of(1, 2, 3, rows=2)) is None
        assert (whole is not None) == (number > 0)
    (line,) = told
    assert "not captured for batches of another shape" in line and "out of memory" in line


def test_recording_leaves_buffers_as_they_were() -> None:
    steps, _, _, (counter,) = squares(Pretender())
    steps.replay(batch_of(1, 2, 3))
    steps.replay(batch_of(1, 2, 3))
    assert counter.item() == 1, "the one step that was taken"


@pytest.mark.parametrize(
    ("recorder", "reason"),
    [(Unable(), "not permitted when stream is capturing"), (Stuck(), "something else")],
)
def test_what_cannot_be_captured_is_computed_and_told_once(recorder: Recorder, reason: str) -> None:
    steps, _, told, (counter,) = squares(recorder)
    for _ in range(5):
        assert steps.replay(batch_of(1, 2, 3)) is None
    assert len(told) == 1 and reason in told[0] and counter.item() == 0


def test_a_batch_of_more_than_tensors_is_not_captured() -> None:
    steps, _, told, _ = squares(Pretender())
    for _ in range(3):
        assert steps.replay([*batch_of(1, 2, 3), "a name"]) is None
    assert told == ["the step is not captured: a batch holds something else than tensors"]


class Counting(nn.Module):
    """What it computes depends on how often it was called, in one way or another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.how, self.num_calls = how, 0
        self.register_buffer("average", torch.zeros(()))
        self.average: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "count":
            self.num_calls += 1
        elif self.how == "random":
            random.random()
        elif self.how == "numpy":
            np.random.rand()
        elif self.how == "buffer":
            self.average = 0.9 * self.average + x.detach().mean()
        logits: Tensor = self.inner(x) * (1 + 1e-6 * self.num_calls)
        return logits


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("count", "what Python keeps: num_calls"),
        ("random", "what Python keeps: Python's random numbers"),
        ("numpy", "what Python keeps: NumPy's random numbers"),
        ("buffer", "what Python keeps: where average lies"),
        ("not", ""),
    ],
)
def test_a_model_whose_python_would_be_missed_is_not_captured(how: str, reason: str) -> None:
    job, told = toy_job(toy_recipe(model=lambda: Counting(how))), list[str]()
    towers = Towers(
        job.make_replicas(2),
        [CPU, CPU],
        make_recorder=lambda device: Pretender(),
        tell=told.append,
    )
    for _ in range(3):
        towers.compute(job.recipe.loss, towers.deal(toy_data(20)))
        towers.take_gradient([torch.zeros_like(towers.landing)])
    assert len(told) == (2 if reason else 0) and all(reason in line for line in told)


def test_what_a_recording_left_undone_is_not_in_the_next_gradient() -> None:
    failing = [False]

    def loss(model: Any, batch: Any) -> Tensor:
        found = cross_entropy(model, batch)
        if failing[0]:
            model[0].weight.register_hook(lambda gradient: 1 / 0 if failing[0] else None)
            found.register_hook(lambda gradient: None)
        return found

    class Interrupted(Recorder):
        def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
            failing[0] = True
            try:
                work()
            except ZeroDivisionError as error:
                raise RuntimeError("broken off") from error
            finally:
                failing[0] = False
            raise AssertionError

    job, gradients = toy_job(), list[Tensor]()
    for recorder in (None, Interrupted()):
        towers = Towers(
            job.make_replicas(2), [CPU, CPU], make_recorder=lambda device, r=recorder: r
        )
        gradient = torch.zeros_like(towers.landing)
        for _ in range(2):
            towers.compute(loss, towers.deal(toy_data(20)))
            towers.take_gradient([gradient])
        gradients.append(gradient)
    assert torch.equal(*gradients)


def noisy(batch: Any, generator: torch.Generator) -> Any:
    inputs, labels = batch
    drawn = torch.rand(inputs.shape, generator=generator, device=generator.device)
    return inputs + drawn, labels


@pytest.mark.parametrize("recorder", [Pretender(), Unable(), Stuck(), None])
def test_what_an_augmentation_draws_is_a_function_of_the_seed(recorder: Recorder | None) -> None:
    told: list[str] = []
    augment = CapturedAugment(noisy, CPU, recorder, told.append)
    inputs, labels = toy_data(20)
    for number, count in enumerate([20, 20, 7, 20, 20]):
        batch = (inputs[:count] * number, labels[:count])
        expected = noisy(batch, torch.Generator().manual_seed(number))
        found = augment(batch, number)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert bool(told) == isinstance(recorder, Unable | Stuck)
    if isinstance(recorder, Pretender) and not isinstance(recorder, Stuck):
        assert recorder.num_replayed == 4


def train_towers(
    devices: list[torch.device], recorder: Callable[[torch.device], Recorder | None], **more: Any
) -> tuple[FlatModel, list[float]]:
    """Twenty steps of plain SGD, the last batch of every four a smaller one."""
    job = toy_job(toy_recipe(model=Spiced))
    models = [job.make_model() for _ in devices]
    towers = Towers(models, devices, make_recorder=recorder, **more)
    towers.train()
    losses = []
    inputs, labels = (tensor.to(devices[0]) for tensor in toy_data(180))
    gradient = torch.zeros_like(towers.landing)
    floats = torch.zeros(job.manifest.num_floats)
    ints = torch.zeros(job.manifest.num_ints, dtype=torch.int64)
    towers.write_buffers(floats, ints)
    for step in range(20):
        start, count = step % 4 * 50, 30 if step % 4 == 3 else 50
        batch = (inputs[start : start + count], labels[start : start + count])
        towers.seed(step)
        towers.compute(job.recipe.loss, towers.deal(batch))
        towers.take_gradient([gradient])
        loss, is_usable = towers.wait()
        assert is_usable
        losses.append(loss)
        towers.write_buffers(floats, ints)
        towers.landing.sub_(gradient, alpha=0.2)
        towers.refresh()
        towers.read_buffers(floats, ints)
    towers.forget()
    return towers.model, losses


def no_recorder(device: torch.device) -> Recorder | None:
    return None


def test_towers_with_captured_steps_do_what_they_did_before() -> None:
    made: list[Pretender] = []

    def recorder(device: torch.device) -> Recorder:
        made.append(Pretender())
        return made[-1]

    told: list[str] = []
    plain, losses = train_towers([CPU, CPU], no_recorder)
    torch.manual_seed(5)
    captured, same_losses = train_towers([CPU, CPU], recorder, tell=told.append)
    assert len(made) == 2 and all(pretender.num_replayed == 20 for pretender in made), told
    assert losses == same_losses and torch.equal(plain.params, captured.params)
    for one, other in zip(plain.module.buffers(), captured.module.buffers(), strict=True):
        assert torch.equal(one, other)


def test_recordings_go_when_whoever_replays_them_is_through() -> None:
    """Not when Python finds the time: a GPU's memory hangs on them."""
    gc.disable()
    try:
        job = toy_job()
        pretenders = [Pretender() for _ in range(3)]
        gone = [weakref.ref(pretender) for pretender in pretenders]
        augment = CapturedAugment(noisy, CPU, pretenders.pop(), lambda line: None)
        towers = Towers(
            job.make_replicas(2), [CPU, CPU], make_recorder=lambda device: pretenders.pop()
        )
        inputs, labels = toy_data(20)
        for seed in range(3):
            batch = augment((inputs, labels), seed)
            towers.compute(job.recipe.loss, towers.deal(batch))
            towers.take_gradient([torch.zeros_like(towers.landing)])
            towers.wait()
        assert all(getattr(ref(), "num_replayed", 0) for ref in gone)
        towers.close()
        del augment
        assert [ref() for ref in gone] == [None, None, None]
    finally:
        gc.enable()


def test_a_step_that_is_looked_at_is_computed_with_gradients_in_the_parameters() -> None:
    job = toy_job()
    towers = Towers(
        [job.make_model() for _ in range(2)], [CPU, CPU], make_recorder=lambda device: Pretender()
    )
    inputs, labels = toy_data(20)
    found = []
    for eagerly in (True, False, False, False, True):
        towers.compute(job.recipe.loss, towers.deal((inputs, labels)), eagerly=eagerly)
        found.append(towers.model.parameters[0].grad is not None)
        towers.take_gradient([torch.zeros_like(towers.landing)])
        assert towers.model.parameters[0].grad is None
    assert found == [True, True, False, False, True]


def test_one_tower_on_the_cpu_records_nothing() -> None:
    job = toy_job()
    towers = Towers([job.make_model()], [CPU], make_recorder=lambda device: Unable())
    for _ in range(4):
        towers.compute(job.recipe.loss, towers.deal(toy_data(20)))
        towers.take_gradient([torch.zeros_like(towers.landing)])


def test_a_step_that_is_done_anew_draws_from_where_its_replays_draw() -> None:
    order: list[str] = []

    class Borrowing(Pretender):
        @contextlib.contextmanager
        def drawing_from(self, generator: torch.Generator | None) -> Iterator[None]:
            order.append("borrowed")
            yield
            order.append("given back")

    steps, *_ = squares(Borrowing())
    with steps.in_place():
        order.append("anew")
    assert order == ["borrowed", "anew", "given back"]
    steps, *_ = squares(Unable())
    for _ in range(2):
        steps.replay(batch_of(1, 2, 3))
    with steps.in_place():
        order.append("without a recording")
    assert order[3:] == ["without a recording"]


def test_a_recording_waits_for_steps_and_steps_for_a_recording() -> None:
    recordings, order = Recordings(), list[str]()
    gate, other = recordings.make_gate(), recordings.make_gate()
    in_step, go_on = threading.Event(), threading.Event()

    def step() -> None:
        with gate.lock:
            in_step.set()
            assert go_on.wait(20)
            order.append("step")

    def record() -> None:
        assert in_step.wait(20)
        go_on_later.start()
        with recordings.one():
            order.append("recording")

    go_on_later = threading.Thread(target=go_on.set)
    in_threads(step, record)
    go_on_later.join()
    assert order == ["step", "recording"]
    with gate.lock, other.lock:
        pass


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return torch.device("cuda", 0)


@pytest.mark.gpu
def test_captured_steps_are_the_eager_ones_to_rounding(gpu: torch.device) -> None:
    told: list[str] = []
    eager, losses = train_towers([gpu], no_recorder)
    captured, same_losses = train_towers([gpu], make_recorder, tell=told.append)
    assert told == []
    assert torch.allclose(torch.tensor(losses), torch.tensor(same_losses), atol=1e-5)
    assert torch.allclose(eager.params, captured.params, atol=1e-5)
    for one, other in zip(eager.module.buffers(), captured.module.buffers(), strict=True):
        assert torch.allclose(one.float(), other.float(), atol=1e-5)


class Choosy(nn.Module):
    """What it computes depends on the numbers that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.one if x.mean().item() > 0 else self.other
        logits: Tensor = layer(x)
        return logits


class Deciding(nn.Linear):
    """Draws on the CPU whether to do something."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if float(torch.rand(())) < 0.01 else 1.0)


@pytest.mark.gpu
def test_a_model_that_draws_on_the_cpu_is_trained_eagerly_and_told(
    gpu: torch.device, tmp_path: Path
) -> None:
    recipe = toy_recipe(model=lambda: Deciding(6, 3))
    offbeat.train(recipe, run_dir=tmp_path / "run", engine="inproc", workers=1, steps=10)
    told = "".join(log.read_text() for log in (tmp_path / "run" / "logs").iterdir())
    assert "the step is not captured" in told and "random numbers of the CPU" in told


@pytest.mark.gpu
def test_a_model_that_looks_at_its_numbers_is_trained_eagerly_and_told(
    gpu: torch.device, tmp_path: Path
) -> None:
    recipe = toy_recipe(model=Choosy)
    offbeat.train(recipe, run_dir=tmp_path / "run", engine="inproc", workers=2, steps=30)
    told = "".join(log.read_text() for log in (tmp_path / "run" / "logs").iterdir())
    assert "the step is not captured" in told


@pytest.mark.gpu
@pytest.mark.parametrize("amp", [False, True])
def test_steps_of_several_threads_do_not_get_into_each_others_way(
    gpu: torch.device, amp: bool
) -> None:
    """Each with parameters and a batch of its own, over and over again at the same time."""
    job = make_job(
        make_config({"recipe": "offbeat.bench.recipes:alexnet", "steps": 1}),
        load_recipe("offbeat.bench.recipes:alexnet"),
    )

    def work(number: int) -> None:
        torch.manual_seed(number)
        towers = Towers(
            [job.make_model()],
            [gpu],
            amp=amp,
            make_recorder=make_recorder,
            slot_device=gpu,
        )
        with towers.in_stream():
            towers.landing.add_(0.01 * torch.randn(len(towers.landing), device=gpu))
            images = torch.randn(128, 3, 24, 24, device=gpu)
            batch = (images, torch.randint(0, 10, (128,), device=gpu))
            assert towers.gradient is not None
            expected = None
            for _ in range(300):
                towers.compute(job.recipe.loss, towers.deal(batch))
                towers.take_gradient([towers.gradient])
                towers.wait()
                if expected is None:
                    expected = towers.gradient.clone()
                error = torch.linalg.vector_norm(towers.gradient - expected)
                assert error < 1e-2 * torch.linalg.vector_norm(expected)

    in_threads(*(functools.partial(work, number) for number in range(6)))


@pytest.mark.gpu
def test_what_threads_draw_is_a_function_of_seed_rank_and_step(
    gpu: torch.device, tmp_path: Path
) -> None:
    """Whichever of them comes first."""

    class Dropping(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))

    found = [
        offbeat.train(
            toy_recipe(model=Dropping, batch_size=25),
            run_dir=tmp_path / str(number),
            engine="inproc",
            discipline="sync",
            workers=3,
            steps=40,
            seed=seed,
        ).state_dict()
        for number, seed in enumerate([7, 7, 8])
    ]
    same, other = (
        max(float((found[0][name] - found[k][name]).abs().max()) for name in found[0])
        for k in (1, 2)
    )
    assert same < 1e-4 < 1e-2 < other


@pytest.mark.gpu
@pytest.mark.parametrize("discipline", ["sync", "apply-reply", "lock-free"])
def test_runs_with_captured_steps_learn(gpu: torch.device, discipline: str, tmp_path: Path) -> None:
    recipe = toy_recipe(model=Spiced)
    results = {
        capture: offbeat.train(
            recipe,
            run_dir=tmp_path / capture,
            engine="inproc",
            discipline=discipline,
            workers=2,
            steps=60,
            capture=capture,
        )
        for capture in ("auto", "off")
    }
    for result in results.values():
        assert result.test_accuracy is not None and result.test_accuracy > 0.8
