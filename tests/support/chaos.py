"""Runs whose final parameters count what was applied, and faults drawn at random to befall them.

The oracle: every gradient is one and the learning rate is one, so that after a run each parameter
is minus the number of gradients that are in its shard. Sums of whole numbers are exact in float32:
a gradient that was applied twice, or is missing without being accounted for, shows.
"""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import find_processes, leftovers

from offbeat.api import train_config
from offbeat.config import make_config
from offbeat.engines.forkserver import ForkServer
from offbeat.errors import RunDirError
from offbeat.run.addresses import Cluster
from offbeat.run.checkpoint import newest_checkpoint
from offbeat.run.events import Followed
from offbeat.run.progress import Display, Status
from offbeat.run.rundir import RunFolder

ORACLE_FILE = """
import time
import torch
import offbeat
class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.count = torch.nn.Parameter(torch.zeros(9))
def loss(model, batch):
    time.sleep(0.004)  # a step takes a while, so that there is something to be in the midst of
    return model.count.sum()
recipe = offbeat.Recipe(
    model=Counter,
    data=lambda config: (torch.zeros(4000, 1), None),
    loss=loss,
    optimizer=offbeat.SGD(lr=1.0),
    batch_size=1,
)
"""
SILENT_S = 2.0
"""After which a process that says nothing is replaced."""
ROLES = ("ps", "worker", "master")


@dataclass(frozen=True)
class Fault:
    after: float
    """The share of the run's steps that are done when it strikes."""
    role: str
    number: signal.Signals
    pause_s: float = 0.0
    """Then goes on, if it was only stopped; 0: never."""
    delay_s: float = 0.0
    """So long after that share was seen to be done: events come in bursts, and faults at any
    time."""

    def __str__(self) -> str:
        what = f"{self.number.name} {self.role} at {self.after:.0%}"
        what += f" and {self.delay_s:.3f} s" if self.delay_s else ""
        return f"{what} for {self.pause_s:.1f} s" if self.pause_s else what


@dataclass(frozen=True)
class Struck:
    """A fault that found somebody."""

    fault: Fault
    at_s: float
    """On the run's clock."""


@dataclass(frozen=True)
class Plan:
    """One run, and what befalls it."""

    seed: int
    discipline: str
    servers: int
    workers: int
    steps: int
    checkpoint_every: int
    faults: list[Fault] = field(default_factory=list)
    ack: str = "applied"

    def __str__(self) -> str:
        faults = "; ".join(map(str, self.faults))
        return (
            f"seed {self.seed}: {self.discipline}, {self.servers} servers, {self.workers} workers, "
            f"checkpoint every {self.checkpoint_every}: {faults}"
        )


def draw_plan(seed: int) -> Plan:
    """Overlapping deaths and halts: one comes soon after the other, and often at the end."""
    draw = random.Random(seed)
    servers, workers = draw.choice([1, 1, 2]), draw.choice([2, 2, 3])
    disciplines = ["sync", "apply-reply", "reply-apply", "bounded:1", "lock-free"]
    disciplines += ["ringmaster:2", "rennala:3", "buffer:7"]
    faults: list[Fault] = []
    at = draw.choice([draw.uniform(0.05, 0.9), draw.uniform(0.9, 1.0), 1.0])
    for _ in range(draw.choice([1, 2, 2, 3])):
        faults.append(_draw_fault(draw, min(1.0, at), servers, workers))
        at += draw.choice([0.0, 0.0, 0.02, 0.1])
    return Plan(
        seed=seed,
        discipline=draw.choice(disciplines),
        servers=servers,
        workers=workers,
        steps=draw.randrange(100, 300),
        checkpoint_every=draw.choice([20, 60, 100_000]),
        faults=faults,
    )


def _draw_fault(draw: random.Random, after: float, servers: int, workers: int) -> Fault:
    role = draw.choice(ROLES)
    if role == "ps":
        role = f"ps --index {draw.randrange(servers)}"
    elif role == "worker":
        role = f"worker --index {draw.randrange(1, workers)}"
    if draw.random() < 0.6:
        return Fault(after, role, signal.SIGKILL)
    return Fault(after, role, signal.SIGSTOP, draw.choice([0.0, 0.3, 1.0, SILENT_S]))


