"""What follows from a run's scores: the end of it, where it is good enough or gets no better, and
the best weights, which are kept.

The evaluator's role has a referee and tells it of every score. The master finds in the run's folder
that it is to end (`enough.json`), and ends it in order, as when its work is done; what is scored
best is written to `best.safetensors`. Whoever takes a dead evaluator's place goes on from the
scores that are written down.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from offbeat.recipes.base import metric_name
from offbeat.roles.evaluator import Found
from offbeat.run.checkpoint import write_weights
from offbeat.run.events import read_events
from offbeat.run.job import Job
from offbeat.run.rundir import RunFolder
from offbeat.run.stopping import Judge


class Referee:
    def __init__(self, job: Job, folder: RunFolder, say: Callable[[str], None]) -> None:
        config, most = job.config, job.facts.higher_is_better
        assert most is not None, "a job that is judged knows what is better"
        judge = Judge(
            metric_name(job.recipe), most=most, stop_at=config.stop_at, patience=config.patience
        )
        self._judge = judge.add_all(past_scores(folder.events))
        self._keeps_best = config.keep_best
        self._folder = folder
        self._say = say

    def scored(self, found: Found, metric: float) -> None:
        self._judge.add(found.version, metric)
        if self._keeps_best and self._judge.is_better(metric, self._folder.read_best()):
            write_weights(self._folder.best, dict(found.state))
            self._folder.write_best(found.version, metric)
        if self._judge.reason is not None and not self._is_ending():
            self._folder.write_json(self._folder.enough, {"reason": self._judge.reason})
            self._say(f"stopping early: {self._judge.reason}")

    def _is_ending(self) -> bool:
        return self._folder.enough.exists() or self._folder.state.exists()


def make_referee(
    job: Job, folder: RunFolder | None, say: Callable[[str], None] | None
) -> Callable[[Found, float], None]:
    """What is told of every score; nobody, where nothing follows from it."""
    if folder is None or not job.config.is_judged:
        return lambda found, metric: None
    return Referee(job, folder, say or (lambda line: None)).scored


def past_scores(events: Path) -> Iterator[tuple[int, float]]:
    """What was scored so far, in the order of versions: skipped ones were scored last."""
    scores = [event for event in read_events(events, "evaluator*") if event["kind"] == "score"]
    for event in sorted(scores, key=lambda event: int(event["version"])):
        metric = event["metric"]
        yield event["version"], math.nan if metric is None else float(metric)
