"""Work on a device that is recorded once and then replayed: a step, and the augmentation before it.

On a GPU a small model's step is hundreds of kernels, and telling the device of each takes longer
than the device needs for it. Recorded as one graph they are told at once. towers.py uses this for
batches of the shapes that come again, the odd last one of an epoch among them, and computes all
others as ever:

    step = Captured("the step", compute, make_recorder(device), ...)
    replayed = step.replay(batch)        # None: to be computed without it

What cannot be recorded (a model that looks at its numbers, say) is found out at the first try, and
so is a recording that gives another gradient than the step it was made of.
"""

import contextlib
import functools
import random
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from offbeat.data.batches import Batch, leaves, map_tensors, moves_itself
from offbeat.errors import in_a_line

NUM_WARM_UP = 3
"""Steps before a recording: libraries choose their kernels and take their memory in the first."""
SEEN_BEFORE = 2
"""A shape is recorded when it comes for the second time: it may be the only one of its kind."""
MAX_RECORDINGS = 3
"""Of so many shapes: the last batch of an epoch may be odd. Ragged batches have no end of them."""
CLOSE = 1e-3
"""How far a replayed gradient may be from the one it was made of, relative to its norm: kernels
that add up in any order differ by less, and what was left out of a recording by far more."""

STILL = "_offbeat_still"
"""An attribute of tensors that a recording fills anew each time: another one may read them where
they lie."""

T = TypeVar("T")
Parts = Callable[[T], tuple[list[Tensor], Any]]
"""What a piece of work left behind: tensors, and what else there is to compare."""


