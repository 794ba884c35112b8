"""Numbers over time in bounded memory: when there are more stretches of time than there is room
for, two of them become one.

Used by gathering.py; pure.

    axis = Axis(size=240)
    losses, counts = axis.column(), axis.column()
    at = axis.index(12.5)
    losses.values[at] += 0.7
    counts.values[at] += 1
"""

from array import array
from collections import deque
from typing import Any

FIRST_WIDTH_S = 0.25
"""How long a stretch is at first."""
NUM_KEPT_TICKS = 64
"""What has changed since an earlier tick than these is: everything."""


class Column:
    """A number for each stretch of time. `adds`: two stretches' numbers are added up when they
    become one; else the later one stays, where there is one."""

    def __init__(self, size: int, *, adds: bool) -> None:
        self.values = array("d", bytes(8 * size))
        self._adds = adds

    def fold(self) -> None:
        values, half = self.values, len(self.values) // 2
        for index in range(half):
            first, second = values[2 * index], values[2 * index + 1]
            values[index] = first + second if self._adds else second or first
        values[half:] = array("d", bytes(8 * (len(values) - half)))


class Axis:
    """Stretches of time that several columns have in common, at most `size` of them, an even
    number. It knows from which one on something has changed since any of the latest ticks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.width_s = FIRST_WIDTH_S
        self.length = 0
        """How many stretches there are so far."""
        self._columns: list[Column] = []
        self._lowest = size
        self._lowest_of: deque[tuple[int, int]] = deque(maxlen=NUM_KEPT_TICKS)

    def column(self, *, adds: bool = True) -> Column:
        made = Column(self.size, adds=adds)
        self._columns.append(made)
        return made

    def index(self, at_s: float) -> int:
        """The stretch that a moment lies in, which is about to change."""
        at = max(0, int(at_s / self.width_s))
        while at >= self.size:
            self._fold()
            at = int(at_s / self.width_s)
        if at >= self.length:  # nothing may have happened in those between
            self._lowest = min(self._lowest, self.length)
            self.length = at + 1
        elif at < self._lowest:
            self._lowest = at
        return at

    def _fold(self) -> None:
        for column in self._columns:
            column.fold()
        self.width_s *= 2
        self.length = (self.length + 1) // 2
        self._lowest = 0

    def tick(self, number: int) -> None:
        """What has changed until now belongs to the tick of this number, counted from 1."""
        self._lowest_of.append((number, self._lowest))
        self._lowest = self.size

    def changed_since(self, tick: int) -> int:
        """The first stretch that is another one than at that tick; 0 was before all of them."""
        known = self._lowest_of
        if not known or tick < known[0][0] - 1:
            return 0
        return min((low for number, low in known if number > tick), default=self.size)


def rounded(value: float) -> float | int:
    """Four digits are as many as a chart can show."""
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def means(sums: Column, counts: Column, start: int, end: int) -> list[Any]:
    """None: there was none in that stretch."""
    return [
        rounded(total / count) if count else None
        for total, count in zip(sums.values[start:end], counts.values[start:end], strict=True)
    ]
