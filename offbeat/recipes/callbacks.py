"""What a run tells whoever wants to know of it: `offbeat.Callback`, and what its methods are given.

Callbacks are given by a recipe, or to `offbeat.train`; run/callbacks.py calls them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A run that begins, or goes on."""

    run_dir: Path
    config: Mapping[str, Any]
    """The options."""
    resolved: Mapping[str, Any]
    """What was really used, whoever said so: optimizer, rate, batch size, devices."""
    metric: str
    """What the run is judged by."""
    higher_is_better: Mapping[str, bool | None]
    """Of each metric by its name; None: nobody said so."""
    total_updates: int | None
    """How many are expected, if that is known."""
    is_resumed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """How far a run is, all workers together. Counts are of all steps since it began, or was
    resumed, rates of those since the last time that this was told."""

    version: int
    """Updates of the furthest shard."""
    at_s: float
    """Since the run began."""
    gradients: int
    examples: int
    loss: float | None
    """The mean of the workers' last ones; None: not known."""
    staleness: float | None
    """The mean of the latest gradients'; None: none was applied."""
    lr: float | None = None
    """The learning rate of the last update, where no parameter group says otherwise; None: there
    was none."""
    gradients_per_s: float | None
    """None: there were updates only."""
    examples_per_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A checkpoint's scores, the first of which is what the run is judged by; NaN where one is no
    number."""

    version: int
    at_s: float
    scores: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """What a run came to."""

    status: str
    """finished, interrupted or failed."""
    reason: str | None
    """Why it failed."""
    summary: Mapping[str, Any]
    """summary.json."""


class Callback:
    """Told what happens in a run; override what you like.

    The calls come one after the other, in a thread of their own in the process that started the
    run: they hold up nobody, and whoever takes long is told less often. One that raises is told on
    the console and in RUN/logs/callbacks.log; the run goes on, and of that callback only `on_end`
    is called from then on, or nothing where it was `on_start` that failed.
    """

    def on_start(self, run: Start) -> None:
        """Once, before everything else."""

    def on_step(self, steps: Steps) -> None:
        """There were steps or updates since the last time; twice a second at most."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """A checkpoint was scored; none is left out."""

    def on_end(self, end: End) -> None:
        """Once, after everything else, however the run ended."""
