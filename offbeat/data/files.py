"""Readers for idx files (MNIST, Fashion-MNIST; plain or gz) and CIFAR's binary version.

Anything that is not exactly what it should be is a DataError of one line that names the file.
"""

import gzip
import io
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import DataError, MissingDataError

CIFAR_RECORDS_PER_FILE = 10_000
_MOST_BYTES = 1 << 31
_CHUNK = 1 << 20


def read_idx(path: Path, num_dims: int) -> Tensor:
    """The bytes of an idx file as a uint8 tensor with `num_dims` dimensions."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            head = file.read(4 + 4 * num_dims)
            if head[:4] != bytes([0, 0, 8, num_dims]):
                raise DataError(f"{path} is not an idx file of bytes in {num_dims} dimensions")
            if len(head) < 4 + 4 * num_dims:
                raise DataError(f"{path} is cut short: it ends inside its header")
            shape = [int(n) for n in np.frombuffer(head, ">u4", offset=4)]
            size = math.prod(shape)
            if not 0 < size <= _MOST_BYTES:
                raise DataError(f"{path} claims {size} bytes of data, which no such dataset has")
            body = _read(file, size + 1)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path} is corrupt or cut short: {error}; fetch it again") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if len(body) != size:
        found = "more than" if len(body) > size else f"{len(body)} of"
        raise DataError(f"{path} holds {found} the {size} bytes that its header promises")
    return torch.frombuffer(body, dtype=torch.uint8).reshape(shape)


def _read(file: io.BufferedIOBase, most: int) -> bytearray:
    """So many bytes, or as many as there are; memory for no more than these."""
    found = bytearray()
    while len(found) < most and (part := file.read(min(most - len(found), _CHUNK))):
        found += part
    return found


def read_idx_pair(folder: Path, part: str, num_classes: int = 10) -> tuple[Tensor, Tensor]:
    """Images [n, 1, 28, 28] as bytes and labels [n] of one part (train or t10k)."""
    images_path = _find(folder, f"{part}-images-idx3-ubyte")
    labels_path = _find(folder, f"{part}-labels-idx1-ubyte")
    images = read_idx(images_path, 3)
    labels = read_idx(labels_path, 1).long()
    if images.shape[1:] != (28, 28):
        raise DataError(f"{images_path} has images of {tuple(images.shape[1:])}, not of (28, 28)")
    if len(images) != len(labels):
        raise DataError(
            f"{images_path} has {len(images)} images, {labels_path} {len(labels)} labels"
        )
    _check_labels(labels_path, labels, num_classes)
    return images.unsqueeze(1), labels


def read_cifar(
    folder: Path,
    names: list[str],
    *,
    num_label_bytes: int,
    num_classes: int,
    num_files_each: int = 1,
) -> tuple[Tensor, Tensor]:
    """Images [n, 3, 32, 32] as bytes and labels [n]; of several label bytes the last one counts."""
    record = num_label_bytes + 3072
    images, labels = [], []
    for name in names:
        path = folder / name
        try:
            raw = path.read_bytes()
        except FileNotFoundError as error:
            raise _not_found(folder, name) from error
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from error
        expected = record * CIFAR_RECORDS_PER_FILE * num_files_each
        if len(raw) != expected:
            raise DataError(f"{path} has {len(raw)} bytes instead of {expected}; fetch it again")
        table = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(-1, record)
        file_labels = table[:, num_label_bytes - 1].long()
        _check_labels(path, file_labels, num_classes)
        labels.append(file_labels)
        images.append(table[:, num_label_bytes:].reshape(-1, 3, 32, 32))
    return torch.cat(images), torch.cat(labels)


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise _not_found(folder, f"{name} (or {name}.gz)")


def _not_found(folder: Path, name: str) -> MissingDataError:
    return MissingDataError(
        f"data not found: there is no {name} in {folder}; --data-dir names the folder that holds "
        f"{folder.name}/"
    )


def _check_labels(path: Path, labels: Tensor, num_classes: int) -> None:
    if len(labels) and int(labels.max()) >= num_classes:
        raise DataError(f"{path} has a label {int(labels.max())}; there are {num_classes} classes")