class Recorder(ABC):
    """What can record on a device, for one thread, which replays one recording after the other."""

    @abstractmethod
    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Have `work` done some times, and recorded. Returns what does it again, on the same
        memory, and its result, which is then another one in the same tensors. Whatever cannot be
        recorded raises a RuntimeError."""

    def drawing_from(
        self, generator: torch.Generator | None
    ) -> contextlib.AbstractContextManager[None]:
        """In it, what is drawn from torch's own generator of the device, which all threads share,
        is drawn from this one instead; and so it is whenever something is replayed that was
        recorded in it."""
        return contextlib.nullcontext()


class Recordings:
    """torch records once at a time in a process; and while it does nobody else may draw from the
    GPU's generator, which all threads share. So every thread that does has a gate, a lock of its
    own that costs next to nothing, and whoever records closes all of them."""

    def __init__(self) -> None:
        self._recording = threading.RLock()
        self._gates: weakref.WeakSet[Gate] = weakref.WeakSet()

    def make_gate(self) -> "Gate":
        with self._recording:
            gate = Gate()
            self._gates.add(gate)
        return gate

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """By a thread that is in no gate, unless it is in here already."""
        with self._recording, contextlib.ExitStack() as closed:
            for gate in list(self._gates):
                closed.enter_context(gate.lock)
            yield


class Gate:
    """In it, as `with gate.lock`, nobody records."""

    def __init__(self) -> None:
        self.lock = threading.RLock()


RECORDINGS = Recordings()


class CudaRecorder(Recorder):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._common = torch.cuda.default_generators[device.index or 0]
        self._pool: Any = None
        """Memory that all recordings work in: results are held, and so each has its own."""

    @contextlib.contextmanager
    def drawing_from(self, generator: torch.Generator | None) -> Iterator[None]:
        before = self._common.graphsafe_get_state()
        if generator is not None:
            self._common.graphsafe_set_state(generator.graphsafe_get_state())
        try:
            yield
        except RuntimeError:
            if generator is not None:
                _renew(generator)
            raise
        finally:
            self._common.graphsafe_set_state(before)

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        with torch.cuda.device(self._device):
            try:
                return self._record(work)
            except RuntimeError:
                _renew(self._common)
                raise

    def _record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(NUM_WARM_UP):
                work()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # not torch's stream for all captures: libraries keep memory to work in for each stream,
        # which graphs that are replayed at the same time must not share
        with torch.cuda.graph(
            graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"
        ):
            result = work()
        self._pool = graph.pool()
        return graph.replay, result


def _renew(generator: torch.Generator) -> None:
    """After a recording that failed: its state would go on to say that it is being recorded."""
    generator.graphsafe_set_state(generator.clone_state())


def make_recorder(device: torch.device) -> Recorder | None:
    """None: nothing is gained by recording there."""
    return CudaRecorder(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class _Recording(Generic[T]):
    batch: Batch
    """Where the next batch is put before it is replayed."""
    replay: Callable[[], None]
    result: T


class Captured(Generic[T]):
    """A piece of work on a batch. `what`: its name for people. `parts` says what it leaves behind,
    by which a replay is compared with it; `buffers` are what it changes beside (running
    statistics), which a recording is to leave as they were; `mark_random` returns what makes the
    next one draw the same random numbers again as the next one now would. `state` is what Python
    keeps from one time to the next, such as a count of steps: a replay runs no Python, and would
    leave it as it is. `gate`: of the thread that uses this. `instead`: what it draws from where it
    draws from torch's own generator of the device."""

    def __init__(
        self,
        what: str,
        work: Callable[[Batch], T],
        recorder: Recorder,
        *,
        parts: Parts[T],
        mark_random: Callable[[], Callable[[], None]],
        tell: Callable[[str], None],
        gate: Gate,
        buffers: Callable[[], list[Tensor]] = list,
        state: Callable[[], Mapping[str, Any]] = dict,
        instead: torch.Generator | None = None,
    ) -> None:
        self._what = what
        self._work = work
        self._recorder = recorder
        self._parts = parts
        self._mark_random = mark_random
        self._tell = tell
        self._gate = gate
        self._buffers = buffers
        self._state = state
        self._instead = instead
        self._seen: dict[Any, int] = {}
        self._recordings: dict[Any, _Recording[T]] = {}
        """By shape."""
        self._is_given_up = False
        """Nothing else is recorded."""

    def replay(self, batch: Batch) -> T | None:
        """What the work on this batch comes to; None: it is to be done anew."""
        recording = self._of_its_own(batch)
        if recording is None:
            if self._is_given_up and not self._recordings:
                return None
            shape = _shape_of(batch)
            if self._is_due(shape):
                self._record(batch, shape)
            recording = self._recordings.get(shape)
            if recording is None:
                return None
            _fill(recording.batch, batch)
        with self._gate.lock:
            recording.replay()
        return recording.result

    def _of_its_own(self, batch: Batch) -> _Recording[T] | None:
        """The recording that reads this very batch where it lies."""
        for recording in self._recordings.values():
            if recording.batch is batch:
                return recording
        return None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """For doing it anew, whatever for: it draws what it would draw if it were replayed. Where
        nothing is ever replayed others are not held up for that."""
        if self._is_given_up and not self._recordings:
            with self._gate.lock:
                yield
        else:
            with RECORDINGS.one(), self._recorder.drawing_from(self._instead):
                yield

    def _is_due(self, shape: Any) -> bool:
        if self._is_given_up or shape in self._recordings:
            return False
        self._seen[shape] = self._seen.get(shape, 0) + 1
        return self._seen[shape] >= SEEN_BEFORE

    def _record(self, batch: Batch, shape: Any) -> None:
        if not _is_all_tensors(batch):
            self._give_up("a batch holds something else than tensors")
            return
        before = [buffer.clone() for buffer in self._buffers()]
        rewind = self._mark_random()
        try:
            with RECORDINGS.one(), self._recorder.drawing_from(self._instead):
                self._recordings[shape] = self._try_to_record(batch, rewind)
            self._is_given_up = len(self._recordings) == MAX_RECORDINGS
        except RuntimeError as error:
            self._give_up(in_a_line(error))
        for buffer, value in zip(self._buffers(), before, strict=True):
            buffer.copy_(value)
        rewind()

    def _try_to_record(self, batch: Batch, rewind: Callable[[], None]) -> _Recording[T]:
        """Raises a RuntimeError where what is replayed is not what was recorded."""
        still = batch if _is_still(batch) else map_tensors(batch, torch.clone)
        work = functools.partial(self._work, still)
        given = map_tensors(batch, torch.clone)
        replay, result = self._recorder.record(work)
        rewind()
        before = {**self._state(), **_python_random()}
        tensors, rest = self._parts(work())
        changed = _changed(before, {**self._state(), **_python_random()})
        expected = [tensor.clone() for tensor in tensors]
        rewind()
        found, found_rest = self._parts(result)
        for tensor in found:
            tensor.zero_()
        _fill(still, given)  # of which a part may be in the result as it is
        replay()
        if changed:
            raise RuntimeError(f"it depends on what Python keeps: {', '.join(changed)}")
        if rest != found_rest or not all(map(_is_close, found, expected)):
            raise RuntimeError("replayed, it comes to something else than done anew")
        return _Recording(still, replay, result)

    def _give_up(self, why: str) -> None:
        self._is_given_up = True
        of_these = " for batches of another shape" if self._recordings else ""
        self._tell(f"{self._what} is not captured{of_these}: {why}")


