"""The figures of a run, as a pure function of its config.json and event files.

>>> summarise(RunFolder(Path("runs/...")))["staleness"]["mean"]
"""

import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from offbeat.events import read_events
from offbeat.rundir import RunFolder

COST_WINDOW = 100
"""`final_cost` is the mean training loss over this many of each worker's last steps."""


@dataclass
class _Worker:
    gradients: int = 0
    examples: int = 0
    dropped: int = 0
    rejected: int = 0
    compute_s: float = 0.0
    prepare_s: float = 0.0
    exchange_s: float = 0.0
    losses: list[float] = field(default_factory=list)


@dataclass
class _Figures:
    """What one pass over the events collects."""

    workers: dict[int, _Worker] = field(default_factory=lambda: defaultdict(_Worker))
    updates: Counter[int] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    mixed: int = 0
    first_s: float = math.inf
    last_s: float = -math.inf
    end_s: float = 0.0
    status: str = "unfinished"
    scores: list[dict[str, Any]] = field(default_factory=list)
    restarts: int = 0
    one_update_per_round: bool = False
    loaded: dict[tuple[int, int], int] = field(default_factory=dict)
    """For each (shard, epoch) the version that it began with."""
    seen: Counter[tuple[int, int]] = field(default_factory=Counter)
    """The newest version of a shard that workers had seen when they found its next epoch."""
    unapplied: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "push":
                self._add_push(event)
            case "step":
                self._add_step(event)
            case "score":
                self.scores.append(event)
            case "rejoin":
                self._add_rejoin(event)
            case "run":
                self._add_phase(event)

    def _add_phase(self, event: dict[str, Any]) -> None:
        match event["phase"]:
            case "restart":
                self.restarts += 1
            case "load":
                self.loaded[event["shard"], event["epoch"]] = event["version"]
            case "end" if event["at_s"] >= self.end_s:  # a run that was resumed has several
                self.end_s = event["at_s"]
                self.status = event["status"]

    def _add_rejoin(self, event: dict[str, Any]) -> None:
        """A worker found a server again: what it had seen of it, and what of its own was lost."""
        key = event["shard"], event["epoch"]
        self.seen[key] = max(self.seen[key], event["seen_version"])
        self.unapplied[key] += event["lost"]

    def lost_updates(self) -> int:
        """What servers had taken in and lost when they died: told by the versions that workers had
        seen, and by the gradients that they had been told were in, whichever is more."""
        lost = 0
        for key, version in self.seen.items():
            by_versions = version - self.loaded.get(key, version)
            by_gradients = 0 if self.one_update_per_round else self.unapplied[key]
            lost += max(by_versions, by_gradients, 0)
        return lost

    def _add_push(self, event: dict[str, Any]) -> None:
        self.mixed += bool(event["mixed"])
        if event["outcome"] == "applied":
            shard = event["shard"]
            self.updates[shard] = max(self.updates[shard], event["version"])
            self.staleness[event["staleness"]] += 1

    def _add_step(self, event: dict[str, Any]) -> None:
        worker = self.workers[event["worker"]]
        worker.gradients += 1
        worker.examples += event["examples"]
        worker.dropped += event["outcome"] == "dropped"
        worker.rejected += event["outcome"] == "rejected"
        spent_s = 0.0
        for part in ("compute_s", "prepare_s", "exchange_s"):
            setattr(worker, part, getattr(worker, part) + event[part])
            spent_s += event[part]
        worker.losses.append(event["loss"])
        self.first_s = min(self.first_s, event["start_s"])
        self.last_s = max(self.last_s, event["start_s"] + spent_s)


def summarise(folder: RunFolder) -> dict[str, Any]:
    """What summary.json says of a run."""
    described = json.loads(folder.config.read_text(encoding="utf-8"))
    config = described["config"]
    figures = _Figures(one_update_per_round=config["discipline"] == "sync")
    for event in read_events(folder.events):
        figures.add(event)
    workers = [figures.workers[rank] for rank in sorted(figures.workers)]
    gradients = sum(w.gradients for w in workers)
    examples = sum(w.examples for w in workers)
    updates = max(figures.updates.values(), default=0)
    train_time_s = max(0.0, figures.last_s - figures.first_s) if workers else 0.0
    last = max(figures.scores, key=lambda s: s["version"], default=None)
    costs = [sum(tail) / len(tail) for w in workers if (tail := w.losses[-COST_WINDOW:])]
    is_accuracy = described["metric"] == "accuracy"
    return {
        "recipe": config["recipe"],
        "discipline": config["discipline"],
        "staleness_bound": config["staleness"],
        "engine": config["engine"],
        "num_servers": config["servers"],
        "num_workers": config["workers"],
        "seed": config["seed"],
        "status": figures.status,
        "gradients": gradients,
        "updates": updates,
        "total_time_s": max(figures.end_s, figures.last_s, 0.0),  # one that was killed has no end
        "train_time_s": round(train_time_s, 6),
        "gradients_per_s": _rate(gradients, train_time_s),
        "updates_per_s": _rate(updates, train_time_s),
        "examples_per_s": _rate(examples, train_time_s),
        "metric": described["metric"],
        "test_accuracy": last["metric"] if last and is_accuracy else None,
        "test_metric": last["metric"] if last else None,
        "final_cost": sum(costs) / len(costs) if costs else None,
        "staleness": staleness_summary(figures.staleness),
        "mixed_replies": figures.mixed,
        "dropped": sum(w.dropped for w in workers),
        "rejected": sum(w.rejected for w in workers),
        "lost_updates": figures.lost_updates(),
        "restarts": figures.restarts,
        "workers": [_worker_row(rank, figures.workers[rank]) for rank in sorted(figures.workers)],
    }


def staleness_summary(counts: Counter[int]) -> dict[str, float | int | None]:
    """Mean, percentiles and maximum of a histogram; None where nothing was applied."""
    total = counts.total()
    if not total:
        return dict.fromkeys(("mean", "p50", "p95", "p99", "max"))
    mean = sum(value * n for value, n in counts.items()) / total
    percentiles = {f"p{p}": _percentile(counts, p / 100) for p in (50, 95, 99)}
    return {"mean": round(mean, 6), **percentiles, "max": max(counts)}


def _percentile(counts: Counter[int], fraction: float) -> int:
    """The least value that at least this fraction of all values does not exceed."""
    below = 0
    for value in sorted(counts):
        below += counts[value]
        if below >= fraction * counts.total():
            return value
    raise AssertionError("the fraction is at most 1")


def _rate(count: int, time_s: float) -> float | None:
    return round(count / time_s, 3) if time_s else None


def _worker_row(rank: int, worker: _Worker) -> dict[str, Any]:
    row: dict[str, Any] = {"rank": rank}
    for name in ("gradients", "examples", "dropped", "rejected"):
        row[name] = getattr(worker, name)
    for name in ("compute_s", "prepare_s", "exchange_s"):
        row[name] = round(getattr(worker, name), 6)
    return row
