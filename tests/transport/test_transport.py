"""One suite that every transport passes; offbeat/transport/base.py is the contract it checks."""

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from coding import Largest, coded
from rig import SECURED, TRANSPORTS, knock, open_listener

from offbeat.accounts import REJECTED
from offbeat.aliases import DTYPES
from offbeat.errors import ConfigError, ConnectionClosedError
from offbeat.memory import make_memory, map_memory
from offbeat.transport import security
from offbeat.transport.base import (
    CallEnd,
    Layout,
    Listener,
    PushHeader,
    ReplyHeader,
    ServerEnd,
    WelcomeHeader,
    WorkerEnd,
)
from offbeat.transport.codec import Codec, decoding, encoding
from offbeat.transport.codecs import Bf16, Delta, TopK
from offbeat.transport.inproc import InprocListener
from offbeat.transport.sockets import (
    SocketListener,
    SocketServerEnd,
    _resolve,
    connect,
    connect_for_calls,
)
from offbeat.transport.wire import CALL, PUSH, REPLY, pack, pack_push
from offbeat.transport.wire import HELLO as HELLO_FRAME

LAYOUT = Layout(num_elements=5, num_tensors=2, num_floats=3, num_ints=1)
HELLO = {"worker": 3, "incarnation": 1}
WELCOME = WelcomeHeader(version=40, settled_sequence=6, epoch=2, last=True, batches=2**33)
T = 10.0

Connect = Callable[[], WorkerEnd]


CODINGS: dict[str, tuple[Callable[[], Codec] | None, Callable[[], Codec] | None]] = {
    "plain": (None, None),
    "coded": (lambda: Largest(most=LAYOUT.num_elements), None),
    "topk, delta": (lambda: TopK(share=1.0), Delta),
    "bf16, bf16": (Bf16, Bf16),
    "delta": (None, Delta),
}
"""Of gradients and replies; none of them loses anything of the small numbers here."""


@pytest.fixture(params=CODINGS)
def coding(
    request: pytest.FixtureRequest,
) -> tuple[Callable[[], Codec | None], Callable[[], Codec | None]]:
    of_gradients, of_replies = CODINGS[request.param]
    return of_gradients or (lambda: None), of_replies or (lambda: None)


@pytest.fixture
def codec(coding: tuple[Callable[[], Codec | None], Any]) -> Codec | None:
    return coding[0]()


@pytest.fixture(params=[*TRANSPORTS, *SECURED])
def transport(
    request: pytest.FixtureRequest,
    coding: tuple[Callable[[], Codec | None], Callable[[], Codec | None]],
) -> Iterator[tuple[Listener, Connect]]:
    """A listener and a way to connect to it; whatever a test leaves open is closed for it."""
    make, make_replies = coding
    layout = coded(LAYOUT, make(), make_replies())
    listener = open_listener(request.param, layout)
    opened: list[WorkerEnd | ServerEnd] = []

    def connect() -> WorkerEnd:
        end = encoding(knock(listener, HELLO, layout), make(), make_replies())
        opened.append(end)
        return end

    accept = listener.accept

    def remembering(timeout_s: float) -> ServerEnd | None:
        end = accept(timeout_s)
        if end is not None:
            end = decoding(end, make(), pytest.fail, make_replies())
            opened.append(end)
        return end

    listener.accept = remembering  # type: ignore[method-assign]
    yield listener, connect
    while opened:
        opened.pop().close()  # with the end goes its memory
    listener.close()


def push(sequence: int) -> PushHeader:
    return PushHeader(worker=3, incarnation=1, sequence=sequence, base_version=0, batch=0)


def connected(transport: tuple[Listener, Connect]) -> tuple[WorkerEnd, ServerEnd]:
    """Both ends of a connection, the welcome's parameters being 1, 2, 3, 4, 5."""
    listener, connect = transport
    ends: list[WorkerEnd] = []
    thread = threading.Thread(target=lambda: ends.append(connect()))
    thread.start()
    server = listener.accept(T)
    assert server is not None
    assert server.read_hello(T) == HELLO
    server.reply_slot.values.copy_(torch.arange(1.0, 6.0))
    server.welcome(WELCOME)
    thread.join()
    return ends[0], server


def test_the_welcome_brings_the_hello_up_and_parameters_down(
    transport: tuple[Listener, Connect],
) -> None:
    worker, _ = connected(transport)
    assert dataclasses.replace(worker.welcome, num_bytes=0) == WELCOME
    assert worker.reply_slot.values.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("void", [True, False])
