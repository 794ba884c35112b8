"""Offbeat trains PyTorch models with parameter servers, and makes the update discipline a flag.

Nothing is imported before it is used: `offbeat --help` must not pay for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from offbeat.version import __version__

if TYPE_CHECKING:
    from offbeat.api import Result, evaluate, export, load, resume, train
    from offbeat.comparison.runs import Comparison, compare
    from offbeat.config import TrainConfig
    from offbeat.data.datasets import load_dataset
    from offbeat.decline import plateau
    from offbeat.errors import OffbeatError, RunError, UsageError
    from offbeat.loops.ahead import ahead
    from offbeat.loops.distribute import distribute, log, seed
    from offbeat.loops.sampler import Sampler
    from offbeat.loops.state import State
    from offbeat.optim import (
        SGD,
        Adagrad,
        Adam,
        AdamW,
        Optimizer,
        RMSprop,
        constant,
        cosine,
        optimizer,
        step_decay,
    )
    from offbeat.place import is_master, rank, world_size
    from offbeat.recipes.base import Recipe, accuracy
    from offbeat.recipes.callbacks import Callback
    from offbeat.recipes.metrics import metric
    from offbeat.replaying.again import replay
    from offbeat.schedules import schedule
    from offbeat.simulation.prediction import Simulated, simulate

_HOME = {
    "Adagrad": "optim",
    "Adam": "optim",
    "AdamW": "optim",
    "Callback": "recipes.callbacks",
    "Comparison": "comparison.runs",
    "OffbeatError": "errors",
    "Optimizer": "optim",
    "RMSprop": "optim",
    "Recipe": "recipes.base",
    "Result": "api",
    "RunError": "errors",
    "SGD": "optim",
    "Sampler": "loops.sampler",
    "Simulated": "simulation.prediction",
    "State": "loops.state",
    "TrainConfig": "config",
    "UsageError": "errors",
    "accuracy": "recipes.base",
    "ahead": "loops.ahead",
    "compare": "comparison.runs",
    "constant": "optim",
    "cosine": "optim",
    "distribute": "loops.distribute",
    "evaluate": "api",
    "export": "api",
    "is_master": "place",
    "load": "api",
    "load_dataset": "data.datasets",
    "log": "loops.distribute",
    "metric": "recipes.metrics",
    "optimizer": "optim",
    "plateau": "decline",
    "rank": "place",
    "replay": "replaying.again",
    "resume": "api",
    "schedule": "schedules",
    "seed": "loops.distribute",
    "simulate": "simulation.prediction",
    "step_decay": "optim",
    "train": "api",
    "world_size": "place",
}

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Callback",
    "Comparison",
    "OffbeatError",
    "Optimizer",
    "RMSprop",
    "Recipe",
    "Result",
    "RunError",
    "Sampler",
    "Simulated",
    "State",
    "TrainConfig",
    "UsageError",
    "__version__",
    "accuracy",
    "ahead",
    "compare",
    "constant",
    "cosine",
    "distribute",
    "evaluate",
    "export",
    "is_master",
    "load",
    "load_dataset",
    "log",
    "metric",
    "optimizer",
    "plateau",
    "rank",
    "replay",
    "resume",
    "schedule",
    "seed",
    "simulate",
    "step_decay",
    "train",
    "world_size",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
    return getattr(importlib.import_module(f"offbeat.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
