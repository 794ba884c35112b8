"""The evaluator: scores the newest checkpoint on the test data, never trains, never blocks anybody.

It reads checkpoints from the run's folder like any outsider. When training is quicker than
scoring it skips to the newest; the last one it always scores.
"""

import logging
import math
import queue
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from offbeat.checkpoint import load_checkpoint
from offbeat.data.batches import Source, batch_length
from offbeat.errors import CheckpointError
from offbeat.events import EventLog
from offbeat.job import Job
from offbeat.recipes.base import Recipe

BATCH_SIZE = 500


class Evaluator:
    """Owns a model replica; `run` scores what `notify` names until `finish`."""

    def __init__(
        self,
        job: Job,
        module: nn.Module,
        *,
        events: EventLog,
        log: logging.Logger,
        clock: Callable[[], float],
    ) -> None:
        self.job = job
        self.latest: float | None = None
        self._module = module
        self._events = events
        self._log = log
        self._clock = clock
        self._paths: queue.SimpleQueue[Path | None] = queue.SimpleQueue()

    def notify(self, path: Path) -> None:
        """A checkpoint was committed."""
        self._paths.put(path)

    def finish(self) -> None:
        """Score the last one named so far, and return from `run`."""
        self._paths.put(None)

    def run(self) -> None:
        torch.set_num_threads(1)
        last = False
        while not last:
            newest = self._paths.get()
            last = newest is None
            while not self._paths.empty():  # skip to the newest
                following = self._paths.get()
                last = last or following is None
                newest = following or newest
            if newest is not None:
                self._score(newest)

    def _score(self, path: Path) -> None:
        assert self.job.test is not None
        try:
            checkpoint = load_checkpoint(path)
        except CheckpointError as error:  # pruned while we looked the other way
            self._log.warning("%s", error)
            return
        self._module.load_state_dict(checkpoint.state_dict(ema=True))
        metric, loss, count = evaluate(self._module, self.job.recipe, self.job.test)
        self.latest = metric
        self._log.info(
            "version %d: %s %.4f", checkpoint.version, metric_name(self.job.recipe), metric
        )
        self._events.record(
            "score",
            version=checkpoint.version,
            metric=metric,
            loss=loss,
            count=count,
            at_s=self._clock(),
        )


def evaluate(module: nn.Module, recipe: Recipe, test: Source) -> tuple[float, float, float]:
    """Metric and loss over all of `test`, each example once, and the metric's count."""
    module.eval()
    metric_sum = loss_sum = count = 0.0
    num_examples = 0
    with torch.no_grad():
        for batch in test.in_order(BATCH_SIZE):
            batch_sum, batch_count = recipe.metric(module, batch)
            metric_sum += float(batch_sum)
            count += float(batch_count)
            loss_sum += recipe.loss(module, batch).item() * batch_length(batch)
            num_examples += batch_length(batch)
    if not count:
        return math.nan, math.nan, 0.0
    return metric_sum / count, loss_sum / num_examples, count


def metric_name(recipe: Recipe) -> str:
    return getattr(recipe.metric, "__name__", "metric")
