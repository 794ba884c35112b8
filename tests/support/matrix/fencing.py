"""Row 11: a server stands still, another one takes its place and its address, and then the first
one goes on. Roles by address, as in a cluster; a proxy is the address that moves.
"""

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from chaos import ORACLE_FILE
from clusters import Proxy
from processes import free_ports

from matrix.protections import prelude, protections
from matrix.row import Row, Trial
from offbeat.engines.forkserver import role_environment
from offbeat.run.checkpoint import newest_checkpoint
from offbeat.run.events import read_events

PATIENCE_S = 90.0
STEPS, NUM_WORKERS = 400, 2
Process = subprocess.Popen[bytes]


class ByAddress:
    """A server, a master and a worker; the server is where the proxy says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.recipe = folder / "oracle.py"
        self.recipe.write_text(prelude() + ORACLE_FILE)
        self.ports = free_ports(2)
        self.proxy = Proxy(f"127.0.0.1:{self.ports[0]}")
        where = self.proxy.address.removeprefix("tcp:")
        self._hosts = ["--ps", where, "--worker", "a:1", "--master", "b:1"]
        self.processes: dict[str, Process] = {}

    def start(self, name: str, *arguments: str) -> Process:
        with (self.folder / f"{name}.out").open("wb") as output:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "offbeat", "role", *arguments, *self._hosts],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                env=role_environment(),
            )
        return self.processes[name]

    def start_server(self, name: str, port: int) -> Process:
        return self.start(name, "ps", "--bind", f"127.0.0.1:{port}")

    def start_others(self, *flags: str) -> None:
        self.start("worker", "worker", "--threads", "1", "--device", "cpu")
        run = ["--recipe", f"{self.recipe}:recipe", "--run-dir", str(self.run_dir)]
        self.start("master", "master", *run, "--threads", "1", "--device", "cpu", *flags)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s, pause = time.monotonic() + PATIENCE_S, threading.Event()
        while not condition():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"waited in vain for {what}: {self.words()}")
            pause.wait(0.02)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self.run_dir / "events") if e["kind"] == kind]

    def words(self) -> str:
        """The last ones of everybody."""
        each = [(path.stem, path.read_text()[-150:]) for path in self.folder.glob("*.out")]
        return "; ".join(f"{name}: {text!r}" for name, text in each)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.proxy.close()


def replace_server(seed: int) -> Trial:
    draw = random.Random(f"row 11, {seed}")
    discipline = draw.choice(["sync", "apply-reply", "reply-apply", "bounded:1"])
    flags = ["--discipline", discipline, "--steps", str(STEPS), "--checkpoint-every", "20"]
    flags += ["--eval-every", "0"] + (["--rule", "sum"] if discipline == "sync" else [])
    with (
        tempfile.TemporaryDirectory(prefix="offbeat-faults-") as folder,
        contextlib.closing(ByAddress(Path(folder))) as run,
    ):
        old = run.start_server("old", run.ports[0])
        run.start_others(*flags)
        _replace(run, old, draw)
        violations = list(_about_end(run, old))
        violations += [] if violations else _about_books(run)
        waited_s = _longest_wait_s(run)
        return Trial(tuple(f"{discipline}: {what}" for what in violations), recovery_s=waited_s)


def _replace(run: ByAddress, old: Process, draw: random.Random) -> None:
    at = draw.randint(20, 200)
    run.wait_until(lambda: len(run.events("push")) >= at, f"{at} pushes")
    os.kill(old.pid, signal.SIGSTOP)
    run.start_server("new", run.ports[1])
    run.wait_until(lambda: _listens(run.ports[1]), "the new server")
    run.proxy.move(f"127.0.0.1:{run.ports[1]}")
    seen = len(run.events("push")) + draw.randint(1, 100)
    run.wait_until(lambda: len(run.events("push")) >= seen, "the new server's updates")
    os.kill(old.pid, signal.SIGCONT)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _about_end(run: ByAddress, old: Process) -> Iterator[str]:
    for name in ("master", "worker", "new"):
        try:
            code = run.processes[name].wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            yield f"{name} does not end: {run.words()}"
            return
        if code:
            yield f"{name} ended with {code}: {run.words()}"
    os.kill(old.pid, signal.SIGTERM)
    try:
        old.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        yield f"the old server does not end: {run.words()}"


def _about_books(run: ByAddress) -> Iterator[str]:
    (shard,) = newest_checkpoint(run.run_dir / "checkpoints").shards
    counts = {-int(value) for value in shard.tensors["params"]}
    accounts = shard.accounts
    applied = sum(account.applied for account in accounts.values())
    if counts != {applied}:
        yield f"{counts} are in, {applied} in the books"
    done = {worker: account.gradients for worker, account in accounts.items()}
    if done != dict.fromkeys(range(NUM_WORKERS), STEPS):
        yield f"not all of {STEPS} gradients are in the books: {accounts}"
    for event in run.events("rejoin"):
        if event["version"] < event["seen_version"] and event["epoch"] <= event["former_epoch"]:
            yield f"versions went back, and the epoch is not a new one: {event}"
    if not any(event["epoch"] for event in run.events("rejoin")):
        yield "nobody knows of another server"
    pushes = [e for e in run.events("push") if e["outcome"] == "applied"]
    often = Counter((push["worker"], push["sequence"]) for push in pushes)
    if twice := [key for key, count in often.items() if count > 1]:
        yield f"applied twice: {twice[:3]}"


def _longest_wait_s(run: ByAddress) -> float | None:
    """For how long nothing went in."""
    times = sorted(push["applied_s"] for push in run.events("push") if push["applied_s"])
    return max((b - a for a, b in itertools.pairwise(times)), default=None)


ROWS = (
    Row(
        11,
        "server SIGSTOP, replacement started, then CONT",
        "the old one is fenced: its replies are refused",
        50,
        1,
        replace_server,
        protections("an epoch of its own"),
    ),
)
