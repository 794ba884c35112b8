"""Which worker the code that runs here belongs to: `offbeat.rank()` of `offbeat.world_size()`.

For a recipe's data function and for datasets, so that each worker reads what it trains on and no
more. Workers may be threads of one process, and a DataLoader reads in processes of its own: whoever
calls code of the user's says whom it works for.

    with at(Place(rank=1, world_size=4)):
        train, test = recipe.data(config)
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


def nobody() -> None:
    """Does not want to know."""


@dataclass(frozen=True, kw_only=True)
class Place:
    rank: int = 0
    world_size: int = 1
    asked: Callable[[], None] = nobody
    """Called when somebody wants to know rank or world size: they may cut the data by it."""


_here: ContextVar[Place | None] = ContextVar("place", default=None)
_of_process = [Place()]
"""Where nothing else is said, as in threads of the user's."""


def rank() -> int:
    """Of the worker that this code runs for; 0 outside of a run."""
    place = _find()
    place.asked()
    return place.rank


def world_size() -> int:
    """How many workers there are; 1 outside of a run."""
    place = _find()
    place.asked()
    return place.world_size


def is_master() -> bool:
    """Whether it runs for rank 0, who alone may say and write what one of them has to."""
    return _find().rank == 0


@contextlib.contextmanager
def at(place: Place) -> Iterator[None]:
    """In this thread, for the time being."""
    token = _here.set(place)
    try:
        yield
    finally:
        _here.reset(token)


def settle(place: Place) -> None:
    """In this process, for good."""
    _of_process[0] = place


def placed(items: Iterator[Item], place: Place) -> Iterator[Item]:
    """The same, each made at `place`; in between whoever asks for them is where it was."""
    while True:
        with at(place):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def _find() -> Place:
    return _here.get() or _of_process[0]
