"""What gradients and parameters look like on their way, where that is not float32; behind every
transport.

A codec makes bytes of a worker's gradient, and the server's makes a gradient of them; another one
does the same for the parameters of a reply. The ends here wrap those of any transport (base.py),
which then carries bytes and knows no more than how many; a slot's values stay float32 for whoever
fills or reads them. Whether an end codes at all the transport says (`num_coded`): memory that both
ends share holds everything as it is. Masks and buffers travel as they are.

    link = encoding(network.connect(...), codec, replies)     # roles/exchange.py
    end = decoding(end, codec, log.warning, replies)          # roles/server.py

`codec` outlives the link, `replies` does not. Those that flags name are in codecs.py.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from offbeat.errors import ConnectionClosedError, in_a_line
from offbeat.plugins import Plugin
from offbeat.transport.base import (
    Answer,
    Message,
    PushHeader,
    ReplyHeader,
    ServerEnd,
    Slot,
    WelcomeHeader,
    WorkerEnd,
)


class Codec(Plugin, ABC):
    """Of gradients, a worker has one for each shard, for as long as it lives: what `encode` keeps
    from one gradient to the next, such as what rounding took away, outlives a connection. A server
    has one for each session, and nothing is kept there. Of replies, either end of a connection has
    one that begins and ends with it, and may keep what the other one knows."""

    feeds_back: ClassVar[bool] = False
    """What it leaves out of a gradient is to go with the next one: it is wrapped into
    ErrorFeedback, and need not keep it."""

    @abstractmethod
    def capacity(self, num_elements: int) -> int:
        """The most bytes that `encode` makes of so many values."""

    @abstractmethod
    def encode(self, values: Tensor, wire: Tensor) -> int:
        """Make bytes of float32 `values`, which may be used up; those of a gradient are finite.
        `wire`, of uint8, has the capacity for them; returns how many of its bytes, from the first
        on, are to travel. Called once for each gradient, however often that is sent."""

    @abstractmethod
    def decode(self, wire: Tensor, values: Tensor) -> None:
        """Fill `values` with what the bytes that came say. Anybody may have made them: where they
        make no sense a ValueError refuses the gradient, or ends the connection of a reply."""

    def take_off(self, wire: Tensor, values: Tensor) -> None:
        """Leave in `values`, of which `wire` was made, what it does not say."""
        said = torch.empty_like(values)
        self.decode(wire, said)
        values.sub_(said)

    @property
    def may_keep(self) -> bool:
        """Whether its class has anything to keep."""
        return type(self).state is not Codec.state

    def state(self) -> Mapping[str, Tensor]:
        """What it keeps, so that a worker which is started again can go on with it: the tensors
        themselves. Those as long as the values are cut anew with them."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on with copies of these; none: begin anew."""
        return


class ErrorFeedback(Codec):
    """Another codec, and what that has left out so far, which goes with the next gradient:

    c = encode(g + e);  e = g + e - decode(c)
    """

    name = "error feedback"

    def __init__(self, inner: Codec) -> None:
        self.inner = inner
        self.residual: Tensor | None = None

    def capacity(self, num_elements: int) -> int:
        return self.inner.capacity(num_elements)

    def encode(self, values: Tensor, wire: Tensor) -> int:
        if self.residual is None:
            self.residual = torch.zeros_like(values)
        self.residual.add_(values)
        values.copy_(self.residual)  # which may be used up
        num_bytes = self.inner.encode(values, wire)
        self.inner.take_off(wire[:num_bytes], self.residual)
        return num_bytes

    def decode(self, wire: Tensor, values: Tensor) -> None:
        self.inner.decode(wire, values)

    def state(self) -> Mapping[str, Tensor]:
        return {} if self.residual is None else {"residual": self.residual}

    def load(self, state: Mapping[str, Tensor]) -> None:
        kept = state.get("residual")
        self.residual = None if kept is None else kept.clone()


def encoding(link: WorkerEnd, codec: Codec | None, replies: Codec | None = None) -> WorkerEnd:
    """A worker's end over which gradients go as `codec` has them, and parameters come as `replies`
    has them. Raises ConnectionClosedError where those of the welcome make no sense."""
    is_coded = link.num_coded and (codec is not None or replies is not None)
    return CodedWorkerEnd(link, codec, replies) if is_coded else link


def decoding(
    end: ServerEnd,
    codec: Codec | None,
    warn: Callable[[str], None],
    replies: Codec | None = None,
) -> ServerEnd:
    """The server's end of such a connection, before its welcome; `warn` is told of gradients that
    cannot be decoded."""
    is_coded = end.num_coded and (codec is not None or replies is not None)
    return CodedServerEnd(end, codec, warn, replies) if is_coded else end


