"""One way to start a role: what `run_role` makes of a context, whoever gave it."""

import ast
import dataclasses
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import toy_job
from scripted import ScriptedNetwork, ScriptedServer

import offbeat
from offbeat.errors import CheckpointError, NonFiniteLossError, StepError
from offbeat.roles import run
from offbeat.roles.context import Context, FolderRecords, SentRecords
from offbeat.roles.master import Master
from offbeat.roles.run import Crew, make_role, run_role
from offbeat.roles.worker import Worker, WorkerStats
from offbeat.run.events import EventLog
from offbeat.run.rundir import RunFolder
from offbeat.run.tensorboard import Summaries
from offbeat.transport.inproc import InprocListener

PACKAGE = Path(offbeat.__file__).parent
ROLES = {"Server", "Worker", "Master", "Evaluator"}
BESIDE = {
    "bench/exchange.py": "a server without a run",
    "bench/contenders/ceiling.py": "a worker without a run",
    "api.py": "evaluate: it looks at a run, and is none of its roles",
}


def made_in(path: Path) -> set[str]:
    calls = [
        node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    ]
    return {call.id for call in calls if isinstance(call, ast.Name)} & ROLES


def test_roles_are_made_in_one_place() -> None:
    assert made_in(PACKAGE / "roles" / "run.py") == ROLES
    made = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if made_in(p)}
    assert made == {"roles/run.py", *BESIDE}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path)
    for part in (made.logs, made.events, made.checkpoints):
        part.mkdir()
    return made


def a_context(folder: RunFolder, **more: Any) -> Context:
    job, records = toy_job(servers=1, workers=1), FolderRecords(folder)
    given: dict[str, Any] = {"job": job, "records": records, "clock": lambda: 0.0}
    given |= {"stop": threading.Event(), "folder": folder, "connect_timeout_s": 0.1}
    given["summaries"] = Summaries(job, folder, logging.Logger("test"), given["clock"])
    given["network"] = ScriptedNetwork([ScriptedServer([0])])
    return Context(**{**given, **more})


# -- the master and rank 0 -------------------------------------------------------------------------


def run_master(
    context: Context, monkeypatch: pytest.MonkeyPatch, *, books: Any, rank_0: Any
) -> None:
    """The master with these functions of the context as its two parts."""

    def keep_books(self: Master) -> str:
        self.opened.set()
        books(context)
        return "finished"

    monkeypatch.setattr(Master, "run", keep_books)
    monkeypatch.setattr(Worker, "run", lambda self: rank_0(context))
    try:
        run_role(context, "master", 0)
    finally:
        context.records.close()


def fail_at_last(context: Context) -> None:
    assert context.stop.wait(10)
    raise CheckpointError("the parameters are not finite")


def lose_all(context: Context) -> None:
    raise NonFiniteLossError("the loss became nan")


