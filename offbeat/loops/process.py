"""A role's process where the loop is the user's: a server as ever, and workers that run a script.

Called by roles/process.py for a run whose config.json names a script.
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
from offbeat.loops import place
from offbeat.loops.description import Description
from offbeat.loops.job import make_loop_job
from offbeat.loops.loop import Loop, StoppedError
from offbeat.roles.context import FolderRecords
from offbeat.roles.control import Control
from offbeat.run.addresses import Cluster
from offbeat.run.job import Job
from offbeat.run.rundir import RunFolder, num_cores, role_name


def job_of_server(config: TrainConfig, folder: RunFolder, control: Control) -> Job:
    """Waits until rank 0's script has said what is trained."""
    return make_loop_job(config, Description.wait_for(folder, control.stop))


def run_script(
    config: TrainConfig,
    folder: RunFolder,
    script: Mapping[str, Any],
    rank: int,
    log: logging.Logger,
    control: Control,
) -> None:
    """Be worker `rank`: run the script to its end, and stay until the run is over."""
    cluster = Cluster.read(folder)
    name = "master" if rank == 0 else role_name("worker", rank)
    records = FolderRecords(folder, {name: log, role_name("worker", rank): log})
    control.flush = records.flush
    log.info("process %d is %s", os.getpid(), name)
    torch.set_num_threads(config.threads or max(1, num_cores() // config.workers))
    place.here = place.Place(
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
        _run_to_its_end(place.here, script)
    finally:
        records.close()


def _run_to_its_end(here: place.Place, script: Mapping[str, Any]) -> None:
    try:
        _execute(script)
    except StoppedError:
        if here.loop is not None:
            here.loop.close()
        return
    except BaseException as error:
        if here.rank == 0:  # whose output is what the user sees
            traceback.print_exception(error.with_traceback(_of_script(error, script["file"])))
        step = 0 if here.loop is None else here.loop.step_number
        if here.loop is not None:
            here.loop.fail()
        raise StepError(here.rank, step, error) from error
    if here.loop is None:
        raise RecipeError(
            f"{script['file']} ended without a call of offbeat.distribute(model, optimizer): "
            f"nothing was trained"
        )
    _through(here.loop)


def _of_script(error: BaseException, file: str) -> TracebackType | None:
    """Its traceback from where the script's own begins."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename != file:
        found = found.tb_next
    return found or error.__traceback__


def _through(loop: Loop) -> None:
    try:
        loop.finish()
    finally:
        loop.close()


def _execute(script: Mapping[str, Any]) -> None:
    """As `python FILE ARGUMENTS` would; an exit that is none of a failure is an end."""
    file = str(script["file"])
    sys.argv = [file, *script["arguments"]]
    sys.path.insert(0, str(Path(file).resolve().parent))
    try:
        runpy.run_path(file, run_name="__main__")
    except StoppedError:
        raise
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
