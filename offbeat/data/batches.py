"""Each worker's share of the training data, cut into batches; and the test data, in order.

Data is a tensor, a tuple or dict of tensors of one length, a map-style Dataset (with a length) or
an iterable one (without). Shares are disjoint and cover everything, or each is the whole set. A
worker goes through its share in a new order every epoch, which depends on nothing but the run's
seed, the worker's rank and the epoch.
"""

import itertools
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from offbeat.errors import DataError
from offbeat.randomness import make_generator

WAKE_S = 0.2
"""A thread that prepares batches looks this often whether anybody still wants them."""

Batch = Any
Item = TypeVar("Item")
TensorData = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What worker `rank` goes through: one of `num_shares` parts of the data, or all of it."""

    rank: int
    num_shares: int
    batch_size: int
    seed: int
    disjoint: bool = True

    @property
    def part(self) -> slice:
        return slice(self.rank, None, self.num_shares) if self.disjoint else slice(None)

    def num_batches(self, num_examples: int) -> int:
        return -(-len(range(num_examples)[self.part]) // self.batch_size)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A batch, and its place in a worker's steps, each of which is of one batch or of several."""

    epoch: int
    batch: Batch
    number: int
    """Of the worker's batches, from 0."""
    ends_step: bool


class Source(ABC):
    """Where examples come from; one per dataset, used by all workers of a process."""

    num_examples: int | None
    """None: not known before the end is reached."""

    device = torch.device("cpu")
    """Where batches are made."""

    def train(self, share: Share, epoch: int, first: int = 0) -> Iterator[Batch]:
        """One pass of a worker over its share, beginning with batch number `first`."""
        return map(self.finished, self.drafts(share, epoch, first))

    @abstractmethod
    def drafts(self, share: Share, epoch: int, first: int = 0) -> Iterator[Any]:
        """What `finished` makes each batch of such a pass of."""

    def finished(self, draft: Any) -> Batch:
        return draft

    def on(self, device: torch.device) -> "Source":
        """The same, with that device's memory where it fits."""
        return self

    def bytes_on(self, device: torch.device) -> int:
        """How much of that device's memory it takes."""
        return 0

    @abstractmethod
    def in_order(self, batch_size: int) -> Iterator[Batch]:
        """One pass over everything, each example once."""


class _Indexed(Source):
    """Data whose examples can be asked for by number."""

    num_examples: int

    @abstractmethod
    def gather(self, indices: Tensor) -> Batch:
        """The batch of these examples."""

    def finished(self, draft: Tensor) -> Batch:
        return self.gather(draft)

    def drafts(self, share: Share, epoch: int, first: int = 0) -> Iterator[Tensor]:
        shuffled = make_generator(share.seed, "shares")
        part = torch.randperm(self.num_examples, generator=shuffled)[share.part]
        own = make_generator(share.seed, "order", share.rank, epoch)
        order = torch.randperm(len(part), generator=own)
        mine = part[order].to(self.device)
        yield from torch.split(mine, share.batch_size)[first:]

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        for indices in torch.split(torch.arange(self.num_examples), batch_size):
            yield self.gather(indices)


class Tensors(_Indexed):
    """Tensors of one length, by themselves or as the leaves of a tuple or dict."""

    def __init__(self, tensors: TensorData) -> None:
        self.tensors = tensors
        self.num_examples = batch_length(tensors)
        self.device = next(leaves(tensors)).device
        self._elsewhere: dict[torch.device, Tensors] = {}
        self._lock = threading.Lock()

    def on(self, device: torch.device) -> Source:
        """Those of several workers on one GPU are the same; they take no more than a quarter of
        what is free there."""
        if device.type != "cuda":
            return self
        with self._lock:
            if device not in self._elsewhere:
                fits = 4 * self._num_bytes <= torch.cuda.mem_get_info(device)[0]
                moved = map_tensors(self.tensors, lambda t: t.to(device)) if fits else None
                self._elsewhere[device] = self if moved is None else Tensors(moved)
                torch.cuda.synchronize(device)  # every worker has a stream of its own
            return self._elsewhere[device]

    def bytes_on(self, device: torch.device) -> int:
        moved = self._elsewhere.get(device, self)
        return moved._num_bytes if moved.device == device else 0

    @property
    def _num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in leaves(self.tensors))

    def gather(self, indices: Tensor) -> Batch:
        # index_select copies rows, which takes less than half the time of tensor[indices]
        if isinstance(self.tensors, Tensor):
            return self.tensors.index_select(0, indices)
        if isinstance(self.tensors, dict):
            return {name: t.index_select(0, indices) for name, t in self.tensors.items()}
        return tuple(tensor.index_select(0, indices) for tensor in self.tensors)


