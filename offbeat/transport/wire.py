"""What travels over a socket: frames, each a header of fixed size and a body.

A frame says what it is (its type) and how long its body is. JSON stands in the bodies of handshakes
and calls only, tensors are raw bytes, and nothing that comes in is ever executed. Lengths are
checked against what is expected before anything is read or allocated.
"""

import contextlib
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from offbeat.accounts import OUTCOMES
from offbeat.aliases import DTYPES
from offbeat.errors import ConnectionClosedError
from offbeat.flat import PROTOCOL
from offbeat.transport.base import (
    HEADER_BYTES,
    Message,
    PushHeader,
    ReplyHeader,
    WelcomeHeader,
)

MAGIC = b"OFFB"
FORMAT = struct.Struct("<4sHBBB3xIIIIQQQQQQd")
"""magic, protocol, type, status, flags; shard, worker, incarnation, epoch; the body's length,
sequence, batch (in a welcome: how many), base version, reply version + 1, the settled sequence, and
a speed, the worker's or that of the fastest: 84 bytes. Zero is what a type of frame has nothing to
say of. Where not all values are sent, the last one says in pushes and
replies how many bytes of them are; how many numbers tell rows stands in a push in the place of the
reply version, and in a reply in that of the batch. A welcome's bytes stand in the place of the base
version."""
assert FORMAT.size == HEADER_BYTES

HELLO, WELCOME, REFUSE, PUSH, REPLY, BEAT, GOODBYE, CALL, ANSWER, CHALLENGE, PROOF = range(1, 12)
FINISH = 12

MAX_HELLO_BYTES = 1 << 16
MAX_JSON_BYTES = 1 << 20
MAX_COUNT = 1 << 62
"""Of steps, batches and versions."""
MAX_DIMS = 64
"""Of a tensor; torch knows no more."""
STALL_TIMEOUT_S = 60.0
"""How long a peer may take to go on in the middle of a frame before it counts as gone."""
CHUNK_BYTES = 1 << 20
"""Of a payload that is sent or read at a time: so that one end reads while the other one sends."""
WAKE_S = 0.2
"""A thread that waits for a frame looks up this often."""

_AT_ONCE = int(socket.MSG_DONTWAIT)  # as plain numbers: to join two flags took longer than to send
_AT_ONCE_QUIETLY = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_QUIETLY = int(socket.MSG_NOSIGNAL)
_FLAG = 1
"""In a push: void. In a goodbye: over."""
_MASKED = 2
_LAST = 4
_STATUS_NUMBERS = {status: number for number, status in enumerate(OUTCOMES)}

Buffer = memoryview | bytes


def as_bytes(tensor: Tensor) -> memoryview:
    """A tensor's own memory; it must be contiguous and on the CPU."""
    return tensor.numpy().reshape(-1).view("u1").data


class Frame:
    """A frame's header as it came: its type, and the length of the body that follows. What else it
    says depends on the type."""

    __slots__ = ("_fields", "length", "type")

    def __init__(self, raw: bytes | bytearray) -> None:
        self._fields: tuple[Any, ...] = FORMAT.unpack(raw)
        magic, protocol, self.type, status = self._fields[:4]
        self.length = self._fields[9]
        if magic != MAGIC:
            raise ConnectionClosedError("the other end does not speak Offbeat's protocol")
        if protocol != PROTOCOL:
            raise ConnectionClosedError(
                f"the other end speaks version {protocol} of the protocol, this one {PROTOCOL}",
                refused=True,
            )
        if status >= len(OUTCOMES):
            raise ConnectionClosedError(f"the other end sent an unknown status {status}")

    @property
    def flag(self) -> bool:
        return bool(self._fields[4] & _FLAG)

    @property
    def sequence(self) -> int:
        return _counted(self._fields[10])

    def push(self) -> PushHeader:
        (_, _, _, _, flags, shard, worker, incarnation, epoch) = self._fields[:9]
        (_, sequence, batch, base, num_rows, size, speed) = self._fields[9:]
        void, masked = flags & _FLAG != 0, flags & _MASKED != 0
        return PushHeader(
            worker,
            incarnation,
            _counted(sequence),
            _counted(base),
            _counted(batch),
            epoch,
            shard,
            void,
            masked,
            size,
            num_rows,
            speed,
        )

    def reply(self) -> ReplyHeader:
        (_, _, _, status, flags, _, _, _, epoch) = self._fields[:9]
        (_, sequence, rows, _, version, size, fastest) = self._fields[9:]
        status, last = OUTCOMES[status], flags & _LAST != 0
        return ReplyHeader(sequence, version - 1, status, epoch, last, size, rows, fastest)

    def welcome(self) -> WelcomeHeader:
        (_, _, _, _, flags, _, _, _, epoch) = self._fields[:9]
        (_, _, batches, size, version, settled, _) = self._fields[9:]
        return WelcomeHeader(version - 1, settled, epoch, flags & _LAST != 0, size, batches)


