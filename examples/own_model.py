"""Your own model in 25 lines.

python examples/own_model.py                                 # from Python
offbeat train --recipe examples/own_model.py:recipe          # the same, from the shell
"""

import torch

import offbeat


def data(config):  # -> training data, test data: tensors, any torch Dataset or DataLoader
    x = torch.randn(4000, 2, generator=torch.Generator().manual_seed(config.seed))
    y = (x.norm(dim=1) > 1.2).long()  # inside a circle, or outside of it
    return (x[:3000], y[:3000]), (x[3000:], y[3000:])


recipe = offbeat.Recipe(
    model=lambda: torch.nn.Sequential(
        torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
    ),
    data=data,
    loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    metric=offbeat.accuracy,  # or any function of (model, batch) to a sum and a count
    optimizer=offbeat.SGD(lr=0.05, momentum=0.5),
    epochs=20,
)

if __name__ == "__main__":
    result = offbeat.train(recipe, discipline="lock-free", workers=4)
    print(result.test_metric, result.staleness.mean)
    model = recipe.model()
    model.load_state_dict(result.state_dict())
