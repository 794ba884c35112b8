"""A role's process where the loop is the user's: a server as ever, and workers that run a script.

What `offbeat role ... --run-dir RUN` comes to in a run whose config.json names a script.
"""

import logging
import os
import runpy
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from offbeat.config import TrainConfig
from offbeat.errors import RecipeError, StepError
from offbeat.loops import seat
from offbeat.loops.description import Description
from offbeat.loops.job import make_loop_job
from offbeat.loops.loop import StoppedError
from offbeat.place import Place, settle
from offbeat.roles.context import FolderRecords
from offbeat.roles.control import Control
from offbeat.roles.process import logged, run_in_folder
from offbeat.run.addresses import Cluster
from offbeat.run.rundir import RunFolder, num_cores, role_name

OF_GROUPS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)
"""What tells torch and libraries which process of a group they are. Whoever set it did not mean
these workers, each of which would wait for a group that never comes together."""


def run_process(
    config: TrainConfig, role: str, index: int, script: Mapping[str, Any], control: Control
) -> None:
    """Be `role` number `index` of the run in `config.run_dir`, until it is over."""
    with logged(config, role, index) as (folder, log):
        sys.path.insert(0, str(Path(script["file"]).parent))
        if role == "ps":
            description = Description.wait_for(folder, control.stop)
            run_in_folder(make_loop_job(config, description), folder, role, index, log, control)
        elif role == "worker" or not folder.state.exists():  # or all was over when rank 0 died
            _run_script(config, folder, script, index, log, control)


def _run_script(
    config: TrainConfig,
    folder: RunFolder,
    script: Mapping[str, Any],
    rank: int,
    log: logging.Logger,
    control: Control,
) -> None:
    """Run the script to its end, and stay until the run is over."""
    cluster = Cluster.read(folder)
    name = "master" if rank == 0 else role_name("worker", rank)
    records = FolderRecords(folder, {name: log, role_name("worker", rank): log})
    control.flush = records.flush
    log.info("process %d is %s", os.getpid(), name)
    torch.set_num_threads(config.threads or max(1, num_cores() // config.workers))
    settle(Place(rank=rank, world_size=config.workers))
    seat.taken = seat.Seat(
        config=config,
        folder=folder,
        rank=rank,
        incarnation=cluster.incarnations[rank],
        cluster=cluster,
        control=control,
        records=records,
        log=log,
    )
    try:
        _run_to_its_end(seat.taken, script)
    finally:
        records.close()


def _run_to_its_end(here: seat.Seat, script: Mapping[str, Any]) -> None:
    try:
        execute(script)
    except StoppedError:
        _leave(here)
        return
    except BaseException as error:
        if here.rank == 0:  # whose output is what the user sees
            traceback.print_exception(error.with_traceback(_of_script(error, script["file"])))
        step = 0 if here.loop is None else here.loop.step_number
        here.control.stop.set()  # of rank 0: the books end with a checkpoint of what there is
        _leave(here)
        raise StepError(here.rank, step, error) from error
    if here.loop is None:
        raise RecipeError(
            f"{script['file']} ended without a call of offbeat.distribute(model, optimizer): "
            f"nothing was trained"
        )
    try:
        here.loop.finish()
    finally:
        _leave(here)


def _leave(here: seat.Seat) -> None:
    if here.loop is not None:
        here.loop.close()


def _of_script(error: BaseException, file: str) -> TracebackType | None:
    """Its traceback from where the script's own begins."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename != file:
        found = found.tb_next
    return found or error.__traceback__


def execute(script: Mapping[str, Any]) -> None:
    """As `python FILE ARGUMENTS` would; an exit that is none of a failure is an end."""
    file = str(script["file"])
    sys.argv = [file, *script["arguments"]]
    for name in OF_GROUPS:
        os.environ.pop(name, None)
    try:
        runpy.run_path(file, run_name="__main__")
    except StoppedError:
        raise
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
