"""The sigmoid network of the distributed MNIST seed: 784-100-10, 79,510 parameters, plain SGD.

Small on purpose: one step is so short that what is left is the cost of exchanging parameters.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.config import TrainConfig
from offbeat.data.datasets import Pair, load_dataset
from offbeat.optim import SGD
from offbeat.recipes.base import Recipe, StepLog

NUM_HELD_OUT = 5_000
"""The first so many training images are kept for validation, so that an epoch is 550 batches of
100."""


def make_model() -> nn.Module:
    """Weights from N(0, 1), biases 0, as the seed has them."""
    model = nn.Sequential(nn.Linear(784, 100), nn.Sigmoid(), nn.Linear(100, 10))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_()
    return model


def load_data(config: TrainConfig) -> tuple[Pair, Pair]:
    (train_images, train_labels), (test_images, test_labels) = load_dataset(
        "mnist", config.data_dir
    )
    train = (_flat(train_images[NUM_HELD_OUT:]), train_labels[NUM_HELD_OUT:])
    return train, (_flat(test_images), test_labels)


def _flat(images: Tensor) -> Tensor:
    """[n, 1, 28, 28] bytes -> [n, 784] in 0..1."""
    return images.flatten(1).float().div_(255)


def log_line(log: StepLog) -> str:
    return (
        f"Step: {log.version}, Epoch: {log.epoch}, Batch: {log.batch} of {log.num_batches}, "
        f"Cost: {log.loss:.4f}, AvgTime: {1e3 * log.step_s:.2f}ms"
    )


recipe = Recipe(
    model=make_model,
    data=load_data,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=SGD(lr=5e-4),
    log_line=log_line,
    batch_size=100,
    epochs=20,
)
