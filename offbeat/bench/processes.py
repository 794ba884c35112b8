"""The processes of a benchmark, and how they are kept from disturbing each other."""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from offbeat.errors import RunError
from offbeat.roles.control import DATA_VARIABLE

TIMEOUT_S = 60.0
"""How long a process may take to come, or to answer."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@contextlib.contextmanager
def started(
    module: str, log: Path, *arguments: str, data: int | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that runs `module`, and does not outlive the block."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment |= {} if data is None else {DATA_VARIABLE: str(data)}
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,  # whose end tells a server that this process is gone
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=() if data is None else (data,),
            start_new_session=True,  # Ctrl-C is for the benchmark, which ends them
        )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=TIMEOUT_S)


def wait_for(file: Path, child: "subprocess.Popen[bytes]", log: Path, who: str) -> None:
    """Until the process has written `file`: it is there, and listens."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not file.exists():
        if child.poll() is not None or time.monotonic() > deadline_s:
            raise RunError(f"{who} does not come: {last_line(log)}")
        threading.Event().wait(0.02)


def last_line(log: Path) -> str:
    return (log.read_text(errors="replace").splitlines() or ["it said nothing"])[-1]


def silent_log() -> logging.Logger:
    log = logging.Logger("bench")
    log.addHandler(logging.NullHandler())
    return log
