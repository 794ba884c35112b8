"""Work that a device does while the CPU goes on: in which order, and who waits for whom.

A thread tells its device what to do in a stream, which keeps the order. What crosses from one
stream to another has a mark:

    in_own = streams.new()
    with in_own():                 # in a worker's thread, or a server's
        ...
        slot.mark.set()            # the one who has told the device to write
        ...
        slot.mark.order()          # the other one, whose work has to come after that

On the CPU everything is done when it is told, and none of this is needed.
"""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import torch

Scope = contextlib.AbstractContextManager[Any]
Item = TypeVar("Item")


class Mark:
    """This one marks nothing: what it would stand for is done already."""

    def set(self) -> None:
        """After all that this thread has told its device so far."""

    def order(self) -> None:
        """Have what this thread tells its device from now on come after the mark."""

    def is_reached(self) -> bool:
        """Whether the device has done all that comes before it."""
        return True

    def wait(self) -> None:
        """Until it has."""


NO_MARK = Mark()


class _Here(threading.local):
    """The stream that this thread was given. torch knows too, but takes longer to say so than the
    CPU takes for the rest of a mark."""

    stream: Any = None


_here = _Here()


@contextlib.contextmanager
def _within(stream: Any) -> Iterator[None]:
    before, _here.stream = _here.stream, stream
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        _here.stream = before


class CudaMark(Mark):
    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream: Any = None
        """Which it was set in."""
        self._num_set = 0
        self._known = 0
        """Which of the times that it was set it is known to have been reached: many threads ask,
        and one of them has to ask the device."""

    def set(self) -> None:
        self._stream = _here.stream or torch.cuda.current_stream()
        self._event.record(self._stream)
        self._num_set += 1  # after that, or what is known could be of the time before

    def order(self) -> None:
        """A stream keeps its own order."""
        stream = _here.stream or torch.cuda.current_stream()
        if stream is not self._stream:
            stream.wait_event(self._event)

    def is_reached(self) -> bool:
        number = self._num_set
        if self._known != number and self._event.query():  # type: ignore[no-untyped-call]
            self._known = number
        return self._known == self._num_set

    def wait(self) -> None:
        self._event.synchronize()


class Streams(ABC):
    """Those of one device."""

    @abstractmethod
    def new(self) -> Callable[[], Scope]:
        """A new stream: in a scope that this makes, a thread's work goes into it. Threads may share
        one."""

    @abstractmethod
    def wait_for_all(self) -> None:
        """Until the device has done whatever anybody has told it."""


class CpuStreams(Streams):
    def new(self) -> Callable[[], Scope]:
        return contextlib.nullcontext

    def wait_for_all(self) -> None:
        pass


class CudaStreams(Streams):
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new(self) -> Callable[[], Scope]:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return lambda: _within(stream)

    def wait_for_all(self) -> None:
        torch.cuda.synchronize(self._device)


def make_streams(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()


def make_mark(device: torch.device) -> Mark:
    return CudaMark() if device.type == "cuda" else NO_MARK


def in_this_stream(
    items: Generator[Item, None, None], device: torch.device
) -> Generator[Item, None, None]:
    """The same, made in the stream that this thread has now, by whichever thread asks for them."""
    if device.type != "cuda":
        return items
    stream = torch.cuda.current_stream(device)

    def made() -> Generator[Item, None, None]:
        with _within(stream):
            yield from items

    return made()
