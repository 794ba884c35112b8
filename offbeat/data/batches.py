"""Each worker's share of the training data, cut into batches; and the test data, in order.

Data is a tensor, a tuple or dict of tensors of one length, a map-style Dataset (with a length), an
iterable one (without), or a DataLoader (loaders.py); sources.py tells which. Shares are disjoint
and cover everything, or each is the whole set. A worker goes through its share in a new order every
epoch, which depends on nothing but the run's seed, the worker's rank and the epoch.
"""

import contextvars
import copy
import dataclasses
import itertools
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

from offbeat.errors import DataError, in_a_line
from offbeat.place import Place, nobody, placed
from offbeat.randomness import make_generator

WAKE_S = 0.2
"""A thread that prepares batches looks this often whether anybody still wants them."""

READERS_REMEDY = (
    "iterable dataset does not ask for offbeat.rank() and offbeat.world_size() before its first "
    "example, by which it could read its own part alone"
)

Batch = Any
Item = TypeVar("Item")
TensorData = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
Tell = Callable[[str], None]
Collate = Callable[[list[Any]], Batch]


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

    def place(self, asked: Callable[[], None] = nobody) -> Place:
        """Who reads it; one who joined reads what one of the others does."""
        rank = self.rank % self.num_shares
        return Place(rank=rank, world_size=self.num_shares, asked=asked)

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


def own_order(share: Share, epoch: int, num_examples: int) -> Tensor:
    """The numbers of a share's examples, as they are gone through in this epoch."""
    shuffled = make_generator(share.seed, "shares")
    part = torch.randperm(num_examples, generator=shuffled)[share.part]
    own = make_generator(share.seed, "order", share.rank, epoch)
    return part[torch.randperm(len(part), generator=own)]


class Source(ABC):
    """Where examples come from; one per dataset, used by all workers of a process."""

    num_examples: int | None
    """None: not known before the end is reached."""

    batch_size: int | None = None
    """What it suggests, where somebody who made it had one in mind."""

    own_batches: str | None = None
    """What decides on its batches, so that nobody else can say how large they are; a step has one
    of them then, and so has a share's batch size of 1."""

    device = torch.device("cpu")
    """Where batches are made."""

    def train(self, share: Share, epoch: int, first: int = 0) -> Iterator[Batch]:
        """One pass of a worker over its share, beginning with batch number `first`."""
        return map(self.finished, self.drafts(share, epoch, first))

    def num_batches(self, share: Share) -> int | None:
        """How many there are in a pass over this share; None: not known beforehand."""
        return None

    def find(self, share: Share, start: int) -> tuple[int, int, int]:
        """Step, epoch and batch to begin at in order to go on with step `start`; of a stream what
        was seen before is gone through."""
        return 0, 0, 0

    def opened(self, tell: Tell) -> AbstractContextManager["Source"]:
        """For one worker, who goes through it and then lets go of what that takes; `tell` is told
        of what is slower than it might be."""
        return nullcontext(self)

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

    def first(self, count: int) -> Batch | None:
        """A batch of the first few, to be looked at; None: there is nothing."""
        return next(self.in_order(count), None)


class Indexed(Source):
    """Data whose examples can be asked for by number."""

    num_examples: int

    @abstractmethod
    def gather(self, indices: Tensor) -> Batch:
        """The batch of these examples."""

    def finished(self, draft: Tensor) -> Batch:
        return self.gather(draft)

    def num_batches(self, share: Share) -> int:
        return share.num_batches(self.num_examples)

    def find(self, share: Share, start: int) -> tuple[int, int, int]:
        return start, *divmod(start, self.num_batches(share))

    def drafts(self, share: Share, epoch: int, first: int = 0) -> Iterator[Tensor]:
        mine = own_order(share, epoch, self.num_examples).to(self.device)
        yield from torch.split(mine, share.batch_size)[first:]

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        for indices in torch.split(torch.arange(self.num_examples), batch_size):
            yield self.gather(indices)


class Tensors(Indexed):
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


