"""A run's summary: what was gathered of it (gathering.py), as the JSON that pages and terminals are
given. Pure; called once for every tick that somebody looks on.

    view(gathered, since=0)     # everything; of a later tick only what is new
"""

from collections.abc import Callable, Sequence
from typing import Any

from offbeat.watching.gathering import RATE_S, Gathered
from offbeat.watching.series import means, rounded
from offbeat.watching.workers import WorkerState

LATE_S = 2.0
"""Of whom nothing was heard for longer, nobody waits to be shown."""


def view(gathered: Gathered, since: int) -> dict[str, Any]:
    """What somebody does not have who was shown the tick `since`; 0: nothing yet."""
    found: dict[str, Any] = {
        "tick": gathered.ticks,
        "since": since,
        "status": figures(gathered),
        "fine": _view_fine(gathered, gathered.fine.changed_since(since)),
        "coarse": _view_coarse(gathered, gathered.coarse.changed_since(since)),
        "workers": _view_workers(gathered),
        "servers": [[k, s.version, s.restarts] for k, s in sorted(gathered.shards.items())],
        "waits": _view_waits(gathered),
        "recent": _view_recent(gathered),
    }
    for name, changed in gathered.changed.items():
        if changed > since or not since:
            found[name] = SELDOM[name](gathered)
    return found


def figures(gathered: Gathered) -> dict[str, Any]:
    gradients_per_s, examples_per_s, of_each = gathered.rates()
    losses = [w.loss for w in gathered.workers.values() if w.loss is not None]
    stale = [m for w in gathered.workers.values() if (m := w.mean_staleness()) is not None]
    return {
        "status": gathered.status,
        "reason": gathered.reason,
        "trained_s": rounded(gathered.trained_s),
        "progress": _maybe(gathered.progress()),
        "left_s": _maybe(gathered.left_s(of_each)),
        "gradients": gathered.gradients,
        "examples": gathered.examples,
        "version": gathered.version,
        "gradients_per_s": rounded(gradients_per_s),
        "examples_per_s": rounded(examples_per_s),
        "loss": _maybe(sum(losses) / len(losses) if losses else None),
        "staleness": _maybe(sum(stale) / len(stale) if stale else None),
        "lr": _maybe(gathered.lr),
        "score": gathered.scores.latest(),
        "dropped": sum(w.outcomes["dropped"] for w in gathered.workers.values()),
        "rejected": sum(w.outcomes["rejected"] for w in gathered.workers.values()),
        "lost": gathered.lost,
        "mixed": gathered.mixed,
        "restarts": sum(w.restarts for w in gathered.workers.values())
        + sum(s.restarts for s in gathered.shards.values()),
        "up": sum(w.carried["up"] for w in gathered.workers.values()),
        "down": sum(w.carried["down"] for w in gathered.workers.values()),
        "unreadable": gathered.unreadable,
    }


def _view_fine(gathered: Gathered, start: int) -> dict[str, Any]:
    end, c = gathered.fine.length, gathered.columns
    plain = {
        name: [rounded(v) for v in c[name].values[start:end]]
        for name in ("gradients", "examples", "dropped", "rejected")
    }
    averaged = {
        "loss": means(c["losses"], c["num_losses"], start, end),
        "staleness": means(c["stale"], c["num_stale"], start, end),
        "lr": means(c["rates"], c["num_rates"], start, end),
    }
    most = [rounded(v) for v in gathered.most_stale.values[start:end]]
    versions = {
        str(k): [int(v) or None for v in shard.versions.values[start:end]]
        for k, shard in sorted(gathered.shards.items())
    }
    return {
        "width_s": gathered.fine.width_s,
        "from": min(start, end),
        **plain,
        **averaged,
        "most": most,
        "versions": versions,
    }


def _view_coarse(gathered: Gathered, start: int) -> dict[str, Any]:
    end, workers = gathered.coarse.length, sorted(gathered.workers.items())
    parts = {}
    for rank, worker in workers:
        columns = [column.values[start:end] for column in worker.parts]
        parts[str(rank)] = [_shares(each) for each in zip(*columns, strict=True)]
    return {
        "width_s": gathered.coarse.width_s,
        "from": min(start, end),
        "loss": {str(r): means(w.losses, w.num_losses, start, end) for r, w in workers},
        "staleness": {str(r): means(w.stale, w.num_stale, start, end) for r, w in workers},
        "parts": parts,
    }


