"""Models with embeddings whose gradients are sparse, and what to train them on."""

from typing import Any

import torch
from helpers import toy_recipe
from torch import Tensor, nn

import offbeat
from offbeat import Recipe
from offbeat.optim import Optimizer
from offbeat.run.job import Job

NUM_ROWS = 40


class Looking(nn.Module):
    """Two tables, with dense weights before, between and behind them."""

    def __init__(self, num_rows: int = NUM_ROWS) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.words = nn.Embedding(num_rows, 4, sparse=True)
        self.head = nn.Linear(4, 3)
        self.bag = nn.EmbeddingBag(11, 3, sparse=True, mode="sum")
        self.last = nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        looked_up = self.head(self.words(tokens[:, :3]).mean(1) * self.scale)
        logits: Tensor = self.last(looked_up + self.bag(tokens[:, 3:] % 11))
        return logits


class Tables(nn.Module):
    """Nothing but tables."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_ROWS, 3, sparse=True)
        self.bag = nn.EmbeddingBag(11, 3, sparse=True, mode="sum")

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.words(tokens[:, :3]).mean(1) + self.bag(tokens[:, 3:] % 11)
        return logits


def tokens(config: Any) -> tuple[Any, None]:
    """Most of them are seldom, some come several times in a batch."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.rand(120, 5, generator=generator).pow(3).mul(NUM_ROWS).long()
    return (drawn, drawn.sum(1) % 3), None


MIXED = offbeat.AdamW(
    lr=0.01,
    groups={
        "words.*": offbeat.optimizer(torch.optim.SparseAdam, lr=0.02),
        "bag.*": offbeat.optimizer("SparseAdam", lr=0.03, betas=[0.8, 0.9]),
    },
)
OPTIMIZERS: dict[str, tuple[type[nn.Module], Optimizer]] = {
    "SGD": (Looking, offbeat.SGD(lr=0.1)),
    "Adagrad": (Looking, offbeat.Adagrad(lr=0.1, lr_decay=0.1)),
    "SparseAdam": (Tables, offbeat.optimizer(torch.optim.SparseAdam, lr=0.02)),
    "SparseAdam and AdamW": (Looking, MIXED),
}


def sparse_recipe(name: str = "SGD", **fields: Any) -> Recipe:
    model, optimizer = OPTIMIZERS[name]
    return toy_recipe(**{"model": model, "optimizer": optimizer, "data": tokens, **fields})


def plain_sparse_loop(job: Job) -> dict[str, Tensor]:
    """Ordinary training with torch's optimizers, on the batches of worker 0. SGD alone tells
    whether rows that come several times are added up first."""
    module = job.make_model().module.train()
    members = job.optimizer.members
    params: dict[int, list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        params.setdefault(job.optimizer.group_of(name), []).append(parameter)
    optimizers = [members[g].maker(mine, **members[g].options) for g, mine in params.items()]  # type: ignore[arg-type]
    for _, batch in job.batches(0):
        module.zero_grad()
        job.recipe.loss(module, batch).backward()
        for parameter in module.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        for optimizer in optimizers:
            optimizer.step()
    return module.state_dict()


recipe = sparse_recipe()
