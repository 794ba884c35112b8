"""Scores of a model by all of a recipe's metrics, in one pass over the test data.

Called by the evaluator, and by a worker that is to find out how well it did. A metric that fails
ends the run, as a mistake of the user's; the loss on the test data, which nobody asked for, is left
out from then on instead, since it may need what only training batches have.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from offbeat.capture import RECORDINGS
from offbeat.data.batches import Batch, Source, to_device
from offbeat.errors import DataError, RecipeError, in_a_line
from offbeat.recipes.base import MeanLoss, Recipe
from offbeat.recipes.metrics import LOSS, Metric, Scores
from offbeat.towers import CPU

BATCH_SIZE = 500


class Scoring:
    """Used by one thread. `warn` is told once of a loss that cannot be had."""

    def __init__(
        self,
        recipe: Recipe,
        test: Source,
        device: torch.device = CPU,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`recipe`: a job's, which has all that it is scored by in its metrics."""
        self._metrics = dict(recipe.metrics)
        self._main = next(iter(self._metrics))
        self._test = test
        self._device = device
        self._warn = warn

    def score(self, module: nn.Module) -> Scores:
        """Each example once."""
        module.eval()
        gate = RECORDINGS.make_gate()
        sums = {name: _Sum() for name in self._metrics}
        with torch.no_grad():
            for batch in self._test.in_order(BATCH_SIZE):
                with gate.lock:  # it may draw
                    self._add(sums, module, to_device(batch, self._device))
        count = sums[self._main].count
        if not count:
            raise DataError("the test data is empty, or the recipe's metric counted nothing")
        found = {name: sums[name].mean for name in sums if name in self._metrics}
        return Scores(found, count)

    def _add(self, sums: "Mapping[str, _Sum]", module: nn.Module, batch: Batch) -> None:
        for name, metric in list(self._metrics.items()):
            try:
                sums[name].add(name, metric, module, batch)
            except Exception as error:
                if name == self._main or not isinstance(metric, MeanLoss):
                    raise
                del self._metrics[name]
                self._warn(
                    f"no test loss: the recipe's loss fails on the test data: {in_a_line(error)}; "
                    f"a metric called loss can take its place"
                )


class _Sum:
    """Of one metric over the batches so far."""

    def __init__(self) -> None:
        self.total = self.count = 0.0

    def add(self, name: str, metric: Metric, module: nn.Module, batch: Batch) -> None:
        found = metric(module, batch)
        if not isinstance(found, tuple) or len(found) != 2:
            raise RecipeError(f"the recipe's metric must return a sum and a count: {name} does not")
        self.total += float(found[0])
        self.count += float(found[1])

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan


def score_line(scores: Mapping[str, float]) -> str:
    """What an evaluator says of a checkpoint."""
    return ", ".join(
        f"{'precision @ 1' if name == 'accuracy' else name} = {value:.3f}"
        for name, value in scores.items()
    )


def warnings_of(version: int, scores: Mapping[str, float]) -> list[str]:
    """What is to be said of scores that are no numbers."""
    return [
        f"the metric {name} is {value}, no number, at version {version}; look at the test data, "
        f"the model's outputs and the recipe's {'loss' if name == LOSS else 'metric'}"
        for name, value in scores.items()
        if not math.isfinite(value)
    ]
