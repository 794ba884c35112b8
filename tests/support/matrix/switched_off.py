"""What guards against the faults of wire and files, switched off: their rows have to notice.

Each is a Protection: entered, the program lacks it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from simulated.bugs import BUGS, Bug

from offbeat.data import fetch
from offbeat.data import files as data_files
from offbeat.errors import ConnectionClosedError
from offbeat.ledger import Ledger
from offbeat.roles import acceptor, session
from offbeat.roles.server import Server
from offbeat.run import checkpoint
from offbeat.transport import base, security, sockets, wire

from .row import Protection

Given = Any


def _off(name: str, *patches: tuple[Any, str, Any]) -> Protection:
    return Bug(name, patches).planted


def _read_any_length(connection: wire.Connection, frame: wire.Frame, slot: base.Slot) -> None:
    connection.read_body(*sockets._parts(slot))


_push, _read_some, _frame = Ledger.push, wire.Connection._read_some, wire.Frame.__init__


def _push_of_any_epoch(ledger: Ledger, record: Given, version: int) -> Given:
    record.epoch = ledger.epoch
    return _push(ledger, record, version)


def _zeros_at_the_end(connection: wire.Connection, target: memoryview, flags: int = 0) -> int:
    """What was cut off is taken for zeros, where it is in the midst of a frame."""
    try:
        return _read_some(connection, target, flags)
    except ConnectionClosedError:
        if len(target) == wire.FORMAT.size:
            raise
        target[:] = bytes(len(target))
        return len(target)


def _any_frame(frame: wire.Frame, raw: bytes | bytearray) -> None:
    """Of any protocol's version."""
    other = bytearray(raw)
    other[4:6] = wire.PROTOCOL.to_bytes(2, "little")
    _frame(frame, other)


def _read_any_json(
    connection: wire.Connection, length: int, most_bytes: int = 0, within_s: float = 1e9
) -> Given:
    """Whatever its length: room for it first."""
    raw = bytearray(min(length, 1 << 24))  # more would not tell more
    connection.read_body(memoryview(raw), within_s=within_s)
    return wire.json.loads(raw)


def _welcome_all(*given: Given) -> bool:
    return True


def _nothing(*given: Given, **named: Given) -> None:
    return


@contextlib.contextmanager
def no_deadline() -> Iterator[None]:
    before = acceptor.HELLO_TIMEOUT_S
    acceptor.HELLO_TIMEOUT_S = 1e6
    try:
        yield
    finally:
        acceptor.HELLO_TIMEOUT_S = before


DEDUPE = BUGS["dedupe off"].planted
EPOCH = _off("epochs", (Ledger, "push", _push_of_any_epoch))
LENGTHS = _off("lengths compared", (sockets, "_read_payload", _read_any_length))
WHOLE_FRAMES = _off("whole frames", (wire.Connection, "_read_some", _zeros_at_the_end))
FINITE = _off("finite check", (session, "usable", _welcome_all))
AGREEMENT = _off("agreement", (Server, "_is_welcome", _welcome_all))
PROTOCOL = _off("protocol's version", (wire.Frame, "__init__", _any_frame))
LENGTH_CAP = _off("length cap", (wire.Connection, "read_json", _read_any_json))
TOKEN = _off("token", (security.hmac, "compare_digest", _welcome_all))
NONCE = _off("nonces", (security.secrets, "token_bytes", bytes))
STRANGERS = _off("cap of strangers", (acceptor, "MAX_STRANGERS", 1 << 30))
STALL = _off("stall timeout", (wire, "STALL_TIMEOUT_S", 1e6))
DATA_DIGEST = _off("digest of data", (fetch, "_compare", _nothing))
LABELS = _off("labels", (data_files, "_check_labels", _nothing))
DIGEST = _off("digest", (checkpoint, "_sha256", lambda raw: ""))
