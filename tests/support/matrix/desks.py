"""What stands behind mutated frames: a server that is given them out of memory, and what is said to
it where nothing is wrong.

    desk = Desk("apply-reply")
    tape = desk.hear([hello_of(0), push_of(1, whole_numbers(rng), rng)])
    tape.said
"""

import json
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from coding import coded
from helpers import make_discipline
from rig import manifest_of

from offbeat import SGD
from offbeat.ledger import Ledger
from offbeat.roles.acceptor import Acceptor
from offbeat.roles.server import Server
from offbeat.run.events import EventLog, Sink
from offbeat.shard import Shard, ShardState, segments_of
from offbeat.transport.base import Layout, Listener, PushHeader
from offbeat.transport.codec import Codec
from offbeat.transport.security import OPEN, Terms
from offbeat.transport.sockets import (
    SocketServerEnd,
)
from offbeat.transport.wire import (
    CALL,
    HELLO,
    Connection,
    json_frame,
    pack,
    pack_push,
)

SIZES = (5, 3)
PAYLOAD = 4 * sum(SIZES) + len(SIZES)
EPOCH = 3
Piece = bytes | Callable[[bytes], bytes]
"""Of what comes: as it is, or what somebody makes of all that was said to him."""


@cache
def _nowhere() -> int:
    return os.open(os.devnull, os.O_RDONLY)


class Tape:
    """What comes is on it, and what is said is kept. At its end the other side is gone."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = iter(pieces)
        self._left = memoryview(b"")
        self.given = bytearray()
        self.said = bytearray()

    def fileno(self) -> int:
        return _nowhere()

    def recv_into(self, target: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        while not len(self._left):
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece(bytes(self.said)) if callable(piece) else piece)
            self.given += self._left
        count = min(len(target), len(self._left))
        target[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        self.said += data
        return len(data)

    def shutdown(self, how: int) -> None: ...
    def close(self) -> None: ...


class Doorless(Listener):
    def accept(self, timeout_s: float) -> None:
        raise AssertionError("nobody waits at it")

    def close(self) -> None: ...


class Unwritten(Sink):
    """Lines that nobody is to read: an archive's would be in memory, as many as are in a block."""

    def write(self, text: str) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Desk:
    """A server without a door: one conversation after the other is put before it."""

    def __init__(self, discipline: str, terms: Terms = OPEN, codec: Codec | None = None) -> None:
        manifest, self.terms = manifest_of(SIZES), terms
        segments = segments_of(manifest, SGD(lr=1.0), 0, sum(SIZES))
        self.shard = Shard(torch.zeros(sum(SIZES)), segments, SGD(lr=1.0))
        self.layout = coded(Layout(sum(SIZES), len(SIZES)), codec, None)
        log = logging.Logger("desk")
        log.addHandler(logging.NullHandler())
        self.server = Server(
            self.shard,
            Ledger(make_discipline(discipline, range(4)), epoch=EPOCH),
            None,
            index=0,
            agreement={"fingerprint": "same", "num_shards": 1},
            events=EventLog(Unwritten()),
            log=log,
            clock=time.monotonic,
            make_codec=lambda: codec,
        )
        self._greeter = Acceptor(Doorless(), self.server.serve, "desk", log)
        zeros = ShardState(version=0, tensors={"params": torch.zeros(sum(SIZES))}, accounts={})
        self.server.load(zeros)

    def hear(self, pieces: Sequence[Piece]) -> Tape:
        tape = Tape(pieces)
        end = SocketServerEnd(Connection(tape), self.layout, self.terms, inline=True)
        self._greeter._greet(end)
        return tape

    def close(self) -> None:
        self.server.close()
        self.server._events.close()


@contextmanager
def a_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="offbeat-faults-") as name:
        yield Path(name)


# -- what is said ---------------------------------------------------------------------------------


def hello_of(worker: int, **more: Any) -> bytes:
    said = {"worker": worker, "incarnation": 0, "shard": 0, "fingerprint": "same", "num_shards": 1}
    return b"".join(json_frame(HELLO, {**said, **more}))


def push_of(sequence: int, values: bytes, rng: random.Random) -> bytes:
    """Most are as they should be; some are what a server answers without applying it."""
    epoch = EPOCH if rng.random() < 0.9 else rng.randrange(5)
    masked = rng.random() < 0.2
    mask = bytes(rng.randrange(2) for _ in SIZES) if masked else b"\1" * len(SIZES)
    header = PushHeader(
        rng.randrange(4), 0, sequence, 0, sequence, epoch, void=rng.random() < 0.05, masked=masked
    )
    return pack_push(header, len(values) + len(mask)) + values + mask


def whole_numbers(rng: random.Random) -> bytes:
    numbers = [float(rng.randint(-8, 8)) for _ in range(sum(SIZES))]
    return torch.tensor(numbers).numpy().tobytes()


CALLED: tuple[dict[str, Any], ...] = (
    {"ask": "status"},
    {"ask": "want", "version": 0},
    {"ask": "take"},
    {"ask": "cover", "entry": 3},
    {"ask": "leave_out", "workers": [1, 2]},
    {"ask": "fall", "versions": [5, 7]},
    {"ask": "round", "wait_s": 0.0},
    {"ask": "end_round", "number": 1, "norm": 2.0},
    {"ask": "newest", "after": -1, "who": "somebody"},
    {"ask": "show"},
    {"ask": "load", "state": {"version": 1, "accounts": {"0": [0, 1, 1]}, "falls": []}},
    {"ask": "events", "name": "worker-0", "source": "a", "before": 0},
)
"""Whatever comes of these, the server stays: `finish` is not among them."""


def call_of(message: dict[str, Any], kind: int = CALL) -> bytes:
    values = torch.arange(4.0)
    table = [["params", "float32", [2, 2]], ["lines", "uint8", [3]]]
    raw = json.dumps({"message": message, "tensors": table}).encode()
    return pack(kind, length=len(raw)) + raw + values.numpy().tobytes() + b"abc"