def _counted(number: int) -> int:
    """What is written into journals and archives, which have 63 bits for it."""
    if number > MAX_COUNT:
        raise ConnectionClosedError(f"the other end counts up to {number}, which nobody does")
    return number


def pack(kind: int, *, length: int = 0, sequence: int = 0, flag: bool = False) -> bytes:
    """The header of a frame that says no more than this."""
    flags = _FLAG if flag else 0
    return FORMAT.pack(
        MAGIC, PROTOCOL, kind, 0, flags, 0, 0, 0, 0, length, sequence, 0, 0, 0, 0, 0.0
    )


def pack_push(header: PushHeader, length: int = 0) -> bytes:
    return FORMAT.pack(
        MAGIC,
        PROTOCOL,
        PUSH,
        0,
        (_FLAG if header.void else 0) | (_MASKED if header.masked else 0),
        header.shard,
        header.worker,
        header.incarnation,
        header.epoch,
        length,
        header.sequence,
        header.batch,
        header.base_version,
        header.num_rows,
        header.num_bytes,
        header.speed,
    )


def pack_reply(header: ReplyHeader, length: int = 0) -> bytes:
    status, flags = _STATUS_NUMBERS[header.status], _LAST if header.last else 0
    sequence, version, epoch = header.sequence, header.version + 1, header.epoch
    size, rows = header.num_bytes, header.num_rows
    said = (length, sequence, rows, 0, version, size, header.fastest)
    return FORMAT.pack(MAGIC, PROTOCOL, REPLY, status, flags, 0, 0, 0, epoch, *said)


def pack_welcome(header: WelcomeHeader, length: int = 0) -> bytes:
    flags = _LAST if header.last else 0
    settled, version, epoch = header.settled_sequence, header.version + 1, header.epoch
    said = (length, 0, header.batches, header.num_bytes, version, settled, 0.0)
    return FORMAT.pack(MAGIC, PROTOCOL, WELCOME, 0, flags, 0, 0, 0, epoch, *said)


class Pipe(Protocol):
    """What a connection needs of a socket. Reading and sending raise BlockingIOError when nothing
    has moved for about WAKE_S."""

    def fileno(self) -> int: ...
    def recv_into(self, target: memoryview, nbytes: int, flags: int, /) -> int: ...
    def send(self, data: Buffer, flags: int, /) -> int: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


Wrapped = TypeVar("Wrapped", bound=Pipe)


