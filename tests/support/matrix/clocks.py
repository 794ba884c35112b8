"""Row 22: the wall clock jumps by an hour while a run goes on, for everybody or for some."""

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

from chaos import ORACLE_FILE, Plan
from planting import Bug

from matrix.protections import protections, role_here
from matrix.row import Row, Trial
from matrix.runs import PATIENT, Ended, ended

HOUR_S = 3600.0
EVERYBODY = ("ps", "worker", "master", "engine")
CASES = tuple(
    itertools.product(
        ("sync", "apply-reply", "reply-apply", "bounded:1", "lock-free", "ringmaster:2"),
        ("applied", "durable"),
        (HOUR_S, -HOUR_S),
        (EVERYBODY, ("ps",), ("worker", "master"), ("engine",)),
    )
)
_now, _now_ns = time.time, time.time_ns


def _steady_s() -> float:
    """Also where the program has no such clock any more."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def jump(by_s: float, after_s: float, roles: tuple[str, ...]) -> None:
    """In a role's process, which imports this by way of its recipe."""
    if role_here() in roles:
        _jumping(by_s, after_s).plant()


def _jumping(by_s: float, after_s: float) -> Bug:
    """The wall clock is changed after so many seconds."""
    began_s = _steady_s()

    def offset_s() -> float:
        return by_s if _steady_s() - began_s > after_s else 0.0

    return Bug(
        "the wall clock jumps",
        [
            (time, "time", lambda: _now() + offset_s()),
            (time, "time_ns", lambda: _now_ns() + int(offset_s() * 1e9)),
        ],
    )


def change_clock(seed: int) -> Trial:
    discipline, ack, by_s, whose = CASES[seed % len(CASES)]
    draw = random.Random(f"row 22, {seed}")
    ack = "applied" if discipline == "lock-free" else ack
    plan = Plan(seed, discipline, draw.choice([1, 2]), 2, 150, 20, ack=ack)
    after_s = draw.uniform(0.1, 0.8)
    source = f"from matrix.clocks import jump\njump({by_s}, {after_s}, {whose})\n{ORACLE_FILE}"
    with (
        _of_engine("engine" in whose, by_s, after_s),
        ended(plan, source=source, more=PATIENT) as run,
    ):
        if not run.complaints:
            run.complaints += _about_times(run)
        run.complaints = [f"{by_s:+g} s for {whose}: {what}" for what in run.complaints]
        return run.trial(counted=1)


@contextmanager
def _of_engine(is_meant: bool, by_s: float, after_s: float) -> Iterator[None]:
    if not is_meant:
        yield
        return
    with _jumping(by_s, after_s).planted():
        yield


def _about_times(run: Ended) -> Iterator[str]:
    if restarts := run.summary()["restarts"]:
        yield f"{restarts} processes were started again"
    pushes = run.events("push")
    times = [push[key] for push in pushes for key in ("received_s", "applied_s", "replied_s")]
    times += [step["start_s"] for step in run.events("step")]
    known = [at_s for at_s in times if at_s is not None]
    if not known or min(known) < 0 or max(known) - min(known) > HOUR_S / 2:
        yield f"events happened from {min(known):.0f} to {max(known):.0f} s"


ROWS = (
    Row(
        22,
        "wall clock ±1 h",
        "no effect: monotonic time everywhere",
        len(CASES),
        1,
        change_clock,
        protections("a clock that never goes back"),
    ),
)
