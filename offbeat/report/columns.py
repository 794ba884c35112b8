"""Long columns of numbers, in as little memory as they need: what record.py keeps of each push.

Nothing is rounded: seconds in event files are whole microseconds, and come back to the bit; where a
number does not fit, its column becomes a wider one.

>>> column = Seconds(); column.append(0.000181); column[0]
"""

import itertools
import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator

PAGE = 4096
"""Elements of a `Longest` that are there or not together."""
SUMMED_AT_ONCE = 1024


class Wholes:
    """Whole numbers, of 4 bytes each as long as none is negative or large."""

    def __init__(self) -> None:
        self._numbers = array("I")

    def append(self, number: int) -> None:
        try:
            self._numbers.append(number)
        except OverflowError:
            wide = array("q", [number])  # what does not fit there either is no number to keep
            self._numbers = array("q", self._numbers)
            self._numbers.extend(wide)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> int:
        return self._numbers[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)


class Seconds:
    """Durations; their sum is exact."""

    def __init__(self) -> None:
        self._micros = Wholes()
        self._sum = 0

    def append(self, time_s: float) -> None:
        micros = round(time_s * 1e6)
        self._micros.append(micros)
        self._sum += micros

    def __len__(self) -> int:
        return len(self._micros)

    def __getitem__(self, index: int) -> float:
        return self._micros[index] / 1e6

    @property
    def total_s(self) -> float:
        return self._sum / 1e6


class Longest:
    """By a number, such as a step's, the longest of the times that were given for it."""

    def __init__(self) -> None:
        self._pages: dict[int, array[int]] = {}

    def add(self, number: int, time_s: float) -> None:
        micros = round(time_s * 1e6)
        page, place = divmod(number, PAGE)
        found = self._pages.get(page)
        if found is None:
            found = self._pages[page] = array("I", bytes(4 * PAGE))
        if micros > found[place]:
            try:
                found[place] = micros
            except OverflowError:
                self._pages[page] = array("q", found)
                self._pages[page][place] = micros

    def __getitem__(self, number: int) -> float:
        """0, where none was given."""
        page, place = divmod(number, PAGE)
        found = self._pages.get(page)
        return found[place] / 1e6 if found is not None else 0.0


class Mean:
    """Of numbers that come one after the other, with the greatest of them."""

    def __init__(self) -> None:
        self._parts: list[float] = []
        self.count = 0
        self.most = -math.inf

    def add(self, value: float) -> None:
        self._parts.append(value)
        self.count += 1
        if value > self.most:
            self.most = value
        if len(self._parts) == SUMMED_AT_ONCE:
            self._parts = [math.fsum(self._parts)]

    @property
    def total(self) -> float:
        return math.fsum(self._parts)

    @property
    def mean(self) -> float:
        return self.total / self.count


def count_until(times: Iterable[float], until: Iterable[float]) -> dict[float, int]:
    """How many of the times are not after each of those, in memory for the latter alone."""
    ends = sorted(set(until))
    within = [0] * (len(ends) + 1)
    for at_s in times:
        within[bisect_left(ends, at_s)] += 1
    return dict(zip(ends, itertools.accumulate(within), strict=False))
