"""The engine `inproc`: servers, workers, master and evaluator as threads of this process.

Called by the api. `run` returns when the job is over, one way or another, with nothing left
running: workers finish, the master commits the last checkpoint, servers leave, the evaluator scores
it. In a cluster it runs the master's part of it: there the servers and the other workers are
elsewhere, and `engines/cluster.py` knows how to reach them.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offbeat.engines.books import Books
from offbeat.errors import NonFiniteLossError, OffbeatError, in_a_line
from offbeat.events import EventLog
from offbeat.flat import FlatModel
from offbeat.job import Job
from offbeat.progress import Display, Status
from offbeat.roles.evaluator import Evaluator, metric_name
from offbeat.roles.exchange import CONNECT_TIMEOUT_S
from offbeat.roles.master import Master, Patience
from offbeat.roles.master import Status as ServerStatus
from offbeat.roles.server import Server
from offbeat.roles.worker import Worker
from offbeat.rundir import RunFolder, close_log
from offbeat.summaries import Summaries
from offbeat.transport.base import Listener, Network
from offbeat.transport.inproc import InprocListener, InprocNetwork

REFRESH_S = 0.1


@dataclass
class Elsewhere:
    """How a master that was started by hand reaches the rest of its run."""

    network: Network
    patience: Patience
    start_timeout_s: float
    failed: Callable[[str], None] = lambda line: None
    """To be called with what a worker elsewhere says that its loss became."""


class InprocEngine:
    """One job in one process; used once. `replicas`: one model for each worker, and one more."""

    def __init__(
        self,
        job: Job,
        replicas: Sequence[FlatModel],
        folder: RunFolder,
        display: Display,
        clock: Callable[[], float],
        *,
        incarnation: int = 0,
        elsewhere: "Elsewhere | None" = None,
    ) -> None:
        """`incarnation` is new to the run's checkpoints, where there are any. `elsewhere`: where
        the servers are, if not here; then only rank 0 works here."""
        self.job = job
        self.folder = folder
        self.display = display
        self.clock = clock
        self.stop = threading.Event()
        """Ends the run, with a checkpoint."""
        self.interrupted = False
        self.failures: list[OffbeatError] = []
        self._give_up = threading.Event()
        self._over = threading.Event()
        """Nothing is left for the workers to wait for."""
        self._event_logs: list[EventLog] = []
        self._logs: list[logging.Logger] = []
        self._statuses: Sequence[ServerStatus] = ()
        *of_workers, initial = replicas
        means = self._means("master")
        self._summaries = Summaries(job, folder, means["log"], clock)
        of_steps = self._summaries.of_steps()
        network: Network
        if elsewhere is None:
            listeners = [InprocListener() for _ in job.slices]
            network = InprocNetwork(listeners)
            self.servers = [self._make_server(k, door) for k, door in enumerate(listeners)]
            master = Master(
                job, network, folder, initial, stop=self.stop, watch=self._seen, **means
            )
        else:
            network = elsewhere.network
            self.servers = []
            elsewhere.failed = self._worker_failed_elsewhere
            master = Master(
                job,
                network,
                folder,
                initial,
                stop=self.stop,
                watch=self._seen,
                patience=elsewhere.patience,
                connect_timeout_s=elsewhere.start_timeout_s,
                **means,
            )
        self.master = master
        self.workers = [
            Worker(
                job,
                rank,
                job.make_towers(rank, model),
                network,
                stop=self._over,
                incarnation=incarnation,
                summaries=of_steps if rank == 0 else None,
                say=display.notice if rank == 0 else None,
                seeds_torch=elsewhere is not None,
                connect_timeout_s=elsewhere.start_timeout_s if elsewhere else CONNECT_TIMEOUT_S,
                **self._means(f"worker-{rank}"),
            )
            for rank, model in enumerate(of_workers)
        ]
        self.evaluator = self._make_evaluator(initial)

    def run(self) -> None:
        """Raises what the run failed with, after everything has been ended and kept."""
        threads_before = torch.get_num_threads()
        books = Books(self.folder, self.clock)
        try:
            for server in self.servers:
                server.start()
            master = self._start("master", self.master.run, self._role_failed("master"))
            self._watch(lambda: master.is_alive() and not self.master.opened.is_set())
            evaluator = self._start_evaluator() if self.servers else None
            begins = self.master.opened.is_set()  # or the servers may be somebody else's
            workers = [
                self._start(f"worker-{w.rank}", w.run, self._worker_failed(w))
                for w in self.workers
                if begins
            ]
            self._watch(master.is_alive)
            for server in self.servers:
                server.close()  # a worker that still trains is told that the run is over
            self._over.set()  # also where a server is away that could tell them
            if self.interrupted or not self.folder.state.exists():
                self._give_up.set()
            self._watch(lambda: any(thread.is_alive() for thread in workers))
            if not self.servers:  # rank 0 needed the machine until now
                evaluator = self._start_evaluator()
            self._watch(lambda: evaluator is not None and evaluator.is_alive())
        except KeyboardInterrupt:
            self.interrupted = True
            raise
        finally:
            self._end(threads_before)
            books.close("failed" if self.failures else self._outcome(), self.failures)
        if self.failures:
            raise self.failures[0]

    # -- the course of a run -------------------------------------------------------------------

    def _watch(self, condition: Callable[[], bool]) -> None:
        """Show progress as long as this holds. The only place where the main thread waits:
        the first Ctrl-C stops the run, the second gives up."""
        tick = threading.Event()
        while condition():
            try:
                self.display.update(self._status())
                tick.wait(REFRESH_S)
                for log in self._event_logs:
                    log.flush()
                self._look_for_failed_servers()
            except KeyboardInterrupt:
                if self.interrupted:
                    raise
                self.interrupted = True
                self.display.notice("stopping: keeping what was learned; Ctrl-C again to give up")
                self.stop.set()

    def _end(self, threads_before: int) -> None:
        self.stop.set()
        self._over.set()
        self._give_up.set()
        for server in self.servers:
            server.close()
        self._look_for_failed_servers()
        torch.set_num_threads(threads_before)
        self.display.update(self._status())
        self.display.close()
        self._summaries.close()
        for events in self._event_logs:
            events.close()
        for log in self._logs:
            close_log(log)

    def _outcome(self) -> str:
        return "interrupted" if self.interrupted else "finished"

    # -- making the roles ----------------------------------------------------------------------

    def _make_server(self, index: int, listener: Listener) -> Server:
        return Server(
            self.job.make_shard(index),
            self.job.make_discipline(),
            listener,
            index=index,
            agreement=self.job.agreement,
            worker_timeout_s=self.job.config.worker_timeout,
            **self._means(f"ps-{index}"),
        )

    def _make_evaluator(self, model: FlatModel) -> Evaluator | None:
        if self.job.test is None:
            return None
        return Evaluator(
            self.job,
            model.module,
            self.folder,
            stop=self._give_up,
            scored=self._summaries.scored,
            say=self.display.notice,
            **self._means("evaluator"),
        )

    def _means(self, role: str) -> dict[str, Any]:
        events = EventLog.create(self.folder.events, role)
        self._event_logs.append(events)
        log = self.folder.open_log(role)
        self._logs.append(log)
        return {"events": events, "log": log, "clock": self.clock}

    # -- failures and progress -----------------------------------------------------------------

    def _start(
        self, name: str, body: Callable[[], object], failed: Callable[[BaseException], None]
    ) -> threading.Thread:
        def run() -> None:
            try:
                body()
            except BaseException as error:  # a user's sys.exit() ends no run well either
                failed(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _start_evaluator(self) -> threading.Thread | None:
        if self.evaluator is None:
            return None
        return self._start("evaluator", self.evaluator.run, self._role_failed("evaluator"))

    def _worker_failed(self, worker: Worker) -> Callable[[BaseException], None]:
        def failed(error: BaseException) -> None:
            worker.log.error("failed", exc_info=error)
            if self.stop.is_set() or self.folder.state.exists():
                return  # it went down with a run that had failed already, or was over
            if isinstance(error, NonFiniteLossError):
                self.failures.append(error)
            else:
                line, role = in_a_line(error), f"worker-{worker.rank}"
                self.failures.append(self.folder.failure(role, line, worker.step))
            self.stop.set()

        return failed

    def _worker_failed_elsewhere(self, line: str) -> None:
        """A loss that is no number any more: the run is to stop."""
        if not self.stop.is_set():
            self.failures.append(NonFiniteLossError(line))
            self.stop.set()

    def _role_failed(self, role: str) -> Callable[[BaseException], None]:
        log = next(log for log in self._logs if log.name == role)

        def failed(error: BaseException) -> None:
            log.error("failed", exc_info=error)
            self.failures.append(self.folder.failure(role, in_a_line(error)))

        return failed

    def _look_for_failed_servers(self) -> None:
        """A server's failure comes first: what the others then complain of follows from it."""
        for server in self.servers:
            if server.failure is not None:
                line = in_a_line(server.failure)
                self.failures.insert(0, self.folder.failure(f"ps-{server.index}", line))
                server.failure = None
                self.stop.set()

    def _seen(self, statuses: Sequence[ServerStatus]) -> None:
        self._statuses = statuses
        self._summaries.watch(statuses)

    def _status(self) -> Status:
        stats = [worker.stats for worker in self.workers]
        losses = [s.loss for s in stats if s.num_steps]
        staleness = [s for server in self.servers for s in list(server.recent_staleness)]
        num_gradients = sum(s.num_steps for s in stats)
        num_examples = sum(s.num_examples for s in stats)
        if not self.servers:
            updates = max((s.version for s in self._statuses), default=0)
            num_gradients = updates * self.job.make_discipline().gradients_per_update
            num_examples = num_gradients * self.job.step_size
            staleness = [s for status in self._statuses for s in status.staleness]
        return Status(
            num_gradients=num_gradients,
            num_examples=num_examples,
            at_s=self.clock(),
            loss=sum(losses) / len(losses) if losses else None,
            staleness=sum(staleness) / len(staleness) if staleness else None,
            metric_name=metric_name(self.job.recipe),
            score=self.evaluator.latest if self.evaluator else None,
            waits_for="the first gradient" if self.master.opened.is_set() else "the servers",
        )
