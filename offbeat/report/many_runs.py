"""The report of many runs: which discipline, for this model, on these machines?

A difference is named where the seeds' spread allows it (statistics.py). What is compared with what
is in groups.py.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from offbeat.config import FAULT_OPTIONS
from offbeat.recipes.metrics import LOSS
from offbeat.report.document import (
    METRIC_LIMITS,
    Bar,
    BarPlot,
    Document,
    Line,
    LinePlot,
    Section,
    Shares,
    Table,
    score,
    short,
    spelled,
)
from offbeat.report.groups import (
    Findings,
    Group,
    Run,
    Target,
    in_words,
    mean_curve,
    side_by_side,
    sort_runs,
    without,
)
from offbeat.report.one_run import counted, histogram, in_bytes, of_all
from offbeat.report.setup import describe_setups
from offbeat.report.statistics import Sample, best_of
from offbeat.report.summary import staleness_summary

UNSERVED = (
    "no servers, in whatever setting it is listed; the workers add up their gradients among "
    "themselves, and each makes the same update, so that staleness is 0."
)


def describe_runs(runs: Sequence[Run], target: Target | None) -> Document:
    findings = sort_runs(runs, target)
    recipes = sorted({run.config["recipe"] for run in runs})
    setups = describe_setups("How they were run", (run.setup for run in runs))
    sections = [setups, _runs(findings)]
    if findings.groups:
        sections = [
            _winners(findings),
            _results(findings),
            _curves(findings, over="time"),
            _curves(findings, over="gradients"),
            *(_other_curves(findings, metric) for metric in findings.other_metrics),
            _rates(findings),
            _staleness(findings),
            _time(findings),
            _fates(findings),
            *sections,
        ]
    title = f"{', '.join(recipes)}: {counted(len(findings.variants), 'discipline')} compared"
    return Document(title, _lead(findings), tuple(s for s in sections if s.plots or s.tables))


def _lead(findings: Findings) -> str:
    seeds = {run.config["seed"] for run in findings.runs}
    text = (
        f"{counted(len(findings.runs), 'run')}: "
        f"{', '.join(findings.variants) or 'no discipline'} in "
        f"{counted(len(findings.settings), 'setting')}, {counted(len(seeds), 'seed')}."
    )
    for name in FAULT_OPTIONS:
        (value, *others) = {run.config.get(name) for run in findings.runs}
        if value and not others:
            text += f" All with --{name.replace('_', '-')} {value}."
    if (most := side_by_side(findings.runs)) > 1:
        text += (
            f" Up to {most} of them went on side by side: what is said of time is not to be "
            f"compared, neither among them nor with others."
        )
    if alone := sorted({run.variant for run in findings.runs if not run.num_servers}):
        text += f" {', '.join(alone)}: {UNSERVED}"
    unfinished = [run for run in findings.runs if not run.finished]
    if unfinished:
        text += (
            f" {len(unfinished)} did not finish and are in no figure; they are listed at the end."
        )
    unreadable = sum(run.unreadable for run in findings.runs)
    if unreadable:
        text += f" {counted(unreadable, 'line')} of the event files could not be read."
    return text


def _winners(findings: Findings) -> Section:
    goal = findings.goal
    criteria: list[tuple[str, bool, Callable[[Group], Sample | None], str]] = []
    if goal.most is not None:
        criteria += [(f"best test {goal.metric}", goal.most, lambda group: group.score, "")]
    if goal.target is not None:
        criteria += [
            (f"soonest at {goal.words}", False, lambda group: group.time_to_target, " s"),
            (f"fewest gradients to {goal.words}", False, lambda c: c.gradients_to_target, ""),
        ]
    criteria += [("most gradients/s", True, lambda group: group.rate, "")]
    rivals = [(in_words(s), findings.within(s), False) for s in findings.settings]
    if len(rivals) > 1:
        rivals.append(("all of them", list(findings.groups), True))
    rows = tuple(
        (
            where,
            *(_winner(groups, most, of, unit, full=full) for _, most, of, unit in criteria),
        )
        for where, groups, full in rivals
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
    elif goal.is_guess:
        way, best = ("raises", "highest") if goal.most else ("lowers", "lowest")
        text += (
            f" Training {way} {goal.metric}, so that the {best} is taken to be the best; "
            f"offbeat.metric in the recipe, or higher_is_better in a script's offbeat.log, "
            f"says which way it is."
        )
    return Section("Which one?", text, (Table(("", *(c[0] for c in criteria)), rows),))


def _winner(
    groups: list[Group],
    most: bool,
    of: Callable[[Group], Sample | None],
    unit: str,
    *,
    full: bool,
) -> str:
    known = [(group, sample) for group in groups if (sample := of(group)) is not None]
    if not known:
        return "-"
    best, near = best_of([sample for _, sample in known], most=most)
    group, sample = known[best]

    def name(group: Group) -> str:
        return f"{group.variant}, {in_words(group.setting)}" if full else group.variant

    if len(known) == 1:
        return f"{name(group)} alone: {_mean_and_sd(sample)}{unit}"
    if not near:
        return f"{name(group)}: {_mean_and_sd(sample)}{unit}"
    n = min(s.n for _, s in known)
    if len(near) == len(known) - 1:
        return f"no difference seen, n={n}"
    tied = [name(known[i][0]) for i in sorted([best, *near])]
    if full and len(tied) > 3:
        return f"no difference seen between {len(tied)} of {len(known)}, n={n}"
    return f"no difference seen between {', '.join(tied[:-1])} and {tied[-1]}, n={n}"


def _results(findings: Findings) -> Section:
    goal = findings.goal
    metrics = _tabled(findings)
    header = ["setting", "discipline", "n", *(f"test {name} (± sd)" for name in metrics)]
    if goal.target is not None:
        header += [f"s to {goal.words}", f"gradients to {goal.words}"]
    header += ["s of training", "gradients/s", "speed-up"]
    header += ["staleness: mean", "p95", "max"]
    rows = []
    for group in findings.groups:
        row = [
            in_words(group.setting),
            group.variant,
            str(group.num_seeds),
            *(_mean_and_sd(group.score_by(name)) for name in metrics),
        ]
        if goal.target is not None:
            row += _to_target(group)
        row += [
            _mean_and_range(group.sample(lambda run: run.train_time_s)),
            _mean_and_range(group.rate),
            _mean_and_range(findings.speed_up(group)),
        ]
        stale = staleness_summary(sum(group.staleness.values(), Counter()))
        rows.append((*row, *(short(stale[key]) for key in ("mean", "p95", "max"))))
    text = (
        "Means over the seeds, with the lowest and the highest in brackets. Gradients/s: while all "
        "workers were at work, so that a straggler which works on alone in the end does not count "
        "for every discipline alike. The speed-up is that of gradients/s over one worker with the "
        "same seed."
    )
    sizes = tuple(
        (in_words(group.setting), group.variant, *_bytes(group)) for group in findings.groups
    )
    of_bytes = Table(("setting", "discipline", "bytes a gradient: up", "down"), sizes)
    return Section("All of them", text, (Table(tuple(header), tuple(rows)), of_bytes))


def _bytes(group: Group) -> tuple[str, str]:
    """What a gradient is on its way, and what comes back for it."""
    found = [run.bytes_per_gradient for run in group.runs if run.bytes_per_gradient is not None]
    up, down = (sum(each) / len(found) for each in zip(*found, strict=True)) if found else (0, 0)
    return in_bytes(up), in_bytes(down)


def _tabled(findings: Findings) -> list[str]:
    """The metrics that tables show: what the runs are judged by, and the test loss."""
    return [findings.goal.metric, *(name for name in findings.other_metrics if name == LOSS)]


def _to_target(group: Group) -> list[str]:
    if group.time_to_target is None:
        missed = f"reached by {group.num_reached} of {len(group.runs)}"
        return [missed, missed]
    return [_mean_and_range(group.time_to_target), _mean_and_range(group.gradients_to_target)]


def _curves(findings: Findings, *, over: str) -> Section:
    name = f"test {findings.goal.metric}"
    title = f"{name[0].upper()}{name[1:]} over {over}"
    text = (
        "Each point is the mean over the seeds after the same number of gradients; bands go from "
        "the lowest to the highest of them."
    )
    plots = _curve_plots(findings, findings.goal.metric, over=over)
    return Section(title, text, plots=plots)


def _other_curves(findings: Findings, metric: str) -> Section:
    by_time = _curve_plots(findings, metric, over="time")
    by_count = _curve_plots(findings, metric, over="gradients")
    return Section(f"Test {metric}", plots=(*by_time, *by_count))


def _curve_plots(findings: Findings, metric: str, *, over: str) -> tuple[LinePlot, ...]:
    """One for each setting."""
    x = "s of training" if over == "time" else "gradients"
    plots = []
    for setting in findings.settings:
        lines = []
        for group in findings.within(setting):
            curves = [run.curves.get(metric, ()) for run in group.runs]
            means = mean_curve([curve for curve in curves if curve])
            if means:
                points = tuple(
                    (m.time_s if over == "time" else m.gradients, m.score) for m in means
                )
                band = tuple(m.band for m in means) if group.num_seeds > 1 else ()
                lines.append(Line(group.variant, findings.color(group), points, band))
        if lines:
            limits = METRIC_LIMITS.get(metric)
            name = f"test {metric}"
            plots.append(LinePlot(in_words(setting), x, name, tuple(lines), limits=limits))
    return tuple(plots)


def _rates(findings: Findings) -> Section:
    plots: list[BarPlot | LinePlot] = []
    for setting in findings.settings:
        bars = tuple(
            Bar(
                group.variant,
                findings.color(group),
                group.rate.mean,
                group.rate.low,
                group.rate.high,
            )
            for group in findings.within(setting)
            if group.rate is not None
        )
        plots.append(BarPlot(in_words(setting), "gradients/s", bars))
    plots += _speed_ups(findings)
    return Section(
        "Speed",
        "Gradients per second while all workers were at work, with the lowest and the highest of "
        "the seeds.",
        plots=tuple(plots),
    )


def _speed_ups(findings: Findings) -> list[LinePlot]:
    plots = []
    settings = [s for s in findings.settings if dict(s)["workers"] > 1]
    for rest in dict.fromkeys(without(setting, "workers") for setting in settings):
        lines = []
        most = 1
        for color, name in enumerate(findings.variants):
            groups = [
                c for c in findings.groups if c.variant == name and dict(c.setting)["workers"] > 1
            ]
            found = [
                (c, findings.speed_up(c)) for c in groups if without(c.setting, "workers") == rest
            ]
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


def _staleness(findings: Findings) -> Section:
    plots = tuple(
        histogram(f"{group.variant}, {in_words(group.setting)}", group.staleness)
        for group in findings.groups
        if group.staleness
    )
    rows = tuple(
        (
            in_words(group.setting),
            group.variant,
            f"worker {rank}",
            *(short(v) for v in staleness_summary(counts).values()),
        )
        for group in findings.groups
        for rank, counts in sorted(group.staleness.items())
    )
    table = Table(("setting", "discipline", "", "mean", "p50", "p95", "p99", "max"), rows)
    text = (
        "A gradient's staleness: how many versions were applied to the shard between the "
        "parameters it was computed on and its own application. All seeds together; each worker "
        "has its color."
    )
    return Section("Staleness", text, plots=plots, folded=(table,))


def _time(findings: Findings) -> Section:
    plots = []
    for setting in findings.settings:
        rows = []
        for group in findings.within(setting):
            shares = group.shares
            rows += [
                (group.variant if len(shares) == 1 else f"{group.variant}, {rank}", parts)
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


def _fates(findings: Findings) -> Section:
    header = ("setting", "discipline", "gradients", "dropped", "rejected", "mixed replies")
    rows = tuple(
        (
            in_words(group.setting),
            group.variant,
            f"{sum(run.gradients for run in group.runs):,}",
            *(
                of_all(
                    sum(getattr(run, name) for run in group.runs),
                    sum(run.gradients for run in group.runs),
                )
                for name in ("dropped", "rejected")
            ),
            *(
                f"{sum(getattr(run, name) for run in group.runs):,}"
                for name in ("mixed", "lost", "restarts")
            ),
        )
        for group in findings.groups
    )
    text = (
        "Dropped: was too old for its discipline, or too late for a sync round. Rejected: was not "
        "finite. Mixed: a lock-free reply that holds parts of several versions. Lost: taken in by "
        "a server that died before the next checkpoint. Sums over the seeds."
    )
    table = Table((*header, "lost updates", "restarts"), rows)
    by_worker = _dropped_by_worker(findings)
    if by_worker.rows:
        text += (
            " Of a worker with a large share of dropped ones, as slow ones have it, little of its "
            "data is learned from."
        )
        return Section("What became of the gradients", text, (table, by_worker))
    return Section("What became of the gradients", text, (table,))


def _dropped_by_worker(findings: Findings) -> Table:
    """Of the groups that had any."""
    rows = []
    for group in findings.groups:
        of_ranks: dict[int, list[tuple[int, int]]] = {}
        for run in group.runs:
            for rank, of_run in run.dropped_by.items():
                of_ranks.setdefault(rank, []).append(of_run)
        if any(dropped for counts in of_ranks.values() for dropped, _ in counts):
            where = (in_words(group.setting), group.variant)
            for rank, counts in sorted(of_ranks.items()):
                dropped, total = map(sum, zip(*counts, strict=True))
                rows.append((*where, f"worker {rank}", f"{total:,}", of_all(dropped, total)))
    return Table(("setting", "discipline", "", "gradients", "dropped"), tuple(rows))


def _runs(findings: Findings) -> Section:
    metrics = _tabled(findings)
    header = ("run", "discipline", "workers", "servers", "seed", "how it ended")
    rows = tuple(
        (
            run.folder,
            run.variant,
            str(run.config["workers"]),
            str(run.num_servers),
            str(run.config["seed"]),
            f"{run.status}: {run.reason}" if run.reason else run.status,
            *(score(run.last_scores.get(name)) for name in metrics),
            f"{run.gradients:,}",
            short(run.train_time_s),
        )
        for run in findings.runs
    )
    scores = tuple(f"test {name}" for name in metrics)
    table = Table((*header, *scores, "gradients", "s of training"), rows)
    return Section("The runs", tables=(table,))


# -- numbers with their spread ---------------------------------------------------------------------


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
