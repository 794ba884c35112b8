"""Connections between processes: Unix sockets with payloads in shared memory, TCP with them inline.

One protocol, two ways for the payload. An address says which: `unix:@name` (Linux's abstract
namespace: no file), `unix:/short/path`, or `tcp:host:port`.

    listener = SocketListener("tcp:127.0.0.1:0", layout);  listener.address
    link = connect(listener.address, hello, layout, timeout_s)

On one machine the server makes a connection's memory, seals it, and passes its descriptor with the
welcome. The headers of pushes and replies lie there too (boxes.py), and the socket wakes whoever
sleeps. A peer that dies is an end of file, at once, either way.
"""

import contextlib
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from offbeat.errors import ConfigError, ConnectionClosedError
from offbeat.memory import aligned, make_memory, map_memory, view
from offbeat.rows import Rows
from offbeat.transport.base import (
    Answer,
    CallEnd,
    Layout,
    Listener,
    Message,
    Network,
    PushHeader,
    ReplyHeader,
    ServerEnd,
    Slot,
    WelcomeHeader,
    WorkerEnd,
)
from offbeat.transport.boxes import IN_ORDER, Box
from offbeat.transport.owners import same_user_here
from offbeat.transport.security import OPEN, Terms, admit, introduce, prepare
from offbeat.transport.wire import (
    ANSWER,
    BEAT,
    CALL,
    FINISH,
    FORMAT,
    GOODBYE,
    HELLO,
    MAX_HELLO_BYTES,
    PUSH,
    REFUSE,
    REPLY,
    WELCOME,
    Connection,
    Frame,
    as_bytes,
    expect,
    json_frame,
    pack,
    pack_push,
    pack_reply,
    pack_welcome,
    read_call,
    send_call,
)

BACKLOG = 128
EVENT_BYTES = 1 << 22
_BEAT = pack(BEAT)
_BOX_BYTES = Box.num_bytes(FORMAT.size)

Said = TypeVar("Said", PushHeader, ReplyHeader, WelcomeHeader)