class _MapStyle(_Indexed):
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.num_examples = len(dataset)

    def gather(self, indices: Tensor) -> Batch:
        return default_collate([self._dataset[i] for i in indices.tolist()])


class _IterableStyle(Source):
    num_examples = None

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset

    def drafts(self, share: Share, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Streams cannot be shuffled: without disjoint shares every worker sees the same order."""
        part = share.part
        examples = itertools.islice(self._dataset, part.start, part.stop, part.step)
        return _batched(
            itertools.islice(examples, first * share.batch_size, None), share.batch_size
        )

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        return _batched(self._dataset, batch_size)


def make_source(data: Any, what: str) -> Source:
    """`data` in whichever of the known forms it has; `what` names it in an error."""
    if isinstance(data, Source):
        return data
    tensors = _as_tensors(data, what)
    if tensors is not None:
        return _checked(Tensors(tensors), what)
    if isinstance(data, DataLoader):
        raise DataError(f"the {what} data is a DataLoader; give its dataset: batches are made here")
    if isinstance(data, Iterator):
        raise DataError(
            f"the {what} data is an iterator, which can be gone through only once; make it an "
            f"IterableDataset, whose __iter__ begins anew"
        )
    if isinstance(data, IterableDataset):
        return _IterableStyle(data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping):
        return _checked(_MapStyle(data), what)
    if isinstance(data, Iterable) and not isinstance(data, Mapping):
        return _IterableStyle(data)
    raise DataError(
        f"the {what} data is a {type(data).__name__}; it must be a tensor, a tuple or dict of "
        f"tensors, or a map-style or iterable Dataset"
    )


def batch_length(batch: Batch) -> int:
    """How many examples a batch holds, by the first tensor in it."""
    first = next(leaves(batch), None)
    if first is None:
        raise DataError(f"a batch must hold tensors; found a {type(batch).__name__} without any")
    return first.shape[0] if first.dim() else 1


def not_finite(batch: Batch) -> tuple[int, int]:
    """How many of a batch's numbers are NaN or infinite, and how many floats it has."""
    floats = [leaf for leaf in leaves(batch) if leaf.is_floating_point()]
    finite = sum(int(leaf.isfinite().sum()) for leaf in floats)
    count = sum(leaf.numel() for leaf in floats)
    return count - finite, count


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The same batch with other tensors; what else is in it stays as it is."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(value, change) for value in batch)
    return batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """On the CPU the batch itself; else on its way to `device`, without waiting for it."""
    if device.type == "cpu":
        return batch

    def move(tensor: Tensor) -> Tensor:
        pinned = tensor.pin_memory() if tensor.device.type == "cpu" else tensor
        return pinned.to(device, non_blocking=True)

    return map_tensors(batch, move)


def prepared_ahead(items: Iterator[Item], count: int) -> Iterator[Item]:
    """The same, made by a thread of its own that is up to `count` of them ahead."""
    ready: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(count)
    over = threading.Event()

    def put(item: Item | None, error: BaseException | None) -> None:
        while not over.is_set():
            try:
                ready.put((item, error), timeout=WAKE_S)
                return
            except queue.Full:
                continue

    def prepare() -> None:
        try:
            for item in items:
                put(item, None)
                if over.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:
            put(None, error)

    thread = threading.Thread(target=prepare, name="batches", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            assert item is not None
            yield item
    finally:
        over.set()
        thread.join()


def grouped(items: Iterable[Item], count: int) -> Iterator[tuple[Item, bool]]:
    """Each with whether a group of `count` ends with it; the last group may be smaller. Where every
    one is a group nothing is asked for before it is needed."""
    if count == 1:
        yield from ((item, True) for item in items)
        return
    iterator = iter(items)
    upcoming = list(itertools.islice(iterator, 1))
    for index in itertools.count(1):
        if not upcoming:
            return
        item, upcoming = upcoming[0], list(itertools.islice(iterator, 1))
        yield item, not upcoming or index % count == 0


def leaves(batch: Batch) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from leaves(value)


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


def _checked(source: _Indexed, what: str) -> _Indexed:
    if not source.num_examples:
        raise DataError(f"the {what} data is empty")
    return source


def _batched(examples: Iterable[Any], batch_size: int) -> Iterator[Batch]:
    iterator = iter(examples)
    while chunk := list(itertools.islice(iterator, batch_size)):
        yield default_collate(chunk)
