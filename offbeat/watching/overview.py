"""The runs below a folder, each in a line, and a comparison's grid as it fills. Used by hub.py.

What a finished run came to stands in its summary.json; those that are under way are followed.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offbeat.comparison.grid import Grid, grid_file
from offbeat.errors import OffbeatError
from offbeat.watching.following import FollowedRun
from offbeat.watching.gathering import KILLED, STARTING
from offbeat.watching.series import rounded
from offbeat.watching.summary import figures

INSIDE_A_RUN = frozenset(("checkpoints", "events", "logs", "states", "tensorboard", "wandb"))
LOOK_EVERY_S = 2.0
MOST_OF_THE_TIME = 0.02
"""Of this thread's time may go into looking for runs."""
FIGURES = (
    *("status", "reason", "gradients", "gradients_per_s", "loss", "progress"),
    *("left_s", "score", "trained_s", "staleness"),
)
MAX_RUNS = 500
MAX_FOLLOWED = 8
"""Runs without a summary that are followed at a time."""


class Overview:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._paths: dict[str, Path] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        """What stands in summaries, and when each was written."""
        self._next_s = 0.0

    def find(self, name: str) -> Path | None:
        if name not in self._paths:
            self._paths = {run.relative_to(self._path).as_posix(): run for run in self._walk()}
        return self._paths.get(name)

    def look(self, follow: Callable[[list[str]], Mapping[str, FollowedRun]]) -> None:
        """What is new; `follow` is given the names of runs of which there is no summary."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._paths = {run.relative_to(self._path).as_posix(): run for run in self._walk()}
        unknown = [name for name, path in self._paths.items() if not self._read(name, path)]
        follow(unknown[-MAX_FOLLOWED:])
        took_s = time.monotonic() - now_s
        self._next_s = now_s + max(LOOK_EVERY_S, took_s / MOST_OF_THE_TIME)

    def _walk(self) -> list[Path]:
        """The runs' folders, as those of a report, by their names."""
        found = []
        seen: set[Path] = set()
        for name, folders, files in os.walk(self._path, followlinks=True):
            if (resolved := Path(name).resolve()) in seen:  # a link that leads back
                folders.clear()
                continue
            seen.add(resolved)
            if "config.json" in files and Path(name) != self._path:
                found.append(Path(name))
            folders[:] = sorted(f for f in folders if f not in INSIDE_A_RUN)
        return found[-MAX_RUNS:]

    def _read(self, name: str, path: Path) -> bool:
        """Whether a run has a summary that says how it ended."""
        try:
            written = (path / "summary.json").stat().st_mtime_ns
            began = (path / "config.json").stat().st_mtime_ns
        except OSError:
            return False
        row = self._rows.get(name)
        if row is None or row["written"] != written:
            try:
                summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
                self._rows[name] = {"written": written, **_row_of(summary)}
            except (OSError, ValueError, LookupError, TypeError):
                return False  # it is being written
        is_over = self._rows[name]["status"] not in ("unfinished", "running")
        return is_over and written >= began  # or it goes on

    def view(self, runs: Mapping[str, FollowedRun]) -> dict[str, Any]:
        rows = {name: self._row(name, runs.get(name)) for name in sorted(self._paths)}
        return {"path": str(self._path), "runs": rows, "grid": self._grid(rows)}

    def _row(self, name: str, run: FollowedRun | None) -> dict[str, Any]:
        known = self._rows.get(name)
        gathered = None if run is None else run.gathered
        if gathered is not None and not (known and gathered.is_over and gathered.status != KILLED):
            found = figures(gathered)
            return {key: found[key] for key in FIGURES}
        return {k: v for k, v in known.items() if k != "written"} if known else {"status": STARTING}

    def _grid(self, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
        """Of a comparison: for each of its settings the runs with every seed, by their names."""
        if not grid_file(self._path).exists():
            return None
        try:
            cells = Grid.load(self._path).cells()
        except (OffbeatError, ValueError):
            return None
        seeds = sorted({cell.seed for cell in cells})
        settings: dict[str, dict[str, str]] = {}
        for cell in cells:
            words = cell.words.rpartition(", ")[0]
            settings.setdefault(words, {})[str(cell.seed)] = cell.name
        done = sum(rows.get(cell.name, {}).get("status") == "finished" for cell in cells)
        return {"seeds": seeds, "settings": settings, "done": done, "cells": len(cells)}


def _row_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    metric, value = summary["metric"], summary.get("test_metric")
    scores = None if value is None else {"version": None, "values": [[metric, rounded(value)]]}
    rate, loss = summary.get("gradients_per_s"), summary.get("final_cost")
    return {
        "status": summary["status"],
        "reason": summary.get("reason"),
        "gradients": summary["gradients"],
        "gradients_per_s": None if rate is None else rounded(rate),
        "loss": None if loss is None else rounded(loss),
        "score": scores,
        "trained_s": rounded(summary.get("train_time_s") or summary["total_time_s"]),
        "staleness": (summary.get("staleness") or {}).get("mean"),
        "progress": None,
        "left_s": None,
    }
