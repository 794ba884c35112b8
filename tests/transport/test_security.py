"""Who may come in: the token, TLS, and what strangers get to see and to use up."""

import contextlib
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rig import TOKEN, authority, knock, tls_terms, wait_until
from strangers import LAYOUT, Stranger, T, a_server, mac

from offbeat.errors import ConfigError, ConnectionClosedError
from offbeat.roles import acceptor
from offbeat.transport.security import NONCE_BYTES, TOKEN_VARIABLE, Terms, TlsSocket, load_terms
from offbeat.transport.sockets import SocketListener, connect_for_calls
from offbeat.transport.wire import (
    CHALLENGE,
    GOODBYE,
    HELLO,
    PROOF,
    REFUSE,
    pack,
)


def come(listener: SocketListener, terms: Terms) -> str:
    """Try to come in with these terms; returns what one is told."""
    with pytest.raises(ConnectionClosedError) as raised:
        connect_for_calls(listener.address, {"who": 1}, LAYOUT, T, terms)
    return str(raised.value)


def test_who_knows_the_token_comes_in() -> None:
    with a_server(Terms(token=TOKEN)) as (listener, hellos):
        assert come(listener, Terms(token=TOKEN)) == "that will do"
        assert hellos == [{"who": 1, "calls": True}]


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (TOKEN, b"something else entirely", "the token is not the one"),
        (TOKEN, None, "asks for a token"),
        (None, TOKEN, "no token to prove itself"),
    ],
)
def test_who_does_not_stays_out(ours: bytes | None, theirs: bytes | None, message: str) -> None:
    with a_server(Terms(token=ours)) as (listener, hellos):
        said = come(listener, Terms(token=theirs))
        assert message in said
        assert hellos == []
        for token in (ours, theirs):
            assert token is None or token.decode() not in said
        assert come(listener, Terms(token=ours)) == "that will do", "the server goes on"


def test_a_token_is_not_shown_by_accident() -> None:
    assert TOKEN.decode() not in repr(Terms(token=TOKEN))


def test_a_handshake_cannot_be_replayed() -> None:
    with a_server(Terms(token=TOKEN)) as (listener, hellos):
        mine = bytes(NONCE_BYTES)
        with Stranger(listener) as first:
            overheard = mine + mac(b"client", first.challenge() + mine)
            assert first.prove(overheard) == PROOF
        with Stranger(listener) as second:
            second.challenge()
            assert second.prove(overheard) == REFUSE
        assert hellos == []


def test_a_challenge_cannot_be_reflected() -> None:
    """What the server itself proves, in another connection, is no proof of a client."""
    with a_server(Terms(token=TOKEN)) as (listener, hellos):
        with Stranger(listener) as other:
            nonce = other.challenge()
            assert other.prove(nonce + mac(b"server", nonce + nonce)) == REFUSE
        assert hellos == []


@pytest.mark.parametrize(
    "raw",
    [
        pack(HELLO, length=2) + b"{}",
        pack(PROOF, length=0),
        pack(PROOF, length=2**62),
        pack(PROOF, length=63) + bytes(63),
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b" " * 80,
    ],
)
def test_nothing_of_a_stranger_is_read_before_the_proof(raw: bytes) -> None:
    with a_server(Terms(token=TOKEN)) as (listener, hellos):
        with Stranger(listener) as stranger:
            stranger.challenge()
            stranger.socket.sendall(raw)
            stranger.wait_for_the_end()
        assert hellos == []
        assert come(listener, Terms(token=TOKEN)) == "that will do"


def test_a_silent_stranger_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "HELLO_TIMEOUT_S", 0.3)
    with a_server(Terms(token=TOKEN)) as (listener, _), Stranger(listener) as stranger:
        stranger.challenge()
        stranger.wait_for_the_end()


