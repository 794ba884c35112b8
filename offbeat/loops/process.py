"""A role's process where the loop is the user's: a server as ever, and workers that run a script.

What `offbeat role ... --run-dir RUN` comes to in a run whose config.json names a script.
"""

import logging
from collections.abc import Mapping
from typing import Any

from offbeat.config import TrainConfig
from offbeat.loops.description import Description
from offbeat.loops.job import make_loop_job
from offbeat.loops.running import find_modules, run_script
from offbeat.loops.seat import Seat
from offbeat.roles.context import FolderRecords
from offbeat.roles.control import Control
from offbeat.roles.process import logged, run_in_folder
from offbeat.run.addresses import ClusterNetwork, Home
from offbeat.run.places import place_of_process
from offbeat.run.rundir import RunFolder, num_cores, role_name


def run_process(
    config: TrainConfig,
    role: str,
    index: int,
    script: Mapping[str, Any],
    control: Control,
    home: Home | None = None,
) -> None:
    """Be `role` number `index` of the run in `config.run_dir`, until it is over. `home`: where that
    is, if there are several machines."""
    with logged(config, role, index) as (folder, log):
        if role == "ps":
            find_modules(script)
            description = Description.wait_for(folder, control.stop)
            job = make_loop_job(config, description)
            run_in_folder(job, folder, role, index, log, control, home)
        elif role == "worker" or not folder.state.exists():  # or all was over when rank 0 died
            home = home or Home.alone(folder)
            _run_script(config, folder, script, index, log, control, home)


def _run_script(
    config: TrainConfig,
    folder: RunFolder,
    script: Mapping[str, Any],
    rank: int,
    log: logging.Logger,
    control: Control,
    home: Home,
) -> None:
    cluster = home.cluster()
    name = "master" if rank == 0 else role_name("worker", rank)
    records = FolderRecords(folder, {name: log, role_name("worker", rank): log})
    control.flush = records.flush
    control.tell({"placed": place_of_process()})

    def agree(mine: Description) -> Description:
        if rank == 0 and not folder.model.exists():
            mine.write(folder)
        return mine.agreed(Description.wait_for(folder, control.stop))

    here = Seat(
        config=config,
        rank=rank,
        incarnation=cluster.incarnations[rank],
        clock=cluster.clock,
        stop=control.stop,
        records=records,
        log=log,
        states=folder.states,
        network=lambda job, description: ClusterNetwork(home),
        agree=agree,
        reports=control.reports,
        folder=folder,
        is_shown=rank == 0,
        orders=control.orders,
    )
    try:
        run_script(here, script, config.threads or max(1, num_cores() // config.workers))
    finally:
        records.close()
