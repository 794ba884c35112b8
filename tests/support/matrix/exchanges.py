"""Rows 7 and 8: pushes and replies that get lost or come twice on the way, and frames that are cut.

The oracle: the model has a parameter for each push, where its gradient is a whole number, and zero
everywhere else. So the parameters say which pushes are in, and how often.
"""

import contextlib
import gc
import logging
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from helpers import toy_job, toy_recipe
from rig import Hand, Rig, in_threads, wait_until
from torch import Tensor, nn

from offbeat.accounts import APPLIED
from offbeat.roles.exchange import Exchange
from offbeat.run.events import EventLog
from offbeat.run.job import Job
from offbeat.transport.base import PushHeader
from offbeat.transport.sockets import SocketNetwork, _Slots
from offbeat.transport.wire import FORMAT, PUSH, REPLY, pack_push

from . import switched_off
from .desks import Unwritten, a_folder
from .row import Row, Trial

STEPS = 200
"""Of each of the two workers."""
T = 20.0


class Vector(nn.Module):
    """A parameter for each push."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.pushes = nn.Parameter(torch.zeros(size))


class Tampering:
    """Passes frames on, but for those that it loses, with their connection, or sends twice."""

    def __init__(self, address: str, rng: random.Random, chance: float) -> None:
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        self._target = (host, int(port))
        self._rng = rng
        self._chance = chance
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._door.getsockname()[1]}"
        self._others: dict[socket.socket, socket.socket] = {}
        self._read: dict[socket.socket, bytearray] = {}
        self._closed = False
        self.num_lost = self.num_doubled = 0
        self._thread = threading.Thread(target=self._run, name="tampering", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            ready, _, _ = select.select([self._door, *self._others], [], [], 0.05)
            for sock in ready:
                if sock is self._door:
                    self._take_in()
                elif sock in self._others:
                    self._pass_on(sock)

    def _take_in(self) -> None:
        ours, _ = self._door.accept()
        theirs = socket.create_connection(self._target)
        for one, other in ((ours, theirs), (theirs, ours)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._others[one] = other
            self._read[one] = bytearray()

    def _pass_on(self, source: socket.socket) -> None:
        try:
            more = source.recv(1 << 16)
        except ConnectionError:
            more = b""
        if not more:
            self._hang_up(source)
            return
        raw = self._read[source]
        raw += more
        while len(raw) >= FORMAT.size:
            fields = FORMAT.unpack_from(raw)
            size = FORMAT.size + fields[9]
            if len(raw) < size:
                return
            frame = bytes(raw[:size])
            del raw[:size]
            if not self._give(self._others[source], frame, fields[2]):
                self._hang_up(source)
                return

    def _give(self, target: socket.socket, frame: bytes, kind: int) -> bool:
        fate = self._rng.random() if kind in (PUSH, REPLY) else 1.0
        if fate < self._chance:
            self.num_lost += 1
            return False
        try:
            target.sendall(frame)
            if fate < 2 * self._chance:
                self.num_doubled += 1
                target.sendall(frame)
        except ConnectionError:
            return False
        return True

    def _hang_up(self, sock: socket.socket) -> None:
        for end in (sock, self._others[sock]):
            if self._rng.random() < 0.5:  # a reset: what was not read is gone
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            del self._others[end], self._read[end]
            end.close()

    def close(self) -> None:
        self._closed = True
        self._thread.join(T)
        for sock in [self._door, *self._others]:
            sock.close()


class Towers:
    """Where an exchange's parameters arrive."""

    def __init__(self, size: int) -> None:
        self.landing = torch.zeros(size)
        self.gradient: Tensor | None = None

    def adopt(self, landing: Tensor) -> None:
        self.landing = landing

    def forget(self) -> None:
        self.landing = self.landing.clone()


DISCIPLINES = ("apply-reply", "reply-apply", "lock-free", "bounded", "sync")


def exchanges_trial(seed: int) -> Trial:
    """Two workers, as they are in the program, each with its own way of finding its server."""
    rng = random.Random(seed)
    discipline = DISCIPLINES[seed % len(DISCIPLINES)]
    with a_folder() as folder:
        return _exchange_all(folder, discipline, rng)


def _exchange_all(folder: Path, discipline: str, rng: random.Random) -> Trial:
    job = toy_job(
        toy_recipe(model=lambda: Vector(2 * STEPS)), discipline=discipline, workers=2, steps=STEPS
    )
    options: dict[str, Any] = {"agreement": job.agreement}
    rig = Rig(folder, discipline, 2, manifest=job.manifest, transport="tcp", server_options=options)
    with contextlib.closing(rig):
        way = Tampering(rig.listener.address, random.Random(rng.random()), 0.04)
        outcomes: dict[int, str] = {}
        found: list[str] = []
        with contextlib.closing(way):
            in_threads(
                *(
                    lambda rank=rank: _work(job, rank, way.address, discipline, outcomes, found)
                    for rank in range(2)
                )
            )
        rig.drain()
        if rig.server.failure is not None:
            found.append(f"the server failed: {rig.server.failure!r}")
        found += list(_miscounted(rig.shard.params, outcomes, discipline))
        if not way.num_lost or not way.num_doubled:
            found.append("nothing was lost or doubled")
    return Trial(tuple(found), counted=len(outcomes))


def _value(place: int) -> float:
    """Of the gradient that has its place there; even, since a mean of two is to be whole."""
    return 2.0 * (place % 50 + 1)


