"""The scores of a run's checkpoints, as a curve of at most so many points. Used by gathering.py."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from offbeat.run.stopping import Judge
from offbeat.watching.series import rounded

MAX_POINTS = 240
"""Beyond that every second one is left out, but for the best and the last."""
NUM_COMMITS = 4096
"""So many checkpoints' moments are remembered until they are scored."""


class Scores:
    """`metric`: what the run is judged by; `directions`: whether more of each metric is better, as
    far as that is known."""

    def __init__(self, metric: str, directions: Mapping[str, bool | None]) -> None:
        self.metric = metric
        self.directions = dict(directions)
        self._values: dict[int, tuple[float, dict[str, float | None]]] = {}
        """Of each version: when it was there, and what it scored."""
        self._committed_s: dict[int, float] = {}

    def committed(self, version: int, at_s: float) -> None:
        self._committed_s[version] = at_s
        if len(self._committed_s) > NUM_COMMITS:
            del self._committed_s[next(iter(self._committed_s))]

    def add(self, event: Mapping[str, Any]) -> None:
        """An older run has one metric alone; a script's first score says what it is judged by."""
        found = dict(event.get("scores") or {})
        if "higher_is_better" in event:
            self.metric = self.metric if self._values else next(iter(found))
            self.directions |= event["higher_is_better"]
        else:
            found = {self.metric: event["metric"], **found}
        version = int(event["version"])
        at_s = self._committed_s.get(version, float(event["at_s"]))
        before = self._values.get(version, (at_s, {}))
        self._values[version] = (before[0], {**before[1], **found})
        if len(self._values) > MAX_POINTS:
            self._thin_out()

    def _thin_out(self) -> None:
        best, versions = self.best(), sorted(self._values)
        dropped = [v for v in versions[1:-1:2] if best is None or v != best[0]]
        for version in dropped:
            del self._values[version]

    def best(self) -> tuple[int, float] | None:
        most = self.directions.get(self.metric)
        if most is None:
            return None
        known = ((v, found.get(self.metric)) for v, (_, found) in sorted(self._values.items()))
        return (
            Judge(self.metric, most=most)
            .add_all((v, math.nan if value is None else value) for v, value in known)
            .best
        )

    def latest(self) -> dict[str, Any] | None:
        """Of the newest version: every metric, the one that it is judged by first."""
        if not self._values:
            return None
        version = max(self._values)
        found = self._values[version][1]
        names = sorted(found, key=lambda name: name != self.metric)
        return {"version": version, "values": [[n, _number(found[n])] for n in names]}

    def view(self, began_s: float, gradients_at: Callable[[float], int]) -> dict[str, Any]:
        points = []
        for version, (at_s, found) in sorted(self._values.items()):
            since_s = max(0.0, at_s - began_s)
            values = {name: _number(value) for name, value in found.items()}
            points.append([version, rounded(since_s), gradients_at(since_s), values])
        best = self.best()
        return {
            "metric": self.metric,
            "best": None if best is None else [best[0], rounded(best[1])],
            "points": points,
        }


def _number(value: float | None) -> float | int | None:
    return None if value is None or not math.isfinite(value) else rounded(value)
