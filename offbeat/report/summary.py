"""The figures of a run, as a pure function of its config.json and event files.

>>> summarise(Path("runs/..."))["staleness"]["mean"]
"""

import math
from collections import Counter
from pathlib import Path
from typing import Any

from offbeat.accounts import APPLIED, DROPPED, LOST, REJECTED
from offbeat.recipes.metrics import LOSS
from offbeat.report.record import PARTS, Kept, WorkerRecord, read_run

COST_WINDOW = 100
"""`final_cost` is the mean training loss over this many of each worker's last steps."""


def summarise(path: Path) -> dict[str, Any]:
    """What summary.json says of the run in the folder `path`."""
    record = read_run(path)
    config = record.config
    time_s = record.train_time_s
    best = record.best_score()
    scores = record.last_scores()
    last = scores.get(record.metric)
    is_nan = last is not None and math.isnan(last)
    metric = None if is_nan else last
    numbers = {name: None if math.isnan(value) else value for name, value in scores.items()}
    workers = [record.workers[rank] for rank in record.ranks]
    totals = record.totals()
    costs = [sum(tail) / len(tail) for w in workers if (tail := _last_losses(w))]
    return {
        "recipe": config["recipe"],
        "discipline": config["discipline"],
        "staleness_bound": config["staleness"],
        "engine": record.resolved.get("engine", config["engine"]),
        "num_servers": record.num_servers,
        "num_workers": config["workers"],
        "seed": config["seed"],
        "lr": record.resolved.get("lr"),
        "lr_scale": config.get("lr_scale", "none"),
        "status": record.status,
        "reason": record.reason,
        "gradients": totals.gradients,
        "updates": totals.updates,
        "total_time_s": max(record.end_s, record.last_s, 0.0),  # one that was killed has no end
        "train_time_s": round(time_s, 6),
        "gradients_per_s": rate(record.gradients, time_s),
        "updates_per_s": rate(totals.updates, time_s),
        "examples_per_s": rate(record.examples, time_s),
        "metric": record.metric,
        "test_accuracy": metric if record.metric == "accuracy" else None,
        "test_metric": metric,
        "metric_is_nan": is_nan,  # or infinite: JSON has neither
        "best": None if best is None else {"version": best[0], "metric": best[1]},
        "keeps_best": bool(config.get("keep_best")),  # in best.safetensors
        "test_loss": numbers.get(LOSS),
        "test_scores": numbers,
        "higher_is_better": record.directions,
        "final_cost": sum(costs) / len(costs) if costs else None,
        "staleness": staleness_summary(record.staleness),
        "mixed_replies": record.mixed,
        "dropped": totals.dropped,
        "rejected": totals.rejected,
        "clipped": record.clipped(),  # of those that were to be, where the norm says so
        "lost_updates": totals.lost_updates,
        "not_kept": totals.not_kept,
        "kept": [_kept_row(shard) for shard in record.kept()],
        "restarts": len(record.restarts),
        **_traffic_row(record.carried),
        "workers": [_worker_row(rank, record.workers[rank]) for rank in record.ranks],
    }


def _last_losses(worker: WorkerRecord) -> list[float]:
    return [loss for loss in worker.losses[-COST_WINDOW:] if not math.isnan(loss)]


def _kept_row(shard: Kept) -> dict[str, int]:
    """One shard of the last checkpoint: gradients == applied + dropped + rejected + lost."""
    outcomes = (APPLIED, DROPPED, REJECTED, LOST)
    counts = {outcome: shard.count(outcome) for outcome in outcomes}
    return {"version": shard.version, "gradients": shard.gradients, **counts}


def staleness_summary(counts: Counter[int]) -> dict[str, float | int | None]:
    """Mean, percentiles and maximum of a histogram; None where nothing was applied."""
    total = counts.total()
    if not total:
        return dict.fromkeys(("mean", "p50", "p95", "p99", "max"))
    mean = sum(value * n for value, n in counts.items()) / total
    percentiles = {f"p{p}": _percentile(counts, p / 100) for p in (50, 95, 99)}
    return {"mean": round(mean, 6), **percentiles, "max": max(counts)}


def rate(count: int, time_s: float) -> float | None:
    return round(count / time_s, 3) if time_s else None


def _percentile(counts: Counter[int], fraction: float) -> int:
    """The least value that at least this fraction of all values does not exceed."""
    below = 0
    for value in sorted(counts):
        below += counts[value]
        if below >= fraction * counts.total():
            return value
    raise AssertionError("the fraction is at most 1")


def _worker_row(rank: int, worker: WorkerRecord) -> dict[str, Any]:
    row: dict[str, Any] = {"rank": rank}
    for name in ("gradients", "examples", "dropped", "rejected"):
        row[name] = getattr(worker, name)
    mean = worker.mean_local_steps
    row["local_steps"] = None if mean is None else round(mean, 3)  # with H:auto, from push to push
    for name in PARTS:
        row[name] = round(getattr(worker, name).total_s, 6)
    return row | _traffic_row(worker)


def _traffic_row(worker: WorkerRecord) -> dict[str, Any]:
    """What its links carried; None: an older run does not say."""
    up, down = worker.times_smaller("up"), worker.times_smaller("down")
    return {
        "bytes_up": worker.carried["up"] or None,
        "bytes_down": worker.carried["down"] or None,
        "compress_ratio": None if up is None else round(up, 3),
        "compress_replies_ratio": None if down is None else round(down, 3),
        "codec_s": round(worker.coding_s, 6),
        "server_codec_s": round(worker.servers_coding_s, 6),
    }
