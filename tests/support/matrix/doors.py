"""Rows 17, 18 and 19: handshakes that prove nothing, crowds that say nothing, peers that take all.

print(rate_beside_strangers(1000))      # of a worker's rate, what is left of it meanwhile
"""

import contextlib
import gc
import logging
import random
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from rig import TOKEN, Hand, Rig, wait_until
from strangers import Stranger, T, a_server, mac, told

from offbeat.roles import acceptor
from offbeat.transport import security, wire
from offbeat.transport.base import PushHeader
from offbeat.transport.security import NONCE_BYTES, Terms
from offbeat.transport.sockets import SocketListener, _Slots
from offbeat.transport.wire import FORMAT, HELLO, PROOF, Frame, json_frame, pack, pack_push

from . import switched_off
from .desks import a_folder
from .row import Row, Trial

ATTEMPTS = 100
"""Of a trial."""
WRONG = (b"", b"x", TOKEN[:-1], TOKEN + b"x", TOKEN.upper(), bytes(len(TOKEN)), b"w" * 64)


# -- handshakes ------------------------------------------------------------------------------------


class Overheard:
    """What somebody heard who listened to a handshake of others."""

    def __init__(self, listener: SocketListener) -> None:
        self.mine = bytes(NONCE_BYTES)
        with Stranger(listener) as first:
            self.nonce = first.challenge()
            self.proof = self.mine + mac(b"client", self.nonce + self.mine)
            first.socket.sendall(pack(PROOF, length=len(self.proof)) + self.proof)
            frame, self.answer = first.read_frame()
            assert frame.type == PROOF, "who knows the token is let in"


Attempt = Callable[[Stranger, Overheard, random.Random], bytes]
"""What is sent to a server that has sent its challenge."""


def _prove(proof: bytes) -> bytes:
    return pack(PROOF, length=len(proof)) + proof


def _wrong_token(stranger: Stranger, heard: Overheard, rng: random.Random) -> bytes:
    nonce = stranger.challenge()
    return _prove(heard.mine + mac(b"client", nonce + heard.mine, rng.choice(WRONG)))


def _replayed(stranger: Stranger, heard: Overheard, rng: random.Random) -> bytes:
    stranger.challenge()
    return _prove(heard.proof)


def _reflected(stranger: Stranger, heard: Overheard, rng: random.Random) -> bytes:
    """The server's own words, of this connection or another one."""
    nonce = stranger.challenge()
    return _prove(rng.choice((nonce, heard.nonce, heard.mine)) + heard.answer)


def _other_side(stranger: Stranger, heard: Overheard, rng: random.Random) -> bytes:
    nonce = stranger.challenge()
    return _prove(nonce + mac(b"server", nonce + nonce))


def _guessed(stranger: Stranger, heard: Overheard, rng: random.Random) -> bytes:
    stranger.challenge()
    return _prove(rng.randbytes(rng.choice((0, 1, 32, 63, 64, 64, 64, 65))))


def _nearly(stranger: Stranger, heard: Overheard, rng: random.Random) -> bytes:
    """All but one bit of it."""
    nonce = stranger.challenge()
    right = bytearray(heard.mine + mac(b"client", nonce + heard.mine))
    right[rng.randrange(NONCE_BYTES, 64)] ^= 1 << rng.randrange(8)
    return _prove(bytes(right))


def _none(stranger: Stranger, heard: Overheard, rng: random.Random) -> bytes:
    stranger.challenge()
    return b"".join(json_frame(HELLO, {"who": 1, "calls": True}))


WAYS: tuple[Attempt, ...] = (
    *(_wrong_token, _replayed, _reflected, _other_side, _guessed, _nearly, _none),
)


