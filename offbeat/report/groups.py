"""Runs, sorted into what can be compared.

Runs that differ in their seed only are one *group*; groups that differ in their discipline only
share a *setting*, such as 2 workers and 1 server.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from offbeat.config import CODING_OPTIONS, DISCIPLINES, FAULT_OPTIONS, discipline_options
from offbeat.errors import RunDirError, nearest
from offbeat.recipes.metrics import direction_by_name
from offbeat.report.document import short
from offbeat.report.one_run import counted, shares_of
from offbeat.report.record import Record
from offbeat.report.setup import setup_of
from offbeat.report.statistics import Sample

OVERLAP = 0.25
"""Runs that have so much of the shorter one's time in common went on side by side."""
NOT_COMPARED = {
    *("seed", "run_dir", "data_dir", "quiet", "keep", "tensorboard", "summary_every", "log_every"),
    *("eval_every", "eval_skipped", "checkpoint_every", "keep_best", "track"),
    # these make the variant
    *("discipline", "rule", "local_steps", "overlap", *CODING_OPTIONS, *discipline_options()),
}
MAX_POINTS = 30
"""Of a mean curve."""

Setting = tuple[tuple[str, Any], ...]
Curve = tuple[tuple[float, int, float], ...]
"""For each scored version: seconds, gradients, and what it got."""
Target = float | tuple[str, float]
"""What is good enough: of the metric that the runs are judged by, or of the one that is named."""


@dataclass(frozen=True)
class Run:
    """What is kept of a run's record; the record itself may be large."""

    folder: str
    config: dict[str, Any]
    variant: str
    """The discipline and its options."""
    num_servers: int
    setup: dict[str, str]
    metric: str
    """What it is judged by."""
    directions: dict[str, bool | None]
    """Of each metric, whether more of it is better, as far as the run knows."""
    status: str
    reason: str | None
    last_scores: dict[str, float]
    """By each metric's name; NaN where it is no number."""
    curves: dict[str, Curve]
    gradients: int
    gradients_per_s: float | None
    """While all workers were at work."""
    train_time_s: float
    span_s: tuple[float, float] | None
    """When it trained, on the clock on the wall; None: it does not say."""
    staleness: dict[int, Counter[int]]
    shares: dict[int, tuple[float, ...]]
    bytes_per_gradient: tuple[float, float] | None
    """Up and down; None: an older run does not say."""
    dropped: int
    dropped_by: dict[int, tuple[int, int]]
    """How many of each worker's gradients were, and of how many."""
    rejected: int
    mixed: int
    lost: int
    restarts: int
    unreadable: int

    @property
    def last_score(self) -> float | None:
        """NaN where it is no number."""
        return self.last_scores.get(self.metric)

    @property
    def curve(self) -> Curve:
        return self.curves.get(self.metric, ())

    @property
    def score(self) -> float | None:
        return self.score_by(self.metric)

    def score_by(self, metric: str) -> float | None:
        last = self.last_scores.get(metric)
        return None if last is None or math.isnan(last) else last

    @property
    def finished(self) -> bool:
        return self.status == "finished"


def shortened(record: Record) -> Run:
    time_s = record.train_time_s
    totals = record.totals()
    return Run(
        folder=record.folder,
        config=with_parameters(record.config),
        variant=record.variant,
        num_servers=record.num_servers,
        setup=setup_of(record),
        metric=record.metric,
        directions=record.directions,
        status=record.status,
        reason=record.reason,
        last_scores=record.last_scores(),
        curves={name: tuple(record.curve(name)) for name in record.metrics},
        gradients=totals.gradients,
        gradients_per_s=record.full_rate(),
        train_time_s=time_s,
        span_s=span_of(record),
        staleness={rank: record.workers[rank].staleness for rank in record.ranks},
        shares={rank: shares_of(record.workers[rank]) for rank in record.ranks},
        bytes_per_gradient=_bytes_per_gradient(record),
        dropped=totals.dropped,
        dropped_by={
            rank: (record.workers[rank].dropped, record.workers[rank].gradients)
            for rank in record.ranks
        },
        rejected=totals.rejected,
        mixed=record.mixed,
        lost=totals.lost_updates,
        restarts=len(record.restarts),
        unreadable=record.unreadable,
    )


