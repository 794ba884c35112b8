"""`train(...) -> Result`: the same thing as `offbeat train`, from Python."""

import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from offbeat.checkpoint import newest_checkpoint
from offbeat.config import TrainConfig, make_config
from offbeat.engines.inproc import InprocEngine
from offbeat.errors import RecipeError
from offbeat.job import Job, make_job
from offbeat.progress import make_display
from offbeat.recipes.base import Recipe, load_recipe
from offbeat.report import summarise
from offbeat.roles.evaluator import metric_name
from offbeat.rundir import RunFolder, create_run_folder


@dataclass(frozen=True)
class Staleness:
    """Of the applied gradients, pooled over the shards; NaN where there were none."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, its figures, and its weights."""

    run_dir: Path
    summary: Mapping[str, Any]

    @property
    def test_accuracy(self) -> float | None:
        """A fraction; None where the recipe's metric is another, or there is no test data."""
        return cast("float | None", self.summary["test_accuracy"])

    @property
    def test_metric(self) -> float | None:
        return cast("float | None", self.summary["test_metric"])

    @cached_property
    def staleness(self) -> Staleness:
        values = self.summary["staleness"]
        return Staleness(**{k: math.nan if v is None else v for k, v in values.items()})

    @property
    def interrupted(self) -> bool:
        return bool(self.summary["status"] == "interrupted")

    def state_dict(self, *, ema: bool = False) -> dict[str, Tensor]:
        """The final weights, for `load_state_dict`; with `ema`, their moving average, which is
        what was scored where the recipe has one."""
        return load(self.run_dir, ema=ema)


def load(run_dir: str | Path, *, ema: bool = False) -> dict[str, Tensor]:
    """The newest weights in a run's folder, for `load_state_dict`; damaged checkpoints are passed
    over. With `ema`, their moving average where the recipe has one."""
    return newest_checkpoint(RunFolder(Path(run_dir)).checkpoints).state_dict(ema=ema)


def train(recipe: str | Recipe = "fashion-cnn", **options: Any) -> Result:
    """Train `recipe` (a Recipe, or what --recipe takes); `options` are train's flags by name.

        offbeat.train(recipe, discipline="lock-free", workers=4, lr=0.05)

    Raises an OffbeatError: a UsageError when nothing was begun, a RunError when a run failed, after
    what could be kept has been kept.
    """
    name = recipe if isinstance(recipe, str) else _name_of(recipe)
    config = make_config({"recipe": name}, options)
    return train_config(config, load_recipe(name) if isinstance(recipe, str) else recipe)


def train_config(config: TrainConfig, recipe: Recipe | None = None) -> Result:
    """The same, from a configuration that is complete."""
    began_s = time.monotonic()
    recipe = recipe or load_recipe(config.recipe)
    job = make_job(config, recipe)
    replicas = job.make_replicas(config.workers + 1)
    folder = create_run_folder(job.config, metric_name(recipe))
    steps = [job.num_steps(rank) for rank in range(job.config.workers)]
    total = None if None in steps else sum(n for n in steps if n is not None)
    display = make_display(_title(job, folder), total, quiet=config.quiet)
    engine = InprocEngine(job, replicas, folder, display, lambda: time.monotonic() - began_s)
    try:
        engine.run()
    finally:
        summary = summarise(folder)
        folder.write_json(folder.summary, summary)
    return Result(folder.path, summary)


def _title(job: Job, folder: RunFolder) -> str:
    config = job.config
    bound = f" {config.staleness:g}" if config.staleness is not None else ""
    servers = f"{config.servers} server{'s' * (config.servers > 1)}"
    workers = f"{config.workers} worker{'s' * (config.workers > 1)}"
    return (
        f"{config.recipe}: {job.manifest.num_elements:,} parameters, {config.discipline}{bound}, "
        f"{servers}, {workers} -> {folder.path}"
    )


def _name_of(recipe: Recipe) -> str:
    """Where --recipe would find this one, for the run's folder and books."""
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"train takes a Recipe or the name of one, not a {type(recipe).__name__}")
    for module_name, module in list(sys.modules.items()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is recipe:
                script = getattr(module, "__file__", None)
                if module_name != "__main__" or script is None:
                    return f"{module_name}:{name}"
                return f"{os.path.relpath(script)}:{name}"
    return "custom"