def handshakes_trial(seed: int) -> Trial:
    rng = random.Random(seed)
    lines: list[str] = []
    log = logging.Logger("test")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    compared = mock.Mock(wraps=security.hmac.compare_digest)
    found: list[str] = []
    with (
        mock.patch.object(security.hmac, "compare_digest", compared),
        a_server(Terms(token=TOKEN), log) as (listener, hellos),
    ):
        heard = Overheard(listener)
        came_before, said = len(hellos), b""
        for number in range(ATTEMPTS):
            way = rng.choice(WAYS)
            with Stranger(listener) as stranger:
                answered = stranger.say(way(stranger, heard, rng))
            said += answered
            if _is_let_in(answered) or len(hellos) > came_before:
                found.append(f"attempt {number}, {way.__name__.strip('_')}: let in")
                break
        for terms in (Terms(token=b"w" * 32), Terms()):
            error = told(listener.address, terms)
            if error is None or "that will do" in str(error):
                found.append("one with another token, or none, was let in")
        if "that will do" not in str(told(listener.address, Terms(token=TOKEN))):
            found.append("one with the token is not let in afterwards")
        if not compared.called:
            found.append("proofs are not compared in constant time")
        if TOKEN in said or any(TOKEN.decode() in line for line in lines):
            found.append("the token was told")
        if len(lines) > 4 * len(WAYS):
            found.append(f"{len(lines)} lines in the log")
    return Trial(tuple(found), counted=ATTEMPTS)


def _is_let_in(answered: bytes) -> bool:
    return len(answered) >= FORMAT.size and Frame(answered[: FORMAT.size]).type == PROOF


HANDSHAKES = Row(
    17,
    "wrong or no token, replayed handshake, reflected challenge",
    "refused; the token stands in no log and no answer",
    10_000,
    1,
    handshakes_trial,
    {"token": switched_off.TOKEN, "nonces": switched_off.NONCE},
)


# -- crowds ----------------------------------------------------------------------------------------

CROWD = 100
"""Strangers of a trial, who all come at once."""
DEADLINE_S = 0.5
"""In place of the program's 10 s, for as long as a trial lasts."""
PATIENCE_S = 8.0


class Crowd:
    """Strangers who say nothing, or a byte now and then; each comes again when there is time."""

    def __init__(self, listener: SocketListener, count: int) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * count + 200)), hard))
        host, _, port = listener.address.removeprefix("tcp:").rpartition(":")
        self._where = (host, int(port))
        self._left = count
        self._here: dict[int, socket.socket] = {}
        self._poll = select.poll()

    @property
    def is_gone(self) -> bool:
        return not self._left and not self._here

    def turn(self) -> None:
        """Somebody comes, everybody says a byte or nothing, and who was sent away goes."""
        for _ in range(min(50, self._left)):
            sock = socket.create_connection(self._where, T)
            self._here[sock.fileno()] = sock
            self._poll.register(sock, select.POLLIN)
            self._left -= 1
        for descriptor in list(self._here)[::2]:
            with contextlib.suppress(OSError):
                self._here[descriptor].send(b"O", socket.MSG_DONTWAIT)
        for descriptor, _ in self._poll.poll(20):
            self._hear(descriptor)

    def _hear(self, descriptor: int) -> None:
        sock = self._here[descriptor]
        with contextlib.suppress(ConnectionError):
            if sock.recv(4096):
                return
        self._poll.unregister(descriptor)
        del self._here[descriptor]
        sock.close()

    def close(self) -> None:
        for sock in self._here.values():
            sock.close()


def crowd_trial(seed: int) -> Trial:
    found: list[str] = []
    with a_folder() as folder, contextlib.ExitStack() as stack:
        rig = Rig(folder, "apply-reply", 1, transport="token", sizes=(1000,))
        stack.enter_context(contextlib.closing(rig))
        if acceptor.HELLO_TIMEOUT_S < 60:
            stack.enter_context(mock.patch.object(acceptor, "HELLO_TIMEOUT_S", DEADLINE_S))
        hand, most = rig.join(0), 0
        crowd = stack.enter_context(contextlib.closing(Crowd(rig.listener, CROWD)))
        limit_s = time.monotonic() + PATIENCE_S + CROWD / 50
        num_exchanges = 0
        while not crowd.is_gone and time.monotonic() < limit_s:
            crowd.turn()
            most = max(most, len(rig.server._acceptor._strangers))
            hand.exchange(1.0)
            num_exchanges += 1
        if not crowd.is_gone:
            found.append("who says nothing is not sent away")
        if most > 64:
            found.append(f"{most} strangers were waited for at a time")
        if rig.server.failure is not None or rig.shard.version != num_exchanges:
            found.append("the worker did not go on")
    return Trial(tuple(found), counted=CROWD)


