"""Each worker's share of the training data, cut into batches; and the test data, in order.

Data is a tensor, a tuple of tensors of one length, a map-style Dataset (with a length) or an
iterable one (without). Shares are disjoint and cover everything. A worker goes through its share
in a new order every epoch, which depends on nothing but the run's seed, the worker's rank and the
epoch.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from offbeat.errors import DataError
from offbeat.randomness import make_generator

Batch = Any


class Source(ABC):
    """Where examples come from; one per dataset, used by all workers of a process."""

    num_examples: int | None
    """None: not known before the end is reached."""

    @abstractmethod
    def train(
        self, rank: int, num_workers: int, batch_size: int, seed: int, epoch: int
    ) -> Iterator[Batch]:
        """One pass of worker `rank` over its share."""

    @abstractmethod
    def in_order(self, batch_size: int) -> Iterator[Batch]:
        """One pass over everything, each example once."""

    def share_size(self, rank: int, num_workers: int) -> int | None:
        if self.num_examples is None:
            return None
        return len(range(rank, self.num_examples, num_workers))


class _Indexed(Source):
    """Data whose examples can be asked for by number."""

    num_examples: int

    @abstractmethod
    def gather(self, indices: Tensor) -> Batch:
        """The batch of these examples."""

    def train(
        self, rank: int, num_workers: int, batch_size: int, seed: int, epoch: int
    ) -> Iterator[Batch]:
        everything = torch.randperm(self.num_examples, generator=make_generator(seed, "shares"))
        share = everything[rank::num_workers]
        order = torch.randperm(len(share), generator=make_generator(seed, "order", rank, epoch))
        for indices in torch.split(share[order], batch_size):
            yield self.gather(indices)

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        for indices in torch.split(torch.arange(self.num_examples), batch_size):
            yield self.gather(indices)


class _Tensors(_Indexed):
    def __init__(self, tensors: tuple[Tensor, ...], *, bare: bool) -> None:
        self._tensors = tensors
        self._bare = bare
        self.num_examples = len(tensors[0])

    def gather(self, indices: Tensor) -> Batch:
        if self._bare:
            return self._tensors[0][indices]
        return tuple(tensor[indices] for tensor in self._tensors)


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

    def train(
        self, rank: int, num_workers: int, batch_size: int, seed: int, epoch: int
    ) -> Iterator[Batch]:
        return _batched(itertools.islice(self._dataset, rank, None, num_workers), batch_size)

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        return _batched(self._dataset, batch_size)


def make_source(data: Any, what: str) -> Source:
    """`data` in whichever of the known forms it has; `what` names it in an error."""
    if isinstance(data, Source):
        return data
    if isinstance(data, Tensor):
        return _checked(_Tensors((data,), bare=True), what)
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, tuple | list) and data and all(isinstance(t, Tensor) for t in data):
        if len({len(t) for t in data}) > 1:
            raise DataError(f"the {what} tensors have different lengths: {[len(t) for t in data]}")
        return _checked(_Tensors(tuple(data), bare=False), what)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return _checked(_MapStyle(data), what)
    if isinstance(data, Iterator):
        raise DataError(
            f"the {what} data is an iterator, which can be gone through only once; make it an "
            f"IterableDataset, whose __iter__ begins anew"
        )
    if isinstance(data, Iterable):
        return _IterableStyle(data)
    raise DataError(
        f"the {what} data is a {type(data).__name__}; it must be a tensor, a tuple of tensors, or "
        f"a map-style or iterable Dataset"
    )


def batch_length(batch: Batch) -> int:
    """How many examples a batch holds, by the first tensor in it."""
    if isinstance(batch, Tensor):
        return len(batch)
    if isinstance(batch, Mapping):
        return batch_length(next(iter(batch.values())))
    if isinstance(batch, tuple | list) and batch:
        return batch_length(batch[0])
    raise DataError(f"a batch must consist of tensors; found a {type(batch).__name__}")


def _checked(source: _Indexed, what: str) -> _Indexed:
    if not source.num_examples:
        raise DataError(f"the {what} data is empty")
    return source


def _batched(examples: Iterable[Any], batch_size: int) -> Iterator[Batch]:
    iterator = iter(examples)
    while chunk := list(itertools.islice(iterator, batch_size)):
        yield default_collate(chunk)
