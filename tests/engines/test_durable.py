"""Processes that are killed where servers promise (--ack durable): what was answered is in.

The oracle: every gradient is one and the learning rate is one, so that a parameter is minus the
number of gradients that are in (chaos.py). What a worker wrote down as applied was answered. Row 2
of the matrix of faults (tests/support/matrix/processes.py) kills servers at any time.

pytest tests/engines/test_durable.py -m slow                      # as `make test-all` does
DURABLE_RUNS=300 pytest tests/engines/test_durable.py -m slow     # more of them
"""

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import ORACLE_FILE, ChaosRun, Fault, Plan
from processes import LocalRun, children

from offbeat.engines.forkserver import ForkServer, fork_server
from offbeat.run.checkpoint import newest_checkpoint
from offbeat.run.events import read_events
from offbeat.run.segments import list_segments

RUNS = int(os.environ.get("DURABLE_RUNS", "20"))
TIMEOUT_S = 90.0
DISCIPLINES = (
    *("apply-reply", "reply-apply", "sync", "bounded:1"),
    *("ringmaster:2", "rennala:3", "buffer:7"),
)
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer | None]:
    with fork_server("local") as server:
        yield server


# -- servers are killed ----------------------------------------------------------------------------


def check(folder: Path, plan: Plan, forks: ForkServer | None) -> None:
    """A run under this plan ends by itself, and has lost nothing."""
    run = ChaosRun(folder, plan, forks)
    run.strike()
    if not run.has_ended(TIMEOUT_S):
        run.kill_all()
        pytest.fail(f"it does not end: {plan}\n{run.notes.lines}")
    complaints = list(run.complaints())
    assert not complaints, f"{plan}\n{complaints}\n{run.notes.lines}"
    assert json.loads((run.run_dir / "summary.json").read_text())["restarts"] > 0, str(plan)
    assert not (run.run_dir / "journal").exists(), "all of it is in the last checkpoint"


@pytest.mark.parametrize(
    ("discipline", "servers"),
    [("sync", 2)]
    + [
        pytest.param(discipline, servers, marks=slow)
        for discipline in DISCIPLINES
        for servers in (1, 2)
    ],
)
def test_a_server_that_is_killed_has_lost_nothing(
    tmp_path: Path, forks: ForkServer | None, discipline: str, servers: int
) -> None:
    """No checkpoint has any of it, and the second time it dies with what it has out of the
    journal."""
    faults = [Fault(share, "ps --index 0", signal.SIGKILL) for share in (0.3, 0.6)]
    check(tmp_path, Plan(0, discipline, servers, 2, 60, 100_000, faults, ack="durable"), forks)


# -- everything is killed --------------------------------------------------------------------------


def kill_all(run: LocalRun) -> None:
    """Every process of it, one right after the other."""
    pids = [run.process.pid, *children("role fork-server", run.process.pid), *run.pids()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    run.process.wait()
    run.close()


def answered(run_dir: Path) -> dict[int, int]:
    """The last step of each worker of which it has written down that it was answered."""
    found: dict[int, int] = {}
    for event in read_events(run_dir / "events", "worker-*"):
        if event["kind"] == "step" and event["outcome"] in ("applied", "dropped"):
            found[event["worker"]] = max(found.get(event["worker"], 0), event["step"])
    return found


def begun_after(run_dir: Path) -> dict[int, int]:
    """With which step each worker began when the run went on."""
    found: dict[int, int] = {}
    for event in read_events(run_dir / "events", "worker-*"):
        if event["kind"] == "step" and event["step"] < found.get(event["worker"], 10**9):
            found[event["worker"]] = event["step"]
    return found


def killed(
    tmp_path: Path, discipline: str, at: int, *flags: str
) -> tuple[LocalRun, dict[int, int]]:
    run = LocalRun(
        tmp_path,
        *("--discipline", discipline, "--steps", "80", *flags),
        source=ORACLE_FILE,
    )
    run.wait_for_steps(at)
    kill_all(run)
    return run, answered(run.run_dir)


def went_on(tmp_path: Path, run: LocalRun, *flags: str) -> dict[int, int]:
    """With which step each worker began then."""
    for path in (run.run_dir / "events").glob("worker-*"):
        path.unlink()
    again = ("--resume", str(run.run_dir), *flags)
    on = LocalRun(tmp_path, *again, run="on", source=ORACLE_FILE)
    assert on.wait() == 0, on.text()
    return begun_after(run.run_dir)


def check_books(run: LocalRun, discipline: str, lost: int = 0) -> None:
    shards = newest_checkpoint(run.run_dir / "checkpoints").shards
    for row, shard in zip(run.summary()["kept"], shards, strict=True):
        assert row["gradients"] == 160 and row["lost"] <= lost, (discipline, row)
        assert {-int(value) for value in shard.tensors["params"]} == {row["applied"]}


@pytest.mark.parametrize("ack", ["durable", pytest.param("applied", marks=slow)])
def test_what_was_answered_is_in_when_everything_was_killed(tmp_path: Path, ack: str) -> None:
    """Without a journal it is not: the workers do again what the newest checkpoint does not
    have."""
    run, told = killed(tmp_path, "apply-reply", 20, "--ack", ack, "--checkpoint-every", "1000")
    assert bool(list_segments(run.run_dir / "journal" / "ps-0")) is (ack == "durable")
    begun = went_on(tmp_path, run)
    assert all((begun[worker] > told[worker]) is (ack == "durable") for worker in told), begun
    check_books(run, "apply-reply")


@slow
@pytest.mark.parametrize("seed", range(RUNS))
def test_what_was_answered_is_in_whenever_everything_is_killed(tmp_path: Path, seed: int) -> None:
    """Also where the run goes on with another number of servers, or without a journal. What had
    reached some servers only, and was answered to nobody as a whole, is counted as lost."""
    draw = random.Random(f"everything {seed}")
    discipline, servers = draw.choice(DISCIPLINES), draw.choice([1, 1, 2])
    rule = ("--rule", "sum") if discipline[:4] in ("sync", "renn", "buff") else ()
    given = ("--ack", "durable", "--servers", str(servers), "--checkpoint-every", "30", *rule)
    run, told = killed(tmp_path, discipline, draw.randint(1, 70), *given)
    others = draw.choice([(), ("--servers", str(3 - servers)), ("--ack", "applied")])
    begun = went_on(tmp_path, run, *others)
    assert all(begun.get(worker, 81) > told[worker] for worker in told), (discipline, begun, told)
    check_books(run, discipline, lost=2 * (servers - 1))
