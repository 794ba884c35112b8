"""One way to start a role: `run_role(context, role, index)`.

Used for threads (the engines inproc and cluster), for processes (process.py) and for roles that a
person started (cluster/). Servers, workers, masters and evaluators are made here and nowhere
else.
"""

import dataclasses
import functools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch

from offbeat.errors import ConfigError, StepError
from offbeat.flat import FlatModel
from offbeat.ledger import Ledger
from offbeat.recipes.metrics import Scores
from offbeat.roles.calls import Status
from offbeat.roles.context import Context, Progress
from offbeat.roles.control import REPORT_EVERY_S
from offbeat.roles.evaluator import Evaluator, FolderSource
from offbeat.roles.judging import make_referee
from offbeat.roles.keeping import Keeper
from offbeat.roles.master import Master
from offbeat.roles.norms import Norms
from offbeat.roles.scoring import score_line
from offbeat.roles.server import Server
from offbeat.roles.worker import Worker
from offbeat.run.footprint import explained
from offbeat.run.journal import Journal
from offbeat.run.rundir import role_name
from offbeat.run.tensorboard import StepSummaries

LEAVE_TIMEOUT_S = 3.0
"""How long the workers of a crew may take to leave, once told to stop, before the process does."""


class Role(ABC):
    """A role that is made, and waits for `run`. Making it may seed torch's generator for a moment,
    so several of a process are made one after the other; they run in any thread."""

    @abstractmethod
    def run(self) -> None:
        """Until it is over, or the context's `stop`. Raises what it failed with."""

    @abstractmethod
    def progress(self) -> Progress:
        """How far it is; any thread may ask."""


def make_role(context: Context, role: str, index: int) -> Role:
    try:
        return _KINDS[role](context, index)
    except torch.OutOfMemoryError as error:
        raise explained(error, context.job, ranks_here(context, role, index)) from error


def ranks_here(context: Context, role: str, index: int) -> list[int]:
    """The workers whose memory this process knows of: those of all threads, or a role's own."""
    job = context.job
    if job.facts.engine == "inproc":
        return list(range(job.config.workers))
    first = {"worker": index, "master": 0}.get(role)
    return [] if first is None else list(job.crew(first))


def run_role(context: Context, role: str, index: int) -> None:
    """Be `role` number `index`, until it is over."""
    made = make_role(context, role, index)
    context.report(made.progress)
    made.run()


class ServerRole(Role):
    def __init__(self, context: Context, index: int) -> None:
        job, records, name = context.job, context.records, role_name("ps", index)
        self._context = context
        self.server = Server(
            job.make_shard(index),
            Ledger(
                job.make_discipline(),
                epoch=context.generation,
                budget=job.budget,
                in_step=job.joins_norms,
                promises=job.config.is_durable,
            ),
            context.listener,
            index=index,
            agreement=job.agreement,
            events=records.events(name),
            log=records.log(name),
            clock=context.clock,
            worker_timeout_s=job.config.worker_timeout,
            make_codec=job.make_codec,
            make_reply_codec=job.make_reply_codec,
            make_journal=functools.partial(self._make_journal, index)
            if job.config.is_durable
            else None,
        )

    def _make_journal(
        self,
        index: int,
        told: Callable[[int], None],
        failed: Callable[[BaseException], None],
    ) -> Journal:
        context, name = self._context, role_name("ps", index)
        if context.journal is None:
            raise ConfigError(
                f"server {index} has nowhere to keep its journal, which ack durable takes: start "
                f"it with --journal-dir DIR, on a disk of its machine"
            )
        return Journal(
            context.journal / name,
            context.job.journal_mark(index, context.run),
            epoch=context.generation,
            told=told,
            failed=failed,
            log=context.records.log(name),
        )

    def run(self) -> None:
        server, context = self.server, self._context
        server.start()
        try:
            while not server.over.wait(REPORT_EVERY_S) and not context.stop.is_set():
                context.look()
        finally:
            stopped = context.stop.is_set() and context.stop_ends_run
            server.close(over=server.over.is_set() or stopped)
        if server.failure is not None:
            ranks = ranks_here(context, "ps", server.index)
            raise explained(server.failure, context.job, ranks)

    def progress(self) -> Progress:
        staleness = list(self.server.ledger.recent_staleness)
        return {
            "ready": self.server.sessions.loaded.is_set(),
            "staleness": mean(staleness),
            "lr": self.server.shard.lr,
        }


