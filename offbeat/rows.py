"""Rows: what of a sparse tensor travels and is applied, and where it lies in a slice.

A tensor is sparse where its gradient has few rows that are not zero: the weights of an embedding
with `sparse=True` (flat.py finds them). No row is cut by a slice's border. A gradient is *packed*:
end to end, in the order of the slice, the dense parts whole and of each sparse tensor the rows that
it has; which these are stands beside it as numbers, counted within the slice. Replies are packed
likewise over TCP, and leave out the rows that have not changed.

    rows = rows_of(manifest, lo, hi)             # None: nothing is sparse
    rows.fill(parts, slot.values, slot.rows)     # a worker, with each tensor's gradient
    ids = rows.read(slot.rows, num_values)       # the server; anybody may have written them
    rows.pack(params, ids); rows.unpack(packed, ids, params)
"""

import functools
import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.flat import Manifest, Part, RowPart

Ids = Sequence[Tensor]
"""For each sparse tensor of a slice the numbers of its rows, in ascending order."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a slice has of a tensor: elements lo to hi of the slice."""

    tensor: int
    start: int
    """Where in the tensor it begins."""
    lo: int
    hi: int
    width: int = 0
    """Of a sparse tensor how many elements a row has; 0: it is dense."""

    @property
    def num_rows(self) -> int:
        return (self.hi - self.lo) // self.width

    def table(self, flat: Tensor) -> Tensor:
        """The rows in a vector over the slice."""
        return flat[self.lo : self.hi].view(-1, self.width)

    def size(self, ids: Tensor | None) -> int:
        """How many elements are packed."""
        return self.hi - self.lo if ids is None else ids.numel() * self.width


