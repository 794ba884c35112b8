"""What Offbeat is timed beside: each a file here, as its own documentation would have it.

    ceiling        workers that exchange nothing
    ddp            torch's DistributedDataParallel, on gloo
    hogwild        one model in memory that processes share, as PyTorch's example has it
    rpc            a server on torch's RPC that gathers a gradient of every trainer, as PyTorch's
                   tutorial on asynchronous executions builds it; rpc-async: one that waits for none
    ray            a server and workers that are Ray's actors, as the synchronous example of its
                   documentation has it; ray-async: as the asynchronous one has it

Each file has a `work`, which one of its processes does (`python -m offbeat.bench.contenders NAME
INDEX RUN`, rig.py). All have their batches from the job, as Offbeat's own workers do, and write
down when each step was done.
"""

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from offbeat.bench.processes import TIMEOUT_S
from offbeat.run.events import EventLog
from offbeat.run.job import Job
from offbeat.run.rundir import RunFolder

CEILING, DDP = "ceiling", "ddp"


@dataclass(frozen=True)
class Contender:
    module: str
    num_processes: Callable[[int], int]
    """For so many workers."""


def _one_each(workers: int) -> int:
    return workers


def _and_a_server(workers: int) -> int:
    return workers + 1


def _one(workers: int) -> int:
    return 1


CONTENDERS = {
    CEILING: Contender("ceiling", _one_each),
    DDP: Contender("ddp", _one_each),
    "hogwild": Contender("hogwild", _one),
    "rpc": Contender("rpc", _and_a_server),
    "rpc-async": Contender("rpc", _and_a_server),
    "ray": Contender("rays", _one),
    "ray-async": Contender("rays", _one),
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one process of a contender is given."""

    name: str
    index: int
    """Which of its processes it is."""
    job: Job
    folder: RunFolder

    @property
    def store(self) -> Path:
        """Where they find each other."""
        return self.folder.path.resolve() / "store"

    def meet(self) -> None:
        """Wait until every worker is here, so that all are at work at the same time."""
        place, count = self.store.with_name("meeting"), self.job.config.workers
        store = dist.FileStore(str(place), count)  # type: ignore[attr-defined]
        if store.add("here", 1) == count:
            store.set("all", "")
        store.wait(["all"], datetime.timedelta(seconds=TIMEOUT_S))

    def log_of(self, rank: int) -> "StepTimes":
        return StepTimes(rank, EventLog.create(self.folder.events, f"worker-{rank}"))


class StepTimes:
    """When a worker was done with each of its steps."""

    def __init__(self, rank: int, events: EventLog) -> None:
        self._rank = rank
        self.events = events

    def note(self, start_s: float, end_s: float | None = None) -> None:
        """One is done: now, if nothing else is said."""
        compute_s = (time.monotonic() if end_s is None else end_s) - start_s
        times = {"start_s": start_s, "compute_s": compute_s, "prepare_s": 0.0, "exchange_s": 0.0}
        self.events.record("step", worker=self._rank, **times)

    def close(self) -> None:
        self.events.close()