def test_a_master_fails_with_what_failed_first(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not with what came of it."""
    context = a_context(folder)
    with pytest.raises(StepError) as caught:
        run_master(context, monkeypatch, books=fail_at_last, rank_0=lose_all)
    assert isinstance(caught.value.__cause__, NonFiniteLossError)
    assert "the parameters are not finite" in (folder.logs / "master.log").read_text()


def test_rank_0_has_not_failed_where_the_run_is_being_stopped(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = a_context(folder)
    context.stop.set()
    wait = threading.Event()

    def lose_all_and_tell(context: Context) -> None:
        wait.set()
        lose_all(context)

    run_master(context, monkeypatch, books=lambda context: wait.wait(10), rank_0=lose_all_and_tell)
    assert "the loss became nan" in (folder.logs / "worker-0.log").read_text()


def test_rank_0_does_not_begin_where_the_books_come_to_nothing(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Master) -> str:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(Master, "run", fail)
    began: list[Worker] = []
    monkeypatch.setattr(Worker, "run", began.append)
    context = a_context(folder)
    with pytest.raises(CheckpointError, match="the disk is full"):
        run_role(context, "master", 0)
    context.records.close()
    assert not began, "the servers may be somebody else's"


# -- a server --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_ends_run", [True, False])
def test_who_stops_a_server_says_whether_the_run_is_over(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, stop_ends_run: bool
) -> None:
    context = a_context(folder, listener=InprocListener(), stop_ends_run=stop_ends_run)
    context.stop.set()
    said: list[bool] = []
    role: Any = make_role(context, "ps", 0)
    close = role.server.close
    monkeypatch.setattr(role.server, "close", lambda over: said.append(over) or close(over=over))
    role.run()
    context.records.close()
    assert said == [stop_ends_run]


def test_what_a_look_raises_ends_a_server_that_workers_look_for_again(folder: RunFolder) -> None:
    def look() -> None:
        raise CheckpointError("nothing was heard of the master")

    context = a_context(folder, listener=InprocListener(), look=look)
    with pytest.raises(CheckpointError, match="nothing was heard"):
        run_role(context, "ps", 0)
    context.records.close()


# -- what all of them have -------------------------------------------------------------------------


def test_a_role_tells_how_far_it_is_to_whoever_asked_for_it(folder: RunFolder) -> None:
    asked: list[Any] = []
    context = a_context(folder, listener=InprocListener(), report=asked.append)
    context.stop.set()
    run_role(context, "ps", 0)
    context.records.close()
    assert [progress() for progress in asked] == [{"ready": False, "staleness": None, "lr": None}]


def test_a_failing_worker_says_at_which_step(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Worker) -> None:
        self.step = 7
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "run", fail)
    context = a_context(folder)
    with pytest.raises(StepError) as caught:
        run_role(context, "worker", 0)
    context.records.close()
    assert caught.value.step == 7 and isinstance(caught.value.__cause__, KeyboardInterrupt)


# -- workers that share a process ------------------------------------------------------------------


def a_crew(folder: RunFolder, *ranks: int, **more: Any) -> Context:
    job = toy_job(servers=1, workers=max(ranks) + 1)
    facts = dataclasses.replace(job.facts, crews=[ranks])
    return a_context(folder, job=dataclasses.replace(job, facts=facts), **more)


def test_a_crew_fails_with_what_failed_first_and_waits_for_no_one_who_does_not_end(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, left = threading.Event(), threading.Event()

    def run_(self: Worker) -> None:
        self.step = 7
        if self.rank == 3:
            raise KeyError("the seventh batch")
        over.wait(10)
        left.set()

    monkeypatch.setattr(Worker, "run", run_)
    monkeypatch.setattr(run, "LEAVE_TIMEOUT_S", 0.01)
    context = a_crew(folder, 1, 3)
    with pytest.raises(StepError) as caught:
        run_role(context, "worker", 1)
    assert not left.is_set(), "its step may never end"
    over.set()
    context.records.close()
    assert (caught.value.rank, caught.value.step) == (3, 7)
    assert context.stop.is_set(), "the others are told"
    assert "the seventh batch" in (folder.logs / "worker-3.log").read_text()


def test_the_master_fails_with_what_failed_first_in_its_crew(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = a_crew(folder, 0, 2)

    def run_(self: Worker) -> None:
        assert self._stop is not context.stop, "the books are closed first"
        if self.rank == 2:
            raise NonFiniteLossError("the loss became nan")
        assert self._stop.wait(10)

    monkeypatch.setattr(Master, "run", lambda self: context.stop.wait(10) and "interrupted")
    monkeypatch.setattr(Worker, "run", run_)
    with pytest.raises(StepError) as caught:
        run_role(dataclasses.replace(context, begins_at_once=True), "master", 0)
    context.records.close()
    assert caught.value.rank == 2
    assert "the loss became nan" in (folder.logs / "worker-2.log").read_text()


def test_a_crew_is_one_in_what_it_tells(folder: RunFolder) -> None:
    said: list[str] = []
    context = a_crew(folder, 0, 2, say=said.append)
    crew = Crew(context, (0, 2), context.stop, lambda role, error: None)
    for role, steps, loss in zip(crew._roles, (3, 4), (1.0, 2.0), strict=True):
        role.worker.stats = WorkerStats(num_steps=steps, num_examples=10 * steps, loss=loss)
    context.records.close()
    of_both = {"steps": 7, "examples": 70, "loss": 1.5}
    assert crew.progress() == {"ready": False, "reason": "", **of_both}


@pytest.mark.parametrize(("ranks", "seeds"), [((0,), [True]), ((0, 1), [False, False])])
def test_torchs_generator_is_nobodys_where_several_workers_share_it(
    folder: RunFolder, ranks: tuple[int, ...], seeds: list[bool]
) -> None:
    context = a_crew(folder, *ranks)
    crew = Crew(context, ranks, context.stop, lambda role, error: None)
    context.records.close()
    assert [role.worker._seeds_torch for role in crew._roles] == seeds


def test_lines_on_the_console_are_the_first_ones(folder: RunFolder) -> None:
    made = toy_job(servers=1, workers=2, log_every=1)
    facts = dataclasses.replace(made.facts, crews=[(0, 1)])
    context = a_context(folder, job=dataclasses.replace(made, facts=facts), say=print)
    crew = Crew(context, (0, 1), context.stop, lambda role, error: None)
    context.records.close()
    assert [role.worker._say is not None for role in crew._roles] == [True, False]


# -- records ---------------------------------------------------------------------------------------


def test_records_without_a_folder_go_where_they_are_sent() -> None:
    sent: dict[str, list[str]] = {}

    class Sink:
        def __init__(self, name: str) -> None:
            self.lines = sent.setdefault(name, [])

        def write(self, text: str) -> None:
            self.lines.append(text)

        def flush(self) -> None:
            return

        def close(self) -> None:
            self.lines.append("closed")

    log = logging.Logger("console")
    records = SentRecords(log, Sink)
    events: EventLog = records.events("worker-1")
    events.record("step", worker=1)
    records.flush()
    records.close()
    assert sent == {"worker-1": ['{"kind": "step", "worker": 1}\n', "closed"]}
    assert records.log("worker-1") is log


def test_an_evaluator_leaves_torchs_threads_alone_on_a_machine_of_its_own(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    in_a_run = a_context(folder)
    source: Any = object()
    by_hand = dataclasses.replace(in_a_run, folder=None, source=source, summaries=None)
    for context in (in_a_run, by_hand):
        role: Any = make_role(context, "evaluator", 0)
        monkeypatch.setattr(role._evaluator, "run", lambda: None)
        role.run()
    in_a_run.records.close()
    assert threads == [1]
