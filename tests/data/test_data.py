"""Readers, the built-in sample, and what each worker gets to see."""

import gzip
import os
import struct
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import toy_data
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from offbeat import load_dataset
from offbeat.data import files
from offbeat.data.batches import (
    Share,
    batch_length,
    cut_batch,
    leaves,
    map_tensors,
    to_device,
)
from offbeat.data.shared import open_shared
from offbeat.data.shared import share as share_data
from offbeat.data.sources import make_source
from offbeat.errors import DataError

SAMPLE = Path(files.__file__).parent / "fashion_mnist_sample"


def idx(shape: list[int], body: bytes) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + body


def write_mnist(folder: Path, *, zipped: bool) -> None:
    folder.mkdir(parents=True)
    for part, count in (("train", 6), ("t10k", 3)):
        images = idx([count, 28, 28], bytes(i % 251 for i in range(count * 784)))
        labels = idx([count], bytes(range(count)))
        for name, raw in (
            (f"{part}-images-idx3-ubyte", images),
            (f"{part}-labels-idx1-ubyte", labels),
        ):
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(raw))
            else:
                (folder / name).write_bytes(raw)


# -- the built-in sample -----------------------------------------------------------------------


def test_the_built_in_sample_is_real_balanced_and_small() -> None:
    (train_x, train_y), (test_x, test_y) = load_dataset("fashion-mnist-sample", "nowhere")
    assert train_x.shape == (10_000, 1, 28, 28) and test_x.shape == (2_000, 1, 28, 28)
    assert train_y.bincount().tolist() == [1000] * 10
    assert test_y.bincount().tolist() == [200] * 10
    assert 60 < train_x.float().mean() < 85, "Fashion-MNIST's mean grey is about 73"
    assert sum(f.stat().st_size for f in SAMPLE.iterdir()) <= 6_000_000
    assert "Zalando" in (SAMPLE / "LICENSE").read_text()


def test_no_training_image_of_the_sample_is_a_test_image() -> None:
    (train_x, _), (test_x, _) = load_dataset("fashion-mnist-sample", "nowhere")
    seen = {image.numpy().tobytes() for image in train_x}
    assert not any(image.numpy().tobytes() in seen for image in test_x)


# -- readers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files_are_found_and_read(tmp_path: Path, name: str, zipped: bool) -> None:
    write_mnist(tmp_path / name, zipped=zipped)
    (train_x, train_y), (test_x, test_y) = load_dataset(name, tmp_path)
    assert train_x.shape == (6, 1, 28, 28) and train_x.dtype == torch.uint8
    assert train_x.flatten()[:300].tolist() == [i % 251 for i in range(300)]
    assert train_y.tolist() == [0, 1, 2, 3, 4, 5] and train_y.dtype == torch.int64
    assert test_x.shape == (3, 1, 28, 28) and test_y.tolist() == [0, 1, 2]


IMAGES = "train-images-idx3-ubyte"
GOOD = idx([2, 28, 28], bytes(2 * 784))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (GOOD[:-1], "holds 1567 of the 1568 bytes"),
        (GOOD + b"x", "holds more than the 1568 bytes"),
        (GOOD[:9], "ends inside its header"),
        (b"", "not an idx file"),
        (b"PK\x03\x04 something else entirely", "not an idx file"),
        (idx([2], bytes(2)), "not an idx file of bytes in 3 dimensions"),
        (bytes([0, 0, 13, 3]) + GOOD[4:], "not an idx file"),
        (idx([2**32 - 1] * 3, b""), "which no such dataset has"),
        (idx([0, 28, 28], b""), "claims 0 bytes"),
        (idx([2, 32, 32], bytes(2048)), "images of .32, 32."),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_bad_idx_file_is_one_clear_line(
    tmp_path: Path, raw: bytes, message: str, zipped: bool
) -> None:
    write_mnist(tmp_path / "mnist", zipped=zipped)
    name = IMAGES + (".gz" if zipped else "")
    (tmp_path / "mnist" / name).write_bytes(gzip.compress(raw) if zipped else raw)
    with pytest.raises(DataError, match=message) as caught:
        load_dataset("mnist", tmp_path)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 5, 20, 100, -5])
def test_a_cut_or_damaged_gz_file_is_one_clear_line(tmp_path: Path, keep: int) -> None:
    write_mnist(tmp_path / "mnist", zipped=True)
    path = tmp_path / "mnist" / f"{IMAGES}.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    with pytest.raises(DataError, match=IMAGES):
        load_dataset("mnist", tmp_path)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0x10
    path.write_bytes(flipped)
    with pytest.raises(DataError, match=IMAGES):
        load_dataset("mnist", tmp_path)


