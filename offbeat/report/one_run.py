"""The report of one run: how it learned, how stale its gradients were, what its workers did."""

import math
from collections import Counter
from collections.abc import Iterable

from offbeat.config import FAULT_OPTIONS
from offbeat.report.columns import Mean
from offbeat.report.document import (
    METRIC_LIMITS,
    Document,
    Histogram,
    Line,
    LinePlot,
    Plot,
    Section,
    Shares,
    Step,
    Table,
    Timeline,
    percent,
    score,
    short,
)
from offbeat.report.record import Record, ShardRecord, WorkerRecord
from offbeat.report.setup import describe_setups, setup_of
from offbeat.report.summary import rate, staleness_summary

NUM_BINS = 48
"""A curve over many steps is drawn as so many means."""
WINDOW_STEPS = 12
"""So many steps of a worker are shown one by one."""
MAX_HISTOGRAM_BINS = 24


def describe_run(record: Record, reached: tuple[str, str] | None = None) -> Document:
    """`reached`: when it was as good as somebody asked for, and what that is called."""
    return Document(
        title=f"{record.config['recipe']}: {in_words(record)}",
        lead=_lead(record),
        sections=tuple(
            section
            for section in (
                _figures(record, reached),
                _learning(record),
                _staleness(record),
                _time(record),
                _traffic(record),
                describe_setups("How it was run", [setup_of(record)]),
            )
            if section is not None and (section.tables or section.plots)
        ),
    )


def in_words(record: Record) -> str:
    servers = counted(record.num_servers or "no", "server")
    return f"{record.variant}, {counted(record.config['workers'], 'worker')}, {servers}"


def of_all(count: int, total: int) -> str:
    return f"{count:,} ({percent(count / total)})" if count and total else f"{count:,}"


