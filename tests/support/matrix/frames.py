"""Row 15: frames that were mutated, given to the program's readers.

Most go to readers out of memory: a `Tape` is what a connection needs of a socket, and behind it are
a whole server, with its sessions, ledger and shard, or a worker's end of a connection. The others
go over TCP on loopback, to a server with a door and threads. What a server should have made of the
bytes it was given a reader of a few lines works out by itself, down to every bit of the parameters.
"""

import contextlib
import gc
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from rig import TOKEN, Rig, wait_until
from strangers import Stranger, mac
from torch import Tensor

from offbeat.accounts import DUPLICATE, REJECTED, STALE
from offbeat.errors import ConnectionClosedError
from offbeat.run.events import EventLog
from offbeat.shard import usable
from offbeat.transport.base import Layout, PushHeader, ReplyHeader, WelcomeHeader
from offbeat.transport.codec import Codec
from offbeat.transport.codecs import Bf16, Int8, TopK
from offbeat.transport.security import NONCE_BYTES, OPEN, Terms
from offbeat.transport.sockets import (
    SocketCallEnd,
    SocketWorkerEnd,
    _Slots,
)
from offbeat.transport.wire import (
    ANSWER,
    BEAT,
    FINISH,
    FORMAT,
    GOODBYE,
    MAGIC,
    MAX_COUNT,
    OUTCOMES,
    PROOF,
    PROTOCOL,
    PUSH,
    REPLY,
    WELCOME,
    Connection,
    pack,
    pack_push,
    pack_reply,
)

from . import switched_off
from .desks import (
    CALLED,
    EPOCH,
    PAYLOAD,
    SIZES,
    Desk,
    Piece,
    Tape,
    a_folder,
    call_of,
    hello_of,
    push_of,
    whole_numbers,
)
from .mutation import mutated, spoil
from .row import Row, Trial

AT_ONCE = 1000
"""Frames of a trial."""
WARM_UP = 300
"""And before that, so that what is made once is there."""
RANKS = 24
"""A server keeps an account of each."""
MOST_BLOCKS = 2000
"""Of Python's memory, that a trial may leave behind: two for each frame. Where events are written
there is a block of an archive, too."""

# -- what is said ----------------------------------------------------------------------------------


def a_worker_says(agreed: "Agreed", rng: random.Random) -> list[bytes]:
    worker = rng.randrange(RANKS)
    sequence = agreed.last.get(worker, 0)
    if sequence > 2**61:  # one that lied: all that it pushes from then on is a duplicate
        sequence = 0
    told = {"last_round": [[1, 3], [2, 4]]} if rng.random() < 0.2 else {}
    frames = [hello_of(worker, **told)]
    for _ in range(rng.randint(2, 14)):
        match rng.randrange(12):
            case 0:
                frames.append(pack(BEAT))
            case 1 if len(frames) > 1:
                frames.append(frames[-1])
            case 2 if rng.random() < 0.1:
                frames.append(pack(FINISH, sequence=sequence))
            case _:
                sequence += 1
                frames.append(push_of(sequence, whole_numbers(rng), rng))
    return [*frames, pack(GOODBYE)]


def a_caller_says(rng: random.Random) -> list[bytes]:
    asked = [call_of(rng.choice(CALLED)) for _ in range(rng.randint(1, 8))]
    return [hello_of(0, calls=True), *asked, pack(GOODBYE)]


def proof_of(rng: random.Random, chance: float) -> Piece:
    """What proves that the token is known; sometimes not quite."""
    spoilt = rng.random() < chance

    def prove(said: bytes) -> bytes:
        nonce, mine = said[FORMAT.size : FORMAT.size + NONCE_BYTES], bytes(NONCE_BYTES)
        frame = pack(PROOF, length=64) + mine + mac(b"client", nonce + mine)
        return spoil(frame, rng) if spoilt else frame

    return prove


# -- what has to come of it ------------------------------------------------------------------------