def _bytes_per_gradient(record: Record) -> tuple[float, float] | None:
    carried = record.carried.carried
    if not carried["up"] or not record.gradients:
        return None
    return carried["up"] / record.gradients, carried["down"] / record.gradients


def span_of(record: Record) -> tuple[float, float] | None:
    try:
        began = datetime.strptime(record.environment["started"], "%Y-%m-%dT%H:%M:%S%z")
    except (KeyError, TypeError, ValueError):
        return None
    return began.timestamp() + record.first_s, began.timestamp() + record.last_s


def side_by_side(runs: Sequence[Run]) -> int:
    """How many of them went on at the same time, at most; a moment in common does not count."""
    spans = [run.span_s for run in runs if run.span_s is not None]
    return max((sum(_overlap(span, other) for other in spans) for span in spans), default=0)


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    common_s = min(one[1], other[1]) - max(one[0], other[0])
    return one is other or common_s > OVERLAP * min(one[1] - one[0], other[1] - other[0]) > 0


def with_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The recipe's parameters as options of their own: they tell settings apart."""
    parameters = config.get("set") or {}
    others = {name: value for name, value in config.items() if name != "set"}
    return others | {f"set {name}": value for name, value in parameters.items()}


@dataclass(frozen=True)
class Goal:
    """What the test metric is to reach; `most`: the higher the better; None: nobody knows."""

    metric: str
    most: bool | None
    target: float | None
    is_guess: bool = False
    """Nobody said which way it is better: that is taken from what training does to it."""

    def reached(self, run: Run) -> tuple[float, int] | None:
        """After how long, and how many gradients; None: never."""
        if self.target is None:
            return None
        for time_s, gradients, score in run.curve:
            if score >= self.target if self.most else score <= self.target:
                return time_s, gradients
        return None

    @property
    def words(self) -> str:
        is_share = self.metric == "accuracy" and self.target is not None
        return f"{100 * (self.target or 0):g}%" if is_share else short(self.target)


@dataclass(frozen=True)
class Group:
    """The runs of one discipline in one setting; `runs` have finished."""

    setting: Setting
    variant: str
    runs: tuple[Run, ...]
    goal: Goal

    def sample(self, of: Callable[[Run], float | None]) -> Sample | None:
        """A figure of all runs, one value for each seed; None where one of them does not have
        it."""
        by_seed: dict[Any, list[float]] = {}
        for run in self.runs:
            value = of(run)
            if value is None:
                return None
            by_seed.setdefault(run.config["seed"], []).append(value)
        return Sample(tuple(math.fsum(values) / len(values) for values in by_seed.values()))

    @property
    def num_seeds(self) -> int:
        return len({run.config["seed"] for run in self.runs})

    @cached_property
    def score(self) -> Sample | None:
        return self.sample(lambda run: run.score)

    def score_by(self, metric: str) -> Sample | None:
        return self.sample(lambda run: run.score_by(metric))

    @cached_property
    def rate(self) -> Sample | None:
        return self.sample(lambda run: run.gradients_per_s)

    @cached_property
    def time_to_target(self) -> Sample | None:
        return self.sample(lambda run: r[0] if (r := self.goal.reached(run)) else None)

    @cached_property
    def gradients_to_target(self) -> Sample | None:
        return self.sample(lambda run: float(r[1]) if (r := self.goal.reached(run)) else None)

    @property
    def num_reached(self) -> int:
        return sum(self.goal.reached(run) is not None for run in self.runs)

    @property
    def staleness(self) -> dict[int, Counter[int]]:
        pooled: dict[int, Counter[int]] = {}
        for run in self.runs:
            for rank, counts in run.staleness.items():
                pooled.setdefault(rank, Counter()).update(counts)
        return pooled

    @property
    def shares(self) -> dict[int, tuple[float, ...]]:
        """Each worker's, averaged over the runs."""
        found: dict[int, list[tuple[float, ...]]] = {}
        for run in self.runs:
            for rank, shares in run.shares.items():
                found.setdefault(rank, []).append(shares)
        return {
            rank: tuple(math.fsum(part) / len(rows) for part in zip(*rows, strict=True))
            for rank, rows in sorted(found.items())
        }


