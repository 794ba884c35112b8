"""Each protection against strangers, liars and broken connections, where it would be missed first.

Written after every one of them had been taken out by hand to see whether a test would notice.
"""

import contextlib
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import TOKEN, authority, knock, rig, tls_terms, wait_until
from strangers import LAYOUT, Stranger, T, a_server, mac

from offbeat.cli import commands, roles
from offbeat.cluster import hosts
from offbeat.cluster.endpoint import Endpoint
from offbeat.cluster.hosts import Hosts
from offbeat.errors import ConfigError, ConnectionClosedError
from offbeat.roles import acceptor
from offbeat.roles.acceptor import Acceptor
from offbeat.roles.session import Session
from offbeat.run.job import disagreement
from offbeat.transport import wire
from offbeat.transport.base import keep_trying
from offbeat.transport.security import NONCE_BYTES, Terms, load_terms, prepare
from offbeat.transport.sockets import SocketListener, SocketNetwork, connect_for_calls
from offbeat.transport.wire import (
    CALL,
    CHALLENGE,
    FORMAT,
    GOODBYE,
    HELLO,
    PROOF,
    Frame,
    json_frame,
    pack,
)

# -- a server that is not what it says -------------------------------------------------------------


@contextlib.contextmanager
def a_fake(*frames: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Says this to whoever comes, one after the other, and keeps what is answered to each."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = door.accept()
                    with sock, contextlib.suppress(OSError):
                        for frame in frames:
                            sock.sendall(frame)
                            heard.append(sock.recv(FORMAT.size + 64, socket.MSG_WAITALL))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp:127.0.0.1:{door.getsockname()[1]}", heard
        finally:
            door.shutdown(socket.SHUT_RDWR)
            thread.join(T)


def sent_away(address: str, terms: Terms) -> ConnectionClosedError:
    with pytest.raises(ConnectionClosedError) as raised:
        connect_for_calls(address, {}, LAYOUT, T, terms)
    return raised.value


def test_who_pretends_to_know_the_token_is_not_believed() -> None:
    challenge = pack(CHALLENGE, length=NONCE_BYTES, flag=True) + bytes(NONCE_BYTES)
    with a_fake(challenge, pack(PROOF, length=32) + bytes(32)) as (address, heard):
        error = sent_away(address, Terms(token=TOKEN))
        assert error.refused and "does not know the token" in str(error)
        sent_away(address, Terms(token=TOKEN))
        first, second = (answer[FORMAT.size : FORMAT.size + NONCE_BYTES] for answer in heard[::2])
        assert first != second, "each handshake has a nonce of its own"


def test_who_has_proved_nothing_does_not_say_that_the_run_is_over() -> None:
    goodbye = b"".join(json_frame(GOODBYE, {"reason": "go home", "over": True}))
    with a_fake(goodbye) as (address, _):
        assert not sent_away(address, Terms(token=TOKEN)).over


def test_another_version_of_the_protocol_is_not_tried_again() -> None:
    other = bytearray(pack(CHALLENGE, length=NONCE_BYTES))
    other[4] += 1
    with a_fake(bytes(other)) as (address, _):
        error = sent_away(address, Terms())
        assert error.refused and "of the protocol" in str(error)


# -- strangers who take their time -----------------------------------------------------------------


@pytest.mark.parametrize("part", ["header", "proof", "hello"])
def test_who_drips_is_sent_away(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte is progress; but there is one deadline for all of it."""
    monkeypatch.setattr(acceptor, "HELLO_TIMEOUT_S", 0.4)
    with a_server(Terms(token=TOKEN)) as (listener, hellos), Stranger(listener) as stranger:
        nonce = stranger.challenge()
        mine = bytes(NONCE_BYTES)
        slow = pack(PROOF, length=64)
        if part == "proof":
            stranger.socket.sendall(slow)
            slow = bytes(64)
        elif part == "hello":
            assert stranger.prove(mine + mac(b"client", nonce + mine)) == PROOF
            stranger.socket.sendall(pack(HELLO, length=1000))
            slow = b"[" * 1000
        stranger.socket.settimeout(0.1)
        num_sent = 0
        for byte in slow:
            try:
                stranger.socket.sendall(bytes([byte]))
                num_sent += 1
                if not stranger.socket.recv(4096):
                    break
            except TimeoutError:  # not yet
                continue
            except ConnectionError:
                break
        assert num_sent < 60, "ten a second, for much longer than the deadline"
        assert hellos == []


def test_silence_instead_of_tls_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "HELLO_TIMEOUT_S", 0.3)
    with a_server(tls_terms()) as (listener, _), Stranger(listener) as stranger:
        stranger.socket.sendall(b"\x16")
        stranger.wait_for_the_end()


@pytest.mark.parametrize("tls", [True, False])
def test_a_server_that_stops_hangs_up_on_strangers(tls: bool) -> None:
    with contextlib.ExitStack() as stack:
        with a_server(tls_terms() if tls else Terms(token=TOKEN)) as (listener, _):
            stranger = stack.enter_context(Stranger(listener))  # outlives the server
            if tls:
                stranger.socket.sendall(b"\x16")
            else:
                stranger.challenge()
        stranger.wait_for_the_end()


def test_a_hello_that_is_too_long_is_not_read() -> None:
    with a_server(Terms()) as (listener, hellos), Stranger(listener) as stranger:
        stranger.read_frame()
        stranger.socket.sendall(pack(HELLO, length=(1 << 16) + 1))
        stranger.wait_for_the_end()  # nobody waits for the rest of it
        assert hellos == []


def test_the_log_tells_of_strangers_without_growing_with_them() -> None:
    lines: list[str] = []
    log = logging.Logger("test")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    listener = SocketListener("tcp:127.0.0.1:0", LAYOUT, Terms(token=TOKEN))
    greeter = Acceptor(listener, lambda end, hello: None, "test", log)
    greeter.start()
    try:
        for _ in range(12):
            sent_away(listener.address, Terms(token=b"wrong" * 8))
        wait_until(lambda: len(lines) == 2, "the first and the tenth are told")
    finally:
        greeter.close()
        greeter.join()
    assert "(1): somebody without the token" in lines[0] and "(10)" in lines[1]
    assert len(lines) == 2 and TOKEN.decode() not in str(lines)


# -- frames that lie -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [(0, b"GET ", "does not speak Offbeat"), (4, b"\7\0", "version 7"), (7, b"\xff", "status")],
)
def test_a_header_that_is_not_ours_is_named(at: int, value: bytes, message: str) -> None:
    raw = bytearray(pack(CHALLENGE, length=32))
    raw[at : at + len(value)] = value
    with pytest.raises(ConnectionClosedError, match=message):
        Frame(raw)


@pytest.mark.parametrize(
    ("tensors", "length", "message"),
    [
        ('[["a", "float32", [1099511627776]]]', None, "are allowed"),
        ('[["a", "float32", [-1, -5]]]', None, "makes no sense"),
        ("[]", (1 << 20) + 1, "too long"),
    ],
)
def test_a_call_that_is_too_large_is_not_read(
    tensors: str, length: int | None, message: str
) -> None:
    raw = f'{{"message": {{}}, "tensors": {tensors}}}'.encode()
    ours, theirs = socket.socketpair()
    with contextlib.closing(wire.Connection(ours)) as connection, theirs:
        theirs.sendall(raw)
        frame = Frame(pack(CALL, length=length or len(raw)))
        with pytest.raises(ConnectionClosedError, match=message):
            wire.read_call(connection, frame, 1 << 20)


def test_half_a_payload_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "STALL_TIMEOUT_S", 0.1)
    ours, theirs = socket.socketpair()
    with contextlib.closing(wire.Connection(ours)) as connection, theirs:
        theirs.sendall(b"12345")
        with pytest.raises(ConnectionClosedError, match="stopped in mid-frame"):
            connection.read_body(memoryview(bytearray(10)))


@pytest.mark.parametrize("change", [{"num_shards": 3}, {"worker": 1 << 32}, {"incarnation": -1}])
def test_a_hello_that_does_not_fit_is_sent_away(tmp_path: Path, change: dict[str, Any]) -> None:
    agreed = {"agreement": {"fingerprint": "same", "num_shards": 1, "optimizer": ""}}
    with rig(tmp_path, "apply-reply", 1, transport="tcp", server_options=agreed) as made:
        hello = {"worker": 0, "incarnation": 0, "fingerprint": "same", "num_shards": 1, **change}
        with pytest.raises(ConnectionClosedError) as raised:
            knock(made.listener, hello, made.layout)
        assert raised.value.refused
        assert made.server.failure is None
        made.join(0).link.close()


@pytest.mark.parametrize("model", [5, "x", {}, [1, [2]], None])
def test_what_a_stranger_calls_its_model_may_be_anything(model: Any) -> None:
    ours = {"model": [["w", [1], "float32"]], "fingerprint": "x"}
    assert "model" in disagreement(ours, {"model": model, "fingerprint": "y"})


# -- TLS -------------------------------------------------------------------------------------------


def files(folder: Path, ca: Any, name: str) -> tuple[str, str, str]:
    """Certificate, key and authority, as files."""
    issued = ca.issue_cert(name)
    folder.mkdir()
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    return str(folder / "cert.pem"), str(folder / "key.pem"), str(folder / "ca.pem")


def test_terms_out_of_files_check_both_sides(tmp_path: Path) -> None:
    trustme = pytest.importorskip("trustme")
    cert, key, ca = files(tmp_path / "a", authority(), "127.0.0.1")
    _, _, other_ca = files(tmp_path / "b", trustme.CA(), "127.0.0.1")
    elsewhere = files(tmp_path / "c", authority(), "elsewhere.example")
    with a_server(load_terms({}, None, cert, key)) as (listener, hellos):
        error = sent_away(listener.address, load_terms({}, tls_ca=other_ca))
        assert error.refused and "certificate" in str(error)
        assert hellos == []
    with a_server(load_terms({}, None, *elsewhere[:2])) as (listener, hellos):
        assert "mismatch" in str(sent_away(listener.address, load_terms({}, tls_ca=ca)))
        assert hellos == []
    with a_server(load_terms({}, None, cert, key, ca)) as (listener, hellos):
        error = sent_away(listener.address, load_terms({}, tls_ca=ca))  # shows no certificate
        assert error.refused and "no TLS connection" in str(error)
        assert hellos == []
    both = load_terms({}, None, cert, key, ca)
    for context in (both.server_tls, both.client_tls):
        assert context is not None and context.minimum_version == ssl.TLSVersion.TLSv1_3


def test_a_tls_handshake_that_breaks_off_is_tried_again() -> None:
    with a_fake(b"\x16\x03\x03\xff\xff" + bytes(99)) as (address, _):
        client = Terms(token=TOKEN, client_tls=ssl.create_default_context())
        error = sent_away(address, client)
        assert "no TLS connection" in str(error) and not error.refused


def test_tls_that_the_other_side_does_not_speak_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "HELLO_TIMEOUT_S", 0.3)
    with a_server(Terms(token=TOKEN)) as (listener, _):
        error = sent_away(listener.address, tls_terms())
        assert error.refused and "the server does not use TLS" in str(error)
    with a_server(tls_terms()) as (listener, _):
        assert "if the server uses TLS" in str(sent_away(listener.address, Terms(token=TOKEN)))


def test_a_server_with_an_authority_alone_does_not_start_without_tls(tmp_path: Path) -> None:
    _, _, ca = files(tmp_path / "a", authority(), "127.0.0.1")
    where = Hosts(ps=("127.0.0.1:7000",), worker=("127.0.0.1:7001",))
    endpoint = Endpoint(hosts=where, terms=load_terms({}, tls_ca=ca), start_timeout_s=0.1)
    with pytest.raises(ConfigError, match="needs a certificate"):
        roles.serve(endpoint, 0)


# -- addresses, sockets, pauses, signals -----------------------------------------------------------


def test_a_name_of_which_one_address_is_not_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(0, 0, 0, "", ("127.0.0.1", 0)), (0, 0, 0, "", ("10.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
    assert not hosts.is_loopback("both")


@pytest.mark.parametrize(
    ("bind", "found"),
    [
        ("::1", ("::1", 7)),
        ("[::1]", ("::1", 7)),
        ("[::1]:9", ("::1", 9)),
        ("0.0.0.0", ("0.0.0.0", 7)),
        ("host:9", ("host", 9)),
        ("host", ("host", 7)),
    ],
)
def test_where_to_listen_may_be_said_with_a_port_or_without(
    bind: str, found: tuple[str, int]
) -> None:
    assert roles.split_bind(bind, 7) == found


def test_an_infinite_timeout_fits_into_a_socket() -> None:
    with socket.socket() as sock:
        prepare(sock, Terms(peer_timeout_s=float("inf")))
        prepare(sock, Terms(peer_timeout_s=7.0))
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


class _Clock:
    """An event that nobody sets, and a clock that waiting for it moves."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def wait(self, pause_s: float) -> bool:
        self.pauses.append(pause_s)
        return False

    def now(self) -> float:
        return sum(self.pauses)


def test_pauses_grow_and_have_a_bound_and_an_end() -> None:
    clock = _Clock()

    def fail(**how: bool) -> None:
        error = ConnectionClosedError("no", **how)
        never: Any = clock
        with pytest.raises(ConnectionClosedError):
            keep_trying(lambda: raise_(error), 10.0, never, clock.now)

    fail()
    assert clock.pauses[:4] == [0.02, 0.04, 0.08, 0.16] and max(clock.pauses) == 1.0
    assert 10.0 < sum(clock.pauses) < 11.5
    for how in ("over", "refused"):
        clock.pauses.clear()
        fail(**{how: True})
        assert clock.pauses == [], "who was sent away does not come again"


def raise_(error: Exception) -> None:
    raise error


def test_who_waits_for_a_server_says_so_once_and_when_it_is_there() -> None:
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
    network = SocketNetwork([f"tcp:{where}"], say=lines.append)
    for _ in range(2):
        with pytest.raises(ConnectionClosedError):
            network.connect_for_calls(0, {}, LAYOUT, T)
    assert lines == [f"waiting for server 0 at {where}"]
    with network.waiting(0):
        pass
    assert lines[1:] == ["server 0 is here"]
    for how in ("over", "refused"):
        with pytest.raises(ConnectionClosedError), network.waiting(0):
            raise ConnectionClosedError("go", **{how: True})
    assert len(lines) == 2, "nobody is waited for who sent us away"


@pytest.mark.parametrize("ignored", [True, False])
def test_a_closed_terminal_ends_a_role_unless_nohup(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with roles.console("x") as (_, stop):
            assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) == ignored
            if not ignored:
                signal.raise_signal(signal.SIGHUP)
                signal.raise_signal(signal.SIGTERM)  # which came along with it
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
            assert stop.is_set() is not ignored
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("ignored", [True, False])
def test_a_closed_terminal_ends_a_run_unless_nohup(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with commands.signals_as_ctrl_c():
            assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) == ignored
            if not ignored:
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGHUP)
                signal.raise_signal(signal.SIGTERM)  # which came along with it
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, before)


