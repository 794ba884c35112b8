"""The engine `local`: every role is a process of this machine, started as

    python -m offbeat role ps|master|worker|evaluator --index I --run-dir RUN

or forked by a process that has imported everything by then, which comes to the same
(forkserver.py). Workers of one crew (run/crews.py) are threads of one such process.

Called by the api. It starts them, shows progress, and does what the supervisor says when one dies
or fails. It takes no part in training.
"""

import io
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from offbeat.data.shared import share
from offbeat.engines.forkserver import ForkServer, role_environment
from offbeat.engines.supervised import Process, Running, SupervisedEngine
from offbeat.engines.supervisor import KILL_TIMEOUT_S, Member
from offbeat.roles.control import CONTROL_VARIABLE, DATA_VARIABLE
from offbeat.run.addresses import Cluster
from offbeat.run.job import Job
from offbeat.run.progress import Display
from offbeat.run.rundir import RunFolder


class _Child(Protocol):
    """A Popen, or what a fork server started."""

    def kill(self) -> None: ...
    def wait(self, timeout_s: float, /) -> int | None: ...


class _Running(Running):
    def __init__(self, child: _Child) -> None:
        self._child = child

    def kill(self) -> None:
        self._child.kill()

    def end(self, *, has_left: bool) -> str | None:
        try:
            code = self._child.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            code = self._child.wait(KILL_TIMEOUT_S)
        return None if has_left and not code else _how(code)


class LocalEngine(SupervisedEngine):
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
        and is the caller's. `shows_rank_0`: what its process prints goes where this one's does, not
        to its log."""
        super().__init__(job, folder, display, began_s, incarnation=incarnation)
        train = None if job.facts.by_rank else job.train
        self._data = share({"train": train, "test": job.test})
        self._lock = lock
        self._forks = forks
        self._shows_rank_0 = shows_rank_0
        self._key = secrets.token_hex(6)
        self._sockets = _SocketFolder()

    def _prepare(self) -> None:
        self._forget_meetings()  # of an engine that was killed

    def _close(self) -> None:
        self._forget_meetings()
        self._sockets.close()
        os.close(self._data)

    def _hear(self, process: Process, message: Mapping[str, Any]) -> None:
        if "placed" in message:
            member = process.member
            crew = {"crew": member.ranks} if len(member.ranks) > 1 else {}
            where = {"role": member.role, "index": member.index, **crew, **message["placed"]}
            self._record("placed", **where)
        super()._hear(process, message)

    def _spawn(self, process: Process) -> None:
        ours, theirs = socket.socketpair()
        log = self.folder.logs / f"{process.name}.log"
        command = ["role", process.member.role, "--index", str(process.member.index)]
        command += ["--run-dir", str(self.folder.path)]
        descriptors = (theirs.fileno(), self._data, self._lock)
        with theirs, log.open("ab", buffering=0) as output:
            is_shown = self._shows_rank_0 and process.member.role == "master"
            outputs = (1, 2) if is_shown else (output.fileno(), output.fileno())
            process.running = _Running(
                self._fork(command, descriptors, outputs, output)
                or self._popen(command, descriptors, outputs)
            )
        self._attach(process, ours)

    def _fork(
        self,
        command: list[str],
        descriptors: tuple[int, ...],
        outputs: tuple[int, int],
        log: io.FileIO,
    ) -> _Child | None:
        if self._forks is None:
            return None
        found = self._forks.spawn(command, role_environment(), (*descriptors, *outputs))
        if found is None:
            log.write(f"not forked by the fork server: {self._forks.why_not}\n".encode())
        return found

    def _popen(
        self, command: list[str], descriptors: tuple[int, ...], outputs: tuple[int, int]
    ) -> _Child:
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

    def _write_cluster(self) -> None:
        """A server of another epoch has another address, in case the old one is still taken."""
        servers = self._supervisor.find("ps")
        Cluster(
            ps=tuple(self._address(server) for server in servers),
            epochs=tuple(server.generation for server in servers),
            incarnations=self._supervisor.incarnations(),
            began_s=self._began_s,
            meeting=self._meeting(),
        ).write(self.folder)

    def _forget_meetings(self) -> None:
        for path in self.folder.meetings():
            path.unlink()

    def _meeting(self) -> str:
        """Where workers without servers meet: another place for each time that they are started."""
        if self.job.config.chosen.kind.served:
            return ""
        master = self._supervisor.find("master")[0]
        return f"file:{self.folder.meeting(master.generation)}"

    def _address(self, server: Member) -> str:
        return self._sockets.address(f"{self._key}-{server.index}-{server.generation}")


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
