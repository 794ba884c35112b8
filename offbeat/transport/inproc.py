"""Connections between threads of one process: headers through queues, payloads in shared
tensors."""

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from offbeat.errors import ConnectionClosedError
from offbeat.transport.base import (
    Answer,
    Attendant,
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

_Call = tuple[Message, Mapping[str, Tensor]]
_Said = WelcomeHeader | PushHeader | ReplyHeader | _Call | int
"""An int is the sequence of the last push of a worker that is through."""
_Mailbox = queue.SimpleQueue[_Said | Exception]


class _Channel:
    """What both ends hold: two mailboxes and the slots."""

    def __init__(
        self, layout: Layout | None, params: Tensor | None, *, attended: bool = False
    ) -> None:
        self.to_server: _Mailbox = queue.SimpleQueue()
        self.to_worker: _Mailbox = queue.SimpleQueue()
        self.num_heard = 0
        self.num_received = 0
        self.is_attended = attended
        self.attendant: Attendant | None = None
        self.worker_left = False
        self.server_left = False
        self.num_coded = 0
        if layout is not None:
            layout = layout.carried(over_network=False)
            self.num_coded = layout.num_coded
            self.gradients = (Slot.allocate(layout.gradient), Slot.allocate(layout.gradient))
            reply = Slot.allocate(layout.reply)
            if params is not None and layout.coded_reply_bytes is None:
                reply = replace(reply, values=params)
            self.reply = reply
            reply.mark.set()  # what the worker's thread has told the device to be there


class InprocWorkerEnd(WorkerEnd):
    def __init__(self, channel: _Channel, welcome: WelcomeHeader) -> None:
        self.welcome = welcome
        self.reply_slot = channel.reply
        self.num_coded = channel.num_coded
        self._channel = channel
        self._num_pushed = 0

    @property
    def gradient_slot(self) -> Slot:
        return self._channel.gradients[self._num_pushed % 2]

    def lend(self, values: Tensor) -> None:
        """Whoever does the server's work for its own pushes is through with one before the next;
        on a device too, whose stream keeps the order."""
        if self._channel.attendant is not None:
            one, other = self._channel.gradients
            self._channel.gradients = (replace(one, values=values), replace(other, values=values))

    @property
    def pushed_slot(self) -> Slot:
        return self._channel.gradients[(self._num_pushed - 1) % 2]

    def push(self, header: PushHeader) -> None:
        channel = self._channel
        self._num_pushed += 1
        self.beat()
        if channel.attendant is None:
            channel.to_server.put(header)
            return
        channel.num_received += 1
        try:
            channel.attendant.push(header)
        except Exception as error:  # the server's, whose thread deals with it
            channel.to_server.put(error)

    def wait_reply(self, timeout_s: float) -> ReplyHeader | None:
        channel = self._channel
        if channel.attendant is not None and channel.to_worker.empty():
            timeout_s = self._wait_attended(channel.attendant, timeout_s)
        reply = _take(channel.to_worker, timeout_s)
        assert reply is None or isinstance(reply, ReplyHeader)
        return reply

    def _wait_attended(self, attendant: Attendant, timeout_s: float) -> float:
        """Until something has come; returns what is left of the time."""
        deadline_s = time.monotonic() + timeout_s
        try:
            while (left_s := deadline_s - time.monotonic()) > 0:
                if not attendant.wait(left_s) or not self._channel.to_worker.empty():
                    return left_s
        except Exception as error:  # the server's, as above
            self._channel.to_server.put(error)
        return max(0.0, left_s)

    def beat(self) -> None:
        self._channel.num_heard += 1

    def finish(self, sequence: int) -> None:
        self._channel.to_server.put(sequence)

    def close(self) -> None:
        self._channel.worker_left = True
        self._channel.to_server.put(ConnectionClosedError("the worker left"))


class InprocServerEnd(ServerEnd):
    def __init__(self, channel: _Channel, hello: Message) -> None:
        self.finished_at: int | None = None
        self.num_coded = channel.num_coded
        self._hello = hello
        self._channel = channel

    @property
    def num_heard(self) -> int:  # type: ignore[override]
        return self._channel.num_heard

    def read_hello(self, timeout_s: float) -> Message:
        return self._hello

    @property
    def reply_slot(self) -> Slot:
        return self._channel.reply

    def welcome(self, header: WelcomeHeader) -> None:
        self._channel.to_worker.put(header)

    def refuse(self, reason: str) -> None:
        self._channel.to_worker.put(ConnectionClosedError(reason, refused=True))

    def attend(self, attendant: Attendant) -> None:
        if self._channel.is_attended:
            self._channel.attendant = attendant

    def receive(self, timeout_s: float) -> PushHeader | None:
        said = _take(self._channel.to_server, timeout_s)
        if isinstance(said, int):
            self.finished_at = said
            return None
        assert said is None or isinstance(said, PushHeader)
        if said is not None:
            self._channel.num_received += 1
        return said

    def gradient_slot(self, header: PushHeader) -> Slot:
        return self._channel.gradients[(self._channel.num_received - 1) % 2]

    def send(self, header: ReplyHeader) -> None:
        self._channel.to_worker.put(header)

    def is_open(self) -> bool:
        return not (self._channel.worker_left or self._channel.server_left)

    def close(self, reason: str = "", *, over: bool = False) -> None:
        self._channel.server_left = True
        goodbye = ConnectionClosedError(reason or "the server left", over=over)
        self._channel.to_worker.put(goodbye)
        self._channel.to_server.put(ConnectionClosedError("this end was closed"))

    def answer_calls(self, answer: Answer, timeout_s: float) -> None:
        call = _take(self._channel.to_server, timeout_s)
        if isinstance(call, tuple):
            self._channel.to_worker.put(answer(*call))


class InprocCallEnd(CallEnd):
    def __init__(self, channel: _Channel) -> None:
        self._channel = channel

    def call(
        self, message: Message, tensors: Mapping[str, Tensor], timeout_s: float
    ) -> tuple[Message, dict[str, Tensor]]:
        self._channel.to_server.put((message, tensors))
        answer = _take(self._channel.to_worker, timeout_s)
        if not isinstance(answer, tuple):
            self.close()
            raise ConnectionClosedError(f"no answer from the server within {timeout_s:g} s")
        return answer[0], dict(answer[1])

    def close(self) -> None:
        self._channel.to_server.put(ConnectionClosedError("the master left"))


class InprocListener(Listener):
    """A server's door for threads of the same process. `attended`: a worker's own thread does what
    the server does for its pushes, which pays where that is to tell a device what to do."""

    def __init__(self, *, attended: bool = False) -> None:
        self._is_attended = attended
        self._requests: queue.SimpleQueue[InprocServerEnd | ConnectionClosedError] = (
            queue.SimpleQueue()
        )
        self._door = threading.Lock()
        self._closed = False

    def connect(
        self,
        hello: Message,
        layout: Layout,
        timeout_s: float,
        *,
        params: Tensor | None = None,
    ) -> InprocWorkerEnd:
        """Ask to come in, and wait for the welcome. Raises ConnectionClosedError when refused or
        too late.

        `params`, where given, becomes the reply slot's memory: replies then need no further copy.
        """
        channel = self._knock(_Channel(layout, params, attended=self._is_attended), hello)
        welcome = _take(channel.to_worker, timeout_s)
        if not isinstance(welcome, WelcomeHeader):
            raise ConnectionClosedError(f"no answer from the server within {timeout_s:g} s")
        return InprocWorkerEnd(channel, welcome)

    def connect_for_calls(self, hello: Message) -> InprocCallEnd:
        """A connection over which the master asks the server for this and that."""
        return InprocCallEnd(self._knock(_Channel(None, None), {**hello, "calls": True}))

    def accept(self, timeout_s: float) -> ServerEnd | None:
        try:
            request = self._requests.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(request, ConnectionClosedError):
            self._requests.put(request)
            raise request
        return request

    def close(self) -> None:
        with self._door:
            self._closed = True
            for request in self._waiting():
                request.close("the server takes nobody in any more")
            self._requests.put(ConnectionClosedError("the listener was closed"))

    def _knock(self, channel: _Channel, hello: Message) -> _Channel:
        with self._door:
            if self._closed:
                raise ConnectionClosedError("the server takes nobody in any more")
            self._requests.put(InprocServerEnd(channel, hello))
        return channel

    def _waiting(self) -> Iterator[InprocServerEnd]:
        """Take out whoever waits to be let in."""
        while True:
            try:
                request = self._requests.get_nowait()
            except queue.Empty:
                return
            if isinstance(request, InprocServerEnd):
                yield request


class InprocNetwork(Network):
    def __init__(self, listeners: Sequence[InprocListener]) -> None:
        self._listeners = listeners

    def connect(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float, params: Tensor
    ) -> InprocWorkerEnd:
        return self._listeners[shard].connect(hello, layout, timeout_s, params=params)

    def connect_for_calls(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float
    ) -> InprocCallEnd:
        return self._listeners[shard].connect_for_calls(hello)


def _take(mailbox: _Mailbox, timeout_s: float) -> _Said | None:
    """What was said next; a goodbye is left in the box, so that every later call hears it too."""
    try:
        message = mailbox.get(timeout=timeout_s)
    except queue.Empty:
        return None
    if isinstance(message, ConnectionClosedError):
        while not mailbox.empty():
            mailbox.get()  # later goodbyes
        mailbox.put(message)
        raise message.again()
    if isinstance(message, Exception):
        raise message
    return message
