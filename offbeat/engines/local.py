"""The engine `local`: every role is a process of this machine, started as

    python -m offbeat role ps|master|worker|evaluator --index I --run-dir RUN

or forked by a process that has imported everything by then, which comes to the same
(forkserver.py). Workers of one crew (run/crews.py) are threads of one such process.

Called by the api. It starts them, shows progress, and does what the supervisor says when one dies
or fails. It takes no part in training. Each process has a line to this one (roles/control.py) and
ends by itself when that breaks: whatever happens to the engine, nobody is left behind.
"""

import dataclasses
import io
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from offbeat.data.shared import share
from offbeat.engines.base import REFRESH_S, STOPPING, Engine, status_of
from offbeat.engines.books import Books
from offbeat.engines.forkserver import ForkServer, role_environment
from offbeat.engines.supervisor import (
    KILL_TIMEOUT_S,
    Blame,
    GiveUp,
    Member,
    StartAgain,
    Supervisor,
)
from offbeat.errors import NonFiniteLossError, RoleError, ScriptEndedError
from offbeat.roles.context import Progress
from offbeat.roles.control import CONTROL_VARIABLE, DATA_VARIABLE
from offbeat.run.addresses import Cluster
from offbeat.run.job import Job
from offbeat.run.progress import Display, Status
from offbeat.run.rundir import RunFolder, role_name

NOT_BEGUN = "stopping: nothing was learned yet"
NUM_NAMES = 4
"""So many of those that are still starting are named."""
SAID_PLAINLY = {kind.__name__: kind for kind in (NonFiniteLossError, ScriptEndedError)}
"""What a role fails with that says all there is to say."""
NUM_LOG_LINES = 5
"""So many of a dead process's last words are shown."""


class _Running(Protocol):
    """A Popen, or what a fork server started."""

    def kill(self) -> None: ...
    def wait(self, timeout_s: float, /) -> int | None: ...


@dataclass(eq=False)
class _Process:
    """Who has a member's role now, and what was heard of it."""

    member: Member
    running: _Running | None = None
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


