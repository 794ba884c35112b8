"""CIFAR-10 or CIFAR-100 with two convolutions and one wide linear layer."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.config import TrainConfig
from offbeat.data.datasets import Pair, load_dataset
from offbeat.data.images import flip
from offbeat.layers import truncated_normal
from offbeat.optim import AdamW
from offbeat.recipes.base import Recipe

CUT_DEVIATION = 0.8796
"""The deviation of a normal distribution that is cut off at two of its deviations."""


def make_model(num_classes: int) -> nn.Module:
    """2,210,112 parameters for 10 classes, 2,256,192 for 100."""
    model = nn.Sequential(
        nn.Conv2d(3, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, ceil_mode=True),  # [b, 64, 16, 16]
        nn.Conv2d(64, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, ceil_mode=True),  # [b, 64, 8, 8]
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 512),
        nn.ReLU(),
        nn.Linear(512, num_classes, bias=False),
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            fan = 25 * (layer.in_channels + layer.out_channels) / 2
            truncated_normal(layer, deviation=math.sqrt(2 / fan) / CUT_DEVIATION)
        elif isinstance(layer, nn.Linear):
            truncated_normal(layer, deviation=0.1)
    return model


def load_data(name: str, config: TrainConfig) -> tuple[Pair, Pair]:
    """The training images stay bytes until they are used."""
    train, (test_images, test_labels) = load_dataset(name, config.data_dir)
    return train, (_scaled(test_images), test_labels)


def scale_and_flip(batch: Any, generator: torch.Generator) -> Any:
    images, labels = batch
    return flip(_scaled(images), generator), labels


def _scaled(images: Tensor) -> Tensor:
    return images.float().div_(255)


recipe = Recipe(
    model=partial(make_model, 10),
    data=partial(load_data, "cifar10"),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=AdamW(lr=1e-4, weight_decay=0.0),
    augment=scale_and_flip,
    batch_size=64,
    epochs=100,
)
recipe_100 = replace(recipe, model=partial(make_model, 100), data=partial(load_data, "cifar100"))
