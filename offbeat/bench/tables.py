"""What a benchmark found: rows, as a table for people and as figures for a program."""

import platform
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from offbeat.run.rundir import num_cores

Row = dict[str, str | list[float]]
"""Of a table; numbers are one for each round."""


def table(rows: Sequence[Row]) -> list[str]:
    """Medians over the rounds, with the least and the greatest."""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def figures(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The same for a program: every round's figure too."""
    return [
        {
            key: v if isinstance(v, str) else {"median": statistics.median(v), "rounds": v}
            for key, v in row.items()
        }
        for row in rows
    ]


def machine() -> str:
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{num_cores()} cores ({platform.machine()}), {versions}"


def _cell(value: str | list[float]) -> str:
    if isinstance(value, str):
        return value
    low, high = short(min(value)), short(max(value))
    return f"{short(statistics.median(value))} ({low}..{high})"


def short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
