"""What `offbeat bench links` shows of its cells: a table for each network, the same as CSV and
JSON, and a plot.

Works on what lies in the cells' files alone, so that a target can be chosen afterwards.
"""

import csv
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.bench.cells import BESIDE, PLAIN, Cell, Network, rate_in_words
from offbeat.bench.curves import Curve, Panel, draw
from offbeat.bench.tables import short
from offbeat.errors import ConfigError
from offbeat.run.rundir import RunFolder

BEGIN, END = "<!-- bench links: begin -->", "<!-- bench links: end -->"
"""What lies between these lines of a page is what the command printed."""
HEADER = (*("", "batch/s", "s to target", "kept", "final", "kB up"), *("down", "waited"))


@dataclass(frozen=True)
class Found:
    """A cell, and what its file says."""

    cell: Cell
    figures: Mapping[str, Any]

    @property
    def has_diverged(self) -> bool:
        return bool(self.figures.get("diverged"))

    def number(self, name: str) -> float | None:
        value = self.figures.get(name)
        return None if value is None else float(value)

    def kb_per_batch(self, way: str) -> float | None:
        num_bytes, batches = self.number(f"{way}_bytes"), self.number("batches")
        return num_bytes / batches / 1000 if num_bytes is not None and batches else None


@dataclass(frozen=True, kw_only=True)
class Goal:
    """When a run is good enough, and how long it may take until then."""

    target: float
    limit_s: float

    def time_s(self, found: Found) -> float | None:
        """Seconds of training until a score was as good as that; None: none was, or the run came to
        nothing in the end."""
        if found.has_diverged:
            return None
        most = found.figures.get("higher_is_better") is not False
        for at_s, _, score in found.figures.get("curve", ()):
            if score >= self.target if most else score <= self.target:
                return float(at_s)
        return None


def write_all(
    folder: Path,
    found: Sequence[Found],
    others: Sequence[Found],
    goal: Goal,
    described: Mapping[str, Any],
) -> list[str]:
    """OUT/links.csv, .json and .svg; returns the lines for a person. `others` have loopback's plain
    runs, which `kept` is beside."""
    beside = beside_of([*others, *found], goal)
    rows = [row_of(each, goal, beside) for each in found]
    with (folder / "links.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    written = {**described, "target": goal.target, "cells": rows}
    RunFolder(folder).write_json(folder / "links.json", written)
    (folder / "links.svg").write_text(draw(panels(found, goal)), encoding="utf-8")
    options = described["options"]
    return [
        f"{options['model']}, 1 server, {options['workers']} workers, target {goal.target:g}, "
        f"{goal.limit_s:g} s at most",
        "the link: a process that passes bytes on late and no quicker (bench/link.py)",
        described["machine"],
        *tables(found, goal, beside),
    ]


def beside_of(found: Sequence[Found], goal: Goal) -> dict[int, float]:
    """By its seed, how long plain took to the target over loopback, where it reached it."""
    return {
        each.cell.seed: time_s
        for each in found
        if (each.cell.network, each.cell.setting) == (BESIDE, PLAIN)
        and (time_s := goal.time_s(each)) is not None
    }


def kept(found: Found, goal: Goal, beside: Mapping[int, float]) -> float | None:
    """How much of loopback's plain pace is left: its time to the target, over this one's. None:
    one of the two did not reach it."""
    mine, theirs = goal.time_s(found), beside.get(found.cell.seed)
    return theirs / mine if mine and theirs is not None else None


def row_of(found: Found, goal: Goal, beside: Mapping[int, float]) -> dict[str, Any]:
    """For a program: all that is known of a cell, but its curve."""
    cell, figures = found.cell, found.figures
    row: dict[str, Any] = {"cell": cell.name, "network": cell.network.name}
    row |= {"setting": cell.setting, "seed": cell.seed}
    row |= {"s_to_target": goal.time_s(found), "kept": kept(found, goal, beside)}
    names = ("batches_per_s", "final", "train_s", "batches", "gradients", "up_bytes", "down_bytes")
    return row | {name: figures.get(name) for name in (*names, "waited", "staleness", "diverged")}


def tables(found: Sequence[Found], goal: Goal, beside: Mapping[int, float]) -> list[str]:
    """One for each network, with a line for each setting."""
    networks = list(dict.fromkeys(each.cell.network for each in found))
    lines: list[str] = []
    cells = {network: _cells_of(network, found, goal, beside) for network in networks}
    every = [HEADER, *(line for rows in cells.values() for line in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*every, strict=True)]
    for network, rows in cells.items():
        lines += ["", network.words]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (HEADER, *rows)]
    num_seeds = len({each.cell.seed for each in found})
    return [
        *lines,
        "",
        f"median (min..max), n = {num_seeds}; kB a batch, each way; kept: loopback's plain",
        "time to the target, over the time here; waited: of the workers' time",
    ]