# -- budgets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("discipline", ["apply-reply", "reply-apply", "lock-free", "bounded"])
def test_a_server_takes_no_more_than_its_budget(tmp_path: Path, discipline: str) -> None:
    with rig(tmp_path, discipline, 2, ledger_options={"budget": 3}) as made:
        first, second = made.join_all(2)
        for hand in (first, second):
            hand.push(1.0)
        for hand in (first, second):
            hand.reply()
        first.push(1.0)
        wait_until(lambda: made.shard.version == 3, "the last one is in")
        second.push(1.0)
        with pytest.raises(ConnectionClosedError) as raised:
            second.reply()
        assert raised.value.over
        assert made.shard.version == 3 and made.shard.params.tolist() == [-3.0] * 4
        first.link.close()
        second.link.close()


def test_what_was_accepted_beside_the_last_one_is_not_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, both = Session.send_reply, threading.Barrier(2)

    def send_together(session: Session, clock: Callable[[], float]) -> None:
        send(session, clock)
        both.wait(T)  # both were answered before either is applied

    monkeypatch.setattr(Session, "send_reply", send_together)
    with rig(tmp_path, "reply-apply", 2, ledger_options={"budget": 1}) as made:
        hands = made.join_all(2)
        for hand in hands:
            hand.push(1.0)
        for hand in hands:
            hand.reply()
            hand.link.close()
        assert made.drain()
        assert made.shard.version == 1 and made.shard.params.tolist() == [-1.0] * 4
        assert sorted(push["outcome"] for push in made.pushes()) == ["applied", "dropped"]


def test_only_who_is_away_is_left_out(tmp_path: Path) -> None:
    with rig(tmp_path, "sync", 3) as made:
        here, other = made.join(0), made.join(1)
        made.server.answer({"ask": "leave_out", "workers": [1, 2]}, {})
        here.push(1.0)
        assert not here.has_reply(), "worker 1 is here, and waited for"
        other.push(1.0)
        assert here.reply().version == other.reply().version == 1
        here.link.close()
        other.link.close()
