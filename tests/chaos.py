"""Runs whose final parameters count what was applied, and faults drawn at random to befall them.

The oracle: every gradient is one and the learning rate is one, so that after a run each parameter
is minus the number of gradients that are in its shard. Sums of whole numbers are exact in float32:
a gradient that was applied twice, or is missing without being accounted for, shows.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from processes import LocalRun, leftovers

from offbeat.checkpoint import newest_checkpoint

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

    def __str__(self) -> str:
        what = f"{self.number.name} {self.role} at {self.after:.0%}"
        return f"{what} for {self.pause_s:.1f} s" if self.pause_s else what


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


class ChaosRun(LocalRun):
    """A run of the oracle under a plan."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.plan = plan
        flags = ["--discipline", plan.discipline, "--servers", str(plan.servers)]
        flags += ["--workers", str(plan.workers), "--steps", str(plan.steps)]
        flags += ["--checkpoint-every", str(plan.checkpoint_every), "--eval-every", "0"]
        flags += ["--max-restarts", "20", "--worker-timeout", str(SILENT_S)]
        if plan.discipline == "sync":
            flags += ["--reduce", "sum"]  # the parameters are to count gradients, not rounds
        super().__init__(folder, *flags, source=ORACLE_FILE)

    def strike(self) -> None:
        """Have every fault happen in its turn, as long as the run lasts."""
        timers = []
        for fault in self.plan.faults:
            if not self._reaches(fault.after):
                break
            for pid in self.pids(fault.role):
                _signal(pid, fault.number)
                if fault.pause_s:
                    timers.append(threading.Timer(fault.pause_s, _signal, (pid, signal.SIGCONT)))
                    timers[-1].start()
        for timer in timers:
            timer.join()

    def _reaches(self, share: float) -> bool:
        """Wait until so much is done; False: the run was over before."""
        count = int(share * self.plan.steps)
        deadline_s = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < deadline_s:
            if min(self.steps_done()) >= count:
                return True
            time.sleep(0.005)
        return False

    def steps_done(self) -> list[int]:
        done = dict.fromkeys(range(self.plan.workers), 0)
        for event in self.events("step"):
            done[event["worker"]] = max(done[event["worker"]], event["step"])
        return list(done.values())

    def complaints(self) -> Iterator[str]:
        """What is not as it must be after a run that ended by itself."""
        plan, summary = self.plan, self.summary()
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
            if plan.discipline == "lock-free":  # racing additions to an element may be lost
                if max(counts) > row["applied"]:
                    yield f"shard {index}: {counts} are in, {row['applied']} in the books"
            elif counts != {row["applied"]}:
                yield f"shard {index}: {counts} are in, {row['applied']} in the books"
            lost += row["lost"]
        if plan.discipline != "sync" and lost != summary["lost_updates"]:
            yield f"{lost} are missing, {summary['lost_updates']} reported as lost"
        if left := leftovers(self.run_dir):
            yield f"left behind: {left}"


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has ended meanwhile
