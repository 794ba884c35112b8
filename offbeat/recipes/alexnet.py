"""CIFAR-10 with the net of TensorFlow's tutorial, which the seeds call AlexNet: `recipe` trains and
scores it as they do, `fast` as one would who has a GPU and half a minute."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.config import BF16, TrainConfig
from offbeat.data.datasets import Pair, load_dataset
from offbeat.data.images import (
    centre_crop,
    change_brightness,
    change_contrast,
    crop_and_flip,
    standardise,
)
from offbeat.layers import LocalResponseNorm, truncated_normal
from offbeat.optim import SGD, cosine, step_decay
from offbeat.recipes.base import MeanLoss, Recipe
from offbeat.recipes.base import accuracy as of_classes
from offbeat.recipes.metrics import metric

SIZE = 24
BATCH_SIZE = 128
WEIGHT_DECAY = 0.004
DECAY_EPOCHS = 350
BATCHES_PER_EPOCH = 50_000 / BATCH_SIZE


class AlexNet(nn.Module):
    """Two convolutions and three linear layers: 1,068,298 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = truncated_normal(nn.Conv2d(3, 64, 5, padding=2), deviation=0.05)
        self.conv2 = truncated_normal(nn.Conv2d(64, 64, 5, padding=2), deviation=0.05, bias=0.1)
        self.local3 = truncated_normal(nn.Linear(64 * 6 * 6, 384), deviation=0.04, bias=0.1)
        self.local4 = truncated_normal(nn.Linear(384, 192), deviation=0.04, bias=0.1)
        self.softmax_linear = truncated_normal(nn.Linear(192, 10), deviation=1 / 192)
        # rounds up where the seed's pads at the right and at the bottom: 24 -> 12 -> 6
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.norm1 = LocalResponseNorm(9, alpha=1e-3, beta=0.75, k=1.0)
        self.norm2 = LocalResponseNorm(9, alpha=1e-3, beta=0.75, k=1.0)

    def forward(self, images: Tensor) -> Tensor:
        x = images.contiguous(memory_format=torch.channels_last)  # [b, 3, 24, 24]
        x = self.norm1(self.pool(F.relu(self.conv1(x))))  # [b, 64, 12, 12]
        x = self.pool(self.norm2(F.relu(self.conv2(x))))  # [b, 64, 6, 6]
        x = F.relu(self.local3(x.flatten(1)))
        x = F.relu(self.local4(x))
        logits: Tensor = self.softmax_linear(x)
        return logits


def load_data(config: TrainConfig) -> tuple[Pair, Pair]:
    train, (test_images, test_labels) = load_dataset("cifar10", config.data_dir)
    return train, (standardise(centre_crop(test_images, SIZE).float()), test_labels)


def distort(batch: Any, generator: torch.Generator) -> Any:
    """What the seed does to training images, which are bytes up to here."""
    images, labels = batch
    x = crop_and_flip(images, SIZE, generator).float()
    x = change_brightness(x, 63, generator)
    x = change_contrast(x, 0.2, 1.8, generator)
    return standardise(x), labels


def crop(batch: Any, generator: torch.Generator) -> Any:
    """The same without the changes of brightness and contrast."""
    images, labels = batch
    return standardise(crop_and_flip(images, SIZE, generator).float()), labels


def load_whole(config: TrainConfig) -> tuple[Pair, Pair]:
    """Test images as they are, for `accuracy` to cut crops from."""
    return load_dataset("cifar10", config.data_dir)


def accuracy(model: Any, batch: Any) -> tuple[float, int]:
    """By the mean of what the model says of ten crops of an image, as in the paper that AlexNet has
    its name from: the four corners, the centre, and all of them mirrored."""
    images, labels = batch
    far, middle = images.shape[-1] - SIZE, (images.shape[-1] - SIZE) // 2
    said = torch.zeros((), device=images.device)
    for top, left in ((0, 0), (0, far), (far, 0), (far, far), (middle, middle)):
        x = standardise(images[:, :, top : top + SIZE, left : left + SIZE].float())
        said = said + model(x).softmax(1) + model(x.flip(3)).softmax(1)
    return float((said.argmax(1) == labels).sum()), len(labels)


def loss(model: Any, batch: Any) -> Tensor:
    """Mean cross entropy, and the weights of the two wide linear layers."""
    images, labels = batch
    squares = model.local3.weight.square().sum() + model.local4.weight.square().sum()
    entropy: Tensor = F.cross_entropy(model(images), labels)
    total: Tensor = entropy + WEIGHT_DECAY / 2 * squares
    return total


def centre_accuracy(model: Any, batch: Any) -> tuple[float, int]:
    """By the centres of whole images alone, as the seeds have it."""
    return of_classes(model, _centres(batch))


def centre_loss(model: Any, batch: Any) -> tuple[float, int]:
    return MeanLoss(loss)(model, _centres(batch))


def _centres(batch: Any) -> Any:
    images, labels = batch
    return standardise(centre_crop(images, SIZE).float()), labels


recipe = Recipe(
    model=AlexNet,
    data=load_data,
    loss=loss,
    optimizer=SGD(lr=0.1),
    schedule=step_decay(every=int(DECAY_EPOCHS * BATCHES_PER_EPOCH), factor=0.1),
    augment=distort,
    ema=0.9999,
    batch_size=BATCH_SIZE,
    epochs=256,  # 100,000 gradients
)

fast = Recipe(
    model=AlexNet,
    data=load_whole,
    loss=loss,
    metrics={
        "accuracy": accuracy,
        "centre accuracy": metric(centre_accuracy, higher_is_better=True),
        "loss": centre_loss,
    },
    optimizer=SGD(lr=0.1),  # without momentum, which staleness does not bear
    schedule=cosine(warmup=0.1),
    augment=crop,
    ema=0.999,
    batch_size=BATCH_SIZE,
    epochs=75,  # 29,000 gradients
    amp=BF16,
)
