"""What a recipe calls its data, as a Source: `make_source(data, "training", recipe.collate)`.

Called when a job is made, by whichever process needs the data.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from offbeat.data.batches import (
    Collate,
    Indexed,
    IterableStyle,
    MapStyle,
    Source,
    TensorData,
    Tensors,
    stacked,
)
from offbeat.data.loaders import make_loaded, read_by_processes
from offbeat.errors import DataError


def make_source(
    data: Any, what: str, collate: Collate | None = None, num_readers: int = 0
) -> Source:
    """`data` in whichever of the known forms it has; `what` names it in an error. `collate` makes a
    batch of a list of examples; so many processes read them for each worker."""
    if isinstance(data, Source):
        return data
    tensors = None if collate and isinstance(data, TensorDataset) else _as_tensors(data, what)
    if tensors is not None:
        _refuse("tensors, which are no list of examples", what, collate, num_readers)
        return _checked(Tensors(tensors), what)
    if isinstance(data, DataLoader):
        _refuse("a DataLoader, which says that itself", what, collate, num_readers)
        return make_loaded(data, what)
    if isinstance(data, Iterator):
        raise DataError(
            f"the {what} data is an iterator, which can be gone through only once; make it an "
            f"IterableDataset, whose __iter__ begins anew"
        )
    is_map_style = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if is_map_style and not isinstance(data, Mapping | IterableDataset):
        source = _checked(MapStyle(data, collate or stacked), what)
        return read_by_processes(data, collate, num_readers) if num_readers else source
    if isinstance(data, Iterable) and not isinstance(data, Mapping):
        _refuse("an iterable Dataset: put it into a DataLoader", what, None, num_readers)
        return IterableStyle(data, collate or stacked)
    raise DataError(
        f"the {what} data is a {type(data).__name__}; it must be a tensor, a tuple or dict of "
        f"tensors, a map-style or iterable Dataset, or a DataLoader"
    )


def _refuse(found: str, what: str, collate: Collate | None, num_readers: int) -> None:
    """What was asked for is for Datasets."""
    asked = {"the recipe's collate": collate, "--loader-workers": num_readers}
    if names := [name for name, value in asked.items() if value]:
        raise DataError(
            f"{names[0]} is for map-style Datasets, and the {what} data is {found}; leave it out"
        )


def _as_tensors(data: Any, what: str) -> TensorData | None:
    """`data` as tensors of one length, if that is what it is; NumPy arrays will do."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, tuple | list):
        parts = list(data)
    else:
        parts = list(data.values()) if isinstance(data, dict) else [data]
    if not parts or not all(isinstance(part, Tensor | np.ndarray) for part in parts):
        return None
    found = [torch.as_tensor(part) for part in parts]
    if any(tensor.dim() == 0 for tensor in found):
        raise DataError(f"a tensor of the {what} data has no dimension to take examples from")
    if len({len(tensor) for tensor in found}) > 1:
        lengths = [len(tensor) for tensor in found]
        raise DataError(f"the {what} tensors have different lengths: {lengths}")
    if isinstance(data, dict):
        return dict(zip(data, found, strict=True))
    return tuple(found) if isinstance(data, tuple | list) else found[0]


def _checked(source: Indexed, what: str) -> Indexed:
    if not source.num_examples:
        raise DataError(f"the {what} data is empty")
    return source
