"""Those who knock at a server's door and speak its protocol by hand."""

import contextlib
import hashlib
import hmac
import logging
import socket
from collections.abc import Iterator
from typing import Any

from rig import TOKEN

from offbeat.errors import ConnectionClosedError
from offbeat.roles.acceptor import Acceptor
from offbeat.transport.base import Layout, ServerEnd
from offbeat.transport.security import NONCE_BYTES, Terms
from offbeat.transport.sockets import SocketListener, connect_for_calls
from offbeat.transport.wire import CHALLENGE, FORMAT, PROOF, Frame, pack

LAYOUT = Layout(num_elements=5, num_tensors=2)
T = 10.0


@contextlib.contextmanager
def a_server(
    terms: Terms, log: logging.Logger | None = None
) -> Iterator[tuple[SocketListener, list[Any]]]:
    """A listener whose visitors are greeted; the hellos of those who came in are collected."""
    listener = SocketListener("tcp:127.0.0.1:0", LAYOUT, terms)
    hellos: list[Any] = []

    def serve(end: ServerEnd, hello: Any) -> None:
        hellos.append(hello)
        end.refuse("that will do")

    greeter = Acceptor(listener, serve, "test", log or logging.Logger("test"))
    greeter.start()
    try:
        yield listener, hellos
    finally:
        greeter.close()
        greeter.join()


def told(address: str, terms: Terms) -> ConnectionClosedError | None:
    """Try to come in with these terms; returns what one is told."""
    try:
        connect_for_calls(address, {"who": 1}, LAYOUT, T, terms).close()
    except ConnectionClosedError as error:
        return error
    return None


class Stranger:
    """Speaks the protocol by hand."""

    def __init__(self, listener: SocketListener) -> None:
        host, _, port = listener.address.removeprefix("tcp:").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), T)

    def read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            more = self.socket.recv(count - len(found))
            if not more:
                break
            found += more
        return found

    def read_frame(self) -> tuple[Frame, bytes]:
        frame = Frame(self.read(FORMAT.size))
        return frame, self.read(frame.length)

    def challenge(self) -> bytes:
        frame, nonce = self.read_frame()
        assert frame.type == CHALLENGE and frame.flag and len(nonce) == NONCE_BYTES
        return nonce

    def wait_for_the_end(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            while self.socket.recv(4096):
                pass

    def say(self, raw: bytes) -> bytes:
        """Everything, then nothing more; returns all that was answered until the server hung up."""
        said = bytearray()
        with contextlib.suppress(ConnectionError):  # it may hang up long before
            self.socket.sendall(raw)
        with contextlib.suppress(OSError):  # it has
            self.socket.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while more := self.socket.recv(1 << 16):
                said += more
        return bytes(said)

    def prove(self, proof: bytes) -> int:
        """The type of what is answered."""
        self.socket.sendall(pack(PROOF, length=len(proof)) + proof)
        return self.read_frame()[0].type

    def __enter__(self) -> "Stranger":
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()


def mac(side: bytes, nonces: bytes, token: bytes = TOKEN) -> bytes:
    return hmac.new(token, side + nonces, hashlib.sha256).digest()
