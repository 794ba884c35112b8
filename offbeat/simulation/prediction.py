"""`offbeat simulate RUN`: what a recorded run would have been with other numbers of workers and
servers, other disciplines, slower links, or a straggler.

    found = offbeat.simulate("runs/...", workers=[4, 64, 1024], disciplines=["sync", "apply-reply"])
    found.predictions[0].gradients_per_s, found.predictions[0].staleness

How long everything takes is drawn from what the run's events say (calibration.py); when what is
applied and answered is decided by the real ledger and disciplines, on a virtual clock (virtual.py).
What is not given is as it was in the run. Imports no torch.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.config import TrainConfig, make_config
from offbeat.disciplines import Discipline
from offbeat.errors import ConfigError
from offbeat.family import BUILT_IN
from offbeat.plugins import Choice
from offbeat.report.summary import staleness_summary
from offbeat.simulation.calibration import Recording, read_recording
from offbeat.simulation.virtual import Figures, Setup, VirtualRun

ALL = "all"
NUM_GRADIENTS = 20_000
"""In each cell, where nobody says how many."""
FEWEST_STEPS = 20
"""Of each worker, likewise."""
WARM_UP_STEPS = 2
"""Of each worker at least, or a tenth of all, which are not counted."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One simulated run."""

    discipline: Choice[Discipline]
    workers: int
    servers: int
    mbit: float = math.inf
    """A second, of each server's link, each way, on top of what the run's had; inf: no limit."""
    delay_ms: float = 0.0
    """There and back; likewise."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What came out of a cell."""

    cell: Cell
    gradients_per_s: float
    updates_per_s: float
    """Of one server."""
    staleness: Mapping[str, float | int | None]
    """mean, p50, p95, p99 and max, as in summary.json."""
    waiting: float
    """The share of their time in which workers had nothing to do but to wait for replies."""
    dropped: float
    """The share of gradients that were dropped."""
    served: float
    """The share of their time in which servers had something to do."""

    def to_json(self) -> dict[str, Any]:
        cell = {**vars(self.cell), "discipline": self.cell.discipline.label}
        cell["mbit"] = None if math.isinf(self.cell.mbit) else self.cell.mbit
        figures = {name: value for name, value in vars(self).items() if name != "cell"}
        return {**cell, **figures}


@dataclass(frozen=True, kw_only=True)
class Simulated:
    recorded: Recording
    again: Prediction
    """The recorded run itself, simulated: how well that does where it was looked at."""
    cores: float
    """That all roles share; inf: each worker and server has its own."""
    seed: int
    slow_worker: str | None
    predictions: Sequence[Prediction]
    left_out: Mapping[str, str]
    """Cells that make no sense, and why."""


def simulate(
    run: str | Path,
    *,
    workers: Sequence[int] | None = None,
    servers: Sequence[int] | None = None,
    disciplines: Sequence[str] | None = None,
    rates: Sequence[float] | None = None,
    delays: Sequence[float] | None = None,
    slow_worker: str | None = None,
    cores: float | None = None,
    steps: int | None = None,
    seed: int = 0,
    say: Callable[[Prediction], None] = lambda prediction: None,
) -> Simulated:
    """Simulate every combination, calibrated from the recorded run in the folder `run`.

    `disciplines`: as train takes them, or "all". `rates`: Mbit/s of each server's link, each way;
    `delays`: ms, there and back. `slow_worker`: as in train. `cores`: how many all workers and
    servers share; inf: each has its own; by default what they had in the run. `steps`: gradients
    per worker that figures are made of. `say` is told of each cell as it is done."""
    recorded = read_recording(Path(run))
    cores = recorded.timing.cores if cores is None else cores
    slow_worker = recorded.config.slow_worker if slow_worker is None else slow_worker
    _check(recorded, rates or (), cores, steps)
    cells, left_out = _cells(recorded.config, disciplines, workers, servers, rates, delays)
    slowdowns = _slowdowns(recorded.config, slow_worker, max(cell.workers for cell in cells))
    predictions = []
    for cell in cells:
        predictions.append(predict(recorded, cell, cores, slowdowns, steps, seed))
        say(predictions[-1])
    return Simulated(
        recorded=recorded,
        again=simulated_again(recorded, steps, seed),
        cores=cores,
        seed=seed,
        slow_worker=slow_worker,
        predictions=predictions,
        left_out=left_out,
    )


