"""The default recipe: a small convnet on the built-in sample of Fashion-MNIST."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.config import TrainConfig
from offbeat.data.datasets import Pair, load_dataset
from offbeat.optim import SGD, cosine
from offbeat.recipes.base import Recipe

MEAN, DEVIATION = 0.286, 0.353  # of the training pixels, scaled to 0..1
BLACK = -MEAN / DEVIATION


def make_model() -> nn.Module:
    """Two strided convolutions and two linear layers: 215,370 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),  # [b, 16, 14, 14]
        nn.Conv2d(16, 32, 5, stride=2, padding=2),
        nn.ReLU(),  # [b, 32, 7, 7]
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def load_data(config: TrainConfig) -> tuple[Pair, Pair]:
    (train_images, train_labels), (test_images, test_labels) = load_dataset(
        "fashion-mnist-sample", config.data_dir
    )
    return (_scaled(train_images), train_labels), (_scaled(test_images), test_labels)


def flip_and_shift(batch: Any, generator: torch.Generator) -> Any:
    """Mirror half of the images, and move each by up to two pixels both ways."""
    images, labels = batch
    count = len(images)
    flipped = torch.rand(count, 1, 1, 1, generator=generator) < 0.5
    images = torch.where(flipped, images.flip(3), images)
    windows = F.pad(images, (2, 2, 2, 2), value=BLACK).unfold(2, 28, 1).unfold(3, 28, 1)
    down, right = torch.randint(0, 5, (2, count), generator=generator)
    return windows[torch.arange(count), :, down, right], labels  # [b, 1, 28, 28]


def _scaled(images: Tensor) -> Tensor:
    """To about mean 0 and standard deviation 1 over the training set."""
    return images.float().div_(255).sub_(MEAN).div_(DEVIATION)


recipe = Recipe(
    model=make_model,
    data=load_data,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    # Every discipline is to do well here, also where staleness comes in bursts. So no momentum,
    # which multiplies a stale gradient, and a long warm-up, which keeps early steps from diverging.
    optimizer=SGD(lr=0.12),
    schedule=cosine(warmup=0.25),
    augment=flip_and_shift,
    batch_size=50,
    epochs=36,
)
