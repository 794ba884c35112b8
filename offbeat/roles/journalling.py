"""What a server that promises (--ack durable) has in its journal, and how that is made again.

Written are gradients as they came, decoded, and which of them made each update: so whoever makes
the updates again, one after the other on what a checkpoint has, comes to the same parameters, the
same state of optimizer and rule, and the same accounts, to the bit. sessions.py has one of these,
and calls it under the shard's lock:

    journalling.write(record, gradient)              # before its reply, and its update
    journalling.updated(pushes, version, updater)
    journalling.dropped(record)
    journalling.recover(shard, updater, ledger, state)  # before all that, in a later life

A gradient is written from where it lies, since its worker leaves it alone until the reply has come.
"""

import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.accounts import APPLIED, DROPPED, REJECTED
from offbeat.disciplines import Push
from offbeat.errors import JournalError
from offbeat.ledger import Ledger
from offbeat.memory import view
from offbeat.pushes import PushRecord
from offbeat.rules import Gradient
from offbeat.run.journal import Journal
from offbeat.run.segments import DROP, GRADIENT, NO_VERSION, UPDATE, Entry, Head
from offbeat.shard import Shard, ShardState, Updater

TENSORS = ("values", "floats", "ints", "base", "rates")
"""Of a gradient, beside mask and rows."""
MASK, ROWS = len(TENSORS), len(TENSORS) + 1
DTYPES = (
    *(torch.float32, torch.float32, torch.int64, torch.float32, torch.float64),
    *(torch.uint8, torch.int64),
)
"""Of the parts of a payload, by their kinds."""
_PART = struct.Struct("<QQ")
"""Of each part its kind, and of how many elements it is; before them how many parts there are."""
_COUNT = struct.Struct("<Q")
_UPDATE = struct.Struct("<dQ")
"""The learning rate, and how often it had been told to fall; then at which versions; then the
pushes."""
_FALL = struct.Struct("<Q")
_PUSH = struct.Struct("<QQ?")
Key = tuple[int, int]
"""A worker, and the sequence number of its push."""
Used = tuple[int, int, bool]
"""The same, and whether its gradient is in the update."""


# -- payloads --------------------------------------------------------------------------------------


def payload_of(gradient: Gradient) -> list[memoryview]:
    """Where the bytes of a gradient lie."""
    parts: list[tuple[int, Tensor]] = [
        (kind, tensor)
        for kind, name in enumerate(TENSORS)
        if (tensor := getattr(gradient, name)) is not None
    ]
    if gradient.mask is not None:
        parts.append((MASK, torch.tensor(gradient.mask, dtype=torch.uint8)))
    parts += [(ROWS, ids) for ids in gradient.ids]
    parts.sort(key=lambda part: -part[1].element_size())  # so that each lies where its type may
    about = _COUNT.pack(len(parts)) + b"".join(_PART.pack(k, t.numel()) for k, t in parts)
    return [memoryview(about), *(_bytes(tensor) for _, tensor in parts)]


