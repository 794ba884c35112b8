"""The next batch of a script's loop, made while the gradient of the last one is under way.

    for batch in offbeat.ahead(loader):
        ...
        optimizer.step()        # pushes, has the loader make the next batch, and takes the reply

A recipe's worker does so by itself. In a script that runs alone, and before its optimizer is
distributed, this is the loader itself.
"""

from collections.abc import Generator, Iterable, Iterator
from typing import Generic, TypeVar

from offbeat.loops import seat

Item = TypeVar("Item")


def ahead(items: Iterable[Item]) -> Generator[Item, None, None]:
    """The same items in the same order. Whatever makes them must not look at the model, which takes
    new parameters meanwhile; and what the loop draws from torch's random numbers between `step()`
    and the next item is drawn after that item was made."""
    here = seat.taken
    if here is None:
        yield from items
        return
    source = _Ahead(iter(items))
    while source.has_next():
        if here.loop is not None:
            here.loop.meanwhile = source.fetch
        try:
            yield source.take()
        finally:
            if here.loop is not None:
                here.loop.meanwhile = None


class _Ahead(Generic[Item]):
    """One item at most is there before it is taken."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        self._found: list[Item] = []
        self._is_over = False
        self._error: BaseException | None = None

    def fetch(self) -> None:
        """Once for each item that was taken. What fails is told to whoever takes the next."""
        if self._found or self._is_over or self._error is not None:
            return
        try:
            self._found.append(next(self._items))
        except StopIteration:
            self._is_over = True
        except Exception as error:
            self._error = error

    def has_next(self) -> bool:
        self.fetch()
        if self._error is not None:
            raise self._error
        return bool(self._found)

    def take(self) -> Item:
        return self._found.pop()
