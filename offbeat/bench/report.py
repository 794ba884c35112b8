"""`offbeat bench report`: how long a report about many runs takes, and how much memory.

The runs are made up, event by event as real ones leave them. Beside it: reading the same events and
doing nothing with them; and how large their files are.
"""

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from offbeat.bench.tables import Row
from offbeat.config import make_config
from offbeat.errors import RunError
from offbeat.family import BUILT_IN
from offbeat.plugins import Choice
from offbeat.report.record import find_runs
from offbeat.run.event_files import EventFile
from offbeat.run.events import read_events

DISCIPLINES = tuple(Choice.default(kind).label for kind in BUILT_IN.values() if kind.served)
NUM_SCORES = 20
WRITTEN_AT_ONCE = 1000


def report(*, runs: int, gradients: int, servers: int, rounds: int) -> list[Row]:
    """Time `offbeat report` over so many runs of so many gradients each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for index in range(runs):
            discipline = DISCIPLINES[index % len(DISCIPLINES)]
            number = index // len(DISCIPLINES)
            write_run(
                folder / f"run-{index}",
                discipline=discipline,
                workers=(1, 2)[number % 2],
                servers=servers,
                seed=number // 2,
                gradients=gradients,
            )
        num_bytes = sum(path.stat().st_size for path in folder.glob("*/events/*"))
        found = [(_read(folder), *_report(folder)) for _ in range(rounds)]
    read_s, report_s, peak_mb = (list(column) for column in zip(*found, strict=True))
    row: Row = {"runs": str(runs), "servers": str(servers), "gradients each": f"{gradients:,}"}
    row["events, MB"] = f"{num_bytes / 1e6:,.1f}"
    row["bytes a gradient"] = f"{num_bytes / (runs * gradients):.1f}"
    row["report, s"] = report_s
    row["peak, MB"] = peak_mb
    row["reading alone, s"] = read_s
    row["ratio"] = [a / b for a, b in zip(report_s, read_s, strict=True)]
    return [row]


def _read(folder: Path) -> float:
    began_s = time.perf_counter()
    for run in find_runs(folder):
        for _ in read_events(run / "events"):
            pass
    return time.perf_counter() - began_s


def _report(folder: Path) -> tuple[float, float]:
    """Seconds, and MB of memory at most."""
    began_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "offbeat", "report", str(folder)], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RunError(f"offbeat report ended with {process.returncode}")
    return time.perf_counter() - began_s, usage.ru_maxrss / 1000


def write_run(
    folder: Path,
    *,
    gradients: int,
    score: float = 0.9,
    step_s: float = 0.01,
    slow: dict[int, float] | None = None,
    status: str = "finished",
    **options: Any,
) -> None:
    """A made-up run: its accuracy rises to `score`, more or less, and a step takes `step_s`, for
    the workers in `slow` so many times as long."""
    config = make_config({"recipe": "made-up", **options})
    described = {"config": config.to_json(), "metric": "accuracy", "environment": {}}
    events = folder / "events"
    events.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    chance = random.Random(repr(sorted(options.items(), key=str)))
    delays = random.Random(0)
    kind = make_config({"discipline": config.discipline}).chosen.kind
    per_round = config.workers if kind.in_rounds else 1
    end_s = 0.0
    with contextlib.ExitStack() as stack:
        names = [f"ps-{shard}" for shard in range(config.servers)]
        names += [f"worker-{rank}" for rank in range(config.workers)]
        files = {name: stack.enter_context(_Lines(events, name)) for name in names}
        steps = _steps(config.workers, gradients, step_s, slow or {}, chance)
        for number, step in enumerate(steps):
            files[f"worker-{step['worker']}"].write(step)
            end_s = max(end_s, step["start_s"] + 1)
            version = number // per_round + 1
            spread = (number * 7) % (2 * config.workers - 1)
            staleness = 0 if kind.in_rounds else min(version - 1, spread)
            for shard in range(config.servers):
                delay_s = delays.uniform(0.0001, 0.0003)
                files[f"ps-{shard}"].write(_push(shard, step, version, staleness, delay_s))
    end = {"kind": "run", "phase": "end", "at_s": end_s, "status": status}
    with _Lines(events, "engine") as file:
        file.write(end)
    last = (gradients - 1) // per_round + 1
    with _Lines(events, "evaluator") as file:
        for k in range(1, NUM_SCORES + 1):
            metric = score * (1 - math.exp(-6 * k / NUM_SCORES)) + chance.gauss(0, 0.002)
            scored = {"version": max(1, last * k // NUM_SCORES), "metric": metric, "count": 1}
            file.write({"kind": "score", **scored, "at_s": end_s})


class _Lines:
    """A role's events, written down as a role does: many at once."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = EventFile.create(folder, name)
        self._lines: list[str] = []

    def __enter__(self) -> Self:
        return self

    def write(self, event: dict[str, Any]) -> None:
        self._lines.append(json.dumps(event))
        if len(self._lines) == WRITTEN_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        self._file.write("\n".join((*self._lines, "")))
        self._lines = []

    def __exit__(self, *error: object) -> None:
        self._flush()
        self._file.close()


def _steps(
    workers: int, gradients: int, step_s: float, slow: dict[int, float], chance: random.Random
) -> Iterator[dict[str, Any]]:
    """Steps of all workers in the order in which they end."""
    ready_s = [1.0] * workers
    counts = [0] * workers
    for number in range(gradients):
        rank = min(range(workers), key=lambda r: ready_s[r])
        counts[rank] += 1
        compute_s = 0.8 * step_s * slow.get(rank, 1.0) * chance.uniform(0.9, 1.1)
        yield {
            "kind": "step",
            "worker": rank,
            "step": counts[rank],
            "epoch": 0,
            "loss": 2.3 * math.exp(-3 * number / gradients),
            "examples": 100,
            "outcome": "applied",
            "start_s": round(ready_s[rank], 6),
            "compute_s": round(compute_s, 6),
            "prepare_s": round(0.1 * step_s, 6),
            "exchange_s": round(0.1 * step_s, 6),
        }
        ready_s[rank] += compute_s + 0.2 * step_s


def _push(
    shard: int, step: dict[str, Any], version: int, staleness: int, delay_s: float
) -> dict[str, Any]:
    at_s = step["start_s"] + step["compute_s"]
    return {
        "kind": "push",
        "shard": shard,
        "worker": step["worker"],
        "incarnation": 0,
        "sequence": step["step"],
        "batch": step["step"] - 1,
        "base_version": version - 1 - staleness,
        "outcome": "applied",
        "version": version,
        "staleness": staleness,
        "mixed": False,
        "received_s": round(at_s, 6),
        "applied_s": round(at_s + delay_s, 6),
        "replied_s": round(at_s + 1.5 * delay_s, 6),
    }