class LocalEngine(Engine):
    """Processes of this machine. Takes the job's data over."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        display: Display,
        began_s: float,
        *,
        lock: int,
        forks: ForkServer | None,
        incarnation: int = 0,
        shows_rank_0: bool = False,
    ) -> None:
        """`lock` holds the run's folder, and is passed on to the processes; `forks` starts them,
        and is the caller's; `incarnation` is new to the run's checkpoints, where there are any.
        `shows_rank_0`: what its process prints goes where this one's does, not to its log."""
        super().__init__(dataclasses.replace(job, train=None, test=None))
        self.folder = folder
        self.display = display
        train = None if job.facts.by_rank else job.train
        self._data = share({"train": train, "test": job.test})
        self._lock = lock
        self._forks = forks
        self._shows_rank_0 = shows_rank_0
        self._began_s = began_s
        self._key = secrets.token_hex(6)
        self._sockets = _SocketFolder()
        self._supervisor = Supervisor(
            _members_of(job, incarnation),
            max_restarts=job.config.max_restarts,
            silence_s=job.config.worker_timeout,
        )
        self._processes = {m: _Process(m) for m in self._supervisor.members}
        self._selector = selectors.DefaultSelector()
        self._stop = threading.Event()
        self._books: Books | None = None

    def clock(self) -> float:
        return time.monotonic() - self._began_s

    def run(self) -> None:
        self._books = Books(self.folder, self.clock)
        try:
            self._write_cluster()
            self._start_due()
            while any(process.running for process in self._processes.values()):
                self._go_on()
        except KeyboardInterrupt:
            if self.interrupted:  # the second one: whoever called this is to end as well
                raise
            self.interrupted = True
            self.display.notice(NOT_BEGUN)
        except OSError as error:
            self.failures.append(RoleError(f"cannot start the processes: {error}"))
        finally:
            self._end()
            self._books.close(self.outcome(), self.failures)
        if self.failures:
            raise self.failures[0]

    def stop(self) -> None:
        self._stop.set()

    # -- the course of a run -------------------------------------------------------------------

    def _go_on(self) -> None:
        """Listen for a moment, then look after everybody. The first Ctrl-C stops the run, the
        second gives up."""
        try:
            for key, _ in self._selector.select(REFRESH_S):
                self._listen(key.data)
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

    def _tell_to_stop(self, process: _Process) -> None:
        if process.line is not None:
            try:
                process.line.send(b'{"stop": true}\n', socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                return  # it is on its way out; the next look finds it gone

    def _end(self) -> None:
        """Nobody is left when this returns."""
        for process in self._processes.values():
            if process.running:
                process.running.kill()
                process.running.wait(KILL_TIMEOUT_S)
            self._hang_up(process)
        self._selector.close()
        self._sockets.close()
        os.close(self._data)
        self.folder.cluster.unlink(missing_ok=True)
        self.display.update(self.status())
        self.display.close()

    # -- processes -----------------------------------------------------------------------------

    def _start(self, process: _Process) -> None:
        ours, theirs = socket.socketpair()
        log = self.folder.logs / f"{process.name}.log"
        command = ["role", process.member.role, "--index", str(process.member.index)]
        command += ["--run-dir", str(self.folder.path)]
        descriptors = (theirs.fileno(), self._data, self._lock)
        with theirs, log.open("ab", buffering=0) as output:
            is_shown = self._shows_rank_0 and process.member.role == "master"
            outputs = (1, 2) if is_shown else (output.fileno(), output.fileno())
            process.running = self._fork(command, descriptors, outputs, output) or self._popen(
                command, descriptors, outputs
            )
        self._supervisor.started(process.member, time.monotonic())
        process.line = ours
        process.unread = b""
        process.failure = None
        self._selector.register(ours, selectors.EVENT_READ, process)

    def _fork(
        self,
        command: list[str],
        descriptors: tuple[int, ...],
        outputs: tuple[int, int],
        log: io.FileIO,
    ) -> _Running | None:
        if self._forks is None:
            return None
        found = self._forks.spawn(command, role_environment(), (*descriptors, *outputs))
        if found is None:
            log.write(f"not forked by the fork server: {self._forks.why_not}\n".encode())
        return found

    def _popen(
        self, command: list[str], descriptors: tuple[int, ...], outputs: tuple[int, int]
    ) -> _Running:
        line, data, _ = descriptors
        return subprocess.Popen(
            [sys.executable, "-m", "offbeat", *command],
            stdin=subprocess.DEVNULL,
            stdout=outputs[0],
            stderr=outputs[1],
            env=role_environment() | {CONTROL_VARIABLE: str(line), DATA_VARIABLE: str(data)},
            pass_fds=descriptors,
            start_new_session=True,  # Ctrl-C is for the engine, which ends them in order
        )

    def _listen(self, process: _Process) -> None:
        assert process.line is not None
        try:
            received = process.line.recv(65536)
        except OSError:
            received = b""
        if not received:
            self._ended(process)
            return
        self._supervisor.heard(process.member, time.monotonic())
        *lines, process.unread = (process.unread + received).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "line" in message:
                self.display.notice(message["line"])
            process.status.update(message.get("status", {}))
            process.failure = message.get("failed", process.failure)

    def _ended(self, process: _Process) -> None:
        """Its line is broken, so it is at its end: find out how it went, and what to do."""
        assert process.running is not None
        try:
            code = process.running.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.running.kill()
            code = process.running.wait(KILL_TIMEOUT_S)
        has_left = bool(process.status.get("left"))
        if code is None and has_left:
            code = 0
        process.running = None
        self._hang_up(process)
        self._react(process, None if code == 0 and has_left else _how(code))

    def _react(self, process: _Process, how: str | None) -> None:
        """A process is gone: do what the supervisor makes of it."""
        member, supervisor = process.member, self._supervisor
        failed, committed = process.failure is not None, self.folder.state.exists()
        match supervisor.ended(member, how, has_failed=failed, is_over=committed):
            case StartAgain(reason):
                self._start_again(process, reason)
            case GiveUp(reason):
                self._give_up(process, reason)
            case Blame():
                self._blame(process)
        committed = self.folder.state.exists()
        if member.role == "master" and (committed or supervisor.is_stopping):
            for other in supervisor.left_behind(is_over=committed):
                self._tell_to_stop(self._processes[other])

    def _blame(self, process: _Process) -> None:
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

    def _give_up(self, process: _Process, how: str) -> None:
        log = self.folder.logs / f"{process.name}.log"
        most = self._supervisor.max_restarts
        self._say(*self._last_words(process))
        command = "launch" if "script" in self.folder.read_json(self.folder.config) else "train"
        self.failures.append(
            RoleError(
                f"{process.member.who} {how}, and was started again {most} times before "
                f"(--max-restarts); its log is {log}; go on with: offbeat {command} --resume "
                f"{self.folder.path}"
            )
        )
        if process.member.is_needed:
            self._end_in_order()

    def _start_again(self, process: _Process, how: str) -> None:
        member, most = process.member, self._supervisor.max_restarts
        self._say(
            f"{member.who} {how}: starting it again ({member.num_restarts} of {most})",
            *self._last_words(process),
        )
        assert self._books is not None
        crew = {"crew": member.ranks} if len(member.ranks) > 1 else {}
        self._books.record("restart", role=member.role, index=member.index, **crew, reason=how)
        for key in ("steps", "examples"):
            process.before[key] = process.total(key)
        process.status = {}
        self._write_cluster()
        self._start(process)

    def _write_cluster(self) -> None:
        """Where everybody is. A server of another epoch has another address, in case the old one is
        still taken."""
        servers = self._supervisor.find("ps")
        workers = {rank: m.generation for m in self._supervisor.members for rank in m.ranks}
        Cluster(
            ps=tuple(self._address(server) for server in servers),
            epochs=tuple(server.generation for server in servers),
            incarnations=tuple(workers[rank] for rank in sorted(workers)),
            began_s=self._began_s,
        ).write(self.folder)

    def _address(self, server: Member) -> str:
        return self._sockets.address(f"{self._key}-{server.index}-{server.generation}")

    def _hang_up(self, process: _Process) -> None:
        if process.line is not None:
            self._selector.unregister(process.line)
            process.line.close()
            process.line = None

    # -- what a person sees --------------------------------------------------------------------

    def _last_words(self, process: _Process) -> list[str]:
        log = self.folder.logs / f"{process.name}.log"
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
    found = [Member("ps", index, incarnation) for index in range(job.config.servers)]
    for ranks in sorted({job.crew(rank) for rank in range(job.config.workers)}):
        role = "worker" if ranks[0] else "master"
        found.append(Member(role, ranks[0], incarnation, ranks=ranks))
    return [*found, Member("evaluator", 0, incarnation)] if job.facts.has_test else found


class _SocketFolder:
    """Names for sockets. Linux has a namespace for them without files; elsewhere they lie in a
    short-named folder that only this user can enter, and that is removed in the end."""

    def __init__(self) -> None:
        self._folder = None if sys.platform == "linux" else Path(tempfile.mkdtemp(prefix="ob"))

    def address(self, name: str) -> str:
        if self._folder is None:
            return f"unix:@offbeat-{name}"
        return f"unix:{self._folder / name}"

    def close(self) -> None:
        if self._folder is not None:
            for path in self._folder.iterdir():
                path.unlink()
            self._folder.rmdir()


def _how(code: int | None) -> str:
    if code is None:
        return "is gone, as is the fork server that would know why"
    if code == 0:
        return "ended with 0 before it was through"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
