"""What engines whose roles are processes have in common: lines to all of them, a supervisor that
decides, and a run's course from the first start to the last end.

Who starts a process, and where, is the engine's own affair: `local` on this machine, `ray` on the
nodes of a cluster. Every process has a line to this one (roles/control.py), over which it tells how
far it is, and ends by itself when that breaks: whatever happens to the engine, nobody is left.
"""

import dataclasses
import json
import selectors
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from offbeat.engines.base import REFRESH_S, STOPPING, Engine, status_of
from offbeat.engines.books import Books
from offbeat.engines.ordered import OrderTaker
from offbeat.engines.supervisor import (
    Blame,
    GiveUp,
    Member,
    StartAgain,
    Supervisor,
)
from offbeat.errors import NonFiniteLossError, RoleError, ScriptEndedError, ScriptRefusedError
from offbeat.roles.context import Progress
from offbeat.run.job import Job
from offbeat.run.orders import CHECKPOINT, STOP, Order
from offbeat.run.progress import Display, Status
from offbeat.run.rundir import RunFolder, role_name

NOT_BEGUN = "stopping: nothing was learned yet"
NUM_NAMES = 4
"""So many of those that are still starting are named."""
SAID_PLAINLY = {
    kind.__name__: kind for kind in (NonFiniteLossError, ScriptEndedError, ScriptRefusedError)
}
"""What a role fails with that says all there is to say."""
NUM_LOG_LINES = 5
"""So many of a dead process's last words are shown."""
SEND_TIMEOUT_S = 5.0
"""How long a process may take to take in a line; one that does not is hung."""
MAX_LINE_BYTES = 1 << 16


class Running(Protocol):
    """A process that has a role, or is about to."""

    def kill(self) -> None: ...

    def end(self, *, has_left: bool) -> str | None:
        """Wait for its end, which has begun; what does not end is killed. How it died, in words;
        None: in order, which takes that it said so (`has_left`)."""


