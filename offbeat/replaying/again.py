"""`offbeat replay RUN`: every gradient of a recorded run is computed again, in one process, and
applied in the recorded order.

    found = offbeat.replay("runs/...")
    found.is_same, found.difference, found.state_dict()

An asynchronous run comes out different each time; but what happened in one is a function of what
its events say: the order of updates, and which versions and which batch every gradient was computed
on. So the same arithmetic (towers.py, shard.py) gives the same bits, and a run that cannot be
repeated can be looked at again. As it goes, what comes out is held against what the run wrote down:
the loss of every step, and the digest of every checkpoint.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from offbeat.api import recipe_of
from offbeat.config import TrainConfig
from offbeat.errors import ConfigError, RunDirError
from offbeat.recipes.base import Recipe, RecipeFunction
from offbeat.replaying.course import Course, Replayed
from offbeat.replaying.recorded import Recorded
from offbeat.run.checkpoint import write_weights
from offbeat.run.job import Facts, Job
from offbeat.run.making import rejoin_job
from offbeat.run.rundir import RunFolder
from offbeat.towers import CPU


def replay(
    run_dir: str | Path,
    *,
    to: int | None = None,
    until_nan: bool = False,
    without_worker: int | None = None,
    recipe: str | Recipe | RecipeFunction | None = None,
    data_dir: str | None = None,
    out: str | Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Replayed:
    """Do a recorded run again; nothing is written into its folder. `to`: the version of every shard
    to stop at. `until_nan`: stop where a loss or a gradient was no number for the first time, and
    say where that began. `without_worker`: leave out what this one has brought: what the run would
    have come to, had the others done the same, which is no question of bits. `recipe`: the same
    one, where it is not to be found where it was. `out`: where to write the weights that come
    out."""
    folder = RunFolder(Path(run_dir))
    job = _job_of(folder, recipe, data_dir, say)
    recorded = Recorded.read(folder.events, len(job.slices))
    if not any(recorded.lives):
        raise RunDirError(f"{run_dir} has no events of servers: there is nothing to replay")
    if without_worker is not None and without_worker not in range(job.config.workers):
        raise ConfigError(f"there is no worker {without_worker} of {job.config.workers}")
    if to is not None and any(to > max(life.ends for life in lives) for lives in recorded.lives):
        raise ConfigError(f"the run has no version {to} of every shard")
    if until_nan and (to is not None or without_worker is not None):
        raise ConfigError("until_nan says itself how far to go, and with all workers")
    target = recorded.unusable if until_nan else None
    if until_nan and target is None:
        say("no loss and no gradient of this run was found not to be finite")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)  # as servers have it
    try:
        with torch.random.fork_rng(devices=[]):
            found = Course(job, recorded, to, without_worker, say, target).run()
    finally:
        torch.set_num_threads(threads_before)
    if out is not None:
        write_weights(Path(out), found.state)
    return found


def _job_of(
    folder: RunFolder,
    recipe: str | Recipe | RecipeFunction | None,
    data_dir: str | None,
    say: Callable[[str], None],
) -> Job:
    config, described = folder.read_config()
    if "script" in described:
        raise ConfigError(
            f"{folder.path} was launched: a script's own loop cannot be done again from events"
        )
    if data_dir is not None:
        config = dataclasses.replace(config, data_dir=data_dir)
    facts = Facts(**described["job"])
    _check(config, facts)
    made = recipe_of(config, described, recipe, say)
    job = rejoin_job(config, made, facts, {}, folder.initial, needs=["train", "test"])
    _check_job(job)
    return job


def _check(config: TrainConfig, facts: Facts) -> None:
    """Refuse what events do not say enough of."""
    kind = config.chosen.kind
    if not kind.locked:
        raise ConfigError(
            f"{kind.name} applies gradients with no lock, so that no order of additions is "
            f"recorded: there is nothing to replay to the bit"
        )
    if not kind.served:
        raise ConfigError(f"{kind.name} has no servers, whose events a replay goes by")
    if facts.elastic:
        raise ConfigError("workers came and went in this run: it cannot be replayed so far")


def _check_job(job: Job) -> None:
    devices = {device for rank in range(job.config.workers) for device in job.devices(rank)}
    if devices != {CPU}:
        raise ConfigError(
            "the run was computed on a GPU, whose sums are not the same every time: only what was "
            "computed on the CPU can be replayed to the bit"
        )
    if job.is_coded and job.facts.engine == "ray" and not job.config.compress_always:
        raise ConfigError(
            "on Ray some connections code, and others share memory: no event says which did"
        )
    if job.manifest.is_sparse:
        raise ConfigError("sparse gradients cannot be replayed so far")