def counted(number: object, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _lead(record: Record) -> str:
    time_s = record.train_time_s
    learned = "".join(
        f"test {name} {score(value)}, " for name, value in record.last_scores().items()
    )
    text = (
        f"{record.status.capitalize()}: {learned}{record.gradients:,} gradients in "
        f"{short(time_s)} s of training ({short(rate(record.gradients, time_s))} a second), seed "
        f"{record.config['seed']}."
    )
    if record.reason:
        text += f" {record.reason[0].upper()}{record.reason[1:]}."
    if record.unreadable:
        text += f" {counted(record.unreadable, 'line')} of the event files could not be read."
    return text


def _figures(record: Record, reached: tuple[str, str] | None) -> Section:
    stale = staleness_summary(record.staleness)
    totals = record.totals()
    rows = [
        ("gradients", f"{totals.gradients:,}"),
        ("updates of the furthest shard", f"{totals.updates:,}"),
        ("examples/s", short(rate(record.examples, record.train_time_s))),
        ("staleness: mean, p95, max", ", ".join(short(stale[k]) for k in ("mean", "p95", "max"))),
        ("dropped", of_all(totals.dropped, totals.gradients)),
        ("rejected", str(totals.rejected)),
        ("replies that mixed versions", f"{record.mixed:,}"),
        ("updates lost with a server", str(totals.lost_updates)),
        ("gradients that are in no checkpoint", str(totals.not_kept)),
        ("restarts", ", ".join(f"{who} at {short(s)} s" for s, who in record.restarts) or "0"),
    ]
    if record.orders:
        asked = ", ".join(f"{words} at {short(s)} s" for s, words in record.orders)
        rows.append(("asked for meanwhile", asked))
    rows += [] if reached is None else [reached]
    if (clipped := record.clipped()) is not None:
        rows.append(
            (
                f"gradients with a norm above {float(record.config['clip_norm']):g}, clipped",
                percent(clipped),
            )
        )
    options = (*FAULT_OPTIONS, "lr", "batch_size", "epochs", "steps", "split")
    rows += [
        (f"--{name.replace('_', '-')}", str(record.config[name]))
        for name in options
        if record.config.get(name) is not None and name not in record.resolved
    ]
    parameters = record.config.get("set") or {}
    rows += [(f"--set {name}", str(value)) for name, value in parameters.items()]
    return Section("Figures", tables=(Table(("", "value"), tuple(rows)),))


def _learning(record: Record) -> Section:
    first_s = record.first_s
    marks = tuple((s - first_s, f"{who} started again") for s, who in record.restarts)
    plots: list[Plot] = [
        plot for metric in record.metrics for plot in _curves(record, metric, marks)
    ]
    lines = []
    for rank in record.ranks:
        worker = record.workers[rank]
        times = (start_s - first_s for start_s in worker.start_s)
        points = binned(times, worker.losses, record.train_time_s)
        lines.append(Line(f"worker {rank}", rank, tuple((t, mean) for t, mean, _ in points)))
    if any(line.points for line in lines):
        of_loss = tuple(lines)
        plots.append(LinePlot("training loss over time", "s of training", "loss", of_loss, marks))
    plots += _rates(record, marks)
    text = f"Loss and learning rate are averaged over {NUM_BINS} stretches of the run."
    return Section("How it learned", text, plots=tuple(plots))


def _rates(record: Record, marks: tuple[tuple[float, str], ...]) -> list[Plot]:
    """All servers have the same."""
    shard = next(iter(record.shards.values()), ShardRecord())
    first_s = record.first_s
    times = (at_s - first_s for at_s in shard.at_s)
    points = [(t, mean) for t, mean, _ in binned(times, shard.rates, record.train_time_s)]
    line = Line("learning rate", 0, tuple(points))
    title = "learning rate over time"
    return [LinePlot(title, "s of training", "learning rate", (line,), marks)] if points else []


def _curves(record: Record, metric: str, marks: tuple[tuple[float, str], ...]) -> list[Plot]:
    curve = record.curve(metric)
    if not curve:
        return []
    by_time = Line(metric, 0, tuple((t, value) for t, _, value in curve))
    by_count = Line(metric, 0, tuple((float(n), value) for _, n, value in curve))
    name = f"test {metric}"
    limits = METRIC_LIMITS.get(metric)
    return [
        LinePlot(f"{name} over time", "s of training", name, (by_time,), marks, limits),
        LinePlot(f"{name} over gradients", "gradients", name, (by_count,), limits=limits),
    ]


def binned(
    xs: Iterable[float], ys: Iterable[float], length: float
) -> list[tuple[float, float, float]]:
    """Mean and maximum of `ys` in each stretch of 0 to `length` that has any, with its middle."""
    width = length / NUM_BINS or 1.0
    within = [Mean() for _ in range(NUM_BINS)]
    for x, y in zip(xs, ys, strict=True):
        if not math.isnan(y):  # or it is not known
            within[min(NUM_BINS - 1, max(0, int(x / width)))].add(y)
    found = ((index, values) for index, values in enumerate(within) if values.count)
    return [((index + 0.5) * width, values.mean, values.most) for index, values in found]


def _staleness(record: Record) -> Section | None:
    if not record.staleness:
        return None
    first_s = record.first_s
    times = (s - first_s for shard in record.shards.values() for s in shard.at_s)
    values = (float(v) for shard in record.shards.values() for v in shard.staleness)
    points = binned(times, values, record.train_time_s)
    over_time = LinePlot(
        "staleness over time",
        "s of training",
        "versions",
        (
            Line("mean", 0, tuple((t, mean) for t, mean, _ in points)),
            Line("most", 1, tuple((t, most) for t, _, most in points)),
        ),
    )
    by_worker = {rank: record.workers[rank].staleness for rank in record.ranks}
    text = (
        "A gradient's staleness: how many versions were applied to the shard between the "
        "parameters it was computed on and its own application."
    )
    rows = tuple(
        (f"worker {rank}", *(short(v) for v in staleness_summary(counts).values()))
        for rank, counts in by_worker.items()
    )
    table = Table(("", "mean", "p50", "p95", "p99", "max"), rows)
    plots = (over_time, histogram("how often", by_worker))
    return Section("Staleness", text, (table,), plots)


def histogram(title: str, by_worker: dict[int, Counter[int]]) -> Histogram:
    """Shares of all gradients, one layer for each worker. A few that are far out, as a worker's
    first step can be, share the last bin."""
    pooled = sum(by_worker.values(), Counter[int]())
    total = pooled.total() or 1
    most = max(pooled, default=0)
    shown = min(most, 2 * int(staleness_summary(pooled)["p99"] or 0) + 4)
    width = math.ceil((shown + 1) / MAX_HISTOGRAM_BINS)
    starts = range(0, shown + 1, width)
    names = [str(s) if width == 1 else f"{s}-{s + width - 1}" for s in starts]
    if most >= starts[-1] + width:
        names[-1] = f"{starts[-1]}+"

    def share(counts: Counter[int], start: int) -> float:
        end = math.inf if start == starts[-1] else start + width
        return sum(n for value, n in counts.items() if start <= value < end) / total

    return Histogram(
        title,
        "staleness",
        tuple(names),
        tuple(f"worker {rank}" for rank in by_worker),
        tuple(tuple(share(counts, s) for counts in by_worker.values()) for s in starts),
    )


# -- where the time went ---------------------------------------------------------------------------


def parts_of(worker: WorkerRecord, index: int) -> tuple[float, ...]:
    """How long step number `index` took for each of the document's PARTS."""
    waited_s = worker.waited_s(index)
    return (
        worker.compute_s[index],
        worker.prepare_s[index],
        waited_s,
        worker.exchange_s[index] - waited_s,
    )


def shares_of(worker: WorkerRecord) -> tuple[float, ...]:
    waited = Mean()
    for index in range(worker.gradients):
        waited.add(worker.waited_s(index))
    own_s = (worker.compute_s.total_s, worker.prepare_s.total_s)
    sums = (*own_s, waited.total, worker.exchange_s.total_s - waited.total)
    total = math.fsum(sums) or 1.0
    return tuple(part / total for part in sums)


def _time(record: Record) -> Section | None:
    if not record.ranks:
        return None
    names = tuple(f"worker {rank}" for rank in record.ranks)
    workers = [record.workers[rank] for rank in record.ranks]
    shares = tuple((name, shares_of(w)) for name, w in zip(names, workers, strict=True))
    paced = any(w.local_steps for w in workers)
    rows = tuple(
        (
            name,
            f"{w.gradients:,}",
            *([short(w.mean_local_steps)] if paced else []),
            of_all(w.dropped, w.gradients),
            short(rate(w.gradients, w.end_s(-1) - w.start_s[0])),
            *map(percent, parts),
        )
        for (name, parts), w in zip(shares, workers, strict=True)
    )
    counted_in = ("gradients", *(["local steps in each"] if paced else []), "dropped", "a second")
    header = ("", *counted_in, "computing", "preparing", "waiting", "exchanging")
    text = (
        "Dropped: a server at least did not want it, since it was too old, or too late for a "
        "round; where that is a large share of a worker's, little of its data is learned from. "
        "Waiting: the gradient lay at a server that did not reply yet, because it updated or "
        "waited for others; it is at most so much. Exchanging: the rest of the time between a push "
        "and its reply that was not spent preparing the next batch."
    )
    plots = (
        Shares("all of the run", shares),
        Timeline("over the run", names, tuple(_stretches(record, workers)), "stretch"),
        Timeline("some steps in the middle of it", names, tuple(_window(record, workers))),
    )
    return Section("What the workers did", text, (Table(header, rows),), plots)


def _traffic(record: Record) -> Section | None:
    workers = [record.workers[rank] for rank in record.ranks]
    if not any(worker.carried for worker in workers):
        return None
    rows = tuple(
        (
            f"worker {rank}",
            *(
                cell
                for way in ("up", "down")
                for cell in (
                    in_bytes(worker.carried[way]),
                    in_bytes(worker.bytes_per_gradient(way)),
                    short(worker.times_smaller(way)),
                )
            ),
            short(worker.coding_s),
            short(worker.servers_coding_s),
        )
        for rank, worker in zip(record.ranks, workers, strict=True)
    )
    ways = (f"{what}{way}" for way in ("up", "down") for what in ("", "a gradient, ", "smaller, "))
    header = ("", *ways, "coding, s", "at servers, s")
    text = (
        "Headers, gradients and parameters as they would travel, or did; of memory that a worker "
        "shares with a server, what lies in it. Smaller: how many times, beside float32. Coding: "
        "seconds of a processor."
    )
    return Section("What went to servers and back", text, (Table(header, rows),))


def in_bytes(count: float | None) -> str:
    if not count:
        return "-"
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{short(count / size)} {unit}"
    return f"{short(count)} bytes"


def _stretches(record: Record, workers: list[WorkerRecord]) -> list[Step]:
    """The run in stretches of several steps, each with its parts one after the other."""
    num_bins = max(1, min(NUM_BINS, min(worker.gradients for worker in workers) // 4))
    width, first_s = record.train_time_s / num_bins or 1.0, record.first_s
    steps = []
    for row, worker in enumerate(workers):
        sums: dict[int, list[float]] = {}
        for index in range(worker.gradients):
            at = min(num_bins - 1, int((worker.start_s[index] - first_s) / width))
            mine = sums.setdefault(at, [0.0] * 4)
            for part, part_s in enumerate(parts_of(worker, index)):
                mine[part] += part_s
        for at, parts in sorted(sums.items()):
            scale = min(1.0, width / (math.fsum(parts) or 1.0))
            steps.append(Step(row, at + 1, at * width, tuple(part * scale for part in parts)))
    return steps


def _window(record: Record, workers: list[WorkerRecord]) -> list[Step]:
    """As much of the middle of the run as the quickest worker takes for WINDOW_STEPS steps."""
    spans = [
        (w.end_s(-1) - w.start_s[0]) / w.gradients * WINDOW_STEPS for w in workers if w.gradients
    ]
    start_s = record.first_s + record.train_time_s / 2
    end_s = start_s + min(spans)
    return [
        Step(row, worker.steps[i], worker.start_s[i] - record.first_s, parts_of(worker, i))
        for row, worker in enumerate(workers)
        for i in range(worker.gradients)
        if worker.end_s(i) >= start_s and worker.start_s[i] < end_s
    ]
