"""Row 16: lengths and shapes that nobody has, wherever one is read; refused before there is memory.

Each case is a reader and one such number. What Python allocates meanwhile is traced, and what torch
is asked for is written down.
"""

import contextlib
import json
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rig import TOKEN

from offbeat.data.files import read_idx
from offbeat.errors import CheckpointError, ConnectionClosedError, DataError, JournalError
from offbeat.run import segments
from offbeat.run.checkpoint import load_checkpoint
from offbeat.transport.base import Layout, PushHeader, ReplyHeader, WelcomeHeader
from offbeat.transport.codecs import Int8
from offbeat.transport.security import OPEN, Terms, introduce
from offbeat.transport.sockets import SocketCallEnd, SocketWorkerEnd, _Slots
from offbeat.transport.wire import (
    ANSWER,
    BEAT,
    CALL,
    CHALLENGE,
    FINISH,
    GOODBYE,
    HELLO,
    PROOF,
    REFUSE,
    WELCOME,
    Connection,
    pack,
    pack_push,
    pack_reply,
)

from . import switched_off
from .desks import EPOCH, PAYLOAD, SIZES, Desk, Tape, a_folder, hello_of
from .forged import a_checkpoint, signed
from .mutation import set_field
from .row import Row, Trial

LENGTHS = (2**31, 2**32 - 1, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
"""The last is -1, read without a sign."""
ZERO_TOO = (0, *LENGTHS)
SHAPES: tuple[Any, ...] = (
    [2**31],
    [2**32 - 1],
    [2**63],
    [2**64],
    [2**32, 2**32],
    [2**16] * 4,
    [2**63, 0],
    [2**22] * 3 + [0],
    [-1],
    [-1, -5],
    [0.5],
    ["5"],
    [float("inf")],
    [float("nan")],
    [True],
    [1] * 1000,
    [[5]],
    {"5": 1},
    None,
    2**63,
)
NUM_CASES = 227
MOST_BYTES = 3 << 20
"""That a case may allocate: a message of JSON may have 1 MB, and is read before it is looked at."""
REFUSED = (ConnectionClosedError, CheckpointError, DataError, JournalError)

Case = tuple[str, Callable[[], object]]


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """How many bytes were allocated at most, and how many torch was asked for."""
    asked = [0]
    empty, zeros = torch.empty, torch.zeros

    def noting(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*size: Any, **options: Any) -> Any:
            found = make(*size, **options)
            asked[0] = max(asked[0], found.numel() * found.element_size())
            return found

        return made

    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    with (
        mock.patch.object(torch, "empty", noting(empty)),
        mock.patch.object(torch, "zeros", noting(zeros)),
    ):
        yield asked
    asked[0] = max(asked[0], tracemalloc.get_traced_memory()[1] - before)


def _told_to(desk: Desk, *frames: bytes) -> Callable[[], object]:
    def tell() -> None:
        with contextlib.closing(desk):
            before = desk.shard.params.clone()
            desk.hear(frames)
            if desk.server.failure is not None:
                raise desk.server.failure
            assert torch.equal(before, desk.shard.params), "parameters have changed"

    return tell


def _push(**fields: int) -> bytes:
    raw = pack_push(PushHeader(0, 0, 1, 0, 0, EPOCH), PAYLOAD)
    for name, value in fields.items():
        raw = set_field(raw, name, value)
    return raw


def _call(shape: Any, kind: int = CALL) -> bytes:
    said = {"message": {"ask": "status"}, "tensors": [["a", "float32", shape]]}
    raw = json.dumps(said).encode()
    return pack(kind, length=len(raw)) + raw


def _server_cases() -> Iterator[Case]:
    hello, calls = hello_of(0), hello_of(0, calls=True)
    for length in ZERO_TOO:
        plain = {
            "hello": [pack(HELLO, length=length)],
            "push": [hello, _push(length=length)],
            "call": [calls, pack(CALL, length=length)],
            "refusal": [hello, pack(REFUSE, length=length)],
            "goodbye": [hello, pack(GOODBYE, length=length)],
            "goodbye of a caller": [calls, pack(GOODBYE, length=length)],
            "beat": [hello, pack(BEAT, length=length)],
            "finish": [hello, pack(FINISH, length=length)],
            "sequence": [hello, _push(length=0, sequence=length)],
        }
        for what, frames in plain.items():
            yield f"{what} of {length}", _told_to(Desk("apply-reply"), *frames)
        yield (
            f"proof of {length}",
            _told_to(Desk("apply-reply", Terms(token=TOKEN)), pack(PROOF, length=length)),
        )
        coded = Desk("apply-reply", codec=Int8())
        yield f"coded push of {length}", _told_to(coded, hello, _push(length=10, size=length))
    for shape in SHAPES:
        yield (
            f"call with shape {str(shape)[:40]}",
            _told_to(Desk("apply-reply"), calls, _call(shape)),
        )


def _client_cases() -> Iterator[Case]:
    plain = Layout(sum(SIZES), len(SIZES))
    coded = replace(plain, coded_reply_bytes=16, codes_always=True)
    reply = pack_reply(ReplyHeader(1, 1), PAYLOAD)
    for length in ZERO_TOO:
        for what, layout, raw in (
            ("reply", plain, set_field(reply, "length", length)),
            ("coded reply", coded, set_field(reply, "size", length)),
            ("reply with rows", plain, set_field(reply, "batch", length)),
            ("goodbye to a worker", plain, pack(GOODBYE, length=length)),
            ("welcome once more", plain, pack(WELCOME, length=length)),
        ):
            yield f"{what} of {length}", _worker_reads(layout, raw)
        yield f"answer of {length}", _caller_reads(pack(ANSWER, length=length))
        yield f"refusal of {length}", _caller_reads(pack(REFUSE, length=length))
        for kind in (CHALLENGE, REFUSE, PROOF):
            yield (
                f"frame {kind} of {length} to begin with",
                _newcomer_reads(pack(kind, length=length)),
            )
    for shape in SHAPES:
        yield f"answer with shape {str(shape)[:40]}", _caller_reads(_call(shape, ANSWER))


def _worker_reads(layout: Layout, raw: bytes) -> Callable[[], object]:
    def read() -> None:
        tape = Tape([raw])
        link = SocketWorkerEnd(Connection(tape), WelcomeHeader(0), _Slots(layout), inline=True)
        while True:
            link.wait_reply(0.1)

    return read


def _caller_reads(raw: bytes) -> Callable[[], object]:
    return lambda: SocketCallEnd(Connection(Tape([raw])), 1 << 16).call({}, {}, 0.1)


def _newcomer_reads(raw: bytes) -> Callable[[], object]:
    return lambda: introduce(Connection(Tape([raw])), OPEN, 0.1, "localhost")


def _file_cases() -> Iterator[Case]:
    for length in ZERO_TOO:
        yield f"safetensors header of {length}", _checkpoint_with(length)
        if length < 1 << 63:
            yield f"journal entry of {length}", _journal_with(length)
    for dims in ([2**32 - 1] * 3, [0, 28, 28], [2**31, 1, 1], [2**16, 2**15, 1], [2**30, 1, 1]):
        yield f"idx of {dims}", _idx_with(dims)


def _checkpoint_with(length: int) -> Callable[[], object]:
    def read() -> None:
        with a_folder() as folder:
            path = a_checkpoint(folder)
            (path / "shard-0.safetensors").write_bytes(struct.pack("<Q", length) + b"{}" * 20)
            signed(path)
            load_checkpoint(path)

    return read


def _journal_with(length: int) -> Callable[[], object]:
    """An entry that says so, with the right checksum."""

    def read() -> None:
        with a_folder() as folder:
            mark = bytes(32)
            begun = segments._BEGINNING.pack(segments.FORMAT, mark, 1, 0, 0)[:-4]
            head = segments._HEAD.pack(1, 0, 0, 0, 0, 0, 1, 1, 0, 0, -1, 0.0, length, 0, 0)[:-4]
            raw = b"".join(part + struct.pack("<I", zlib.crc32(part)) for part in (begun, head))
            (folder / f"{1:020d}{segments.SUFFIX}").write_bytes(raw + bytes(100))
            list(segments.read_entries(folder, mark))

    return read


def _idx_with(dims: list[int]) -> Callable[[], object]:
    def read() -> None:
        with a_folder() as folder:
            path = Path(folder, "images")
            path.write_bytes(bytes([0, 0, 8, len(dims)]) + struct.pack(f">{len(dims)}I", *dims))
            read_idx(path, len(dims))

    return read


def cases() -> list[Case]:
    return [*_server_cases(), *_client_cases(), *_file_cases()]


def lengths_trial(seed: int) -> Trial:
    """All of them: they are always the same."""
    found, made = [], cases()
    with contextlib.suppress(*REFUSED):  # so that what is imported late is there
        made[0][1]()
    made = [*made[1:], cases()[0]]
    assert len(made) == NUM_CASES
    tracemalloc.start()
    try:
        for name, read in made:
            with counted() as most:
                try:
                    read()
                except REFUSED:
                    pass
                except Exception as error:
                    found.append(f"{name}: {error!r}")
            if most[0] > MOST_BYTES:
                found.append(f"{name}: {most[0]} bytes were allocated")
    finally:
        tracemalloc.stop()
    return Trial(tuple(found), counted=len(made))


LENGTHS_ROW = Row(
    16,
    "lengths 0, -1, 2^31 to 2^64 - 1; shapes whose size is no number",
    "refused before anything is allocated for them",
    NUM_CASES,
    NUM_CASES,
    lengths_trial,
    {"length cap": switched_off.LENGTH_CAP},
)
ROWS = (LENGTHS_ROW,)