def connect(
    address: str, hello: Message, layout: Layout, timeout_s: float, terms: Terms = OPEN
) -> "SocketWorkerEnd":
    """Ask the server at `address` to be taken in, and wait for the welcome. Raises
    ConnectionClosedError when nobody is there, when refused, or when `timeout_s` have passed."""
    connection = _dial(address, hello, timeout_s, terms)
    try:
        descriptor = None
        if address.startswith("unix:"):
            frame, descriptor = connection.receive_with_descriptor(timeout_s)
        else:
            frame = _receive_answer(connection, timeout_s)
        try:
            expect(connection, frame, WELCOME)
            layout = layout.carried(over_network=descriptor is None)
            slots = _Slots(layout) if descriptor is None else _Slots.shared(layout, descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        welcome = frame.welcome()
        if descriptor is None:
            came = slots.reply.without_rows.coded(welcome.num_bytes)
            _read_payload(connection, frame, came)
    except (ConnectionClosedError, ValueError) as error:
        connection.close()
        raise (
            error if isinstance(error, ConnectionClosedError) else ConnectionClosedError(str(error))
        ) from error
    return SocketWorkerEnd(connection, welcome, slots, inline=descriptor is None)


def connect_for_calls(
    address: str, hello: Message, layout: Layout, timeout_s: float, terms: Terms = OPEN
) -> "SocketCallEnd":
    """A connection over which the master asks a server for this and that; made when the server has
    said that it will answer."""
    connection = _dial(address, {**hello, "calls": True}, timeout_s, terms)
    try:
        expect(connection, _receive_answer(connection, timeout_s), WELCOME)
    except ConnectionClosedError:
        connection.close()
        raise
    return SocketCallEnd(connection, _call_bytes(layout))


def call_engine(address: str, hello: Message, timeout_s: float, terms: Terms) -> socket.socket:
    """A bare line to an engine on another machine, which knows by the hello who calls."""
    return _dial(address, hello, timeout_s, terms).release()


class SocketWorkerEnd(WorkerEnd):
    def __init__(
        self, connection: Connection, welcome: WelcomeHeader, slots: "_Slots", *, inline: bool
    ) -> None:
        self.welcome = welcome
        self.reply_slot = slots.reply
        self.num_coded = slots.num_coded
        self._connection = connection
        self._slots = slots
        self._inline = inline
        self._num_pushed = 0

    @property
    def gradient_slot(self) -> Slot:
        return self._slots.gradients[self._num_pushed % 2]

    @property
    def pushed_slot(self) -> Slot:
        return self._slots.gradients[(self._num_pushed - 1) % 2]

    def push(self, header: PushHeader) -> None:
        slot = self.gradient_slot.filled(header) if self._inline else None
        self._num_pushed += 1
        box = self._slots.pushes
        if box is not None and not box.reader_sleeps():
            if box.put(pack_push(header)):
                self.beat()
            return
        with contextlib.suppress(ConnectionClosedError):  # wait_reply raises it again
            _send_payload(self._connection, pack_push, header, slot)

    def wait_reply(self, timeout_s: float) -> ReplyHeader | None:
        while (frame := _receive(self._connection, self._slots.replies, timeout_s)) is not None:
            if frame.type != BEAT:  # one that came after what it told of was found
                break
        if frame is None:
            return None
        expect(self._connection, frame, REPLY)
        header = frame.reply()
        if self._inline and self._slots.rows is not None and header.num_rows:
            self._read_news(frame, header, self._slots.rows)
        elif self._inline:
            came = self.reply_slot.without_rows.coded(header.num_bytes)
            _read_payload(self._connection, frame, came)
        return header

    def _read_news(self, frame: Frame, header: ReplyHeader, rows: Rows) -> None:
        """Put the rows that have changed into their places."""
        slot = self.reply_slot
        num_values = min(header.num_bytes // slot.values.element_size(), slot.values.numel())
        came = replace(slot, values=torch.empty(num_values), rows=slot.rows[: header.num_rows])
        _read_payload(self._connection, frame, came)
        try:
            rows.unpack(came.values, rows.read(came.rows, num_values), slot.values)
        except ValueError as error:
            raise self._connection.lost(f"a reply that makes no sense: {error}") from error

    def beat(self) -> None:
        self._connection.try_to_send(_BEAT)

    def finish(self, sequence: int) -> None:
        with contextlib.suppress(ConnectionClosedError):  # wait_reply raises it again
            self._connection.send(pack(FINISH, sequence=sequence))

    def close(self) -> None:
        self._connection.close(pack(GOODBYE))


class SocketServerEnd(ServerEnd):
    """`layout` says how large slots and calls are; it may change before the first use of a slot."""

    def __init__(
        self, connection: Connection, layout: Layout, terms: Terms, *, inline: bool
    ) -> None:
        self.num_heard = 0
        self.finished_at: int | None = None
        self._connection = connection
        self.layout = layout
        self._terms = terms
        self._inline = inline
        self._slots: _Slots | None = None
        self._pushes: Box | None = None
        self._replies: Box | None = None
        self._descriptor: int | None = None
        self._num_received = 0
        self._answers = False
        self._poll = select.poll()
        self._poll.register(connection.fileno(), getattr(select, "POLLRDHUP", select.POLLHUP))

    def read_hello(self, timeout_s: float) -> Message:
        deadline_s = time.monotonic() + timeout_s
        if self._inline:
            admit(self._connection, self._terms, timeout_s)
        frame = self._connection.receive(max(0.0, deadline_s - time.monotonic()))
        if frame is None:
            raise self._connection.lost(f"no hello within {timeout_s:g} s")
        if frame.type != HELLO:
            raise self._connection.lost(f"a frame of type {frame.type} instead of a hello")
        left_s = max(0.0, deadline_s - time.monotonic())
        return self._connection.read_json(frame.length, MAX_HELLO_BYTES, within_s=left_s)

    @property
    def num_coded(self) -> int:  # type: ignore[override]
        return self.layout.carried(over_network=self._inline).num_coded

    def release(self) -> socket.socket:
        """The bare line to whoever said hello; this end is none any more."""
        return self._connection.release()

    @property
    def reply_slot(self) -> Slot:
        return self._memory().reply

    def welcome(self, header: WelcomeHeader) -> None:
        slots = self._memory()
        with contextlib.suppress(ConnectionClosedError):  # receive raises it again
            if self._descriptor is None:
                slot = slots.reply.without_rows.coded(header.num_bytes)
                _send_payload(self._connection, pack_welcome, header, slot)
            else:
                self._connection.send(pack_welcome(header), descriptors=[self._descriptor])
        if self._descriptor is not None:  # the mapping is enough from now on
            os.close(self._descriptor)
            self._descriptor = None

    def refuse(self, reason: str) -> None:
        self._connection.close(*json_frame(REFUSE, {"reason": reason}))

    @property
    def descriptor(self) -> int | None:
        return None if self._inline or self._connection.is_closed else self._connection.fileno()

    def has_push(self) -> bool:
        return self._pushes is not None and self._pushes.has_come()

    def rest(self, resting: bool) -> None:
        if self._pushes is not None:
            self._pushes.sleeps(resting)

    def receive(self, timeout_s: float) -> PushHeader | None:
        while (frame := _receive(self._connection, self._pushes, timeout_s)) is not None:
            self.num_heard += 1
            if frame.type != BEAT:
                break
            if not timeout_s:
                return None
        if frame is None:
            return None
        if frame.length and not self._inline:  # nobody is to wait for it
            raise self._connection.lost("a payload where none is expected")
        if frame.type == FINISH:
            self.finished_at = frame.sequence
            return None
        if frame.type == GOODBYE:
            raise self._connection.lost("the worker left")
        expect(self._connection, frame, PUSH)
        self._num_received += 1
        header = frame.push()
        if self._inline:
            slot = self.gradient_slot(header).filled(header)
            _read_payload(self._connection, frame, slot)
        return header

    def gradient_slot(self, header: PushHeader) -> Slot:
        return self._memory().gradients[(self._num_received - 1) % 2]

    def send(self, header: ReplyHeader) -> None:
        with contextlib.suppress(ConnectionClosedError):  # receive raises it again
            if self._inline:
                _send_payload(self._connection, pack_reply, header, self._news(header))
            elif self._replies is None or self._replies.reader_sleeps():
                self._connection.send_now(pack_reply(header))
            elif self._replies.put(pack_reply(header)):
                self._connection.send_now(_BEAT)

    def _news(self, header: ReplyHeader) -> Slot:
        """What of the reply slot travels."""
        slots = self._memory()
        if slots.rows is None or not header.num_rows:
            return slots.reply.without_rows.coded(header.num_bytes)
        said = slots.reply.rows[: header.num_rows]
        ids = slots.rows.read(said, header.num_bytes // slots.reply.values.element_size())
        return replace(slots.reply, values=slots.rows.pack(slots.reply.values, ids), rows=said)

    def is_open(self) -> bool:
        return not self._connection.is_closed and not self._poll.poll(0)

    def close(self, reason: str = "", *, over: bool = False) -> None:
        message = {"reason": reason or "the server left", "over": over}
        self._connection.close(*json_frame(GOODBYE, message))

    def answer_calls(self, answer: Answer, timeout_s: float) -> None:
        if not self._answers:
            self._connection.send(pack(WELCOME))
            self._answers = True
        frame = self._connection.receive(timeout_s)
        if frame is None:
            return
        expect(self._connection, frame, CALL)
        message, tensors = read_call(self._connection, frame, _call_bytes(self.layout))
        send_call(self._connection, ANSWER, *answer(message, tensors))

    def _memory(self) -> "_Slots":
        if self._slots is None:
            layout = self.layout.carried(over_network=self._inline)
            if self._inline:
                self._slots = _Slots(layout)
            else:
                self._descriptor = make_memory(_Slots.num_bytes(layout))
                self._slots = _Slots.shared(layout, self._descriptor)
                self._pushes, self._replies = self._slots.pushes, self._slots.replies
        return self._slots


class SocketCallEnd(CallEnd):
    def __init__(self, connection: Connection, most_bytes: int) -> None:
        self._connection = connection
        self._most_bytes = most_bytes

    def call(
        self, message: Message, tensors: Mapping[str, Tensor], timeout_s: float
    ) -> tuple[Message, dict[str, Tensor]]:
        send_call(self._connection, CALL, message, tensors)
        frame = self._connection.receive(timeout_s)
        if frame is None:
            self.close()
            raise ConnectionClosedError(f"no answer from the server within {timeout_s:g} s")
        expect(self._connection, frame, ANSWER)
        return read_call(self._connection, frame, self._most_bytes)

    def close(self) -> None:
        self._connection.close(pack(GOODBYE))


class SocketNetwork(Network):
    """Servers at fixed addresses."""

    def __init__(
        self,
        addresses: Sequence[str],
        terms: Terms = OPEN,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`say` is told when a server is being waited for, and when it is there."""
        self.addresses = tuple(addresses)
        self.terms = terms
        self.say = say
        self._missing: set[int] = set()
        self._noting = threading.Lock()

    def connect(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float, params: Tensor
    ) -> WorkerEnd:
        with self.waiting(shard):
            return connect(self.addresses[shard], hello, layout, timeout_s, self.terms)

    def connect_for_calls(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float
    ) -> CallEnd:
        with self.waiting(shard):
            return connect_for_calls(self.addresses[shard], hello, layout, timeout_s, self.terms)

    @contextlib.contextmanager
    def waiting(self, shard: int) -> Iterator[None]:
        """Have it told, once, that what is done in here has to wait for a server."""
        try:
            yield
        except ConnectionClosedError as error:
            if not (error.refused or error.over) and self._is_new(shard):
                where = self.addresses[shard].removeprefix("tcp:")
                reason = "" if where in str(error) else f": {error}"
                self.say(f"waiting for server {shard} at {where}{reason}")
            raise
        with self._noting:
            was_missing = shard in self._missing
            self._missing.discard(shard)
        if was_missing:
            self.say(f"server {shard} is here")

    def _is_new(self, shard: int) -> bool:
        """Whether it was not known that this one is missing; now it is."""
        with self._noting:
            is_new = shard not in self._missing
            self._missing.add(shard)
        return is_new


class SocketListener(Listener):
    """A server's door. `address` says where it is: with a TCP port of 0, which port it got."""

    def __init__(self, address: str, layout: Layout, terms: Terms = OPEN) -> None:
        family, where = _resolve(address)
        self.layout = layout
        """Of connections that are made from now on."""
        self.terms = terms
        self._path = where if family == socket.AF_UNIX and where[0] != "\0" else None
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._closed = False
        try:
            if family != socket.AF_UNIX:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(where)
            self._socket.listen(BACKLOG)
        except OSError as error:
            self._socket.close()
            raise ConnectionClosedError(f"cannot listen at {address}: {error.strerror}") from error
        self.address = address
        if family != socket.AF_UNIX:
            host, port = self._socket.getsockname()[:2]
            self.address = f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"

    def accept(self, timeout_s: float) -> ServerEnd | None:
        try:
            self._socket.settimeout(timeout_s)
            accepted, _ = self._socket.accept()
        except TimeoutError:
            return None
        except OSError as error:
            if self._closed:
                raise ConnectionClosedError("the listener was closed") from error
            return None  # whoever knocked is gone again, or there are no descriptors left
        inline = accepted.family != socket.AF_UNIX
        try:
            if inline and self.terms.token is not None:
                known = True  # as soon as it has proved it
            else:
                known = same_user_here(accepted) if inline else _same_user(accepted)
            if inline:
                prepare(accepted, self.terms)
        except OSError:  # it is gone again
            known = False
        if not known:
            accepted.close()
            return None
        return SocketServerEnd(Connection(accepted), self.layout, self.terms, inline=inline)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):  # not every system lets a listening socket be shut down
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._path is not None:
            Path(self._path).unlink(missing_ok=True)


class JointListener(Listener):
    """Several doors of one server: for its own machine, and for others."""

    def __init__(self, listeners: Sequence[SocketListener]) -> None:
        self._listeners = list(listeners)

    def accept(self, timeout_s: float) -> ServerEnd | None:
        for listener in self._listeners:
            if listener.is_closed:
                raise ConnectionClosedError("the listener was closed")
        try:
            knocked, _, _ = select.select(self._listeners, [], [], timeout_s)
        except (OSError, ValueError) as error:  # closed meanwhile
            raise ConnectionClosedError("the listener was closed") from error
        return knocked[0].accept(timeout_s) if knocked else None

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()


class _Slots:
    """Two gradient slots and one reply slot, in ordinary or in shared memory; there, with a box for
    the headers that go each way."""

    def __init__(self, layout: Layout, buffer: mmap.mmap | None = None) -> None:
        self.rows = layout.rows
        self.num_coded = layout.num_coded
        start = 0
        made = []
        for part in (layout.gradient, layout.gradient, layout.reply):
            made.append(Slot.allocate(part) if buffer is None else _slot_in(part, buffer, start))
            start += _slot_bytes(part)
        self.gradients = made[:2]
        self.reply = made[2]
        self.pushes: Box | None = None
        self.replies: Box | None = None
        if buffer is not None and IN_ORDER:
            memory = memoryview(buffer)
            self.pushes = Box(memory[start : start + _BOX_BYTES], FORMAT.size)
            self.replies = Box(memory[start + _BOX_BYTES :], FORMAT.size)

    @classmethod
    def shared(cls, layout: Layout, descriptor: int) -> "_Slots":
        return cls(layout, map_memory(descriptor, cls.num_bytes(layout)))

    @staticmethod
    def num_bytes(layout: Layout) -> int:
        return 2 * _slot_bytes(layout.gradient) + _slot_bytes(layout.reply) + 2 * _BOX_BYTES


def _slot_bytes(layout: Layout) -> int:
    size = (
        aligned(layout.dtype.itemsize * layout.num_elements)
        + aligned(4 * layout.num_floats)
        + aligned(8 * layout.num_ints)
        + aligned(8 * layout.num_rates)
        + aligned(8 * layout.num_rows)
        + aligned(layout.num_tensors)
    )
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE  # memory is pinned for a GPU by whole pages


def _slot_in(layout: Layout, buffer: mmap.mmap, start: int) -> Slot:
    floats_at = start + aligned(layout.dtype.itemsize * layout.num_elements)
    ints_at = floats_at + aligned(4 * layout.num_floats)
    rates_at = ints_at + aligned(8 * layout.num_ints)
    rows_at = rates_at + aligned(8 * layout.num_rates)
    mask_at = rows_at + aligned(8 * layout.num_rows)
    return Slot(
        values=view(buffer, layout.dtype, layout.num_elements, start),
        mask=view(buffer, torch.uint8, layout.num_tensors, mask_at),
        floats=view(buffer, torch.float32, layout.num_floats, floats_at),
        ints=view(buffer, torch.int64, layout.num_ints, ints_at),
        rates=view(buffer, torch.float64, layout.num_rates, rates_at),
        rows=view(buffer, torch.int64, layout.num_rows, rows_at),
    )


def _call_bytes(layout: Layout) -> int:
    """The most that the tensors of a call can hold: a shard's state, whatever its optimizer, and
    some lines of events."""
    return EVENT_BYTES + 64 * (
        layout.num_elements + layout.num_floats + layout.num_ints + layout.num_tensors
    )


def _parts(slot: Slot) -> list[memoryview]:
    tensors = (slot.values, slot.mask, slot.floats, slot.ints, slot.rates, slot.rows)
    return [as_bytes(tensor) for tensor in tensors if tensor.numel()]


def _receive(connection: Connection, box: Box | None, timeout_s: float) -> Frame | None:
    """The next frame's header, from the box or the socket; None when about `timeout_s` have passed.
    What the other end had put into the box before it hung up comes first."""
    if box is None:
        return connection.receive(timeout_s)
    raw = box.take()
    if raw is not None:
        return Frame(raw)
    frame = None
    try:
        frame = _receive_asleep(connection, box, timeout_s)
        if frame is not None and frame.type == GOODBYE and box.has_come():
            if timeout_s:
                expect(connection, frame, BEAT)
            frame = None
    except ConnectionClosedError:  # the next one to read is told again
        if not box.has_come():
            raise
        frame = None
    raw = box.take() if frame is None or frame.type == BEAT else None
    return frame if raw is None else Frame(raw)


def _receive_asleep(connection: Connection, box: Box, timeout_s: float) -> Frame | None:
    if not timeout_s:
        return connection.receive(0.0)
    box.sleeps(True)
    try:
        return None if box.has_come() else connection.receive(timeout_s)
    finally:
        box.sleeps(False)


def _send_payload(
    connection: Connection, pack: Callable[[Said, int], bytes], header: Said, slot: Slot | None
) -> None:
    if slot is None:
        connection.send(pack(header, 0))
        return
    parts = _parts(slot)
    connection.send(pack(header, sum(len(part) for part in parts)), *parts)


def _read_payload(connection: Connection, frame: Frame, slot: Slot) -> None:
    parts = _parts(slot)
    expected = sum(len(part) for part in parts)
    if frame.length != expected:
        raise connection.lost(f"a payload of {frame.length} bytes instead of {expected}")
    connection.read_body(*parts)


def _dial(address: str, hello: Message, timeout_s: float, terms: Terms) -> Connection:
    family, where = _resolve(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(where)
        if family != socket.AF_UNIX:
            prepare(sock, terms)
        elif not _same_user(sock):
            raise ConnectionRefusedError("it belongs to another user")
    except OSError as error:
        sock.close()
        raise ConnectionClosedError(f"nobody answers at {address}: {error}") from error
    connection = Connection(sock)
    try:
        if family != socket.AF_UNIX:
            introduce(connection, terms, timeout_s, host_of(address))
        connection.send(*json_frame(HELLO, hello))
    except ConnectionClosedError:
        connection.close()
        raise
    return connection


def _receive_answer(connection: Connection, timeout_s: float) -> Frame:
    frame = connection.receive(timeout_s)
    if frame is None:
        raise connection.lost(f"no answer within {timeout_s:g} s")
    return frame


def _resolve(address: str) -> tuple[socket.AddressFamily, str]:
    """The family, and what bind and connect take."""
    kind, _, where = address.partition(":")
    if kind == "unix" and where:
        return socket.AF_UNIX, "\0" + where[1:] if where.startswith("@") else where
    host, colon, port = where.rpartition(":")
    if kind != "tcp" or not colon or not port.isdigit():
        raise ConfigError(
            f"{address!r} is no address; known: tcp:host:port, unix:@name, unix:/path"
        )
    try:
        found = socket.getaddrinfo(host_of(address), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConnectionClosedError(f"nobody knows the host {host}: {error}") from error
    family, _, _, _, where_to = found[0]
    return family, where_to  # type: ignore[return-value]


def any_port(host: str) -> str:
    """Where a listener gets a port that is free."""
    return f"tcp:[{host}]:0" if ":" in host else f"tcp:{host}:0"


def host_of(address: str) -> str:
    """The host in a TCP address, as a certificate names it."""
    return address.removeprefix("tcp:").rpartition(":")[0].strip("[]")


def _same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket belongs to this user."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # there, the socket is a file in a folder that only its user can enter
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    return bool(uid == os.getuid())
