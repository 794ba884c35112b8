"""A torch DataLoader as data: its parts are kept, and what it goes through is cut into shares.

Nobody iterates over the loader itself. Each worker that goes through it has a copy with another
sampler, which gives it its part of the indices, or of the batches where a batch sampler makes them:

    a shuffling loader     an order that depends on seed, rank and epoch alone
    one in order           every n-th index, in order
    a sampler of its own   gone through anew in every epoch, with the same random numbers in every
                           process; every n-th of what it gives

Processes that read for a loader know which worker they read for (place.py), and end with it.
"""

import contextlib
import copy
import ctypes
import dataclasses
import itertools
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    default_collate,
)

from offbeat import place
from offbeat.data.batches import (
    Asked,
    Batch,
    Collate,
    Share,
    Source,
    Tell,
    only_once,
    own_order,
    own_part,
    stacked,
)
from offbeat.errors import DataError
from offbeat.importing import IMPORTED, import_file
from offbeat.place import Place, at, nobody, placed
from offbeat.randomness import make_generator, make_seed

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: what a process gets when the thread that started it is gone."""
TORCHS_OWN = ("torch.", "torchdata.")
"""Whose samplers of these names do what their names say."""

_DRAWING = threading.Lock()
"""Held while a sampler draws from generators that are the whole process's."""


def make_loaded(loader: DataLoader[Any], what: str) -> Source:
    """The loader as a source; `what` names it in an error."""
    if getattr(loader, "next_iter_state", None) is not None:  # torchdata's StatefulDataLoader
        raise DataError(
            f"the {what} data's loader was given a state of its own to go on from: leave its "
            f"load_state_dict out, since a run that is resumed finds by itself where it was"
        )
    if isinstance(loader.dataset, IterableDataset):
        return LoadedStream(loader)
    source = Loaded(loader)
    if source.num_units == 0:
        raise DataError(f"the {what} data is empty: its DataLoader has nothing to go through")
    return source


def read_by_processes(dataset: Any, collate: Collate | None, count: int) -> Source:
    """A map-style dataset that `count` processes read for each worker."""
    loader: DataLoader[Any] = DataLoader(
        dataset, shuffle=True, collate_fn=collate, num_workers=count, persistent_workers=True
    )
    source = Loaded(loader)
    source.batch_size = None  # nobody had one in mind
    return source


class _Units:
    """A copy's sampler: it gives what it is told to, one epoch after the other."""

    def __init__(self, upcoming: Iterable[Any] = ()) -> None:
        self.upcoming = upcoming

    def __iter__(self) -> Iterator[Any]:
        return iter(self.upcoming)


class _OfLoader(Source):
    """One that was `opened` has a copy of the loader, whose processes may outlast an epoch."""

    def __init__(self, loader: DataLoader[Any], tell: Tell = lambda line: None) -> None:
        self._loader = loader
        self._tell = tell
        self.batch_size = loader.batch_size
        if loader.batch_size is None:
            of_batches = loader.batch_sampler is not None
            self.own_batches = "batch_sampler" if of_batches else "dataset (batch_size=None)"
        self._salt = () if loader.generator is None else (loader.generator.initial_seed(),)
        self._copy: DataLoader[Any] | None = None
        self._reading: Generator[Batch, None, None] | None = None

    @contextlib.contextmanager
    def opened(self, tell: Tell) -> Iterator[Source]:
        with contextlib.closing(type(self)(self._loader, only_once(tell))) as reader:
            yield reader

    def close(self) -> None:
        if self._reading is not None:
            self._reading.close()
        if self._copy is not None:
            _end_readers(self._copy._iterator)

    def _read(self, share: Share, epoch: int, units: Any, asked: Callable[[], None]) -> Any:
        """One pass of a worker; its copy is made for the first one, with `units` to go through."""
        here = share.place(asked)
        if self._copy is None:
            self._copy = _copy_of(self._loader, units, here)
        # what its processes draw depends on nothing else
        self._copy.generator = make_generator(share.seed, "loader", share.rank, epoch, *self._salt)
        self._reading = _read(self._copy, here)
        return self._reading