class Connection:
    """A socket that carries frames. One thread reads; any may send; any may close."""

    def __init__(self, sock: socket.socket | Pipe) -> None:
        self._socket: socket.socket | Pipe = sock
        self._head = bytearray(FORMAT.size)
        self._head_view = memoryview(self._head)
        self._num_read = 0
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._closed: ConnectionClosedError | None = None
        self._torn = False
        """Half a frame was sent, so that nothing that followed could be understood."""
        if isinstance(sock, socket.socket):
            sock.setblocking(True)
            seconds = struct.pack("ll", 0, int(WAKE_S * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    def wrap(
        self, make: Callable[[socket.socket], Wrapped], begin: Callable[[Wrapped], None]
    ) -> None:
        """Have another layer between the frames and the socket, before anything was sent. Nobody
        else reads or sends until `begin` is done; `close` ends it."""
        with self._sending, self._reading:
            if self._closed is not None:
                raise self._closed.again()
            assert isinstance(self._socket, socket.socket)
            self._socket = wrapped = make(self._socket)
            begin(wrapped)

    # -- sending -------------------------------------------------------------------------------

    def send(self, head: bytes, *body: Buffer, descriptors: Sequence[int] = ()) -> None:
        """Send a frame whole; raises ConnectionClosedError when that is not possible."""
        with self._sending:
            try:
                if body or descriptors:
                    self._send(head, body, descriptors)
                else:
                    self._send_all(head)
            except OSError as error:
                raise self._broken(error) from error

    def send_now(self, head: bytes) -> None:
        """Send a frame to somebody who has read all but the last few, so that there is room for it;
        who has not is gone."""
        with self._sending:
            try:
                num_sent = self._socket.send(head, _AT_ONCE_QUIETLY)
                if num_sent < len(head):
                    raise BlockingIOError
            except BlockingIOError as error:
                raise self._broken(TimeoutError("the other end reads nothing")) from error
            except OSError as error:
                raise self._broken(error) from error

    def _broken(self, error: OSError) -> ConnectionClosedError:
        """Nothing can be sent any more. Not the last word: a goodbye with the reason may lie here
        unread."""
        self._torn = True
        if isinstance(error, TimeoutError):  # half a frame is there, and will not be whole
            with contextlib.suppress(OSError):  # the other end was quicker
                self._socket.shutdown(socket.SHUT_RDWR)
        return ConnectionClosedError(f"the connection broke: {error}")

    def try_to_send(self, head: bytes) -> None:
        """Send a frame that nobody waits for, unless the line is busy or gone."""
        if self._torn or not self._sending.acquire(blocking=False):
            return
        try:
            num_sent = self._socket.send(head, _AT_ONCE_QUIETLY)
            if num_sent < len(head):
                self._torn = True
                self._send(head[num_sent:], (), ())
                self._torn = False
        except OSError:
            return  # full, or gone: whoever reads will be told
        finally:
            self._sending.release()

    def _send(self, head: bytes, body: Sequence[Buffer], descriptors: Sequence[int]) -> None:
        if descriptors:
            assert isinstance(self._socket, socket.socket)
            num_sent = socket.send_fds(self._socket, [head], list(descriptors))
            if num_sent < len(head):
                self._send_all(head[num_sent:])
        else:
            self._send_all(head)
        for part in body:
            self._send_all(part)

    def _send_all(self, part: Buffer) -> None:
        rest = memoryview(part)
        deadline_s = 0.0
        while len(rest):
            try:
                rest = rest[self._socket.send(rest[:CHUNK_BYTES], _QUIETLY) :]
                deadline_s = 0.0
            except BlockingIOError:
                deadline_s = deadline_s or time.monotonic() + STALL_TIMEOUT_S
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        f"the other end read nothing for {STALL_TIMEOUT_S:g} s"
                    ) from None

    # -- reading -------------------------------------------------------------------------------

    def receive(self, timeout_s: float) -> Frame | None:
        """The next frame's header, or None when about `timeout_s` have passed; 0: without waiting.
        Its body must be read before the next one."""
        with self._reading:
            # nearly always a header comes whole, and at once
            flags = 0 if timeout_s else _AT_ONCE
            self._num_read += self._read_some(self._head_view[self._num_read :], flags)
            if self._num_read < FORMAT.size:
                if not timeout_s:
                    return None
                deadline_s = time.monotonic() + timeout_s - WAKE_S
                while self._num_read < FORMAT.size:
                    if time.monotonic() >= deadline_s:
                        return None
                    self._num_read += self._read_some(self._head_view[self._num_read :])
            self._num_read = 0
            return Frame(self._head)

    def read_body(self, *targets: Buffer, within_s: float = math.inf) -> None:
        """Fill these with the body of the frame whose header came last; `within_s`: whoever takes
        longer is gone, even if it never stops for long."""
        latest_s = time.monotonic() + within_s
        with self._reading:
            for target in targets:
                rest = memoryview(target)
                deadline_s = min(latest_s, time.monotonic() + STALL_TIMEOUT_S)
                while len(rest):
                    count = self._read_some(rest[:CHUNK_BYTES], socket.MSG_WAITALL)
                    rest = rest[count:]
                    now_s = time.monotonic()
                    if count and now_s < latest_s:
                        deadline_s = min(latest_s, now_s + STALL_TIMEOUT_S)
                    elif now_s > deadline_s and len(rest):
                        raise self._lost(TimeoutError("the other end stopped in mid-frame"))

    def read_json(
        self, length: int, most_bytes: int = MAX_JSON_BYTES, within_s: float = math.inf
    ) -> Message:
        """A body of JSON; one that is too long is not read at all."""
        if length > most_bytes:
            raise self._lost(OSError(f"a message of {length} bytes is too long"))
        raw = bytearray(length)
        self.read_body(memoryview(raw), within_s=within_s)
        try:
            message = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise self._lost(OSError("a message that is no JSON")) from error
        if not isinstance(message, dict):
            raise self._lost(OSError("a message that is no table"))
        return message

    def receive_with_descriptor(self, timeout_s: float) -> tuple[Frame, int | None]:
        """The next frame's header, and the file descriptor that came with it, if any."""
        assert isinstance(self._socket, socket.socket)
        with self._reading:
            deadline_s = time.monotonic() + timeout_s
            descriptor = None
            while self._num_read < FORMAT.size:
                try:
                    raw, found, _, _ = socket.recv_fds(
                        self._socket, FORMAT.size - self._num_read, 1
                    )
                except BlockingIOError:
                    if time.monotonic() >= deadline_s:
                        raise self._lost(
                            TimeoutError(f"no answer within {timeout_s:g} s")
                        ) from None
                    continue
                except OSError as error:
                    raise self._lost(error) from error
                if not raw:
                    raise self._lost(None)
                descriptor = found[0] if found else descriptor
                self._head[self._num_read : self._num_read + len(raw)] = raw
                self._num_read += len(raw)
            self._num_read = 0
            return Frame(self._head), descriptor

    def _read_some(self, target: memoryview, flags: int = 0) -> int:
        """Read what is there; 0 when nothing came for a while."""
        try:
            count = self._socket.recv_into(target, 0, flags)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(error) from error
        if not count:
            raise self._lost(None)
        return count

    # -- the end -------------------------------------------------------------------------------

    def release(self) -> socket.socket:
        """The bare socket, for something else than frames; this connection is none any more."""
        assert isinstance(self._socket, socket.socket)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 0))
        self.lost("it is used for something else")
        return self._socket

    def lost(
        self, reason: str, *, over: bool = False, refused: bool = False
    ) -> ConnectionClosedError:
        """Remember why this connection is at its end; the first reason stays."""
        if self._closed is None:
            self._closed = ConnectionClosedError(reason, over=over, refused=refused)
        return self._closed.again()

    def _lost(self, error: OSError | None) -> ConnectionClosedError:
        return self.lost(
            "the other end is gone" if error is None else f"the connection broke: {error}"
        )

    def close(self, goodbye: bytes = b"", reason: bytes = b"") -> None:
        """Say goodbye where that needs no waiting, and hang up. A thread that reads is woken."""
        if goodbye and self._closed is None and self._sending.acquire(timeout=WAKE_S):
            try:
                with contextlib.suppress(OSError):  # gone already: then nobody needs to be told
                    if not self._torn:
                        self._socket.send(goodbye + reason, _AT_ONCE_QUIETLY)
            finally:
                self._sending.release()
        self.lost("this end was closed")
        with contextlib.suppress(OSError):  # the other end was quicker
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._reading:
            self._socket.close()


