"""Small models, recipes and loops that several tests share."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat import SGD, Recipe
from offbeat.config import TrainConfig, make_config
from offbeat.disciplines import Discipline
from offbeat.family import BUILT_IN
from offbeat.optim import Optimizer
from offbeat.run.job import Job
from offbeat.run.making import make_job


def toy_data(num_examples: int = 240, num_features: int = 6) -> tuple[Tensor, Tensor]:
    """Three classes that a small network can tell apart."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(num_examples) % 3
    centres = torch.randn(3, num_features, generator=generator) * 2
    return centres[labels] + torch.randn(num_examples, num_features, generator=generator), labels


def toy_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


class Spiced(nn.Module):
    """Running statistics, and random numbers in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def toy_recipe(
    model: Callable[[], nn.Module] = toy_model, optimizer: Optimizer | None = None, **fields: Any
) -> Recipe:
    data = toy_data()
    given: dict[str, Any] = {
        "data": lambda config: (data, data),
        "loss": cross_entropy,
        "batch_size": 10,
        "epochs": 2,
    }
    return Recipe(model=model, optimizer=optimizer or SGD(lr=0.1), **{**given, **fields})


def toy_job(recipe: Recipe | None = None, **options: Any) -> Job:
    return make_job(make_config(options), recipe or toy_recipe())


def plain_loop(job: Job, optimizer: torch.optim.Optimizer, module: nn.Module) -> nn.Module:
    """Ordinary PyTorch training on the batches of worker 0."""
    total = job.facts.total_updates
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: job.recipe.schedule(step, total)
    )
    for _, batch in job.batches(0):
        optimizer.zero_grad()
        job.recipe.loss(module, batch).backward()
        optimizer.step()
        scheduler.step()
    return module


def batches_of(job: Job, rank: int) -> Iterator[Any]:
    return (batch for _, batch in job.batches(rank))


def make_plain_optimizer(spec: Optimizer, module: nn.Module, **more: Any) -> torch.optim.Optimizer:
    make: Any = spec.maker
    made: torch.optim.Optimizer = make(module.parameters(), **{**spec.options, **more})
    return made


def make_discipline(name: str, workers: Iterable[int], **options: float) -> Discipline:
    """One of Offbeat's own; each takes from the options what concerns it."""
    kind = BUILT_IN[name]
    known = {option.name for option in kind.options}
    return kind(workers, **{key: value for key, value in options.items() if key in known})


DEFAULT_CONFIG = TrainConfig()
DROPPING = ("ringmaster", "rennala")
"""Disciplines that drop what is too old, at each server by itself."""
IN_AN_UPDATE = {"rennala": 4, "buffer": 4}
"""How many gradients, where that is no matter of workers."""


def num_dealt_with(row: dict[str, int], discipline: str) -> int:
    """How many gradients are in a shard, or were dropped by a discipline that may do that."""
    return row["applied"] + (row["dropped"] if discipline in DROPPING else 0)