class CodedWorkerEnd(WorkerEnd):
    """Encodes in `prepare`, and decodes when a reply has come, both in the worker's thread."""

    def __init__(self, inner: WorkerEnd, codec: Codec | None, replies: Codec | None) -> None:
        self.welcome = inner.welcome
        self.num_coded = inner.num_coded
        self.reply_slot = inner.reply_slot
        self._inner = inner
        self._codec = codec
        self._replies = replies
        self._values = torch.zeros(self.num_coded if codec is not None else 0)
        self._prepared: PushHeader | None = None
        if replies is not None:
            self.reply_slot = replace(inner.reply_slot, values=torch.zeros(self.num_coded))
            self._decode(self.welcome.num_bytes)

    @property
    def gradient_slot(self) -> Slot:
        slot = self._inner.gradient_slot
        return slot if self._codec is None else replace(slot, values=self._values)

    @property
    def pushed_slot(self) -> Slot:
        return self._inner.pushed_slot

    @property
    def replied_slot(self) -> Slot:
        return self._inner.replied_slot

    def prepare(self, header: PushHeader) -> None:
        self._prepared = header
        if self._codec is None or header.void:  # it would stay in what the codec keeps
            return
        begun_s = time.thread_time()
        header.num_bytes = self._codec.encode(self._values, self._inner.gradient_slot.values)
        self.coding_s += time.thread_time() - begun_s

    def push(self, header: PushHeader) -> None:
        if self._prepared is not header:
            self.prepare(header)
        self._inner.push(header)

    def push_again(self, header: PushHeader, pushed: Slot) -> None:
        self._inner.push_again(header, pushed)

    def wait_reply(self, timeout_s: float) -> ReplyHeader | None:
        header = self._inner.wait_reply(timeout_s)
        if header is not None and self._replies is not None:
            self._decode(header.num_bytes)
        return header

    def _decode(self, num_bytes: int) -> None:
        assert self._replies is not None
        begun_s = time.thread_time()
        wire = self._inner.reply_slot.coded(num_bytes).values
        try:
            self._replies.decode(wire, self.reply_slot.values)
        except Exception as error:  # whoever made it, the next connection begins with everything
            self._inner.close()
            reason = f"parameters that make no sense: {in_a_line(error)}"
            raise ConnectionClosedError(reason) from error
        self.coding_s += time.thread_time() - begun_s

    def beat(self) -> None:
        self._inner.beat()

    def finish(self, sequence: int) -> None:
        self._inner.finish(sequence)

    def close(self) -> None:
        self._inner.close()


class CodedServerEnd(ServerEnd):
    """Decodes as soon as a push has come, and encodes when a reply is sent, in the session's own
    thread: so under no lock. A gradient that cannot be decoded is void."""

    def __init__(
        self,
        inner: ServerEnd,
        codec: Codec | None,
        warn: Callable[[str], None],
        replies: Codec | None,
    ) -> None:
        self.num_coded = inner.num_coded
        self._inner = inner
        self._codec = codec
        self._warn = warn
        self._replies = replies
        self._values: list[Tensor] = []
        """One is still being applied while the next gradient is decoded into the other."""
        self._params: Tensor | None = None

    @property
    def num_heard(self) -> int:  # type: ignore[override]
        return self._inner.num_heard

    @property
    def finished_at(self) -> int | None:  # type: ignore[override]
        return self._inner.finished_at

    def read_hello(self, timeout_s: float) -> Message:
        return self._inner.read_hello(timeout_s)

    @property
    def reply_slot(self) -> Slot:
        if self._replies is None:
            return self._inner.reply_slot
        if self._params is None:
            self._params = torch.zeros(self._inner.num_coded)
        return replace(self._inner.reply_slot, values=self._params)

    def welcome(self, header: WelcomeHeader) -> None:
        if self._codec is not None:
            self._values = [torch.zeros(self._inner.num_coded) for _ in range(2)]
        self._inner.welcome(replace(header, num_bytes=self._encode()))

    def refuse(self, reason: str) -> None:
        self._inner.refuse(reason)

    def receive(self, timeout_s: float) -> PushHeader | None:
        header = self._inner.receive(timeout_s)
        if header is None or self._codec is None:
            return header
        self._values.reverse()
        return header if header.void else self._decode(header, self._codec)

    def gradient_slot(self, header: PushHeader) -> Slot:
        slot = self._inner.gradient_slot(header)
        return slot if self._codec is None else replace(slot, values=self._values[0])

    def send(self, header: ReplyHeader) -> None:
        if self._replies is not None:
            header = replace(header, num_bytes=self._encode())
        self._inner.send(header)

    def is_open(self) -> bool:
        return self._inner.is_open()

    def close(self, reason: str = "", *, over: bool = False) -> None:
        self._inner.close(reason, over=over)

    def answer_calls(self, answer: Answer, timeout_s: float) -> None:
        self._inner.answer_calls(answer, timeout_s)

    def _decode(self, header: PushHeader, codec: Codec) -> PushHeader:
        begun_s = time.thread_time()
        wire = self._inner.gradient_slot(header).filled(header).values
        try:
            codec.decode(wire, self._values[0])
        except Exception as error:  # one worker's bytes are no reason for all others to stop
            who = f"worker {header.worker} (batch {header.batch})"
            self._warn(f"cannot decode the gradient of {who}: {in_a_line(error)}")
            return replace(header, void=True)  # the worker may hold the same object
        self.coding_s += time.thread_time() - begun_s
        return header

    def _encode(self) -> int:
        """What is in the reply slot; how many bytes that makes."""
        if self._replies is None:
            return 0
        begun_s = time.thread_time()
        assert self._params is not None, "a reply is written before it is sent"
        num_bytes = self._replies.encode(self._params, self._inner.reply_slot.values)
        self.coding_s += time.thread_time() - begun_s
        return num_bytes
