"""The default recipe: a small convnet on the built-in sample of Fashion-MNIST."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.config import TrainConfig
from offbeat.data.datasets import Pair, load_dataset
from offbeat.optim import SGD, cosine
from offbeat.recipes.base import Recipe


def make_model() -> nn.Module:
    """Two convolutions and two linear layers: 106,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),  # [b, 16, 14, 14]
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),  # [b, 32, 7, 7]
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def load_data(config: TrainConfig) -> tuple[Pair, Pair]:
    (train_images, train_labels), (test_images, test_labels) = load_dataset(
        "fashion-mnist-sample", config.data_dir
    )
    return (_scaled(train_images), train_labels), (_scaled(test_images), test_labels)


def flip_half(batch: Any, generator: torch.Generator) -> Any:
    """Mirror each image left to right with probability a half."""
    images, labels = batch
    flipped = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(flipped, images.flip(3), images), labels


def _scaled(images: Tensor) -> Tensor:
    """To about mean 0 and standard deviation 1 over the training set."""
    return images.float().div_(255).sub_(0.286).div_(0.353)


recipe = Recipe(
    model=make_model,
    data=load_data,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=SGD(lr=0.05, momentum=0.9),
    schedule=cosine(warmup=50),
    augment=flip_half,
    batch_size=50,
    epochs=10,
)
