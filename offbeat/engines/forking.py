"""The fork server's process, which the engine's side of it (forkserver.py) starts as

    python -m offbeat role fork-server

It imports what every role needs, and from then on does nothing but fork a child on request and say
what became of it. It has one thread and no CUDA context, which a child could not use. A child
leaves the loop with the command that it is to run. When the engine is gone so is this process; the
children, whose lines to the engine broke as well, end by themselves.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from offbeat.engines.forkserver import FORK_SERVER, MAX_BYTES
from offbeat.roles.control import CONTROL_VARIABLE, DATA_VARIABLE

NUM_DESCRIPTORS = 5
ARG_START, ARG_END = 48, 49
"""Fields of /proc/self/stat, counted from 1: between which addresses the command line stands."""


def serve() -> list[str] | None:
    """Fork until the engine is gone; then None. In a child: the command that it is to run."""
    atexit.register(at_exit)  # before all others, so that it is called after them
    show_command(["role", FORK_SERVER])
    line = socket.socket(fileno=int(os.environ.pop(CONTROL_VARIABLE)))
    _import_everything()
    answer: dict[str, Any] = {"number": 0, "unfit": _find_unfit()}
    while _send(line, answer):
        packet, descriptors = _receive(line)
        if not packet:
            break
        order = json.loads(packet)
        answer = _fork() if "command" in order else _look_at(order["pid"])
        if answer.get("pid") == 0:
            line.close()
            return _become(order, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        answer["number"] = order["number"]
    return None


class _AtExit:
    """Spares a process that is through taking every module apart, which would take it as long as
    all else that a short role does. `code`: what to end with, once that is known."""

    code = 1

    def __call__(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.code)


at_exit = _AtExit()


def show_command(command: list[str]) -> None:
    """Have `ps` show `python -m offbeat COMMAND`, as far as this process's own command line has
    room for it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(fields[place - 3]) for place in (ARG_START, ARG_END))
    title = "\0".join([sys.executable, "-m", "offbeat", *command])
    room = max(end - start - 1, 0)  # a last byte that is not 0 would mean that it goes on
    if start and room:
        ctypes.memmove(start, os.fsencode(title)[:room].ljust(room, b"\0"), room)


def _import_everything() -> None:
    import torch

    import offbeat.loops.process  # noqa: F401 - and what all roles need

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # torch imports as much again for that
    gc.collect()
    gc.freeze()  # or the first collection in each child would copy all memory


def _find_unfit() -> str | None:
    """Why children could not live with what they inherit, as far as one can tell that was forked
    for this. OpenBLAS, under numpy, has started threads by now; it ends them when it sees a fork
    coming, and has them again when it needs them."""
    import torch

    pid = os.fork()
    if not pid:
        os._exit(torch.cuda._is_in_bad_fork())
    _, has_cuda = os.waitpid(pid, 0)
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if has_cuda or num_threads > 1:
        return f"importing torch gave it {'CUDA' if has_cuda else f'{num_threads} threads'}"
    return None


def _become(
    order: dict[str, Any], control: int, data: int, lock: int, output: int, errors: int
) -> list[str]:
    """Be like a process that was started anew; `lock` need only stay open."""
    os.setsid()  # Ctrl-C is for the engine, which ends its processes in order
    for stream, given in ((sys.stdout, output), (sys.stderr, errors)):
        os.dup2(given, stream.fileno())
        os.close(given)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    os.environ.update({CONTROL_VARIABLE: str(control), DATA_VARIABLE: str(data)})
    sys.path[:] = [] if sys.flags.safe_path else [order["folder"]]
    sys.path += order["environment"]["PYTHONPATH"].split(os.pathsep)
    importlib.invalidate_caches()
    _seed()
    command: list[str] = order["command"]
    sys.argv[1:] = command
    show_command(command)
    return command


def _seed() -> None:
    """NumPy's generator begins with another seed in every process, and siblings are not to draw the
    same numbers. Python's own sees to that itself, and torch's begins with the same everywhere."""
    import numpy as np

    np.random.seed()


def _fork() -> dict[str, Any]:
    try:
        return {"pid": os.fork()}
    except OSError as error:
        return {"failed": f"it cannot fork: {error}"}


def _look_at(pid: int) -> dict[str, Any]:
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return {}
    return {"code": os.waitstatus_to_exitcode(status)} if found else {"running": True}


def _send(line: socket.socket, message: dict[str, Any]) -> bool:
    """False: the engine is gone."""
    try:
        line.send(json.dumps(message).encode())
    except ConnectionError:
        return False
    return True


def _receive(line: socket.socket) -> tuple[bytes, list[int]]:
    """A message and its descriptors; an empty one: the engine is gone."""
    try:
        packet, descriptors, _, _ = socket.recv_fds(
            line, MAX_BYTES, NUM_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionError:
        return b"", []
    return packet, descriptors