@dataclass(frozen=True)
class Findings:
    """All runs, those that finished sorted into groups."""

    runs: tuple[Run, ...]
    groups: tuple[Group, ...]
    goal: Goal

    @property
    def other_metrics(self) -> list[str]:
        """By which the runs were scored too."""
        found = dict.fromkeys(name for run in self.runs for name in run.curves if run.curves[name])
        return [name for name in found if name != self.goal.metric]

    @property
    def settings(self) -> list[Setting]:
        return list(dict.fromkeys(group.setting for group in self.groups))

    @cached_property
    def variants(self) -> list[str]:
        return sorted({group.variant for group in self.groups}, key=_rank)

    def color(self, group: Group) -> int:
        return self.variants.index(group.variant)

    def within(self, setting: Setting) -> list[Group]:
        return [group for group in self.groups if group.setting == setting]

    def alone(self, group: Group) -> Group | None:
        """The same with one worker, and with nobody slowed down or killed."""
        key = without(group.setting, "workers", *FAULT_OPTIONS)
        for other in self.groups:
            same = without(other.setting, "workers", *FAULT_OPTIONS) == key
            held_up = any(other.runs[0].config.get(name) for name in FAULT_OPTIONS)
            is_one = dict(other.setting)["workers"] == 1 and not held_up
            if same and other.variant == group.variant and is_one:
                return other
        return None

    def speed_up(self, group: Group) -> Sample | None:
        """Gradients/s over those of one worker with the same seed."""
        alone = self.alone(group)
        if alone is None:
            return None
        rates = {run.config["seed"]: run.gradients_per_s for run in alone.runs}

        def over_one(run: Run) -> float | None:
            one = rates.get(run.config["seed"])
            return run.gradients_per_s / one if run.gradients_per_s and one else None

        return group.sample(over_one)


def sort_runs(runs: Sequence[Run], target: Target | None) -> Findings:
    if isinstance(target, tuple):
        runs = _judged_by(runs, target[0])
        target = target[1]
    judged = [run for run in runs if run.finished] or list(runs)
    varying = _varying([run.config for run in judged])
    goal = _goal(judged, target)
    groups: dict[tuple[Setting, str], list[Run]] = {}
    for run in runs:
        setting = tuple((name, run.config.get(name)) for name in varying)
        groups.setdefault((setting, run.variant), []).append(run)
    in_order = sorted(groups, key=lambda key: (_sortable(key[0]), _rank(key[1])))
    made = [
        Group(setting, name, tuple(r for r in groups[setting, name] if r.finished), goal)
        for setting, name in in_order
    ]
    return Findings(tuple(runs), tuple(group for group in made if group.runs), goal)


def time_to(target: Target, record: Record) -> tuple[str, str]:
    """What a run's report says of a target: its name, and when it was reached."""
    run, *_ = (findings := sort_runs([shortened(record)], target)).runs
    goal = findings.goal
    if goal.target is None:
        name, value = target if isinstance(target, tuple) else (record.metric, target)
        return f"s of training to {name} {value:g}", "nobody said which way it is better"
    reached = goal.reached(run)
    when = "not reached" if reached is None else short(reached[0])
    return f"s of training to {goal.metric} {goal.target:g}", when


def _varying(configs: list[dict[str, Any]]) -> list[str]:
    """The options that tell settings apart: always the numbers of workers and servers. How many
    threads a worker has follows from how many workers there are, unless somebody said otherwise."""
    names = dict.fromkeys(name for config in configs for name in config)
    differ = [
        name
        for name in names
        if name not in NOT_COMPARED and len({repr(config.get(name)) for config in configs}) > 1
    ]
    threads = {(config["workers"], config.get("threads")) for config in configs}
    if len(threads) == len({workers for workers, _ in threads}):
        differ = [name for name in differ if name != "threads"]
    return ["workers", "servers", *(name for name in differ if name not in ("workers", "servers"))]