def test_a_push_brings_header_gradient_mask_and_buffers(
    transport: tuple[Listener, Connect], codec: Codec | None, void: bool
) -> None:
    worker, server = connected(transport)
    slot = worker.gradient_slot
    slot.values.copy_(torch.arange(5.0))
    slot.mask.copy_(torch.tensor([1, 0]))
    slot.floats.fill_(2.5)
    slot.ints.fill_(2**40)
    header = PushHeader(3, 1, 7, 11, batch=13, epoch=2, shard=4, void=void, masked=not void)
    header.speed = 0.1
    worker.push(header)
    received = server.receive(T)
    assert received is not None and received == header
    payload = server.gradient_slot(received)
    is_coded = codec is not None and not void  # a codec is shown no gradient that is void
    assert payload.values.tolist() == ([0, 1, 2, 3, 4] if is_coded or codec is None else [0] * 5)
    assert payload.mask.tolist() == [1, 0]
    assert payload.floats.tolist() == [2.5] * 3
    assert payload.ints.tolist() == [2**40]


def test_a_reply_brings_parameters_and_buffers(transport: tuple[Listener, Connect]) -> None:
    worker, server = connected(transport)
    worker.push(push(1))
    assert server.receive(T) is not None
    server.reply_slot.values.fill_(8)
    server.reply_slot.floats.fill_(0.5)
    server.reply_slot.ints.fill_(-3)
    header = ReplyHeader(1, version=41, status=REJECTED, epoch=2, fastest=1 / 3)
    server.send(header)
    came = worker.wait_reply(T)
    assert came is not None and dataclasses.replace(came, num_bytes=0) == header
    assert worker.reply_slot.values.tolist() == [8] * 5
    assert worker.reply_slot.floats.tolist() == [0.5] * 3
    assert worker.reply_slot.ints.tolist() == [-3]


def test_a_gradient_outlives_the_writing_of_the_next_one(
    transport: tuple[Listener, Connect],
) -> None:
    """What reply-apply needs: the worker goes on while its last gradient is still being applied."""
    worker, server = connected(transport)
    worker.gradient_slot.values.fill_(1)
    worker.push(push(1))
    first = server.receive(T)
    assert first is not None
    payload = server.gradient_slot(first)
    server.send(ReplyHeader(1, version=1))
    worker.wait_reply(T)
    worker.gradient_slot.values.fill_(2)
    worker.push(push(2))
    assert payload.values.tolist() == [1] * 5
    second = server.receive(T)
    assert second is not None
    assert server.gradient_slot(second).values.tolist() == [2] * 5
    assert payload.values.tolist() == [1] * 5, "until the reply to the second"


def test_waiting_for_nothing_ends_with_the_timeout(transport: tuple[Listener, Connect]) -> None:
    worker, server = connected(transport)
    assert worker.wait_reply(0.01) is None
    assert server.receive(0.01) is None
    listener, _ = transport
    assert listener.accept(0.01) is None


def test_a_worker_that_leaves_is_noticed_after_what_it_pushed(
    transport: tuple[Listener, Connect],
) -> None:
    worker, server = connected(transport)
    worker.push(push(1))
    worker.close()
    worker.close()
    received = server.receive(T)
    assert received is not None and received.sequence == 1
    for _ in range(2):
        with pytest.raises(ConnectionClosedError):
            server.receive(T)
    server.send(ReplyHeader(1, version=1))  # nobody reads it; no harm


def test_a_server_that_leaves_is_noticed_with_its_reason(
    transport: tuple[Listener, Connect],
) -> None:
    worker, server = connected(transport)
    worker.push(push(1))
    server.close("out of memory")
    server.close()
    for _ in range(2):
        with pytest.raises(ConnectionClosedError, match="out of memory"):
            worker.wait_reply(T)


def test_a_push_is_sent_again_over_another_connection_as_it_was(
    transport: tuple[Listener, Connect],
) -> None:
    former, server = connected(transport)
    slot, header = former.gradient_slot, push(1)
    slot.values.copy_(torch.tensor([0.0, 1.5, 0.0, -2.0, 0.25]))
    slot.mask.copy_(torch.tensor([1, 0]))
    slot.floats.fill_(2.5)
    slot.ints.fill_(7)
    former.push(header)
    assert server.receive(T) == header
    server.close("broken")
    worker, server = connected(transport)
    worker.push_again(header, former.pushed_slot)
    assert server.receive(T) == header
    payload = server.gradient_slot(header)
    assert payload.values.tolist() == [0.0, 1.5, 0.0, -2.0, 0.25]
    assert payload.mask.tolist() == [1, 0]
    assert (payload.floats.tolist(), payload.ints.tolist()) == ([2.5] * 3, [7])


