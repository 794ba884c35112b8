"""The contract that every transport keeps, and that tests/transport/ holds each of them to.

A connection joins one worker to one server. Its payloads lie in slots, memory that the transport
owns: two gradient slots, used in turn, and one reply slot. A header says what is in them: one for
a push, one for a reply, one for the welcome, which fills the reply slot for the first time. The two
ends may be in different threads, processes or machines; one thread uses each end, except where a
method says otherwise.

    worker                                         server
    link = connect(hello, ...)                     end = listener.accept(t)
                                                   end.read_hello(t)
                                                   fill end.reply_slot; end.welcome(header)
    fill link.gradient_slot                        header = end.receive(t)
    link.push(header)                              read end.gradient_slot(header)
    header = link.wait_reply(t)                    fill end.reply_slot; end.send(header)
    read link.reply_slot
    link.finish(sequence)                          end.receive(t) is None; end.finished_at is set
    link.close()                                   end.receive(t) raises ConnectionClosedError

The master asks a server for other things than gradients; that goes over a connection without slots,
as calls: a message and some tensors there, a message and some tensors back.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from offbeat.accounts import ACCEPTED
from offbeat.errors import ConnectionClosedError
from offbeat.rows import Rows
from offbeat.streams import NO_MARK, Mark, make_mark

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
"""Between two attempts to reach a server; each pause is twice the one before."""

HEADER_BYTES = 84
"""Of each push and reply, over a network or in a box (wire.py)."""
CPU = torch.device("cpu")
Message = dict[str, Any]
"""Plain JSON values: what is said in a handshake or a call."""
Result = TypeVar("Result")

# Every exchange makes pushes and replies anew: frozen, they would take four times as long to make.


@dataclass(slots=True)
class PushHeader:
    """What a worker says of a gradient; it is known by worker, incarnation and sequence."""

    worker: int
    incarnation: int
    sequence: int
    """Counts a worker's pushes from 1."""
    base_version: int
    """The version of the parameters that the gradient was computed on."""
    batch: int
    """Which of the worker's batches it was computed on, counted from 0; of several the last."""
    epoch: int = 0
    """Of the server that it is meant for, which refuses what belongs to another one."""
    shard: int = 0
    void: bool = False
    """The worker found its gradient unusable; there is none in the slot."""
    masked: bool = False
    """Some tensors got no gradient: the slot's mask says which."""
    num_bytes: int = 0
    """How many bytes of the slot's values a codec has filled, or the rows of sparse tensors and all
    that is dense; else there are none to count."""
    num_rows: int = 0
    """How many numbers of the slot's `rows` say which rows these are."""
    speed: float = 0.0
    """How many local steps per second the worker takes; 0: nobody needs to know."""


@dataclass(slots=True)
class ReplyHeader:
    """What a server says to a push, and of the parameters that it sends."""

    sequence: int
    """Of the push that is answered."""
    version: int
    status: str = ACCEPTED
    """What has become of the push: one of the ledger's outcomes."""
    epoch: int = 0
    """How often the server was started again; a worker refuses what belongs to another one."""
    last: bool = False
    """The run is being stopped, and the worker is to take no further step."""
    num_bytes: int = 0
    """How many bytes of the slot's values a codec has filled, or the rows that have changed and all
    that is dense; 0: all are sent."""
    num_rows: int = 0
    """How many numbers of the slot's `rows` say which rows these are."""
    fastest: float = 0.0
    """The speed of the fastest worker that is there, to one that told its own."""


