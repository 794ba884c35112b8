"""Connections between threads of one process: headers through queues, payloads in shared
tensors."""

import queue
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from offbeat.errors import ConnectionClosedError
from offbeat.transport.base import Header, Layout, Listener, ServerEnd, Slot, WorkerEnd

_Mailbox = queue.SimpleQueue[Header | ConnectionClosedError]


class _Channel:
    """What both ends hold: two mailboxes and the slots."""

    def __init__(self, layout: Layout, params: Tensor | None) -> None:
        self.to_server: _Mailbox = queue.SimpleQueue()
        self.to_worker: _Mailbox = queue.SimpleQueue()
        self.gradients = (Slot.allocate(layout), Slot.allocate(layout))
        reply = Slot.allocate(layout)
        if params is not None:
            reply = Slot(params, reply.mask, reply.floats, reply.ints)
        self.reply = reply


class InprocWorkerEnd(WorkerEnd):
    def __init__(self, channel: _Channel, welcome: Header) -> None:
        self.welcome = welcome
        self.reply_slot = channel.reply
        self._channel = channel
        self._num_pushed = 0

    @property
    def gradient_slot(self) -> Slot:
        return self._channel.gradients[self._num_pushed % 2]

    def push(self, header: Header) -> None:
        self._num_pushed += 1
        self._channel.to_server.put(header)

    def wait_reply(self, timeout_s: float) -> Header | None:
        return _take(self._channel.to_worker, timeout_s)

    def close(self) -> None:
        self._channel.to_server.put(ConnectionClosedError("the worker left"))


class InprocServerEnd(ServerEnd):
    def __init__(self, channel: _Channel, hello: dict[str, Any]) -> None:
        self.hello = hello
        self.reply_slot = channel.reply
        self._channel = channel
        self._num_received = 0

    def welcome(self, header: Header) -> None:
        self._channel.to_worker.put(header)

    def refuse(self, reason: str) -> None:
        self.close(reason)

    def receive(self, timeout_s: float) -> Header | None:
        header = _take(self._channel.to_server, timeout_s)
        if header is not None:
            self._num_received += 1
        return header

    def gradient_slot(self, header: Header) -> Slot:
        return self._channel.gradients[(self._num_received - 1) % 2]

    def send(self, header: Header) -> None:
        self._channel.to_worker.put(header)

    def close(self, reason: str = "") -> None:
        self._channel.to_worker.put(ConnectionClosedError(reason or "the server left"))


class InprocListener(Listener):
    """A server's door for threads of the same process."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[InprocServerEnd | ConnectionClosedError] = (
            queue.SimpleQueue()
        )
        self._door = threading.Lock()
        self._closed = False

    def connect(
        self,
        hello: dict[str, Any],
        layout: Layout,
        timeout_s: float,
        *,
        params: Tensor | None = None,
    ) -> InprocWorkerEnd:
        """Ask to come in, and wait for the welcome. Raises ConnectionClosedError when refused or
        too late.

        `params`, where given, becomes the reply slot's memory: replies then need no further copy.
        """
        channel = _Channel(layout, params)
        with self._door:
            if self._closed:
                raise ConnectionClosedError("the server takes nobody in any more")
            self._requests.put(InprocServerEnd(channel, hello))
        welcome = _take(channel.to_worker, timeout_s)
        if welcome is None:
            raise ConnectionClosedError(f"no answer from the server within {timeout_s:g} s")
        return InprocWorkerEnd(channel, welcome)

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
                request.refuse("the server takes nobody in any more")
            self._requests.put(ConnectionClosedError("the listener was closed"))

    def _waiting(self) -> Iterator[InprocServerEnd]:
        """Take out whoever waits to be let in."""
        while True:
            try:
                request = self._requests.get_nowait()
            except queue.Empty:
                return
            if isinstance(request, InprocServerEnd):
                yield request


def _take(mailbox: _Mailbox, timeout_s: float) -> Header | None:
    """The next header; a goodbye is left in the box, so that every later call hears it too."""
    try:
        message = mailbox.get(timeout=timeout_s)
    except queue.Empty:
        return None
    if isinstance(message, ConnectionClosedError):
        while not mailbox.empty():
            mailbox.get()  # later goodbyes
        mailbox.put(message)
        raise ConnectionClosedError(str(message))
    return message
