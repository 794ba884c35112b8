"""A plain training loop, as somebody has it in a script: `bench launch` runs it beside the recipe
that it does the same as. Its arguments are the recipe's name and a number of steps."""

import itertools
import sys

import torch

from offbeat.bench import recipes
from offbeat.loops.distribute import distribute, log
from offbeat.loops.sampler import Sampler


def main(name: str, num_steps: int) -> None:
    recipe = getattr(recipes, name)
    (inputs, labels), _ = recipe.data(None)
    model = recipe.model()
    plain = torch.optim.SGD(model.parameters(), lr=recipe.optimizer.options["lr"])
    optimizer = distribute(model, plain)
    sampler = Sampler(inputs)
    steps = itertools.count(1)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for chosen in torch.split(torch.tensor([*sampler]), recipe.batch_size):
            batch = inputs.index_select(0, chosen), labels.index_select(0, chosen)
            loss = recipe.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss=loss.item())
            if next(steps) == num_steps:
                return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
