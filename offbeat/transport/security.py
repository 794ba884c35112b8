"""On what terms two ends of a TCP connection meet: a token that both know, TLS, how long a silence.

Nothing here trusts anybody: until the proof is given the other end is a stranger, of whom frames of
fixed sizes are read, within a deadline. Unix sockets need none of it; the system says who is there.

    server -> client    challenge: a nonce; the flag says that a token is asked for
    client -> server    proof: a nonce, HMAC-SHA256(token, "client", both nonces)
    server -> client    proof: HMAC-SHA256(token, "server", both nonces)
"""

import errno
import hashlib
import hmac
import secrets
import select
import socket
import ssl
import threading
import time

from offbeat.errors import ConnectionClosedError
from offbeat.transport.terms import OPEN, TOKEN_VARIABLE, Terms, load_terms
from offbeat.transport.wire import (
    CHALLENGE,
    PROOF,
    REFUSE,
    WAKE_S,
    Connection,
    Frame,
    expect,
    json_frame,
    pack,
)

__all__ = [
    "NONCE_BYTES",
    "OPEN",
    "TOKEN_VARIABLE",
    "Terms",
    "TlsSocket",
    "admit",
    "introduce",
    "load_terms",
    "prepare",
]
CHALLENGE_TIMEOUT_S = 15.0
"""How long a server may take to speak at all. One that closes its door in the same instant may have
left us connected to nobody: that is not waited for as a welcome is."""
NONCE_BYTES = MAC_BYTES = 32
MAX_TIMEOUT_S, KEEPALIVE_EVERY_S = 32_000, 5
RECORD_BYTES = 16384
"""The most that TLS puts into one record."""
WRONG_TOKEN = "the token is not the one of this server"


def prepare(sock: socket.socket, terms: Terms) -> None:
    """Set up a TCP socket."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = int(min(max(1.0, terms.peer_timeout_s), MAX_TIMEOUT_S))
    for name, value in (
        ("TCP_USER_TIMEOUT", 1000 * seconds),
        ("TCP_KEEPIDLE", seconds),
        ("TCP_KEEPINTVL", KEEPALIVE_EVERY_S),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def admit(connection: Connection, terms: Terms, timeout_s: float) -> None:
    """The server's side: find out whether the other end may speak. Raises ConnectionClosedError
    where not."""
    deadline_s = time.monotonic() + timeout_s
    if terms.server_tls is not None:
        _secure(connection, terms.server_tls, timeout_s, None)
    nonce = secrets.token_bytes(NONCE_BYTES)
    asks = terms.token is not None
    connection.send(pack(CHALLENGE, length=NONCE_BYTES, flag=asks), nonce)
    if terms.token is None:
        return
    frame = connection.receive(max(0.0, deadline_s - time.monotonic()))
    if frame is None or frame.type != PROOF or frame.length != NONCE_BYTES + MAC_BYTES:
        raise connection.lost("no proof")  # of a stranger nothing else is read
    theirs = _read(connection, frame.length, max(0.0, deadline_s - time.monotonic()))
    nonces = nonce + theirs[:NONCE_BYTES]
    if not hmac.compare_digest(theirs[NONCE_BYTES:], _mac(terms.token, b"client", nonces)):
        connection.close(*json_frame(REFUSE, {"reason": WRONG_TOKEN}))
        raise ConnectionClosedError("somebody without the token", refused=True)
    connection.send(pack(PROOF, length=MAC_BYTES), _mac(terms.token, b"server", nonces))


def introduce(connection: Connection, terms: Terms, timeout_s: float, host: str) -> None:
    """The client's side: prove to the server that we may speak, and have it prove itself. Raises
    ConnectionClosedError where that fails."""
    try:
        _introduce(connection, terms, min(timeout_s, CHALLENGE_TIMEOUT_S), host)
    except ConnectionClosedError as error:
        if not error.over:
            raise
        # whether a run is over is not for somebody to say who has proved nothing
        raise ConnectionClosedError(str(error)) from error


def _introduce(connection: Connection, terms: Terms, timeout_s: float, host: str) -> None:
    if terms.client_tls is not None:
        _secure(connection, terms.client_tls, timeout_s, host)
    theirs, asks = _read_challenge(connection, terms, timeout_s)
    if terms.token is None:
        if asks:
            how = f"give it by {TOKEN_VARIABLE} or --token-file"
            raise connection.lost(f"the server asks for a token: {how}", refused=True)
        return
    if not asks:
        raise connection.lost("the server has no token to prove itself with", refused=True)
    nonce = secrets.token_bytes(NONCE_BYTES)
    nonces = theirs + nonce
    proof = nonce + _mac(terms.token, b"client", nonces)
    connection.send(pack(PROOF, length=len(proof)), proof)
    frame = _receive(connection, timeout_s)
    expect(connection, frame, PROOF, MAC_BYTES)
    answer = _read(connection, MAC_BYTES, timeout_s)
    if not hmac.compare_digest(answer, _mac(terms.token, b"server", nonces)):
        raise connection.lost("the server does not know the token", refused=True)


def _read_challenge(connection: Connection, terms: Terms, timeout_s: float) -> tuple[bytes, bool]:
    """The server's nonce, and whether it asks for a token."""
    try:
        frame = _receive(connection, timeout_s)
    except ConnectionClosedError as error:
        if terms.client_tls is not None and "alert" in str(error).lower():
            # TLS has told us that the server does not take our certificate, or wants to see one
            raise ConnectionClosedError(f"no TLS connection: {error}", refused=True) from error
        if terms.client_tls is None and not (error.refused or error.over):
            raise ConnectionClosedError(
                f"{error}; if the server uses TLS, give --tls-ca"
            ) from error
        raise
    expect(connection, frame, CHALLENGE, NONCE_BYTES)
    return _read(connection, NONCE_BYTES, timeout_s), frame.flag


