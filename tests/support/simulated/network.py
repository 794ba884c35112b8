"""Connections between simulated processes, as slow, broken and silent as they may be.

A connection keeps what goes over it in order, as streams do. It may end at any moment, for each
side at another one: then some of what was under way arrives, and the rest never does. In a
partition nothing arrives before it is over. What a link doubles comes twice.

    network = SimulatedNetwork(wires, process)      # a role's
    listener = SimulatedListener(wires, process)    # a server's

Payloads lie in memory that both ends share, or travel with their header, as over TCP.
"""

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from offbeat.errors import ConnectionClosedError
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
from simulated.tasks import Process, Waiters, World

POLLIN = 1
TAKEN = 0.2
"""How likely it is that a message which was under way as a connection broke still arrives."""
NOTICE_S = 0.3
"""How long an end may take, at the most, to notice that its connection is broken."""


@dataclass
class Conditions:
    """How the network is at the moment."""

    latency_s: float = 0.001
    doubles: float = 0.0
    """How likely it is that a push or a reply comes twice."""
    silent: set[frozenset[str]] = field(default_factory=set)
    """Pairs of processes that do not hear each other."""


class Wires:
    """All connections of a run."""

    def __init__(self, world: World, *, inline: bool, patience_s: float) -> None:
        """`inline`: payloads travel; `patience_s`: how long a connection lasts over which nothing
        comes back."""
        self.world = world
        self.inline = inline
        self.patience_s = patience_s
        self.conditions = Conditions()
        self.listeners: dict[int, SimulatedListener] = {}
        """By the server's index, where the newest one is to be found."""
        self.lines: list[Line] = []
        self.descriptors = Descriptors(world)
        self.are_polled = False
        """One thread of a server serves all of its workers."""
        self.watch: Callable[[str, Any, Any], None] = lambda what, line, said: None

    def is_silent(self, one: Process, other: Process) -> bool:
        return bool(self.conditions.silent) and (
            frozenset((one.name, other.name)) in self.conditions.silent
        )

    def part(self, one: str, other: str, length_s: float) -> None:
        """These two do not hear each other for so long. Who sends into it gives up in the end."""
        pair = frozenset((one, other))
        self.conditions.silent.add(pair)
        self.world.at(length_s, lambda: self._meet(pair))
        if length_s > self.patience_s:
            self.world.at(self.patience_s, lambda: self._give_up(pair))

    def _meet(self, pair: frozenset[str]) -> None:
        self.conditions.silent.discard(pair)
        for line in self.between(pair):
            line.flow()

    def _give_up(self, pair: frozenset[str]) -> None:
        for line in self.between(pair):
            line.cut(notice_s=(0.0, self.patience_s))

    def between(self, pair: frozenset[str]) -> list["Line"]:
        self.lines = [line for line in self.lines if not line.is_over]
        return [line for line in self.lines if line.names == pair]

    def died(self, process: Process) -> None:
        for line in list(self.lines):
            if process in (line.client, line.server):
                line.cut(notice_s=(0.0, 0.0))
        self.lines = [line for line in self.lines if not line.is_over]


