"""`offbeat bench simulate`: what is predicted from one run, beside what is measured.

Runs that calibrate lie between those that are predicted, in each round anew, since a machine is
not as quick in one minute as in the next; a run is predicted from the two that calibrate around it.

    python -m offbeat bench simulate --recipes fashion-cnn --rounds 5
"""

import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from offbeat.api import train_config
from offbeat.bench.cells import BESIDE, Network
from offbeat.bench.linked import train_over
from offbeat.bench.tables import Row, short
from offbeat.config import make_config
from offbeat.engines.forkserver import ForkServer, fork_server
from offbeat.errors import ConfigError, nearest
from offbeat.simulation.calibration import Recording, read_recording
from offbeat.simulation.prediction import Cell, Prediction, predict, prediction_of

FIRST_STEPS = 100
"""Of each worker, by which it is found out how many steps fill the time that was asked for."""
BETWEEN = 3
"""So many runs are predicted between two that calibrate."""
LINKED_TIMES = 3
"""As long as was asked for may a run over a link take."""
ALL = "all"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Asked:
    """A run, by train's options."""

    discipline: str
    workers: int
    servers: int = 1
    slow_worker: str | None = None
    network: Network = BESIDE
    """Of the server; one that is slower than loopback is bench/link.py's."""

    @property
    def name(self) -> str:
        straggler = f"-{self.slow_worker}" if self.slow_worker else ""
        link = "" if self.network == BESIDE else f"-{self.network.name}"
        return f"{self.discipline}-{self.workers}w-{self.servers}s{straggler}{link}"

    @property
    def options(self) -> dict[str, Any]:
        named = ("discipline", "workers", "servers", "slow_worker")
        return {name: value for name in named if (value := getattr(self, name)) is not None}

    def cell(self, recording: Recording) -> Cell:
        config, link = recording.config, vars(self.network)
        return Cell(
            discipline=config.chosen, workers=config.workers, servers=config.servers, **link
        )


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What is predicted of a recipe, and from what."""

    recipe: str
    calibration: Asked
    cells: Sequence[Asked]
    cores: float | None = None
    """That all share; None: those of the machine."""


SHARED = (
    Asked("sync", 2),
    Asked("reply-apply", 2),
    Asked("bounded:1", 2),
    Asked("buffer:2", 2),
    Asked("apply-reply", 1),
    Asked("apply-reply", 3),
    Asked("apply-reply", 4),
    Asked("sync", 3),
    Asked("apply-reply", 2, servers=2),
    Asked("apply-reply", 2, slow_worker="1:3x"),
    Asked("sync", 2, slow_worker="1:3x"),
    Asked("bounded:2", 3, slow_worker="1:3x"),
)
APART = (
    Asked("sync", 4),
    Asked("bounded:1", 4),
    Asked("apply-reply", 1),
    Asked("apply-reply", 8),
    Asked("apply-reply", 12),
    Asked("sync", 8),
    Asked("sync:1", 8),
    Asked("buffer:4", 8),
    Asked("ringmaster:6", 8),
    Asked("apply-reply", 8, servers=2),
    Asked("apply-reply", 4, slow_worker="1:3x"),
    Asked("bounded:2", 4, slow_worker="1:3x"),
    Asked("apply-reply", 4, network=Network(mbit=200)),
    Asked("apply-reply", 4, network=Network(mbit=50)),
    Asked("sync", 4, network=Network(mbit=200, delay_ms=20)),
)
ON_TWO = Asked("apply-reply", 2)
SUITES = {
    "fashion-cnn": Suite(recipe="fashion-cnn", calibration=ON_TWO, cells=SHARED),
    "mnist-sigmoid": Suite(
        recipe="offbeat.bench.recipes:mnist_sigmoid", calibration=ON_TWO, cells=SHARED
    ),
    "apart": Suite(
        recipe="offbeat.bench.recipes:apart",
        calibration=Asked("apply-reply", 4),
        cells=APART,
        cores=math.inf,
    ),
}


@dataclass
class Found:
    """One run that was predicted, a figure for each round."""

    measured: list[Prediction] = field(default_factory=list)
    predicted: list[Sequence[Prediction]] = field(default_factory=list)
    """From each of the two runs around it."""


def bench_simulate(
    *, recipes: Sequence[str], cells: Sequence[str], seconds: float, rounds: int
) -> list[Row]:
    """Predict and measure, in rounds that go through all; `cells`: patterns of their names."""
    asked = {name: _chosen(SUITES[name], cells) for name in recipes}
    found = {name: {cell: Found() for cell in of_suite} for name, of_suite in asked.items()}
    steps: dict[tuple[str, Asked], int] = {}
    others = []
    for number in range(1, 1 + rounds):
        with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder:
            before = _Load.now()
            with fork_server("local") as forks:
                for name, of_suite in found.items():
                    rig = _Rig(SUITES[name], name, Path(folder), forks, seconds, steps)
                    rig.round(of_suite)
            others.append(before.others(_Load.now()))
        line = f"round {number} of {rounds}: other processes took {others[-1]:.2f} cores"
        print(line, file=sys.stderr, flush=True)
    told = f"other processes took {short(statistics.median(others))} cores of this machine"
    print(f"{told} ({short(min(others))}..{short(max(others))})")
    return [
        _row(f"{name} {cell.name}", each) for name, of in found.items() for cell, each in of.items()
    ]


def _chosen(suite: Suite, patterns: Sequence[str]) -> list[Asked]:
    names = [cell.name for cell in suite.cells]
    for pattern in patterns:
        if pattern != ALL and not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"no cell is like {pattern!r}; {nearest(pattern, names)}")
    return [
        cell
        for cell in suite.cells
        if any(pattern == ALL or fnmatchcase(cell.name, pattern) for pattern in patterns)
    ]


class _Rig:
    """One round of one suite."""

    def __init__(
        self,
        suite: Suite,
        name: str,
        folder: Path,
        forks: ForkServer | None,
        seconds: float,
        steps: dict[tuple[str, Asked], int],
    ) -> None:
        """`steps`: how many of each worker's fill the time, as far as that is known."""
        self._suite = suite
        self._name = name
        self._folder = folder
        self._forks = forks
        self._seconds = seconds
        self._steps = steps
        self._num_runs = 0

    def round(self, found: Mapping[Asked, Found]) -> None:
        before = self._record(self._suite.calibration)
        for some in _in_parts(list(found)):
            measured = {cell: self._record(cell) for cell in some}
            after = self._record(self._suite.calibration)
            for cell, recording in measured.items():
                around = [self._predict(source, cell, recording) for source in (before, after)]
                found[cell].measured.append(prediction_of(cell.cell(recording), recording.figures))
                found[cell].predicted.append(around)
                self._say(cell, found[cell])
            before = after

    def _say(self, cell: Asked, found: Found) -> None:
        rates = found.measured[-1].gradients_per_s, _middle(found.predicted[-1], "gradients_per_s")
        told = f"{short(rates[0])}/s measured, {short(rates[1])}/s predicted"
        print(f"{self._name} {cell.name}: {told}", file=sys.stderr, flush=True)

    def _predict(self, source: Recording, asked: Asked, target: Recording) -> Prediction:
        cores = self._suite.cores or source.timing.cores
        return predict(source, asked.cell(target), cores, target.config.slowdowns)

    def _record(self, asked: Asked) -> Recording:
        key = self._name, asked
        if key not in self._steps:
            rate = self._train(asked, FIRST_STEPS).figures.gradients_per_s
            self._steps[key] = max(FIRST_STEPS, round(rate * self._seconds / asked.workers))
        return self._train(asked, self._steps[key])

    def _train(self, asked: Asked, steps: int) -> Recording:
        self._num_runs += 1
        run_dir = self._folder / f"{self._name}-{self._num_runs}"
        fixed = {"threads": 1, "eval_every": 0, "max_restarts": 0, "quiet": True, "device": "cpu"}
        fixed |= {"engine": "local"}
        given = {**fixed, "recipe": self._suite.recipe, "steps": steps, "run_dir": str(run_dir)}
        config = make_config({**given, **asked.options})
        if asked.network == BESIDE:
            train_config(config, forks=self._forks)
        else:
            train_over(asked.network, config, self._forks, limit_s=LINKED_TIMES * self._seconds)
        return read_recording(run_dir, self._suite.cores)


