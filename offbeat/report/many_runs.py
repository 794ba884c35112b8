"""The report of many runs: which discipline, for this model, on these machines?

Runs that differ in their seed only are one *cell*; cells that differ in their discipline only share
a *setting*, such as 2 workers and 1 server. A difference is named where the seeds' spread allows
it (statistics.py).
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from offbeat.config import DISCIPLINES
from offbeat.errors import RunDirError
from offbeat.report.document import (
    Bar,
    BarPlot,
    Document,
    Line,
    LinePlot,
    Section,
    Shares,
    Table,
    percent,
    short,
    spelled,
)
from offbeat.report.one_run import counted, histogram, shares_of, variant
from offbeat.report.record import Record
from offbeat.report.statistics import Sample, best_of
from offbeat.report.summary import staleness_summary

NOT_COMPARED = {
    *("seed", "run_dir", "data_dir", "quiet", "keep", "tensorboard", "summary_every", "log_every"),
    *("eval_every", "eval_skipped", "checkpoint_every"),
    # these make the variant
    *("discipline", "staleness", "backup_workers", "reduce", "round_timeout"),
}
INJECTED = ("slow_worker", "kill_worker")
MOST_POINTS = 30
"""Of a mean curve."""

Setting = tuple[tuple[str, Any], ...]
Curve = tuple[tuple[float, int, float], ...]
"""For each scored version: seconds, gradients, and what it got."""


@dataclass(frozen=True)
class Run:
    """What is kept of a run's record; the record itself may be large."""

    folder: str
    config: dict[str, Any]
    metric: str
    status: str
    reason: str | None
    curve: Curve
    gradients: int
    gradients_per_s: float | None
    """While all workers were at work."""
    train_time_s: float
    staleness: dict[int, Counter[int]]
    shares: dict[int, tuple[float, ...]]
    dropped: int
    rejected: int
    mixed: int
    lost: int
    restarts: int
    unreadable: int

    @property
    def score(self) -> float | None:
        return self.curve[-1][2] if self.curve else None

    @property
    def finished(self) -> bool:
        return self.status == "finished"


def shortened(record: Record) -> Run:
    time_s = record.train_time_s
    workers = record.workers.values()
    return Run(
        folder=record.folder,
        config=record.config,
        metric=record.metric,
        status=record.status,
        reason=record.reason,
        curve=tuple(record.curve()),
        gradients=record.gradients,
        gradients_per_s=record.full_rate(),
        train_time_s=time_s,
        staleness={rank: record.workers[rank].staleness for rank in record.ranks},
        shares={rank: shares_of(record.workers[rank]) for rank in record.ranks},
        dropped=sum(w.dropped for w in workers),
        rejected=sum(w.rejected for w in workers),
        mixed=record.mixed,
        lost=record.lost_updates(),
        restarts=len(record.restarts),
        unreadable=record.unreadable,
    )


@dataclass(frozen=True)
class Goal:
    """What the test metric is to reach; `most`: the higher the better; None: nobody knows."""

    metric: str
    most: bool | None
    target: float | None

    def reached(self, run: Run) -> tuple[float, int] | None:
        """After how long, and how many gradients; None: never."""
        if self.target is None or self.most is None:
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
class Cell:
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
class Grid:
    """All runs, sorted into cells."""

    runs: tuple[Run, ...]
    cells: tuple[Cell, ...]
    goal: Goal

    @property
    def settings(self) -> list[Setting]:
        return list(dict.fromkeys(cell.setting for cell in self.cells))

    @cached_property
    def variants(self) -> list[str]:
        return sorted({cell.variant for cell in self.cells}, key=_rank)

    def color(self, cell: Cell) -> int:
        return self.variants.index(cell.variant)

    def within(self, setting: Setting) -> list[Cell]:
        return [cell for cell in self.cells if cell.setting == setting]

    def alone(self, cell: Cell) -> Cell | None:
        """The same with one worker, and with nobody slowed down or killed."""
        key = _without(cell.setting, "workers", *INJECTED)
        for other in self.cells:
            same = _without(other.setting, "workers", *INJECTED) == key
            held_up = any(other.runs[0].config.get(name) for name in INJECTED)
            is_one = dict(other.setting)["workers"] == 1 and not held_up
            if same and other.variant == cell.variant and is_one:
                return other
        return None

    def speed_up(self, cell: Cell) -> Sample | None:
        """Gradients/s over those of one worker with the same seed."""
        alone = self.alone(cell)
        if alone is None:
            return None
        rates = {run.config["seed"]: run.gradients_per_s for run in alone.runs}

        def over_one(run: Run) -> float | None:
            one = rates.get(run.config["seed"])
            return run.gradients_per_s / one if run.gradients_per_s and one else None

        return cell.sample(over_one)


