"""Roles of a launched run that a person starts, one by one, on the machines of a cluster.

Called by the command line; servers are those of any run (roles.py).

    offbeat launch --cluster cluster.toml --role master --discipline sync train.py
    offbeat launch --cluster cluster.toml --role worker --index 1 train.py
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.api import Result
from offbeat.cli.roles import console, decided_by, stopped_by_signals
from offbeat.cluster.endpoint import Endpoint
from offbeat.cluster.scripts import run_worker_script
from offbeat.launching import InCluster, launch, relaunch
from offbeat.loops.running import find_modules
from offbeat.recipes.callbacks import Callback

__all__ = ["find_modules", "master", "work"]


def master(
    endpoint: Endpoint,
    given: Mapping[str, Any],
    script: Mapping[str, Any] | None,
    resume: str | None,
    say: Callable[[str], None],
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Be the master: keep the run's folder, and run the script as rank 0."""
    options = {**given, **decided_by(endpoint.hosts, given)}
    with stopped_by_signals() as stop:
        here = InCluster(endpoint, stop)
        if resume is not None:
            return relaunch(Path(resume), options, say=say, callbacks=callbacks, master=here)
        assert script is not None
        file, arguments = script["file"], script["arguments"]
        return launch(file, arguments, options, say=say, callbacks=callbacks, master=here)


def work(
    endpoint: Endpoint, rank: int, script: Mapping[str, Any], local: Mapping[str, Any]
) -> bool:
    """Be a worker. Returns whether it was stopped."""
    with console(f"worker-{rank}") as (log, stop):
        run_worker_script(endpoint, rank, script, log=log, stop=stop, local=local)
        return stop.is_set()
