"""Scores that a script tells: `offbeat.log(accuracy=0.93)`. They become what an evaluator's do.

Rank 0's loop has one `Told`, which `log` in distribute.py hands them to. Scores are of the version
that the script's model shows when they are told, and the first name that is ever told is what the
run is judged by.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from offbeat.errors import ConfigError
from offbeat.recipes.metrics import LOSS, NAMES, direction_by_name
from offbeat.run.events import EventLog

OF_TEST = "test_"
"""Says nothing that is not known, but of a loss: without it that is the next step's."""


def read_values(values: Mapping[str, Any]) -> tuple[float | None, dict[str, float]]:
    """The loss of the step that comes next, where it is told, and scores by their names."""
    found = {name: _number(name, value) for name, value in values.items()}
    loss = found.pop(LOSS, None)
    scores = {name.removeprefix(OF_TEST): value for name, value in found.items()}
    for name in scores:
        if not NAMES.fullmatch(name):
            raise ConfigError(
                f"a score's name must be made of letters, digits and @ . / _ -, not {name!r}"
            )
    return loss, scores


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):  # the last by a tensor of several
        raise ConfigError(f"offbeat.log takes numbers: {name} is a {type(value)}") from None


class Told:
    """Rank 0's scores. Used by the script's thread; any may look at `latest`."""

    def __init__(
        self,
        events: EventLog,
        clock: Callable[[], float],
        show: Callable[[int, Mapping[str, float]], None],
    ) -> None:
        """`show` is told each version and its scores."""
        self.latest: tuple[int, dict[str, float]] | None = None
        """The version that was scored last, and its scores, the first of which is what the run is
        judged by, where that is among them."""
        self._main: str | None = None
        self._events = events
        self._clock = clock
        self._show = show

    def tell(self, version: int, scores: Mapping[str, float], most: bool | None) -> None:
        """`most`: whether more of them is better; None: as their names say. What is told of one
        version at several times belongs together."""
        self._main = self._main or next(iter(scores))
        before = self.latest[1] if self.latest and self.latest[0] == version else {}
        found = {**before, **scores}
        found = {name: found[name] for name in sorted(found, key=lambda name: name != self._main)}
        self.latest = (version, found)
        ways = {name: direction_by_name(name) if most is None else most for name in scores}
        self._events.record(
            "score",
            version=version,
            metric=next(iter(found.values())),
            scores=found,
            higher_is_better=ways,
            at_s=self._clock(),
        )
        self._show(version, scores)
