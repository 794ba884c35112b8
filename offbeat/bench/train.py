"""`offbeat bench train`: what is left of a machine's gradients per second.

Each discipline, beside the ceiling and beside torch's DistributedDataParallel; these two have
workers without an engine, `python -m offbeat.bench.train ceiling|ddp RANK RUN`.
"""

import contextlib
import dataclasses
import datetime
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.api import train_config
from offbeat.bench.processes import TIMEOUT_S, last_line, silent_log, started
from offbeat.bench.tables import Row, short
from offbeat.config import TrainConfig, make_config
from offbeat.data.shared import open_shared, share
from offbeat.engines.forkserver import ForkServer, fork_server
from offbeat.errors import ConnectionClosedError, RunError
from offbeat.recipes.base import load_recipe
from offbeat.roles.control import DATA_VARIABLE, Control
from offbeat.roles.worker import Worker
from offbeat.run.events import EventLog, read_events
from offbeat.run.job import Facts, Job
from offbeat.run.making import make_job, rejoin_job
from offbeat.run.rundir import RunFolder, create_run_folder, describe_run
from offbeat.transport import base
from offbeat.transport.base import (
    Layout,
    Message,
    Network,
    PushHeader,
    ReplyHeader,
    Slot,
    WelcomeHeader,
)

CEILING, DDP = "ceiling", "ddp"
CALIBRATION_STEPS = {"mnist-sigmoid": 1000, "convnet": 4}
"""By which it is found out how many steps fill the time that was asked for."""


def train(
    *, recipe: str, disciplines: Sequence[str], seconds: float, rounds: int, **options: Any
) -> list[Row]:
    """Gradients per second of the ceiling, of each discipline and of DDP, in rounds that go through
    all of them; `options` are train's."""
    options |= {"recipe": f"offbeat.bench.recipes:{recipe.replace('-', '_')}", "threads": 1}
    options |= {"eval_every": 0, "max_restarts": 0, "quiet": True, "device": "cpu"}
    rates: dict[str, list[float]] = {name: [] for name in (CEILING, *disciplines, DDP)}
    with (
        fork_server("local") as forks,
        tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder,
    ):
        rig = Rig(Path(folder), options, forks, timeout_s=TIMEOUT_S + 10 * seconds)
        with contextlib.closing(rig):
            steps = {}
            for name in rates:
                times = rig.run(name, CALIBRATION_STEPS[recipe])
                slowest = min((len(t) - 1) / (t[-1] - t[0]) for t in times)
                steps[name] = max(10, round(slowest * seconds))
            for number in range(1, 1 + rounds):
                for name, found in rates.items():
                    found.append(rate(rig.run(name, steps[name])))
                    line = f"round {number} of {rounds}: {name} {short(found[-1])}/s"
                    print(line, file=sys.stderr, flush=True)
    rows: list[Row] = []
    for name, found in rates.items():
        row: Row = {"": name, "gradients/s": found}
        row["of the ceiling"] = [a / b for a, b in zip(found, rates[CEILING], strict=True)]
        row["times ddp"] = [a / b for a, b in zip(found, rates[DDP], strict=True)]
        rows.append(row)
    return rows


def rate(times: Sequence[Sequence[float]]) -> float:
    """Gradients per second while everybody was at work: from when the last worker was warm until
    the first one was done. `times`: for each worker, when it was done with each step."""
    start_s, end_s = window(times)
    return sum(start_s < at_s <= end_s for done in times for at_s in done) / (end_s - start_s)


