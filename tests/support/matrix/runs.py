"""Whole runs that trials are made of: real processes, forked, and the counting oracle of chaos.py.

with ended(plan) as run:
    run.complaints, run.events("push")
"""

import atexit
import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from chaos import ORACLE_FILE, ChaosRun, Plan, Struck

from matrix.protections import prelude
from matrix.row import Trial
from offbeat.engines.forkserver import ForkServer
from offbeat.run.events import read_events

PATIENT = {"worker_timeout": 5.0}
"""For runs in which nobody stands still: others are at work on the machine as well."""
PATIENCE_S = 60.0
"""How long a run may take after its last fault; it is one of a second or two."""


@functools.cache
def forks() -> ForkServer:
    """Of this process, for all of its runs."""
    server = ForkServer()
    atexit.register(server.close)
    return server


class Ended:
    """A run that is over, one way or another."""

    def __init__(self, run: ChaosRun, complaints: Sequence[str]) -> None:
        self.plan = run.plan
        self.run_dir = run.run_dir
        self.struck = run.struck
        self.notes = run.notes.lines
        self.complaints = list(complaints)

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = read_events(self.run_dir / "events")
        return [event for event in found if event["kind"] == kind]

    def phases(self, phase: str) -> list[dict[str, Any]]:
        return [event for event in self.events("run") if event["phase"] == phase]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def trial(self, recoveries_s: Sequence[float] = (), counted: int | None = None) -> Trial:
        """By default it counts as many as there were faults."""
        return Trial(
            tuple(f"{what} ({self.plan})" for what in self.complaints),
            recoveries_s=tuple(recoveries_s),
            counted=len(self.struck) if counted is None else counted,
        )


@contextlib.contextmanager
def ended(
    plan: Plan,
    *,
    source: str = ORACLE_FILE,
    more: Mapping[str, Any] | None = None,
    is_oracle: bool = True,
    meanwhile: Callable[[ChaosRun], Sequence[str]] = lambda run: (),
) -> Iterator[Ended]:
    """A run under this plan. `is_oracle`: as in ChaosRun. `meanwhile`: what else is
    done before it ends, and complained of."""
    with tempfile.TemporaryDirectory(prefix="offbeat-faults-") as folder:
        text = prelude() + source
        run = ChaosRun(Path(folder), plan, forks(), source=text, more=more, is_oracle=is_oracle)
        try:
            complaints = list(meanwhile(run))
            run.strike()
            if run.has_ended(PATIENCE_S):
                complaints += run.complaints()
            else:
                complaints.append(f"it does not end: {run.notes.lines[-3:]}")
        finally:
            run.kill_all()
        yield Ended(run, complaints)


def back_after_s(struck: Struck, pushes: Sequence[Mapping[str, Any]]) -> float | None:
    """From a worker's or server's death to the first update with, or by, the one that took its
    place; None: there was nothing left to do."""
    role, _, index = struck.fault.role.partition(" --index ")
    key, whose = ("shard" if role == "ps" else "worker"), int(index or 0)
    times = [
        push["applied_s"]
        for push in pushes
        if push[key] == whose
        and not push.get("again")
        and push["received_s"] > struck.at_s
        and push["applied_s"] is not None
    ]
    return min(times) - struck.at_s if times else None
