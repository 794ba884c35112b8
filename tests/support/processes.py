"""Real runs of the engine `local`, watched and disturbed from outside."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from offbeat.engines.forkserver import role_environment
from offbeat.run.events import read_events

TIMEOUT_S = 90.0
SUPPORT = Path(__file__).parent

RECIPE_FILE = f"""
import sys
import time
sys.path.insert(0, {str(SUPPORT)!r})
import torch
from torch import nn
from helpers import cross_entropy, toy_data, toy_model, toy_recipe
from offbeat import SGD, Adam
recipe = toy_recipe(epochs=20)
momentum = toy_recipe(epochs=20, optimizer=SGD(lr=0.05, momentum=0.9), ema=0.99)
def dropout_model():
    return nn.Sequential(
        nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3)
    )
def noise(batch, generator):
    return batch[0] + 0.01 * torch.randn(batch[0].shape, generator=generator), batch[1]
dropout = toy_recipe(
    model=dropout_model, optimizer=Adam(lr=0.01), augment=noise, ema=0.9
)
def failing(model, batch):
    failing.count = getattr(failing, "count", 0) + 1
    if failing.count > 5:
        raise KeyError("the sixth batch")
    return cross_entropy(model, batch)
fails = toy_recipe(loss=failing, epochs=20)
def interrupting(model, batch):
    raise KeyboardInterrupt("in a loss")
interrupts = toy_recipe(loss=interrupting, epochs=20)
def large_model():
    time.sleep(0.5)  # as one that takes long to make, so that roles can be met before they begin
    return toy_model()
large = toy_recipe(model=large_model, epochs=20)
wide = toy_recipe(
    model=lambda: nn.Sequential(nn.Linear(6, 8000), nn.Tanh(), nn.Linear(8000, 3)),
    optimizer=SGD(lr=0.001),
)
"""


def free_ports(count: int) -> list[int]:
    """Of this machine, at which nobody listens now."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in made]


class LocalRun:
    """`offbeat train` in a process of its own, with its output and its roles' processes."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        recipe: str = "recipe",
        run: str = "r",
        source: str = RECIPE_FILE,
        crews: list[list[int]] | None = None,
    ) -> None:
        """`crews`: what the launcher is to find of workers that share a GPU."""
        self.folder = folder
        self.run_dir = folder / run
        file = folder / "recipes.py"
        file.write_text(source)
        given = list(flags)
        device = () if "--devices" in flags else ("--device", "cpu")
        if "--resume" not in flags:
            given += ["--recipe", f"{file}:{recipe}", "--run-dir", str(self.run_dir)]
        self.output = (folder / f"{run}.out").open("w")
        self.process = subprocess.Popen(
            [*_command(crews), "train", "--threads", "1", *device, *given],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=role_environment(),
            start_new_session=True,
        )

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        try:
            return self.process.wait(timeout_s)
        finally:
            self.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.output.close()

    def text(self) -> str:
        return Path(self.output.name).read_text()

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def events(self, kind: str) -> list[dict[str, Any]]:
        events = read_events(self.run_dir / "events")
        return [event for event in events if event["kind"] == kind]

    def pids(self, role: str = "") -> list[int]:
        """The processes of the run that are a role, or this one ("worker --index 1")."""
        return find_processes(self.run_dir, role)

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> int:
        (pid,) = self.pids(role)
        os.kill(pid, number)
        return pid

    def num_steps(self, rank: int) -> int:
        return sum(1 for event in self.events("step") if event["worker"] == rank)

    def incarnations(self, rank: int) -> int:
        """How many processes have taken steps as this worker."""
        return len({e["incarnation"] for e in self.events("push") if e["worker"] == rank})

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"waited in vain until {what}:\n{self.text()}"
            time.sleep(0.02)

    def wait_for_steps(self, count: int, *ranks: int) -> None:
        ranks = ranks or (0, 1)
        self.wait_until(
            lambda: all(self.num_steps(rank) >= count for rank in ranks),
            f"workers {ranks} had done {count} steps",
        )


def _command(crews: list[list[int]] | None) -> list[str]:
    if crews is None:
        return [sys.executable, "-m", "offbeat"]
    program = f"""
import sys
from offbeat.run import making
making.choose_engine = lambda config, devices: ("local", {crews})
from offbeat.cli import main
sys.exit(main())
"""
    return [sys.executable, "-c", program]


def find_processes(run_dir: Path, role: str = "") -> list[int]:
    pattern = rf"offbeat role {role or '.*'}.*--run-dir {re.escape(str(run_dir))}$"
    return [pid for pid, _, command in processes() if re.search(pattern, command)]


def children(what: str, of: int | None = None) -> list[int]:
    """The processes that one has started (by default this one) and whose command line ends so, the
    latest last."""
    parent = os.getpid() if of is None else of
    return sorted(
        pid for pid, by, command in processes() if by == parent and command.endswith(what)
    )


def processes() -> Iterator[tuple[int, int, str]]:
    """Each process's number, its parent's, and its command line."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode().replace("\0", " ").strip()
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # it ended while we looked
            if state != "Z":
                yield int(entry.name), int(parent), command


def leftovers(run_dir: Path) -> list[str]:
    """Processes, sockets and shared memory of a run that has ended."""
    left = [f"process {pid}" for pid in find_processes(run_dir)]
    left += [str(path) for path in Path("/dev/shm").glob("offbeat*")]
    cluster = run_dir / "cluster.json"
    if cluster.exists():
        left += [
            name
            for name in json.loads(cluster.read_text())["ps"]
            if name.removeprefix("unix:") in Path("/proc/net/unix").read_text()
        ]
    return left


def wait_until_gone(run_dir: Path, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while left := leftovers(run_dir):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