def simulated_again(recorded: Recording, steps: int | None = None, seed: int = 0) -> Prediction:
    config = recorded.config
    cell = Cell(discipline=config.chosen, workers=config.workers, servers=config.servers)
    return predict(recorded, cell, recorded.timing.cores, config.slowdowns, steps, seed)


def predict(
    recorded: Recording,
    cell: Cell,
    cores: float,
    slowdowns: Mapping[int, float],
    steps: int | None = None,
    seed: int = 0,
) -> Prediction:
    chosen = cell.discipline
    setup = Setup(
        discipline=lambda ranks: chosen.kind(ranks, **chosen.values),
        workers=cell.workers,
        servers=cell.servers,
        cores=cores,
        mbit=cell.mbit,
        delay_ms=cell.delay_ms,
        slowdowns=slowdowns,
    )
    if steps is None:
        steps = max(FEWEST_STEPS, -(-NUM_GRADIENTS // cell.workers))
    warm_up = max(WARM_UP_STEPS, steps // 10)
    run = VirtualRun(setup, recorded.timing, seed=seed)
    return prediction_of(cell, run.go(steps * cell.workers, warm_up * cell.workers))


def prediction_of(cell: Cell, found: Figures) -> Prediction:
    """The figures of a stretch, simulated or measured, as shares and rates."""
    return Prediction(
        cell=cell,
        gradients_per_s=found.gradients / found.time_s,
        updates_per_s=found.updates / found.time_s,
        staleness=staleness_summary(Counter(dict(sorted(found.staleness.items())))),
        waiting=found.waited_s / found.steps_s,
        dropped=found.dropped / max(1, found.answered),
        served=found.served_s / (found.time_s * cell.servers),
    )


def _check(recorded: Recording, rates: Sequence[float], cores: float, steps: int | None) -> None:
    if any(rate < math.inf for rate in rates) and recorded.timing.up_bytes is None:
        raise ConfigError(
            "the run's events do not say how many bytes a gradient has, which a link's rate takes: "
            "record one with this version"
        )
    for name, value in (("cores", cores), ("steps", steps)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value:g}")


def _slowdowns(config: TrainConfig, slow_worker: str | None, workers: int) -> dict[int, float]:
    if slow_worker is None:
        return {}
    return make_config({"slow_worker": slow_worker, "workers": workers}).slowdowns


def named(disciplines: Sequence[str]) -> list[str]:
    """`all` are all of Offbeat's own that have servers."""
    every = [Choice.default(kind).label for kind in BUILT_IN.values() if kind.served]
    found = itertools.chain.from_iterable(every if d == ALL else [d] for d in disciplines)
    return list(dict.fromkeys(found))


def _cells(
    config: TrainConfig,
    disciplines: Sequence[str] | None,
    workers: Sequence[int] | None,
    servers: Sequence[int] | None,
    rates: Sequence[float] | None,
    delays: Sequence[float] | None,
) -> tuple[list[Cell], dict[str, str]]:
    """The cells that make sense, and why the others do not."""
    cells, left_out = [], {}
    for mbit, delay_ms, num_servers, num_workers, name in itertools.product(
        *(rates or (math.inf,), delays or (0.0,), servers or (config.servers,)),
        *(workers or (config.workers,), named(disciplines) if disciplines else (None,)),
    ):
        try:
            chosen = _chosen(config, name, num_workers, num_servers)
        except ConfigError as error:
            left_out[f"{name}, {num_workers} workers, {num_servers} servers"] = str(error)
            continue
        links = {"mbit": mbit, "delay_ms": delay_ms}
        cells.append(Cell(discipline=chosen, workers=num_workers, servers=num_servers, **links))
    if not cells:
        raise ConfigError(next(iter(left_out.values())))
    return cells, left_out


def _chosen(
    config: TrainConfig, name: str | None, workers: int, servers: int
) -> Choice[Discipline]:
    """A ConfigError where there can be no such run."""
    if name is None:
        complaint = config.chosen.kind.complaint(workers, config.chosen.values)
        if complaint:
            raise ConfigError(complaint)
        make_config({"workers": workers, "servers": servers})
        return config.chosen
    chosen = make_config({"discipline": name, "workers": workers, "servers": servers}).chosen
    if not chosen.kind.served:
        raise ConfigError(f"{name} has no servers, and its rounds are not simulated")
    return chosen
