"""A learning rate that falls when a score gets no better, as torch's ReduceLROnPlateau has it.

Servers know no scores, so the work is shared out: `Decline`, which the evaluator's role is told
every score by (roles/judging.py), says how often the rate is to fall; the master says at which
versions (roles/falling.py); and `Plateau`, which the servers have (schedules.py), what it is then.

    schedule=offbeat.plateau(factor=0.5, patience=3, metric="loss")
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.errors import ConfigError
from offbeat.optim import Length, OfRun, Schedule, as_call

MODES = {"min": False, "max": True}
"""What torch calls the direction; whether more is better."""


@dataclass(frozen=True, repr=False)
class Plateau(OfRun):
    """What `plateau` makes. As a function of the version alone it is constant."""

    arguments: Mapping[str, Any]

    def in_run(self, length: Length) -> "Plateau":
        return self

    def __call__(self, version: int, total: int | None) -> float:
        return 1.0

    @property
    def metric(self) -> str | None:
        """By name; None: what the run is judged by."""
        name = self.arguments["metric"]
        return None if name is None else str(name)

    @property
    def most(self) -> bool | None:
        """Whether more is better; None: as the metric says itself."""
        return MODES.get(self.arguments["mode"])

    def lr(self, base: float, num_falls: int) -> float:
        """What a rate is after so many falls."""
        for _ in range(num_falls):
            lower = max(base * self.arguments["factor"], self.arguments["min_lr"])
            if base - lower <= self.arguments["eps"]:
                break
            base = lower
        return base

    def __repr__(self) -> str:
        return as_call(plateau, self.arguments)


def plateau(
    *,
    factor: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    threshold_mode: str = "rel",
    cooldown: int = 0,
    min_lr: float = 0.0,
    eps: float = 1e-8,
    metric: str | None = None,
    mode: str | None = None,
) -> Schedule:
    """The rate is multiplied by `factor` when `metric` has been no better than its best for more
    than `patience` scores in a row. `metric`: by its name; None: what the run is judged by. `mode`:
    min or max, where the metric does not say itself which way it is better. The rest is as in
    torch's ReduceLROnPlateau."""
    given = dict(locals())
    _check(given)
    return Plateau(given)


def _check(given: Mapping[str, Any]) -> None:
    for name in ("factor", "patience", "threshold", "cooldown", "min_lr", "eps"):
        value = given[name]
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"{name} of a plateau must be a number from 0 on, not {value!r}")
    if not 0 < given["factor"] < 1:
        raise ConfigError(f"factor of a plateau must be between 0 and 1, not {given['factor']!r}")
    if given["threshold_mode"] not in ("rel", "abs"):
        mode = given["threshold_mode"]
        raise ConfigError(f"threshold_mode of a plateau must be rel or abs, not {mode!r}")
    if given["mode"] not in (None, *MODES):
        raise ConfigError(f"mode of a plateau must be min or max, not {given['mode']!r}")


class Decline:
    """Told every score, in the order in which they are made, it says how often the rate is to
    fall."""

    def __init__(self, schedule: Plateau, *, most: bool, every: int) -> None:
        """`most`: whether more is better. `every`: of how many updates a score is due; others, as
        that of the end of a run that goes on later, or of what was skipped, do not count."""
        self._most = most
        self._every = every
        self._given = schedule.arguments
        self._newest = 0
        self._best: float | None = None
        self._num_worse = 0
        self._cooling = 0
        self.falls: list[int] = []
        """The versions whose scores each made it fall once more."""

    def add(self, version: int, value: float) -> bool:
        """Whether this one makes it fall."""
        is_due = self._count(version, value, self._every)
        if not is_due or self._num_worse <= self._given["patience"]:
            return False
        self._fall(version)
        return True

    def recall(self, scores: Iterable[tuple[int, float, int]], falls: Sequence[int]) -> None:
        """Go on after `scores`: versions, values, and of how many updates one was due then. `falls`
        is what has happened, whatever would follow from them today."""
        left = deque(falls)
        for version, value, every in scores:
            self._count(version, value, every)
            while left and left[0] <= self._newest:
                self._fall(left.popleft())
        for version in left:  # whoever scored it died before that was written down
            self._newest = version
            self._fall(version)

    def _count(self, version: int, value: float, every: int) -> bool:
        """Whether this one is due."""
        if version // every <= self._newest // every:
            return False
        self._newest = version
        if self._is_better(value):
            self._best, self._num_worse = value, 0
        else:
            self._num_worse += 1
        if self._cooling:
            self._cooling -= 1
            self._num_worse = 0
        return True

    def _fall(self, version: int) -> None:
        self._cooling, self._num_worse = self._given["cooldown"], 0
        self.falls.append(version)

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):  # events tell none of these from another
            return False
        if self._best is None:
            return True
        threshold = float(self._given["threshold"]) * (1 if self._most else -1)
        is_relative = self._given["threshold_mode"] == "rel"
        needed = self._best * (1 + threshold) if is_relative else self._best + threshold
        return value > needed if self._most else value < needed
