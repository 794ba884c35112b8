"""What the processes of this machine take of it: memory and processor time, as Linux tells it.

Used by following.py. Of a process elsewhere, or one whose number somebody else has by now, nothing
is known.
"""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.run.places import PROC, read_stat

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Use:
    memory_bytes: int
    cpu: float | None
    """How many processors it kept busy since it was looked at last; None: it is new."""


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
        found, memory_bytes = read_stat(pid), _read_memory(pid)
        if found is None or memory_bytes is None or found[0] != place.get("began"):
            return None
        now_s, cpu_s = time.monotonic(), found[1]
        former, then_s, before_s = self._before.get(name, (0, now_s, cpu_s))
        self._before[name] = (pid, now_s, cpu_s)
        is_known = former == pid and now_s > then_s
        return Use(memory_bytes, (cpu_s - before_s) / (now_s - then_s) if is_known else None)


def _read_memory(pid: int) -> int | None:
    try:
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return None
