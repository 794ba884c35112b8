"""The engine `local`: every role is a process of this machine, started as

    python -m offbeat role ps|master|worker|evaluator --index I --run-dir RUN

or forked by a process that has imported everything by then, which comes to the same
(forkserver.py).

Called by the api. It starts them, shows progress, starts again what dies, and ends what has to be
ended. It takes no part in training. Each process has a line to this one (control.py) and ends by
itself when that breaks: whatever happens to the engine, nobody is left behind.
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
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from offbeat.cluster import Cluster
from offbeat.control import CONTROL_VARIABLE, DATA_VARIABLE
from offbeat.data.shared import share
from offbeat.engines.books import Books
from offbeat.engines.forkserver import ForkServer, role_environment
from offbeat.errors import NonFiniteLossError, OffbeatError, RoleError
from offbeat.job import Job
from offbeat.progress import Display, Status
from offbeat.roles.evaluator import metric_name
from offbeat.rundir import RunFolder, in_words

REFRESH_S = 0.1
STOP_TIMEOUT_S = 3.5
"""How long a run that is being stopped may take before what is left of it is killed."""
KILL_TIMEOUT_S = 10.0
NOT_BEGUN = "stopping: nothing was learned yet"
NUM_NAMES = 4
"""So many of those that are still starting are named."""
NUM_LOG_LINES = 5
"""So many of a dead process's last words are shown."""


class _Running(Protocol):
    """A Popen, or what a fork server started."""

    def kill(self) -> None: ...
    def wait(self, timeout_s: float, /) -> int | None: ...


@dataclass(eq=False)
class _Process:
    """One role: the process that has it now, and what was heard of it."""

    role: str
    index: int
    running: _Running | None = None
    line: socket.socket | None = None
    heard_s: float = 0.0
    unread: bytes = b""
    status: dict[str, Any] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    """What the processes that had this role before this one came to."""
    failure: dict[str, Any] | None = None
    begun: bool = False
    silent: bool = False
    num_restarts: int = 0

    @property
    def name(self) -> str:
        return self.role if self.role in ("master", "evaluator") else f"{self.role}-{self.index}"

    def total(self, key: str) -> int:
        return self.before.get(key, 0) + int(self.status.get(key, 0))


