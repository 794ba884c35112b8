"""A parameter server: it holds one shard, and does to it what its discipline says.

One thread takes workers in, and one thread per worker (a session) receives that worker's pushes
and sends its replies. Under the shard's lock: decide, apply, snapshot into the reply slots.
Outside it: sending, each session to its own worker, so that a slow reader delays nobody. The
lock-free discipline runs the same code with no lock and an updater per session. Started by an
engine:

    server = Server(shard, make_discipline("sync", range(2)), listener, index=0, ...)
    server.start(); ...; server.drain(timeout_s); server.close()
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from offbeat.disciplines import Action, Apply, Discipline, Drop, Push, Reply
from offbeat.errors import ConnectionClosedError, in_a_line
from offbeat.events import EventLog
from offbeat.shard import Gradient, Shard, Updater, usable
from offbeat.transport.base import (
    ACCEPTED,
    APPLIED,
    DROPPED,
    DUPLICATE,
    REJECTED,
    Header,
    Listener,
    ServerEnd,
)

POLL_S = 0.2
"""How often a thread that waits for its worker looks whether the server is to stop."""
TICK_S = 0.05
"""How often the discipline is told the time while somebody waits for a reply."""

CLOSE_TIMEOUT_S = 10.0
"""How long a closing server waits for each of its threads; they look up every POLL_S."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A shard's whole state at one version, in memory of its own."""

    version: int
    state: dict[str, Tensor]
    applied: dict[int, tuple[int, int]]


@dataclass(eq=False, slots=True)
class _Wish:
    """Somebody's wish for a snapshot at the first version that is not below this one."""

    at_version: int
    future: "Future[Snapshot]" = field(default_factory=Future)


@dataclass(slots=True)
class _Fate:
    """What becomes of one push: the part of its record that is not in its header."""

    received_s: float
    outcome: str = ACCEPTED
    version: int | None = None
    staleness: int | None = None
    mixed: bool = False
    applied_s: float | None = None
    replied_s: float | None = None


@dataclass(eq=False, slots=True)
class _Session:
    """One worker's connection, and the push of it that is being dealt with.

    Written by its own thread, and under the shard's lock by the thread that closes a sync round or
    lets a bounded worker go on.
    """

    end: ServerEnd
    worker: int
    incarnation: int
    updater: Updater
    reply_made: threading.Condition | None
    """None in lock-free, where a session's own thread makes every reply."""
    push: Header
    fate: _Fate
    gradient: Gradient | None = None
    """None: refused, because an element of it is no usable number."""
    reply: Header | None = None
    """Made, not yet sent."""
    awaits_reply: bool = False


_FATE_FIELDS = [f.name for f in dataclasses.fields(_Fate)]