def try_to_join(connect: Connect, errors: list[Exception]) -> threading.Thread:
    """Ask to come in, in a thread of its own; what is answered instead of a welcome is kept."""

    def join() -> None:
        try:
            connect()
        except ConnectionClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    return thread


def test_a_refusal_reaches_the_worker(transport: tuple[Listener, Connect]) -> None:
    listener, connect = transport
    errors: list[Exception] = []
    thread = try_to_join(connect, errors)
    server = listener.accept(T)
    assert server is not None
    server.read_hello(T)
    server.refuse("wrong model")
    thread.join()
    assert "wrong model" in str(errors[0])


def test_a_worker_at_the_door_of_a_closing_listener_is_sent_away(
    transport: tuple[Listener, Connect], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once; but TCP can leave one connected to nobody, who then finds out by himself."""
    monkeypatch.setattr(security, "CHALLENGE_TIMEOUT_S", 1.0)
    listener, connect = transport
    errors: list[Exception] = []
    threads = [try_to_join(connect, errors) for _ in range(4)]
    listener.close()
    for thread in threads:
        thread.join(T / 2)
    assert len(errors) == 4


def test_a_closed_listener_takes_nobody_in_but_keeps_its_connections(
    transport: tuple[Listener, Connect],
) -> None:
    worker, server = connected(transport)
    listener, connect = transport
    listener.close()
    listener.close()
    for _ in range(2):
        with pytest.raises(ConnectionClosedError):
            listener.accept(T)
    with pytest.raises(ConnectionClosedError):
        connect()
    worker.push(push(1))
    assert server.receive(T) is not None


def test_a_worker_that_is_through_says_so_and_stays(transport: tuple[Listener, Connect]) -> None:
    worker, server = connected(transport)
    worker.push(push(1))
    assert server.receive(T) is not None
    assert server.finished_at is None
    worker.finish(1)
    assert server.receive(T) is None and server.finished_at == 1
    assert server.is_open()
    server.close("the run is finished", over=True)
    with pytest.raises(ConnectionClosedError, match="is finished") as caught:
        worker.wait_reply(T)
    assert caught.value.over


def test_a_worker_that_leaves_without_a_word_is_not_through(
    transport: tuple[Listener, Connect],
) -> None:
    worker, server = connected(transport)
    worker.close()
    with pytest.raises(ConnectionClosedError, match="left"):
        server.receive(T)
    assert not server.is_open() and server.finished_at is None


def test_a_reply_says_that_it_is_the_last(transport: tuple[Listener, Connect]) -> None:
    worker, server = connected(transport)
    for last in (False, True):
        worker.push(push(1))
        assert server.receive(T) is not None
        server.send(ReplyHeader(1, version=1, last=last))
        reply = worker.wait_reply(T)
        assert reply is not None and reply.last == last


def test_a_goodbye_says_whether_the_run_is_over(transport: tuple[Listener, Connect]) -> None:
    for over in (True, False):
        worker, server = connected(transport)
        server.close("enough", over=over)
        with pytest.raises(ConnectionClosedError, match="enough") as caught:
            worker.wait_reply(T)
        assert caught.value.over == over


def test_an_end_that_is_closed_by_another_thread_wakes_its_reader(
    transport: tuple[Listener, Connect],
) -> None:
    _, server = connected(transport)
    closer = threading.Timer(0.05, lambda: server.close("replaced"))
    closer.start()
    with pytest.raises(ConnectionClosedError):
        server.receive(T)
    closer.join()


def test_a_beat_is_heard_and_is_no_push(transport: tuple[Listener, Connect]) -> None:
    worker, server = connected(transport)
    before = server.num_heard
    worker.beat()
    assert server.receive(0.05) is None
    assert server.num_heard > before
    worker.push(push(1))
    assert server.receive(T) is not None


def test_a_thousand_exchanges_bring_what_was_sent(transport: tuple[Listener, Connect]) -> None:
    worker, server = connected(transport)

    def serve() -> None:
        for number in range(1, 1001):
            while (received := server.receive(T)) is None:
                pass
            assert received.sequence == number
            total = server.gradient_slot(received).values.sum()
            server.reply_slot.values.fill_(float(total))
            server.send(ReplyHeader(number, version=number))

    thread = threading.Thread(target=serve)
    thread.start()
    for number in range(1, 1001):
        worker.gradient_slot.values.fill_(number % 50)
        worker.push(push(number))
        while (reply := worker.wait_reply(T)) is None:
            pass
        assert (reply.sequence, reply.version) == (number, number)
        assert worker.reply_slot.values.tolist() == [5 * (number % 50)] * 5
    thread.join()


def call_end(listener: Listener) -> CallEnd:
    if isinstance(listener, SocketListener):
        return connect_for_calls(listener.address, HELLO, LAYOUT, T, listener.terms)
    assert isinstance(listener, InprocListener)
    return listener.connect_for_calls(HELLO)


def test_calls_carry_messages_and_tensors_both_ways(transport: tuple[Listener, Connect]) -> None:
    listener, _ = transport
    ends: list[CallEnd] = []
    thread = threading.Thread(target=lambda: ends.append(call_end(listener)))
    thread.start()
    server = listener.accept(T)
    assert server is not None
    assert server.read_hello(T) == {**HELLO, "calls": True}

    def answer(message, tensors):  # type: ignore[no-untyped-def]
        return {"got": message}, {name: 2 * tensor for name, tensor in tensors.items()}

    def serve() -> None:
        with contextlib.suppress(ConnectionClosedError):
            while True:
                server.answer_calls(answer, T)

    serving = threading.Thread(target=serve)
    serving.start()
    thread.join()
    (master,) = ends
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([2**40]), "c": torch.ones(0)}
    tensors |= {str(dtype): torch.arange(3).to(dtype) for dtype in DTYPES}
    for number in range(3):
        message, doubled = master.call({"number": number}, tensors, T)
        assert message == {"got": {"number": number}}
        torch.testing.assert_close(doubled, {k: 2 * v for k, v in tensors.items()})
    master.close()
    serving.join()


# -- sockets: what strangers and broken peers do ---------------------------------------------------


@pytest.fixture(params=["unix", "tcp"])
def door(request: pytest.FixtureRequest) -> Iterator[SocketListener]:
    listener = open_listener(request.param, LAYOUT)
    assert isinstance(listener, SocketListener)
    yield listener
    listener.close()


def dial(door: SocketListener) -> socket.socket:
    family, where = _resolve(door.address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.connect(where)
    return sock


def huge(kind: int, length: int) -> bytes:
    return pack(kind, length=length)


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n" + b"x" * 100,
        b"\0" * 200,
        pack(HELLO_FRAME)[:4] + b"\xff\xff" + pack(HELLO_FRAME)[6:],  # another protocol
        pack(HELLO_FRAME)[:7] + b"\xff" + pack(HELLO_FRAME)[8:],  # an unknown status
        pack(PUSH),  # before the hello
        huge(HELLO_FRAME, 2**63),
        huge(HELLO_FRAME, 2**32 - 1),
        huge(HELLO_FRAME, 0),
        huge(HELLO_FRAME, 4) + b"nope",
        huge(HELLO_FRAME, 2) + b"[]",
        pack(HELLO_FRAME)[:30],  # and then nothing more
    ],
)
def test_what_is_no_hello_is_refused_without_any_memory(door: SocketListener, raw: bytes) -> None:
    stranger = dial(door)
    end = door.accept(T)
    assert isinstance(end, SocketServerEnd)
    stranger.sendall(raw)
    stranger.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionClosedError):
        end.read_hello(T)
    assert end._slots is None
    end.close()
    stranger.close()


def test_half_a_hello_is_not_waited_for_for_ever(door: SocketListener) -> None:
    stranger = dial(door)
    end = door.accept(T)
    assert end is not None
    stranger.sendall(pack(HELLO_FRAME)[:30])
    with pytest.raises(ConnectionClosedError, match="no hello within"):
        end.read_hello(0.3)
    end.close()
    stranger.close()


@pytest.mark.parametrize(
    "raw",
    [
        huge(PUSH, 2**63) + b"x" * 100,
        huge(PUSH, 7),
        pack(REPLY),
        pack(CALL),
        pack(99),
        b"garbage" * 20,
        pack(PUSH)[:50],
    ],
)
def test_bad_frames_after_the_handshake_end_the_connection(
    door: SocketListener, raw: bytes
) -> None:
    worker, server = connected((door, lambda: connect(door.address, HELLO, LAYOUT, T)))
    worker._connection._socket.sendall(raw)  # type: ignore[attr-defined]
    worker._connection._socket.shutdown(socket.SHUT_WR)  # type: ignore[attr-defined]
    with pytest.raises(ConnectionClosedError):
        server.receive(T)
    server.close()
    worker.close()


def test_a_frame_that_comes_byte_by_byte_is_whole(door: SocketListener) -> None:
    worker, server = connected((door, lambda: connect(door.address, HELLO, LAYOUT, T)))
    inline = door.address.startswith("tcp")
    body = bytes(4 * 5 + 2 + 4 * 3 + 8) if inline else b""
    sock = worker._connection._socket  # type: ignore[attr-defined]
    for byte in pack_push(push(9), len(body)) + body:
        sock.sendall(bytes([byte]))
    received = server.receive(T)
    assert received is not None and received.sequence == 9
    server.close()
    worker.close()


def test_half_a_push_is_thrown_away(door: SocketListener) -> None:
    worker, server = connected((door, lambda: connect(door.address, HELLO, LAYOUT, T)))
    sock = worker._connection._socket  # type: ignore[attr-defined]
    sock.sendall(pack_push(push(1), 42)[:60])
    sock.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionClosedError):
        server.receive(T)
    worker.close()
    server.close()


def test_after_half_a_frame_no_goodbye_is_sent(door: SocketListener) -> None:
    """The other side would take it for the rest of the frame."""
    worker, server = connected((door, lambda: connect(door.address, HELLO, LAYOUT, T)))
    connection = worker._connection  # type: ignore[attr-defined]
    connection._socket.sendall(pack_push(push(1), 42)[:60])
    connection._torn = True
    worker.close()
    with pytest.raises(ConnectionClosedError):
        server.receive(T)
    server.close()


def test_shared_memory_is_sealed_and_has_no_name() -> None:
    descriptor = make_memory(100)
    try:
        for size in (50, 5000):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        with pytest.raises(ValueError, match="smaller than"):
            map_memory(descriptor, 101)
    finally:
        os.close(descriptor)


def test_without_memfd_an_unlinked_file_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    listener = open_listener("unix", LAYOUT)
    assert isinstance(listener, SocketListener)
    worker, server = connected((listener, lambda: connect(listener.address, HELLO, LAYOUT, T)))
    assert worker.reply_slot.values.tolist() == [1, 2, 3, 4, 5]
    assert not list(Path("/dev/shm").glob("offbeat*"))
    worker.close()
    server.close()
    listener.close()


def test_another_user_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = open_listener("unix", LAYOUT)
    assert isinstance(listener, SocketListener)
    stranger = dial(listener)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert listener.accept(T) is None
    with pytest.raises(ConnectionClosedError, match="another user"):
        connect(listener.address, HELLO, LAYOUT, T)
    stranger.close()
    listener.close()


def test_a_socket_in_a_file_is_removed_with_its_listener(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = SocketListener(f"unix:{path}", LAYOUT)
    worker, server = connected((listener, lambda: connect(listener.address, HELLO, LAYOUT, T)))
    listener.close()
    assert not path.exists()
    worker.close()
    server.close()


@pytest.mark.parametrize("address", ["", "tcp:localhost", "tcp:host:port", "udp:1:2", "unix:"])
def test_what_is_no_address_is_said_to_be_none(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        SocketListener(address, LAYOUT)


@pytest.mark.parametrize("address", ["tcp:127.0.0.1:0", "tcp:[::1]:0"])
def test_without_a_token_only_this_user_comes_in_over_loopback(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        door = SocketListener(address, LAYOUT)
    except ConnectionClosedError:
        pytest.skip("no such address here")
    with contextlib.closing(door):
        ours = dial(door)
        end = door.accept(T)
        assert end is not None
        end.close()
        ours.close()
        monkeypatch.setattr(os, "getuid", lambda: 12345)  # as if the server were another user's
        if Path("/proc/net/tcp").exists() and os.geteuid() != 0:
            theirs = dial(door)
            assert door.accept(T) is None
            theirs.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to be somebody else")
def test_another_user_stays_out() -> None:
    with contextlib.closing(SocketListener("tcp:127.0.0.1:0", LAYOUT)) as door:
        _, where = _resolve(door.address)
        code = "import os, socket; 'a'.encode('idna'); os.setuid(65534); s = socket.socket(); "
        code += f"s.settimeout(10); s.connect({where!r}); print(len(s.recv(100)))"
        stranger = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert door.accept(T) is None
        assert stranger.communicate(timeout=20)[0] == b"0\n"
