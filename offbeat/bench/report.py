"""`offbeat bench report`: how long a report about many runs takes, and how much memory.

The runs are made up, event by event as real ones leave them. Beside it: parsing the same files as
JSON and doing nothing with them.
"""

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
from typing import Any

from offbeat.bench.tables import Row
from offbeat.config import make_config
from offbeat.errors import RunError
from offbeat.family import BUILT_IN
from offbeat.plugins import Choice

DISCIPLINES = tuple(Choice.default(kind).label for kind in BUILT_IN.values() if kind.served)
NUM_SCORES = 20


def report(*, runs: int, gradients: int, rounds: int) -> list[Row]:
    """Time `offbeat report` over so many runs of so many gradients each, on two servers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for index in range(runs):
            discipline = DISCIPLINES[index % len(DISCIPLINES)]
            number = index // len(DISCIPLINES)
            write_run(
                folder / f"run-{index}",
                discipline=discipline,
                workers=(1, 2)[number % 2],
                servers=2,
                seed=number // 2,
                gradients=gradients,
            )
        found = [(_parse(folder), *_report(folder)) for _ in range(rounds)]
    parse_s, report_s, peak_mb = (list(column) for column in zip(*found, strict=True))
    row: Row = {"runs": str(runs), "gradients each": f"{gradients:,}"}
    row["report, s"] = report_s
    row["peak, MB"] = peak_mb
    row["JSON alone, s"] = parse_s
    row["ratio"] = [a / b for a, b in zip(report_s, parse_s, strict=True)]
    return [row]


def _parse(folder: Path) -> float:
    began_s = time.perf_counter()
    for path in folder.rglob("*.jsonl"):
        with path.open(encoding="utf-8") as file:
            for line in file:
                json.loads(line)
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
    steps = list(_steps(config.workers, gradients, step_s, slow or {}, chance))
    servers = [
        _pushes(shard, steps, config.discipline, config.workers) for shard in range(config.servers)
    ]
    for shard, pushes in enumerate(servers):
        _write(events / f"ps-{shard}.jsonl", pushes)
    for rank in range(config.workers):
        _write(events / f"worker-{rank}.jsonl", [s for s in steps if s["worker"] == rank])
    end_s = max(s["start_s"] for s in steps) + 1
    _write(
        events / "engine.jsonl", [{"kind": "run", "phase": "end", "at_s": end_s, "status": status}]
    )
    last = servers[0][-1]["version"]
    scores = []
    for k in range(1, NUM_SCORES + 1):
        metric = score * (1 - math.exp(-6 * k / NUM_SCORES)) + chance.gauss(0, 0.002)
        version = max(1, last * k // NUM_SCORES)
        scores.append(
            {"kind": "score", "version": version, "metric": metric, "count": 1, "at_s": end_s}
        )
    _write(events / "evaluator.jsonl", scores)


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


def _pushes(
    shard: int, steps: list[dict[str, Any]], discipline: str, workers: int
) -> list[dict[str, Any]]:
    kind = make_config({"discipline": discipline}).chosen.kind
    per_round = workers if kind.in_rounds else 1
    pushes = []
    for number, step in enumerate(steps):
        version = number // per_round + 1
        at_s = step["start_s"] + step["compute_s"]
        staleness = 0 if kind.in_rounds else min(version - 1, (number * 7) % (2 * workers - 1))
        pushes.append(
            {
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
                "applied_s": round(at_s + 0.0002, 6),
                "replied_s": round(at_s + 0.0003, 6),
            }
        )
    return pushes


def _write(path: Path, events: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