def sort_into_grid(runs: Sequence[Run], target: float | None) -> Grid:
    judged = [run for run in runs if run.finished] or list(runs)
    varying = _varying([run.config for run in judged])
    goal = _goal(judged, target)
    cells: dict[tuple[Setting, str], list[Run]] = {}
    for run in runs:
        setting = tuple((name, run.config.get(name)) for name in varying)
        cells.setdefault((setting, variant(run.config)), []).append(run)
    in_order = sorted(cells, key=lambda key: (_sortable(key[0]), _rank(key[1])))
    made = [
        Cell(setting, name, tuple(r for r in cells[setting, name] if r.finished), goal)
        for setting, name in in_order
    ]
    return Grid(tuple(runs), tuple(cell for cell in made if cell.runs), goal)


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


def _goal(runs: Sequence[Run], target: float | None) -> Goal:
    """The target where none is given: the highest whole percent that every run reached. Which way
    a metric is better is told by what training does to it."""
    metric, *others = sorted({run.metric for run in runs})
    if others:
        raise RunDirError(
            f"these runs are judged by {metric} and by {', '.join(others)}: report them apart"
        )
    gains = [run.curve[-1][2] - run.curve[0][2] for run in runs if len(run.curve) > 1]
    most = True if metric == "accuracy" else sum(gains) > 0 if any(gains) else None
    tops = [max(score for *_, score in run.curve) for run in runs if run.finished and run.curve]
    if target is None and metric == "accuracy" and tops:
        target = math.floor(100 * min(tops) + 1e-9) / 100
    return Goal(metric, most, target)


def _rank(name: str) -> tuple[int, str]:
    base = name.partition(",")[0].partition(":")[0]
    return (DISCIPLINES.index(base) if base in DISCIPLINES else len(DISCIPLINES), name)


def _sortable(setting: Setting) -> list[tuple[bool, Any, str]]:
    return [
        (value is not None, value if isinstance(value, int | float) else 0, str(value))
        for _, value in setting
    ]


def _without(setting: Setting, *names: str) -> Setting:
    return tuple((name, value) for name, value in setting if name not in names)


def in_words(setting: Setting) -> str:
    words = []
    for name, value in setting:
        if name in ("workers", "servers"):
            words.append(counted(value, name[:-1]))
        elif value is not None:
            words.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(words)


def _mean_and_sd(sample: Sample | None) -> str:
    if sample is None:
        return "-"
    if sample.sd is None:
        return short(sample.mean)
    return f"{short(sample.mean)} ± {f'{sample.sd:.2g}' if sample.sd < 100 else short(sample.sd)}"


def _mean_and_range(sample: Sample | None) -> str:
    if sample is None:
        return "-"
    band = (sample.low, sample.high)
    return short(sample.mean) + (f" ({spelled(band)})" if sample.n > 1 else "")


# -- the document ----------------------------------------------------------------------------------


def describe_runs(runs: Sequence[Run], target: float | None) -> Document:
    grid = sort_into_grid(runs, target)
    recipes = sorted({run.config["recipe"] for run in runs})
    sections = [_runs(grid)]
    if grid.cells:
        sections = [
            _winners(grid),
            _results(grid),
            _curves(grid, over="time"),
            _curves(grid, over="gradients"),
            _rates(grid),
            _staleness(grid),
            _time(grid),
            _fates(grid),
            *sections,
        ]
    title = f"{', '.join(recipes)}: {counted(len(grid.variants), 'discipline')} compared"
    return Document(title, _lead(grid), tuple(s for s in sections if s.plots or s.tables))


