"""The codecs that --compress and --compress-replies name, and how one's own are found.

    choice = gradient_codec("topk:0.01")      # Job.codec; None where nothing is to be coded
    codec = choice.kind(**choice.values)

For gradients bf16, int8 and topk; what they leave out goes with the next gradient (ErrorFeedback in
codec.py). For replies bf16, and delta, which leaves out nothing. Each is a few passes over the
values, in one thread: `offbeat bench links` says what they are worth, and docs/slow-links.md.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat.plugins import Choice, Option, find, parse, read_options
from offbeat.transport.codec import Codec

BLOCK = 256
"""Values of int8 that have a scale in common."""
SMALLEST_SCALE = 1e-37
"""Below it a block counts as zeros: one over it would be no number."""
PAGE = 1 << 16
"""Places are counted from the beginning of their page of values, so that two bytes hold one."""
HEAD_BYTES = 8
"""Of a delta: its mode, three zeros, and how many values follow."""
ALL, PLACES, BITMAP = range(3)
"""Modes of a delta: what says which values follow."""
SAMPLE_EVERY = 97
"""A prime, so that a sample does not go along with the rows of a matrix."""

Array = npt.NDArray[Any]


class Bf16(Codec):
    """Every value with 8 bits of precision instead of 24, rounded to the nearest."""

    name = "bf16"
    feeds_back = True

    def capacity(self, num_elements: int) -> int:
        return 2 * num_elements

    def encode(self, values: Tensor, wire: Tensor) -> int:
        wire.view(torch.bfloat16).copy_(values)
        return wire.numel()

    def decode(self, wire: Tensor, values: Tensor) -> None:
        _check_size(wire, self.capacity(values.numel()))
        values.copy_(wire.view(torch.bfloat16))


class Int8(Codec):
    """A byte for each value, and a scale for each block of them: -127 to 127 times it. Rounded to
    the nearest, which is the same every time; what that takes away is not lost."""

    name = "int8"
    feeds_back = True

    def capacity(self, num_elements: int) -> int:
        return 4 * _num_blocks(num_elements) + num_elements

    def encode(self, values: Tensor, wire: Tensor) -> int:
        scales, steps = self._parts(wire, values.numel())
        whole = len(values) // BLOCK * BLOCK
        if whole:
            blocks = slice(0, whole // BLOCK)
            _quantise(values[:whole].view(-1, BLOCK), scales[blocks], steps[:whole].view(-1, BLOCK))
        if whole < len(values):
            _quantise(values[whole:].view(1, -1), scales[-1:], steps[whole:].view(1, -1))
        return wire.numel()

    def decode(self, wire: Tensor, values: Tensor) -> None:
        _check_size(wire, self.capacity(values.numel()))
        scales, steps = self._parts(wire, values.numel())
        values.copy_(steps)
        whole = len(values) // BLOCK * BLOCK
        values[:whole].view(-1, BLOCK).mul_(scales[: whole // BLOCK, None])
        if whole < len(values):
            values[whole:].mul_(scales[-1])

    def _parts(self, wire: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
        start = 4 * _num_blocks(num_elements)
        return wire[:start].view(torch.float32), wire[start:].view(torch.int8)


class TopK(Codec):
    """The largest values by their size, to the last bit, each with its place; none that is zero."""

    name = "topk"
    feeds_back = True
    options = (
        Option(
            name="share",
            default=0.01,
            whole=False,
            above=True,
            most=1,
            always_shown=True,
            help="of the values that travels",
        ),
    )

    def __init__(self, *, share: float = 0.01) -> None:
        self.share = share

    def capacity(self, num_elements: int) -> int:
        return _packed_bytes(num_elements, self._most(num_elements))

    def encode(self, values: Tensor, wire: Tensor) -> int:
        places = largest(values, self._most(values.numel()))
        return _pack(values, places, wire)

    def decode(self, wire: Tensor, values: Tensor) -> None:
        places, found = _unpack(wire, values.numel())
        if len(places) > self._most(values.numel()):
            raise ValueError(f"{len(places)} values are more than the largest {self.share:g}")
        values.zero_()
        values[places] = found

    def take_off(self, wire: Tensor, values: Tensor) -> None:
        places, _ = _unpack(wire, values.numel())
        values[places] = 0.0

    def _most(self, num_elements: int) -> int:
        return min(num_elements, max(1, round(self.share * num_elements)))


class Delta(Codec):
    """What has changed since the last time, to the last bit: as places and values, as a bit for
    each value and those that are set, or everything, whichever is the shortest.

    Either end keeps what the other one has, so that it is a connection's own: the first time, all
    is new. Nothing is lost; where every value changes nothing is gained either.
    """

    name = "delta"

    def __init__(self) -> None:
        self._known: Tensor | None = None
        """What both ends have."""

    def capacity(self, num_elements: int) -> int:
        return HEAD_BYTES + 4 * num_elements

    def encode(self, values: Tensor, wire: Tensor) -> int:
        if self._known is None:
            self._known = values.clone()
            return self._encode_all(values, wire)
        changed = values.view(torch.int32) != self._known.view(torch.int32)
        count, size = int(np.count_nonzero(changed.numpy())), values.numel()
        self._known.copy_(values)
        mode = min(range(3), key=lambda mode: _delta_bytes(mode, size, count))
        if mode == ALL:
            return self._encode_all(values, wire)
        body = _begin(wire, mode, count)
        if mode == PLACES:
            _pack(values, torch.from_numpy(np.flatnonzero(changed.numpy())), body)
        else:
            bits = np.packbits(changed.numpy())
            body[: len(bits)].copy_(torch.from_numpy(bits))
            start = _bitmap_bytes(size)
            body[len(bits) : start] = 0
            found = body[start : start + 4 * count].view(torch.float32)
            found.copy_(values[torch.from_numpy(np.flatnonzero(changed.numpy()))])
        return _delta_bytes(mode, size, count)

    def decode(self, wire: Tensor, values: Tensor) -> None:
        size = values.numel()
        mode, count = _read_head(wire)
        _check_size(wire, _delta_bytes(mode, size, count))
        body = wire[HEAD_BYTES:]
        if mode == ALL:
            self._known = body.view(torch.float32).clone()
        elif self._known is None:
            raise ValueError("a difference to what nobody has")
        elif mode == PLACES:
            places, found = _unpack(body, size)
            self._known[places] = found
        else:
            places = _read_bitmap(body[: _bitmap_bytes(size)], size)
            if len(places) != count:
                raise ValueError(f"{len(places)} bits for {count} values")
            self._known[places] = body[_bitmap_bytes(size) :].view(torch.float32)
        values.copy_(self._known)

    def _encode_all(self, values: Tensor, wire: Tensor) -> int:
        _begin(wire, ALL, values.numel()).view(torch.float32).copy_(values)
        return wire.numel()


GRADIENTS: dict[str, type[Codec]] = {kind.name: kind for kind in (Bf16, Int8, TopK)}
REPLIES: dict[str, type[Codec]] = {kind.name: kind for kind in (Bf16, Delta)}


def gradient_codec(text: str | None) -> Choice[Codec] | None:
    """What --compress names, as topk:0.01 or path/file.py:Class; or a ConfigError."""
    return None if text is None else _choose(text, GRADIENTS, "codec")


def reply_codec(text: str | None) -> Choice[Codec] | None:
    """What --compress-replies names."""
    return None if text is None else _choose(text, REPLIES, "codec of replies")


def _choose(text: str, built_in: Mapping[str, type[Codec]], what: str) -> Choice[Codec]:
    source, parts = parse(text, built_in)
    kind: type[Codec] = find(source, built_in, Codec, what)
    given = read_options(kind, source, parts)
    values = {}
    for option in kind.options:
        values[option.name] = given.get(option.flag, option.default)
        option.check(values[option.name])
    return Choice(kind, source, values)


# -- the largest values, and places ----------------------------------------------------------------


def largest(values: Tensor, count: int) -> Tensor:
    """The places of the `count` largest values by their size, in order, but of none that is zero;
    of equals the first ones."""
    sizes = values.abs().numpy()
    places = _likely(sizes, count)
    if len(places) > count:
        found = sizes[places]
        least = np.partition(found, len(found) - count)[len(found) - count]
        taken = found > least
        taken[np.flatnonzero(found == least)[: count - np.count_nonzero(taken)]] = True
        places = places[taken]
    return torch.from_numpy(places)


def _likely(sizes: Array, count: int) -> Array:
    """Places that have the largest values among them: to sort all of them would take ten times as
    long, and a sample tells about how large those are."""
    sample = sizes[::SAMPLE_EVERY]
    wanted = int(1.3 * len(sample) * count / len(sizes)) + 32
    if wanted < len(sample):
        least = np.partition(sample, len(sample) - wanted)[len(sample) - wanted]
        if least > 0:
            places = np.flatnonzero(sizes >= least)
            if len(places) >= count:
                return places
    return np.flatnonzero(sizes)


def _packed_bytes(num_elements: int, count: int) -> int:
    """Of `count` values with their places."""
    return 4 * _num_pages(num_elements) + 6 * count


def _pack(values: Tensor, places: Tensor, wire: Tensor) -> int:
    """How many there are in each page; the values; their places in the page."""
    num_pages, count = _num_pages(values.numel()), len(places)
    of_pages = wire[: 4 * num_pages].view(torch.int32)
    of_pages.copy_(torch.bincount(places >> 16, minlength=num_pages))
    found, low = _packed_parts(wire, num_pages, count)
    torch.index_select(values, 0, places, out=found)
    low.copy_(places & (PAGE - 1))
    return _packed_bytes(values.numel(), count)


def _unpack(wire: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
    """Places and values; a ValueError where the bytes make no sense."""
    num_pages = _num_pages(num_elements)
    if wire.numel() < 4 * num_pages:
        raise ValueError(f"{wire.numel()} bytes for {num_pages} pages")
    of_pages = wire[: 4 * num_pages].view(torch.int32).long()
    count = int(of_pages.sum())
    if int(of_pages.min()) < 0 or count > num_elements:
        raise ValueError(f"{count} of {num_elements} values")
    _check_size(wire, _packed_bytes(num_elements, count))
    found, low = _packed_parts(wire, num_pages, count)
    first = torch.arange(num_pages).mul_(PAGE)
    places = torch.repeat_interleave(first, of_pages).add_(low.long() & (PAGE - 1))
    in_order = bool((places[1:] > places[:-1]).all())
    if count and (int(places[-1]) >= num_elements or not in_order):
        raise ValueError("places that there are not, or in no order")
    return places, found


def _packed_parts(wire: Tensor, num_pages: int, count: int) -> tuple[Tensor, Tensor]:
    start = 4 * num_pages
    middle, end = start + 4 * count, start + 6 * count
    return wire[start:middle].view(torch.float32), wire[middle:end].view(torch.int16)


def _num_pages(num_elements: int) -> int:
    return -(-num_elements // PAGE)


def _num_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK)


def _quantise(blocks: Tensor, scales: Tensor, steps: Tensor) -> None:
    torch.mul(blocks.abs().amax(1), 1 / 127, out=scales)
    scales[scales < SMALLEST_SCALE] = 0.0
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    steps.copy_(torch.mul(blocks, inverse[:, None]).round_().clamp_(-127, 127))


# -- deltas ----------------------------------------------------------------------------------------


def _delta_bytes(mode: int, num_elements: int, count: int) -> int:
    """Of so many values that have changed."""
    if mode == ALL:
        return HEAD_BYTES + 4 * num_elements
    if mode == PLACES:
        return HEAD_BYTES + _packed_bytes(num_elements, count)
    return HEAD_BYTES + _bitmap_bytes(num_elements) + 4 * count


def _bitmap_bytes(num_elements: int) -> int:
    """In whole words, so that floats can follow."""
    return -(-num_elements // 32) * 4


def _begin(wire: Tensor, mode: int, count: int) -> Tensor:
    """Write the head; returns what is behind it."""
    head = wire[:HEAD_BYTES].view(torch.int32)
    head[0], head[1] = 0, count
    wire[0] = mode
    return wire[HEAD_BYTES:]


def _read_head(wire: Tensor) -> tuple[int, int]:
    if wire.numel() < HEAD_BYTES:
        raise ValueError(f"{wire.numel()} bytes are no difference")
    mode, count = int(wire[0]), int(wire[4:HEAD_BYTES].view(torch.int32))
    if mode not in (ALL, PLACES, BITMAP) or bool(wire[1:4].any()) or count < 0:
        raise ValueError(f"a difference of the mode {mode}, with {count} values")
    return mode, count


def _read_bitmap(bits: Tensor, num_elements: int) -> Tensor:
    found = np.flatnonzero(np.unpackbits(bits.numpy()))
    if len(found) and found[-1] >= num_elements:
        raise ValueError("a bit for a value that there is not")
    return torch.from_numpy(found)


def _check_size(wire: Tensor, num_bytes: int) -> None:
    if wire.numel() != num_bytes:
        raise ValueError(f"{wire.numel()} bytes instead of {num_bytes}")
