"""Lines of events in a server that was started by hand, on their way to the run's folder, which
lives with the master."""

import re
import secrets
import threading
from typing import Any

import torch
from torch import Tensor

from offbeat.transport.sockets import EVENT_BYTES

MAX_KEPT_BYTES = 1 << 26
"""While the master is away; what comes beyond it is lost, and counted."""
SOURCES = re.compile(r"(ps|worker|evaluator)-\d{1,9}")
"""Whose events there may be."""


class Relay:
    """Lines of events on their way to the master, by the name of the file that they belong to.

    None is lost and none comes twice, whatever connection breaks: who sends lines says how many
    bytes it had sent before, and what the master is given is kept until it says that it has it.
    """

    def __init__(self) -> None:
        self.num_lost = 0
        """Bytes that found no room."""
        self._lock = threading.Lock()
        self._kept: dict[str, bytearray] = {}
        self._come: dict[tuple[str, str], int] = {}
        """How many bytes came from each source."""
        self._name = secrets.token_hex(8)
        self._number = 0
        self._under_way: dict[str, Tensor] = {}

    def add(self, name: str, lines: bytes, source: str = "", before: int | None = None) -> None:
        """`source` sent `before` bytes before these; what was here already is left out."""
        with self._lock:
            come = self._come.get((name, source), 0)
            num_bytes = len(lines) + (come if before is None else 0)
            if before is not None:
                lines = lines[max(0, come - before) :]
            self._come[name, source] = max(come, (before or 0) + num_bytes)
            if sum(map(len, self._kept.values())) + len(lines) > MAX_KEPT_BYTES:
                self.num_lost += len(lines)
            elif lines:
                self._kept.setdefault(name, bytearray()).extend(lines)

    def take(self, got: Any = None) -> tuple[list[Any], dict[str, Tensor]]:
        """What is there, or as much of it as a call can carry, in whole lines, and a number for it;
        `got`: the number that the master says it has."""
        with self._lock:
            if not self._under_way or got == [self._name, self._number]:
                self._under_way = self._cut()
                self._number += 1
            return [self._name, self._number], dict(self._under_way)

    def _cut(self) -> dict[str, Tensor]:
        taken: dict[str, Tensor] = {}
        room = EVENT_BYTES
        for name in list(self._kept):
            lines = self._kept[name]
            cut = len(lines) if len(lines) <= room else lines.rfind(b"\n", 0, room) + 1
            if cut:
                taken[name] = torch.frombuffer(lines[:cut], dtype=torch.uint8)
                room -= cut
                if cut == len(lines):
                    del self._kept[name]
                else:
                    self._kept[name] = lines[cut:]
        return taken


class RelaySink:
    """A sink of events that ends in a relay of this process."""

    def __init__(self, relay: Relay, name: str) -> None:
        self._relay = relay
        self._name = name

    def write(self, text: str) -> None:
        self._relay.add(self._name, text.encode())

    def flush(self) -> None:
        return

    def close(self) -> None:
        return