def _bytes(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    return tensor.contiguous().numpy().data.cast("B")


def gradient_from(entry: Entry) -> Gradient:
    """What `payload_of` gave the bytes of."""
    (count,) = _COUNT.unpack_from(entry.payload)
    table = [_PART.unpack_from(entry.payload, 8 + _PART.size * k) for k in range(count)]
    offset = 8 + _PART.size * count
    found: dict[str, Any] = {}
    ids = []
    for kind, numel in table:
        # in memory of torch's own, where sums are made as they were in a slot
        tensor = view(memoryview(entry.payload), DTYPES[kind], numel, offset).clone()
        offset += tensor.nbytes
        if kind == MASK:
            found["mask"] = [bool(each) for each in tensor.tolist()]
        elif kind == ROWS:
            ids.append(tensor)
        else:
            found[TENSORS[kind]] = tensor
    head = entry.head
    return Gradient(worker=head.worker, base_version=head.base_version, ids=ids, **found)


def _update_payload(lr: float, falls: Sequence[int], used: Iterable[Used]) -> list[memoryview]:
    packed = b"".join([*map(_FALL.pack, falls), *itertools.starmap(_PUSH.pack, used)])
    return [memoryview(_UPDATE.pack(lr, len(falls)) + packed)]


def _update_from(payload: bytes) -> tuple[float, list[int], list[Used]]:
    lr, num_falls = _UPDATE.unpack_from(payload)
    at = _UPDATE.size + num_falls * _FALL.size
    falls = [version for (version,) in _FALL.iter_unpack(payload[_UPDATE.size : at])]
    return lr, falls, [(w, sequence, used) for w, sequence, used in _PUSH.iter_unpack(payload[at:])]


def pushes_of(entry: Entry) -> list[Key]:
    """Which ones an update was made of."""
    return [(worker, sequence) for worker, sequence, _ in _update_from(entry.payload)[2]]


# -- while the server lives ------------------------------------------------------------------------


class Journalling:
    """`journal` belongs to it from here on; it begins with `recover`."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._open: dict[Key, int] = {}
        """Pushes of which nothing has become yet, and which entry each is."""
        self._needed: dict[int, int] = {}
        """By the entry at which a snapshot was taken, the first one that it does not make needless:
        that is a push which came before, and went in later."""

    @property
    def last(self) -> int:
        return self.journal.last

    def write(self, record: PushRecord, gradient: Gradient | None) -> None:
        """A push has come; None: without a usable gradient."""
        head = Head(
            GRADIENT,
            0,
            record.worker,
            record.incarnation,
            record.sequence,
            record.batch,
            record.base_version,
            at_s=record.received_s,
            is_answered=record.is_answered_first,
            is_refused=gradient is None,
        )
        number = self.journal.append(head, () if gradient is None else payload_of(gradient))
        self._open[record.worker, record.sequence] = number

    def updated(
        self,
        pushes: Sequence[Push],
        records: Sequence[PushRecord],
        version: int | None,
        lr: float | None,
        falls: Sequence[int],
    ) -> None:
        """These pushes are settled, and those of `records` made the update of this version; None:
        it came to none."""
        made = NO_VERSION if version is None else version
        inside = {(record.worker, record.sequence) for record in records}
        keys = [(push.worker, push.sequence) for push in pushes]
        payload = _update_payload(
            0.0 if lr is None else lr, falls, ((*key, key in inside) for key in keys)
        )
        self.journal.append(Head(UPDATE, 0, version=made), payload)
        for key in keys:
            self._open.pop(key, None)

    def is_open(self, record: PushRecord) -> bool:
        """Whether the journal does not say what became of it."""
        return (record.worker, record.sequence) in self._open

    def dropped(self, record: PushRecord) -> None:
        """It is settled, and in nothing."""
        self.abandoned(record)
        self.journal.append(
            Head(DROP, 0, record.worker, record.incarnation, record.sequence, record.batch)
        )

    def abandoned(self, record: PushRecord) -> None:
        """Nothing will become of it, as if it had not come."""
        self._open.pop((record.worker, record.sequence), None)

    def snapshot(self) -> int:
        """One is taken; returns the last entry that is in it."""
        self._needed[self.last] = min(self._open.values(), default=self.last + 1)
        self.journal.roll()
        return self.last

    def needed_beside(self, entry: int) -> int:
        """A checkpoint has the snapshot that was taken at this entry: which one is the first that
        is needed beside it, as far as this life of the server knows."""
        needed = self._needed.get(entry, 0)
        self._needed = {at: first for at, first in self._needed.items() if at > entry}
        return needed

    # -- in a later life -----------------------------------------------------------------------

    def recover(
        self, shard: Shard, updater: Callable[[], Updater], ledger: Ledger, state: ShardState
    ) -> "Recovered":
        """Go on from `state`, which shard and ledger have, and what the journal has beyond it; then
        take entries. `updater` makes the one to do it with, where there is anything to do."""
        self.journal.open()
        recovery = Recovery(shard, updater, ledger, state)
        for entry in self.journal.read():
            recovery.take(entry)
        self.journal.begin(recovery.last + 1)
        self._open = recovery.open_entries()
        ledger.durable = recovery.last
        for records in recovery.left_over():
            version = recovery.make(records)
            pushes = [Push(record.worker, record.sequence) for record in records]
            inside = () if version is None else [r for r in records if r.outcome != REJECTED]
            self.updated(pushes, inside, version, shard.lr, shard.falls)
        return recovery.recovered()


@dataclass(frozen=True)
class Recovered:
    """What a journal had beyond a checkpoint."""

    version: int
    num_updates: int
    records: Sequence[PushRecord]
    """All that became of pushes, in the order in which it did."""
    complaint: str
    """What came out otherwise than it was; nothing: all is the same."""
    last: int
    """The last entry."""


class Recovery:
    """Makes updates again. Entries come in their order, also those that `state` has: a push that
    was answered before it was taken may have gone in later."""

    def __init__(
        self, shard: Shard, updater: Callable[[], Updater], ledger: Ledger, state: ShardState
    ) -> None:
        self.last = state.entry
        """The last entry that is in."""
        self._shard = shard
        self._make_updater = updater
        self._updater: Updater | None = None
        self._ledger = ledger
        self._state = state
        self._pushed: dict[Key, Entry] = {}
        """Of those that nothing has become of yet."""
        self._records: list[PushRecord] = []
        self._num_updates = 0
        self._complaint = ""
        self._num_read = 0

    def take(self, entry: Entry) -> None:
        number, kind = entry.head.number, entry.head.kind
        if not self._num_read and number > self._state.entry + 1:
            raise JournalError(
                f"the journal begins with entry {number}, and the checkpoint of version "
                f"{self._state.version} has those up to {self._state.entry}: what is between them "
                f"is lost"
            )
        self._num_read += 1
        is_in = number <= self._state.entry
        if kind == GRADIENT:
            self._pushed[entry.head.worker, entry.head.sequence] = entry
        elif kind == UPDATE:
            self._update(entry, is_in=is_in)
        elif kind == DROP:
            self._drop(entry, is_in=is_in)
        else:
            raise JournalError(f"entry {number} of the journal is of a kind that is not known here")
        self.last = max(self.last, number)

    def _update(self, entry: Entry, *, is_in: bool) -> None:
        lr, falls, pushes = _update_from(entry.payload)
        found = [(self._pushed.pop((w, sequence), None), used) for w, sequence, used in pushes]
        if is_in:
            return
        if any(each is None and used for each, used in found):
            raise JournalError(
                f"entry {entry.head.number} of the journal is an update of gradients that are not "
                f"in it"
            )
        version = entry.head.version
        entries = [(each, used) for each, used in found if each is not None]
        known = list(self._shard.falls)
        self._shard.falls[:] = falls  # as it was told then
        made = self._make(entries)
        if len(known) > len(falls):
            self._shard.falls[:] = known
        if made is not None and (made, self._shard.lr) != (version, lr) and not self._complaint:
            self._complaint = (
                f"version {version} was made with the learning rate {lr}; made again it is version "
                f"{made}, with {self._shard.lr}"
            )

    def _drop(self, entry: Entry, *, is_in: bool) -> None:
        self._pushed.pop((entry.head.worker, entry.head.sequence), None)
        if not is_in:
            self._settle(record_of(entry.head), DROPPED)

    def open_entries(self) -> dict[Key, int]:
        """Of those that were answered, and nothing has become of; the others have to come again."""
        return {key: entry.head.number for key, entry in self._answered()}

    def _answered(self) -> Iterator[tuple[Key, Entry]]:
        return ((key, each) for key, each in self._pushed.items() if each.head.is_answered)

    def left_over(self) -> list[list[PushRecord]]:
        """Which updates are still to be made, of whom was answered. Whoever was not pushes again,
        or never has been told."""
        answered = sorted((entry for _, entry in self._answered()), key=lambda e: e.head.number)
        return self._ledger.regather([record_of(entry.head) for entry in answered])

    def make(self, records: Sequence[PushRecord]) -> int | None:
        """One of them."""
        entries = [self._pushed.pop((record.worker, record.sequence)) for record in records]
        budget = self._ledger.budget
        has_room = budget is None or self._shard.version < budget
        return self._make([(entry, has_room and not entry.head.is_refused) for entry in entries])

    def _make(self, entries: Sequence[tuple[Entry, bool]]) -> int | None:
        """An update of those of which that is said; returns its version. None: of nobody."""
        used = [entry for entry, is_used in entries if is_used]
        version = None
        if used:
            self._updater = self._updater or self._make_updater()
            version = self._updater.apply([gradient_from(entry) for entry in used])
            self._num_updates += 1
        for entry, is_used in entries:
            record = record_of(entry.head)
            if is_used and version is not None:
                record.version = version
                record.staleness = version - 1 - record.base_version
                record.lr = self._shard.lr
                self._settle(record, APPLIED)
            else:
                self._settle(record, REJECTED if entry.head.is_refused else DROPPED)
        return version

    def _settle(self, record: PushRecord, outcome: str) -> None:
        record.outcome = outcome
        self._ledger.restore(record)
        self._records.append(record)

    def recovered(self) -> Recovered:
        return Recovered(
            self._shard.version, self._num_updates, self._records, self._complaint, self.last
        )


def record_of(head: Head) -> PushRecord:
    return PushRecord(
        head.worker,
        head.incarnation,
        head.sequence,
        head.batch,
        head.base_version,
        head.epoch,
        head.at_s,
        is_pending=head.is_answered,
    )


def again(record: PushRecord, shard: int) -> dict[str, Any]:
    """The event of a push whose update was made again: the server that made it first may have died
    before it had written that down."""
    return {
        "shard": shard,
        "worker": record.worker,
        "incarnation": record.incarnation,
        "sequence": record.sequence,
        "batch": record.batch,
        "base_version": record.base_version,
        "outcome": record.outcome,
        "version": record.version,
        "staleness": record.staleness,
        "mixed": False,
        "received_s": record.received_s,
        "applied_s": None,
        "replied_s": None,
        **({} if record.lr is None else {"lr": record.lr}),
        "again": True,
    }
