"""What follows from a run's scores: the end of it, where it is good enough or gets no better, the
best weights, which are kept, and a lower learning rate, where the schedule goes by scores.

The evaluator's role has referees and tells them every score. The master finds in the run's folder
that it is to end (`enough.json`), and ends it in order, as when its work is done, and how often the
rate is to fall (`falls.json`); what is scored best is written to `best.safetensors`. Whoever takes
a dead evaluator's place goes on from the scores that are written down.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from offbeat.decline import Decline, Plateau
from offbeat.recipes.base import directions, metric_name, what_falls
from offbeat.recipes.metrics import Scores
from offbeat.roles.evaluator import Found
from offbeat.run.checkpoint import write_weights
from offbeat.run.events import read_events
from offbeat.run.job import Job
from offbeat.run.rundir import RunFolder
from offbeat.run.stopping import Judge


class Referee:
    def __init__(self, job: Job, folder: RunFolder, say: Callable[[str], None]) -> None:
        self._judges = make_judges(job, folder.events)
        self._keeps_best = job.config.keep_best
        self._folder = folder
        self._say = say

    def scored(self, found: Found, scores: Scores) -> None:
        for name, judge in self._judges.items():
            if name in scores.values:
                judge.add(found.version, scores.values[name])
        first, metric = next(iter(self._judges.values())), scores.metric
        if self._keeps_best and first.is_better(metric, self._folder.read_best()):
            write_weights(self._folder.best, dict(found.state))
            self._folder.write_best(found.version, metric)
        reason = reason_of(self._judges)
        if reason is not None and not self._is_ending():
            self._folder.write_json(self._folder.enough, {"reason": reason})
            self._say(f"stopping early: {reason}")

    def _is_ending(self) -> bool:
        return self._folder.enough.exists() or self._folder.state.exists()


def make_judges(job: Job, events: Path) -> dict[str, Judge]:
    """By the metric that each goes by, what the run is judged by first, which --stop-at may not be;
    told what was scored so far. None, where nobody knows what is better."""
    config, known, first = job.config, directions(job.recipe), metric_name(job.recipe)
    stops_by, stop_at = config.stops_at or (None, None)
    judges: dict[str, Judge] = {}
    for name in dict.fromkeys((first, stops_by or first)):
        if (most := known.get(name)) is not None:
            judges[name] = Judge(
                name,
                most=most,
                stop_at=stop_at if name == (stops_by or first) else None,
                patience=config.patience if name == first else None,
            ).add_all(past_scores(events, None if name == first else name))
    return judges


def reason_of(judges: Mapping[str, Judge]) -> str | None:
    """Why a run is to end; None: it is not."""
    return next((judge.reason for judge in judges.values() if judge.reason is not None), None)


class RateReferee:
    """Of a schedule that goes by scores."""

    def __init__(self, job: Job, folder: RunFolder, say: Callable[[str], None]) -> None:
        schedule = job.recipe.schedule
        assert isinstance(schedule, Plateau)
        self._name, most = what_falls(job.recipe, schedule)
        assert most is not None, "a job's schedule knows what is better"
        self._schedule = schedule
        self._bases = [member.options["lr"] for member in job.optimizer.members]
        self._every = job.config.eval_every or 1
        self._decline = Decline(schedule, most=most, every=self._every)
        self._decline.recall(self._past(folder.events), folder.read_falls())
        self._folder = folder
        self._say = say

    def scored(self, found: Found, scores: Scores) -> None:
        value = scores.values.get(self._name)
        if value is None or not self._can_fall():
            return
        if self._decline.add(found.version, value):
            self._folder.write_json(self._folder.falls, {"scored": self._decline.falls})
            self._say(f"the learning rate falls: no better {self._name} at version {found.version}")

    def _can_fall(self) -> bool:
        """One that is as low as it gets has nothing to fall for, and is not said to."""
        num_falls, lr = len(self._decline.falls), self._schedule.lr
        return any(lr(base, num_falls + 1) < lr(base, num_falls) for base in self._bases)

    def _past(self, events: Path) -> Iterator[tuple[int, float, int]]:
        for event in _score_events(events):
            if self._name in event["scores"]:
                value = _number(event["scores"][self._name])
                yield event["version"], value, event.get("every") or self._every


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
    """What was scored so far, in the order in which it was. `name`: by which metric; None: by the
    one that the run is judged by."""
    for event in _score_events(events):
        if name is None or name in event["scores"]:
            value = event["metric"] if name is None else event["scores"][name]
            yield event["version"], _number(value)


def _score_events(events: Path) -> Iterator[dict[str, Any]]:
    return (event for event in read_events(events, "evaluator*") if event["kind"] == "score")


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
