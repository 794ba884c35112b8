"""What the processes of this machine take of it: memory and processor time, as Linux tells it.

Used by following.py. Of a process elsewhere, or one whose number somebody else has by now, nothing
is known.
"""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


@dataclass(slots=True)
class Use:
    memory_bytes: int
    cpu: float | None
    """How many processors it kept busy since it was looked at last; None: it is new."""


def place_of_process() -> dict[str, Any]:
    """Where this process is to be found; an event of the run says so."""
    found = _read_stat(os.getpid())
    began = None if found is None else found[0]
    return {"host": socket.gethostname(), "pid": os.getpid(), "began": began}


class Usage:
    def __init__(self) -> None:
        self._host = socket.gethostname()
        self._before: dict[str, tuple[int, float, float]] = {}
        """Of each name: its pid, when it was looked at, and the processor's seconds until then."""

    def look(self, places: Mapping[str, Mapping[str, Any]]) -> dict[str, Use | None]:
        """Of each role: None, where nothing is known."""
        return {name: self._look_at(name, place) for name, place in places.items()}

    def _look_at(self, name: str, place: Mapping[str, Any]) -> Use | None:
        pid = place.get("pid")
        if place.get("host") != self._host or not isinstance(pid, int):
            return None
        found, memory_bytes = _read_stat(pid), _read_memory(pid)
        if found is None or memory_bytes is None or found[0] != place.get("began"):
            return None
        now_s, cpu_s = time.monotonic(), found[1]
        former, then_s, before_s = self._before.get(name, (0, now_s, cpu_s))
        self._before[name] = (pid, now_s, cpu_s)
        is_known = former == pid and now_s > then_s
        return Use(memory_bytes, (cpu_s - before_s) / (now_s - then_s) if is_known else None)


def _read_stat(pid: int) -> tuple[int, float] | None:
    """When a process began, by which it is known from another one of the same number, and the
    processor's seconds that it has had; None: there is none, or the system does not tell."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return int(fields[19]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _read_memory(pid: int) -> int | None:
    try:
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return None
