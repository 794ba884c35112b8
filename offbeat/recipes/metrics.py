"""What a recipe is scored by: functions with a name each, and which way each of them is better.

Used by recipes (base.py), which have one metric or several, and by the reports. Imports no torch,
so that a report is there at once.
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.errors import RecipeError

Metric = Callable[[Any, Any], tuple[float, float]]
"""(model, batch) -> a sum and a count; the result is their quotient over all test batches."""

LOSS = "loss"
"""The recipe's own loss on the test data, which is always scored."""
HIGHER_IS_BETTER = {"accuracy": True, LOSS: False}
"""Of the metrics that Offbeat itself has."""
WAYS = {"accuracy": True, LOSS: False, "error": False}
"""What a word in a metric's name says of it, as in `val_loss` and `centre accuracy`."""
NAMES = re.compile(r"[\w@./ -]+")


class Directed:
    """A metric of which it is known whether more of it is better."""

    def __init__(self, function: Metric, higher_is_better: bool) -> None:
        functools.update_wrapper(self, function)  # what it is called by, above all
        self.higher_is_better = higher_is_better
        self._function = function

    def __call__(self, model: Any, batch: Any) -> tuple[float, float]:
        return self._function(model, batch)


def metric(function: Metric, *, higher_is_better: bool) -> Directed:
    """`function` as a metric of which more, or less, is better:

    metrics={"accuracy": offbeat.accuracy, "top5": offbeat.metric(top5, higher_is_better=True)}
    """
    if not callable(function):
        raise RecipeError(f"a metric must be a function, not {function!r}")
    return Directed(function, higher_is_better)


def direction_of(name: str, function: Metric) -> bool | None:
    """Whether more of it is better: as it says itself, or as is known of it; None: nobody said
    so."""
    said = getattr(function, "higher_is_better", None)
    return said if isinstance(said, bool) else direction_by_name(name)


def direction_by_name(name: str) -> bool | None:
    """What the words in a metric's name say; None: nothing, or both ways."""
    found = {WAYS[word] for word in re.split(r"[\W_]+", name.lower()) if word in WAYS}
    return found.pop() if len(found) == 1 else None


def check_metrics(metrics: Mapping[str, Metric]) -> None:
    if not isinstance(metrics, Mapping):
        raise RecipeError('metrics must be functions by their names: {"accuracy": ...}')
    for name, function in metrics.items():
        if not isinstance(name, str) or not NAMES.fullmatch(name):
            raise RecipeError(
                f"a metric's name must be made of letters, digits and @ . / _ -, not {name!r}"
            )
        if not callable(function):
            raise RecipeError(f"a recipe's metric {name} must be a function")


@dataclass(frozen=True)
class Scores:
    """What a model got, by each metric's name; the first is the one that it is judged by."""

    values: Mapping[str, float]
    count: float
    """What the first one's sum was divided by."""

    @property
    def metric(self) -> float:
        return next(iter(self.values.values()))
