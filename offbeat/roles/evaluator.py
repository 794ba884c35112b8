"""The evaluator: scores the newest checkpoint on the test data, never trains, never blocks anybody.

It reads checkpoints from the run's folder like any outsider. When training is quicker than
scoring it skips to the newest; the last one it always scores.
"""

import logging
import queue
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from offbeat.checkpoint import load_checkpoint
from offbeat.data.batches import Source
from offbeat.errors import CheckpointError, DataError, RecipeError
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
        self.log = log
        self.latest: tuple[int, float] | None = None
        """The version that was scored last, and what it scored."""
        self._module = module
        self._events = events
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
            self.log.warning("%s", error)
            return
        load_state(self._module, checkpoint.state_dict(ema=True))
        metric, count = evaluate(self._module, self.job.recipe, self.job.test)
        self.latest = (checkpoint.version, metric)
        self.log.info(
            "version %d: %s %.4f", checkpoint.version, metric_name(self.job.recipe), metric
        )
        self._events.record(
            "score",
            version=checkpoint.version,
            metric=metric,
            count=count,
            at_s=self._clock(),
        )


def load_state(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Load all that checkpoints keep; a module's own extra state, which is no tensor, is not
    kept."""
    keys = module.load_state_dict(state, strict=False)
    missing = [key for key in keys.missing_keys if not key.endswith("_extra_state")]
    assert not missing and not keys.unexpected_keys, f"{missing} {keys.unexpected_keys}"


def evaluate(module: nn.Module, recipe: Recipe, test: Source) -> tuple[float, float]:
    """The recipe's metric over all of `test`, each example once; and what it was divided by."""
    module.eval()
    total = count = 0.0
    with torch.no_grad():
        for batch in test.in_order(BATCH_SIZE):
            found = recipe.metric(module, batch)
            if not isinstance(found, tuple) or len(found) != 2:
                raise RecipeError("the recipe's metric must return a sum and a count")
            total += float(found[0])
            count += float(found[1])
    if not count:
        raise DataError("the test data is empty, or the recipe's metric counted nothing")
    return total / count, count


def metric_name(recipe: Recipe) -> str:
    name = getattr(recipe.metric, "__name__", "metric")
    return "metric" if name == "<lambda>" else name