class Loaded(_OfLoader):
    """A loader over a map-style dataset. Its unit is an index, or a batch of its own making."""

    def __init__(self, loader: DataLoader[Any], tell: Tell = lambda line: None) -> None:
        super().__init__(loader, tell)
        self.sampler: Any = loader.sampler
        self._sampler: Any = loader.sampler
        if self.own_batches and loader.batch_sampler is not None:
            self._sampler = loader.batch_sampler
        self._shuffles, self._is_plain = _kind_of(self._sampler)
        counted = loader.dataset if self._is_plain else self._sampler
        self.num_units = len(counted) if isinstance(counted, Sized) else None
        """In an epoch; None: not known."""
        self.num_examples = None if self.own_batches else self.num_units
        self._next = _Units()

    def num_batches(self, share: Share) -> int | None:
        if self.num_units is None:
            return None
        count = len(range(self.num_units)[share.part])
        size = 1 if self.own_batches else share.batch_size
        return count // size if self._loader.drop_last else -(-count // size)

    def find(self, share: Share, start: int) -> tuple[int, int, int]:
        """A sampler of the user's may give more in one epoch than in another: what it gave is gone
        through again, and nothing is read."""
        num_batches = self.num_batches(share)
        if self._is_plain and num_batches:
            return start, *divmod(start, num_batches)
        left, epoch = start, 0
        while True:
            seen = sum(1 for _ in itertools.islice(self._units(share, epoch), left + 1))
            if seen > left or not seen:
                return start, epoch, left
            left, epoch = left - seen, epoch + 1

    def drafts(self, share: Share, epoch: int, first: int = 0) -> Iterator[Batch]:
        self._next.upcoming = itertools.islice(self._units(share, epoch), first, None)
        return cast("Iterator[Batch]", self._read(share, epoch, self._next, nobody))

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        units = _Units(_batched(self._all(), self._loader.batch_size))
        return _read(_copy_of(self._loader, units, Place(), persistent_workers=False), Place())

    def first(self, count: int) -> Batch | None:
        units = _Units(_batched(self._all(), self._loader.batch_size and count))
        return next(_read(_copy_of(_in_this_process(self._loader), units, Place()), Place()), None)

    def _all(self) -> Iterator[Any]:
        whole = Share(rank=0, num_shares=1, batch_size=1, seed=0)
        return iter(range(self.num_units or 0)) if self._is_plain else self._given(whole, 0)

    def _units(self, share: Share, epoch: int) -> Iterator[Any]:
        """What the loader's processes are asked for in this epoch, one batch after the other."""
        size = None if self.own_batches else share.batch_size
        return _batched(self._mine(share, epoch), size, self._loader.drop_last)

    def _mine(self, share: Share, epoch: int) -> Iterator[Any]:
        part = share.part
        if not self._is_plain:
            return itertools.islice(self._given(share, epoch), part.start, part.stop, part.step)
        assert self.num_units is not None, "a map-style dataset has a length"
        if not self._shuffles:
            return iter(range(self.num_units)[part])
        if self._salt:
            share = dataclasses.replace(share, seed=make_seed(share.seed, *self._salt))
        return map(int, own_order(share, epoch, self.num_units).numpy())

    def _given(self, share: Share, epoch: int) -> Iterator[Any]:
        """All that a sampler of the user's gives: the same to everybody, if it is to be cut."""
        whose = () if share.disjoint else (share.rank,)
        parts = [self._sampler, getattr(self._sampler, "sampler", None)]
        seed = make_seed(share.seed, "sampler", epoch, *whose, *self._salt)
        with at(Place()), _drawing(seed, parts):  # one that asks is not to cut it as well
            _set_epoch(parts, epoch)
            if hasattr(self._sampler, "__len__"):
                return iter(list(itertools.islice(self._sampler, len(self._sampler))))
            endless = iter(self._sampler)
            begun = list(itertools.islice(endless, 1))
        return itertools.chain(begun, placed(endless, Place()))


class LoadedStream(_OfLoader):
    """A loader over an iterable dataset. Shares are cut out of its batches, since the examples may
    be in other processes."""

    num_examples = None

    def __init__(self, loader: DataLoader[Any], tell: Tell = lambda line: None) -> None:
        super().__init__(loader, tell)
        self._asked = Asked()
        if loader.num_workers:
            self._asked.share()

    def drafts(self, share: Share, epoch: int, first: int = 0) -> Iterator[Batch]:
        _set_epoch([self._loader.dataset], epoch)
        units = self._units(share.batch_size, self._loader.drop_last)
        batches = self._read(share, epoch, units, self._asked)
        return itertools.islice(own_part(batches, share, self._asked, self._tell), first, None)

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        units = self._units(self._loader.batch_size or 1, drop_last=False)
        changes = {"persistent_workers": False, "drop_last": False}
        return _read(_copy_of(self._loader, units, Place(), **changes), Place())

    def first(self, count: int) -> Batch | None:
        units = self._units(count, drop_last=False)
        return next(_read(_copy_of(_in_this_process(self._loader), units, Place()), Place()), None)

    def _units(self, batch_size: int, drop_last: bool) -> Any:
        """Of a stream it says no more than how large batches are."""
        sampler = self._loader.sampler
        return sampler if self.own_batches else BatchSampler(sampler, batch_size, drop_last)