def _lead(grid: Grid) -> str:
    seeds = {run.config["seed"] for run in grid.runs}
    text = (
        f"{counted(len(grid.runs), 'run')}: {', '.join(grid.variants) or 'no discipline'} in "
        f"{counted(len(grid.settings), 'setting')}, {counted(len(seeds), 'seed')}."
    )
    for name in INJECTED:
        (value, *others) = {run.config.get(name) for run in grid.runs}
        if value and not others:
            text += f" All with --{name.replace('_', '-')} {value}."
    unfinished = [run for run in grid.runs if not run.finished]
    if unfinished:
        text += (
            f" {len(unfinished)} did not finish and are in no figure; they are listed at the end."
        )
    unreadable = sum(run.unreadable for run in grid.runs)
    if unreadable:
        text += f" {counted(unreadable, 'line')} of the event files could not be read."
    return text


def _winners(grid: Grid) -> Section:
    goal = grid.goal
    criteria: list[tuple[str, bool, Callable[[Cell], Sample | None], str]] = []
    if goal.most is not None:
        criteria += [(f"best test {goal.metric}", goal.most, lambda cell: cell.score, "")]
    if goal.target is not None and goal.most is not None:
        criteria += [
            (f"soonest at {goal.words}", False, lambda cell: cell.time_to_target, " s"),
            (f"fewest gradients to {goal.words}", False, lambda c: c.gradients_to_target, ""),
        ]
    criteria += [("most gradients/s", True, lambda cell: cell.rate, "")]
    groups = [(in_words(s), grid.within(s), False) for s in grid.settings]
    if len(groups) > 1:
        groups.append(("all of them", list(grid.cells), True))
    rows = tuple(
        (
            where,
            *(_winner(cells, most, of, unit, full=full) for _, most, of, unit in criteria),
        )
        for where, cells, full in groups
    )
    text = (
        "The winner is named where its mean differs from that of every other one by more than the "
        "spread over the seeds explains (Welch's t-test at 5%, shared out among the comparisons "
        "that an entry of the table takes). "
        "Differences between test sets, machines or days are not in that spread."
    )
    if goal.target is not None:
        text += (
            f" A run is at {goal.words} when a checkpoint that was scored is at least as good for "
            f"the first time; time and gradients are counted up to the last update in it, and the "
            f"time for scoring it is not in them."
        )
    if goal.most is None:
        text += f" Whether more {goal.metric} is better cannot be told from these runs."
    elif goal.metric != "accuracy":
        way, best = ("raises", "highest") if goal.most else ("lowers", "lowest")
        text += f" Training {way} {goal.metric}, so that the {best} is taken to be the best."
    return Section("Which one?", text, (Table(("", *(c[0] for c in criteria)), rows),))


def _winner(
    cells: list[Cell],
    most: bool,
    of: Callable[[Cell], Sample | None],
    unit: str,
    *,
    full: bool,
) -> str:
    known = [(cell, sample) for cell in cells if (sample := of(cell)) is not None]
    if not known:
        return "-"
    best, near = best_of([sample for _, sample in known], most=most)
    cell, sample = known[best]

    def name(cell: Cell) -> str:
        return f"{cell.variant}, {in_words(cell.setting)}" if full else cell.variant

    if len(known) == 1:
        return f"{name(cell)} alone: {_mean_and_sd(sample)}{unit}"
    if not near:
        return f"{name(cell)}: {_mean_and_sd(sample)}{unit}"
    n = min(s.n for _, s in known)
    if len(near) == len(known) - 1:
        return f"no difference seen, n={n}"
    tied = [name(known[i][0]) for i in sorted([best, *near])]
    if full and len(tied) > 3:
        return f"no difference seen between {len(tied)} of {len(known)}, n={n}"
    return f"no difference seen between {', '.join(tied[:-1])} and {tied[-1]}, n={n}"


