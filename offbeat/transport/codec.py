"""What a gradient looks like on its way, where that is not float32; behind every transport.

A codec makes bytes of a worker's gradient, and the server's makes a gradient of them. The ends here
wrap those of any transport (base.py), which then carries bytes and knows no more than how many; a
slot's values stay float32 for whoever fills or reads them. Without a codec nothing is wrapped.
Parameters, masks and buffers travel as they are.

    link = encoding(network.connect(...), codec)     # roles/exchange.py; codec outlives the link
    end = decoding(end, codec, log.warning)          # roles/server.py
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from offbeat.errors import in_a_line
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
    """A worker has one for each shard, for as long as it lives: what `encode` keeps from one
    gradient to the next, such as what rounding took away, outlives a connection. A server has one
    for each session, and nothing is kept there."""

    @abstractmethod
    def capacity(self, num_elements: int) -> int:
        """The most bytes that `encode` makes of so many values."""

    @abstractmethod
    def encode(self, values: Tensor, wire: Tensor) -> int:
        """Make bytes of float32 `values`, which may be used up, all of them finite. `wire`, of
        uint8, has the capacity for them; returns how many of its bytes, from the first on, are to
        travel. Called once for each gradient, however often that is sent."""

    @abstractmethod
    def decode(self, wire: Tensor, values: Tensor) -> None:
        """Fill `values` with what the bytes that came say. Anybody may have made them: where they
        make no sense a ValueError refuses the gradient."""


def encoding(link: WorkerEnd, codec: Codec | None) -> WorkerEnd:
    """A worker's end over which gradients go as `codec` has them."""
    return link if codec is None else CodedWorkerEnd(link, codec)


def decoding(end: ServerEnd, codec: Codec | None, warn: Callable[[str], None]) -> ServerEnd:
    """The server's end of such a connection, before its welcome; `warn` is told of gradients that
    cannot be decoded."""
    return end if codec is None else CodedServerEnd(end, codec, warn)


class CodedWorkerEnd(WorkerEnd):
    def __init__(self, inner: WorkerEnd, codec: Codec) -> None:
        self.welcome = inner.welcome
        self.reply_slot = inner.reply_slot
        self._inner = inner
        self._codec = codec
        self._values = torch.zeros_like(inner.reply_slot.values)

    @property
    def gradient_slot(self) -> Slot:
        return replace(self._inner.gradient_slot, values=self._values)

    @property
    def pushed_slot(self) -> Slot:
        return self._inner.pushed_slot

    def push(self, header: PushHeader) -> None:
        if not header.void:  # an unusable gradient would stay in what the codec keeps
            wire = self._inner.gradient_slot.values
            header.num_bytes = self._codec.encode(self._values, wire)
        self._inner.push(header)

    def push_again(self, header: PushHeader, pushed: Slot) -> None:
        self._inner.push_again(header, pushed)

    def wait_reply(self, timeout_s: float) -> ReplyHeader | None:
        return self._inner.wait_reply(timeout_s)

    def beat(self) -> None:
        self._inner.beat()

    def finish(self, sequence: int) -> None:
        self._inner.finish(sequence)

    def close(self) -> None:
        self._inner.close()


class CodedServerEnd(ServerEnd):
    """Decodes as soon as a push has come, in the session's own thread: so under no lock. A gradient
    that cannot be decoded is void."""

    def __init__(self, inner: ServerEnd, codec: Codec, warn: Callable[[str], None]) -> None:
        self._inner = inner
        self._codec = codec
        self._warn = warn
        self._values: list[Tensor] = []
        """One is still being applied while the next gradient is decoded into the other."""

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
        return self._inner.reply_slot

    def welcome(self, header: WelcomeHeader) -> None:
        self._values = [torch.zeros_like(self.reply_slot.values) for _ in range(2)]
        self._inner.welcome(header)

    def refuse(self, reason: str) -> None:
        self._inner.refuse(reason)

    def receive(self, timeout_s: float) -> PushHeader | None:
        header = self._inner.receive(timeout_s)
        if header is not None:
            self._values.reverse()
        return header if header is None or header.void else self._decode(header)

    def gradient_slot(self, header: PushHeader) -> Slot:
        return replace(self._inner.gradient_slot(header), values=self._values[0])

    def send(self, header: ReplyHeader) -> None:
        self._inner.send(header)

    def is_open(self) -> bool:
        return self._inner.is_open()

    def close(self, reason: str = "", *, over: bool = False) -> None:
        self._inner.close(reason, over=over)

    def answer_calls(self, answer: Answer, timeout_s: float) -> None:
        self._inner.answer_calls(answer, timeout_s)

    def _decode(self, header: PushHeader) -> PushHeader:
        wire = self._inner.gradient_slot(header).filled(header).values
        try:
            self._codec.decode(wire, self._values[0])
        except Exception as error:  # one worker's bytes are no reason for all others to stop
            who = f"worker {header.worker} (batch {header.batch})"
            self._warn(f"cannot decode the gradient of {who}: {in_a_line(error)}")
            return replace(header, void=True)  # the worker may hold the same object
        return header