@pytest.mark.parametrize("kind", [GOODBYE, REFUSE])
def test_a_stranger_that_drips_is_sent_away(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte is progress; but there is one deadline for all of it."""
    monkeypatch.setattr(acceptor, "HELLO_TIMEOUT_S", 0.5)
    with a_server(Terms(token=TOKEN)) as (listener, hellos), Stranger(listener) as stranger:
        stranger.challenge()
        began_s = time.monotonic()
        with contextlib.suppress(ConnectionError):
            stranger.socket.sendall(pack(kind, length=1 << 20))
            while time.monotonic() - began_s < 8:
                stranger.socket.sendall(b"[")
                time.sleep(0.05)
        assert time.monotonic() - began_s < 8
        assert hellos == []


def test_of_strangers_there_are_never_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "MAX_STRANGERS", 3)
    with a_server(Terms(token=TOKEN)) as (listener, hellos), contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(Stranger(listener)) for _ in range(3)]
        for stranger in waiting:
            stranger.challenge()
        with Stranger(listener) as one_more:
            frame, _ = one_more.read_frame()
            assert frame.type != CHALLENGE
        waiting[0].socket.close()
        wait_until(
            lambda: come(listener, Terms(token=TOKEN)) == "that will do", "there is room again"
        )
        assert len(hellos) == 1


# -- TLS -------------------------------------------------------------------------------------------


def client_of(trusted: Any) -> Terms:
    context = ssl.create_default_context()
    trusted.configure_trust(context)
    return Terms(token=TOKEN, client_tls=context)


def test_a_server_with_another_authority_is_not_believed() -> None:
    trustme = pytest.importorskip("trustme")
    with a_server(tls_terms()) as (listener, hellos):
        assert "certificate" in come(listener, client_of(trustme.CA()))
        assert come(listener, client_of(authority())) == "that will do"
        assert len(hellos) == 1


def test_a_certificate_for_another_host_is_not_believed() -> None:
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority().issue_cert("elsewhere.example").configure_cert(server_tls)
    with a_server(Terms(token=TOKEN, server_tls=server_tls)) as (listener, hellos):
        said = come(listener, client_of(authority()))
        assert "IP address mismatch" in said
        assert hellos == []


@pytest.mark.parametrize(("ours", "theirs"), [(True, False), (False, True)])
def test_tls_on_one_side_only_does_not_work(
    ours: bool, theirs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "HELLO_TIMEOUT_S", 1.0)
    plain, tls = Terms(token=TOKEN), tls_terms()
    with a_server(tls if ours else plain) as (listener, hellos):
        come(listener, tls if theirs else plain)
        assert hellos == []


def test_files_for_tls(tmp_path: Path) -> None:
    ca = authority()
    issued = ca.issue_cert("127.0.0.1")
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    cert, key, trusted = (str(tmp_path / f"{name}.pem") for name in ("cert", "key", "ca"))
    both = load_terms({}, None, cert, key, trusted)
    with a_server(both) as (listener, _):
        assert come(listener, both) == "that will do"
        without = load_terms({}, None, None, None, trusted)
        assert "no TLS connection" in come(listener, without), "it wants to see a certificate, too"
    with a_server(load_terms({}, None, cert, key)) as (listener, hellos):
        assert come(listener, without) == "that will do"
        assert len(hellos) == 1
    with pytest.raises(ConfigError, match="for TLS"):
        load_terms({}, None, cert, str(tmp_path / "none.pem"), trusted)
    (tmp_path / "bad.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="for TLS"):
        load_terms({}, None, str(tmp_path / "bad.pem"), key, trusted)


# -- where a token comes from ----------------------------------------------------------------------


def test_a_token_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token.txt"
    file.write_text("  a token of some length \n")
    assert load_terms({}, str(file)).token == b"a token of some length"
    environment = {TOKEN_VARIABLE: "another token, in the environment"}
    assert load_terms(environment).token == b"another token, in the environment"
    assert load_terms(environment, str(file)).token == b"a token of some length"
    assert load_terms({}).token is None


def test_a_bad_token_is_refused_and_not_repeated(tmp_path: Path) -> None:
    file = tmp_path / "token.txt"
    for call in (
        lambda: load_terms({TOKEN_VARIABLE: "short"}),
        lambda: load_terms({TOKEN_VARIABLE: ""}),
        lambda: load_terms({}, str(file)),
    ):
        file.write_text("short")
        check_refused(call)
    file.write_bytes(b"\xff\xfe" * 20)
    check_refused(lambda: load_terms({}, str(file)))


def check_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as raised:
        call()
    assert "short" not in str(raised.value).replace("too short", "")


def test_workers_come_in_over_tls_while_strangers_knock() -> None:
    listener = SocketListener("tcp:127.0.0.1:0", LAYOUT, tls_terms())
    threads: list[threading.Thread] = []

    def accept() -> None:
        end = listener.accept(T)
        assert end is not None
        with contextlib.suppress(ConnectionClosedError):
            end.read_hello(T)
            end.refuse("hello")
        end.close()

    for _ in range(2):
        threads.append(threading.Thread(target=accept))
        threads[-1].start()
    with Stranger(listener) as stranger:
        stranger.socket.sendall(b"\x16\x03\x01garbage")
        with pytest.raises(ConnectionClosedError, match="hello"):
            knock(listener, {}, LAYOUT)
    for thread in threads:
        thread.join()
    listener.close()


@pytest.mark.parametrize("server_tls", [True, False])
def test_a_server_that_stops_does_not_wait_for_a_silent_stranger(server_tls: bool) -> None:
    terms = tls_terms() if server_tls else Terms(token=TOKEN)
    with a_server(terms) as (listener, hellos), Stranger(listener) as stranger:
        if not server_tls:
            stranger.challenge()
        else:
            stranger.socket.sendall(b"\x16")  # half of TLS's first word
        closing_s = time.monotonic()
    assert time.monotonic() - closing_s < acceptor.HELLO_TIMEOUT_S / 2
    assert hellos == []


def test_a_socket_whose_other_end_is_gone_is_closed_and_not_left_half_made() -> None:
    """The socket that wrap_socket was making would else be open until it is collected."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()  # at once, as when a process is killed
    assert select.select([ours], [], [], 5)[0], "it has heard of it"
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with ours, pytest.raises(OSError, match="reset"):
        TlsSocket(ours, ssl.create_default_context(), "localhost")
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors - 1
