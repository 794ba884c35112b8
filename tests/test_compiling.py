"""Compiled steps: which are, what comes of failures, and that they are the plain ones."""

import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Spiced, cross_entropy, toy_data, toy_job, toy_recipe
from torch import Tensor, nn
from torch._dynamo.utils import counters

import offbeat
from offbeat.compiling import ONE_AT_A_TIME, Compiled, Loss, check_toolchain
from offbeat.errors import ConfigError
from offbeat.flat import FlatModel
from offbeat.towers import CPU, Towers

WHOLE, ODD = torch.zeros(10, 6), torch.zeros(4, 6)


def missing_toolchain() -> str:
    try:
        check_toolchain([CPU])
    except ConfigError as error:
        return str(error)
    return ""


compiles = pytest.mark.skipif(bool(missing_toolchain()), reason=missing_toolchain())


class Steps:
    """Which loss each step was made with, by a `Compiled` that compiles nothing."""

    def __init__(self, fails: Callable[[], Exception] | None = None) -> None:
        self.told: list[str] = []
        self.made: list[str] = []
        self.num_undone = 0
        self.fails = fails
        self.compiled = Compiled(10, self.told.append, make=lambda loss: self.fast)

    def plain(self, model: nn.Module, batch: Any) -> Tensor:
        self.made.append("plain")
        return torch.zeros(1)

    def fast(self, model: nn.Module, batch: Any) -> Tensor:
        self.made.append("fast")
        if self.fails is not None:
            raise self.fails()
        return torch.zeros(1)

    def undo(self) -> None:
        self.num_undone += 1

    def take(self, batch: Tensor, loss: Loss | None = None) -> Tensor:
        step: Callable[[Loss], Tensor] = lambda loss: loss(nn.Identity(), batch)  # noqa: E731
        return self.compiled.compute(step, loss or self.plain, batch, self.undo)


def test_whole_batches_are_compiled_and_the_odd_one_is_not() -> None:
    steps = Steps()
    for batch in (ODD, WHOLE, WHOLE, ODD, WHOLE):
        steps.take(batch)
    assert steps.made == ["plain", "fast", "fast", "plain", "fast"]
    assert not steps.told and not steps.num_undone


def test_what_cannot_be_compiled_is_told_once_and_computed_as_ever() -> None:
    steps = Steps(fails=lambda: RuntimeError("no kernel for this\nand much more"))
    for _ in range(3):
        steps.take(WHOLE)
    assert steps.made == ["fast", "plain", "plain", "plain"]
    assert steps.num_undone == 1
    assert len(steps.told) == 1
    assert steps.told[0].startswith("the step is not compiled: RuntimeError: no kernel for this (")


def test_a_python_that_torch_cannot_compile_for_is_told_likewise() -> None:
    def refuse(loss: Loss) -> Loss:
        raise RuntimeError("torch.compile is not supported on this Python")

    steps = Steps()
    steps.compiled = Compiled(10, steps.told.append, refuse)
    steps.take(WHOLE)
    assert steps.made == ["plain"] and "not supported on this Python" in steps.told[0]


def test_torchs_own_failure_says_what_is_behind_it() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no such operation")

    told: list[str] = []
    compiled = Compiled(10, told.append, lambda loss: torch.compile(loss, backend=broken))
    model = FlatModel(nn.Linear(6, 3))
    towers = Towers([model], [CPU], compiled=compiled)
    batch = (toy_data()[0][:10], toy_data()[1][:10])
    towers.compute(cross_entropy, towers.deal(batch))
    assert towers.loss() == cross_entropy(model.module, batch).item()
    assert len(told) == 1 and "NotImplementedError: no such operation" in told[0]
    assert model.module.weight.grad is not None, "of the plain step"


def test_a_loss_that_fails_by_itself_says_so() -> None:
    def wrong(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("labels")

    steps = Steps(fails=lambda: RuntimeError("whatever torch makes of it"))
    with pytest.raises(KeyError, match="labels"):
        steps.take(WHOLE, wrong)
    assert not steps.told


def test_no_memory_is_no_failure_to_compile() -> None:
    steps = Steps(fails=lambda: torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        steps.take(WHOLE)
    assert steps.made == ["fast"] and not steps.told


def test_first_steps_are_taken_one_at_a_time() -> None:
    steps = Steps()
    done = threading.Event()

    def take() -> None:
        steps.take(WHOLE)
        done.set()

    with ONE_AT_A_TIME:  # somebody else is compiling
        thread = threading.Thread(target=take)
        thread.start()
        assert not done.wait(0.2) and not steps.made
    thread.join()
    with ONE_AT_A_TIME:
        steps.take(WHOLE)
    assert steps.made == ["fast", "fast"], "the second waits for nobody"


def test_who_looks_into_a_step_sees_the_plain_one() -> None:
    steps = Steps()
    towers = Towers([FlatModel(nn.Linear(6, 3))], [CPU], compiled=steps.compiled)
    batch = (toy_data()[0][:10], toy_data()[1][:10])
    towers.compute(cross_entropy, towers.deal(batch), eagerly=True)
    assert steps.made == []


# -- what it takes ---------------------------------------------------------------------------------


def test_without_a_compiler_nothing_is_begun(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="there is no no-such-compiler here: install one") as e:
        offbeat.train(toy_recipe(), engine="inproc", compile=True, run_dir=run_dir)
    assert "\n" not in str(e.value) and not run_dir.exists()
    toy_job(compile=False)


def test_without_headers_nothing_is_begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"no .*Python\.h: install them"):
        toy_job(compile=True)


def test_a_gpu_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs Triton"):
        check_toolchain([torch.device("cuda", 0)])


# -- for real --------------------------------------------------------------------------------------


@pytest.mark.slow
@compiles
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # in parts of torch's own
def test_twenty_compiled_steps_are_the_plain_ones(tmp_path: Path) -> None:
    """With running statistics, and random numbers in the forward pass; by two workers that compile
    at the same time, and with an odd last batch."""
    counters.clear()
    recipe = toy_recipe(model=Spiced, batch_size=50)  # 240 examples: the last batch has 40 or 20
    options = {"discipline": "sync", "steps": 20, "engine": "inproc", "threads": 1, "quiet": True}

    def train(name: str, **more: Any) -> dict[str, Tensor]:
        torch.manual_seed(5)
        return offbeat.train(recipe, run_dir=tmp_path / name, **options, **more).state_dict()

    expected = train("plain", workers=1)
    found = train("compiled", workers=1, compile=True)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    train("two", workers=2, compile=True)
    logs = [path.read_text() for path in tmp_path.glob("*/logs/worker-*.log")]
    assert len(logs) == 4 and not any("not compiled" in log for log in logs)
    assert counters["stats"]["unique_graphs"] == 1, "for no other size, and no other worker"
