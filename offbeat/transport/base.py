"""The contract that every transport keeps; tests/test_transport.py holds each of them to it.

A connection joins one worker to one server. Its payloads lie in slots, memory that the transport
owns: two gradient slots, used in turn, and one reply slot. A header says what is in them. One
thread uses each end; the two ends may be in different threads, processes or machines.

    worker                                         server
    link = listener.connect(hello, layout, t)      end = listener.accept(t); read end.hello
                                                   fill end.reply_slot; end.welcome(header)
    fill link.gradient_slot                        header = end.receive(t)
    link.push(header)                              read end.gradient_slot(header)
    header = link.wait_reply(t)                    fill end.reply_slot; end.send(header)
    read link.reply_slot
    link.close()                                   end.receive(t) raises ConnectionClosedError
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ACCEPTED = "accepted"
APPLIED = "applied"
DROPPED = "dropped"
REJECTED = "rejected"
DUPLICATE = "duplicate"


@dataclass(slots=True)
class Header:
    """What is said of a payload. A push fills the upper half, a reply both."""

    worker: int
    incarnation: int
    sequence: int
    """Counts a worker's pushes from 1; 0 in the reply to a join."""
    base_version: int
    """The version of the parameters that the gradient was computed on."""
    batch: int
    """Which of the worker's batches it was computed on."""
    void: bool = False
    """The worker found its gradient unusable; there is none in the slot."""

    reply_version: int = -1
    status: str = ACCEPTED
    """What has become of the push: accepted (will be applied), applied, dropped, rejected,
    duplicate."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How large the parts of a slot are."""

    num_elements: int
    num_tensors: int
    num_floats: int = 0
    num_ints: int = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """A payload: gradient or parameters, which tensors got a gradient, buffers (shard 0 only)."""

    values: Tensor
    mask: Tensor
    floats: Tensor
    ints: Tensor

    @classmethod
    def allocate(cls, layout: Layout) -> "Slot":
        return cls(
            torch.zeros(layout.num_elements),
            torch.ones(layout.num_tensors, dtype=torch.uint8),
            torch.zeros(layout.num_floats),
            torch.zeros(layout.num_ints, dtype=torch.int64),
        )


class WorkerEnd(ABC):
    """The worker's end of a connection to one server."""

    welcome: Header
    """The server's answer to the join; its parameters are in `reply_slot`."""
    reply_slot: Slot
    """Written by the server between `push` and the return of `wait_reply`, the worker's
    otherwise."""

    @property
    @abstractmethod
    def gradient_slot(self) -> Slot:
        """Where to write the next push's payload. The worker's until `push`, then the server's
        until the reply to the push after it has come."""

    @abstractmethod
    def push(self, header: Header) -> None:
        """Hand the gradient slot's payload to the server, without waiting for anything."""

    @abstractmethod
    def wait_reply(self, timeout_s: float) -> Header | None:
        """The reply to the last push, or None when `timeout_s` have passed; then call it again.
        Raises ConnectionClosedError, with the server's reason, when the server is gone."""

    @abstractmethod
    def close(self) -> None:
        """Leave. The server has everything that was pushed. May be called twice."""


class ServerEnd(ABC):
    """The server's end of a connection to one worker."""

    hello: dict[str, Any]
    """What the worker says of itself: plain JSON values."""
    reply_slot: Slot
    """The server's to write from the receipt of a push until `send`."""

    @abstractmethod
    def welcome(self, header: Header) -> None:
        """Take the worker in; the reply slot holds the parameters it starts with."""

    @abstractmethod
    def refuse(self, reason: str) -> None:
        """Send the worker away with a line that it can show to its user, and close."""

    @abstractmethod
    def receive(self, timeout_s: float) -> Header | None:
        """The next push, or None when `timeout_s` have passed. Raises ConnectionClosedError once
        the
        worker is gone and everything it pushed has been received."""

    @abstractmethod
    def gradient_slot(self, header: Header) -> Slot:
        """The payload of a received push; readable until the reply to the push after it is sent."""

    @abstractmethod
    def send(self, header: Header) -> None:
        """Send what is in the reply slot. Never waits for the worker to read it; when the worker is
        gone nothing happens, and the next `receive` says so."""

    @abstractmethod
    def close(self, reason: str = "") -> None:
        """Leave; a waiting worker gets ConnectionClosedError with `reason`. May be called twice."""


class Listener(ABC):
    """Where a server takes connections in."""

    @abstractmethod
    def accept(self, timeout_s: float) -> ServerEnd | None:
        """The next worker that asks to come in, or None when `timeout_s` have passed.
        Raises ConnectionClosedError after `close`."""

    @abstractmethod
    def close(self) -> None:
        """Take nobody in any more; connections made before go on. May be called twice."""
