"""One entry point for every role: `run_role(config, role, index)`.

Behind `offbeat role ps|master|worker|evaluator --index I --run-dir RUN`, which is what the engine
`local` starts, one process each. All that a role needs to know stands in the run's folder.

A process that an engine started has a line to it, which control.py describes.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offbeat.cluster import Cluster, ClusterNetwork
from offbeat.config import TrainConfig
from offbeat.control import DATA_VARIABLE, REPORT_EVERY_S, Control
from offbeat.data.batches import Source
from offbeat.data.shared import open_shared
from offbeat.errors import StepError
from offbeat.events import EventLog
from offbeat.job import Facts, Job, rejoin_job
from offbeat.recipes.base import RecipeFile, load_recipe
from offbeat.roles.evaluator import Evaluator
from offbeat.roles.master import Master
from offbeat.roles.server import Server
from offbeat.roles.worker import Worker
from offbeat.rundir import RunFolder, close_log
from offbeat.summaries import StepSummaries, Summaries
from offbeat.transport.sockets import SocketListener

PATIENCE_S = 3.0
"""When the engine is gone servers and workers wait so long for the master, who commits a last
checkpoint and tells them that the run is over."""


@dataclass(frozen=True, kw_only=True)
class _Means:
    """What every role works with."""

    job: Job
    folder: RunFolder
    cluster: Cluster
    control: Control
    log: logging.Logger

    def clock(self) -> float:
        return time.monotonic() - self.cluster.began_s

    def make_summaries(self) -> Summaries:
        return Summaries(self.job, self.folder, self.log, self.clock)


def run_role(config: TrainConfig, role: str, index: int, control: Control | None = None) -> None:
    """Be `role` number `index` of the run in `config.run_dir`, until it is over.

    Raises what the role failed with; its log has the traceback.
    """
    assert config.run_dir is not None, "a role belongs to a run's folder"
    folder = RunFolder(Path(config.run_dir))
    control = control or Control(None)
    name = role if role in ("master", "evaluator") else f"{role}-{index}"
    log = folder.open_log(name)
    try:
        job = _make_job(config, role, folder)
        cluster = Cluster.read(folder)
        means = _Means(job=job, folder=folder, cluster=cluster, control=control, log=log)
        log.info("process %d is %s", os.getpid(), name)
        _BODIES[role](means, index)
    except BaseException as error:
        log.error("failed", exc_info=error)
        raise
    finally:
        close_log(log)


def _make_job(config: TrainConfig, role: str, folder: RunFolder) -> Job:
    described = folder.read_json(folder.config)
    recipe = load_recipe(config.recipe, RecipeFile.kept(described))
    return rejoin_job(config, recipe, Facts(**described["job"]), _sources(role))


def _sources(role: str) -> dict[str, Source] | None:
    """The data that the engine shares with its processes, if there is an engine; None for a server,
    which has no use for it."""
    descriptor = os.environ.pop(DATA_VARIABLE, None)
    if role == "ps":
        return None
    if descriptor is None:
        return {}
    sources = open_shared(int(descriptor))
    os.close(int(descriptor))
    return sources


# -- the roles -------------------------------------------------------------------------------------


def _run_ps(means: _Means, index: int) -> None:
    torch.set_num_threads(1)
    job, control = means.job, means.control
    control.patience_s = PATIENCE_S
    epoch = means.cluster.epochs[index]
    events = EventLog.create(means.folder.events, f"ps-{index}")
    listener = SocketListener(means.cluster.ps[index], job.layout(index))
    server = Server(
        job.make_shard(index),
        job.make_discipline(),
        listener,
        index=index,
        agreement=job.agreement,
        events=events,
        log=means.log,
        clock=means.clock,
        epoch=epoch,
        worker_timeout_s=job.config.worker_timeout,
    )
    control.status = lambda: {
        "ready": server.loaded.is_set(),
        "staleness": _mean(server.recent_staleness),
    }
    control.flush = events.flush
    server.start()
    try:
        while not server.over.wait(REPORT_EVERY_S):
            if control.stop.is_set():
                break
    finally:
        server.close()
        events.close()
    if server.failure is not None:
        raise server.failure


def _run_worker(means: _Means, index: int) -> None:
    means.control.patience_s = PATIENCE_S
    incarnation = means.cluster.incarnations[index]
    events = EventLog.create(means.folder.events, f"worker-{index}")
    worker = _make_worker(means, index, incarnation, events, means.control.stop)
    means.control.status = lambda: _progress(worker)
    means.control.flush = events.flush
    try:
        worker.run()
    except BaseException as error:  # Ctrl-C reaches no role: a KeyboardInterrupt is the recipe's
        raise StepError(worker.step, error) from error
    finally:
        events.close()


def _run_master(means: _Means, index: int) -> None:
    """Rank 0's training in this thread, the run's books in another one."""
    if means.folder.state.exists():
        return  # the run was over when this one's predecessor died
    incarnation = means.cluster.incarnations[0]
    books = EventLog.create(means.folder.events, "master")
    events = EventLog.create(means.folder.events, "worker-0")
    stop, over = means.control.stop, threading.Event()
    summaries = means.make_summaries()
    worker = _make_worker(means, 0, incarnation, events, over, summaries.of_steps())
    master = Master(
        means.job,
        ClusterNetwork(means.folder),
        means.folder,
        worker.towers.model,
        events=books,
        log=means.log,
        clock=means.clock,
        stop=stop,
        watch=summaries.watch,
    )
    failures: list[BaseException] = []

    def keep_books() -> None:
        try:
            master.run()
        except Exception as error:
            means.log.error("the books cannot be kept", exc_info=error)
            failures.append(error)
        finally:
            over.set()  # also where a server is away that could say so

    def flush() -> None:
        books.flush()
        events.flush()

    means.control.status = lambda: _progress(worker)
    means.control.flush = flush
    thread = threading.Thread(target=keep_books, name="master", daemon=True)
    thread.start()
    try:
        worker.run()
    except BaseException as error:  # as in _run_worker
        failures.append(StepError(worker.step, error))
        stop.set()  # the books end with a checkpoint of what there is
    finally:
        thread.join()
        summaries.close()
        books.close()
        events.close()
    if failures:
        raise failures[-1]


def _run_evaluator(means: _Means, index: int) -> None:
    events = EventLog.create(means.folder.events, "evaluator")
    summaries = means.make_summaries()
    job = means.job
    evaluator = Evaluator(
        job,
        job.make_model().module,
        means.folder,
        events=events,
        log=means.log,
        clock=means.clock,
        stop=means.control.stop,
        scored=summaries.scored,
        say=means.control.say,
    )
    means.control.status = lambda: {"score": evaluator.latest}
    means.control.flush = events.flush
    try:
        evaluator.run()
    finally:
        summaries.close()
        events.close()


_BODIES: dict[str, Callable[[_Means, int], None]] = {
    "ps": _run_ps,
    "master": _run_master,
    "worker": _run_worker,
    "evaluator": _run_evaluator,
}


def _make_worker(
    means: _Means,
    rank: int,
    incarnation: int,
    events: EventLog,
    stop: threading.Event,
    summaries: StepSummaries | None = None,
) -> Worker:
    say = means.control.say if rank == 0 else None
    return Worker(
        means.job,
        rank,
        means.job.make_towers(rank, means.job.make_model()),
        ClusterNetwork(means.folder),
        events=events,
        log=means.log,
        clock=means.clock,
        stop=stop,
        incarnation=incarnation,
        seeds_torch=True,
        summaries=summaries,
        say=say,
    )


def _progress(worker: Worker) -> dict[str, Any]:
    stats = worker.stats
    loss = stats.loss if math.isfinite(stats.loss) else None
    return {
        "ready": worker.has_joined,
        "steps": stats.num_steps,
        "examples": stats.num_examples,
        "loss": loss,
    }


def _mean(values: Any) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None
