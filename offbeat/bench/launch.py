"""`offbeat bench launch`: what a loop of one's own costs, beside the same as a recipe.

All train the same model on the same made-up data with the same number of workers, one after the
other in each round; the script is bench/own_loop.py, with its batches made ahead and without.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offbeat.api import train_config
from offbeat.bench import own_loop
from offbeat.bench.rig import CALIBRATION_STEPS, rate, step_times
from offbeat.bench.tables import Row, short
from offbeat.config import make_config
from offbeat.engines.forkserver import ForkServer, fork_server
from offbeat.launching import launch

RECIPE, SCRIPT, WITH_AHEAD = "recipe", "script", "script, ahead"


def bench_launch(
    *, recipe: str, disciplines: Sequence[str], seconds: float, rounds: int, **options: Any
) -> list[Row]:
    """Gradients per second of a recipe and of a launched script, under each discipline; `options`
    are train's and launch's."""
    name = recipe.replace("-", "_")
    options |= {"threads": 1, "max_restarts": 0, "quiet": True}
    cases = [
        (discipline, way) for discipline in disciplines for way in (RECIPE, SCRIPT, WITH_AHEAD)
    ]
    found: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    with (
        fork_server("local") as forks,
        tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder,
    ):
        rig = _Rig(Path(folder), name, options, forks)
        steps = {case: rig.steps_for(seconds, *case, CALIBRATION_STEPS[recipe]) for case in cases}
        for number in range(1, 1 + rounds):
            for case in cases:
                found[case].append(rate(rig.run(*case, steps[case])))
                line = f"round {number} of {rounds}: {', '.join(case)} {short(found[case][-1])}/s"
                print(line, file=sys.stderr, flush=True)
    rows: list[Row] = []
    for discipline, way in cases:
        mine, beside = found[discipline, way], found[discipline, RECIPE]
        row: Row = {"discipline": discipline, "": way, "gradients/s": mine}
        row["of the recipe"] = [a / b for a, b in zip(mine, beside, strict=True)]
        rows.append(row)
    return rows


class _Rig:
    def __init__(
        self, folder: Path, name: str, options: dict[str, Any], forks: ForkServer | None
    ) -> None:
        self._folder = folder
        self._name = name
        self._options = options
        self._forks = forks
        self._num_runs = 0

    def steps_for(self, seconds: float, discipline: str, way: str, tried: int) -> int:
        """How many of each worker's fill the time."""
        times = self.run(discipline, way, tried)
        slowest = min((len(done) - 1) / (done[-1] - done[0]) for done in times)
        return max(10, round(slowest * seconds))

    def run(self, discipline: str, way: str, steps: int) -> list[list[float]]:
        """When each worker was done with each of its steps."""
        self._num_runs += 1
        run_dir = self._folder / str(self._num_runs)
        given = {**self._options, "discipline": discipline, "run_dir": str(run_dir)}
        if way != RECIPE:
            arguments = [self._name, str(steps), *([own_loop.AHEAD] if way == WITH_AHEAD else [])]
            result = launch(own_loop.__file__, arguments, given, say=_nowhere, forks=self._forks)
        else:
            given |= {"recipe": f"offbeat.bench.recipes:{self._name}", "steps": steps}
            given |= {"eval_every": 0, "device": "cpu", "engine": "local"}
            result = train_config(make_config(given), forks=self._forks)
        if result.interrupted:
            raise KeyboardInterrupt  # the engine took it for a wish to end that run well
        return step_times(run_dir)


def _nowhere(line: str) -> None:
    """What a run has to say is not the benchmark's affair."""
