"""Deaths and halts that overlap, drawn at random, and the books afterwards.

pytest tests/test_chaos.py -m slow                      # as `make test-all` does
CHAOS_RUNS=200 CHAOS_SEED=1000 pytest tests/test_chaos.py -m slow
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from chaos import ChaosRun, Fault, Plan, draw_plan

RUNS = int(os.environ.get("CHAOS_RUNS", "20"))
FIRST_SEED = int(os.environ.get("CHAOS_SEED", "0"))
TIMEOUT_S = 90.0


def assert_books_hold(folder: Path, plan: Plan) -> ChaosRun:
    run = ChaosRun(folder, plan)
    try:
        run.strike()
        code = run.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"it does not end: {plan}\n{run.text()}")
    finally:
        run.close()
        for pid in run.pids():
            os.kill(pid, signal.SIGKILL)
    assert code == 0, f"{plan}\n{run.text()}"
    complaints = list(run.complaints())
    assert not complaints, f"{plan}\n{complaints}\n{run.text()}"
    return run


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + RUNS))
def test_whatever_dies_the_run_ends_by_itself_and_the_books_hold(tmp_path: Path, seed: int) -> None:
    assert_books_hold(tmp_path, draw_plan(seed))


@pytest.mark.parametrize(
    "discipline",
    [
        "apply-reply",
        pytest.param("sync", marks=pytest.mark.slow),
        pytest.param("reply-apply", marks=pytest.mark.slow),
        pytest.param("bounded:1", marks=pytest.mark.slow),
        pytest.param("lock-free", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_dies_when_all_steps_are_done_gets_them_again(
    tmp_path: Path, discipline: str
) -> None:
    """Its last checkpoint has none of them, and the master did not commit another one yet."""
    faults = [Fault(1.0, "ps --index 0", signal.SIGKILL)]
    plan = Plan(0, discipline, 1, 2, 100, 100_000, faults)
    run = assert_books_hold(tmp_path, plan)
    if run.summary()["restarts"]:  # else the run had ended before the signal came
        assert run.summary()["kept"][0]["applied"] == 200
        assert run.summary()["lost_updates"] == 0
