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

from offbeat.errors import (
    OffbeatError,
    RecipeError,
    ScriptEndedError,
    ScriptRefusedError,
    StepError,
    UsageError,
)
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
    failed with, or a ScriptRefusedError if that was ours to say before it took a step."""
    here.log.info("process %d is worker %d", os.getpid(), here.rank)
    torch.set_num_threads(threads)
    settle(Place(rank=here.rank, world_size=here.config.workers))
    find_modules(script)
    seat.taken = here
    try:
        has_exited = execute(script)
    except StoppedError:
        _leave(here)
        return
    except BaseException as error:
        if here.is_shown:
            _show(error, here, script["file"])
        step = 0 if here.loop is None else here.loop.step_number
        here.stop.set()  # of rank 0: the books end with a checkpoint of what there is
        _leave(here)
        if step == 0 and isinstance(error, UsageError):
            raise ScriptRefusedError(str(error)) from error
        failure = StepError(here.rank, step, _in_words(error))
        raise failure from failure.__cause__
    if here.loop is None:
        if has_exited:
            raise ScriptEndedError(f"{script['file']} ended by itself before it trained anything")
        raise ScriptRefusedError(
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


def _show(error: BaseException, here: seat.Seat, file: str) -> None:
    """What Python would show if the script ran by itself; our own errors say it in their line."""
    if isinstance(error, KeyboardInterrupt) and here.stop.is_set():  # the second Ctrl-C
        return
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    elif not isinstance(error, OffbeatError):
        found: BaseException | None = error
        while found is not None:
            found.__traceback__ = _of_script(found, file)
            found = found.__cause__ or found.__context__
        traceback.print_exception(error)


def _of_script(error: BaseException, file: str) -> TracebackType | None:
    """Its traceback from where the script's own begins; of a syntax error there is none."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename != file:
        found = found.tb_next
    return found if isinstance(error, SyntaxError) else found or error.__traceback__


def _in_words(error: BaseException) -> BaseException:
    """What a script that gives up of itself says is its exit code."""
    if not isinstance(error, SystemExit):
        return error
    code = error.code if isinstance(error.code, int) else 1
    return RecipeError(f"the script ended with exit code {code}")


def execute(script: Mapping[str, Any]) -> bool:
    """As `python FILE ARGUMENTS` would; an exit that is none of a failure is an end. Returns
    whether it was one."""
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
        return True
    return False