@dataclass(frozen=True, slots=True)
class WelcomeHeader:
    """What a server says to a worker that joins, and of the parameters that it starts with."""

    version: int
    settled_sequence: int = 0
    """The last of this worker's gradients that the shard knows of, because it is in, or was
    refused."""
    epoch: int = 0
    """How often the server was started again."""
    last: bool = False
    """The run is being stopped, and the worker is to take no step."""
    num_bytes: int = 0
    """How many bytes of the slot's values a codec has filled; 0: all are sent."""
    batches: int = 0
    """How many of its batches the worker had gone through with that gradient."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How large the parts of a slot are."""

    num_elements: int
    num_tensors: int
    num_floats: int = 0
    num_ints: int = 0
    num_rates: int = 0
    dtype: torch.dtype = torch.float32
    coded_bytes: int | None = None
    """The most that a codec makes of a gradient; None: it lies in the slot as it is."""
    coded_reply_bytes: int | None = None
    """The same of parameters."""
    codes_always: bool = False
    """Also in memory that both ends share, where less to write is no gain."""
    device: torch.device = CPU
    """Where slots lie, in a transport between threads."""
    rows: Rows | None = None
    """Where sparse tensors lie, of which no more travels than some rows; None: nowhere."""

    @property
    def num_rows(self) -> int:
        """The most numbers that say which rows travel."""
        return 0 if self.rows is None else self.rows.capacity

    def carried(self, *, over_network: bool) -> "Layout":
        """As a transport has it: coded only where fewer bytes are fewer to send."""
        if over_network or self.codes_always:
            return self
        return replace(self, coded_bytes=None, coded_reply_bytes=None)

    @property
    def num_coded(self) -> int:
        """How many values there are, where any are coded; 0: none are."""
        is_coded = self.coded_bytes is not None or self.coded_reply_bytes is not None
        return self.num_elements if is_coded else 0

    @property
    def gradient(self) -> "Layout":
        """Of a gradient slot."""
        return self._of(self.coded_bytes)

    @property
    def reply(self) -> "Layout":
        """Of a reply slot."""
        return self._of(self.coded_reply_bytes)

    def _of(self, num_bytes: int | None) -> "Layout":
        plain = replace(self, coded_bytes=None, coded_reply_bytes=None)
        if num_bytes is None:
            return plain
        return replace(plain, num_elements=num_bytes, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Slot:
    """A payload: gradient or parameters, which tensors got a gradient, buffers (shard 0 only), and
    with a gradient of somebody's own loop the numbers of its optimizer's options."""

    values: Tensor
    mask: Tensor
    floats: Tensor
    ints: Tensor
    rates: Tensor
    mark: Mark = NO_MARK
    """Set by whoever made it, and by the server when it has told the device to fill a reply."""
    rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Which rows of sparse tensors a gradient has, whose values are packed; or which ones have
    changed in a reply, whose values are all in their places."""

    @classmethod
    def allocate(cls, layout: Layout) -> "Slot":
        """One in ordinary memory, or on a device, which says that every tensor has a gradient."""
        return cls(
            torch.zeros(layout.num_elements, dtype=layout.dtype, device=layout.device),
            torch.ones(layout.num_tensors, dtype=torch.uint8),
            torch.zeros(layout.num_floats, device=layout.device),
            torch.zeros(layout.num_ints, dtype=torch.int64, device=layout.device),
            torch.zeros(layout.num_rates, dtype=torch.float64),
            make_mark(layout.device),
            torch.zeros(layout.num_rows, dtype=torch.int64),
        )

    @property
    def is_on_device(self) -> bool:
        return self.values.device.type != "cpu"

    def filled(self, header: PushHeader) -> "Slot":
        """Where a codec fills it, or rows do: with no more of it than they have filled."""
        if self.rows.numel():
            num_values = header.num_bytes // self.values.element_size()
            rows = self.rows[: header.num_rows]
            return replace(self, values=self.values[:num_values], rows=rows)
        return self.coded(header.num_bytes)

    def coded(self, num_bytes: int) -> "Slot":
        """Where a codec fills it: with no more of it than it has filled."""
        if self.values.dtype != torch.uint8:
            return self
        return replace(self, values=self.values[: min(num_bytes, self.values.numel())])

    @property
    def without_rows(self) -> "Slot":
        """With everything in its place, so that nothing has to be said of rows."""
        return replace(self, rows=self.rows[:0]) if self.rows.numel() else self

    def copy_(self, other: "Slot") -> None:
        """Hold what `other` holds."""
        self.values.copy_(other.values)
        self.mask.copy_(other.mask)
        self.floats.copy_(other.floats)
        self.ints.copy_(other.ints)
        self.rates.copy_(other.rates)
        self.rows.copy_(other.rows)


class WorkerEnd(ABC):
    """The worker's end of a connection to one server."""

    welcome: WelcomeHeader
    """The server's answer to the join; its parameters are in `reply_slot`."""
    reply_slot: Slot
    """Written by the server between `push` and the return of `wait_reply`, the worker's
    otherwise."""
    num_coded: int = 0
    """How many values there are, where what lies in slots is a codec's to make and to read
    (codec.py); 0: they are there as they are."""
    coding_s: float = 0.0
    """Seconds of a processor that codecs took so far."""

    @property
    @abstractmethod
    def gradient_slot(self) -> Slot:
        """Where to write the next push's payload. The worker's until `push`, then the server's
        until the reply to the push after it has come."""

    def lend(self, values: Tensor) -> None:  # noqa: B027 - most transports have to copy it anyway
        """Where the worker has its gradients, all of which are written down there before the server
        is told of them, and let alone until its reply has come: a transport in whose slots that may
        be takes it for their memory."""

    @property
    @abstractmethod
    def pushed_slot(self) -> Slot:
        """The payload of the last push as it travels; to be read when the connection has broken, in
        order to push it again over another one."""

    @property
    def replied_slot(self) -> Slot:
        """What came last, as it came."""
        return self.reply_slot

    def prepare(self, header: PushHeader) -> None:  # noqa: B027 - most links have nothing to make
        """Make of the gradient slot's payload what `push` is to send, with the same header, where
        something else is to travel. Nothing leaves yet; a push that was not prepared is so then."""

    @abstractmethod
    def push(self, header: PushHeader) -> None:
        """Hand the gradient slot's payload to the server; waits for nothing but the network to take
        it. When the server is gone nothing happens, and `wait_reply` says so."""

    def push_again(self, header: PushHeader, pushed: Slot) -> None:
        """Hand over what the `pushed_slot` of a connection that broke holds, to the last bit."""
        self.gradient_slot.copy_(pushed)
        self.push(header)

    @abstractmethod
    def wait_reply(self, timeout_s: float) -> ReplyHeader | None:
        """The reply to the last push, or None when about `timeout_s` have passed; then call it
        again. Raises ConnectionClosedError, with the server's reason, when the server is gone."""

    @abstractmethod
    def beat(self) -> None:
        """Tell the server that the worker is alive. Called by any thread; never waits."""

    @abstractmethod
    def finish(self, sequence: int) -> None:
        """Tell the server that the work is done, and that `sequence` was the last push. The
        connection stays, and `wait_reply` raises when the run is over."""

    @abstractmethod
    def close(self) -> None:
        """Leave. The server has everything that was pushed. May be called twice."""


class Attendant(Protocol):
    """A server's, which deals with one worker's pushes in the worker's own thread."""

    def push(self, header: PushHeader) -> None:
        """Deal with it, as far as that takes no waiting for others."""

    def wait(self, timeout_s: float) -> bool:
        """Until the reply is sent, for a while; False: no reply will come."""


class ServerEnd(ABC):
    """The server's end of a connection to one worker."""

    num_heard: int
    """How many messages of the worker have come, beats included; who waits counts the time."""
    finished_at: int | None
    """The sequence of the worker's last push, once it has said that its work is done."""
    num_coded: int = 0
    """As a worker's end has it; known from the hello on."""
    coding_s: float = 0.0
    """Seconds of a processor that codecs took, since somebody last looked and began anew."""

    @abstractmethod
    def read_hello(self, timeout_s: float) -> Message:
        """What the worker says of itself. Raises ConnectionClosedError when `timeout_s` have passed
        without it, or when what came is no hello."""

    @property
    @abstractmethod
    def reply_slot(self) -> Slot:
        """The server's to write from the receipt of a push until `send`, and before `welcome`. A
        connection that is refused before the first use of it never gets any memory."""

    @abstractmethod
    def welcome(self, header: WelcomeHeader) -> None:
        """Take the worker in; the reply slot holds the parameters it starts with."""

    @abstractmethod
    def refuse(self, reason: str) -> None:
        """Send the worker away with a line that it can show to its user, and close."""

    def attend(self, attendant: Attendant) -> None:  # noqa: B027 - most ends have no way to
        """Where worker and server are threads of one process, and little is to be done for a push,
        pushes go to `attendant` from now on instead of to `receive`: no thread waits for another
        one to wake up. Before `welcome`."""

    @property
    def descriptor(self) -> int | None:
        """What becomes readable when something has come of the worker, where one thread can look
        after many ends: there `receive(0.0)` and `send` wait for nothing. None: nothing does."""
        return None

    def has_push(self) -> bool:
        """Whether a push is here that the descriptor may not tell of."""
        return False

    def rest(self, resting: bool) -> None:
        """From now on the descriptor has to tell of every push, or not any more; look at
        `has_push` once more before waiting for it."""
        return

    @abstractmethod
    def receive(self, timeout_s: float) -> PushHeader | None:
        """The next push, or None when about `timeout_s` have passed or the worker has said that
        its work is done. Raises ConnectionClosedError once the worker is gone and everything it
        pushed has been received; half a push is thrown away."""

    @abstractmethod
    def gradient_slot(self, header: PushHeader) -> Slot:
        """The payload of a received push; readable until the reply to the push after it is sent."""

    @abstractmethod
    def send(self, header: ReplyHeader) -> None:
        """Send what is in the reply slot. Waits at most until the network has taken it, for a time
        that is bounded; when the worker is gone nothing happens, and the next `receive` says so."""

    @abstractmethod
    def is_open(self) -> bool:
        """Whether the worker is still there, as far as can be known without reading."""

    @abstractmethod
    def close(self, reason: str = "", *, over: bool = False) -> None:
        """Leave; a waiting worker gets ConnectionClosedError with `reason`; with `over` that says
        that the run is, so that it does not come back. Any thread may call it, also twice."""

    @abstractmethod
    def answer_calls(self, answer: "Answer", timeout_s: float) -> None:
        """Answer the master's next call with what `answer` makes of it; returns after that or after
        about `timeout_s`. Instead of `welcome`, `receive` and `send`, for a hello that asked for
        it."""


Answer = Callable[[Message, Mapping[str, Tensor]], tuple[Message, Mapping[str, Tensor]]]
"""A call's message and tensors -> the answer's."""


class CallEnd(ABC):
    """The master's end of a connection for calls."""

    @abstractmethod
    def call(
        self, message: Message, tensors: Mapping[str, Tensor], timeout_s: float
    ) -> tuple[Message, dict[str, Tensor]]:
        """Ask, and wait for the answer, whose tensors belong to the caller. Raises
        ConnectionClosedError when the server is gone, or `timeout_s` have passed: then the
        connection is closed, since a late answer would be taken for the next one's."""

    @abstractmethod
    def close(self) -> None:
        """Leave. May be called twice."""


class Listener(ABC):
    """Where a server takes connections in."""

    @abstractmethod
    def accept(self, timeout_s: float) -> ServerEnd | None:
        """The next who asks to come in, or None when `timeout_s` have passed.
        Raises ConnectionClosedError after `close`."""

    @abstractmethod
    def close(self) -> None:
        """Take nobody in any more; connections made before go on. May be called twice."""


class Network(ABC):
    """How the servers of a run are reached, by their index."""

    @abstractmethod
    def connect(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float, params: Tensor
    ) -> WorkerEnd:
        """Ask to be taken in by a server, and wait for the welcome. Raises ConnectionClosedError
        when nobody is there, when refused, or when `timeout_s` have passed.

        `params` is where the worker keeps this shard's parameters; a transport that can makes it
        the reply slot's memory.
        """

    @abstractmethod
    def connect_for_calls(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float
    ) -> CallEnd:
        """A connection over which the master asks a server for this and that."""


def keep_trying(
    attempt: Callable[[], Result],
    timeout_s: float,
    stop: threading.Event,
    now: Callable[[], float] = time.monotonic,
) -> Result:
    """What `attempt` returns, however often it takes to reach a server that may be starting anew:
    with growing pauses, until `timeout_s` have passed, `stop` is set, or the server sends us away.
    Then the last ConnectionClosedError is raised."""
    deadline_s = now() + timeout_s
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return attempt()
        except ConnectionClosedError as error:
            late = now() > deadline_s
            if error.over or error.refused or late or stop.wait(pause_s):
                raise
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