class LocalEngine:
    """One job, as processes of this machine; used once. Takes the job's data over."""

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
    ) -> None:
        """`lock` holds the run's folder, and is passed on to the processes; `forks` starts them,
        and is the caller's; `incarnation` is new to the run's checkpoints, where there are any."""
        self.job = dataclasses.replace(job, train=None, test=None)
        self.folder = folder
        self.display = display
        self.interrupted = False
        self.failures: list[OffbeatError] = []
        self._data = share({"train": job.train, "test": job.test})
        self._lock = lock
        self._forks = forks
        self._began_s = began_s
        self._key = secrets.token_hex(6)
        self._sockets = _SocketFolder()
        config = job.config
        self.processes = [_Process("ps", k) for k in range(config.servers)]
        self.processes += [
            _Process("worker" if rank else "master", rank) for rank in range(config.workers)
        ]
        if job.facts.has_test:
            self.processes.append(_Process("evaluator", 0))
        self._cluster = Cluster(
            ps=tuple(self._address(k, incarnation) for k in range(config.servers)),
            epochs=(incarnation,) * config.servers,
            incarnations=(incarnation,) * config.workers,
            began_s=began_s,
        )
        self._selector = selectors.DefaultSelector()
        self._deadline_s: float | None = None
        self._books: Books | None = None

    def clock(self) -> float:
        return time.monotonic() - self._began_s

    def run(self) -> None:
        """Raises what the run failed with, after everything has been ended and kept."""
        self._books = Books(self.folder, self.clock)
        try:
            self._cluster.write(self.folder)
            for process in self.processes:
                if process.role != "evaluator":
                    self._start(process)
            while any(process.running for process in self.processes):
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
            self._books.close(self._outcome(), self.failures)
        if self.failures:
            raise self.failures[0]

    # -- the course of a run -------------------------------------------------------------------

    def _go_on(self) -> None:
        """Listen for a moment, then look after everybody. The first Ctrl-C stops the run, the
        second gives up."""
        try:
            for key, _ in self._selector.select(REFRESH_S):
                self._listen(key.data)
            self._look_for_silent()
            self._look_at_deadline()
            self._start_evaluator()
            self.display.update(self._status())
        except KeyboardInterrupt:
            if self.interrupted:
                raise
            self.interrupted = True
            if self._has_begun():
                self.display.notice("stopping: keeping what was learned; Ctrl-C again to give up")
            else:
                self.display.notice(NOT_BEGUN)
            self._stop()

    def _start_evaluator(self) -> None:
        """Once there is something to score: until then the others have the cores to themselves."""
        evaluator = next((p for p in self.processes if p.role == "evaluator"), None)
        if evaluator and self._has_begun() and not evaluator.begun and self._deadline_s is None:
            self._start(evaluator)

    def _stop(self) -> None:
        """Have the master commit a checkpoint and let the servers go, who tell the workers that the
        run is over. Without a master there is nothing to wait for, and before the first step there
        is nothing to keep: processes that are still starting are not asked."""
        if self._deadline_s is not None:
            return
        if not self._has_begun():
            self._deadline_s = time.monotonic() + KILL_TIMEOUT_S
            for process in self.processes:
                if process.running:
                    process.running.kill()
            return
        self._deadline_s = time.monotonic() + STOP_TIMEOUT_S
        master = self._find("master")
        for process in [master] if master.running else self.processes:
            self._tell_to_stop(process)

    def _has_begun(self) -> bool:
        """Whether any worker has taken a step."""
        return any(process.total("steps") for process in self.processes)

    def _tell_to_stop(self, process: _Process) -> None:
        if process.line is not None:
            try:
                process.line.send(b'{"stop": true}\n', socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                return  # it is on its way out; the next look finds it gone

    def _look_at_deadline(self) -> None:
        if self._deadline_s is None:
            return
        if time.monotonic() > self._deadline_s:
            for process in self.processes:
                if process.running:
                    self._say(f"{in_words(process.name)} does not end by itself: killed")
                    process.running.kill()
            self._deadline_s = time.monotonic() + KILL_TIMEOUT_S

    def _look_for_silent(self) -> None:
        """A process that reports nothing any more is hung, whatever the reason: end it, so that
        another one can take its place."""
        timeout_s = self.job.config.worker_timeout
        now_s = time.monotonic()
        for process in self.processes:
            if process.running and now_s - process.heard_s > timeout_s and not process.silent:
                process.silent = True
                process.running.kill()

    def _end(self) -> None:
        """Nobody is left when this returns."""
        for process in self.processes:
            if process.running:
                process.running.kill()
                process.running.wait(KILL_TIMEOUT_S)
            self._hang_up(process)
        self._selector.close()
        self._sockets.close()
        os.close(self._data)
        self.folder.cluster.unlink(missing_ok=True)
        self.display.update(self._status())
        self.display.close()

    def _outcome(self) -> str:
        if self.failures:
            return "failed"
        return "interrupted" if self.interrupted else "finished"

    # -- processes -----------------------------------------------------------------------------

    def _start(self, process: _Process) -> None:
        ours, theirs = socket.socketpair()
        log = self.folder.logs / f"{process.name}.log"
        command = ["role", process.role, "--index", str(process.index)]
        command += ["--run-dir", str(self.folder.path)]
        descriptors = (theirs.fileno(), self._data, self._lock)
        with theirs, log.open("ab", buffering=0) as output:
            process.running = self._fork(command, descriptors, output) or self._popen(
                command, descriptors, output
            )
        process.begun = True
        process.line = ours
        process.heard_s = time.monotonic()
        process.unread = b""
        process.failure = None
        process.silent = False
        self._selector.register(ours, selectors.EVENT_READ, process)

    def _fork(
        self, command: list[str], descriptors: tuple[int, ...], output: io.FileIO
    ) -> _Running | None:
        if self._forks is None:
            return None
        found = self._forks.spawn(command, role_environment(), (*descriptors, output.fileno()))
        if found is None:
            output.write(f"not forked by the fork server: {self._forks.why_not}\n".encode())
        return found

    def _popen(
        self, command: list[str], descriptors: tuple[int, ...], output: io.FileIO
    ) -> _Running:
        line, data, _ = descriptors
        return subprocess.Popen(
            [sys.executable, "-m", "offbeat", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
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
        process.heard_s = time.monotonic()
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
        if code is None and process.status.get("left"):
            code = 0
        process.running = None
        self._hang_up(process)
        if process.failure is not None:
            self._fail(process)
        elif code != 0 and not self._is_over():
            self._died(process, code)
        if process.role == "master" and self._is_over():
            # a server that died in the last moment has told nobody
            scores_last = self.folder.state.exists()
            for other in self.processes:
                if other.role != "evaluator" or not scores_last:
                    self._tell_to_stop(other)

    def _is_over(self) -> bool:
        return self._deadline_s is not None or self.folder.state.exists()

    def _fail(self, process: _Process) -> None:
        """A role said what went wrong; trying again would not help."""
        failure = process.failure or {}
        if self._deadline_s is not None and process.role != "master":
            return  # it went down with a run that had failed already
        if failure["not_finite"]:
            self.failures.append(NonFiniteLossError(failure["line"]))
        else:
            error = self.folder.failure(process.name, failure["line"], failure["step"])
            self.failures.append(error)
        if process.role != "evaluator":  # which nobody depends on
            self._stop()

    def _died(self, process: _Process, code: int | None) -> None:
        how = _how(code)
        if process.silent:
            how = f"was silent for {self.job.config.worker_timeout:g} s"
        who = in_words(process.name)
        most = self.job.config.max_restarts
        if process.num_restarts >= most:
            log = self.folder.logs / f"{process.name}.log"
            self._say(*self._last_words(process))
            self.failures.append(
                RoleError(
                    f"{who} {how}, and was started again {most} times before (--max-restarts); "
                    f"its log is {log}; go on with: offbeat train --resume {self.folder.path}"
                )
            )
            if process.role != "evaluator":
                self._stop()
            return
        process.num_restarts += 1
        self._say(
            f"{who} {how}: starting it again ({process.num_restarts} of {most})",
            *self._last_words(process),
        )
        assert self._books is not None
        self._books.record("restart", role=process.role, index=process.index, reason=how)
        for key in ("steps", "examples"):
            process.before[key] = process.total(key)
        process.status = {}
        self._renew(process)
        self._start(process)

    def _renew(self, process: _Process) -> None:
        """A new epoch or incarnation; a server also gets a new address, in case the old one is
        still taken."""
        cluster = self._cluster
        index = process.index
        if process.role == "ps":
            epoch = cluster.epochs[index] + 1
            cluster = dataclasses.replace(
                cluster,
                ps=_with(cluster.ps, index, self._address(index, epoch)),
                epochs=_with(cluster.epochs, index, epoch),
            )
        elif process.role != "evaluator":
            incarnation = cluster.incarnations[index] + 1
            cluster = dataclasses.replace(
                cluster, incarnations=_with(cluster.incarnations, index, incarnation)
            )
        self._cluster = cluster
        cluster.write(self.folder)

    def _address(self, server: int, epoch: int) -> str:
        return self._sockets.address(f"{self._key}-{server}-{epoch}")

    def _hang_up(self, process: _Process) -> None:
        if process.line is not None:
            self._selector.unregister(process.line)
            process.line.close()
            process.line = None

    def _find(self, role: str) -> _Process:
        return next(process for process in self.processes if process.role == role)

    # -- what a person sees --------------------------------------------------------------------

    def _last_words(self, process: _Process) -> list[str]:
        log = self.folder.logs / f"{process.name}.log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [f"    {line}" for line in lines[-NUM_LOG_LINES:]]

    def _say(self, *lines: str) -> None:
        for line in lines:
            self.display.notice(line)

    def _status(self) -> Status:
        workers = [p for p in self.processes if p.role in ("master", "worker")]
        losses = [p.status["loss"] for p in workers if p.status.get("loss") is not None]
        staleness = [
            p.status["staleness"] for p in self.processes if p.status.get("staleness") is not None
        ]
        score = next((p.status.get("score") for p in self.processes if p.role == "evaluator"), None)
        return Status(
            num_gradients=sum(p.total("steps") for p in workers),
            num_examples=sum(p.total("examples") for p in workers),
            at_s=self.clock(),
            loss=sum(losses) / len(losses) if losses else None,
            staleness=sum(staleness) / len(staleness) if staleness else None,
            metric_name=metric_name(self.job.recipe),
            score=(score[0], score[1]) if score else None,
            waits_for=self._waits_for(),
        )

    def _waits_for(self) -> str:
        """What it takes until there is a gradient."""
        needed = [process for process in self.processes if process.role != "evaluator"]
        starting = [in_words(p.name) for p in needed if not p.status.get("ready")]
        if not starting:
            return "the first gradient"
        more = len(starting) - NUM_NAMES
        return ", ".join(starting[:NUM_NAMES]) + (f" and {more} more" if more > 0 else "")


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
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def _with(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])