class Server:
    """`discipline` and `shard` belong to the server from here on."""

    def __init__(
        self,
        shard: Shard,
        discipline: Discipline,
        listener: Listener,
        *,
        index: int,
        fingerprint: str,
        events: EventLog,
        log: logging.Logger,
        clock: Callable[[], float],
    ) -> None:
        self.shard = shard
        self.discipline = discipline
        self.index = index
        self.failure: BaseException | None = None
        self.recent_staleness: deque[int] = deque(maxlen=256)
        self._listener = listener
        self._fingerprint = fingerprint
        self._events = events
        self._log = log
        self._clock = clock
        self._mutex = threading.Lock()
        self._lock: contextlib.AbstractContextManager[Any] = (
            self._mutex if discipline.locked else contextlib.nullcontext()
        )
        self._membership = threading.Lock()
        self._sessions: dict[int, _Session] = {}
        self._wishes: list[_Wish] = []
        self._stopping = False
        self._reason = "the server was stopped"
        self._acceptor = threading.Thread(target=self._accept, name=f"ps-{index}", daemon=True)
        self._threads: list[threading.Thread] = []
        self._shared_updater = shard.make_updater() if discipline.locked else None

    # -- for the engine and the master ---------------------------------------------------------

    def start(self) -> None:
        self._acceptor.start()

    def snapshot(self, at_version: int = 0) -> "Future[Snapshot]":
        """The shard's state at the first version that is at least `at_version`, as soon as it
        is."""
        wish = _Wish(at_version)
        with self._lock:
            self._wishes.append(wish)
            self._grant_wishes()
        return wish.future

    def drain(self, timeout_s: float) -> bool:
        """Wait until every session has ended, and so every accepted gradient is applied."""
        deadline_s = time.monotonic() + timeout_s
        for thread in list(self._threads):
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Take nobody in, end all sessions, and forget wishes for versions that will not come."""
        self._stop()
        self._acceptor.join(CLOSE_TIMEOUT_S)
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)
        for wish in self._wishes:
            wish.future.cancel()

    def _stop(self) -> None:
        """Have every thread of this server come to its end, and tell the workers why."""
        self._stopping = True
        self._listener.close()
        for session in list(self._sessions.values()):
            session.end.close(self._reason)

    def _fail(self, error: Exception) -> None:
        self._log.error("failed", exc_info=error)
        self.failure = self.failure or error
        self._reason = f"server {self.index} failed: {in_a_line(error)}"
        self._stop()

    # -- membership ----------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._stopping:
            try:
                end = self._listener.accept(POLL_S)
            except ConnectionClosedError:
                return
            if end is not None:
                name = f"ps-{self.index}-session-{end.hello['worker']}"
                thread = threading.Thread(target=self._serve, args=(end,), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, end: ServerEnd) -> None:
        """A session's thread, from the handshake to the worker's leaving."""
        try:
            session = self._join(end)
            if session is None:
                return
            try:
                while not self._stopping:
                    header = end.receive(POLL_S)
                    if header is not None:
                        self._handle(session, header)
            except ConnectionClosedError:
                self._log.info("worker %d left", session.worker)
            finally:
                self._leave(session)
            end.close(self._reason)
        except Exception as error:
            self._fail(error)
            end.close(self._reason)

    def _join(self, end: ServerEnd) -> _Session | None:
        worker, incarnation = end.hello["worker"], end.hello["incarnation"]
        if end.hello["fingerprint"] != self._fingerprint:
            end.refuse("worker and server disagree about the model, the optimizer or the protocol")
            return None
        with self._membership, self._lock:
            if worker in self._sessions:
                end.refuse(f"worker {worker} is here already")
                return None
            slot = end.reply_slot
            version, _ = self.shard.read(slot.values, slot.floats, slot.ints)
            welcome = Header(worker, incarnation, 0, version, 0, reply_version=version)
            session = _Session(
                end,
                worker,
                incarnation,
                updater=self._shared_updater or self.shard.make_updater(shared=True),
                reply_made=threading.Condition(self._mutex) if self.discipline.locked else None,
                push=welcome,
                fate=_Fate(self._clock()),
            )
            self._sessions[worker] = session
            self._carry_out(self.discipline.on_join(worker))
        end.welcome(welcome)
        self._log.info("worker %d joined at version %d", worker, version)
        return session

    def _leave(self, session: _Session) -> None:
        with self._membership, self._lock:
            try:
                self._carry_out(self.discipline.on_leave(session.worker))
            finally:
                del self._sessions[session.worker]

    # -- one push ------------------------------------------------------------------------------

    def _handle(self, session: _Session, header: Header) -> None:
        """Follow a gradient: decide, apply and reply in the discipline's order, then record it."""
        self._begin(session, header)
        with self._lock:
            first, *rest = _beats(self._decide(session))
            self._carry_out(first)
        self._send_reply(session)
        for beat in rest:
            with self._lock:
                self._carry_out(beat)
        self._await_reply(session)
        self._record(session)

    def _begin(self, session: _Session, header: Header) -> None:
        """Look at a push before anybody has to wait for it."""
        session.push = header
        session.fate = _Fate(self._clock())
        session.awaits_reply = True
        slot = session.end.gradient_slot(header)
        if header.void or not usable(slot.values):
            session.gradient = None
            session.fate.outcome = REJECTED
        else:
            mask = None if bool(slot.mask.all()) else slot.mask.tolist()
            session.gradient = Gradient(slot.values, mask, slot.floats, slot.ints)

    def _decide(self, session: _Session) -> list[Action]:
        sequence = session.push.sequence
        if not self.shard.claim(session.worker, session.incarnation, sequence):
            session.fate.outcome = DUPLICATE
            return [Reply(session.worker)]
        return self.discipline.on_push(Push(session.worker, sequence))

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Apply(pushes):
                    self._apply([self._sessions[push.worker] for push in pushes])
                case Reply(worker):
                    self._make_reply(self._sessions[worker])
                case Drop(push):
                    self._sessions[push.worker].fate.outcome = DROPPED

    def _apply(self, sessions: Sequence[_Session]) -> None:
        """One update out of what these sessions pushed; a refused gradient takes no part in it."""
        gradients = [s.gradient for s in sessions if s.gradient is not None]
        if not gradients:
            return
        version = sessions[0].updater.apply(gradients)
        applied_s = self._clock()
        for session in sessions:
            if session.gradient is not None:
                session.fate.outcome = APPLIED
                session.fate.version = version
                session.fate.staleness = version - 1 - session.push.base_version
                session.fate.applied_s = applied_s
                self.shard.applied[session.worker] = (session.incarnation, session.push.sequence)
                self.recent_staleness.append(session.fate.staleness)
        self._grant_wishes()

    def _make_reply(self, session: _Session) -> None:
        """Put the newest parameters into the session's slot; its own thread sends them."""
        slot = session.end.reply_slot
        version, session.fate.mixed = self.shard.read(slot.values, slot.floats, slot.ints)
        session.reply = dataclasses.replace(
            session.push, reply_version=version, status=session.fate.outcome
        )
        if session.reply_made is not None:
            session.reply_made.notify()

    def _send_reply(self, session: _Session) -> None:
        """Send the reply, if it is made; only ever called by the session's own thread."""
        if session.reply is not None:
            session.end.send(session.reply)
            session.fate.replied_s = self._clock()
            session.reply = None
            session.awaits_reply = False

    def _await_reply(self, session: _Session) -> None:
        """Wait until another session's push, a leave or a deadline answers this one."""
        if not session.awaits_reply or session.reply_made is None:
            return
        with session.reply_made:
            while session.reply is None and not self._stopping:
                session.reply_made.wait(TICK_S)
                self._carry_out(self.discipline.on_tick(self._clock()))
        self._send_reply(session)
        if session.fate.outcome == ACCEPTED:  # stopped before its round was full
            session.fate.outcome = DROPPED

    def _record(self, session: _Session) -> None:
        push = session.push
        if session.fate.outcome == REJECTED:
            self._log.warning(
                "refused a gradient of worker %d (batch %d): not finite, or far too large",
                session.worker,
                push.batch,
            )
        self._events.record(
            "push",
            shard=self.index,
            worker=session.worker,
            incarnation=session.incarnation,
            sequence=push.sequence,
            batch=push.batch,
            base_version=push.base_version,
            **{name: getattr(session.fate, name) for name in _FATE_FIELDS},
        )

    # -- snapshots -----------------------------------------------------------------------------

    def _grant_wishes(self) -> None:
        for wish in [w for w in self._wishes if w.at_version <= self.shard.version]:
            try:
                self._wishes.remove(wish)
            except ValueError:
                continue  # lock-free: another session's thread was quicker
            version = self.shard.version  # before the copy: lock-free, it may hold more than that
            wish.future.set_result(Snapshot(version, self.shard.state(), dict(self.shard.applied)))


def _beats(actions: Sequence[Action]) -> list[list[Action]]:
    """Cut actions where an Apply follows a Reply: what was replied so far must leave before it."""
    beats: list[list[Action]] = [[]]
    for action in actions:
        if isinstance(action, Apply) and any(isinstance(a, Reply) for a in beats[-1]):
            beats.append([])
        beats[-1].append(action)
    return beats