class WorkerRole(Role):
    """Fails with a StepError, which says at which step and has the reason as its cause."""

    def __init__(
        self,
        context: Context,
        rank: int,
        stop: threading.Event | None = None,
        summaries: StepSummaries | None = None,
    ) -> None:
        assert context.network is not None
        job, records, name = context.job, context.records, role_name("worker", rank)
        self._context = context
        self.name = name
        self.worker = Worker(
            job,
            rank,
            job.make_towers(rank, context.model or job.make_model(), records.log(name).warning),
            context.network,
            events=records.events(name),
            log=records.log(name),
            clock=context.clock,
            stop=stop or context.stop,
            incarnation=context.generation,
            seeds_torch=context.owns_process and len(job.crew(rank)) == 1,
            summaries=summaries,
            keeper=Keeper(
                None if context.states is None else context.states / name,
                job.config.fresh_worker_state,
                records.log(name),
            ),
            say=context.say,
            connect_timeout_s=context.connect_timeout_s,
            orders=context.orders,
        )

    def run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:  # Ctrl-C reaches no engine's role: it is the recipe's
            ranks = ranks_here(self._context, "worker", self.worker.rank)
            error = explained(error, self._context.job, ranks, self.worker.towers.model)
            raise StepError(self.worker.rank, self.worker.step, error) from error

    def progress(self) -> Progress:
        stats = self.worker.stats
        return {
            "ready": self.worker.has_joined,
            "steps": stats.num_steps,
            "examples": stats.num_examples,
            "loss": stats.loss if math.isfinite(stats.loss) else None,
            "reason": self.worker.reason,
        }


