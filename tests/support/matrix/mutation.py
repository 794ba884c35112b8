"""Frames that are nearly right: whoever makes them knows how they are built.

A mutation takes one frame apart (header, body; of a body of JSON the tree), spoils one place of it
with a value that is an edge of something, and puts it together again; or it spoils a conversation:
frames cut, doubled, left out, swapped, spliced.

    rng = random.Random(seed)
    frames = [hello, push, push]
    mutated(frames, rng)
"""

import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

from offbeat.transport.wire import FORMAT, MAGIC

FIELDS = {
    "magic": (0, "4s"),
    "protocol": (4, "H"),
    "type": (6, "B"),
    "status": (7, "B"),
    "flags": (8, "B"),
    "shard": (12, "I"),
    "worker": (16, "I"),
    "incarnation": (20, "I"),
    "epoch": (24, "I"),
    "length": (28, "Q"),
    "sequence": (36, "Q"),
    "batch": (44, "Q"),
    "base version": (52, "Q"),
    "version": (60, "Q"),
    "size": (68, "Q"),
    "speed": (76, "d"),
}
"""Of a header: where each lies, and as what."""
COUNTS = (0, 1, 2, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
SPEEDS = (0.0, -1.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"))
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**31,
    2**63,
    2**64,
    10**30,
    0.5,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "x" * 300,
    "\ud800",
    "a\nb\0c",
    "float32",
    "__class__",
    "../../etc/passwd",
    [],
    [[]],
    [None],
    [-1, -1],
    [2**63, 0],
    {},
    {"": None},
)
"""What JSON can say where something else was meant."""
HOSTILE = (
    b"[" * 3000,
    b'{"a":' * 3000,
    b"1" * 5000,
    b"1e999",
    b"{}",
    b"[]",
    b"null",
    b"\xff\xfe\x00",
    b'{"tensors": [], "message": {"ask": "status"}, "tensors": 1}',
    b"c__builtin__\neval\n(V1\ntR.",
)
"""Whole bodies."""
NOISE = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(80),
    b"\x80\x04\x95\x1b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94",
    MAGIC,
    bytes(FORMAT.size),
    b"\xff" * FORMAT.size,
)
"""What is no frame at all."""


def set_field(frame: bytes, name: str, value: Any) -> bytes:
    """The same frame, that says something else in its header."""
    at, kind = FIELDS[name]
    raw = bytearray(frame)
    struct.pack_into("<" + kind, raw, at, value)
    return bytes(raw)


def field_of(frame: bytes, name: str) -> Any:
    at, kind = FIELDS[name]
    return struct.unpack_from("<" + kind, frame, at)[0]


def with_body(frame: bytes, body: bytes, *, told: bool = True) -> bytes:
    """Another body behind the same header; `told`: which says how long it is."""
    head = frame[: FORMAT.size]
    return (set_field(head, "length", len(body)) if told else head) + body


# -- one frame -------------------------------------------------------------------------------------


def _any_field(frame: bytes, rng: random.Random) -> bytes:
    name = rng.choice([*FIELDS, "length", "length", "sequence", "size", "version"])
    kind = FIELDS[name][1]
    if kind == "4s":
        return set_field(frame, name, rng.choice((b"OFFA", b"\0\0\0\0", b"GET ", rng.randbytes(4))))
    if kind == "d":
        return set_field(frame, name, rng.choice(SPEEDS))
    most = 2 ** (8 * struct.calcsize(kind)) - 1
    near = field_of(frame, name) + rng.choice((-1, 1, 4, -4))
    edges = [count for count in COUNTS if count <= most]
    value = rng.choice((rng.choice(edges), near, rng.randint(0, most), rng.randint(0, 15)))
    return set_field(frame, name, min(max(0, value), most))


def _some_bits(frame: bytes, rng: random.Random) -> bytes:
    raw = bytearray(frame)
    for _ in range(rng.choice((1, 1, 2, 8))):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(raw)