def stacked(examples: list[Any]) -> Batch:
    """What torch makes of a list of examples, where they are all alike."""
    try:
        return default_collate(examples)
    except (RuntimeError, TypeError, KeyError) as error:
        raise DataError(
            f"torch cannot make a batch of these examples ({in_a_line(error)}): give the recipe a "
            f"collate=, or a DataLoader a collate_fn=, which makes one, as by padding"
        ) from error


class MapStyle(Indexed):
    def __init__(self, dataset: Any, collate: Collate = stacked) -> None:
        self._dataset = dataset
        self._collate = collate
        self.num_examples = len(dataset)

    def gather(self, indices: Tensor) -> Batch:
        return self._collate([self._dataset[i] for i in indices.tolist()])


class Asked:
    """Whether a dataset wanted to know which worker reads it; also one in another process, once
    `share` was called."""

    def __init__(self) -> None:
        self._flag = torch.zeros(1, dtype=torch.uint8)

    def __call__(self) -> None:
        self._flag[0] = 1

    def __bool__(self) -> bool:
        return bool(self._flag[0])

    def share(self) -> None:
        self._flag.share_memory_()  # type: ignore[no-untyped-call]


def own_part(items: Iterator[Item], share: Share, asked: Asked, tell: Tell) -> Iterator[Item]:
    """A share's part of a stream. A dataset that has asked who reads it before its first item comes
    has cut itself, and gives nothing else."""
    begun = list(itertools.islice(items, 1))
    items = itertools.chain(begun, items)
    if asked:
        return items
    if share.disjoint and share.num_shares > 1:
        tell(
            f"every worker reads all of the training data and leaves out what is not its own, "
            f"since the {READERS_REMEDY}"
        )
    mine = itertools.islice(items, share.part.start, share.part.stop, share.part.step)
    return _not_cut_twice(mine, asked, tell)


def _not_cut_twice(items: Iterator[Item], asked: Asked, tell: Tell) -> Iterator[Item]:
    """Somebody who asks by now may cut what has been cut."""
    for item in items:
        if asked:
            tell(
                "the training data asked for offbeat.rank() after its first example, when it had "
                "been cut into shares already: if it cuts itself, some of it is left out; let it "
                "ask before"
            )
        yield item


