"""A live server with workers that a test moves by hand."""

import functools
import logging
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from coding import coded
from helpers import make_discipline
from torch import Tensor

from offbeat import SGD
from offbeat.flat import Manifest, TensorSpec
from offbeat.ledger import Ledger
from offbeat.roles.calls import state_from
from offbeat.roles.server import Server
from offbeat.rows import rows_of
from offbeat.run.events import EventLog, read_events
from offbeat.shard import Shard, ShardState, segments_of
from offbeat.transport.base import Layout, Listener, PushHeader, ReplyHeader, WorkerEnd
from offbeat.transport.codec import Codec, encoding
from offbeat.transport.inproc import InprocListener
from offbeat.transport.security import Terms
from offbeat.transport.sockets import SocketListener, connect

TIMEOUT_S = 20.0
TRANSPORTS = ("inproc", "attended", "unix", "tcp")
SECURED = ("token", "tls")
TOKEN = b"known to both sides of it"


def open_listener(transport: str, layout: Layout) -> Listener:
    match transport:
        case "unix":
            return SocketListener(f"unix:@offbeat-test-{secrets.token_hex(6)}", layout)
        case "tcp":
            return SocketListener("tcp:127.0.0.1:0", layout)
        case "token":
            return SocketListener("tcp:127.0.0.1:0", layout, Terms(token=TOKEN))
        case "tls":
            return SocketListener("tcp:127.0.0.1:0", layout, tls_terms())
    return InprocListener(attended=transport == "attended")


@functools.cache
def authority() -> Any:
    import pytest  # the rig does without it

    return pytest.importorskip("trustme").CA()