def _results(grid: Grid) -> Section:
    goal = grid.goal
    header = ["setting", "discipline", "n", f"test {goal.metric} (± sd)"]
    if goal.target is not None and goal.most is not None:
        header += [f"s to {goal.words}", f"gradients to {goal.words}"]
    header += ["s of training", "gradients/s", "speed-up", "staleness: mean", "p95", "max"]
    rows = []
    for cell in grid.cells:
        row = [in_words(cell.setting), cell.variant, str(cell.num_seeds), _mean_and_sd(cell.score)]
        if goal.target is not None and goal.most is not None:
            row += _to_target(cell)
        row += [
            _mean_and_range(cell.sample(lambda run: run.train_time_s)),
            _mean_and_range(cell.rate),
            _mean_and_range(grid.speed_up(cell)),
        ]
        stale = staleness_summary(sum(cell.staleness.values(), Counter()))
        rows.append((*row, *(short(stale[key]) for key in ("mean", "p95", "max"))))
    text = (
        "Means over the seeds, with the lowest and the highest in brackets. Gradients/s: while all "
        "workers were at work, so that a straggler which works on alone in the end does not count "
        "for every discipline alike. The speed-up is that of gradients/s over one worker with the "
        "same seed."
    )
    return Section("All of them", text, (Table(tuple(header), tuple(rows)),))


def _to_target(cell: Cell) -> list[str]:
    if cell.time_to_target is None:
        missed = f"reached by {cell.num_reached} of {len(cell.runs)}"
        return [missed, missed]
    return [_mean_and_range(cell.time_to_target), _mean_and_range(cell.gradients_to_target)]


def _curves(grid: Grid, *, over: str) -> Section:
    name = f"test {grid.goal.metric}"
    x = "s of training" if over == "time" else "gradients"
    plots = []
    for setting in grid.settings:
        lines = []
        for cell in grid.within(setting):
            means = mean_curve([run.curve for run in cell.runs if run.curve])
            if means:
                points = tuple(
                    (m.time_s if over == "time" else m.gradients, m.score) for m in means
                )
                band = tuple(m.band for m in means) if cell.num_seeds > 1 else ()
                lines.append(Line(cell.variant, grid.color(cell), points, band))
        if lines:
            plots.append(LinePlot(in_words(setting), x, name, tuple(lines)))
    title = f"{name[0].upper()}{name[1:]} over {over}"
    text = (
        "Each point is the mean over the seeds after the same number of gradients; bands go from "
        "the lowest to the highest of them."
    )
    return Section(title, text, plots=tuple(plots))


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
    if len(places) > MOST_POINTS:
        last = len(places) - 1
        places = [places[round(i * last / (MOST_POINTS - 1))] for i in range(MOST_POINTS)]
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


def _rates(grid: Grid) -> Section:
    plots: list[BarPlot | LinePlot] = []
    for setting in grid.settings:
        bars = tuple(
            Bar(cell.variant, grid.color(cell), cell.rate.mean, cell.rate.low, cell.rate.high)
            for cell in grid.within(setting)
            if cell.rate is not None
        )
        plots.append(BarPlot(in_words(setting), "gradients/s", bars))
    plots += _speed_ups(grid)
    return Section(
        "Speed",
        "Gradients per second while all workers were at work, with the lowest and the highest of "
        "the seeds.",
        plots=tuple(plots),
    )


