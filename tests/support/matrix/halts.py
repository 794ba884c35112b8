"""Row 10: a worker stands still, and goes on when nobody waits for it any more."""

import itertools
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chaos import SILENT_S, Fault, Plan
from planting import Bug

from matrix.processes import LATEST_S
from matrix.protections import protections
from matrix.row import Row, Trial
from matrix.runs import Ended, ended
from offbeat.engines.supervisor import Supervisor

ROUND_TIMEOUT_S = 0.3
KINDS = ("round", "server", "engine")
"""Who does not wait for it: a round, which closes without it; its servers, who take it for gone;
the engine, which replaces it."""
_nobody_silent = Bug("nobody is silent", [(Supervisor, "silent", lambda supervisor, now_s: [])])


def halt_worker(seed: int) -> Trial:
    draw = random.Random(f"row 10, {seed}")
    kind, workers = KINDS[seed % len(KINDS)], draw.choice([2, 3])
    rank = draw.randrange(1, workers)
    least_s = ROUND_TIMEOUT_S if kind == "round" else SILENT_S
    pause_s = least_s + draw.uniform(0.7, 1.5)
    faults = [
        Fault(
            draw.uniform(0.05, 0.3),
            f"worker --index {rank}",
            signal.SIGSTOP,
            pause_s,
            draw.uniform(0.0, LATEST_S),
        )
    ]
    steps = 500 if kind == "round" else 1000  # some are left when it goes on
    plan = Plan(seed, "sync", draw.choice([1, 2]), workers, steps, 100, faults)
    more = {"round_timeout": ROUND_TIMEOUT_S, "worker_timeout": 30.0} if kind == "round" else {}
    if kind == "server":
        with _nobody_silent.planted(), ended(plan, more=more) as run:
            return _judged(run, kind, rank)
    with ended(plan, more=more) as run:
        return _judged(run, kind, rank)


def _judged(run: Ended, kind: str, rank: int) -> Trial:
    """From the halt to the next round: that is how long the others had to wait."""
    waits_s = []
    if not run.complaints:
        pushes = run.events("push")
        run.complaints += _about_rounds(run, pushes)
        run.complaints += _about_the_late(run, kind, rank, pushes)
        waits_s = [_longest_wait_s(run, pushes)]
    run.complaints = [f"{kind}: {what}" for what in run.complaints]
    return run.trial(waits_s, counted=1)


def _rounds_s(pushes: Sequence[Mapping[str, Any]]) -> list[float]:
    return sorted({push["applied_s"] for push in pushes if push["applied_s"] and not push["shard"]})


def _longest_wait_s(run: Ended, pushes: Sequence[Mapping[str, Any]]) -> float:
    times, pause_s = _rounds_s(pushes), max(each.fault.pause_s for each in run.struck)
    at_s = run.struck[0].at_s
    meanwhile = [at_s, *(t for t in times if at_s < t < at_s + pause_s), at_s + pause_s]
    return max(b - a for a, b in itertools.pairwise(meanwhile))


def _about_rounds(run: Ended, pushes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for struck in run.struck:
        until_s = struck.at_s + struck.fault.pause_s
        if not any(struck.at_s + 0.1 < at_s < until_s for at_s in _rounds_s(pushes)):
            yield f"no round was closed for {struck.fault.pause_s:.1f} s"
    stale = [p for p in pushes if p["outcome"] == "applied" and p["staleness"]]
    if stale:
        yield f"a gradient that is late went in: {stale[0]}"


def _about_the_late(
    run: Ended, kind: str, rank: int, pushes: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    if not run.struck:
        return
    restarts = run.summary()["restarts"]
    if restarts != (kind == "engine"):
        yield f"{restarts} processes were started again"
    after_s = run.struck[0].at_s + run.struck[0].fault.pause_s
    theirs = [push for push in pushes if push["worker"] == rank]
    if not any(push["applied_s"] and push["applied_s"] > after_s for push in theirs):
        yield "it did not take part again"
    if kind == "round" and not any(push["outcome"] == "dropped" for push in theirs):
        yield "nothing of it was refused as late"


ROWS = (
    Row(
        10,
        "worker SIGSTOP, later CONT",
        "sync goes on after the timeout; its late gradient is refused as stale",
        50,
        1,
        halt_worker,
        protections("rounds close after their timeout", "late gradient accepted in sync"),
    ),
)