# -- samplers --------------------------------------------------------------------------------------


def _kind_of(sampler: Any) -> tuple[bool, bool]:
    """Whether it shuffles all there is, and whether it is plain: it does that, or nothing."""
    kind = type(sampler)
    if not kind.__module__.startswith(TORCHS_OWN):
        return False, False
    if kind.__name__ == "RandomSampler":  # torchdata's is no subclass of torch's
        is_whole = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        return is_whole, is_whole
    if isinstance(sampler, DistributedSampler):  # which leaves to each its part: done here
        return sampler.shuffle, True
    return False, isinstance(sampler, SequentialSampler)


def is_cut_twice(source: Source) -> bool:
    """Whether a DistributedSampler is to leave each its part, which is done here."""
    return isinstance(source, Loaded) and isinstance(source.sampler, DistributedSampler)


def _batched(units: Iterator[Any], size: int | None, drop_last: bool = False) -> Iterator[Any]:
    """None: each is a batch already."""
    if size is None:
        return units
    return iter(BatchSampler(units, size, drop_last))


def _set_epoch(parts: Iterable[Any], epoch: int) -> None:
    for part in parts:
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)


@contextlib.contextmanager
def _drawing(seed: int, parts: Iterable[Any]) -> Iterator[None]:
    """In here random numbers are those of `seed`, wherever they come from: generators that samplers
    have, or could have had, or those of torch, NumPy and Python."""
    own = [part for part in parts if "generator" in getattr(part, "__dict__", ())]
    with _DRAWING, torch.random.fork_rng(devices=[]):
        before = [part.generator for part in own]
        of_numpy, of_python = np.random.get_state(), random.getstate()
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        for part in own:  # of its own, since other threads may draw from torch's
            part.generator = torch.Generator().manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            for part, generator in zip(own, before, strict=True):
                part.generator = generator


# -- copies of a loader, and their processes -------------------------------------------------------


def _in_this_process(loader: DataLoader[Any]) -> DataLoader[Any]:
    """For a look, which is not worth starting processes."""
    changes = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0}
    made = copy.copy(loader)
    made.multiprocessing_context = None
    vars(made).update(changes, _iterator=None)
    return made


def _copy_of(loader: DataLoader[Any], units: Any, here: Place, **changes: Any) -> DataLoader[Any]:
    """Of the same class with all that it has, but for what it goes through. Setting these
    attributes is what a loader's own __setattr__ forbids."""
    made = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(made).update({name: units, "_iterator": None}, **changes)
    if loader.collate_fn is default_collate:
        made.collate_fn = stacked
    made.worker_init_fn = _ReaderStart(loader.worker_init_fn, here)
    made.generator = make_generator("loader")  # nobody's draws from torch's own are disturbed
    if loader.num_workers and _start_method(loader) != "fork":
        vars(made)["dataset"] = _Shipped(loader.dataset)
    return made


def _start_method(loader: DataLoader[Any]) -> str:
    context: Any = loader.multiprocessing_context or torch.multiprocessing
    return str(context.get_start_method())


def _read(loader: DataLoader[Any], here: Place) -> Generator[Batch, None, None]:
    """One pass; who reads for it in this process is told where that is."""
    with at(here):
        batches = iter(loader)
    try:
        yield from placed(batches, here)
    finally:
        if not loader.persistent_workers:
            _end_readers(batches)


def _end_readers(iterator: Any) -> None:
    """Now, and not when the last reference to it happens to be gone."""
    if (end := getattr(iterator, "_shutdown_workers", None)) is not None:
        end()


@dataclass(frozen=True)
class _ReaderStart:
    """What a loader's process does first; `given`: the loader's own worker_init_fn."""

    given: Callable[[int], None] | None
    here: Place

    def __call__(self, number: int) -> None:
        os.setsid()  # Ctrl-C is for the run, which ends its processes in order
        if sys.platform == "linux":  # elsewhere torch has it look every few seconds
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        place.settle(self.here)
        if self.given is not None:
            self.given(number)


class _Shipped:
    """A dataset on its way to a process that does not inherit it: modules that were imported by
    their file are imported there first, since it is made of what is in them."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        here = [path for name, path in IMPORTED.items() if name in sys.modules]
        files = [str(path) for path in here if path.is_file()]  # one that is gone is another run's
        return _unpacked, (_Files(files), self._dataset)


class _Files:
    def __init__(self, files: list[str]) -> None:
        self._files = files

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _import_all, (self._files,)


def _import_all(files: list[str]) -> None:
    for file in files:
        import_file(Path(file), "recipe", DataError)


def _unpacked(imported: None, dataset: Any) -> Any:
    return dataset
