"""The engine `inproc`: servers, workers, master and evaluator as threads of this process.

Called by the api. `run` returns when the job is over, one way or another, with nothing left
running: workers finish, servers drain, the master commits the last checkpoint, the evaluator scores
it.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offbeat.disciplines import make_discipline
from offbeat.errors import NonFiniteLossError, OffbeatError, RoleError, in_a_line
from offbeat.events import EventLog
from offbeat.flat import FlatModel
from offbeat.job import Job
from offbeat.progress import Display, Status
from offbeat.roles.evaluator import Evaluator, metric_name
from offbeat.roles.master import Master
from offbeat.roles.server import Server
from offbeat.roles.worker import Worker
from offbeat.rundir import RunFolder, close_log
from offbeat.transport.inproc import InprocListener, InprocWorkerEnd

CONNECT_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 60.0
REFRESH_S = 0.1


class InprocEngine:
    """One job in one process; used once. `replicas`: one model for each worker, and one more."""

    def __init__(
        self,
        job: Job,
        replicas: Sequence[FlatModel],
        folder: RunFolder,
        display: Display,
        clock: Callable[[], float],
    ) -> None:
        self.job = job
        self.folder = folder
        self.display = display
        self.clock = clock
        self.stop = threading.Event()
        self.interrupted = False
        self.failures: list[OffbeatError] = []
        self._event_logs: list[EventLog] = []
        self._logs: list[logging.Logger] = []
        self._listeners = [InprocListener() for _ in job.slices]
        self._books = self._events("master")
        *of_workers, initial = replicas
        self.servers = [self._make_server(k, initial) for k in range(job.config.servers)]
        self.workers = [self._make_worker(rank, model) for rank, model in enumerate(of_workers)]
        frozen = initial.frozen()
        self.evaluator = self._make_evaluator(initial)
        self.master = self._make_master(frozen)

    def run(self) -> None:
        """Raises what the run failed with, after everything has been ended and kept."""
        threads_before = torch.get_num_threads()
        self._books.record("run", phase="start", at_s=self.clock())
        try:
            for server in self.servers:
                server.start()
            self.master.commit_now()  # before anybody trains: version 0 of every shard
            master = self._start(
                "master", self.master.run, self._role_failed("master", self.master.log)
            )
            evaluator = self._start_evaluator()
            self._watch(
                [
                    self._start(f"worker-{w.rank}", w.run, self._worker_failed(w))
                    for w in self.workers
                ]
            )
            finish = lambda: self._finish(master, evaluator)  # noqa: E731
            self._watch(
                [self._start("finish", finish, self._role_failed("master", self.master.log))]
            )
        except KeyboardInterrupt:
            self.interrupted = True
            raise
        except OffbeatError as error:
            self.failures.append(error)
        finally:
            self._end(threads_before)
        if self.failures:
            raise self.failures[0]

    # -- the course of a run -------------------------------------------------------------------

    def _watch(self, threads: Sequence[threading.Thread]) -> None:
        """Show progress until these threads are done. The only place where the main thread waits:
        the first Ctrl-C stops the workers, the second gives up."""
        self.display.update(self._status())
        while any(thread.is_alive() for thread in threads):
            try:
                for thread in threads:
                    thread.join(REFRESH_S / len(threads))
                self.display.update(self._status())
                for log in self._event_logs:
                    log.flush()
                self._look_for_failed_servers()
            except KeyboardInterrupt:
                if self.interrupted:
                    raise
                self.interrupted = True
                self.display.notice("stopping: keeping what was learned; Ctrl-C again to give up")
                self.stop.set()

    def _finish(self, master: threading.Thread, evaluator: threading.Thread | None) -> None:
        """Every accepted gradient is applied; then the last checkpoint, then its score."""
        for server in self.servers:
            if not server.drain(DRAIN_TIMEOUT_S):
                self.failures.append(RoleError(f"server {server.index} did not come to an end"))
        self.master.finish()
        master.join()
        try:
            self.master.commit_now()
        except OffbeatError as error:
            self.failures.append(error)
        if self.evaluator and evaluator:
            self.evaluator.finish()
            evaluator.join()

    def _end(self, threads_before: int) -> None:
        self.stop.set()
        for server in self.servers:
            server.close()
        self._look_for_failed_servers()
        torch.set_num_threads(threads_before)
        self.display.update(self._status())
        self.display.close()
        status = "failed" if self.failures else "interrupted" if self.interrupted else "finished"
        self._books.record("run", phase="end", status=status, at_s=self.clock())
        for events in self._event_logs:
            events.close()
        for log in self._logs:
            close_log(log)

    # -- making the roles ----------------------------------------------------------------------

    def _make_server(self, index: int, initial: FlatModel) -> Server:
        config = self.job.config
        discipline = make_discipline(
            config.discipline,
            range(config.workers),
            backup_workers=config.backup_workers,
            round_timeout_s=config.round_timeout,
            staleness=config.staleness or 0,
        )
        return Server(
            self.job.make_shard(index, initial),
            discipline,
            self._listeners[index],
            index=index,
            fingerprint=self.job.fingerprint,
            **self._means(f"ps-{index}"),
        )

    def _make_worker(self, rank: int, model: FlatModel) -> Worker:
        means = self._means(f"worker-{rank}")
        return Worker(self.job, rank, model, self._connect, stop=self.stop, **means)

    def _make_master(self, frozen: dict[str, torch.Tensor]) -> Master:
        return Master(
            self.job,
            self.servers,
            self.folder.checkpoints,
            frozen,
            committed=self.evaluator.notify if self.evaluator else lambda path: None,
            events=self._books,
            log=self._log("master"),
            clock=self.clock,
        )

    def _make_evaluator(self, model: FlatModel) -> Evaluator | None:
        if self.job.test is None:
            return None
        return Evaluator(self.job, model.module, **self._means("evaluator"))

    def _connect(self, rank: int, model: FlatModel) -> list[InprocWorkerEnd]:
        """Join every server; the replies land in the model's own memory."""
        hello = {"worker": rank, "incarnation": 0, "fingerprint": self.job.fingerprint}
        return [
            listener.connect(
                hello, self.job.layout(k), CONNECT_TIMEOUT_S, params=model.params[lo:hi]
            )
            for k, (listener, (lo, hi)) in enumerate(
                zip(self._listeners, self.job.slices, strict=True)
            )
        ]

    def _means(self, role: str) -> dict[str, Any]:
        return {"events": self._events(role), "log": self._log(role), "clock": self.clock}

    def _events(self, role: str) -> EventLog:
        log = EventLog(self.folder.events / f"{role}.jsonl")
        self._event_logs.append(log)
        return log

    def _log(self, role: str) -> logging.Logger:
        log = self.folder.open_log(role)
        self._logs.append(log)
        return log

    # -- failures and progress -----------------------------------------------------------------

    def _start(
        self, name: str, body: Callable[[], None], failed: Callable[[BaseException], None]
    ) -> threading.Thread:
        def run() -> None:
            try:
                body()
            except (Exception, SystemExit) as error:  # a user's sys.exit() ends no run well
                failed(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _start_evaluator(self) -> threading.Thread | None:
        if self.evaluator is None:
            return None
        return self._start(
            "evaluator", self.evaluator.run, self._role_failed("evaluator", self.evaluator.log)
        )

    def _worker_failed(self, worker: Worker) -> Callable[[BaseException], None]:
        def failed(error: BaseException) -> None:
            worker.log.error("failed", exc_info=error)
            if self.stop.is_set():
                return  # it went down with a run that had failed already
            if isinstance(error, NonFiniteLossError):
                self.failures.append(error)
            else:
                role, step = f"worker-{worker.rank}", f" at step {worker.step}"
                self.failures.append(self._failure(role, error, step))
            self.stop.set()

        return failed

    def _role_failed(self, role: str, log: logging.Logger) -> Callable[[BaseException], None]:
        def failed(error: BaseException) -> None:
            log.error("failed", exc_info=error)
            self.failures.append(self._failure(role, error))

        return failed

    def _failure(self, role: str, error: BaseException, when: str = "") -> RoleError:
        kind, _, number = role.partition("-")
        who = f"{'server' if kind == 'ps' else kind} {number}" if number else f"the {kind}"
        log = self.folder.logs / f"{role}.log"
        return RoleError(f"{who} failed{when}: {in_a_line(error)}; the traceback is in {log}")

    def _look_for_failed_servers(self) -> None:
        """A server's failure comes first: what the workers then complain of follows from it."""
        for server in self.servers:
            if server.failure is not None:
                self.failures.insert(0, self._failure(f"ps-{server.index}", server.failure))
                server.failure = None
                self.stop.set()

    def _status(self) -> Status:
        stats = [worker.stats for worker in self.workers]
        losses = [s.loss for s in stats if s.num_steps]
        staleness = [s for server in self.servers for s in list(server.recent_staleness)]
        return Status(
            num_gradients=sum(s.num_steps for s in stats),
            num_examples=sum(s.num_examples for s in stats),
            at_s=self.clock(),
            loss=sum(losses) / len(losses) if losses else None,
            staleness=sum(staleness) / len(staleness) if staleness else None,
            metric_name=metric_name(self.job.recipe),
            score=self.evaluator.latest if self.evaluator else None,
        )