@dataclass(eq=False)
class Process:
    """Who has a member's role now, and what was heard of it."""

    member: Member
    running: Running | None = None
    line: socket.socket | None = None
    unread: bytes = b""
    status: Progress = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    """What the processes that had this role before this one came to."""
    failure: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.member.name

    def total(self, key: str) -> int:
        return self.before.get(key, 0) + int(self.status.get(key, 0))

    def progress(self) -> Progress:
        """Of all that had this role."""
        return {**self.status, **{key: self.total(key) for key in ("steps", "examples")}}

    def kill(self) -> None:
        if self.running is not None:
            self.running.kill()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Where it has a line; one that takes nothing in is found to be gone, or silent."""
        if self.line is None:
            return
        try:
            self.line.settimeout(SEND_TIMEOUT_S)
            self.line.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return  # it is on its way out; the next look finds it gone


class SupervisedEngine(Engine):
    """Processes, and what becomes of them."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        display: Display,
        began_s: float,
        *,
        incarnation: int = 0,
    ) -> None:
        """`incarnation` is new to the run's checkpoints, where there are any."""
        super().__init__(dataclasses.replace(job, train=None, test=None))
        self.folder = folder
        self.display = display
        self._began_s = began_s
        self._incarnation = incarnation
        self._supervisor = Supervisor(
            _members_of(job, incarnation),
            max_restarts=job.config.max_restarts,
            silence_s=job.config.worker_timeout,
        )
        self._processes = {m: Process(m) for m in self._supervisor.members}
        self._selector = selectors.DefaultSelector()
        self._stop = threading.Event()
        self._books: Books | None = None
        self._standing: list[Order] = []
        """Orders that hold for whoever takes a role's place, too."""

    # -- what an engine has of its own ---------------------------------------------------------

    def _prepare(self) -> None:
        """Before anybody is started."""
        return

    @abstractmethod
    def _spawn(self, process: Process) -> None:
        """Start it: set `running`, and `_attach` its line, now or when it calls."""

    @abstractmethod
    def _write_cluster(self) -> None:
        """Tell everybody where the others are."""

    @abstractmethod
    def _close(self) -> None:
        """Everybody is gone: let go of what the engine has."""

    def _look(self) -> None:
        """Once in a while."""
        return

    def _hear(self, process: Process, message: Mapping[str, Any]) -> None:
        """What a process has to say."""
        if "line" in message:
            self.display.notice(message["line"])
        process.status.update(message.get("status", {}))
        process.failure = message.get("failed", process.failure)

    # -- the course of a run -------------------------------------------------------------------

    def clock(self) -> float:
        return time.monotonic() - self._began_s

    def run(self) -> None:
        self._books = Books(self.folder, self.clock)
        orders = OrderTaker(
            self.job,
            self.folder,
            record=self._record,
            carry_out=self._carry_out,
            ranks=lambda: [rank for m in self._supervisor.members for rank in m.ranks],
        )
        try:
            self._prepare()
            self._write_cluster()
            self._start_due()
            while any(process.running for process in self._processes.values()):
                self._go_on()
                orders.look()
        except KeyboardInterrupt:
            if self.interrupted:  # the second one: whoever called this is to end as well
                raise
            self.interrupted = True
            self.display.notice(NOT_BEGUN)
        except RoleError as error:
            self.failures.append(error)
        except OSError as error:
            self.failures.append(RoleError(f"cannot start the processes: {error}"))
        finally:
            self._end()
            self._books.close(self.outcome(), self.failures)
        if self.failures:
            raise self.failures[0]

    def stop(self) -> None:
        self.interrupted = True
        self._stop.set()

    def _carry_out(self, order: Order) -> None:
        self.display.notice(f"asked for: {order.words}")
        if order.what == STOP:
            self.stop()
            return
        if order.what != CHECKPOINT:
            self._standing.append(order)
        for process in self._processes.values():
            process.tell({"order": order.to_json()})

    def _go_on(self) -> None:
        """Listen for a moment, then look after everybody. The first Ctrl-C stops the run, the
        second gives up."""
        try:
            for key, _ in self._selector.select(REFRESH_S):
                if key.fileobj in self._selector.get_map():  # or it fell with one heard of just now
                    key.data()
            self._look()
            if self._stop.is_set():
                self._end_in_order()
            for member in self._supervisor.silent(time.monotonic()):
                self._processes[member].kill()
            for member in self._supervisor.overdue(time.monotonic()):
                self._say(f"{member.who} does not end by itself: killed")
                self._processes[member].kill()
            self._start_due()
            self.display.update(self.status())
        except KeyboardInterrupt:
            if self.interrupted:
                raise
            self.interrupted = True
            self.display.notice(STOPPING if self._has_begun() else NOT_BEGUN)
            self._end_in_order()

    def _start_due(self) -> None:
        for member in self._supervisor.due(has_begun=self._has_begun()):
            self._start(self._processes[member])

    def _end_in_order(self) -> None:
        ending = self._supervisor.stop(time.monotonic(), has_begun=self._has_begun())
        for member in ending.told:
            self._tell_to_stop(self._processes[member])
        for member in ending.killed:  # still starting: they would not hear it
            self._processes[member].kill()

    def _has_begun(self) -> bool:
        """Whether any worker has taken a step."""
        return any(process.total("steps") for process in self._processes.values())

    def _tell_to_stop(self, process: Process) -> None:
        process.tell({"stop": True})

    def _end(self) -> None:
        """Nobody is left when this returns."""
        self._end_processes(self._processes.values())
        self._selector.close()
        self._close()
        self.folder.cluster.unlink(missing_ok=True)
        self.display.update(self.status())
        self.display.close()

    def _end_processes(self, processes: Collection[Process]) -> None:
        for process in processes:
            process.kill()
        for process in processes:
            if process.running:
                process.running.end(has_left=False)
                process.running = None
            self._hang_up(process)

    # -- processes -----------------------------------------------------------------------------

    def _start(self, process: Process) -> None:
        process.unread = b""
        process.failure = None
        self._spawn(process)
        self._supervisor.started(process.member, time.monotonic())

    def _attach(self, process: Process, line: socket.socket) -> None:
        process.line = line
        self._watch(line, lambda: self._listen(process))
        for order in self._standing:
            process.tell({"order": order.to_json()})

    def _watch(self, line: socket.socket, react: Callable[[], None]) -> None:
        self._selector.register(line, selectors.EVENT_READ, react)

    def _listen(self, process: Process) -> None:
        assert process.line is not None
        try:
            received = process.line.recv(MAX_LINE_BYTES)
        except OSError:
            received = b""
        if not received:
            self._ended(process)
            return
        self._supervisor.heard(process.member, time.monotonic())
        *lines, process.unread = (process.unread + received).split(b"\n")
        for line in lines:
            self._hear(process, json.loads(line))

    def _ended(self, process: Process) -> None:
        """Its line is broken, so it is at its end: find out how it went, and what to do."""
        assert process.running is not None
        how = process.running.end(has_left=bool(process.status.get("left")))
        process.running = None
        self._hang_up(process)
        self._react(process, how)

    def _react(self, process: Process, how: str | None) -> None:
        """A process is gone: do what the supervisor makes of it."""
        member, supervisor = process.member, self._supervisor
        failed, committed = process.failure is not None, self.folder.state.exists()
        match supervisor.ended(member, how, has_failed=failed, is_over=committed):
            case StartAgain(reason, others):
                self._start_again(process, reason, [self._processes[other] for other in others])
            case GiveUp(reason):
                self._give_up(process, reason)
            case Blame():
                self._blame(process)
        committed = self.folder.state.exists()
        if member.role == "master" and (committed or supervisor.is_stopping):
            for other in supervisor.left_behind(is_over=committed):
                self._tell_to_stop(self._processes[other])

    def _blame(self, process: Process) -> None:
        failure = process.failure or {}
        if failure["kind"] in SAID_PLAINLY:
            self.failures.append(SAID_PLAINLY[failure["kind"]](failure["line"]))
        else:
            name, rank = process.name, failure["rank"]
            if rank not in (None, process.member.index):
                name = role_name("worker", rank)
            self.failures.append(self.folder.failure(name, failure["line"], failure["step"]))
        if process.member.is_needed:
            self._end_in_order()

    def _give_up(self, process: Process, how: str) -> None:
        most = self._supervisor.max_restarts
        self._say(*self._last_words(process))
        self._lose(process, f"{how}, and was started again {most} times before (--max-restarts)")

    def _lose(self, process: Process, how: str) -> None:
        """It will not come back, and if it is needed the run is over."""
        log = self.folder.logs / f"{process.name}.log"
        command = "launch" if "script" in self.folder.read_json(self.folder.config) else "train"
        self.failures.append(
            RoleError(
                f"{process.member.who} {how}; its log is {log}; go on with: offbeat {command} "
                f"--resume {self.folder.path}"
            )
        )
        if process.member.is_needed:
            self._end_in_order()

    def _start_again(self, process: Process, how: str, others: Sequence[Process]) -> None:
        """It, and those who fell with it, all of whom have to be gone before one is back."""
        member, most = process.member, self._supervisor.max_restarts
        whom = "all workers" if others else "it"
        self._say(
            f"{member.who} {how}: starting {whom} again ({member.num_restarts} of {most})",
            *self._last_words(process),
        )
        crew = {"crew": member.ranks} if len(member.ranks) > 1 else {}
        self._record("restart", role=member.role, index=member.index, **crew, reason=how)
        self._end_processes(others)
        for each in (process, *others):
            for key in ("steps", "examples"):
                each.before[key] = each.total(key)
            each.status = {}
        self._write_cluster()
        for each in (process, *others):
            self._start(each)

    def _record(self, phase: str, **more: Any) -> None:
        assert self._books is not None
        self._books.record(phase, **more)

    def _hang_up(self, process: Process) -> None:
        if process.line is not None:
            self._selector.unregister(process.line)
            process.line.close()
            process.line = None

    # -- what a person sees --------------------------------------------------------------------

    def _last_words(self, process: Process) -> list[str]:
        log = self.folder.logs / f"{process.name}.log"
        if not log.exists():  # it never came so far
            return []
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [f"    {line}" for line in lines[-NUM_LOG_LINES:]]

    def _say(self, *lines: str) -> None:
        for line in lines:
            self.display.notice(line)

    def status(self) -> Status:
        return status_of(self.job, self.clock(), self._progress, self._waits_for())

    def _progress(self, *roles: str) -> list[Progress]:
        return [p.progress() for m, p in self._processes.items() if m.role in roles]

    def _waits_for(self) -> str:
        """What it takes until there is a gradient."""
        needed = [process for member, process in self._processes.items() if member.is_needed]
        starting = [p.member.who for p in needed if not p.status.get("ready")]
        if not starting:
            return "the first gradient"
        more = len(starting) - NUM_NAMES
        return ", ".join(starting[:NUM_NAMES]) + (f" and {more} more" if more > 0 else "")


def _members_of(job: Job, incarnation: int) -> list[Member]:
    is_served = job.config.chosen.kind.served
    num_servers = job.config.servers if is_served else 0
    found = [Member("ps", index, incarnation) for index in range(num_servers)]
    for ranks in sorted({job.crew(rank) for rank in range(job.config.workers)}):
        role = "worker" if ranks[0] else "master"
        member = Member(role, ranks[0], incarnation, ranks=ranks, falls_with_others=not is_served)
        found.append(member)
    return [*found, Member("evaluator", 0, incarnation)] if job.facts.has_test else found