class IterableStyle(Source):
    num_examples = None

    def __init__(
        self,
        dataset: Iterable[Any],
        collate: Collate = stacked,
        tell: Tell = lambda line: None,
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._tell = tell

    def opened(self, tell: Tell) -> AbstractContextManager[Source]:
        return nullcontext(IterableStyle(self._dataset, self._collate, only_once(tell)))

    def drafts(self, share: Share, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Streams cannot be shuffled: without disjoint shares every worker sees the same order."""
        asked = Asked()
        examples = placed(_begun(self._dataset), share.place(asked))
        mine = own_part(examples, share, asked, self._tell)
        return self._batched(
            itertools.islice(mine, first * share.batch_size, None), share.batch_size
        )

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        return self._batched(placed(_begun(self._dataset), Place()), batch_size)

    def _batched(self, examples: Iterator[Any], batch_size: int) -> Iterator[Batch]:
        while chunk := list(itertools.islice(examples, batch_size)):
            yield self._collate(chunk)


def only_once(tell: Tell) -> Tell:
    """Each line no more than once, though every epoch has it to tell."""
    told: set[str] = set()

    def tell_once(line: str) -> None:
        if line not in told:
            told.add(line)
            tell(line)

    return tell_once


def batch_length(batch: Batch) -> int:
    """How many examples a batch holds, by the first tensor in it that has a length."""
    has_any = False
    for length in _lengths(batch):
        if length is not None:
            return length
        has_any = True
    if not has_any:
        raise DataError(f"a batch must hold tensors; found a {type(batch).__name__} without any")
    return 1


def _lengths(batch: Batch) -> Iterator[int | None]:
    if isinstance(batch, PackedSequence):  # whose first tensor holds the steps of all examples
        yield int(batch.batch_sizes[0])
    elif isinstance(batch, Tensor):
        yield batch.shape[0] if batch.dim() else None
    elif parts := list(_inside(batch)):
        for part in parts:
            yield from _lengths(part)
    elif moves_itself(batch):  # who knows
        yield None


def moves_itself(batch: Batch) -> bool:
    """Whether it is more than its tensors, and knows how to go to a device: a packed sequence, or
    what a tokenizer makes."""
    return not isinstance(batch, Tensor) and callable(getattr(batch, "to", None))


def _inside(batch: Batch) -> Iterable[Any]:
    """What a batch is made of; of an object of the user's, the tensors that it shows."""
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, tuple | list):
        return batch
    if _is_dataclass(batch):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    if moves_itself(batch):
        return [value for value in getattr(batch, "__dict__", {}).values() if _is_tensor(value)]
    return ()


def _is_dataclass(batch: Batch) -> bool:
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def not_finite(batch: Batch) -> tuple[int, int]:
    """How many of a batch's numbers are NaN or infinite, and how many floats it has."""
    floats = [leaf for leaf in leaves(batch) if leaf.is_floating_point()]
    finite = sum(int(leaf.isfinite().sum()) for leaf in floats)
    count = sum(leaf.numel() for leaf in floats)
    return count - finite, count


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The same batch with other tensors; what else is in it stays as it is."""
    return change(batch) if isinstance(batch, Tensor) else _made_of(batch, map_tensors, change)


def _made_of(batch: Batch, part_of: Callable[..., Any], *how: Any) -> Batch:
    """The same kind of thing, made of what `part_of` makes of the parts."""
    if type(batch) is dict:
        return {key: part_of(value, *how) for key, value in batch.items()}
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        made.update({key: part_of(value, *how) for key, value in batch.items()})
        return made
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(part_of(value, *how) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(part_of(value, *how) for value in batch)
    if _is_dataclass(batch):
        names = [field.name for field in dataclasses.fields(batch)]
        changed = {name: part_of(getattr(batch, name), *how) for name in names}
        return dataclasses.replace(batch, **changed)
    return batch


def cut_batch(batch: Batch, lo: int, hi: int, count: int) -> Batch:
    """The examples from `lo` to `hi` of a batch of `count`: of its tensors, and of what else it has
    one of for each of them."""
    if isinstance(batch, Tensor):
        return batch[lo:hi] if batch.dim() else batch
    if isinstance(batch, PackedSequence) or (moves_itself(batch) and not _is_container(batch)):
        raise DataError(
            f"a batch with a {type(batch).__name__} cannot be cut: give each worker one device, "
            f"not --devices"
        )
    is_list = isinstance(batch, list) or type(batch) is tuple
    if is_list and len(batch) == count and next(leaves(batch), None) is None:
        return batch[lo:hi]
    return _made_of(batch, cut_batch, lo, hi, count)


def _is_container(batch: Batch) -> bool:
    return isinstance(batch, Mapping | tuple | list) or _is_dataclass(batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """On the CPU the batch itself; else on its way to `device`, without waiting for it."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        pins = device.type == "cuda" and batch.device.type == "cpu"
        return (batch.pin_memory() if pins else batch).to(device, non_blocking=True)
    return batch.to(device) if moves_itself(batch) else _made_of(batch, to_device, device)


def prepared_ahead(items: Generator[Item, None, None], count: int) -> Generator[Item, None, None]:
    """The same, made by a thread of its own that is up to `count` of them ahead, and closes
    `items`."""
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
        finally:
            items.close()

    context = contextvars.copy_context()  # it works for whom this thread does
    thread = threading.Thread(target=context.run, args=(prepare,), name="batches", daemon=True)
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
    else:
        for part in _inside(batch):
            yield from leaves(part)


def _begun(examples: Iterable[Item]) -> Iterator[Item]:
    """Begin no sooner than the first is asked for, by whoever asks for it then."""
    yield from examples
