"""What follows from a run's scores: the end of it, where it is good enough or gets no better, the
best weights, which are kept, and a lower learning rate, where the schedule goes by scores.

The evaluator's role has referees and tells them every score. The master finds in the run's folder
that it is to end (`enough.json`), and ends it in order, as when its work is done, and how often the
rate is to fall (`falls.json`); what is scored best is written to `best.safetensors`. Whoever takes
a dead evaluator's place goes on from the scores that are written down.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from offbeat.decline import Decline, Plateau
from offbeat.recipes.base import metric_name, what_falls
from offbeat.recipes.metrics import Scores
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

    def scored(self, found: Found, scores: Scores) -> None:
        metric = scores.metric
        self._judge.add(found.version, metric)
        if self._keeps_best and self._judge.is_better(metric, self._folder.read_best()):
            write_weights(self._folder.best, dict(found.state))
            self._folder.write_best(found.version, metric)
        if self._judge.reason is not None and not self._is_ending():
            self._folder.write_json(self._folder.enough, {"reason": self._judge.reason})
            self._say(f"stopping early: {self._judge.reason}")

    def _is_ending(self) -> bool:
        return self._folder.enough.exists() or self._folder.state.exists()


class RateReferee:
    """Of a schedule that goes by scores."""

    def __init__(self, job: Job, folder: RunFolder, say: Callable[[str], None]) -> None:
        schedule = job.recipe.schedule
        assert isinstance(schedule, Plateau)
        self._name, most = what_falls(job.recipe, schedule)
        assert most is not None, "a job's schedule knows what is better"
        self._decline = Decline(schedule, most=most, every=job.config.eval_every or 1)
        for version, value in past_scores(folder.events, self._name):
            self._decline.add(version, value)
        self._folder = folder
        self._say = say

    def scored(self, found: Found, scores: Scores) -> None:
        value = scores.values.get(self._name)
        if value is not None and self._decline.add(found.version, value):
            self._folder.write_json(self._folder.falls, {"scored": self._decline.falls})
            self._say(f"the learning rate falls: no better {self._name} at version {found.version}")


def make_referee(
    job: Job, folder: RunFolder | None, say: Callable[[str], None] | None
) -> Callable[[Found, Scores], None]:
    """What is told of every score; nobody, where nothing follows from it."""
    told: list[Callable[[Found, Scores], None]] = []
    if folder is not None and job.config.is_judged:
        told.append(Referee(job, folder, say or (lambda line: None)).scored)
    if folder is not None and isinstance(job.recipe.schedule, Plateau):
        told.append(RateReferee(job, folder, say or (lambda line: None)).scored)

    def scored(found: Found, scores: Scores) -> None:
        for tell in told:
            tell(found, scores)

    return scored


def past_scores(events: Path, name: str | None = None) -> Iterator[tuple[int, float]]:
    """What was scored so far, in the order of versions: skipped ones were scored last. `name`: by
    which metric; None: by the one that the run is judged by."""
    scores = [event for event in read_events(events, "evaluator*") if event["kind"] == "score"]
    for event in sorted(scores, key=lambda event: int(event["version"])):
        if name is None or name in event["scores"]:
            metric = event["metric"] if name is None else event["scores"][name]
            yield event["version"], math.nan if metric is None else float(metric)
