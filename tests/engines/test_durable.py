"""Servers that promise (--ack durable), and are killed: what was answered is in."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import ChaosRun, Fault, Plan

from offbeat.engines.forkserver import ForkServer, fork_server

TIMEOUT_S = 90.0


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer | None]:
    with fork_server("local") as server:
        yield server


@pytest.mark.parametrize(
    "discipline",
    ["apply-reply", "sync", "reply-apply", "buffer:7", "bounded:1", "rennala:3", "ringmaster:2"],
)
@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_that_is_killed_has_lost_nothing(
    tmp_path: Path, forks: ForkServer | None, discipline: str, servers: int
) -> None:
    faults = [
        Fault(0.3, "ps --index 0", signal.SIGKILL),
        Fault(0.7, "ps --index 0", signal.SIGKILL),
    ]
    plan = Plan(0, discipline, servers, 2, 100, 40, faults, ack="durable")
    run = ChaosRun(tmp_path, plan, forks)
    run.strike()
    if not run.has_ended(TIMEOUT_S):
        run.kill_all()
        pytest.fail(f"it does not end: {plan}\n{run.notes.lines}")
    complaints = list(run.complaints())
    assert not complaints, f"{plan}\n{complaints}\n{run.notes.lines}"