def _in_parts(cells: Sequence[Asked]) -> Iterator[Sequence[Asked]]:
    for start in range(0, len(cells), BETWEEN):
        yield cells[start : start + BETWEEN]


def _middle(found: Sequence[Prediction], name: str) -> float:
    return statistics.mean(float(getattr(each, name)) for each in found)


def _staleness(found: Prediction) -> float:
    return float(found.staleness["mean"] or 0.0)


def _row(name: str, found: Found) -> Row:
    measured = [each.gradients_per_s for each in found.measured]
    predicted = [_middle(each, "gradients_per_s") for each in found.predicted]
    return {
        "": name,
        "gradients/s": measured,
        "predicted": predicted,
        "ratio": [a / b for a, b in zip(predicted, measured, strict=True)],
        "staleness": [_staleness(each) for each in found.measured],
        "predicted staleness": [statistics.mean(map(_staleness, e)) for e in found.predicted],
        "waiting": [each.waiting for each in found.measured],
        "predicted waiting": [_middle(each, "waiting") for each in found.predicted],
    }


@dataclass(frozen=True)
class _Load:
    """What processors have done so far."""

    at_s: float
    busy_s: float
    """All of the machine's."""
    own_s: float
    """For this process, and for those that it has seen end."""

    @classmethod
    def now(cls) -> "_Load":
        line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
        user, nice, system, _, _, irq, softirq, steal = map(int, line.split()[1:9])
        ticks = user + nice + system + irq + softirq + steal
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own_s = sum(each.ru_utime + each.ru_stime for each in used)
        return cls(time.monotonic(), ticks / _TICKS_PER_S, own_s)

    def others(self, later: "_Load") -> float:
        """Cores that were taken since by anybody else."""
        others_s = (later.busy_s - self.busy_s) - (later.own_s - self.own_s)
        return max(0.0, others_s) / (later.at_s - self.at_s)