def _view_workers(gathered: Gathered) -> list[list[Any]]:
    """Rank, state, steps done and expected, gradients a second, loss, staleness, dropped, rejected,
    restarts, bytes up and down, and how many times as slow as it could be."""
    _, _, of_each = gathered.rates()
    return [
        [
            rank,
            _state_of(gathered, worker),
            worker.num_steps,
            gathered.expected_steps(rank),
            rounded(of_each.get(rank, 0.0)),
            _maybe(worker.loss),
            worker.mean_staleness(),
            worker.outcomes["dropped"],
            worker.outcomes["rejected"],
            worker.restarts,
            worker.carried["up"],
            worker.carried["down"],
            worker.slowdown,
        ]
        for rank, worker in sorted(gathered.workers.items())
    ]


def _state_of(gathered: Gathered, worker: WorkerState) -> str:
    if gathered.is_over:
        return "stopped" if worker.stopped else "left"
    if worker.away_since_s is not None:
        return worker.why_away
    if worker.stopped:
        return "stopped"
    expected = gathered.expected_steps(worker.rank)
    if expected is not None and worker.number >= expected:
        return "through"
    if not worker.num_steps:
        return "starting"
    now_s = gathered.history[-1][0] if gathered.history else gathered.at_s
    silent_s = now_s - (gathered.began_s or 0.0) - worker.last_s
    return "at work" if silent_s < RATE_S else "no step lately"


def _view_waits(gathered: Gathered) -> list[list[Any]]:
    """For each worker that waits for others: whom most, and which share of the time."""
    found: dict[int, dict[int, float]] = {}
    for shard in gathered.shards.values():
        for rank, whom in shard.waits.shares().items():
            mine = found.setdefault(rank, {})
            for other, share in whom.items():
                mine[other] = max(mine.get(other, 0.0), share)
    return [
        [rank, other, rounded(share)]
        for rank, whom in sorted(found.items())
        for other, share in [max(whom.items(), key=lambda item: item[1])]
        if share >= 0.001
    ]


def _view_recent(gathered: Gathered) -> list[list[Any]]:
    """The newest steps of a time in which it is known of everybody at work what he did: rank,
    number, when it began, and its parts, in ms."""
    known = [worker for _, worker in sorted(gathered.workers.items()) if worker.recent]
    latest_s = max((worker.recent[-1].end_s for worker in known), default=0.0)
    active = [worker for worker in known if worker.recent[-1].end_s > latest_s - LATE_S]
    if not active:
        return []
    end_s = min(worker.recent[-1].end_s for worker in active)
    lengths = sorted((w.recent[-1].end_s - w.recent[0].start_s) / len(w.recent) for w in active)
    since_s = end_s - gathered.num_recent * lengths[len(lengths) // 2]
    return [
        [w.rank, s.number, round(s.start_s, 4), *(round(1000 * p, 2) for p in s.parts_s)]
        for w in active
        for s in [s for s in w.recent if s.end_s > since_s and s.start_s < end_s][
            -2 * gathered.num_recent :
        ]
    ]


def _view_moments(gathered: Gathered) -> list[list[Any]]:
    began_s = gathered.began_s or 0.0
    return [[rounded(max(0.0, at_s - began_s)), *more] for at_s, *more in gathered.moments]


def _view_checkpoints(gathered: Gathered) -> list[list[Any]]:
    began_s = gathered.began_s or 0.0
    return [[v, rounded(max(0.0, at_s - began_s))] for v, at_s in gathered.checkpoints]


def _view_scores(gathered: Gathered) -> dict[str, Any]:
    began_s = gathered.began_s or 0.0
    return gathered.scores.view(began_s, lambda at_s: _gradients_at(gathered, at_s))


def _gradients_at(gathered: Gathered, at_s: float) -> int:
    """How many were done at that moment of training."""
    at = min(gathered.fine.length, int(at_s / gathered.fine.width_s) + 1)
    return int(sum(gathered.columns["gradients"].values[:at]))


def _shares(parts_s: Sequence[float]) -> list[int] | int:
    """Of a stretch, in percent; 0: there was no step."""
    total = sum(parts_s)
    return [round(100 * part / total) for part in parts_s] if total else 0


def _maybe(value: float | None) -> float | int | None:
    return None if value is None else rounded(value)


SELDOM: dict[str, Callable[[Gathered], Any]] = {
    "moments": _view_moments,
    "checkpoints": _view_checkpoints,
    "scores": _view_scores,
}
"""Parts that are told when they have changed."""
