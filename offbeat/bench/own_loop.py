"""A plain training loop, as somebody has it in a script: `bench launch` runs it beside the recipe
that it does the same as. Its arguments are the recipe's name, a number of steps, and `ahead` where
the next batch is to be made while a gradient is under way."""

import itertools
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from offbeat.bench import recipes
from offbeat.loops.ahead import ahead
from offbeat.loops.distribute import distribute, log
from offbeat.loops.sampler import Sampler

AHEAD = "ahead"


def main(name: str, num_steps: int, *how: str) -> None:
    recipe = getattr(recipes, name)
    (inputs, labels), _ = recipe.data(None)
    model = recipe.model()
    plain = torch.optim.SGD(model.parameters(), lr=recipe.optimizer.options["lr"])
    optimizer = distribute(model, plain)
    batches = itertools.islice(endless(inputs, labels, recipe.batch_size), num_steps)
    for batch in ahead(batches) if AHEAD in how else batches:
        loss = recipe.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item())


def endless(inputs: Tensor, labels: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch after the other."""
    sampler = Sampler(inputs)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for chosen in torch.split(torch.tensor([*sampler]), batch_size):
            yield inputs.index_select(0, chosen), labels.index_select(0, chosen)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
