"""What the benchmarks train: the shapes of MNIST and CIFAR-10, without their data.

The engine's processes find them here by name.
"""

import dataclasses
import functools
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.optim import SGD
from offbeat.recipes import alexnet as net
from offbeat.recipes import mnist_sigmoid as sigmoid
from offbeat.recipes.base import Recipe


@functools.cache
def noise(count: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(count, *shape, generator=generator)
    return inputs, torch.randint(0, 10, (count,), generator=generator)


def _make_convnet() -> nn.Module:
    """1,070,186 parameters, 4.3 MB."""
    convolutions = [nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]  # [b, 64, 16, 16]
    convolutions += [nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]  # [b, 64, 8, 8]
    linear = [nn.Linear(64 * 8 * 8, 224), nn.ReLU(), nn.Linear(224, 192), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), *linear, nn.Linear(192, 10))


@functools.cache
def _noisy_images(count: int) -> tuple[Tensor, Tensor]:
    """Bytes, as pictures are."""
    generator = torch.Generator().manual_seed(1)
    shape = (count, 3, 32, 32)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return images, torch.randint(0, 10, (count,), generator=generator)


NUM_IMAGES = 50_176
"""About as many as CIFAR-10 has, and whole batches for each of up to 8 workers: the bare loops know
no odd ones."""
alexnet = dataclasses.replace(net.recipe, data=lambda config: (_noisy_images(NUM_IMAGES), None))

mnist_sigmoid = dataclasses.replace(sigmoid.recipe, data=lambda config: (noise(60_000, 784), None))

convnet = Recipe(
    model=_make_convnet,
    data=lambda config: (noise(4_096, 3, 32, 32), None),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=SGD(lr=0.01),
    batch_size=128,
)


def _make_wide() -> nn.Module:
    """25,071,430 parameters, 100 MB, and little to compute with so few examples."""
    layers = [nn.Linear(784, 5_000), nn.ReLU(), nn.Linear(5_000, 4_220), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4_220, 10))


wide = Recipe(
    model=_make_wide,
    data=lambda config: (noise(4_096, 784), None),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=SGD(lr=0.01),
    batch_size=16,
)


APART_S = 0.04
_never = threading.Event()


def _apart_loss(model: nn.Module, batch: Any) -> Tensor:
    """Waits for 24 to 56 ms, by chance, instead of computing."""
    inputs, labels = batch
    _never.wait(APART_S * (0.6 + 0.8 * float(inputs[0, 0])))
    return F.cross_entropy(model(inputs), labels)


apart = Recipe(
    model=lambda: nn.Linear(784, 100),
    data=lambda config: (noise(16_384, 784), None),
    loss=_apart_loss,
    optimizer=SGD(lr=0.01),
    batch_size=4,
)
"""78,500 parameters. Workers take next to nothing of their machine, so that many of them on one do
as if each had its own."""
