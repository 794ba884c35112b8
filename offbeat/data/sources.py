"""What a recipe calls its data, as a Source: `make_source(data, "training")`.

Called when a job is made, by whichever process needs the data.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from offbeat.data.batches import Indexed, IterableStyle, MapStyle, Source, TensorData, Tensors
from offbeat.data.loaders import make_loaded
from offbeat.errors import DataError


def make_source(data: Any, what: str) -> Source:
    """`data` in whichever of the known forms it has; `what` names it in an error."""
    if isinstance(data, Source):
        return data
    tensors = _as_tensors(data, what)
    if tensors is not None:
        return _checked(Tensors(tensors), what)
    if isinstance(data, DataLoader):
        return make_loaded(data, what)
    if isinstance(data, Iterator):
        raise DataError(
            f"the {what} data is an iterator, which can be gone through only once; make it an "
            f"IterableDataset, whose __iter__ begins anew"
        )
    if isinstance(data, IterableDataset):
        return IterableStyle(data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping):
        return _checked(MapStyle(data), what)
    if isinstance(data, Iterable) and not isinstance(data, Mapping):
        return IterableStyle(data)
    raise DataError(
        f"the {what} data is a {type(data).__name__}; it must be a tensor, a tuple or dict of "
        f"tensors, a map-style or iterable Dataset, or a DataLoader"
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