def test_labels_must_fit_the_images_and_the_classes(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist", zipped=False)
    labels = tmp_path / "mnist" / "train-labels-idx1-ubyte"
    labels.write_bytes(idx([5], bytes(5)))
    with pytest.raises(DataError, match=r"6 images.* 5 labels"):
        load_dataset("mnist", tmp_path)
    labels.write_bytes(idx([6], bytes([0, 1, 2, 3, 4, 10])))
    with pytest.raises(DataError, match="label 10"):
        load_dataset("mnist", tmp_path)


def test_missing_data_names_the_place_and_the_flag(tmp_path: Path) -> None:
    for name, folder in [
        ("mnist", "mnist"),
        ("cifar10", "cifar-10-batches-bin"),
        ("cifar100", "cifar-100-binary"),
    ]:
        with pytest.raises(DataError, match=f"data not found.*{folder}.*--data-dir.*get {name}"):
            load_dataset(name, tmp_path)
    with pytest.raises(DataError, match="did you mean 'cifar10'"):
        load_dataset("cifar11", tmp_path)


def cifar_record(labels: list[int], start: int) -> bytes:
    return bytes(labels) + bytes((start + i) % 256 for i in range(3072))


@pytest.fixture
def small_cifar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CIFAR_RECORDS_PER_FILE", 2)


@pytest.mark.usefixtures("small_cifar")
def test_cifars_binary_version_is_read(tmp_path: Path) -> None:
    ten, hundred = tmp_path / "cifar-10-batches-bin", tmp_path / "cifar-100-binary"
    ten.mkdir()
    hundred.mkdir()
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        (ten / f"{name}.bin").write_bytes(cifar_record([i], 0) + cifar_record([9], i))
    (hundred / "train.bin").write_bytes(cifar_record([19, 99], 7) * 10)
    (hundred / "test.bin").write_bytes(cifar_record([3, 42], 1) * 2)
    (x, y), (test_x, test_y) = load_dataset("cifar10", tmp_path)
    assert x.shape == (10, 3, 32, 32) and y.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert x[0].flatten()[:5].tolist() == [0, 1, 2, 3, 4]
    assert test_x.shape == (2, 3, 32, 32) and test_y.tolist() == [5, 9]
    (x, y), (_, test_y) = load_dataset("cifar100", tmp_path)
    assert y.tolist() == [99] * 10 and test_y.tolist() == [42, 42], "fine labels"
    (ten / "data_batch_3.bin").write_bytes(cifar_record([1], 0))
    with pytest.raises(DataError, match=r"data_batch_3\.bin has 3073 bytes instead of 6146"):
        load_dataset("cifar10", tmp_path)
    (ten / "data_batch_3.bin").write_bytes(cifar_record([77], 0) * 2)
    with pytest.raises(DataError, match="label 77"):
        load_dataset("cifar10", tmp_path)


# -- shares and batches ------------------------------------------------------------------------


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([float(index)]), "y": index**2}


class Counting(IterableDataset[Any]):
    def __len__(self) -> int:  # some have one; they are iterable all the same
        return 23

    def __iter__(self) -> Iterator[tuple[float, int]]:
        return ((float(i), i) for i in range(23))


def share(
    rank: int, num_workers: int, batch_size: int = 5, seed: int = 0, disjoint: bool = True
) -> Share:
    return Share(
        rank=rank, num_shares=num_workers, batch_size=batch_size, seed=seed, disjoint=disjoint
    )


def numbers(batches: Iterator[Any]) -> list[int]:
    found = []
    for batch in batches:
        values = batch["x"].flatten() if isinstance(batch, dict) else batch[0]
        found += [int(v) for v in values]
    return found


