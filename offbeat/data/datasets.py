"""Datasets by name, each as ((train images, labels), (test images, labels)): bytes and int64.

mnist, fashion-mnist      DATA_DIR/NAME/{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]
cifar10                   DATA_DIR/cifar-10-batches-bin/{data_batch_1..5,test_batch}.bin
cifar100                  DATA_DIR/cifar-100-binary/{train,test}.bin, fine labels
fashion-mnist-sample      10,000 and 2,000 images of Fashion-MNIST, inside the package
"""

import shlex
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from offbeat.data.files import read_cifar, read_idx_pair
from offbeat.errors import DataError, MissingDataError, nearest

Pair = tuple[Tensor, Tensor]


def load_dataset(name: str, data_dir: str | Path) -> tuple[Pair, Pair]:
    """The dataset called `name`, read from where its official files lie under `data_dir`."""
    if name not in _LOADERS:
        raise DataError(f"unknown dataset {name!r}; {nearest(name, _LOADERS)}")
    try:
        return _LOADERS[name](Path(data_dir))
    except MissingDataError as error:
        fetch = f"offbeat data get {name} --data-dir {shlex.quote(str(data_dir))}"
        raise MissingDataError(f"{error}; to fetch it: {fetch}") from error


def _idx(folder: Path) -> tuple[Pair, Pair]:
    return read_idx_pair(folder, "train"), read_idx_pair(folder, "t10k")


def _cifar10(data_dir: Path) -> tuple[Pair, Pair]:
    folder = data_dir / "cifar-10-batches-bin"
    batches = [f"data_batch_{i}.bin" for i in range(1, 6)]
    return (
        read_cifar(folder, batches, num_label_bytes=1, num_classes=10),
        read_cifar(folder, ["test_batch.bin"], num_label_bytes=1, num_classes=10),
    )


def _cifar100(data_dir: Path) -> tuple[Pair, Pair]:
    folder = data_dir / "cifar-100-binary"
    return (
        read_cifar(folder, ["train.bin"], num_label_bytes=2, num_classes=100, num_files_each=5),
        read_cifar(folder, ["test.bin"], num_label_bytes=2, num_classes=100),
    )


_LOADERS: dict[str, Callable[[Path], tuple[Pair, Pair]]] = {
    "mnist": lambda data_dir: _idx(data_dir / "mnist"),
    "fashion-mnist": lambda data_dir: _idx(data_dir / "fashion-mnist"),
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "fashion-mnist-sample": lambda _: _idx(Path(__file__).parent / "fashion_mnist_sample"),
}
