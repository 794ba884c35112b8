"""Running a script of the user's own to its end, as the worker whose seat is given.

Called by a role's process (process.py), by a worker of a cluster (cluster/scripts.py) and by its
master (engines/scripted.py).
"""

import os
import runpy
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from offbeat.errors import RecipeError, StepError
from offbeat.loops import seat
from offbeat.loops.loop import StoppedError
from offbeat.place import Place, settle

OF_GROUPS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)
"""What tells torch and libraries which process of a group they are. Whoever set it did not mean
these workers, each of which would wait for a group that never comes together."""


def run_script(here: seat.Seat, script: Mapping[str, Any], threads: int) -> None:
    """Run the script to its end, and stay until the run is over. Raises a StepError with what it
    failed with."""
    here.log.info("process %d is worker %d", os.getpid(), here.rank)
    torch.set_num_threads(threads)
    settle(Place(rank=here.rank, world_size=here.config.workers))
    find_modules(script)
    seat.taken = here
    try:
        execute(script)
    except StoppedError:
        _leave(here)
        return
    except BaseException as error:
        gives_up = isinstance(error, KeyboardInterrupt) and here.stop.is_set()  # the second Ctrl-C
        if here.is_shown and not gives_up:
            traceback.print_exception(error.with_traceback(_of_script(error, script["file"])))
        step = 0 if here.loop is None else here.loop.step_number
        here.stop.set()  # of rank 0: the books end with a checkpoint of what there is
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


def find_modules(script: Mapping[str, Any]) -> None:
    """Have what lies beside the script be found, as Python itself does."""
    sys.path.insert(0, str(Path(script["file"]).parent))


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