def torch_draws() -> dict[str, Any]:
    """Of a step on another device, what shows that it draws on the CPU too."""
    return {"torch's random numbers of the CPU": torch.get_rng_state().numpy().tobytes()}


def _python_random() -> dict[str, Any]:
    of_numpy: Any = np.random.get_state()
    return {
        "Python's random numbers": random.getstate(),
        "NumPy's random numbers": (of_numpy[1].tobytes(), of_numpy[2:]),
    }


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [name for name in after if name not in before or after[name] != before[name]]


def _fill(still: Batch, batch: Batch) -> None:
    for target, source in zip(leaves(still), leaves(batch), strict=True):
        if target is not source:
            target.copy_(source, non_blocking=True)


def _is_still(batch: Batch) -> bool:
    return all(hasattr(leaf, STILL) for leaf in leaves(batch))


def _is_close(found: Tensor, expected: Tensor) -> bool:
    error = torch.linalg.vector_norm(found.float() - expected.float())
    return bool(error <= CLOSE * torch.linalg.vector_norm(expected.float()))


class CapturedAugment:
    """A recipe's augmentation on one device, and what else makes a batch there, replayed where that
    can be done. What it draws is a function of the seed, either way."""

    def __init__(
        self,
        augment: Callable[[Batch, torch.Generator], Batch],
        device: torch.device,
        recorder: Recorder | None,
        tell: Callable[[str], None],
    ) -> None:
        generator = self._generator = torch.Generator(device)
        self._gate = RECORDINGS.make_gate()
        self._captured: Captured[Batch] | None = None

        # neither of these knows this object: so recordings go when it does, and not whenever Python
        # looks for garbage
        def anew(batch: Batch) -> Batch:
            # what it makes without saying where is on the device too; asked for at every call of
            # torch's, that takes longer than a replay, which needs none of it
            with contextlib.nullcontext() if device.type == "cpu" else device:
                return augment(batch, generator)

        def mark_random() -> Callable[[], None]:
            seed = generator.initial_seed()

            def rewind() -> None:
                generator.manual_seed(seed)

            return rewind

        self._anew = anew
        if recorder is not None:
            self._captured = Captured(
                "the augmentation",
                anew,
                recorder,
                parts=lambda batch: (list(leaves(batch)), None),
                mark_random=mark_random,
                tell=tell,
                gate=self._gate,
                state=torch_draws if device.type != "cpu" else dict,
                instead=generator,
            )

    def __call__(self, batch: Batch, seed: int) -> Batch:
        """The batch to train on; its memory is used again for the next one."""
        self._generator.manual_seed(seed)
        replayed = None if self._captured is None else self._captured.replay(batch)
        if replayed is None:
            with self._captured.in_place() if self._captured else self._gate.lock:
                return self._anew(batch)
        if not _is_still(replayed):
            for leaf in leaves(replayed):
                setattr(leaf, STILL, True)
        return replayed


def _shape_of(batch: Batch) -> Any:
    return tuple((leaf.shape, leaf.dtype, leaf.stride()) for leaf in leaves(batch))


def _is_all_tensors(batch: Batch) -> bool:
    if moves_itself(batch):  # a packed sequence has lengths that Python reads
        return False
    if isinstance(batch, Mapping):
        return all(map(_is_all_tensors, batch.values()))
    if isinstance(batch, tuple | list):
        return all(map(_is_all_tensors, batch))
    return isinstance(batch, Tensor)
