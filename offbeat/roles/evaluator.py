"""The evaluator: scores the newest checkpoint on the test data, never trains, never blocks anybody.

It watches the run's folder like any outsider. When training is quicker than scoring it skips to the
newest; the last one, which the master names in state.json, it always scores. With --eval-skipped it
then goes back to those that it skipped, as far as they were kept.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from offbeat.checkpoint import Checkpoint, list_checkpoints, load_checkpoint
from offbeat.data.batches import Source, to_device
from offbeat.errors import CheckpointError, DataError, RecipeError
from offbeat.events import EventLog
from offbeat.flat import plain_name
from offbeat.job import Job
from offbeat.recipes.base import Recipe
from offbeat.rundir import RunFolder
from offbeat.towers import CPU, find_devices

BATCH_SIZE = 500
POLL_S = 0.2


class Evaluator:
    """Owns a model replica; `run` returns when the last checkpoint is scored, or at `stop`."""

    def __init__(
        self,
        job: Job,
        module: nn.Module,
        folder: RunFolder,
        *,
        log: logging.Logger,
        stop: threading.Event,
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        scored: Callable[[int, float], None] = lambda version, metric: None,
        every: int | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`events`: where scores are written down, on the run's `clock`; None: nowhere. `every`: so
        many updates, instead of the run's own `eval_every`. `say` shows the user a warning."""
        self.job = job
        self.log = log
        self.gives_up = False
        """Leaves when nobody is at work on the run, although it is not over."""
        self.latest: tuple[int, float] | None = None
        """The version that was scored last, and what it scored."""
        self._device = find_devices(job.config.devices or job.config.device, 0)[0]
        self._module = module.to(self._device)
        self._folder = folder
        self._events = events
        self._clock = clock
        self._stop = stop
        self._scored = scored
        self._say = say
        self._every = job.config.eval_every if every is None else every
        self._seen: set[Path] = set()
        """The checkpoints that were looked at."""

    def run(self) -> None:
        torch.set_num_threads(1)
        while not self._stop.is_set():
            idle = self.gives_up and not self._folder.is_locked()
            outcome = self._outcome()  # before the look at the folder: the last one is there then
            kept = list_checkpoints(self._folder.checkpoints)
            newest = next(reversed(kept), None)
            if (
                newest is not None
                and newest not in self._seen
                and (outcome or self._is_due(newest))
            ):
                self._score(newest)
            if outcome == "finished" and self.job.config.eval_skipped:
                self._score_skipped(kept)
            if outcome is not None or idle:
                return
            self._stop.wait(POLL_S)

    def _outcome(self) -> str | None:
        """What the run came to, once there will be no other checkpoint."""
        if not self._folder.state.exists():
            return None
        return str(self._folder.read_json(self._folder.state)["outcome"])

    def _is_due(self, path: Path) -> bool:
        """Whether a multiple of `eval_every` was passed since the last score."""
        version, every = int(path.name), self._every
        before = self.latest[0] if self.latest else 0
        return bool(every) and version // (every or 1) > before // (every or 1)

    def _score_skipped(self, kept: list[Path]) -> None:
        latest = self.latest
        for path in kept:
            if path not in self._seen and int(path.name) and not self._stop.is_set():
                self._score(path)
        self.latest = latest  # what a person is shown is the last one's

    def _score(self, path: Path) -> None:
        self._seen.add(path)
        try:
            checkpoint = load_checkpoint(path)
        except CheckpointError as error:  # pruned while we looked the other way
            self.log.warning("%s", error)
            return
        self.score(checkpoint)

    def score(self, checkpoint: Checkpoint) -> None:
        assert self.job.test is not None
        load_state(self._module, checkpoint.state_dict(ema=True))
        metric, count = evaluate(self._module, self.job.recipe, self.job.test, self._device)
        self.latest = (checkpoint.version, metric)
        self.log.info(
            "version %d: %s %.4f", checkpoint.version, metric_name(self.job.recipe), metric
        )
        if warning := warning_of(self.job.recipe, checkpoint.version, metric):
            self.log.warning(warning)
            self._say(f"warning: {warning}")
        if self._events is not None:
            self._events.record(
                "score",
                version=checkpoint.version,
                metric=metric,
                count=count,
                at_s=self._clock(),
            )
        self._scored(checkpoint.version, metric)


def load_state(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Load all that checkpoints keep; a module's own extra state, which is no tensor, is not
    kept."""
    own_names = {plain_name(name): name for name in module.state_dict()}
    keys = module.load_state_dict(
        {own_names.get(name, name): tensor for name, tensor in state.items()}, strict=False
    )
    missing = [key for key in keys.missing_keys if not key.endswith("_extra_state")]
    assert not missing and not keys.unexpected_keys, f"{missing} {keys.unexpected_keys}"


def evaluate(
    module: nn.Module, recipe: Recipe, test: Source, device: torch.device = CPU
) -> tuple[float, float]:
    """The recipe's metric over all of `test`, each example once; and what it was divided by."""
    assert recipe.metric is not None, "a job's recipe has one"
    module.eval()
    total = count = 0.0
    with torch.no_grad():
        for batch in test.in_order(BATCH_SIZE):
            found = recipe.metric(module, to_device(batch, device))
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


def score_line(recipe: Recipe, metric: float) -> str:
    """What an evaluator says of a checkpoint."""
    name = metric_name(recipe)
    return f"{'precision @ 1' if name == 'accuracy' else name} = {metric:.3f}"


def warning_of(recipe: Recipe, version: int, metric: float) -> str:
    """What is to be said of a score that is no number; empty: it is one."""
    if math.isfinite(metric):
        return ""
    return (
        f"the metric {metric_name(recipe)} is {metric}, no number, at version {version}; look at "
        f"the test data, the model's outputs and the recipe's metric"
    )
