"""The engine's side of the fork server: a process that has imported everything, and forks a child
for each role that it is asked for. What happens in there is in forking.py.

Importing torch takes a process seconds; a forked one has it at once. Whoever starts a run makes a
ForkServer as early as possible, so that it imports while they do, and closes it; the engine `local`
spawns roles with it. Knows no torch: the command makes one before it pays for that itself.

The line between the two carries JSON, one message a packet:

    up:    {"number": 0, "unfit": null}                 it is ready; or why it cannot be
    down:  {"number": 1, "command": [...], "environment": {...}, "folder": "..."}, with descriptors
    up:    {"number": 1, "pid": 4711}, or why not: {"number": 1, "failed": "..."}
    down:  {"number": 2, "pid": 4711}                   how is it?
    up:    {"number": 2, "running": true}, {"number": 2, "code": 0}, or neither: not its child
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.config import AUTO
from offbeat.roles.control import CONTROL_VARIABLE

CAN_FORK = sys.platform == "linux"
"""Elsewhere torch loads libraries of the system that do not bear forking."""
FORK_SERVER = "fork-server"
"""What it is called among the roles, though it is none."""
MAX_BYTES = 1 << 20
"""Of a message; the system allows less."""
TITLE_BYTES = 8192
"""Room for the command line of any role: a path has 4096 at most."""
MAX_STARTS = 2
START_TIMEOUT_S = 60.0
"""How long it may take to import everything."""
ASK_TIMEOUT_S = 10.0
"""How long it may take to answer afterwards; then it is hung."""
POLL_S = 0.005


class ForkServer:
    """A fork server's process, and the one that takes its place should it die.

    Closed by whoever made it; children that are still there live on.
    """

    def __init__(self) -> None:
        self.why_not = ""
        """Why it cannot spawn, where it cannot."""
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._num_starts = 0
        self._number = 0
        self._start()

    def spawn(
        self, command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> "Forked | None":
        """A process that runs `offbeat COMMAND`. `descriptors`: its line to the engine, the data,
        the run's lock, and where its output and its errors go; they are copied. None: start it in
        another way, for the reason that is in `why_not`."""
        if not self._wait_until_ready():
            return None
        order = {"command": list(command), "environment": dict(environment)}
        answer = self._ask({**order, "folder": str(Path.cwd())}, descriptors)
        self.why_not = answer.get("failed", self.why_not)
        return Forked(self, answer["pid"]) if "pid" in answer else None

    def look_at(self, pid: int) -> dict[str, Any]:
        return self._ask({"pid": pid})

    def close(self) -> None:
        self._lose("it is closed")
        self._num_starts = MAX_STARTS

    def _start(self) -> None:
        self._num_starts += 1
        self._is_ready = False
        command = [sys.executable, "-m", "offbeat", "role", FORK_SERVER]
        command += ["--run-dir", "_" * TITLE_BYTES]  # of no run: for children to write over
        try:
            self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=role_environment() | {CONTROL_VARIABLE: str(theirs.fileno())},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C is for the engine
                )
        except OSError as error:
            self._lose(f"it cannot be started: {error}")

    def _wait_until_ready(self) -> bool:
        if self._line is None and self._num_starts < MAX_STARTS:
            self._start()
        if self._line is not None and not self._is_ready:
            unfit = self._hear(0, START_TIMEOUT_S).get("unfit", "")
            self._is_ready = unfit is None
            if unfit:
                self._lose(unfit)
                self._num_starts = MAX_STARTS  # another one would be no different
        return self._is_ready

    def _ask(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Its answer; an empty one where it is gone."""
        if self._line is None:
            return {}
        self._number += 1
        packet = json.dumps({"number": self._number, **message}).encode()
        try:
            socket.send_fds(self._line, [packet], descriptors)
        except OSError as error:
            self._lose(f"it cannot be asked: {error}")
            return {}
        return self._hear(self._number, ASK_TIMEOUT_S)

    def _hear(self, number: int, timeout_s: float) -> dict[str, Any]:
        """The message of that number: earlier ones are for somebody whom Ctrl-C sent away."""
        assert self._line is not None
        self._line.settimeout(timeout_s)
        try:
            while packet := self._line.recv(MAX_BYTES):
                message: dict[str, Any] = json.loads(packet)
                if message["number"] == number:
                    return message
            self._lose("it died")
        except OSError as error:
            self._lose(f"it does not answer: {error.strerror or error}")
        return {}

    def _lose(self, why_not: str) -> None:
        self.why_not = why_not
        self._is_ready = False
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None:
            self._process.kill()
            self._process.wait(ASK_TIMEOUT_S)
            self._process = None


class Forked:
    """A process that a fork server started, with as much of Popen as an engine needs."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._began = _look_at(pid)[1]
        self._has_ended = False
        self._code: int | None = None

    def wait(self, timeout_s: float, /) -> int | None:
        """Its exit code, or minus the signal that killed it; None: it has ended, and the fork
        server that would know how is gone."""
        deadline_s = time.monotonic() + timeout_s
        pause = threading.Event()
        while not self._look():
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s)
            pause.wait(POLL_S)
        return self._code

    def _look(self) -> bool:
        """Whether it has ended."""
        if not self._has_ended:
            seen = self._server.look_at(self.pid)
            self._code = seen.get("code")
            self._has_ended = "code" in seen or not ("running" in seen or self._is_running())
        return self._has_ended

    def kill(self) -> None:
        if self._is_running():
            with contextlib.suppress(ProcessLookupError):  # it was just about to end
                os.kill(self.pid, signal.SIGKILL)

    def _is_running(self) -> bool:
        """Also where nobody can be asked, and its number may belong to another process by now."""
        state, began = _look_at(self.pid)
        return not self._has_ended and began == self._began and state not in ("", "Z", "X")


def _look_at(pid: int) -> tuple[str, str]:
    """A process's state and when it began, in the system's words; empty: there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def role_environment() -> dict[str, str]:
    """What a role's process finds in its environment: as here, and what can be imported here."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONUNBUFFERED": "1",
    }


@contextlib.contextmanager
def fork_server(engine: str, given: ForkServer | None = None) -> Iterator[ForkServer | None]:
    """A fork server for as long as the block lasts, if the engine may have a use for it; one that
    is `given` is its owner's."""
    if given is not None or engine not in (AUTO, "local") or not CAN_FORK:
        yield given
        return
    with contextlib.closing(ForkServer()) as server:
        yield server