def rate_beside_strangers(count: int, seconds: float = 10.0) -> float:
    """A worker's exchanges per second while so many strangers come and stay as long as they may, as
    a share of its rate alone; both ends in one process, and so is the crowd."""
    with a_folder() as folder:
        rig = Rig(folder, "apply-reply", 1, transport="token", sizes=(100_000,))
        with contextlib.closing(rig), contextlib.closing(Crowd(rig.listener, count)) as crowd:
            hand, over = rig.join(0), threading.Event()
            alone = _rate(hand, seconds)

            def come() -> None:
                while not over.wait(0.2):
                    crowd.turn()

            thread = threading.Thread(target=come)
            thread.start()
            beside = _rate(hand, seconds)
            over.set()
            thread.join()
            return beside / alone


def _rate(hand: Hand, seconds: float) -> float:
    began_s, count = time.monotonic(), 0
    while (past_s := time.monotonic() - began_s) < seconds:
        hand.exchange(1.0)
        count += 1
    return count / past_s


CROWDS = Row(
    18,
    "connections that say nothing, or a byte now and then",
    "sent away within the deadline, never more than 64 at a time; workers go on",
    1000,
    1,
    crowd_trial,
    {"deadline": switched_off.no_deadline, "cap of strangers": switched_off.STRANGERS},
    alone=True,
)


# -- those who take all ----------------------------------------------------------------------------

STALL_S = 0.4
"""In place of the program's 60 s."""


def greedy_trial(seed: int) -> Trial:
    """One that never reads what it is sent, and pushes all the while; another one works."""
    transport, size = (("tcp", 2_000_000), ("tcp", 100), ("unix", 100))[seed % 3]
    found: list[str] = []
    with a_folder() as folder, contextlib.ExitStack() as stack:
        if wire.STALL_TIMEOUT_S < 1000:
            stack.enter_context(mock.patch.object(wire, "STALL_TIMEOUT_S", STALL_S))
        rig = Rig(folder, "apply-reply", 2, transport=transport, sizes=(size,))
        stack.enter_context(contextlib.closing(rig))
        greedy, other = rig.join(0), rig.join(1)
        over = threading.Event()
        thread = threading.Thread(target=_flood, args=(greedy, over))
        thread.start()
        shares_memory = transport == "unix"  # where what is not read is written over
        limit_s, num_exchanges = time.monotonic() + (1.0 if shares_memory else PATIENCE_S), 0
        while 0 in rig.server.sessions._sessions and time.monotonic() < limit_s:
            other.exchange(0.0)
            num_exchanges += 1
        over.set()
        thread.join(T)
        if 0 in rig.server.sessions._sessions and not shares_memory:
            found.append("who reads nothing is not sent away")
        if not num_exchanges or other.exchange(0.0).status == "" or rig.server.failure is not None:
            found.append(f"the other one did not go on: {rig.server.failure!r}")
        rig.hands.remove(greedy)
        greedy.link.close()
        del greedy
        wait_until(lambda: 0 not in rig.server.sessions._sessions, "its session is over")
        gc.collect()
        num_slots = sum(type(each) is _Slots for each in gc.get_objects())
        if num_slots > 2:
            found.append(f"{num_slots} buffers were left behind")
    return Trial(tuple(found))


def _flood(greedy: Hand, over: threading.Event) -> None:
    """Frames as fast as they are taken."""
    link: Any = greedy.link
    sock = link._connection._socket
    size = link._slots.gradients[0].values.numel()
    frames = _frames_of(link, size)
    rest = memoryview(next(frames))
    with contextlib.suppress(ConnectionError):
        while not over.is_set():
            try:
                rest = rest[sock.send(rest[: 1 << 20], socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                over.wait(0.01)
            if not len(rest):
                rest = memoryview(next(frames))


def _frames_of(link: Any, size: int) -> Iterator[bytes]:
    body = torch.zeros(size).numpy().tobytes() + b"\1" if link._inline else b""
    sequence = 0
    while True:
        sequence += 1
        yield pack_push(PushHeader(0, 0, sequence, 0, sequence), len(body)) + body


GREEDY = Row(
    19,
    "a reader that never drains, a pusher that floods",
    "back-pressure, then the end of its connection (in shared memory what is not read is written "
    "over); its memory is freed, the others go on",
    100,
    1,
    greedy_trial,
    {"stall timeout": switched_off.STALL},
)
ROWS = (HANDSHAKES, CROWDS, GREEDY)