@dataclass(frozen=True)
class Rows:
    """Of one slice; it keeps nothing, so that threads may share one."""

    pieces: tuple[Piece, ...]
    """In their order, without a gap."""
    num_tensors: int
    """Of the model, also those that the slice has nothing of."""

    @functools.cached_property
    def sparse(self) -> tuple[Piece, ...]:
        return tuple(piece for piece in self.pieces if piece.width)

    @functools.cached_property
    def _spans(self) -> tuple[Piece, ...]:
        """The same with dense neighbours as one."""
        spans: list[Piece] = []
        for piece in self.pieces:
            if spans and not (piece.width or spans[-1].width):
                before = spans.pop()
                piece = Piece(before.tensor, before.start, before.lo, piece.hi)
            spans.append(piece)
        return tuple(spans)

    @property
    def capacity(self) -> int:
        """The most numbers that say which rows there are: how many of each tensor, then which."""
        return len(self.sparse) + sum(piece.num_rows for piece in self.sparse)

    def num_values(self, ids: Ids) -> int:
        return sum(piece.size(mine) for piece, mine in self._with(ids))

    # -- which rows ----------------------------------------------------------------------------

    def write(self, ids: Ids, raw: Tensor) -> int:
        """Into `raw`, which has the capacity; returns how many numbers that takes."""
        counts = torch.tensor([mine.numel() for mine in ids], dtype=torch.int64)
        said = torch.cat([counts, *ids])
        raw[: said.numel()] = said
        return said.numel()

    def read(self, raw: Tensor, num_values: int) -> list[Tensor]:
        """What `write` wrote, in memory of its own; a ValueError where it makes no sense, or does
        not go with so many values."""
        count = len(self.sparse)
        sizes = raw[:count].tolist()
        if len(sizes) < count or min(sizes, default=0) < 0 or count + sum(sizes) != raw.numel():
            raise ValueError("the rows of a gradient are not as many as it says")
        ids = [*torch.split(raw[count:].clone(), sizes)]
        for piece, mine in zip(self.sparse, ids, strict=True):
            _check(mine, piece.num_rows)
        if self.num_values(ids) != num_values:
            raise ValueError("a gradient's values do not go with its rows")
        return ids

    def extent(self, raw: Tensor) -> tuple[int, int]:
        """Of what this end has written: how many values, and how many numbers that tell rows."""
        sizes = raw[: len(self.sparse)].tolist()
        whole = sum(piece.hi - piece.lo for piece in self.pieces if not piece.width)
        packed = sum(n * piece.width for n, piece in zip(sizes, self.sparse, strict=True))
        return whole + packed, len(sizes) + sum(sizes)

    # -- values --------------------------------------------------------------------------------

    def fill(self, parts: Sequence[Part], values: Tensor, raw: Tensor) -> Tensor:
        """Pack what is given for each tensor; returns as much of `values` as that took."""
        ids = []
        at = 0
        for piece in self.pieces:
            part = _within(parts[piece.tensor], piece)
            size = piece.hi - piece.lo
            if isinstance(part, RowPart):
                ids.append(part.ids)
                part = part.values.reshape(-1)
                size = part.numel()
            target = values[at : at + size]
            target.zero_() if part is None else target.copy_(part)
            at += size
        self.write(ids, raw)
        return values[:at]

    def pack(self, flat: Tensor, ids: Ids) -> Tensor:
        """These rows and all that is dense, in memory of its own."""
        return torch.cat(
            [
                flat[piece.lo : piece.hi]
                if mine is None
                else piece.table(flat).index_select(0, mine).flatten()
                for piece, mine in self._with(ids)
            ]
        )

    def unpack(self, packed: Tensor, ids: Ids, flat: Tensor) -> None:
        """Put what is packed into its place."""
        for piece, mine, values in self._cut(packed, ids):
            if mine is None:
                flat[piece.lo : piece.hi] = values
            else:
                piece.table(flat).index_copy_(0, mine, values.view(-1, piece.width))

    def copy(self, source: Tensor, target: Tensor, ids: Ids) -> None:
        """These rows and all that is dense, from one vector over the slice to another."""
        for piece, mine in self._with(ids):
            if mine is None:
                target[piece.lo : piece.hi] = source[piece.lo : piece.hi]
            else:
                rows = piece.table(source).index_select(0, mine)
                piece.table(target).index_copy_(0, mine, rows)

    def spread(self, packed: Tensor, ids: Ids, over: Ids) -> Tensor:
        """The same packed with more rows, which are zeros."""
        out = packed.new_zeros(self.num_values(over))
        parts = zip(self._cut(packed, ids), self._cut(out, over), strict=True)
        for (piece, mine, values), (_, others, target) in parts:
            if mine is None or others is None:
                target.copy_(values)
            else:
                places = torch.searchsorted(others, mine)
                target.view(-1, piece.width)[places] = values.view(-1, piece.width)
        return out

    def sizes(self, ids: Ids) -> list[int]:
        """How many elements are packed of each of the model's tensors."""
        given, sizes = iter(ids), [0] * self.num_tensors
        for piece in self.pieces:
            sizes[piece.tensor] = piece.size(next(given) if piece.width else None)
        return sizes

    def gradient(self, packed: Tensor, ids: Ids, lo: int, hi: int) -> Tensor:
        """What of it is for the elements from lo to hi of the slice: one of the sparse tensors, as
        torch has such gradients, or some that are dense."""
        for piece, mine, values in self._cut(packed, ids):
            if mine is not None and piece.lo == lo:
                return make_sparse(mine, values.view(-1, piece.width), piece.num_rows)
            if mine is None and piece.lo <= lo < piece.hi:
                return values[lo - piece.lo : hi - piece.lo]
        raise AssertionError("no part of the slice")

    def _with(self, ids: Ids) -> Iterator[tuple[Piece, Tensor | None]]:
        given = iter(ids)
        return ((span, next(given) if span.width else None) for span in self._spans)

    def _cut(self, packed: Tensor, ids: Ids) -> Iterator[tuple[Piece, Tensor | None, Tensor]]:
        at = 0
        for piece, mine in self._with(ids):
            size = piece.size(mine)
            yield piece, mine, packed[at : at + size]
            at += size


