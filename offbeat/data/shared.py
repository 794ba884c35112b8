"""Training and test data in memory that all processes of a machine share.

The process that loads a dataset puts its tensors there, and passes the descriptor on; the others
map it and copy nothing. Only tensors can be shared; a Dataset is made anew by each process, by the
recipe's own data function.

    descriptor = share({"train": train, "test": test})      # the launcher
    sources = open_shared(descriptor)                       # a worker: {"train": Source, ...}
"""

import json
import math
import mmap
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from offbeat.data.batches import Source, TensorData, Tensors
from offbeat.memory import aligned, make_memory, map_memory, view

_LENGTH_BYTES = 8


def share(sources: Mapping[str, Source | None]) -> int:
    """Move those sources that consist of tensors into shared memory: from now on that is where they
    live, also for this process. The caller owns the descriptor."""
    described: dict[str, Any] = {}
    tensors: list[tuple[int, Tensor]] = []
    offset = 0
    for name, source in sources.items():
        if isinstance(source, Tensors):
            parts = []
            for key, tensor in _leaves(source.tensors):
                dtype = str(tensor.dtype).removeprefix("torch.")
                parts.append([key, dtype, list(tensor.shape), offset])
                tensors.append((offset, tensor))
                offset += aligned(tensor.numel() * tensor.element_size())
            described[name] = {"form": type(source.tensors).__name__, "parts": parts}
    head = json.dumps(described).encode()
    start = aligned(_LENGTH_BYTES + len(head))
    descriptor = make_memory(start + max(offset, 1))
    buffer = map_memory(descriptor, start + max(offset, 1))
    buffer[:_LENGTH_BYTES] = len(head).to_bytes(_LENGTH_BYTES, "little")
    buffer[_LENGTH_BYTES : _LENGTH_BYTES + len(head)] = head
    for place, tensor in tensors:
        flat = view(buffer, tensor.dtype, tensor.numel(), start + place)
        flat.copy_(tensor.reshape(-1))
    for name, source in open_shared(descriptor).items():
        mine = sources[name]
        assert isinstance(mine, Tensors) and isinstance(source, Tensors)
        mine.tensors = source.tensors
    return descriptor


def open_shared(descriptor: int) -> dict[str, Source]:
    """The sources in shared memory; the descriptor may be closed afterwards."""
    return sources_in(map_all(descriptor))


def map_all(descriptor: int) -> mmap.mmap:
    """All that `share` has put there."""
    return map_memory(descriptor, os.fstat(descriptor).st_size)


def sources_in(buffer: "mmap.mmap | memoryview") -> dict[str, Source]:
    """The sources in what `share` has written, wherever a copy of it lies; nobody writes there."""
    memory = memoryview(buffer)
    size = int.from_bytes(memory[:_LENGTH_BYTES], "little")
    if size > len(memory) - _LENGTH_BYTES:
        raise ValueError("the shared memory is smaller than what it should hold")
    described = json.loads(bytes(memory[_LENGTH_BYTES : _LENGTH_BYTES + size]))
    start = aligned(_LENGTH_BYTES + size)
    sources: dict[str, Source] = {}
    for name, source in described.items():
        parts = {}
        for key, dtype, shape, offset in source["parts"]:
            flat = view(buffer, getattr(torch, dtype), math.prod(shape), start + offset)
            parts[key] = flat.reshape(shape)
        sources[name] = Tensors(_assembled(source["form"], parts))
    return sources


def _leaves(data: TensorData) -> list[tuple[str, Tensor]]:
    if isinstance(data, Tensor):
        return [("", data)]
    return (
        list(data.items()) if isinstance(data, dict) else [(str(i), t) for i, t in enumerate(data)]
    )


def _assembled(form: str, parts: dict[str, Tensor]) -> TensorData:
    match form:
        case "tuple":
            return tuple(parts.values())
        case "dict":
            return parts
        case _:
            (tensor,) = parts.values()
            return tensor