@pytest.mark.parametrize("data", [(torch.arange(23.0), torch.arange(23)), Squares(), Counting()])
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_shares_are_disjoint_and_cover_everything(data: Any, num_workers: int) -> None:
    source = make_source(data, "training")
    shares = [numbers(source.train(share(r, num_workers), 0)) for r in range(num_workers)]
    assert sorted(n for s in shares for n in s) == list(range(23))
    again = [numbers(source.train(share(r, num_workers), 3)) for r in range(num_workers)]
    assert [set(s) for s in again] == [set(s) for s in shares], "a worker's share is its own"
    if source.num_examples:
        sizes = [share(r, num_workers).num_batches(23) for r in range(num_workers)]
        assert sizes == [-(-len(s) // 5) for s in shares]


def test_with_shared_data_everybody_goes_through_all_of_it_in_an_order_of_its_own() -> None:
    source = make_source((torch.arange(23.0), torch.arange(23)), "training")
    orders = [numbers(source.train(share(r, 2, disjoint=False), 0)) for r in range(2)]
    assert [sorted(order) for order in orders] == [list(range(23))] * 2
    assert orders[0] != orders[1]
    assert share(0, 2, disjoint=False).num_batches(23) == 5


@pytest.mark.parametrize("data", [(torch.arange(23.0), torch.arange(23)), Squares(), Counting()])
def test_a_pass_can_begin_in_the_middle(data: Any) -> None:
    source = make_source(data, "training")
    whole = numbers(source.train(share(1, 2), 2))
    assert numbers(source.train(share(1, 2), 2, first=2)) == whole[10:]


@pytest.mark.parametrize(
    "data",
    [
        torch.arange(6.0),
        (torch.arange(6.0).reshape(3, 2), torch.tensor([1, 2, 3])),
        {"x": torch.zeros(3, 2, dtype=torch.uint8), "y": torch.ones(3, 1, dtype=torch.float64)},
        (torch.arange(12).reshape(3, 4).T.contiguous().T, torch.tensor([True, False, True])),
    ],
)
def test_shared_data_is_the_same_data_in_one_memory(data: Any) -> None:
    original = make_source(data, "training")
    descriptor = share_data({"train": original, "test": None})
    try:
        first, second = open_shared(descriptor), open_shared(descriptor)
    finally:
        os.close(descriptor)
    assert set(first) == {"train"}
    mine, theirs = list(first["train"].in_order(2)), list(original.in_order(2))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    for tensor, other in zip(
        leaves(first["train"].tensors), leaves(second["train"].tensors), strict=True
    ):
        tensor.fill_(1)
        assert bool((other == 1).all()), "what one process writes, the other sees"


def test_a_dataset_is_not_shared() -> None:
    descriptor = share_data({"train": make_source(Squares(), "training")})
    try:
        assert open_shared(descriptor) == {}
    finally:
        os.close(descriptor)


def test_orders_depend_on_seed_rank_and_epoch_alone() -> None:
    source = make_source((torch.arange(50.0), torch.arange(50)), "training")
    assert numbers(source.train(share(0, 2, 5, 0), 0)) == numbers(
        source.train(share(0, 2, 5, 0), 0)
    )
    assert numbers(source.train(share(0, 2, 5, 0), 0)) == numbers(
        source.train(share(0, 2, 7, 0), 0)
    )
    assert numbers(source.train(share(0, 2, 5, 0), 0)) != numbers(
        source.train(share(0, 2, 5, 0), 1)
    )
    assert numbers(source.train(share(0, 2, 5, 0), 0)) != numbers(
        source.train(share(0, 2, 5, 1), 0)
    )


def padded(examples: list[Any]) -> dict[str, Any]:
    rows = [torch.tensor(example) for example in examples]
    return {
        "x": pad_sequence(rows, batch_first=True),
        "about": ([len(row) for row in rows], [str(example) for example in examples]),
    }


RAGGED = [[1], [1, 2], [1, 2, 3], [4], [4, 5]]


class RaggedStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter(RAGGED)


@pytest.mark.parametrize("num_readers", [0, 1])
def test_a_collate_of_the_users_makes_batches_of_ragged_examples(num_readers: int) -> None:
    source = make_source(RAGGED, "training", padded, num_readers)
    with source.opened(lambda line: None) as reader:
        batches = list(reader.train(share(0, 1, 2), 0))
    plain = list(make_source(RAGGED, "training", padded).train(share(0, 1, 2), 0))
    assert [batch["about"] for batch in batches] == [batch["about"] for batch in plain]
    assert [batch_length(batch) for batch in batches] == [2, 2, 1] and source.batch_size is None
    assert all(batch["x"].shape[1] == max(batch["about"][0]) for batch in batches)
    stream = make_source(RaggedStream(), "training", padded)
    assert [batch["about"][0] for batch in stream.in_order(2)] == [[1, 2], [3, 1], [2]]


def test_ragged_examples_without_a_collate_are_told_the_remedy() -> None:
    loader: Any = DataLoader(RAGGED, batch_size=2)  # type: ignore[arg-type]
    for data in (RAGGED, RaggedStream(), loader):
        with pytest.raises(DataError, match=r"RuntimeError: .*equal size.*a collate=, or.*_fn="):
            list(make_source(data, "training").in_order(2))


def test_a_tensor_dataset_is_collated_where_somebody_wants_to() -> None:
    data = TensorDataset(torch.arange(4))
    (batch,) = make_source(data, "test", lambda rows: sum(row[0] for row in rows)).in_order(4)
    assert batch == 6


@pytest.mark.parametrize(
    ("data", "asked", "message"),
    [
        (torch.zeros(3), {"collate": len}, "the recipe's collate is for .* data is tensors"),
        (torch.zeros(3), {"num_readers": 1}, "--loader-workers is for map-style Datasets"),
        (DataLoader(Squares()), {"num_readers": 1}, "a DataLoader, which says that itself"),
        (RaggedStream(), {"num_readers": 1}, "put it into a DataLoader"),
    ],
)
def test_what_is_for_datasets_is_refused_elsewhere(data: Any, asked: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_source(data, "training", **asked)


class Pair(NamedTuple):
    x: Tensor
    name: str


@dataclass
class Record:
    x: Tensor
    names: list[str]


class Encoding(UserDict[str, Any]):
    """As a tokenizer makes it."""

    def to(self, device: Any) -> "Encoding":
        return Encoding({key: value.to(device) for key, value in self.items()})


class Graphs:
    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes

    def to(self, device: Any) -> "Graphs":
        return Graphs(self.nodes.to(device))


PACKED = pack_sequence([torch.ones(3, 2), torch.ones(2, 2), torch.ones(1, 2), torch.ones(1, 2)])


@pytest.mark.parametrize(
    "batch",
    [
        {"names": ["a", "b", "c", "d"], "deep": {"t": torch.tensor(1.0), "x": [torch.ones(4, 2)]}},
        (Pair(torch.ones(4, 2), "a"), 3),
        Record(torch.ones(4), ["a", "b", "c", "d"]),
        Encoding(ids=torch.ones(4, 3), mask=torch.ones(4, 3)),
        (Graphs(torch.ones(4, 2)), torch.ones(4)),
        {"seq": PACKED, "y": torch.ones(4)},
    ],
)
def test_batches_of_any_form_have_a_length_and_go_to_a_device(batch: Any) -> None:
    assert batch_length(batch) == 4
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is type(batch) and batch_length(moved) == 4
    found = [leaf.device.type for leaf in leaves(moved)]
    assert "meta" in found and set(found) <= (
        {"meta", "cpu"} if isinstance(moved, dict) else {"meta"}
    )
    doubled = map_tensors(batch, lambda tensor: 2 * tensor)
    assert type(doubled) is type(batch)


def test_a_batch_is_cut_with_all_that_it_has_for_each_example() -> None:
    batch = {"names": ["a", "b", "c"], "of": Pair(torch.arange(3), "abc"), "t": torch.tensor(1)}
    cut = cut_batch(batch, 1, 3, 3)
    assert cut["names"] == ["b", "c"] and cut["t"] == 1
    assert cut["of"].x.tolist() == [1, 2] and cut["of"].name == "abc"
    with pytest.raises(DataError, match="PackedSequence cannot be cut: give each worker one dev"):
        cut_batch((PACKED, torch.ones(4)), 0, 2, 4)


def test_in_order_means_each_once_in_order() -> None:
    for data in ((torch.arange(23.0), torch.arange(23)), Squares(), Counting()):
        assert numbers(make_source(data, "test").in_order(5)) == list(range(23))


def test_batches_have_the_form_of_the_data() -> None:
    x, y = toy_data(10)
    assert torch.equal(next(make_source(x, "training").in_order(4)), x[:4])
    for data in ((x, y), [x, y], TensorDataset(x, y)):
        batch = next(make_source(data, "training").in_order(4))
        assert torch.equal(batch[0], x[:4]) and torch.equal(batch[1], y[:4])
    batch = next(make_source((x.numpy(), y.numpy()), "training").in_order(4))
    assert torch.equal(batch[0], x[:4]) and torch.equal(batch[1], y[:4])
    batch = next(make_source({"x": x, "y": y}, "training").in_order(4))
    assert torch.equal(batch["x"], x[:4]) and torch.equal(batch["y"], y[:4])
    batch = next(make_source(Squares(), "training").in_order(4))
    assert batch["y"].tolist() == [0, 1, 4, 9]
    named = {"name": ["a", "b"], "x": x[:2]}
    assert [batch_length(b) for b in (x[:4], (x[:3], y[:3]), batch, named)] == [4, 3, 4, 2]
    with pytest.raises(DataError, match="without any"):
        batch_length(["a", "b"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((torch.zeros(3), torch.zeros(4)), "different lengths"),
        (torch.zeros(0), "empty"),
        (torch.tensor(1.0), "no dimension"),
        ({"x": [1, 2]}, "is a dict"),
        (iter([1, 2]), "only once"),
        (17, "is a int"),
    ],
)
def test_data_of_another_kind_is_refused(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_source(data, "training")