class Descriptors:
    """The numbers that a server's thread looks at several connections by; the lowest that is free
    is the next one."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.held: dict[int, Pipe | Bell] = {}
        self.waiters = Waiters(world)

    def take(self, what: "Pipe | Bell") -> int:
        number = next(n for n in itertools.count(3) if n not in self.held)
        self.held[number] = what
        return number

    def give_back(self, number: int) -> None:
        self.held.pop(number, None)
        self.ring()

    def ring(self) -> None:
        """Whoever waits looks again."""
        self.waiters.wake()

    def select(self) -> SimpleNamespace:
        """What modules find in the place of select."""
        return SimpleNamespace(poll=lambda: Poll(self), POLLIN=POLLIN, PIPE_BUF=4096)

    def os(self) -> SimpleNamespace:
        """And in the place of os."""
        return SimpleNamespace(
            pipe=self._pipe,
            set_blocking=lambda number, blocking: None,
            write=self._write,
            read=self._read,
            close=self.give_back,
        )

    def _pipe(self) -> tuple[int, int]:
        bell = Bell()
        return self.take(bell), self.take(bell)

    def _write(self, number: int, raw: bytes) -> None:
        bell = self.held[number]
        assert isinstance(bell, Bell)
        bell.has_rung = True
        self.ring()

    def _read(self, number: int, most: int) -> bytes:
        bell = self.held[number]
        assert isinstance(bell, Bell)
        if not bell.has_rung:
            raise BlockingIOError
        bell.has_rung = False
        return b"\0"


class Bell:
    has_rung = False


class Poll:
    def __init__(self, descriptors: Descriptors) -> None:
        self._descriptors = descriptors
        self._asked: dict[int, int] = {}

    def register(self, number: int, what: int) -> None:
        self._asked[number] = what

    modify = register

    def unregister(self, number: int) -> None:
        del self._asked[number]

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        if not (found := self._ready()) and timeout_ms:
            deadline_s = self._descriptors.world.now_s + timeout_ms / 1e3
            while not found and (left_s := deadline_s - self._descriptors.world.now_s) > 0:
                self._descriptors.waiters.wait(left_s)
                found = self._ready()
        return found

    def _ready(self) -> list[tuple[int, int]]:
        return [(number, what) for number, what in self._asked.items() if self._is(number, what)]

    def _is(self, number: int, what: int) -> bool:
        match self._descriptors.held.get(number):
            case Pipe() as pipe:
                return pipe.ended is not None or (what == POLLIN and bool(pipe.arrived))
            case Bell() as bell:
                return bell.has_rung
        return True  # it is none any more


class Pipe:
    """One direction of a connection."""

    def __init__(self, line: "Line", reader: Process) -> None:
        self.line = line
        self.reader = reader
        self.arrived: deque[Any] = deque()
        self.under_way: deque[tuple[float, Any]] = deque()
        self.readers = Waiters(line.world)
        self.ended: ConnectionClosedError | None = None
        """What whoever reads is told when all that has arrived is read."""
        self.num_beats = 0
        self._last_s = 0.0

    def send(self, said: Any) -> None:
        line, world = self.line, self.line.world
        world.check()
        if line.is_cut or self.ended is not None:
            return
        delay_s = line.wires.conditions.latency_s * (0.5 + world.draw.expovariate(1.0))
        self._last_s = max(self._last_s, world.now_s + delay_s)
        self.under_way.append((self._last_s, said))
        world.at(self._last_s - world.now_s, self.flow)

    def flow(self) -> None:
        """What is due arrives."""
        if self.line.wires.is_silent(self.line.client, self.line.server):
            return
        now_s = self.line.world.now_s + 1e-9
        while self.under_way and self.under_way[0][0] <= now_s:
            self._arrive(self.under_way.popleft()[1])

    def break_off(self, reason: str, notice_s: tuple[float, float]) -> None:
        """Some of what is under way still arrives."""
        draw, world = self.line.world.draw, self.line.world
        if not self.line.wires.is_silent(self.line.client, self.line.server):
            while self.under_way and draw.random() < TAKEN:
                self._arrive(self.under_way.popleft()[1])
        self.under_way.clear()
        error = ConnectionClosedError(reason)
        world.at(draw.uniform(*notice_s), lambda: self._arrive(error))

    def _arrive(self, said: Any) -> None:
        if said == "beat":
            self.num_beats += 1
            return
        if isinstance(said, ConnectionClosedError):
            self.ended = self.ended or said
        elif self.ended is None:
            self.arrived.append(said)
        self.readers.wake(1)
        if self.reader is self.line.server:
            self.line.heard()

    def receive(self, timeout_s: float) -> Any:
        """None: nothing came. Raises why nothing will."""
        world = self.line.world
        world.check()
        if not self.arrived and self.ended is None and timeout_s > 0:
            self.readers.wait(timeout_s)
        if self.arrived:
            return self.arrived.popleft()
        if self.ended is not None:
            raise self.ended.again()
        return None


class Line:
    """One connection, of a worker or the master with a server."""

    def __init__(self, wires: Wires, client: Process, server: Process) -> None:
        self.wires = wires
        self.world = wires.world
        self.client = client
        self.server = server
        self.names = frozenset((client.name, server.name))
        self.is_cut = False
        self.to_server = Pipe(self, server)
        self.to_client = Pipe(self, client)
        self.heard: Callable[[], None] = lambda: None
        """Called when something has come to the server."""
        self.slots: tuple[_Slots, _Slots] | None = None
        wires.lines.append(self)

    @property
    def is_over(self) -> bool:
        return self.to_server.ended is not None and self.to_client.ended is not None

    def flow(self) -> None:
        self.to_server.flow()
        self.to_client.flow()

    def cut(self, notice_s: tuple[float, float] = (0.0, NOTICE_S)) -> None:
        if self.is_cut:
            return
        self.wires.watch("cut", self, None)
        self.is_cut = True
        self.to_server.break_off("the connection broke", notice_s)
        self.to_client.break_off("the connection broke", notice_s)


@dataclass
class _Slots:
    gradients: tuple[Slot, Slot]
    reply: Slot

    @classmethod
    def allocate(cls, layout: Layout) -> "_Slots":
        return cls((Slot.allocate(layout), Slot.allocate(layout)), Slot.allocate(layout))


class SimulatedWorkerEnd(WorkerEnd):
    def __init__(self, line: Line, slots: _Slots, welcome: WelcomeHeader) -> None:
        self.welcome = welcome
        self.line = line
        self.pushed = self.replied = 0
        """The last sequence numbers, noted by whoever watches; and what it was told."""
        self.told = self.version = 0
        self._slots = slots
        self.reply_slot = slots.reply
        self._num_pushed = 0

    @property
    def gradient_slot(self) -> Slot:
        return self._slots.gradients[self._num_pushed % 2]

    @property
    def pushed_slot(self) -> Slot:
        return self._slots.gradients[(self._num_pushed - 1) % 2]

    def push(self, header: PushHeader) -> None:
        line = self.line
        line.world.tell(f"{line.client.name} pushes {header.sequence} to {line.server.name}")
        line.wires.watch("push", self, header)
        self._num_pushed += 1
        payload = self.pushed_slot.values.clone() if line.wires.inline else None
        for _ in range(_times(line)):
            line.to_server.send((header, payload))

    def wait_reply(self, timeout_s: float) -> ReplyHeader | None:
        said = self.line.to_client.receive(timeout_s)
        if said is None:
            return None
        header, payload = said
        if payload is not None:
            self.reply_slot.values.copy_(payload)
        self.line.wires.watch("reply", self, header)
        return header

    def beat(self) -> None:
        self.line.to_server.send("beat")

    def finish(self, sequence: int) -> None:
        self.line.to_server.send(sequence)

    def close(self) -> None:
        self.line.world.check()
        line = self.line
        line.to_server.send(ConnectionClosedError("the worker left"))
        line.to_client.ended = line.to_client.ended or ConnectionClosedError("it was closed")


class SimulatedServerEnd(ServerEnd):
    def __init__(self, line: Line, hello: Message, layout: Layout | None) -> None:
        self.line = line
        self.finished_at: int | None = None
        self._hello = hello
        self._layout = layout
        self._num_received = 0
        self._num_said = 0
        self._is_closed = False
        wires = line.wires
        is_polled = wires.are_polled and layout is not None
        self._descriptor = wires.descriptors.take(line.to_server) if is_polled else None
        if self._descriptor is not None:
            line.heard = wires.descriptors.ring

    @property
    def descriptor(self) -> int | None:
        return None if self._is_closed else self._descriptor

    def rest(self, resting: bool) -> None:
        return

    @property
    def num_heard(self) -> int:  # type: ignore[override]
        return self._num_said + self.line.to_server.num_beats

    def read_hello(self, timeout_s: float) -> Message:
        return self._hello

    @property
    def _mine(self) -> _Slots:
        if self.line.slots is None:
            assert self._layout is not None, "a connection for calls has no slots"
            mine = _Slots.allocate(self._layout)
            theirs = _Slots.allocate(self._layout) if self.line.wires.inline else mine
            self.line.slots = mine, theirs
        return self.line.slots[0]

    @property
    def reply_slot(self) -> Slot:
        return self._mine.reply

    def _payload(self) -> Tensor | None:
        return self._mine.reply.values.clone() if self.line.wires.inline else None

    def welcome(self, header: WelcomeHeader) -> None:
        self.line.wires.watch("welcome", self, header)
        self.line.to_client.send((header, self._payload()))

    def refuse(self, reason: str) -> None:
        self._end(ConnectionClosedError(reason, refused=True))

    def receive(self, timeout_s: float) -> PushHeader | None:
        said = self.line.to_server.receive(timeout_s)
        if said is None:
            return None
        self._num_said += 1
        if isinstance(said, int):
            self.finished_at = said
            return None
        header, payload = said
        self._num_received += 1
        if payload is not None:
            self.gradient_slot(header).values.copy_(payload)
        return header

    def gradient_slot(self, header: PushHeader) -> Slot:
        return self._mine.gradients[(self._num_received - 1) % 2]

    def send(self, header: ReplyHeader) -> None:
        said = (header, self._payload())
        for _ in range(_times(self.line)):
            self.line.to_client.send(said)

    def is_open(self) -> bool:
        return not self._is_closed and self.line.to_server.ended is None

    def close(self, reason: str = "", *, over: bool = False) -> None:
        self._end(ConnectionClosedError(reason or "the server left", over=over))

    def _end(self, told: ConnectionClosedError) -> None:
        self.line.world.check()
        if self._is_closed:
            return
        self._is_closed = True
        self.line.to_client.send(told)
        pipe = self.line.to_server
        pipe.ended = pipe.ended or ConnectionClosedError("this end was closed")
        pipe.arrived.clear()
        pipe.readers.wake()
        if self._descriptor is not None:
            self.line.wires.descriptors.give_back(self._descriptor)

    def answer_calls(self, answer: Answer, timeout_s: float) -> None:
        call = self.line.to_server.receive(timeout_s)
        if call is not None:
            self.line.to_client.send(answer(*call))


class SimulatedCallEnd(CallEnd):
    def __init__(self, line: Line) -> None:
        self.line = line

    def call(
        self, message: Message, tensors: Mapping[str, Tensor], timeout_s: float
    ) -> tuple[Message, dict[str, Tensor]]:
        self.line.to_server.send((message, tensors))
        found = self.line.to_client.receive(timeout_s)
        if found is None:
            self.close()
            raise ConnectionClosedError(f"no answer from the server within {timeout_s:g} s")
        return found[0], dict(found[1])

    def close(self) -> None:
        self.line.world.check()
        self.line.to_server.send(ConnectionClosedError("the master left"))
        pipe = self.line.to_client
        pipe.ended = pipe.ended or ConnectionClosedError("it was closed")


class SimulatedListener(Listener):
    def __init__(self, wires: Wires, process: Process, index: int) -> None:
        self.process = process
        self.wires = wires
        self._is_closed = False
        self._knocking: deque[SimulatedServerEnd] = deque()
        self._waiters = Waiters(wires.world)
        wires.listeners[index] = self

    def knock(self, end: SimulatedServerEnd) -> None:
        if self._is_closed or self.process.is_dead:
            end.line.cut()
            return
        self._knocking.append(end)
        self._waiters.wake(1)

    def accept(self, timeout_s: float) -> ServerEnd | None:
        if not self._knocking and not self._is_closed:
            self._waiters.wait(timeout_s)
        if self._is_closed:
            raise ConnectionClosedError("the listener was closed")
        return self._knocking.popleft() if self._knocking else None

    def close(self) -> None:
        self._is_closed = True
        for end in self._knocking:
            end.close("the server takes nobody in any more")
        self._knocking.clear()
        self._waiters.wake()


class SimulatedNetwork(Network):
    def __init__(self, wires: Wires, process: Process) -> None:
        self._wires = wires
        self._process = process

    def connect(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float, params: Tensor
    ) -> WorkerEnd:
        line = self._dial(shard, hello, layout)
        said = line.to_client.receive(timeout_s)
        if said is None:
            line.cut()
            raise ConnectionClosedError(f"no answer from the server within {timeout_s:g} s")
        welcome, payload = said
        assert line.slots is not None
        if payload is not None:
            line.slots[1].reply.values.copy_(payload)
        end = SimulatedWorkerEnd(line, line.slots[1], welcome)
        self._wires.watch("joined", end, welcome)
        return end

    def connect_for_calls(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float
    ) -> CallEnd:
        return SimulatedCallEnd(self._dial(shard, {**hello, "calls": True}, None))

    def _dial(self, shard: int, hello: Message, layout: Layout | None) -> Line:
        wires, world = self._wires, self._wires.world
        world.check()
        found = wires.listeners.get(shard)
        if found is None or found.process.is_dead:
            world.pause(wires.conditions.latency_s)
            raise ConnectionClosedError(f"nobody is at server {shard}'s place")
        line = Line(wires, self._process, found.process)
        end = SimulatedServerEnd(line, hello, layout)
        self._knock(found, end)
        return line

    def _knock(self, listener: SimulatedListener, end: SimulatedServerEnd) -> None:
        """As soon as it gets through."""
        wires, line = self._wires, end.line
        if line.is_cut:
            return
        if wires.is_silent(line.client, line.server):
            wires.world.at(0.2, lambda: self._knock(listener, end))
            return
        delay_s = wires.conditions.latency_s
        wires.world.at(delay_s, lambda: listener.knock(end))


def _times(line: Line) -> int:
    doubles = line.wires.conditions.doubles
    return 2 if doubles and line.world.draw.random() < doubles else 1
