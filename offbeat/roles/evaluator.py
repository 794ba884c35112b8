"""The evaluator: scores the newest checkpoint on the test data, never trains, never blocks anybody.

It finds checkpoints in a source: the run's folder, where it looks like any outsider, or the servers
of a cluster (cluster/remote.py). When training is quicker than scoring it skips to the newest; the
last one it always scores. With --eval-skipped it then goes back to those that it skipped, as far as
they were kept.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from offbeat.errors import CheckpointError
from offbeat.flat import plain_name
from offbeat.recipes.metrics import Scores
from offbeat.roles.scoring import Scoring, warnings_of
from offbeat.run.checkpoint import Checkpoint, list_checkpoints, load_checkpoint
from offbeat.run.events import EventLog
from offbeat.run.job import Job
from offbeat.run.rundir import RunFolder
from offbeat.towers import find_devices

POLL_S = 0.2


@dataclass(frozen=True)
class Found:
    """What a checkpoint has to score: its moving average, where it has one."""

    version: int
    state: Mapping[str, Tensor]


@dataclass(frozen=True)
class Look:
    """What a source has at the moment: something new, if there is any; and whether there will be no
    other."""

    found: Found | None
    is_last: bool


class CheckpointSource(ABC):
    """Where an evaluator finds what to score. One thread uses it."""

    pause_s: float
    """Between two looks."""

    @abstractmethod
    def look(self) -> Look:
        """The newest checkpoint, if it is due and was not found before; the last one is always
        due."""

    def skipped(self) -> Iterator[Found]:
        """Those that were not found in time, after the last."""
        return iter(())

    def leave(self) -> None:
        """Nothing more is looked for here."""
        return


class FolderSource(CheckpointSource):
    """A run's folder; the master names its last checkpoint in state.json. `every`: so many updates
    from one checkpoint that is due to the next."""

    def __init__(
        self,
        folder: RunFolder,
        every: int | None,
        *,
        log: logging.Logger,
        has_skipped: bool = False,
        gives_up: bool = False,
    ) -> None:
        """`has_skipped`: skipped checkpoints of a run that has finished are wanted too. `gives_up`:
        there is no other where nobody is at work on the run, although it is not over."""
        self.pause_s = POLL_S
        self._folder = folder
        self._every = every
        self._log = log
        self._has_skipped = has_skipped
        self._gives_up = gives_up
        self._newest = 0
        """The version that was found last."""
        self._seen: set[Path] = set()
        """The checkpoints that were looked at."""

    def look(self) -> Look:
        is_idle = self._gives_up and not self._folder.is_locked()
        outcome = self._outcome()  # before the look at the folder: the last one is there then
        newest = next(reversed(list_checkpoints(self._folder.checkpoints)), None)
        found = None
        if newest is not None and newest not in self._seen and (outcome or self._is_due(newest)):
            found = self._load(newest)
        self._newest = found.version if found else self._newest
        return Look(found, outcome is not None or is_idle)

    def skipped(self) -> Iterator[Found]:
        if not self._has_skipped or self._outcome() != "finished":
            return
        for path in list_checkpoints(self._folder.checkpoints):
            if path not in self._seen and int(path.name) and (found := self._load(path)):
                yield found

    def _outcome(self) -> str | None:
        """What the run came to, once there will be no other checkpoint."""
        if not self._folder.state.exists():
            return None
        return str(self._folder.read_json(self._folder.state)["outcome"])

    def _is_due(self, path: Path) -> bool:
        """Whether a multiple of `every` was passed since the last one that was found."""
        every = self._every
        return bool(every) and int(path.name) // (every or 1) > self._newest // (every or 1)

    def _load(self, path: Path) -> Found | None:
        self._seen.add(path)
        try:
            return found_in(load_checkpoint(path))
        except CheckpointError as error:  # pruned while we looked the other way
            self._log.warning("%s", error)
            return None


def found_in(checkpoint: Checkpoint) -> Found:
    return Found(checkpoint.version, checkpoint.state_dict(ema=True))


class Evaluator:
    """Owns a model replica; `run` returns when the last checkpoint is scored, or at `stop`."""

    def __init__(
        self,
        job: Job,
        module: nn.Module,
        source: CheckpointSource,
        *,
        stop: threading.Event,
        scored: Callable[[int, Scores], None],
        warn: Callable[[str], None],
        events: EventLog | None = None,
        clock: Callable[[], float],
        judge: Callable[[Found, Scores], None] = lambda found, scores: None,
    ) -> None:
        """`scored` is told each version and its scores, `warn` what is odd about one, and `judge`
        what was scored. `events`: where scores are written down, on the run's `clock`; None:
        nowhere."""
        self.job = job
        self.latest: tuple[int, Scores] | None = None
        """The version that was scored last, and what it scored."""
        assert job.test is not None
        device = find_devices(job.config.devices or job.config.device, 0)[0]
        self._module = module.to(device)
        self._scoring = Scoring(job.recipe, job.test, device, warn)
        self._source = source
        self._events = events
        self._clock = clock
        self._stop = stop
        self._scored = scored
        self._warn = warn
        self._judge = judge

    def run(self) -> None:
        try:
            while not self._stop.is_set():
                look = self._source.look()
                if look.found is not None:
                    self.score(look.found)
                if look.is_last:
                    self._score_skipped()
                    return
                self._stop.wait(self._source.pause_s)
        finally:
            self._source.leave()

    def _score_skipped(self) -> None:
        latest = self.latest
        for found in self._source.skipped():
            if self._stop.is_set():
                break
            self.score(found)
        self.latest = latest  # what a person is shown is the last one's

    def score(self, found: Found) -> None:
        version = found.version
        load_state(self._module, found.state)
        scores = self._scoring.score(self._module)
        self.latest = (version, scores)
        if self._events is not None:
            self._events.record(
                "score",
                version=version,
                metric=scores.metric,
                count=scores.count,
                scores=dict(scores.values),
                every=self.job.config.eval_every,
                at_s=self._clock(),
            )
        self._scored(version, scores)
        self._judge(found, scores)
        for warning in warnings_of(version, scores.values):
            self._warn(warning)


def load_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load all that checkpoints keep; a module's own extra state, which is no tensor, is not
    kept."""
    own_names = {plain_name(name): name for name in module.state_dict()}
    keys = module.load_state_dict(
        {own_names.get(name, name): tensor for name, tensor in state.items()}, strict=False
    )
    missing = [key for key in keys.missing_keys if not key.endswith("_extra_state")]
    assert not missing and not keys.unexpected_keys, f"{missing} {keys.unexpected_keys}"
