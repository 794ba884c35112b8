"""The line between a role's process and the engine that started it.

A role reports how far it is, is told to stop, and notices when the engine is gone; then it ends as
if it had been told to. Imports no torch, so that a process is heard of from its first moment on.
"""

import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from offbeat.errors import StepError, in_a_line
from offbeat.run.orders import Standing

CONTROL_VARIABLE = "OFFBEAT_CONTROL_FD"
DATA_VARIABLE = "OFFBEAT_DATA_FD"
REPORT_EVERY_S = 0.2
ORPHAN_TIMEOUT_S = 5.0
"""How long a process whose engine is gone may take to end by itself."""


class Control:
    """The line between a role's process and the engine that started it: lines of JSON.

    up:    {"status": {...}} several times a second, with "left" when it is about to end;
           {"failed": {...}} before a bad end; {"line": "..."} for the user to see
    down:  {"stop": true}, and whatever else an engine has to tell (`told`)

    A thread of its own reports, whatever the rest of the process is busy with.
    """

    in_a_role = False
    """Whether this process is a role's."""

    def __init__(self, line: socket.socket | None) -> None:
        self.stop = threading.Event()
        self.status: Callable[[], dict[str, Any]] = dict
        self.flush: Callable[[], None] = lambda: None
        """Called with every report, for what has to be written down from time to time."""
        self.told: Callable[[dict[str, Any]], None] = lambda message: None
        """Is given every line of the engine's."""
        self.orders = Standing()
        """What the engine passed on of them, from its first line on."""
        self.patience_s = 0.0
        """How long to wait for the master to end things in order when the engine is gone."""
        self._line = line
        self._unread = b""
        self._done = threading.Event()
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    @classmethod
    def from_environment(cls) -> "Control":
        cls.in_a_role = True
        descriptor = os.environ.pop(CONTROL_VARIABLE, None)
        return cls(None if descriptor is None else socket.socket(fileno=int(descriptor)))

    def reports(self, status: Callable[[], dict[str, Any]]) -> None:
        """From now on, report what `status` tells."""
        self.status = status

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        self._thread.join()
        self._send({"status": {"left": True}})
        self._report()
        if self._line is not None:
            self._line.close()

    def say(self, line: str) -> None:
        """Have the engine show a line."""
        self.tell({"line": line})

    def tell(self, message: dict[str, Any]) -> None:
        self._send(message)

    def fail(self, error: BaseException) -> None:
        """Tell the engine why this process ends."""
        rank, step = (error.rank, error.step) if isinstance(error, StepError) else (None, None)
        cause = error.__cause__ if isinstance(error, StepError) and error.__cause__ else error
        failed = {"rank": rank, "step": step, "line": in_a_line(cause)}
        self._send({"failed": {**failed, "kind": type(cause).__name__}})

    def _run(self) -> None:
        if self._line is not None:
            self._line.settimeout(REPORT_EVERY_S)
        while not self._done.is_set():
            self._report()
            if self._line is None:
                self._done.wait(REPORT_EVERY_S)
            elif not self._listen(self._line):
                self._done.wait(self.patience_s)
                self.stop.set()
                if not self._done.wait(ORPHAN_TIMEOUT_S):
                    os._exit(1)  # the engine is gone, and something here does not end

    def _report(self) -> None:
        self._send({"status": self.status()})
        self.flush()

    def _listen(self, line: socket.socket) -> bool:
        """Wait a moment for an order; False: the engine is gone."""
        try:
            received = line.recv(65536)
        except TimeoutError:
            return True
        except OSError:
            return False
        *lines, self._unread = (self._unread + received).split(b"\n")
        for message in map(json.loads, lines):
            self.orders.tell(message)
            self.told(message)
            if message.get("stop"):
                self.stop.set()
            if message.get("die"):
                os._exit(1)  # at once, as if killed: another one takes its place
        return bool(received)

    def _send(self, message: dict[str, Any]) -> None:
        if self._line is None:
            return
        with self._sending:
            try:
                self._line.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                return  # the engine is gone; the thread that listens sees to it
