"""When a run has learned enough, or learns no more (--stop-at, --patience), and which of its scores
is the best.

Told every score, in the order in which they were made, it says what follows; nothing here waits,
writes or computes. Used by the evaluator's role (roles/judging.py), by the api before a run goes
on, and by the summary.

    judge = Judge("accuracy", most=True, stop_at=0.9)
    judge.add(1200, 0.91)
    judge.reason        # 'accuracy 0.91 at version 1200 has reached 0.9 (--stop-at)'
"""

import math
from collections.abc import Iterable


class Judge:
    """`most`: whether more of the metric is better. `stop_at`: how good is good enough; infinite,
    or None: nothing is. `patience`: after how many scores in a row that are not better than the
    best before them it is to end; None: never."""

    def __init__(
        self,
        name: str,
        *,
        most: bool,
        stop_at: float | None = None,
        patience: int | None = None,
    ) -> None:
        self.best: tuple[int, float] | None = None
        """The version that was scored best, and what it scored; of equals the first."""
        self.reason: str | None = None
        """Why the run is to end; once there is one, it stays."""
        self._name = name
        self._most = most
        self._stop_at = stop_at
        self._patience = patience
        self._num_worse = 0
        self._newest = -1
        self._seen: set[int] = set()

    def add(self, version: int, metric: float) -> None:
        """`version` was scored; one that was scored before says nothing new, and one that was
        skipped, and made up for, may be the best, but is not of those in a row."""
        if version in self._seen:
            return
        self._seen.add(version)
        is_better = self.is_better(metric, self.best)
        if is_better:
            self.best = (version, metric)
        if version > self._newest:
            self._newest = version
            self._num_worse = 0 if is_better else self._num_worse + 1
        self.reason = self.reason or self._find_reason(version, metric)

    def add_all(self, scores: Iterable[tuple[int, float]]) -> "Judge":
        for version, metric in scores:
            self.add(version, metric)
        return self

    def is_better(self, metric: float, than: tuple[int, float] | None) -> bool:
        if not math.isfinite(metric):
            return False
        return than is None or (metric > than[1] if self._most else metric < than[1])

    def _find_reason(self, version: int, metric: float) -> str | None:
        if self._has_reached(metric):
            here = f"{self._name} {metric:.4g} at version {version}"
            return f"{here} has reached {self._stop_at:g} (--stop-at)"
        if self._patience is None or self._num_worse < self._patience:
            return None
        best = f"than {self.best[1]:.4g} at version {self.best[0]} " if self.best else ""
        times = f"{self._patience} score{'s' * (self._patience > 1)}"
        return f"no better {self._name} {best}in {times} (--patience)"

    def _has_reached(self, metric: float) -> bool:
        if self._stop_at is None or math.isinf(self._stop_at):
            return False
        return metric >= self._stop_at if self._most else metric <= self._stop_at