def frames_in(said: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and header of each frame that somebody sent, whose bodies have their lengths."""
    at = 0
    while len(said) - at >= FORMAT.size:
        fields = FORMAT.unpack_from(said, at)
        yield fields[2], said[at : at + FORMAT.size]
        at += FORMAT.size + fields[9]


def _is_proof(given: bytes, said: bytes) -> bool:
    nonce, proof = (raw[FORMAT.size :][:64] for raw in (said, given))
    mine = proof[:NONCE_BYTES]
    return proof[NONCE_BYTES:] == mac(b"client", nonce[:NONCE_BYTES] + mine)


@dataclass
class Agreed:
    """What the parameters are, by a reader of its own, and what is known of each worker."""

    params: Tensor = field(default_factory=lambda: torch.zeros(sum(SIZES)))
    last: dict[int, int] = field(default_factory=dict)

    def check(self, given: bytes, said: bytes, *, token: bool, reset: bool = False) -> list[str]:
        """What a conversation should have come to, against what the server said; `reset`: the last
        of that may be lost, as the server hung up with something unread."""
        kinds = [(kind, raw) for kind, raw in frames_in(said) if kind in (WELCOME, REPLY)]
        if not kinds or kinds[0][0] != WELCOME:
            return []
        found = []
        if token and not _is_proof(given, said):
            found.append("somebody was let in without the token")
        rest = given[FORMAT.size + 64 if token else 0 :]
        length = FORMAT.unpack_from(rest)[9]
        hello = json.loads(rest[FORMAT.size : FORMAT.size + length])
        if hello.get("fingerprint") != "same":
            found.append(f"a hello was found good that was not: {str(hello)[:200]}")
        if hello.get("calls"):
            return found
        expected = list(self._pushes(rest[FORMAT.size + length :], hello["worker"]))
        answered = []
        for _, raw in kinds[1:]:
            fields = FORMAT.unpack(raw)
            status = OUTCOMES[fields[3]]
            answered.append((fields[10], status if status in _REFUSALS else "in"))
        if answered != (expected[: len(answered)] if reset else expected):
            found.append(f"pushes {expected} were answered by {answered}")
        return found

    def _pushes(self, raw: bytes, worker: int) -> Iterator[tuple[int, str]]:
        """Sequence and outcome of each one that is whole, up to where it makes no sense."""
        at, is_finished = 0, False
        while len(raw) - at >= FORMAT.size:
            fields = FORMAT.unpack_from(raw, at)
            magic, protocol, kind, status, flags = fields[:5]
            epoch, length, sequence, batch, base = fields[8:13]
            if magic != MAGIC or protocol != PROTOCOL or status >= len(OUTCOMES):
                return
            at += FORMAT.size
            if kind == FINISH:
                if sequence > MAX_COUNT:
                    return
                if not is_finished:
                    self.last[worker] = max(self.last.get(worker, 0), sequence)
                is_finished = True
            elif kind == PUSH:
                if length != PAYLOAD or len(raw) - at < PAYLOAD:
                    return
                if max(sequence, batch, base) > MAX_COUNT:
                    return
                body = bytearray(raw[at : at + PAYLOAD])
                at += PAYLOAD
                yield sequence, self._apply(worker, sequence, epoch, flags, body)
            elif kind != BEAT:
                return

    def _apply(self, worker: int, sequence: int, epoch: int, flags: int, body: bytearray) -> str:
        if epoch != EPOCH:
            return STALE
        if sequence <= self.last.get(worker, -1):
            return DUPLICATE
        self.last[worker] = sequence
        values = torch.frombuffer(body, dtype=torch.float32, count=sum(SIZES))
        if flags & 1 or not usable(values):
            return REJECTED
        at = 0
        for size, is_there in zip(SIZES, body[4 * sum(SIZES) :], strict=True):
            if is_there or not flags & 2:
                self.params[at : at + size] -= values[at : at + size]
            at += size
        return "in"


_REFUSALS = (STALE, DUPLICATE, REJECTED)


# -- trials ----------------------------------------------------------------------------------------


def _blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def flat(
    body: Callable[[int], Iterator[str]],
    num_frames: int,
    events: EventLog | None = None,
    most_blocks: int = MOST_BLOCKS,
) -> tuple[str, ...]:
    """What a body complains of that is given so many frames, and whether it left memory behind. It
    is warmed up before; `events` are those that wait to be written."""
    found = tuple(body(WARM_UP))
    if events is not None:
        events.flush()
    before = _blocks()
    found += tuple(body(num_frames))
    if events is not None:
        events.flush()
    more = _blocks() - before
    if more > most_blocks + 20 * len(found):
        found += (f"{more} blocks of memory were left behind",)
    return found


def _hear_all(desk: Desk, rng: random.Random, agreed: Agreed, num_frames: int) -> Iterator[str]:
    """Conversations of workers, with a server out of memory."""
    token, done = desk.terms.token is not None, 0
    while done < num_frames:
        frames: list[Piece] = list(mutated(a_worker_says(agreed, rng), rng))
        if token:
            frames.insert(0, proof_of(rng, 0.3))
        done += len(frames)
        tape = desk.hear(frames)
        yield from agreed.check(bytes(tape.given), bytes(tape.said), token=token)
        if desk.server.failure is not None:
            yield f"the server failed: {desk.server.failure!r}"
            return
        if not torch.equal(desk.shard.params, agreed.params):
            yield f"parameters are {desk.shard.params.tolist()}, not {agreed.params.tolist()}"
            return


def _workers_trial(rng: random.Random) -> tuple[str, ...]:
    discipline = rng.choice(("apply-reply", "reply-apply", "lock-free"))
    terms = Terms(token=TOKEN) if rng.random() < 0.3 else OPEN
    desk, agreed = Desk(discipline, terms), Agreed()
    with contextlib.closing(desk):
        events = desk.server._events
        return flat(lambda count: _hear_all(desk, rng, agreed, count), AT_ONCE, events)


def _coded_trial(rng: random.Random) -> tuple[str, ...]:
    """What a codec is to decode: there only what nobody may do is looked at."""
    codec: Codec = rng.choice((Bf16(), Int8(), TopK()))
    desk = Desk("apply-reply", codec=codec)

    def say(num_frames: int) -> Iterator[str]:
        done = 0
        while done < num_frames:
            frames = [hello_of(rng.randrange(RANKS))]
            for sequence in range(1, rng.randint(2, 10)):
                frames.append(_coded_push(sequence, codec, rng))
            done += len(frames)
            before = desk.shard.params.clone()
            tape = desk.hear(mutated(frames, rng, 0.4))
            if desk.server.failure is not None:
                yield f"the server failed: {desk.server.failure!r}"
                return
            is_in = any(
                kind == REPLY and OUTCOMES[raw[7]] not in _REFUSALS
                for kind, raw in frames_in(bytes(tape.said))
            )
            if not is_in and not torch.equal(before, desk.shard.params):
                yield "parameters changed by what was refused"
            if not bool(desk.shard.params.isfinite().all()):
                yield "parameters are not finite"
                return

    with contextlib.closing(desk):
        return flat(say, AT_ONCE, desk.server._events)


def _coded_push(sequence: int, codec: Codec, rng: random.Random) -> bytes:
    values = torch.frombuffer(bytearray(whole_numbers(rng)), dtype=torch.float32)
    wire = torch.zeros(codec.capacity(sum(SIZES)), dtype=torch.uint8)
    num_bytes = codec.encode(values, wire)
    body = wire[:num_bytes].numpy().tobytes() + b"\1" * len(SIZES)
    header = PushHeader(0, 0, sequence, 0, sequence, EPOCH, num_bytes=num_bytes)
    return pack_push(header, len(body)) + body


def _calls_trial(rng: random.Random) -> tuple[str, ...]:
    desk = Desk("apply-reply")

    def ask(num_frames: int) -> Iterator[str]:
        desk.hear([hello_of(0, calls=True), *map(call_of, CALLED), pack(GOODBYE)])
        done = 0
        while done < num_frames:
            frames = mutated(a_caller_says(rng), rng, 0.4)
            done += len(frames)
            desk.hear(frames)
            if desk.server.failure is not None or desk.server.over.is_set():
                yield f"the server failed: {desk.server.failure!r}"
                return
            if bool(desk.shard.params.any()):
                yield "parameters changed by a call"
                return

    with contextlib.closing(desk):
        return flat(ask, AT_ONCE // 4, desk.server._events)


def _replies(rng: random.Random) -> list[bytes]:
    body = whole_numbers(rng) + b"\1" * len(SIZES)
    made = []
    for sequence in range(1, rng.randint(2, 12)):
        header = ReplyHeader(sequence, sequence, rng.choice(OUTCOMES), EPOCH)
        made.append(pack_reply(header, len(body)) + body)
    return made


def _clients_trial(rng: random.Random) -> tuple[str, ...]:
    """The other way round: what a worker, or the master, reads of a server that lies."""
    layout = Layout(sum(SIZES), len(SIZES))

    def read(num_frames: int) -> Iterator[str]:
        done = 0
        while done < num_frames:
            is_worker = rng.random() < 0.5
            frames = mutated(
                _replies(rng) if is_worker else [call_of({"version": 1}, ANSWER)] * 4, rng, 0.3
            )
            done += len(frames)
            connection = Connection(Tape(frames))
            try:
                if is_worker:
                    link = SocketWorkerEnd(
                        connection, WelcomeHeader(0), _Slots(layout), inline=True
                    )
                    while True:
                        link.wait_reply(0.1)
                end = SocketCallEnd(connection, 1 << 16)
                while True:
                    end.call({"ask": "status"}, {}, 1.0)
            except ConnectionClosedError:
                continue
            except Exception as error:
                yield f"a reader raised {error!r}"

    return flat(read, AT_ONCE)


def _sockets_trial(rng: random.Random) -> tuple[str, ...]:
    """Over TCP, with a door and threads: here only the end of a conversation is waited for."""
    with a_folder() as folder:
        rig = Rig(
            folder,
            rng.choice(("apply-reply", "reply-apply", "lock-free")),
            4,
            sizes=SIZES,
            transport="tcp",
            ledger_options={"epoch": EPOCH},
            server_options={"agreement": {"fingerprint": "same", "num_shards": 1}},
        )
        try:
            agreed = Agreed()
            found = flat(lambda count: _talk(rig, rng, agreed, count), AT_ONCE // 4, rig.events)
            other = rig.join(1000)
            before, version = rig.shard.params.clone(), rig.shard.version
            other.exchange(1.0)
            wait_until(lambda: rig.shard.version > version, "it is in")  # perhaps after the answer
            if not torch.equal(rig.shard.params, before - 1):
                found += ("a worker that came later did not get its gradient in",)
            return found
        finally:
            rig.close()


def _talk(rig: Rig, rng: random.Random, agreed: Agreed, num_frames: int) -> Iterator[str]:
    done = 0
    while done < num_frames:
        frames = mutated(a_worker_says(agreed, rng), rng)
        done += len(frames)
        with Stranger(rig.listener) as stranger:
            said = stranger.say(b"".join(frames))
        wait_until(lambda: not rig.server.sessions._sessions, "its session is over")
        yield from agreed.check(b"".join(frames), said, token=False, reset=True)
        if rig.server.failure is not None:
            yield f"the server failed: {rig.server.failure!r}"
            return
        if not torch.equal(rig.shard.params, agreed.params):
            yield f"parameters are {rig.shard.params.tolist()}, not {agreed.params.tolist()}"
            return


_W, _S, _D = (_workers_trial, AT_ONCE), (_sockets_trial, AT_ONCE // 4), (_coded_trial, AT_ONCE)
_R, _C = (_clients_trial, AT_ONCE), (_calls_trial, AT_ONCE // 4)
_TURNS = (_W, _S, _D, _R, _C, _S, _W, _S, _W, _S, _D, _R, _C, _W, _S, _W, _S, _W, _S, _S)
"""Which of them a seed is, and how many frames that gives; the first five are one of each."""


def frames_trial(seed: int) -> Trial:
    part, num_frames = _TURNS[seed % len(_TURNS)]
    return Trial(part(random.Random(seed)), counted=WARM_UP + num_frames)


FRAMES = Row(
    15,
    "random and mutated frames, before and after the handshake",
    "the connection is closed, or they are answered; the process lives; memory is flat",
    1_000_000,
    5 * WARM_UP + 7 * AT_ONCE // 2,
    frames_trial,
    {
        "dedupe": switched_off.DEDUPE,
        "epochs": switched_off.EPOCH,
        "lengths compared": switched_off.LENGTHS,
        "whole frames": switched_off.WHOLE_FRAMES,
        "finite check": switched_off.FINITE,
        "agreement": switched_off.AGREEMENT,
        "token": switched_off.TOKEN,
    },
)
ROWS = (FRAMES,)