# -- messages with tensors: calls and their answers ------------------------------------------------

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def send_call(
    connection: Connection, kind: int, message: Message, tensors: Mapping[str, Tensor]
) -> None:
    """A frame of JSON that describes the tensors, then their bytes."""
    table = [[name, _dtype_name(t), list(t.shape)] for name, t in tensors.items()]
    raw = json.dumps({"message": message, "tensors": table}).encode()
    parts = [_of_any_kind(tensor.contiguous()) for tensor in tensors.values()]
    connection.send(pack(kind, length=len(raw)), raw, *parts)


def read_call(
    connection: Connection, frame: Frame, most_bytes: int
) -> tuple[Message, dict[str, Tensor]]:
    """The message and the tensors of a call; refuses more than `most_bytes` of tensors unread."""
    described = connection.read_json(frame.length)
    try:
        shapes = [(str(n), _DTYPES[d], _shape(s)) for n, d, s in described["tensors"]]
        message = dict(described["message"])
        sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in shapes]
    except (KeyError, TypeError, ValueError) as error:
        raise connection.lost(f"a call that makes no sense: {error!r}") from error
    if sum(sizes) > most_bytes:
        raise connection.lost(
            f"a call with {sum(sizes)} bytes of tensors; {most_bytes} are allowed"
        )
    tensors = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in shapes}
    connection.read_body(*(_of_any_kind(tensor) for tensor in tensors.values()))
    return message, tensors


def _shape(described: Sequence[Any]) -> list[int]:
    """Of a tensor, also of one without elements: its strides have to be numbers, too."""
    if not all(type(size) is int and size >= 0 for size in described):
        raise ValueError(f"the shape {described}")
    if len(described) > MAX_DIMS or math.prod(max(1, size) for size in described) >= 1 << 60:
        raise ValueError("a shape that no tensor has")
    return list(described)


def _of_any_kind(tensor: Tensor) -> memoryview:
    """As `as_bytes`, also where NumPy does not know what it is made of."""
    return as_bytes(tensor.view(-1).view(torch.uint8))


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def json_frame(kind: int, message: Message) -> tuple[bytes, bytes]:
    """Header and body of a frame that holds JSON."""
    raw = json.dumps(message).encode()
    return pack(kind, length=len(raw)), raw


def expect(connection: Connection, frame: Frame, kind: int, length: int | None = None) -> None:
    """Raise what another frame than the expected one means."""
    if frame.type == kind and length in (None, frame.length):
        return
    if frame.type in (REFUSE, GOODBYE):
        said = connection.read_json(frame.length) if frame.length else {}
        reason = str(said.get("reason", "the other end left"))
        over, refused = bool(said.get("over", False)), frame.type == REFUSE
        raise connection.lost(reason, over=over, refused=refused)
    if frame.type == kind:
        raise connection.lost(f"a frame of {frame.length} bytes where {length} were expected")
    raise connection.lost(f"a frame of type {frame.type} where {kind} was expected")