@functools.cache
def tls_terms() -> Terms:
    """A token, and TLS with a certificate for 127.0.0.1."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority().issue_cert("127.0.0.1").configure_cert(server)
    client = ssl.create_default_context()
    authority().configure_trust(client)
    return Terms(token=TOKEN, server_tls=server, client_tls=client)


def knock(listener: Listener, hello: dict[str, Any], layout: Layout) -> WorkerEnd:
    """Ask to come in, and wait for the welcome."""
    if isinstance(listener, InprocListener):
        return listener.connect(hello, layout, TIMEOUT_S)
    assert isinstance(listener, SocketListener)
    return connect(listener.address, hello, layout, TIMEOUT_S, listener.terms)


def manifest_of(sizes: Sequence[int]) -> Manifest:
    """One-dimensional tensors of these sizes."""
    specs = []
    for index, size in enumerate(sizes):
        specs.append(
            TensorSpec(
                name=f"t{index}",
                shape=(size,),
                stride=(1,),
                dtype="float32",
                offset=sum(sizes[:index]),
                numel=size,
            )
        )
    return Manifest(tensors=tuple(specs), floats=(), ints=(), frozen=(), aliases={})


class Hand:
    """A worker whose every move is made by the test."""

    def __init__(self, link: WorkerEnd, worker: int, incarnation: int = 0) -> None:
        self.link = link
        self.worker = worker
        self.incarnation = incarnation
        self.sequence = 0
        self.version = link.welcome.version

    @property
    def params(self) -> Tensor:
        return self.link.reply_slot.values

    def push(
        self, values: float | Tensor, mask: Sequence[bool] | None = None, **header: Any
    ) -> None:
        self.sequence += 1
        slot = self.link.gradient_slot
        slot.values.copy_(torch.as_tensor(values))
        slot.mask.fill_(1)
        if mask is not None:
            slot.mask.copy_(torch.tensor(mask, dtype=torch.uint8))
        given: dict[str, Any] = {"sequence": self.sequence, "incarnation": self.incarnation}
        given |= {"epoch": self.link.welcome.epoch, "masked": mask is not None, **header}
        given |= {"base_version": self.version, "batch": self.sequence}
        self.link.push(PushHeader(self.worker, **given))

    def reply(self, timeout_s: float = TIMEOUT_S) -> ReplyHeader:
        header = self.link.wait_reply(timeout_s)
        assert header is not None, f"worker {self.worker} got no reply in {timeout_s} s"
        self.version = header.version
        return header

    def has_reply(self, within_s: float = 0.05) -> bool:
        """Whether a reply comes in this short time; only for showing that none does."""
        header = self.link.wait_reply(within_s)
        return header is not None

    def exchange(self, values: float | Tensor, **more: Any) -> ReplyHeader:
        self.push(values, **more)
        return self.reply()


class Rig:
    """A server over a shard of zeros with plain SGD at lr 1, so gradients simply add up."""

    def __init__(
        self,
        folder: Path,
        discipline: str,
        num_workers: int,
        *,
        sizes: Sequence[int] = (4,),
        clock: Callable[[], float] = time.monotonic,
        discipline_options: dict[str, Any] | None = None,
        transport: str = "inproc",
        server_options: dict[str, Any] | None = None,
        ledger_options: dict[str, Any] | None = None,
        make_codec: Callable[[], Codec | None] = lambda: None,
        make_reply_codec: Callable[[], Codec | None] = lambda: None,
        manifest: Manifest | None = None,
        state: ShardState | None = None,
        **shard_options: Any,
    ) -> None:
        """`state`: what the server begins with; None: zeros."""
        self.make_codec = make_codec
        self.make_reply_codec = make_reply_codec
        self.hands: list[Hand] = []
        self.manifest = manifest or manifest_of(sizes)
        optimizer = shard_options.pop("optimizer", SGD(lr=1.0))
        total = self.manifest.num_elements
        self.rows = rows_of(self.manifest, 0, total)
        self.shard = Shard(
            torch.zeros(total),
            segments_of(self.manifest, optimizer, 0, total),
            optimizer,
            rows=self.rows,
            **shard_options,
        )
        plain = Layout(total, len(self.manifest.tensors), rows=self.rows)
        self.layout = coded(plain, make_codec(), make_reply_codec())
        self.listener = open_listener(transport, self.layout)
        self.log = logging.Logger("test")
        self.log.addHandler(logging.NullHandler())
        self.events = EventLog(folder / "ps-0.jsonl")
        self.folder = folder
        made = make_discipline(discipline, range(num_workers), **(discipline_options or {}))
        self.server = Server(
            self.shard,
            Ledger(made, **(ledger_options or {})),
            self.listener,
            index=0,
            events=self.events,
            log=self.log,
            clock=clock,
            make_codec=make_codec,
            make_reply_codec=make_reply_codec,
            **{"agreement": {"fingerprint": "same"}, **(server_options or {})},
        )
        self.server.start()
        zeros = ShardState(version=0, tensors={"params": torch.zeros(total)}, accounts={})
        try:
            self.server.load(state or zeros)
        except BaseException:
            self.close()
            raise

    def join(
        self, worker: int, fingerprint: str = "same", incarnation: int = 0, **more: Any
    ) -> Hand:
        hello = {"worker": worker, "incarnation": incarnation, "fingerprint": fingerprint, **more}
        knocked = knock(self.listener, hello, self.layout)
        link = encoding(knocked, self.make_codec(), self.make_reply_codec())
        self.hands.append(Hand(link, worker, incarnation))
        return self.hands[-1]

    def drain(self, timeout_s: float = TIMEOUT_S) -> bool:
        """Wait until every session has ended, and so every accepted gradient is applied."""
        deadline = time.monotonic() + timeout_s
        threads = list(self.server._acceptor._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def has_come(self, hand: Hand) -> bool:
        """Whether the server was told of this worker's last push."""
        record = self.server.ledger.under_way.get(hand.worker)
        return record is not None and record.sequence == hand.sequence

    def want(self, version: int) -> None:
        self.server.answer({"ask": "want", "version": version}, {})

    def is_ready(self) -> bool:
        return bool(self.server.answer({"ask": "status"}, {})[0]["ready"])

    def take(self) -> ShardState:
        return state_from(*self.server.answer({"ask": "take"}, {}))

    def snapshot(self) -> ShardState:
        self.want(0)
        return self.take()

    def join_all(self, num_workers: int) -> list[Hand]:
        return [self.join(worker) for worker in range(num_workers)]

    def close(self) -> None:
        self.server.close()
        self.events.close()
        for hand in self.hands:
            hand.link.close()

    def pushes(self) -> list[dict[str, Any]]:
        self.events.flush()
        return [event for event in read_events(self.folder) if event["kind"] == "push"]


@contextmanager
def rig(folder: Path, discipline: str, num_workers: int, **options: Any) -> Iterator[Rig]:
    made = Rig(folder, discipline, num_workers, **options)
    try:
        yield made
    finally:
        made.close()


def in_threads(*bodies: Callable[[], None]) -> None:
    """Run these at the same time; the first error any of them raised is raised here."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        threading.Event().wait(0.001)
