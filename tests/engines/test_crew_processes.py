"""Workers that share a process in the engine `local`: it is started, missed, and replaced like any
other, with all of them. Which ones share it is for the GPUs to say; here, where there are none, the
launcher is told, and the processes find it in the run's folder."""

import dataclasses
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos import ChaosRun, Fault, Plan, draw_plan
from processes import RECIPE_FILE, LocalRun, leftovers

from offbeat.engines.forkserver import ForkServer, fork_server
from offbeat.report.record import read_run
from offbeat.run.checkpoint import newest_checkpoint
from offbeat.run.events import read_events

CREWS = [[0, 2], [1, 3]]
TIMEOUT_S = 90.0
FAILING = """
import threading
def failing(model, batch):
    name = threading.current_thread().name
    failing.counts[name] = failing.counts.get(name, 0) + 1
    if name == "worker-%d" and failing.counts[name] == 6:
        raise KeyError("the sixth batch")
    return cross_entropy(model, batch)
failing.counts = {}
fails = toy_recipe(loss=failing, epochs=1000)
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer | None]:
    with fork_server("auto") as server:
        yield server


Strike = Callable[..., ChaosRun]


@pytest.fixture
def strike(tmp_path: Path, forks: ForkServer | None, monkeypatch: pytest.MonkeyPatch) -> Strike:
    monkeypatch.setattr(
        "offbeat.run.making.choose_engine", lambda config, devices: ("local", CREWS)
    )

    def strike(plan: Plan) -> ChaosRun:
        run = ChaosRun(tmp_path, plan, forks)
        run.strike()
        if not run.has_ended(TIMEOUT_S):
            run.kill_all()
            pytest.fail(f"it does not end: {run.notes.lines}")
        assert list(run.complaints()) == [], f"{plan}\n{run.notes.lines}"
        return run

    return strike


def a_plan(discipline: str, *faults: Fault) -> Plan:
    return Plan(0, discipline, 2, 4, 150, 60, list(faults))


def events(run: ChaosRun, name: str) -> list[dict[str, Any]]:
    return list(read_events(run.run_dir / "events", f"{name}*"))


@pytest.mark.parametrize(
    ("discipline", "role", "index", "who"),
    [
        *(
            pytest.param(d, "worker", 1, "worker 1 and worker 3", marks=pytest.mark.slow)
            for d in ("apply-reply", "sync")
        ),
        ("lock-free", "master", 0, "the master and worker 2"),
        pytest.param("sync", "master", 0, "the master and worker 2", marks=pytest.mark.slow),
    ],
)
def test_a_crew_that_dies_is_replaced_with_all_of_its_ranks(
    strike: Strike, discipline: str, role: str, index: int, who: str
) -> None:
    fault = Fault(0.3, f"{role} --index {index}", signal.SIGKILL)
    run = strike(a_plan(discipline, fault))
    said = f"the process of {who} was killed by SIGKILL: starting it again (1 of 20)"
    assert said in run.notes.lines
    crew = [index, index + 2]
    (restart,) = [event for event in events(run, "engine") if event["phase"] == "restart"]
    assert (restart["role"], restart["index"], restart["crew"]) == (role, index, crew)
    pushes = [event for event in events(run, "ps") if event["kind"] == "push"]
    for rank in range(4):
        incarnations = {push["incarnation"] for push in pushes if push["worker"] == rank}
        assert incarnations == ({0, 1} if rank in crew else {0}), rank
    ((_, named),) = read_run(run.run_dir).restarts
    assert named == f"{role} {index} and worker {index + 2}"


def test_a_quiet_run_has_a_process_for_each_crew(strike: Strike) -> None:
    run = strike(a_plan("sync"))
    described = json.loads((run.run_dir / "config.json").read_text())
    assert described["job"]["crews"] == described["resolved"]["crews"] == CREWS
    assert described["config"]["engine"] == "auto"
    assert json.loads((run.run_dir / "summary.json").read_text())["engine"] == "local"
    logs = {path.stem: path.read_text() for path in (run.run_dir / "logs").iterdir()}
    assert logs.keys() == {"ps-0", "ps-1", "master", "worker-1", "worker-2", "worker-3"}
    assert "is master and worker-2" in logs["master"] and "is master and" in logs["worker-2"]
    assert "is worker-1 and worker-3" in logs["worker-3"]
    assert [path.stem for path in sorted((run.run_dir / "events").glob("worker*"))] == [
        f"worker-{rank}" for rank in range(4)
    ]


@pytest.mark.slow
def test_a_crew_that_hangs_is_replaced(strike: Strike) -> None:
    run = strike(a_plan("sync", Fault(0.3, "worker --index 1", signal.SIGSTOP)))
    assert any("worker 1 and worker 3 was silent for 2 s" in line for line in run.notes.lines)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_whatever_dies_the_books_hold(strike: Strike, seed: int) -> None:
    plan = draw_plan(seed)
    roles = [re.sub(r"worker .*", "worker --index 1", fault.role) for fault in plan.faults]
    faults = [dataclasses.replace(f, role=r) for f, r in zip(plan.faults, roles, strict=True)]
    strike(dataclasses.replace(plan, workers=4, faults=faults))


# -- from the shell --------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LocalRun]]:
    runs: list[LocalRun] = []

    def start(*flags: str, **options: Any) -> LocalRun:
        runs.append(LocalRun(tmp_path, "--workers", "4", *flags, crews=CREWS, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
        for pid in run.pids():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, 3])
def test_an_error_of_one_rank_is_told_with_rank_step_and_log(
    start: Callable[..., LocalRun], rank: int
) -> None:
    run = start(recipe="fails", source=RECIPE_FILE + FAILING % rank)
    assert run.wait() == 1
    assert f"worker {rank} failed at step 6: KeyError: 'the sixth batch' (recipes" in run.text()
    assert "starting it again" not in run.text(), "trying again would not help"
    log = run.run_dir / "logs" / f"worker-{rank}.log"
    assert f"the traceback is in {log}" in run.text() and "the sixth batch" in log.read_text()
    assert leftovers(run.run_dir) == []
    assert newest_checkpoint(run.run_dir / "checkpoints").version > 0


@pytest.mark.slow
def test_a_run_of_crews_is_stopped_and_resumed_without_them(
    start: Callable[..., LocalRun], tmp_path: Path
) -> None:
    run = start("--steps", "100000", "--log-every", "50")
    run.wait_for_steps(100, 0, 1, 2, 3)
    assert len(run.pids("master")) == len(run.pids("worker")) == 1
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()
    assert leftovers(run.run_dir) == []
    assert "does not end by itself" not in run.text()
    resumed = LocalRun(tmp_path, "--resume", str(run.run_dir), "--epochs", "1")
    assert resumed.wait() == 0, resumed.text()
    described = json.loads((run.run_dir / "config.json").read_text())
    assert described["job"]["crews"] == [], "there is no GPU here"
