"""What the engines have in common whose roles are threads of this process: `inproc`, where all of
them are, and `cluster`, which has the master and the evaluator here."""

import gc
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection

import torch

from offbeat.engines.base import REFRESH_S, STOPPING, Engine
from offbeat.engines.books import Books
from offbeat.engines.ordered import OrderTaker
from offbeat.errors import NonFiniteLossError, OffbeatError, StepError, in_a_line
from offbeat.roles.context import Context, FolderRecords, Progress
from offbeat.roles.run import Role, make_role
from offbeat.run.job import Job
from offbeat.run.orders import STOP, Order, Standing
from offbeat.run.progress import Display
from offbeat.run.rundir import RunFolder, role_name
from offbeat.run.tensorboard import Summaries

CLOSE_TIMEOUT_S = 10.0
"""How long each server may take to leave in the end."""


class RoleThread:
    """A role, and the thread that it will run in."""

    def __init__(self, name: str, role: Role, failed: Callable[[str, BaseException], None]) -> None:
        """`failed` is called with the name and the error, in the role's own thread."""
        self.name = name
        self.progress = role.progress
        self._role = role
        self._failed = failed
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._role.run()
        except BaseException as error:  # a user's sys.exit() ends no run well either
            self._failed(self.name, error)


class ThreadEngine(Engine):
    """`_go` is the course of a run; the rest is looking after it."""

    def __init__(
        self, job: Job, folder: RunFolder, display: Display, clock: Callable[[], float]
    ) -> None:
        super().__init__(job)
        self.folder = folder
        self.display = display
        self.clock = clock
        self._stop = threading.Event()
        """The master's."""
        self._over = threading.Event()
        """Nothing is left for servers and workers to wait for."""
        self._give_up = threading.Event()
        """The evaluator's."""
        self._records = FolderRecords(folder)
        self._summaries = Summaries(job, folder, self._records.log("master"), clock)
        self._threads: list[RoleThread] = []
        self._orders = Standing()
        self._taker: OrderTaker | None = None

    @abstractmethod
    def _go(self) -> None:
        """Start the roles, and `_watch` until they have ended."""

    def run(self) -> None:
        threads_before = torch.get_num_threads()
        books = Books(self.folder, self.clock)
        self._taker = OrderTaker(
            self.job,
            self.folder,
            record=books.record,
            carry_out=self._carry_out,
            ranks=self._ranks_here,
        )
        try:
            self._go()
        except KeyboardInterrupt:
            self.interrupted = True
            raise
        finally:
            self._end(threads_before)
            books.close(self.outcome(), self.failures)
        if self.failures:
            raise self.failures[0]

    def stop(self) -> None:
        self._stop.set()

    @abstractmethod
    def _ranks_here(self) -> Collection[int]:
        """The workers that are threads of this process."""

    def _carry_out(self, order: Order) -> None:
        self.display.notice(f"asked for: {order.words}")
        if order.what == STOP:
            self.interrupted = True
            self.stop()
        else:
            self._orders.tell({"order": order.to_json()})

    def _make(self, context: Context, role: str, index: int = 0) -> RoleThread:
        name = role_name(role, index)
        made = RoleThread(name, make_role(context, role, index), self._role_failed)
        self._threads.append(made)
        return made

    def _watch(self, condition: Callable[[], bool]) -> None:
        """Show progress as long as this holds. The only place where the main thread waits:
        the first Ctrl-C stops the run, the second gives up."""
        tick = threading.Event()
        while condition():
            try:
                self.display.update(self.status())
                tick.wait(REFRESH_S)
                self._records.flush()
                if self._taker is not None:
                    self._taker.look()
            except KeyboardInterrupt:
                if self.interrupted:
                    raise
                self.interrupted = True
                self.display.notice(STOPPING)
                self.stop()

    def _let_go(self) -> None:
        """The master has left: so do servers and workers, and where there is no last checkpoint,
        or the user does not want to wait for its score, the evaluator."""
        self._over.set()
        if self.interrupted or not self.folder.state.exists():
            self._give_up.set()

    def _end(self, threads_before: int) -> None:
        for event in (self._stop, self._over, self._give_up):
            event.set()
        for thread in self._threads:
            if thread.name.startswith("ps-"):  # others may be in the midst of a user's function
                thread.join()
        torch.set_num_threads(threads_before)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            gc.collect()  # what was recorded holds on to itself, and to a GPU's memory
        self.display.update(self.status())
        self._close()

    def _close(self) -> None:
        self.display.close()
        self._summaries.close()
        self._records.close()

    def _role_failed(self, name: str, error: BaseException) -> None:
        """A server's failure comes first: what the others then complain of follows from it."""
        if isinstance(error, StepError):
            self._worker_failed("worker-0" if name == "master" else name, error)
            return
        self._records.log(name).error("failed", exc_info=error)
        failure = self.folder.failure(name, in_a_line(error))
        self.failures.insert(0 if name.startswith("ps-") else len(self.failures), failure)
        if name != "evaluator":  # which nobody depends on
            self.stop()

    def _worker_failed(self, name: str, error: StepError) -> None:
        cause = error.__cause__ or error
        self._records.log(name).error("failed", exc_info=cause)
        if name != "worker-0" and (self._stop.is_set() or self.folder.state.exists()):
            return  # it went down with a run that had failed already, or was over
        failure: OffbeatError = self.folder.failure(name, in_a_line(cause), error.step)
        self.failures.append(cause if isinstance(cause, NonFiniteLossError) else failure)
        self.stop()

    def _progress(self, *kinds: str) -> list[Progress]:
        """Of the roles whose names begin so."""
        return [thread.progress() for thread in self._threads if thread.name.startswith(kinds)]