class Notes(Display):
    """What a person would have been told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, status: Status) -> None:
        return

    def notice(self, text: str) -> None:
        self.lines.append(text)

    def close(self) -> None:
        return


class ChaosRun:
    """A run of the oracle under a plan: the engine in a thread of this process, the roles as
    processes, so that a run takes little more than its steps."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        forks: ForkServer | None,
        *,
        source: str = ORACLE_FILE,
        more: Mapping[str, Any] | None = None,
        is_oracle: bool = True,
    ) -> None:
        """`source`: of the recipe, which every role imports; `more`: options. `is_oracle`: its
        parameters count what is in."""
        self.plan = plan
        self._is_oracle = is_oracle
        self.run_dir = folder / "run"
        self.notes = Notes()
        self.error: BaseException | None = None
        self.struck: list[Struck] = []
        self.began_s: float | None = None
        """When the run's clock began; None: that is not known yet."""
        self._done = dict.fromkeys(range(plan.workers), 0)
        self._followed = Followed(self.run_dir / "events", "worker-*.jsonl", from_start=True)
        recipe = folder / "oracle.py"
        recipe.write_text(source)
        options = {
            "recipe": f"{recipe}:recipe",
            "run_dir": str(self.run_dir),
            "discipline": plan.discipline,
            "servers": plan.servers,
            "workers": plan.workers,
            "steps": plan.steps,
            "checkpoint_every": plan.checkpoint_every,
            "eval_every": 0,
            "max_restarts": 20,
            "worker_timeout": SILENT_S,
            "threads": 1,
            "device": "cpu",
            "ack": plan.ack,
            **(more or {}),
        }
        if make_config(options).chosen.kind.merges:
            options["rule"] = "sum"  # the parameters are to count gradients, not updates
        config = make_config(options)

        def run() -> None:
            try:
                train_config(config, display=lambda title, total: self.notes, forks=forks)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, name="engine", daemon=True)
        self.thread.start()

    def has_ended(self, within_s: float = 0.0) -> bool:
        self.thread.join(within_s)
        return not self.thread.is_alive()

    def pids(self, role: str = "") -> list[int]:
        return find_processes(self.run_dir, role)

    def kill_all(self) -> None:
        """Until the engine gives up: the run hangs."""
        while not self.has_ended(0.1):
            for pid in self.pids():
                _signal(pid, signal.SIGKILL)

    def strike(self) -> None:
        """Have every fault happen in its turn, as long as the run lasts."""
        timers = []
        for fault in self.plan.faults:
            if not self._reaches(fault.after) or self.has_ended(fault.delay_s):
                break
            for pid in self.pids(fault.role):
                if not _signal(pid, fault.number):
                    continue
                self.struck.append(Struck(fault, self.clock()))
                if fault.pause_s:
                    timers.append(threading.Timer(fault.pause_s, _signal, (pid, signal.SIGCONT)))
                    timers[-1].start()
        for timer in timers:
            timer.join()

    def clock(self) -> float:
        """The run's, once it has begun."""
        return time.monotonic() - (self.began_s or 0.0)

    def _reaches(self, share: float) -> bool:
        """Wait until so much is done; False: the run was over before."""
        count = int(share * self.plan.steps)
        deadline_s = time.monotonic() + 60
        while not self.has_ended() and time.monotonic() < deadline_s:
            if min(self.steps_done()) >= count and self._knows_its_clock():
                return True
            time.sleep(0.005)
        return False

    def _knows_its_clock(self) -> bool:
        if self.began_s is None:
            try:
                self.began_s = Cluster.read(RunFolder(self.run_dir)).began_s
            except RunDirError:
                return False  # not yet, or not any more
        return True

    def steps_done(self) -> list[int]:
        """Of each worker; reads only what is new, so that it may be asked often."""
        for event in self._followed.read():
            if event["kind"] == "step":
                rank = event["worker"]
                self._done[rank] = max(self._done[rank], event["step"])
        return list(self._done.values())

    def complaints(self) -> Iterator[str]:
        """What is not as it must be after a run that ended by itself."""
        if self.error is not None:
            yield f"it failed: {self.error}"
            return
        plan, summary = self.plan, json.loads((self.run_dir / "summary.json").read_text())
        planned = plan.workers * plan.steps
        if summary["status"] != "finished":
            yield f"it is {summary['status']}"
        lost = 0
        for index, shard in enumerate(newest_checkpoint(self.run_dir / "checkpoints").shards):
            row = summary["kept"][index]
            if row["gradients"] != planned:
                yield f"shard {index}: {row['gradients']} gradients instead of {planned}"
            if row["gradients"] != sum(row[k] for k in ("applied", "dropped", "rejected", "lost")):
                yield f"shard {index}: the books do not add up: {row}"
            counts = {-int(value) for value in shard.tensors["params"]}
            if not self._is_oracle:
                counts = {row["applied"]}
            if plan.discipline == "lock-free":  # racing additions to an element may be lost
                if max(counts) > row["applied"]:
                    yield f"shard {index}: {counts} are in, {row['applied']} in the books"
            elif counts != {row["applied"]}:
                yield f"shard {index}: {counts} are in, {row['applied']} in the books"
            lost += row["lost"]
            if plan.ack == "durable" and row["lost"]:
                yield f"shard {index}: {row['lost']} are lost, in spite of its journal"
        if plan.discipline != "sync" and lost != summary["lost_updates"]:
            yield f"{lost} are missing, {summary['lost_updates']} reported as lost"
        if left := leftovers(self.run_dir):
            yield f"left behind: {left}"


def _signal(pid: int, number: signal.Signals) -> bool:
    """False: it has ended meanwhile."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