def _cells_of(
    network: Network, found: Sequence[Found], goal: Goal, beside: Mapping[int, float]
) -> list[tuple[str, ...]]:
    here = [each for each in found if each.cell.network == network]
    settings = dict.fromkeys(each.cell.setting for each in here)
    return [
        _line(name, [each for each in here if each.cell.setting == name], goal, beside)
        for name in settings
    ]


def _line(
    name: str, runs: Sequence[Found], goal: Goal, beside: Mapping[int, float]
) -> tuple[str, ...]:
    def median(value: Callable[[Found], float | None], form: Callable[[float], str]) -> str:
        known = [v for run in runs if (v := value(run)) is not None]
        return form(statistics.median(known)) if known else "-"

    return (
        name,
        median(lambda run: run.number("batches_per_s"), short),
        _to_target(runs, goal),
        median(lambda run: kept(run, goal, beside), "{:.2f}".format),
        median(lambda run: None if run.has_diverged else run.number("final"), "{:.3f}".format),
        median(lambda run: run.kb_per_batch("up"), short),
        median(lambda run: run.kb_per_batch("down"), short),
        median(lambda run: run.number("waited"), "{:.0%}".format),
    )


def _to_target(runs: Sequence[Found], goal: Goal) -> str:
    times = [time_s for run in runs if (time_s := goal.time_s(run)) is not None]
    diverged = sum(run.has_diverged for run in runs)
    if diverged == len(runs):
        return "diverged"
    if not times:
        return f"not in {max(run.number('train_s') or 0.0 for run in runs):.0f} s"
    if len(times) < len(runs):
        return f"{len(times)} of {len(runs)} did"
    middle = short(statistics.median(times))
    spread = f" ({short(min(times))}..{short(max(times))})"
    return middle + (spread if len(times) > 1 else "")


def panels(found: Sequence[Found], goal: Goal) -> list[Panel]:
    """For each delay, the time to the target over the rate; a curve for each setting."""
    delays = sorted({each.cell.network.delay_ms for each in found})
    rates = sorted({each.cell.network.mbit for each in found})
    settings = list(dict.fromkeys(each.cell.setting for each in found))
    made = []
    for delay in delays:
        curves = []
        for name in settings:
            places: list[list[float] | None] = []
            for mbit in rates:
                network = Network(mbit=mbit, delay_ms=delay)
                runs = [f for f in found if (f.cell.network, f.cell.setting) == (network, name)]
                times = [goal.time_s(run) for run in runs]
                places.append([t for t in times if t is not None] if runs else None)
            curves.append(Curve(name, places))
        words = [rate_in_words(mbit) for mbit in rates]
        made.append(Panel(f"s to {goal.target:g}, {delay:g} ms there and back", words, curves))
    return made


def put_into(page: Path, lines: Sequence[str]) -> None:
    """Have a page say what the command says, between its two marks."""
    before, after = around(page)
    block = "".join(f"    {line}".rstrip() + "\n" for line in lines)
    page.write_text(f"{before}\n{block}\n{after}", encoding="utf-8")


def around(page: Path) -> tuple[str, str]:
    """What stands above and below the figures, the marks included."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {page}: {error.strerror}") from error
    before, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{page} has no lines {BEGIN} and {END}, between which figures go")
    return before + begin, end + after
