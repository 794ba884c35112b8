"""Where a process is: the run's events say it of every role, so that whoever looks on finds what it
takes of its machine (watching/usage.py). Imports no torch."""

import os
import socket
from pathlib import Path
from typing import Any

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


def place_of_process() -> dict[str, Any]:
    """Of this one."""
    found = read_stat(os.getpid())
    began = None if found is None else found[0]
    return {"host": socket.gethostname(), "pid": os.getpid(), "began": began}


def read_stat(pid: int) -> tuple[int, float] | None:
    """When a process began, by which it is known from another one of the same number, and the
    processor's seconds that it has had; None: there is none, or the system does not tell."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return int(fields[19]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S