class Crew:
    """The workers of one process. One alone runs in the thread that runs the crew; of several each
    has a thread of its own."""

    def __init__(
        self,
        context: Context,
        ranks: Sequence[int],
        stop: threading.Event,
        failed: Callable[[WorkerRole, StepError], None],
        summaries: StepSummaries | None = None,
    ) -> None:
        """`failed` is told who failed, and with what, in the thread of whoever did; `summaries` are
        the first one's, and so is what the context has to say."""
        self._stop = stop
        self._failed = failed
        self.first = WorkerRole(context, ranks[0], stop, summaries)
        in_silence = dataclasses.replace(context, say=None, model=None)
        self._roles = [self.first, *(WorkerRole(in_silence, rank, stop) for rank in ranks[1:])]

    def run(self) -> None:
        """Until all of them have left, or could have done so since they were told to stop."""
        if len(self._roles) == 1:
            self._run(self.first)
            return
        threads = [
            threading.Thread(target=self._run, args=(role,), name=role.name, daemon=True)
            for role in self._roles
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if self._stop.wait(REPORT_EVERY_S):
                break
        for thread in threads:
            thread.join(LEAVE_TIMEOUT_S)

    def progress(self) -> Progress:
        """Of all together."""
        found = [role.progress() for role in self._roles]
        return {
            "ready": all(progress["ready"] for progress in found),
            "steps": sum(progress["steps"] for progress in found),
            "examples": sum(progress["examples"] for progress in found),
            "loss": mean(progress["loss"] for progress in found),
            "reason": found[0]["reason"],
        }

    def _run(self, role: WorkerRole) -> None:
        try:
            role.run()
        except StepError as error:
            self._failed(role, error)


class CrewRole(Role):
    """Several workers in one process, none of them the master's. When one fails the others end
    their steps, and the crew fails with what failed first."""

    def __init__(self, context: Context, ranks: Sequence[int]) -> None:
        self._context = context
        self._failures: list[StepError] = []
        self._crew = Crew(context, ranks, context.stop, self._worker_failed)

    def run(self) -> None:
        self._crew.run()
        if self._failures:
            raise self._failures[0]

    def progress(self) -> Progress:
        return self._crew.progress()

    def _worker_failed(self, role: WorkerRole, error: StepError) -> None:
        if self._failures or role is not self._crew.first:  # whose log is the process's
            role.worker.log.error("failed", exc_info=error)
        self._failures.append(error)
        self._context.stop.set()


class Books:
    """A master, in a thread of its own beside somebody's training. `closed` is set when it has
    ended, one way or another; `failed` is told what it failed with, in its thread; `watch` is shown
    the version, the latest staleness, and the versions at which the learning rate fell."""

    def __init__(
        self,
        context: Context,
        model: FlatModel,
        closed: threading.Event,
        failed: Callable[[Exception], None],
        watch: Callable[[int, list[int], list[int]], None] = lambda version, staleness, falls: None,
    ) -> None:
        assert context.network is not None and context.folder is not None
        self.closed = closed
        self._failed = failed
        self._watch = watch
        self._seen: Sequence[Status] = ()
        self._master = Master(
            context.job,
            context.network,
            context.folder,
            model,
            events=context.records.events("master"),
            log=context.records.log("master"),
            clock=context.clock,
            stop=context.stop,
            watch=self._look,
            patience=context.patience,
            connect_timeout_s=context.connect_timeout_s,
            orders=context.orders,
            say=context.say,
        )
        self._norms = (
            Norms(context.job, context.network, log=self._master.log, clock=context.clock)
            if context.job.joins_norms
            else None
        )
        self._thread = threading.Thread(target=self._keep, name="books", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def wait_until_opened(self) -> bool:
        """False: it came to nothing."""
        while not self._master.opened.wait(REPORT_EVERY_S) and not self.closed.is_set():
            continue
        return not self.closed.is_set()

    def progress(self) -> Progress:
        seen = self._seen
        return {
            "opened": bool(seen),
            "version": max((status.version for status in seen), default=0),
            "staleness": mean([n for status in seen for n in status.staleness]),
            "lr": seen[0].lr if seen else None,
        }

    def _keep(self) -> None:
        if self._norms is not None:
            self._norms.start()
        try:
            self._master.run()
        except Exception as error:
            self._master.log.error("the books cannot be kept", exc_info=error)
            self._failed(error)
        finally:
            self.closed.set()  # also where a server is away that could tell rank 0
            if self._norms is not None:
                self._norms.close()

    def _look(self, statuses: Sequence[Status]) -> None:
        if self._norms is not None:
            self._norms.check()
        self._seen = statuses
        staleness = [number for status in statuses for number in status.staleness]
        self._watch(statuses[0].version, staleness, statuses[0].falls)


class MasterRole(Role):
    """The run's books in a thread of their own, and in this one the training of rank 0, with that
    of its crew. It fails with what failed first; no worker has failed once the run is being stopped
    or is over."""

    def __init__(self, context: Context, index: int) -> None:
        assert context.folder is not None and context.summaries is not None
        self._context = context
        self._folder = context.folder
        self._failures: list[BaseException] = []
        closed = threading.Event()
        self._crew = Crew(
            context,
            context.job.crew(0),
            closed,
            self._worker_failed,
            context.summaries.of_steps(),
        )
        model = self._crew.first.worker.towers.model
        self._books = Books(context, model, closed, self._failures.append, context.summaries.watch)

    def run(self) -> None:
        self._books.start()
        try:
            if self._context.begins_at_once or self._books.wait_until_opened():
                self._crew.run()
        finally:
            self._books.join()
        for error in self._failures[1:]:
            self._context.records.log("master").error("failed as well", exc_info=error)
        if self._failures:
            raise self._failures[0]

    def progress(self) -> Progress:
        return {**self._crew.progress(), **self._books.progress()}

    def _worker_failed(self, role: WorkerRole, error: StepError) -> None:
        is_late = self._context.stop.is_set() or self._folder.state.exists()
        if is_late or role is not self._crew.first:  # whose log is the master's
            role.worker.log.error("failed", exc_info=error)
        if not is_late:
            self._failures.append(error)
            self._context.stop.set()  # the books end with a checkpoint of what there is


class EvaluatorRole(Role):
    """Without a folder it is on a machine of its own, and its console is what the user sees."""

    def __init__(self, context: Context, index: int) -> None:
        job, records = context.job, context.records
        self._context = context
        self._log = records.log("evaluator")
        self._evaluator = Evaluator(
            job,
            (context.model or job.make_model()).module,
            context.source or self._look_into_folder(),
            events=records.events("evaluator"),
            clock=context.clock,
            stop=context.stop,
            scored=self._scored,
            warn=self._warn,
            judge=make_referee(job, context.folder, context.say),
        )

    def run(self) -> None:
        if self._context.folder is not None:
            torch.set_num_threads(1)
        try:
            self._evaluator.run()
        except torch.OutOfMemoryError as error:
            ranks = ranks_here(self._context, "evaluator", 0)
            raise explained(error, self._context.job, ranks) from error

    def progress(self) -> Progress:
        if self._evaluator.latest is None:
            return {"score": None}
        version, scores = self._evaluator.latest
        return {"score": (version, scores.metric), "scores": dict(scores.values)}

    def _look_into_folder(self) -> FolderSource:
        config, folder = self._context.job.config, self._context.folder
        assert folder is not None
        return FolderSource(
            folder, config.eval_every, log=self._log, has_skipped=config.eval_skipped
        )

    def _scored(self, version: int, scores: Scores) -> None:
        context = self._context
        if context.folder is not None:
            words = ", ".join(f"{name} {value:.4f}" for name, value in scores.values.items())
            self._log.info("version %d: %s", version, words)
        elif context.say is not None:
            context.say(f"version {version}: {score_line(scores.values)}")
            context.records.flush()  # the servers may be about to leave
        if context.summaries is not None:
            context.summaries.scored(version, scores.values)

    def _warn(self, line: str) -> None:
        if self._context.folder is not None:
            self._log.warning(line)
        if self._context.say is not None:
            self._context.say(f"warning: {line}")


def _make_worker(context: Context, rank: int) -> Role:
    """With its crew, where it has one."""
    ranks = context.job.crew(rank)
    return WorkerRole(context, rank) if len(ranks) == 1 else CrewRole(context, ranks)


_KINDS: dict[str, Callable[[Context, int], Role]] = {
    "ps": ServerRole,
    "worker": _make_worker,
    "master": MasterRole,
    "evaluator": EvaluatorRole,
}


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