def _some_numbers(frame: bytes, rng: random.Random) -> bytes:
    """In the body: floats and whole numbers that are edges."""
    raw = bytearray(frame)
    bad = struct.pack("<f", rng.choice((*SPEEDS[4:], 1e38, -1e38, 1e-45, 3e19)))
    value = rng.choice((bad, rng.randbytes(4), b"\xff" * 8, struct.pack("<Q", rng.choice(COUNTS))))
    if len(raw) >= FORMAT.size + len(value):
        at = rng.randrange(FORMAT.size, len(raw) - len(value) + 1)
        raw[at : at + len(value)] = value
    return bytes(raw)


def _cut(frame: bytes, rng: random.Random) -> bytes:
    return frame[: rng.randrange(len(frame))]


def _longer(frame: bytes, rng: random.Random) -> bytes:
    more = rng.randbytes(rng.choice((1, 4, 84, 300)))
    if rng.random() < 0.5:
        return frame + more
    return with_body(frame, frame[FORMAT.size :] + more)


def _other_body(frame: bytes, rng: random.Random) -> bytes:
    return with_body(frame, rng.choice(HOSTILE), told=rng.random() < 0.9)


def _other_json(frame: bytes, rng: random.Random) -> bytes:
    """Of a body that is JSON, perhaps with tensors behind it, one place is another one."""
    body = frame[FORMAT.size :][: field_of(frame, "length")]
    rest = frame[FORMAT.size + len(body) :]
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError):
        return _some_bits(frame, rng)
    raw = json.dumps(spoilt(tree, rng)).encode()
    return with_body(frame, raw, told=rng.random() < 0.9) + rest


def spoilt(tree: Any, rng: random.Random) -> Any:
    """A tree of JSON with one place changed: another value, one that is missing, one too many."""
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        key = rng.choice(list(tree))
        match rng.randrange(8):
            case 0:
                return {name: value for name, value in tree.items() if name != key}
            case 1:
                return {**tree, rng.choice(("", "ask", "worker", "__class__")): rng.choice(ODD)}
        return {**tree, key: spoilt(tree[key], rng)}
    if isinstance(tree, list) and tree and rng.random() < 0.85:
        at = rng.randrange(len(tree))
        match rng.randrange(8):
            case 0:
                return tree[:at] + tree[at + 1 :]
            case 1:
                return [*tree, tree[at]]
        return [*tree[:at], spoilt(tree[at], rng), *tree[at + 1 :]]
    if isinstance(tree, int) and rng.random() < 0.3:
        return tree + rng.choice((-1, 1, 2**32, -(2**40)))
    return rng.choice(ODD)


SPOILERS: Sequence[Callable[[bytes, random.Random], bytes]] = (
    _any_field,
    _any_field,
    _any_field,
    _some_bits,
    _some_numbers,
    _cut,
    _longer,
    _other_body,
    _other_json,
    _other_json,
)


def spoil(frame: bytes, rng: random.Random) -> bytes:
    """One frame, spoilt in one way; an empty one stays so."""
    return rng.choice(SPOILERS)(frame, rng) if frame else frame


# -- a conversation --------------------------------------------------------------------------------


def spoil_order(frames: Sequence[bytes], rng: random.Random) -> list[bytes]:
    """Frames that come twice, not at all, in another order, or that are half of one and half of
    another."""
    mixed = list(frames)
    if not mixed:
        return [rng.choice(NOISE)]
    at, other = rng.randrange(len(mixed)), rng.randrange(len(mixed))
    match rng.randrange(6):
        case 0:
            mixed.insert(at, mixed[other])
        case 1:
            del mixed[at]
        case 2:
            mixed[at], mixed[other] = mixed[other], mixed[at]
        case 3:
            head, tail = mixed[at], mixed[other]
            cut = rng.randrange(len(head) + 1)
            mixed[at] = head[:cut] + tail[rng.randrange(len(tail) + 1) :]
        case 4:  # nothing comes after it
            mixed[at:] = [mixed[at][: rng.randrange(len(mixed[at]) + 1)]]
        case 5:
            mixed.insert(at, rng.choice((*NOISE, rng.randbytes(rng.randrange(200)))))
    return mixed


def mutated(frames: Sequence[bytes], rng: random.Random, chance: float = 0.15) -> list[bytes]:
    """A conversation of which each frame may be spoilt, and the order as well."""
    found = [spoil(frame, rng) if rng.random() < chance else frame for frame in frames]
    if rng.random() < chance:
        found = spoil_order(found, rng)
    return found