def window(times: Sequence[Sequence[float]]) -> tuple[float, float]:
    """When everybody was at work."""
    start_s = max(done[len(done) // 10] for done in times)
    end_s = min(done[-1] for done in times)
    if end_s <= start_s:
        raise RunError("the workers were never at work at the same time; give more --seconds")
    return start_s, end_s


def step_times(run_dir: Path) -> list[list[float]]:
    """For each worker of a run, when it was done with each step."""
    times: dict[int, list[float]] = {}
    for event in read_events(RunFolder(run_dir).events):
        if event["kind"] == "step":
            parts = ("start_s", "compute_s", "prepare_s", "exchange_s")
            times.setdefault(event["worker"], []).append(sum(event[part] for part in parts))
    return list(times.values())


class Rig:
    """Runs one contender after the other, each in a folder of its own under `folder`."""

    def __init__(
        self,
        folder: Path,
        options: Mapping[str, Any],
        forks: ForkServer | None,
        *,
        timeout_s: float,
    ) -> None:
        self._folder = folder
        self._options = options
        self._forks = forks
        self._timeout_s = timeout_s
        self._num_runs = 0
        job = make_job(make_config(options, {"steps": 1}), load_recipe(options["recipe"]))
        self._config = job.config
        self._facts = job.facts
        self._data = share({"train": job.train})  # as the engine does, for the other contenders

    def close(self) -> None:
        os.close(self._data)

    def run(self, name: str, steps: int) -> list[list[float]]:
        """Have every worker do so many steps; returns when each was done with each of them."""
        self._num_runs += 1
        run_dir = self._folder / str(self._num_runs)
        more: dict[str, Any] = {"steps": steps, "run_dir": str(run_dir)}
        if name in (CEILING, DDP):
            self._run_alone(name, dataclasses.replace(self._config, **more))
        else:
            config = make_config(self._options, more, {"discipline": name})
            if train_config(config, forks=self._forks).interrupted:
                raise KeyboardInterrupt  # the engine took it for a wish to end that run well
        return step_times(run_dir)

    def _run_alone(self, name: str, config: TrainConfig) -> None:
        """Workers without an engine."""
        folder = create_run_folder(config)
        described = describe_run(config, job=dataclasses.asdict(self._facts))
        folder.write_json(folder.config, described)
        deadline_s = time.monotonic() + self._timeout_s
        with contextlib.ExitStack() as stack:
            children = []
            for rank in range(config.workers):
                log = folder.logs / f"{rank}.log"
                arguments = (name, str(rank), str(folder.path))
                child = stack.enter_context(
                    started("offbeat.bench.train", log, *arguments, data=self._data)
                )
                children.append((child, log))
            for child, log in children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(deadline_s - time.monotonic())
                if child.returncode != 0:
                    how = "does not end" if child.returncode is None else "failed"
                    raise RunError(f"a process of {name} {how}: {last_line(log)}")


class _NoServer(base.WorkerEnd):
    """Takes everything, and leaves the worker's parameters as they are."""

    def __init__(self, layout: Layout, params: Tensor) -> None:
        self.welcome = WelcomeHeader(version=0)
        self._reply = ReplyHeader(0, version=0)
        self._is_through = False
        self._slot = Slot.allocate(layout)
        self.reply_slot = dataclasses.replace(self._slot, values=params)

    @property
    def gradient_slot(self) -> Slot:
        return self._slot

    pushed_slot = gradient_slot

    def push(self, header: PushHeader) -> None:
        self._reply = ReplyHeader(header.sequence, version=0)

    def wait_reply(self, timeout_s: float) -> ReplyHeader:
        if self._is_through:
            raise ConnectionClosedError("there is nobody to wait for", over=True)
        return self._reply

    def beat(self) -> None:
        pass

    def finish(self, sequence: int) -> None:
        self._is_through = True

    def close(self) -> None:
        pass


class _NoNetwork(Network):
    def connect(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float, params: Tensor
    ) -> _NoServer:
        return _NoServer(layout, params)

    def connect_for_calls(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float
    ) -> base.CallEnd:
        raise ConnectionClosedError("there is no server here")


def _work(name: str, rank: int, folder: RunFolder) -> None:
    """A worker's process without an engine, but with all else that such a process does."""
    config, described = folder.read_config()
    sources = open_shared(int(os.environ[DATA_VARIABLE]))
    job = rejoin_job(config, load_recipe(config.recipe), Facts(**described["job"]), sources)
    events = EventLog.create(folder.events, f"worker-{rank}")
    control = Control(None)
    control.flush = events.flush
    control.start()
    if name == CEILING:
        means: dict[str, Any] = {"log": silent_log(), "clock": time.monotonic}
        means |= {"events": events, "stop": threading.Event(), "seeds_torch": True}
        towers = job.make_towers(rank, job.make_model())
        _meet(folder.path.resolve() / "store", config.workers)
        Worker(job, rank, towers, _NoNetwork(), **means).run()
    else:
        _train_ddp(job, rank, events, store=folder.path.resolve() / "store")
    control.close()
    events.close()


def _meet(place: Path, count: int) -> None:
    """Wait until so many are here: some have imported torch seconds before others."""
    store = torch.distributed.FileStore(str(place), count)  # type: ignore[attr-defined]
    if store.add("here", 1) == count:
        store.set("all", "")
    store.wait(["all"], datetime.timedelta(seconds=TIMEOUT_S))


def _train_ddp(job: Job, rank: int, events: EventLog, store: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=job.config.workers,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    model = nn.parallel.DistributedDataParallel(job.recipe.model())
    params = list(model.parameters())
    optimizer = job.optimizer.build(params, [0 for _ in params])
    for _, batch in job.batches(rank):
        start_s = time.monotonic()
        optimizer.zero_grad()
        job.recipe.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        times = {"start_s": start_s, "compute_s": time.monotonic() - start_s}
        events.record("step", worker=rank, **times, prepare_s=0.0, exchange_s=0.0)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _work(sys.argv[1], int(sys.argv[2]), RunFolder(Path(sys.argv[3])))