def _work(
    job: Job, rank: int, address: str, discipline: str, outcomes: dict[int, str], found: list[str]
) -> None:
    log = logging.Logger("worker")
    log.addHandler(logging.NullHandler())
    events = EventLog(Unwritten())
    exchange = Exchange(
        job,
        rank,
        Towers(2 * STEPS),
        SocketNetwork([address]),
        events=events,
        log=log,
        clock=time.monotonic,
        stop=threading.Event(),
    )
    with exchange:
        done = exchange.join()
        for step in range(done + 1, STEPS + 1):
            place = rank * STEPS + step - 1
            (slot,) = exchange.gradient_slots
            slot.values.zero_()
            slot.values[place] = _value(place)
            exchange.push(step, [True], exchange.versions)
            outcomes[place] = exchange.await_all()
            found += _shown(exchange, place, outcomes[place], discipline)
    events.close()


def _shown(exchange: Exchange, place: int, outcome: str, discipline: str) -> list[str]:
    """Whether what a worker is shown is what the version says that it is."""
    shown, version = exchange._towers.landing, exchange.versions[0]
    if discipline in ("apply-reply", "bounded") and int(shown.count_nonzero()) != version:
        return [f"version {version} has {int(shown.count_nonzero())} updates"]
    if discipline == "sync" and outcome == APPLIED and shown[place] == 0:
        return [f"the reply to {place} is not its round's"]
    return []


def _miscounted(params: Tensor, outcomes: dict[int, str], discipline: str) -> Iterator[str]:
    """Applied is in once, everything else not at all. In sync a round of two is their mean."""
    for place, found in enumerate(params.tolist()):
        outcome = outcomes.get(place)
        times = -found / _value(place)
        once = (1.0, 0.5) if discipline == "sync" else (1.0,)
        expected = once if outcome == APPLIED else (0.0,)
        if times not in expected:
            yield f"push {place} was said to be {outcome}, and is in {times} times"


EXCHANGES = Row(
    7,
    "request lost, reply lost, push or reply doubled",
    "applied once, and answered; in sync with the parameters of its round",
    100_000,
    1,
    exchanges_trial,
    {"dedupe": switched_off.DEDUPE},
)


# -- cuts ------------------------------------------------------------------------------------------

CUTS = 50
"""Of a trial."""
WAYS = ("reset", "closed", "half closed", "byte by byte", "byte by byte, then closed")


def cuts_trial(seed: int) -> Trial:
    rng = random.Random(seed)
    transport = "unix" if seed % 4 == 3 else "tcp"
    discipline = rng.choice(("apply-reply", "reply-apply", "lock-free", "sync"))
    size = rng.choice((4, 4, 600))
    with a_folder() as folder:
        rig = Rig(folder, discipline, 1, sizes=(size,), transport=transport)
        with contextlib.closing(rig):
            found = list(_cut_all(rig, rng))
            found += _left_behind(rig)
        return Trial(tuple(found), counted=CUTS)


def _cut_all(rig: Rig, rng: random.Random) -> Iterator[str]:
    expected = torch.zeros_like(rig.shard.params)
    sequence = 0
    for number in range(CUTS):
        how = rng.choice(WAYS)
        is_whole = how == "byte by byte"
        hand = rig.join(0)
        sequence += is_whole
        _push_in_part(hand, rng, how, sequence if is_whole else sequence + 1)
        if is_whole:
            expected -= 3.0
            if hand.link.wait_reply(T) is None:
                yield f"cut {number}: no answer to a frame that came byte by byte"
        _end(hand, how)
        rig.hands.remove(hand)
        wait_until(lambda: not rig.server.sessions._sessions, "its session is over")
        if not torch.equal(rig.shard.params, expected):
            yield f"cut {number} ({how}): parameters are {rig.shard.params[:4].tolist()}"
            return
        if rig.server.failure is not None:
            yield f"cut {number} ({how}): the server failed: {rig.server.failure!r}"
            return


def _push_in_part(hand: Hand, rng: random.Random, how: str, sequence: int) -> None:
    link: Any = hand.link
    size = link._slots.gradients[0].values.numel()
    raw = pack_push(PushHeader(0, 0, sequence, 0, sequence), 4 * size + 1 if link._inline else 0)
    if link._inline:
        raw += torch.full((size,), 3.0).numpy().tobytes() + b"\1"
    else:
        link.gradient_slot.values.fill_(3.0)
    part = raw if how == "byte by byte" else raw[: rng.randrange(1, len(raw))]
    sock = link._connection._socket
    with contextlib.suppress(ConnectionError):
        if how.startswith("byte"):
            for byte in part:
                sock.sendall(bytes([byte]))
        else:
            sock.sendall(part)


def _end(hand: Hand, how: str) -> None:
    link: Any = hand.link
    sock = link._connection._socket
    if how == "half closed":
        sock.shutdown(socket.SHUT_WR)
    elif how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        return
    if how != "half closed":
        sock.close()
        return
    sock.settimeout(T)
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    sock.close()


def _left_behind(rig: Rig) -> list[str]:
    """Memory for payloads that nobody has a connection for any more."""
    gc.collect()
    num_slots = sum(type(each) is _Slots for each in gc.get_objects())
    return [f"{num_slots} buffers were left behind"] if num_slots > 2 else []


CUT = Row(
    8,
    "reset in mid-frame, half-close, one byte at a time",
    "the frame is discarded whole, its buffer freed",
    10_000,
    1,
    cuts_trial,
    {"whole frames": switched_off.WHOLE_FRAMES},
)
ROWS = (EXCHANGES, CUT)