def _receive(connection: Connection, timeout_s: float) -> Frame:
    frame = connection.receive(timeout_s)
    if frame is None:
        raise connection.lost(f"no word from the server within {timeout_s:g} s")
    return frame


def _read(connection: Connection, length: int, within_s: float) -> bytes:
    raw = bytearray(length)
    connection.read_body(memoryview(raw), within_s=within_s)
    return bytes(raw)


def _mac(token: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.new(token, side + nonces, hashlib.sha256).digest()


def _secure(
    connection: Connection, context: ssl.SSLContext, timeout_s: float, host: str | None
) -> None:
    """Have TLS from here on. `host`: whose certificate is wanted; None: the server's side."""
    try:
        connection.wrap(
            lambda sock: TlsSocket(sock, context, host), lambda tls: tls.handshake(timeout_s)
        )
    except OSError as error:
        refused = isinstance(error, ssl.SSLCertVerificationError)
        reason = getattr(error, "verify_message", None) or str(error)
        if host is not None and getattr(error, "reason", "") == "WRONG_VERSION_NUMBER":
            refused = True
            reason = "the server does not use TLS; leave --tls-ca out, or give it a certificate"
        raise connection.lost(f"no TLS connection: {reason}", refused=refused) from error


def _close_half_made(error: OSError) -> None:
    """Where the other end is gone, wrap_socket leaves the socket that it was making open, and only
    the frames that the error came through still know it."""
    trace = error.__traceback__
    while trace is not None:
        made = trace.tb_frame.f_locals.get("self")
        if isinstance(made, ssl.SSLSocket):
            made.close()
        trace = trace.tb_next


class TlsSocket:
    """What `Connection` needs of a socket, over TLS.

    OpenSSL lets one thread at a time at a connection; here one reads while another sends. So the
    socket does not block, a lock is held for as long as a call takes, and waiting is done outside.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str | None) -> None:
        sock.setblocking(False)
        try:
            self._tls = context.wrap_socket(
                sock,
                server_side=host is None,
                server_hostname=host,
                do_handshake_on_connect=False,
            )
        except OSError as error:
            _close_half_made(error)
            raise
        self._lock = threading.Lock()
        self._unfinished = b""
        """A record that the network did not take yet: nothing else may be sent before it."""
        self._its_owner_waits = False

    def handshake(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            try:
                self._tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)
        raise TimeoutError(f"not within {timeout_s:g} s")

    def fileno(self) -> int:
        return self._tls.fileno()

    def recv_into(self, target: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """Raises BlockingIOError when nothing came for a while."""
        for last in (False, True):
            with self._lock:
                try:
                    return self._tls.recv_into(target)
                except ssl.SSLWantReadError:
                    wanted = select.POLLIN
                except ssl.SSLWantWriteError:
                    wanted = select.POLLOUT
                except ssl.SSLEOFError:
                    return 0
            if last or not self._wait(wanted):
                raise BlockingIOError
        raise AssertionError

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        """How much was taken. Raises BlockingIOError when nothing was for a while: then the same
        data has to come again. With MSG_DONTWAIT a record that cannot leave at once counts as
        taken, and leaves before the next one."""
        wait = not flags & socket.MSG_DONTWAIT
        for last in (False, True):
            with self._lock:
                if self._unfinished and not self._its_owner_waits and not self._try(b""):
                    pass  # an earlier record, which nobody waits for, is still in the way
                else:
                    chunk = self._unfinished or bytes(memoryview(data)[:RECORD_BYTES])
                    if self._try(chunk):
                        return len(chunk)
                    self._its_owner_waits = wait
                    if not wait:
                        return len(chunk)
            if not wait or last or not self._wait(select.POLLOUT):
                raise BlockingIOError
        raise AssertionError

    def _try(self, chunk: bytes) -> bool:
        """Have a record leave; where the network takes none it is kept for the next attempt."""
        chunk = chunk or self._unfinished
        try:
            self._tls.send(chunk)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            self._unfinished = chunk
            return False
        self._unfinished = b""
        self._its_owner_waits = False
        return True

    def _wait(self, events: int) -> bool:
        if (descriptor := self._tls.fileno()) < 0:
            raise OSError(errno.EBADF, "this end was closed")
        poll = select.poll()
        poll.register(descriptor, events)
        return bool(poll.poll(1e3 * WAKE_S))

    def shutdown(self, how: int) -> None:
        """Of the socket underneath: another thread may be at work with TLS's state."""
        socket.socket.shutdown(self._tls, how)

    def close(self) -> None:
        with self._lock:
            self._tls.close()