def _speed_ups(grid: Grid) -> list[LinePlot]:
    plots = []
    settings = [s for s in grid.settings if dict(s)["workers"] > 1]
    for rest in dict.fromkeys(_without(setting, "workers") for setting in settings):
        lines = []
        most = 1
        for color, name in enumerate(grid.variants):
            cells = [c for c in grid.cells if c.variant == name and dict(c.setting)["workers"] > 1]
            found = [(c, grid.speed_up(c)) for c in cells if _without(c.setting, "workers") == rest]
            known = [(dict(c.setting)["workers"], sample) for c, sample in found if sample]
            if known:
                one = Sample((1.0,))
                points = [(float(w), sample) for w, sample in [(1, one), *known]]
                band = tuple((sample.low, sample.high) for _, sample in points)
                lines.append(Line(name, color, tuple((w, s.mean) for w, s in points), band))
                most = max(most, *(w for w, _ in known))
        if lines:
            even = ((1.0, 1.0), (float(most), float(most)))
            ideal = Line("as many times as workers", 7, even, (), dashed=True)
            title = f"speed-up over one worker, {in_words(rest)}"
            plots.append(LinePlot(title, "workers", "times", (*lines, ideal)))
    return plots


def _staleness(grid: Grid) -> Section:
    plots = tuple(
        histogram(f"{cell.variant}, {in_words(cell.setting)}", cell.staleness)
        for cell in grid.cells
        if cell.staleness
    )
    rows = tuple(
        (
            in_words(cell.setting),
            cell.variant,
            f"worker {rank}",
            *(short(v) for v in staleness_summary(counts).values()),
        )
        for cell in grid.cells
        for rank, counts in sorted(cell.staleness.items())
    )
    table = Table(("setting", "discipline", "", "mean", "p50", "p95", "p99", "max"), rows)
    text = (
        "A gradient's staleness: how many versions were applied to the shard between the "
        "parameters it was computed on and its own application. All seeds together; each worker "
        "has its color."
    )
    return Section("Staleness", text, plots=plots, folded=(table,))


def _time(grid: Grid) -> Section:
    plots = []
    for setting in grid.settings:
        rows = []
        for cell in grid.within(setting):
            shares = cell.shares
            rows += [
                (cell.variant if len(shares) == 1 else f"{cell.variant}, {rank}", parts)
                for rank, parts in shares.items()
            ]
        plots.append(Shares(in_words(setting), tuple(rows)))
    text = (
        "Each worker's time, mean over the seeds. Waiting: its gradient lay at a server that did "
        "not reply yet, because it updated or waited for others; it is at most so much. "
        "Exchanging: the rest of the time between a push and its reply that was not spent "
        "preparing the next batch."
    )
    return Section("Where the workers' time went", text, plots=tuple(plots))


def _fates(grid: Grid) -> Section:
    header = ("setting", "discipline", "gradients", "dropped", "rejected", "mixed replies")
    rows = tuple(
        (
            in_words(cell.setting),
            cell.variant,
            f"{sum(run.gradients for run in cell.runs):,}",
            *(
                _of_all(sum(getattr(run, name) for run in cell.runs), cell)
                for name in ("dropped", "rejected")
            ),
            *(
                f"{sum(getattr(run, name) for run in cell.runs):,}"
                for name in ("mixed", "lost", "restarts")
            ),
        )
        for cell in grid.cells
    )
    text = (
        "Dropped: came too late for a sync round. Rejected: was not finite. Mixed: a lock-free "
        "reply that holds parts of several versions. Lost: taken in by a server that died before "
        "the next checkpoint. Sums over the seeds."
    )
    table = Table((*header, "lost updates", "restarts"), rows)
    return Section("What became of the gradients", text, (table,))


def _of_all(count: int, cell: Cell) -> str:
    total = sum(run.gradients for run in cell.runs)
    return f"{count:,} ({percent(count / total)})" if count and total else str(count)


def _runs(grid: Grid) -> Section:
    header = ("run", "discipline", "workers", "servers", "seed", "how it ended")
    rows = tuple(
        (
            run.folder,
            variant(run.config),
            str(run.config["workers"]),
            str(run.config["servers"]),
            str(run.config["seed"]),
            f"{run.status}: {run.reason}" if run.reason else run.status,
            short(run.score),
            f"{run.gradients:,}",
            short(run.train_time_s),
        )
        for run in grid.runs
    )
    table = Table((*header, f"test {grid.goal.metric}", "gradients", "s of training"), rows)
    return Section("The runs", tables=(table,))
