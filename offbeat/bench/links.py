"""`offbeat bench links`: what a slow network does to a run, and what helps.

One server and several workers, with a link between them (link.py) that is slower than loopback in
each cell of a grid (cells.py). What has finished lies in OUT/cells and is not run again, so that
the grid can be filled part by part, and be shown at any time (link_tables.py).
"""

import contextlib
import dataclasses
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.bench.cells import BESIDE, Cell, Network, chosen, make_cells
from offbeat.bench.link_tables import Found, Goal, write_all
from offbeat.bench.linked import Trip, train_over
from offbeat.bench.tables import machine, short
from offbeat.config import TrainConfig, make_config
from offbeat.engines.forkserver import ForkServer, fork_server
from offbeat.errors import ConfigError, OffbeatError, RunDirError
from offbeat.run.rundir import RunFolder

GRID = "links.json"
SILENCE_S = 300.0
"""A large push over a slow link holds up what comes after it, heartbeats too."""
FEWEST_PUSHES = 8
"""From one score to the next: the checkpoint for it crosses the link as a reply does. In rounds
there are as many pushes at least."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all cells of a folder have in common."""

    model: str
    workers: int
    limit: float
    """Seconds of training."""
    eval_every: int
    """Batches."""
    data_dir: str

    def config(self, cell: Cell, run_dir: Path) -> TrainConfig:
        """A push stands for as many batches as it has local steps, and a score for as many batches
        as ever, as far as the link is not to be full of checkpoints."""
        fixed = {"threads": 1, "max_restarts": 0, "quiet": True, "device": "cpu"}
        fixed |= {"engine": "local", "worker_timeout": SILENCE_S}
        mine = {"recipe": self.model, "workers": self.workers, "data_dir": self.data_dir}
        here = {"seed": cell.seed, "run_dir": str(run_dir)}
        config = make_config(fixed, mine, here, cell.options)
        pushes = max(FEWEST_PUSHES, round(self.eval_every / cell.batches_per_gradient))
        in_rounds = config.chosen.kind.in_rounds
        every = max(1, pushes // self.workers) if in_rounds else pushes
        return dataclasses.replace(config, eval_every=every)

    def kept(self) -> dict[str, Any]:
        """By which a folder is known again."""
        return {k: v for k, v in vars(self).items() if k != "data_dir"}


def links(
    *,
    rates: Sequence[float],
    delays: Sequence[float],
    settings: Sequence[str],
    seeds: int,
    cells: Sequence[str],
    target: float,
    out: str,
    show: bool,
    **options: Any,
) -> list[str]:
    """Run the cells that are missing in `out`, but none with `show`; returns the lines of the
    tables. `options` are those of a Plan."""
    plan, folder = Plan(**options), Path(out)
    networks = [Network(mbit=mbit, delay_ms=delay) for mbit in rates for delay in delays]
    wanted = chosen(make_cells(networks, settings, seeds), cells)
    if show and not folder.is_dir():
        raise RunDirError(f"there are no cells in {out}: there is no such folder")
    with _claimed(folder, plan):
        failed = {} if show else _fill(folder, plan, wanted)
        goal = Goal(target=target, limit_s=plan.limit)
        beside = make_cells([BESIDE], ["plain"], seeds)  # of the same folder, if it is there
        found = [each for cell in wanted if (each := _read(folder, cell)) is not None]
        others = [each for cell in beside if (each := _read(folder, cell)) is not None]
        if not found:
            raise RunDirError(f"{out} has none of these cells; run them without --show")
        described = {"options": plan.kept(), "machine": machine()}
        return [*write_all(folder, found, others, goal, described), *_failures(failed)]


@contextlib.contextmanager
def _claimed(folder: Path, plan: Plan) -> Iterator[None]:
    try:
        (folder / "cells").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirError(
            f"cannot make {folder}: {error.strerror}; choose another --out"
        ) from error
    kept = RunFolder(folder)
    with kept.locked():
        if (file := folder / GRID).exists():
            before = kept.read_json(file)["options"]
            for name, value in plan.kept().items():
                if before.get(name) != value:
                    raise ConfigError(
                        f"the cells in {folder} have {name} {before.get(name)}, not {value}: say "
                        f"the same, or choose another --out"
                    )
        else:
            kept.write_json(file, {"options": plan.kept()})
        yield


def _fill(folder: Path, plan: Plan, cells: Sequence[Cell]) -> dict[str, str]:
    """Run what is missing; returns why cells failed, which are missing still."""
    missing = [cell for cell in cells if not _file(folder, cell).exists()]
    _say(f"{len(missing)} of {len(cells)} cells to run, {plan.limit:g} s each at most -> {folder}")
    for cell in missing:  # what is wrong with a setting shows before anything runs
        plan.config(cell, folder)
    failed: dict[str, str] = {}
    if not missing:
        return failed
    with fork_server("local") as forks:
        for number, cell in enumerate(missing, start=1):
            try:
                found = _run(folder, plan, cell, forks)
            except OffbeatError as error:
                failed[cell.name] = str(error)
                _say(f"{number} of {len(missing)}: {cell.name} failed: {error}")
                continue
            _say(f"{number} of {len(missing)}: {cell.name}: {_in_words(found)}")
    return failed


def _run(folder: Path, plan: Plan, cell: Cell, forks: ForkServer | None) -> Mapping[str, Any]:
    """Run a cell and keep what came of it; the folder of its run is kept only if it failed."""
    run_dir = folder / "runs" / cell.name
    shutil.rmtree(run_dir, ignore_errors=True)  # of one that failed, or was interrupted
    config = plan.config(cell, run_dir)
    found = figures(cell, train_over(cell.network, config, forks, limit_s=plan.limit))
    mbit = None if math.isinf(cell.network.mbit) else cell.network.mbit
    about = {"mbit": mbit, "delay_ms": cell.network.delay_ms, "setting": cell.setting}
    kept = {**about, "seed": cell.seed, "options": cell.options, **found}
    RunFolder(folder).write_json(_file(folder, cell), kept)
    shutil.rmtree(run_dir)
    return kept


def figures(cell: Cell, trip: Trip) -> dict[str, Any]:
    """Of a cell's run. The curve has seconds of training, batches and scores."""
    record, per_gradient = trip.record, cell.batches_per_gradient
    curve = [point for point in record.curve() if math.isfinite(point[-1])]
    batches, time_s = record.gradients * per_gradient, record.train_time_s
    workers = record.workers.values()
    waited_s = sum(w.exchange_s.total_s for w in workers)
    all_s = waited_s + sum(w.compute_s.total_s + w.prepare_s.total_s for w in workers)
    staleness = record.staleness
    return {
        "metric": record.metric,
        "higher_is_better": record.directions.get(record.metric),
        "gradients": record.gradients,
        "batches": batches,
        "train_s": round(time_s, 3),
        "batches_per_s": batches / time_s if time_s else 0.0,
        "curve": [(round(at_s, 3), count * per_gradient, score) for at_s, count, score in curve],
        "final": curve[-1][2] if curve else None,
        "up_bytes": trip.up,
        "down_bytes": trip.down,
        "waited": waited_s / all_s if all_s else None,
        "staleness": sum(s * n for s, n in staleness.items()) / (staleness.total() or 1),
        "reason": record.reason,
        "diverged": trip.diverged,
    }


def _in_words(found: Mapping[str, Any]) -> str:
    if found["diverged"]:
        return f"diverged: {found['reason']}"
    final = "no score" if found["final"] is None else f"{found['metric']} {found['final']:.3f}"
    return f"{short(found['batches_per_s'])} batches/s, {final} after {found['train_s']:.0f} s"


def _failures(failed: Mapping[str, str]) -> list[str]:
    return [f"failed, and to be run again: {name}: {why}" for name, why in failed.items()]


def _file(folder: Path, cell: Cell) -> Path:
    return folder / "cells" / f"{cell.name}.json"


def _read(folder: Path, cell: Cell) -> Found | None:
    file = _file(folder, cell)
    return Found(cell, RunFolder(folder).read_json(file)) if file.exists() else None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