def _judged_by(runs: Sequence[Run], metric: str) -> list[Run]:
    known = {name for run in runs for name in run.curves}
    if metric not in known:
        raise RunDirError(f"no run was scored by {metric!r}; {nearest(metric, known)}")
    return [dataclasses.replace(run, metric=metric) for run in runs]


def _goal(runs: Sequence[Run], target: float | None) -> Goal:
    """The target where none is given: the highest whole percent that every run reached. Which way
    a metric is better is told by what training does to it, where nobody said so."""
    names = {run.metric for run in runs if run.curve}  # one that did not begin may not know its own
    metric, *others = sorted(names) or [runs[0].metric]
    if others:
        raise RunDirError(
            f"these runs are judged by {metric} and by {', '.join(others)}: report them apart"
        )
    gains = [run.curve[-1][2] - run.curve[0][2] for run in runs if len(run.curve) > 1]
    guess = sum(gains) > 0 if any(gains) else None
    said = _direction(runs, metric)
    most = guess if said is None else said
    tops = [max(score for *_, score in run.curve) for run in runs if run.finished and run.curve]
    if most is None:
        target = None  # nobody knows when that is reached
    elif target is None and metric == "accuracy" and tops:
        target = math.floor(100 * min(tops) + 1e-9) / 100
    return Goal(metric, most, target, is_guess=said is None and most is not None)


def _direction(runs: Sequence[Run], metric: str) -> bool | None:
    """Whether more of it is better, as the runs have it; None where they do not, or disagree."""
    found = {way for run in runs if (way := run.directions.get(metric)) is not None}
    return found.pop() if len(found) == 1 else direction_by_name(metric)


def _rank(name: str) -> tuple[int, str]:
    base = name.partition(",")[0].partition(":")[0]
    return (DISCIPLINES.index(base) if base in DISCIPLINES else len(DISCIPLINES), name)


def _sortable(setting: Setting) -> list[tuple[bool, Any, str]]:
    return [
        (value is not None, value if isinstance(value, int | float) else 0, str(value))
        for _, value in setting
    ]


def without(setting: Setting, *names: str) -> Setting:
    return tuple((name, value) for name, value in setting if name not in names)


def in_words(setting: Setting) -> str:
    words = []
    for name, value in setting:
        if name in ("workers", "servers"):
            words.append(counted(value, name[:-1]))
        elif value is not None:
            words.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(words)


# -- curves ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mean:
    """A point of a mean curve."""

    gradients: float
    time_s: float
    score: float
    band: tuple[float, float]


def mean_curve(curves: Sequence[Curve]) -> list[Mean]:
    """The mean of several runs' curves, where all of them have got to: at the numbers of gradients
    that were scored, or at some of them where these are many."""
    if not curves:
        return []
    start, end = max(c[0][1] for c in curves), min(c[-1][1] for c in curves)
    places = sorted({n for curve in curves for _, n, _ in curve if start <= n <= end})
    if len(places) > MAX_POINTS:
        last = len(places) - 1
        places = [places[round(i * last / (MAX_POINTS - 1))] for i in range(MAX_POINTS)]
    means = []
    for n in places:
        times, scores = zip(*(_at(curve, n) for curve in curves), strict=True)
        sample = Sample(scores)
        means.append(Mean(float(n), Sample(times).mean, sample.mean, (sample.low, sample.high)))
    return means


def _at(curve: Curve, gradients: int) -> tuple[float, float]:
    """When a run had so many gradients, and how good it was: on the line between scored points."""
    for (s0, n0, score0), (s1, n1, score1) in itertools.pairwise(curve):
        if n0 <= gradients <= n1:
            share = (gradients - n0) / (n1 - n0) if n1 > n0 else 1.0
            return s0 + share * (s1 - s0), score0 + share * (score1 - score0)
    return curve[-1][0], curve[-1][2]
