"""Deaths and halts that overlap, drawn at random, and the books afterwards.

pytest tests/engines/test_chaos.py -m slow                      # as `make test-all` does
CHAOS_RUNS=200 CHAOS_SEED=1000 pytest tests/engines/test_chaos.py -m slow
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos import ChaosRun, Fault, Plan, draw_plan

from offbeat.engines.forkserver import ForkServer, fork_server

RUNS = int(os.environ.get("CHAOS_RUNS", "60"))
FIRST_SEED = int(os.environ.get("CHAOS_SEED", "0"))
TIMEOUT_S = 90.0


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer | None]:
    with fork_server("local") as server:
        yield server


def summary_of(folder: Path, plan: Plan, forks: ForkServer | None) -> dict[str, Any]:
    """Of a run under this plan, which ends by itself and whose books hold."""
    run = ChaosRun(folder, plan, forks)
    run.strike()
    if not run.has_ended(TIMEOUT_S):
        run.kill_all()
        pytest.fail(f"it does not end: {plan}\n{run.notes.lines}")
    complaints = list(run.complaints())
    assert not complaints, f"{plan}\n{complaints}\n{run.notes.lines}"
    return json.loads((run.run_dir / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + RUNS))
def test_whatever_dies_the_run_ends_by_itself_and_the_books_hold(
    tmp_path: Path, forks: ForkServer | None, seed: int
) -> None:
    summary_of(tmp_path, draw_plan(seed), forks)


@pytest.mark.parametrize(
    "discipline",
    [
        "apply-reply",
        pytest.param("sync", marks=pytest.mark.slow),
        pytest.param("reply-apply", marks=pytest.mark.slow),
        pytest.param("bounded:1", marks=pytest.mark.slow),
        pytest.param("lock-free", marks=pytest.mark.slow),
        "buffer:7",
    ],
)
def test_a_server_that_dies_when_all_steps_are_done_gets_them_again(
    tmp_path: Path, forks: ForkServer | None, discipline: str
) -> None:
    """Its last checkpoint has none of them, and the master did not commit another one yet."""
    faults = [Fault(1.0, "ps --index 0", signal.SIGKILL)]
    plan = Plan(0, discipline, 1, 2, 100, 100_000, faults)
    summary = summary_of(tmp_path, plan, forks)
    assert (summary["kept"][0]["applied"], summary["lost_updates"]) == (200, 0)
