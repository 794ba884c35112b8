"""MNIST with the nine layers of the seed whose workers have several devices, its towers."""

from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.config import TrainConfig
from offbeat.data.datasets import Pair, load_dataset
from offbeat.layers import LocalResponseNorm, truncated_normal
from offbeat.optim import SGD, Adam, constant, cosine
from offbeat.recipes.base import Recipe


class MnistConvnet(nn.Module):
    """3,463,114 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = truncated_normal(nn.Conv2d(1, 32, 5, padding=2), deviation=0.1, bias=0.1)
        self.conv2 = truncated_normal(nn.Conv2d(32, 64, 5, padding=2), deviation=0.1, bias=0.1)
        self.local3 = truncated_normal(nn.Linear(64 * 7 * 7, 1024), deviation=0.04, bias=0.1)
        self.local4 = truncated_normal(nn.Linear(1024, 192), deviation=0.04, bias=0.1)
        self.softmax_linear = truncated_normal(nn.Linear(192, 10), deviation=1 / 192)
        self.pool = nn.MaxPool2d(2)
        self.norm1 = LocalResponseNorm(9, alpha=1e-3, beta=0.75, k=1.0)
        self.norm2 = LocalResponseNorm(9, alpha=1e-3, beta=0.75, k=1.0)
        self.dropout = nn.Dropout(0.5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm1(self.pool(F.relu(self.conv1(images))))  # [b, 32, 14, 14]
        x = self.pool(self.norm2(F.relu(self.conv2(x))))  # [b, 64, 7, 7]
        x = self.dropout(F.relu(self.local3(x.flatten(1))))
        x = F.relu(self.local4(x))
        logits: Tensor = self.softmax_linear(x)
        return logits


def load_data(config: TrainConfig) -> tuple[Pair, Pair]:
    (train_images, train_labels), (test_images, test_labels) = load_dataset(
        "mnist", config.data_dir
    )
    return (_centred(train_images), train_labels), (_centred(test_images), test_labels)


def _centred(images: Tensor) -> Tensor:
    """To -0.5..0.5."""
    return images.float().div_(255).sub_(0.5)


recipe = Recipe(
    model=MnistConvnet,
    data=load_data,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=SGD(lr=0.1, momentum=0.9, nesterov=True),
    # at a constant rate some seeds die in the first steps, and the others end below 99.2%
    schedule=cosine(warmup=0.1),
    feed="batching",
    by_feed={"direct": {"optimizer": Adam(lr=1e-4), "schedule": constant()}},
    batch_size=64,
    epochs=7,
)
