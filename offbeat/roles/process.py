"""A role as a process of its own: `run_process(config, role, index)`.

Behind `offbeat role ps|master|worker|evaluator --index I --run-dir RUN`, which is what the engine
`local` starts, one process each; a worker's has the rest of its crew too. All that a role needs to
know stands in the run's folder. The process has a line to the engine that started it, which
control.py describes.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from offbeat.config import TrainConfig
from offbeat.data.batches import Source
from offbeat.data.shared import open_shared
from offbeat.recipes.base import RecipeFile, load_recipe
from offbeat.roles.context import Context, FolderRecords
from offbeat.roles.control import DATA_VARIABLE, Control
from offbeat.roles.replica import PeerNetwork
from offbeat.roles.run import run_role
from offbeat.run.addresses import Cluster, ClusterNetwork, Home
from offbeat.run.job import Facts, Job
from offbeat.run.making import rejoin_job
from offbeat.run.places import place_of_process
from offbeat.run.rundir import RunFolder, close_log, role_name
from offbeat.run.tensorboard import Summaries
from offbeat.transport.base import Listener
from offbeat.transport.sockets import JointListener, SocketListener, any_port

PATIENCE_S = 3.0
"""When the engine is gone servers and workers wait so long for the master, who commits a last
checkpoint and tells them that the run is over."""


def run_process(
    config: TrainConfig,
    role: str,
    index: int,
    control: Control | None = None,
    home: Home | None = None,
    shared: Mapping[str, Source] | None = None,
) -> None:
    """Be `role` number `index` of the run in `config.run_dir`, until it is over. `home`: where that
    is, if there are several machines; `shared`: the data that the engine has given, if it did.

    Raises what the role failed with; its log has the traceback.
    """
    with logged(config, role, index) as (folder, log):
        job = _make_job(config, role, folder, _inherited() if shared is None else shared)
        if role != "master" or not folder.state.exists():  # or its predecessor died at the very end
            run_in_folder(job, folder, role, index, log, control or Control(None), home)


@contextlib.contextmanager
def logged(
    config: TrainConfig, role: str, index: int
) -> Iterator[tuple[RunFolder, logging.Logger]]:
    """The folder of a role's run, and the role's log, which has what goes wrong."""
    assert config.run_dir is not None, "a role belongs to a run's folder"
    folder = RunFolder(Path(config.run_dir))
    log = folder.open_log(role_name(role, index))
    try:
        yield folder, log
    except BaseException as error:
        log.error("failed", exc_info=error)
        raise
    finally:
        close_log(log)


def run_in_folder(
    job: Job,
    folder: RunFolder,
    role: str,
    index: int,
    log: logging.Logger,
    control: Control,
    home: Home | None = None,
) -> None:
    home = home or Home.alone(folder)
    cluster = home.cluster()
    name = role_name(role, index)
    records = FolderRecords(folder, {name: log, "worker-0": log})  # rank 0 is the master's
    others = job.crew(index)[1:] if role in ("master", "worker") else ()
    names = [name, *(role_name("worker", rank) for rank in others)]
    control.tell({"placed": place_of_process()})
    for each in names:
        records.log(each).info("process %d is %s", os.getpid(), " and ".join(names))
    summaries = Summaries(job, folder, log, cluster.clock)
    if role in ("ps", "worker"):
        control.patience_s = PATIENCE_S
    control.flush = records.flush
    context = Context(
        job=job,
        records=records,
        clock=cluster.clock,
        stop=control.stop,
        say=control.say if role != "worker" else None,
        report=control.reports,
        network=PeerNetwork(cluster.meeting) if cluster.meeting else ClusterNetwork(home),
        folder=folder,
        states=folder.states,
        journal=folder.journal,
        generation=_generation(cluster, role, index),
        listener=_listen(home, job, index, control) if role == "ps" else None,
        summaries=summaries,
        begins_at_once=True,
        orders=control.orders,
    )
    try:
        run_role(context, role, index)
    finally:
        summaries.close()
        records.close()


def _listen(home: Home, job: Job, index: int, control: Control) -> Listener:
    torch.set_num_threads(1)  # a server of many on this machine
    layout = job.layout(index)
    here = SocketListener(home.cluster().ps[index], layout)
    if not home.host:
        return here
    from_afar = SocketListener(any_port(home.host), layout, home.terms)
    control.tell({"address": from_afar.address})
    return JointListener([here, from_afar])


def _generation(cluster: Cluster, role: str, index: int) -> int:
    if role == "evaluator":
        return 0
    return cluster.epochs[index] if role == "ps" else cluster.incarnations[index]


def _make_job(
    config: TrainConfig, role: str, folder: RunFolder, shared: Mapping[str, Source]
) -> Job:
    described = folder.read_json(folder.config)
    recipe = load_recipe(config.recipe, RecipeFile.kept(described), config.set)
    needs = ["test" if role == "evaluator" else "train"]
    return rejoin_job(
        config,
        recipe,
        Facts(**described["job"]),
        None if role == "ps" else shared,  # which has no use for data
        kept_initial=folder.initial if role in ("master", "worker") else None,
        needs=needs,
    )


def _inherited() -> dict[str, Source]:
    """The data that the engine shares with its processes, if there is an engine."""
    descriptor = os.environ.pop(DATA_VARIABLE, None)
    if descriptor is None:
        return {}
    sources = open_shared(int(descriptor))
    os.close(int(descriptor))
    return sources