class Known:
    """What one worker knows of the changes."""

    def __init__(self) -> None:
        self.upto = -1
        """Of so many updates it has the rows; -1: it has nothing yet."""
        self.news: Ids | None = None
        """The rows that it was shown last; None: it was shown everything."""


class Changes:
    """Which rows updates have changed, as far back as that is no more than everything. Any thread
    may ask, and any may add: a row that is told of too early is told of again."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._kept: deque[Ids] = deque()
        self._num_kept = 0
        self._end = 0
        """How many updates have been added."""
        self._lock = threading.Lock()
        """Held for no longer than it takes to look at the queue."""

    def add(self, ids: Ids) -> None:
        """After the rows have changed, and before anybody is told of that version."""
        with self._lock:
            self._kept.append(ids)
            self._end += 1
            self._num_kept += _count(ids)
            while self._num_kept > self._rows.capacity:
                self._num_kept -= _count(self._kept.popleft())

    def show(self, known: Known) -> Ids | None:
        """Which rows a worker is to be shown now; None: all of them. To be asked before they are
        read, so that what changes meanwhile is among the next ones."""
        with self._lock:
            first = len(self._kept) - (self._end - known.upto)
            entries = None if first < 0 else [*itertools.islice(self._kept, first, None)]
            known.upto = self._end
        known.news = None if entries is None else joined(entries, len(self._rows.sparse))
        return known.news


def joined(entries: Sequence[Ids], count: int) -> list[Tensor]:
    """All rows that are in any of these; `count`: of so many tensors."""
    if not entries:
        return [torch.empty(0, dtype=torch.int64) for _ in range(count)]
    if len(entries) == 1:
        return [*entries[0]]
    return [torch.unique(torch.cat(column)) for column in zip(*entries, strict=True)]


def rows_of(manifest: Manifest, lo: int, hi: int) -> Rows | None:
    """Of the slice lo..hi of the flat vector; None: the model has no sparse tensor."""
    if not manifest.is_sparse:
        return None
    pieces = []
    for index, spec in enumerate(manifest.tensors):
        start, end = max(lo, spec.offset), min(hi, spec.offset + spec.numel)
        if start < end:
            place = (start - spec.offset, start - lo, end - lo)
            pieces.append(Piece(index, *place, width=spec.width))
    return Rows(tuple(pieces), len(manifest.tensors))


def trust_rows() -> None:
    """torch leaves unchecked what optimizers make of sparse gradients, and warns of it unless that
    was asked for: here rows are looked at as they come in."""
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    if not checks.is_enabled():
        checks.disable()


def make_sparse(ids: Tensor, values: Tensor, num_rows: int) -> Tensor:
    """As torch has a gradient of some rows; its parts are known to be good."""
    return torch.sparse_coo_tensor(
        ids[None], values, (num_rows, values.shape[1]), is_coalesced=True, check_invariants=False
    )


def _within(part: Part, piece: Piece) -> Part:
    """What of a tensor's gradient is for this piece of it; of a sparse one rows in any case."""
    if not piece.width:
        assert not isinstance(part, RowPart)
        return None if part is None else part[piece.start : piece.start + piece.hi - piece.lo]
    if part is None:
        return RowPart(torch.empty(0, dtype=torch.int64), torch.empty(0, piece.width))
    assert isinstance(part, RowPart)
    first = piece.start // piece.width
    ends = torch.tensor([first, first + piece.num_rows], device=part.ids.device)
    lo, hi = torch.searchsorted(part.ids, ends).tolist()
    return RowPart(part.ids[lo:hi].cpu() - first, part.values[lo:hi])


def _count(ids: Ids) -> int:
    return 1 + sum(mine.numel() for mine in ids)


def _check(ids: Tensor, num_rows: int) -> None:
    is_sorted = bool((ids[1:] > ids[:-1]).all())
    if ids.numel() and not (is_sorted and ids[0].item() >= 0 and ids[-1].item() < num_rows):
        raise ValueError("the rows of a gradient are out of order, or not there")
