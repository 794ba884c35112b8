"""What a simulation found, for people: lines of a table, and a document with plots.

Called by the command line, and by write_simulation, which puts OUT/simulation.html, .md and .json
there. A pure function of what was found, so that the same simulation is the same bytes.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from offbeat.errors import RunDirError
from offbeat.report.document import (
    Document,
    Line,
    LinePlot,
    Section,
    Table,
    percent,
    short,
)
from offbeat.report.markdown import write_markdown
from offbeat.report.page import write_page
from offbeat.simulation.prediction import Cell, Prediction, Simulated

HEADER = (
    *("discipline", "workers", "servers", "link", "gradients/s", "staleness", "p95", "waiting"),
    *("dropped", "servers busy"),
)
NO_LINK = "as recorded"
COUNTED = (
    "Gradients/s counts all that were answered, also those that were dropped. Staleness is that of "
    "gradients that were applied, at all servers; waiting the share of their time in which workers "
    "had nothing else to do."
)
Place = tuple[int, float, float]
"""Servers, rate and delay: what a panel of the plots is of."""


def link_in_words(mbit: float, delay_ms: float) -> str:
    parts = [] if math.isinf(mbit) else [f"{mbit:g} Mbit/s"]
    parts += [f"{delay_ms:g} ms"] if delay_ms else []
    return ", ".join(parts) or NO_LINK


def row_of(found: Prediction) -> tuple[str, ...]:
    cell, staleness = found.cell, found.staleness
    return (
        cell.discipline.label,
        str(cell.workers),
        str(cell.servers),
        link_in_words(cell.mbit, cell.delay_ms),
        short(found.gradients_per_s),
        short(staleness["mean"]),
        short(staleness["p95"]),
        percent(found.waiting),
        percent(found.dropped),
        percent(found.served),
    )


def line_of(cells: Sequence[str]) -> str:
    """One of the table in a terminal, which is told line by line."""
    widths = (14, 7, 7, 18, 11, 9, 6, 7, 7, 12)
    return "  ".join(map(str.ljust, cells, widths)).rstrip()


def lead(found: Simulated, run: str) -> str:
    """What the figures are calibrated from, and how well that does."""
    recorded, config = found.recorded, found.recorded.config
    measured = recorded.figures.gradients_per_s
    return (
        f"From {run}: {config.chosen.label}, {_counted(config.workers, 'worker')}, "
        f"{_counted(config.servers, 'server')}, {short(measured)} gradients/s measured, "
        f"{short(found.again.gradients_per_s)} simulated. {_cores_in_words(found.cores)}"
        f"{_straggler_in_words(found)}"
    )


def _cores_in_words(cores: float) -> str:
    if math.isinf(cores):
        return "Here each worker and server has cores of its own."
    return (
        f"Here all workers and servers share {_counted(int(cores), 'core')}, as in the run or by "
        f"--cores; --cores inf gives each its own."
    )


def _straggler_in_words(found: Simulated) -> str:
    return f" With --slow-worker {found.slow_worker}." if found.slow_worker else ""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


# -- files -----------------------------------------------------------------------------------------


def write_simulation(found: Simulated, run: str, out: Path) -> list[Path]:
    """simulation.html, .md and .json; returns their paths."""
    document = describe(found, run)
    texts = {
        "simulation.html": write_page(document),
        "simulation.md": write_markdown(document),
        "simulation.json": _json(found, run),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunDirError(f"cannot write the simulation into {out}: {error.strerror}") from error
    return [out / name for name in texts]


def _json(found: Simulated, run: str) -> str:
    told = {
        "run": run,
        "seed": found.seed,
        "cores": None if math.isinf(found.cores) else found.cores,
        "slow_worker": found.slow_worker,
        "measured_gradients_per_s": found.recorded.figures.gradients_per_s,
        "again": found.again.to_json(),
        "cells": [prediction.to_json() for prediction in found.predictions],
        "left_out": dict(found.left_out),
    }
    return json.dumps(told, indent=1, allow_nan=False) + "\n"


def describe(found: Simulated, run: str) -> Document:
    rows = tuple(row_of(prediction) for prediction in found.predictions)
    sections = []
    plots: list[tuple[str, str, Callable[[Prediction], float]]] = [
        ("Gradients per second", "gradients/s", lambda p: p.gradients_per_s),
        ("Staleness", "mean staleness, plus 1", lambda p: 1 + (p.staleness["mean"] or 0)),
        ("Waiting", "share of workers' time", lambda p: p.waiting),
    ]
    if len({p.cell.workers for p in found.predictions}) > 1:
        sections += [_plotted(found, *plot) for plot in plots]
    sections.append(Section("All cells", COUNTED, tables=(Table(HEADER, rows),)))
    if found.left_out:
        left_out = Table(("cell", "why"), tuple(found.left_out.items()))
        sections.append(Section("Left out", tables=(left_out,)))
    return Document("What if", lead(found, run), tuple(sections))


def _plotted(
    found: Simulated, title: str, y: str, figure: Callable[[Prediction], float]
) -> Section:
    """A panel for each number of servers and each link, over the number of workers."""
    names = list(dict.fromkeys(p.cell.discipline.label for p in found.predictions))
    places = dict.fromkeys(_place(p.cell) for p in found.predictions)
    is_share = title == "Waiting"
    panels = []
    for place in places:
        here = [p for p in found.predictions if _place(p.cell) == place]
        lines = []
        for color, name in enumerate(names):
            mine = [p for p in here if p.cell.discipline.label == name]
            points = tuple(sorted((float(p.cell.workers), figure(p)) for p in mine))
            lines += [Line(name, color, points)] if points else []
        panels.append(
            LinePlot(
                title=_place_in_words(place),
                x="workers",
                y=y,
                lines=tuple(lines),
                limits=(0.0, 1.0) if is_share else None,
                log_x=True,
                log_y=not is_share,
            )
        )
    return Section(title, plots=tuple(panels))


def _place(cell: Cell) -> Place:
    return cell.servers, cell.mbit, cell.delay_ms


def _place_in_words(place: Place) -> str:
    servers, mbit, delay_ms = place
    link = link_in_words(mbit, delay_ms)
    return _counted(servers, "server") + ("" if link == NO_LINK else f", {link}")
