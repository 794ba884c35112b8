"""Runs contenders in turn, each in a folder of its own, and counts their gradients per second.

A contender is one of Offbeat's disciplines, which an engine runs as ever, or one of those that have
processes of their own (contenders/), with the same model, data, batch, optimizer and threads:

    rates = rates_of(["ceiling", "sync", "ddp"], recipe="convnet", seconds=4, rounds=5, workers=2)
"""

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.api import train_config
from offbeat.bench.contenders import CONTENDERS
from offbeat.bench.processes import TIMEOUT_S, last_line, started
from offbeat.bench.tables import short
from offbeat.config import TrainConfig, make_config
from offbeat.data.shared import share
from offbeat.engines.forkserver import ForkServer, fork_server
from offbeat.errors import RunError
from offbeat.recipes.base import load_recipe
from offbeat.run.events import read_events
from offbeat.run.making import make_job
from offbeat.run.rundir import RunFolder, create_run_folder, describe_run

CALIBRATION_STEPS = {"mnist-sigmoid": 1000, "convnet": 4, "alexnet": 4, "wide": 4}
"""By which it is found out how many steps fill the time that was asked for."""
FEWEST_STEPS = 10
TRIES = 3
"""So often a run that was too short is made twice as long."""


class NeverTogetherError(RunError):
    pass


def options_for(recipe: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a run that is timed; `given` are train's."""
    fixed = {"threads": 1, "eval_every": 0, "max_restarts": 0, "quiet": True, "device": "cpu"}
    return {**given, "recipe": f"offbeat.bench.recipes:{recipe.replace('-', '_')}", **fixed}


def rates_of(
    names: Iterable[str], *, recipe: str, seconds: float, rounds: int, **options: Any
) -> dict[str, list[float]]:
    """Gradients per second of each contender, in rounds that go through all of them; `options` are
    train's."""
    rates: dict[str, list[float]] = {name: [] for name in names}
    with (
        fork_server("local") as forks,
        tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder,
    ):
        given = options_for(recipe, options)
        rig = Rig(Path(folder), given, forks, timeout_s=TIMEOUT_S + 10 * seconds)
        with contextlib.closing(rig):
            steps = {n: rig.steps_for(n, seconds, CALIBRATION_STEPS[recipe]) for n in rates}
            for number in range(1, 1 + rounds):
                for name, found in rates.items():
                    found.append(rig.rate(name, steps))
                    line = f"round {number} of {rounds}: {name} {short(found[-1])}/s"
                    print(line, file=sys.stderr, flush=True)
    return rates


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
        raise NeverTogetherError(
            "the workers were never at work at the same time; give more --seconds"
        )
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
        self.num_elements = job.manifest.num_elements
        self._facts = job.facts
        self._data = share({"train": job.train})  # as the engine does, for the other contenders

    def close(self) -> None:
        os.close(self._data)

    def steps_for(self, name: str, seconds: float, calibration: int) -> int:
        """How many steps of a worker take about so long."""
        times = self.run(name, calibration)
        slowest = min((len(done) - 1) / (done[-1] - done[0]) for done in times)
        return max(FEWEST_STEPS, round(slowest * seconds))

    def rate(self, name: str, steps: MutableMapping[str, int]) -> float:
        """Gradients per second, with so many steps of each contender. One that stalls now and then
        may be through with them before another worker is warm: it is given more."""
        for _ in range(TRIES):
            try:
                return rate(self.run(name, steps[name]))
            except NeverTogetherError:
                steps[name] *= 2
        return rate(self.run(name, steps[name]))

    def run(self, name: str, steps: int) -> list[list[float]]:
        """Have every worker do so many steps; returns when each was done with each of them."""
        self._num_runs += 1
        run_dir = self._folder / str(self._num_runs)
        more: dict[str, Any] = {"steps": steps, "run_dir": str(run_dir)}
        if name in CONTENDERS:
            self._run_alone(name, dataclasses.replace(self._config, **more))
        else:
            config = make_config(self._options, more, {"discipline": name})
            if train_config(config, forks=self._forks).interrupted:
                raise KeyboardInterrupt  # the engine took it for a wish to end that run well
        return step_times(run_dir)

    def _run_alone(self, name: str, config: TrainConfig) -> None:
        """A contender that has processes of its own."""
        folder = create_run_folder(config)
        described = describe_run(config, job=dataclasses.asdict(self._facts))
        folder.write_json(folder.config, described)
        deadline_s = time.monotonic() + self._timeout_s
        with contextlib.ExitStack() as stack:
            children = []
            for index in range(CONTENDERS[name].num_processes(config.workers)):
                log = folder.logs / f"{index}.log"
                arguments = (name, str(index), str(folder.path))
                child = stack.enter_context(
                    started("offbeat.bench.contenders", log, *arguments, data=self._data)
                )
                children.append((child, log))
            for child, log in children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(deadline_s - time.monotonic())
                if child.returncode != 0:
                    how = "does not end" if child.returncode is None else "failed"
                    raise RunError(f"a process of {name} {how}: {last_line(log)}")
