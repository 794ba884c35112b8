"""A parameter server: it holds one shard, and does to it what its discipline says.

One thread takes workers in, and one thread per worker (a session) receives that worker's pushes
and sends its replies. Under the shard's lock: decide, apply, snapshot into the reply slots.
Outside it: sending, each session to its own worker, so that a slow reader delays nobody. The
lock-free discipline runs the same code with no lock and an updater per session.

A server begins empty, and takes workers in as soon as the master has given it its shard's state.
What else the master asks of it is in calls.py. Started by an engine:

    server = Server(shard, Sync(range(2)), listener, index=0, ...)
    server.start(); server.over.wait(); server.close()
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from offbeat.disciplines import Action, Apply, Discipline, Drop, Push, Reply
from offbeat.errors import ConnectionClosedError, in_a_line
from offbeat.events import EventLog
from offbeat.job import disagreement
from offbeat.ledger import ACCEPTED, APPLIED, DROPPED, DUPLICATE, REJECTED, STALE
from offbeat.roles.acceptor import Acceptor
from offbeat.roles.calls import (
    AskStatus,
    Call,
    Drain,
    Finish,
    LeaveOut,
    Load,
    Newest,
    Status,
    Take,
    Want,
    describe_state,
    read_call,
)
from offbeat.rules import Gradient
from offbeat.shard import Shard, ShardState, Updater, usable
from offbeat.transport.base import (
    Listener,
    Message,
    PushHeader,
    ReplyHeader,
    ServerEnd,
    WelcomeHeader,
)

POLL_S = 0.2
"""How often a thread that waits for its worker looks whether the server is to stop."""
TICK_S = 0.05
"""How often the discipline is told the time while somebody waits for a reply."""

CLOSE_TIMEOUT_S = 10.0
"""How long a closing server waits for each of its threads; they look up every POLL_S."""
WORKER_TIMEOUT_S = 30.0
MOST_NUMBERS = 1 << 32
"""Ranks and incarnations that a header has room for."""
LARGE = 500_000
"""Elements from which on gradients are looked at outside of the shard's lock."""


@dataclass(eq=False, slots=True)
class _SnapshotRequest:
    """The master wants a snapshot at the first version that is not below this one."""

    at_version: int
    snapshot: ShardState | None = None


@dataclass(slots=True)
class _PushRecord:
    """What becomes of one push: the part of its event that is not in its header."""

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
    record: _PushRecord
    push: PushHeader = field(init=False)
    """There is none before the first one comes."""
    gradient: Gradient | None = None
    """None: refused, because an element of it is no usable number."""
    reply: ReplyHeader | None = None
    """One that is made, but not yet sent."""
    awaits_reply: bool = False
    is_settled: bool = False
    """The ledger knows what became of its push."""
    base: Tensor | None = None
    """The parameters that its next gradient is computed on, where the rule looks at them."""
    finished: bool = False
    """It has said that its work is done, and waits for the end of the run."""
    applying: threading.Lock = field(default_factory=threading.Lock)
    """Lock-free, held while its gradient goes in and is written down: by nobody else but who takes
    a snapshot, for which everybody stands still a moment."""


class Server:
    """`discipline` and `shard` belong to the server from here on."""

    def __init__(
        self,
        shard: Shard,
        discipline: Discipline,
        listener: Listener | None,
        *,
        index: int,
        agreement: Message,
        events: EventLog,
        log: logging.Logger,
        clock: Callable[[], float],
        epoch: int = 0,
        worker_timeout_s: float = WORKER_TIMEOUT_S,
        budget: int | None = None,
    ) -> None:
        """`agreement`: what whoever comes has to agree with. `budget`: after so many updates no
        gradient is taken any more, and workers are told that the run is over."""
        self.shard = shard
        self.discipline = discipline
        self.index = index
        self.epoch = epoch
        self.failure: BaseException | None = None
        self.over = threading.Event()
        """The master said that the run is over, or this server failed."""
        self.recent_staleness: deque[int] = deque(maxlen=256)
        self._agreement = agreement
        self._budget = budget
        self._events = events
        self._log = log
        self._clock = clock
        self._worker_timeout_s = worker_timeout_s
        self._mutex = threading.Lock()
        self._lock: contextlib.AbstractContextManager[Any] = (
            self._mutex if discipline.locked else contextlib.nullcontext()
        )
        # Looking at a large gradient takes so long that others should not have to wait for it; at
        # a small one, threads that take turns at the interpreter's lock cost more than they gain.
        self._is_large = shard.params.numel() >= LARGE
        self._membership = threading.Condition()
        self._sessions: dict[int, _Session] = {}
        self._finished: set[int] = set()
        self.loaded = threading.Event()
        """The master has given this server its shard."""
        self._requests: list[_SnapshotRequest] = []
        self._request = _SnapshotRequest(0)
        self._taken: ShardState | None = None
        """What the master took last: this server's part of the newest checkpoint."""
        self.stopping = False
        self._draining = False
        """Workers are to take no further step."""
        self._ends_run = True
        self.reason = "the server was stopped"
        self._acceptor = Acceptor(listener, self.serve, f"ps-{index}", log) if listener else None
        self._shared_updater: Updater | None = None

    # -- for the engine ------------------------------------------------------------------------

    def start(self) -> None:
        """Take in whoever comes to the listener; without one, somebody else calls `serve`."""
        if self._acceptor is not None:
            self._acceptor.start()

    def close(self, *, over: bool = True) -> None:
        """Take nobody in, and end all sessions. `over`: so is the run; otherwise the workers look
        for this server again."""
        self._stop(over=over)
        if self._acceptor is not None:
            self._acceptor.join()

    def _stop(self, *, over: bool = True) -> None:
        """Have every thread of this server come to its end, and tell the workers why."""
        self._ends_run = over
        self.stopping = True
        if self._acceptor is not None:
            self._acceptor.close()
        for session in list(self._sessions.values()):
            session.end.close(self.reason, over=over)

    def _fail(self, error: Exception) -> None:
        self._log.error("failed", exc_info=error)
        self.failure = self.failure or error
        self.reason = f"server {self.index} failed: {in_a_line(error)}"
        self._stop()
        self.over.set()

    # -- for the master ------------------------------------------------------------------------

    def answer(
        self, message: Message, tensors: Mapping[str, Tensor]
    ) -> tuple[Message, Mapping[str, Tensor]]:
        return self.answer_call(read_call(message, tensors))

    def answer_call(self, call: Call) -> tuple[Message, Mapping[str, Tensor]]:
        """What a call of the master's or an evaluator's comes to."""
        match call:
            case AskStatus():
                return self._status().message(), {}
            case Load(state):
                self.load(state)
            case Want(version):
                self._want(version)
            case Take() if self._request.snapshot is not None:
                taken = self._taken = self._request.snapshot
                self._request = _SnapshotRequest(0)
                return describe_state(taken), taken.tensors
            case Drain():
                self._draining = True
            case LeaveOut(workers):
                self._leave_out(workers)
            case Newest(after):
                return self._newest(after)
            case Finish(reason):
                self.reason = reason
                self.over.set()
            case _:
                raise ConnectionClosedError(f"the server cannot answer this now: {call.ask}")
        return {}, {}

    def load(self, state: ShardState) -> None:
        """Go on from `state`. Workers that were through come again, and say so."""
        with self._membership, self._lock:
            if self.loaded.is_set():
                return
            self.shard.load(state)
            if self.discipline.locked:
                self._shared_updater = self.shard.make_updater()
            self.loaded.set()
        self._events.record(
            "run", phase="load", shard=self.index, epoch=self.epoch, version=state.version
        )
        self._log.info("serving from version %d, epoch %d", state.version, self.epoch)

    def _status(self) -> Status:
        with self._membership:
            present, finished = frozenset(self._sessions), frozenset(self._finished)
        return Status(
            version=self.shard.version,
            epoch=self.epoch,
            loaded=self.loaded.is_set(),
            finished=finished,
            present=present,
            awaited=frozenset(self.discipline.present - present),
            ready=self._request.snapshot is not None,
            staleness=list(self.recent_staleness),
        )

    def present(self) -> list[int]:
        """The workers that are connected."""
        with self._membership:
            return sorted(self._sessions)

    def finished(self) -> list[int]:
        """The workers that are through."""
        with self._membership:
            return sorted(self._finished)

    def _leave_out(self, workers: Sequence[int]) -> None:
        """Wait no longer for those of these workers that are not here."""
        with self._membership, self._lock:
            for worker in workers:
                if worker not in self._sessions:
                    self._carry_out(self.discipline.on_leave(worker))

    def _newest(self, after: int) -> tuple[Message, Mapping[str, Tensor]]:
        """For an evaluator: what the newest checkpoint has of this shard to score, where it is
        newer than `after`, and whether there will be no other."""
        taken = self._taken
        over = self.over.is_set()
        if taken is None or taken.version <= after:
            return {"over": over}, {}
        values = taken.tensors.get("ema", taken.tensors["params"])
        buffers = {k: v for k, v in taken.tensors.items() if k in ("floats", "ints")}
        return {"over": over, "version": taken.version}, {"values": values, **buffers}

    def _want(self, at_version: int) -> None:
        """Keep a snapshot of the first version that is at least this one, for `take`."""
        with self._lock:
            self._request = _SnapshotRequest(at_version)
            self._requests[:] = [self._request]
            self._take_snapshots()

    def _take_snapshots(self) -> None:
        for request in [r for r in self._requests if r.at_version <= self.shard.version]:
            try:
                self._requests.remove(request)
            except ValueError:
                continue  # lock-free: another session's thread was quicker
            request.snapshot = self._snapshot()

    def _snapshot(self) -> ShardState:
        """The shard and its accounts, with every update in both or in neither."""
        if self.discipline.locked:
            return self.shard.state()
        with contextlib.ExitStack() as standing_still:
            standing_still.enter_context(self._membership)
            for session in self._sessions.values():
                standing_still.enter_context(session.applying)
            return self.shard.state()

    # -- membership ----------------------------------------------------------------------------

    def serve(self, end: ServerEnd, hello: Message) -> None:
        """Deal with somebody who said hello, from there to the leaving: a session's thread."""
        try:
            if not self._is_welcome(end, hello):
                return
            if hello.get("calls"):
                while not self.stopping:
                    end.answer_calls(self.answer, POLL_S)
            else:
                self._serve_worker(end, hello["worker"], hello["incarnation"])
            end.close(self.reason, over=self.stopping and self._ends_run)
        except ConnectionClosedError as error:
            end.close(str(error), over=error.over)
        except Exception as error:
            self._fail(error)
            end.close(self.reason, over=True)

    def _is_welcome(self, end: ServerEnd, hello: Message) -> bool:
        """Whether the two sides mean the same; if not, the other one is told why and sent away."""
        match hello:
            case {"fingerprint": str(theirs), "worker": int(w), "incarnation": int(i)} if (
                0 <= w < MOST_NUMBERS and 0 <= i < MOST_NUMBERS
            ):
                shards = self._agreement.get("num_shards")
                same_shards = hello.get("num_shards", shards) == shards
                if hello.get("shard", self.index) != self.index:
                    reason = f"this is server {self.index}, not {hello['shard']}"
                elif theirs == self._agreement["fingerprint"] and same_shards:
                    return True
                else:  # told as the other side sees it
                    difference = disagreement(self._agreement, hello)
                    reason = f"server {self.index} has another run: {difference}"
            case _:
                reason = "that is no hello"
        end.refuse(reason)
        who = f"worker {hello['worker']}" if isinstance(hello.get("worker"), int) else "somebody"
        self._log.warning("refused %s: %.500s", who, reason)
        return False

    def _serve_worker(self, end: ServerEnd, worker: int, incarnation: int) -> None:
        session = self._join(end, worker, incarnation)
        if session is None:
            return
        try:
            while not self.stopping:
                header = end.receive(POLL_S)
                if header is not None:
                    self._handle(session, header)
                elif end.finished_at is not None and not session.finished:
                    self._finish(session, end.finished_at)
                elif time.monotonic() - end.heard_s > self._worker_timeout_s:
                    raise ConnectionClosedError(
                        f"nothing was heard of worker {worker} for {self._worker_timeout_s:g} s"
                    )
        finally:
            self._leave(session)

    def _join(self, end: ServerEnd, worker: int, incarnation: int) -> _Session | None:
        while not self.loaded.wait(POLL_S):
            if self.stopping:
                return None
        with self._membership:
            former = self._sessions.get(worker)
            if former is not None and incarnation < former.incarnation:
                end.refuse(f"a newer worker {worker} is here already")
                return None
            if former is not None and not self._make_way(former):
                end.close("this worker's former connection does not come to its end")
                return None
            with self._lock:
                slot = end.reply_slot
                version, _ = self.shard.read(slot.values, slot.floats, slot.ints)
                settled = self.shard.ledger.admit(worker)
                welcome = WelcomeHeader(version, settled, self.epoch, self._draining)
                session = _Session(
                    end,
                    worker,
                    incarnation,
                    updater=self._shared_updater or self.shard.make_updater(shared=True),
                    reply_made=threading.Condition(self._mutex) if self.discipline.locked else None,
                    base=slot.values.clone() if self.shard.rule.needs_base else None,
                    record=_PushRecord(self._clock()),
                )
                self._sessions[worker] = session
                self._finished.discard(worker)
                self._carry_out(self.discipline.on_join(worker))
        end.welcome(welcome)
        self._log.info(
            "worker %d (incarnation %d) joined at version %d", worker, incarnation, version
        )
        return session

    def _make_way(self, former: _Session) -> bool:
        """End what is left of a worker's former session; False: it takes too long."""
        former.end.close("another connection of the same worker took this one's place")
        gone = lambda: former.worker not in self._sessions  # noqa: E731
        return self._membership.wait_for(gone, CLOSE_TIMEOUT_S)

    def _finish(self, session: _Session, sequence: int) -> None:
        """The worker has done all of its steps: nobody waits for it any more."""
        session.finished = True
        with self._membership, self._lock:
            self.shard.ledger.finish(session.worker, session.incarnation, sequence)
            self._finished.add(session.worker)
            self._carry_out(self.discipline.on_leave(session.worker))
        self._log.info("worker %d finished", session.worker)

    def _leave(self, session: _Session) -> None:
        with self._membership:
            try:
                # a round that a stop cuts off is not closed
                if not self.stopping and not session.finished:
                    with self._lock:
                        self._carry_out(self.discipline.on_leave(session.worker))
            finally:
                del self._sessions[session.worker]
                self._membership.notify_all()
        self._log.info("worker %d left", session.worker)

    # -- one push ------------------------------------------------------------------------------

    def _handle(self, session: _Session, header: PushHeader) -> None:
        """Follow a gradient: decide, apply and reply in the discipline's order, then record it."""
        if self._is_large:
            self._begin(session, header)
        with self._lock:
            if not self._is_large:
                self._begin(session, header)
            now, later = _cut(self._decide(session))
            self._carry_out(now)
        self._send_reply(session)
        if later:
            with self._lock:
                self._carry_out(later)
        if session.awaits_reply:
            self._await_reply(session)
        self._record(session)

    def _begin(self, session: _Session, header: PushHeader) -> None:
        """Look at a push before anybody has to wait for it."""
        session.push = header
        session.record = _PushRecord(self._clock())
        session.awaits_reply = True
        session.is_settled = False
        slot = session.end.gradient_slot(header)
        if header.void or not usable(slot.values):
            session.gradient = None
            session.record.outcome = REJECTED
        else:
            mask = slot.mask.tolist() if header.masked else None
            session.gradient = Gradient(
                slot.values,
                mask,
                slot.floats,
                slot.ints,
                session.worker,
                header.base_version,
                session.base,
            )

    def _decide(self, session: _Session) -> list[Action]:
        sequence = session.push.sequence
        if self._budget is not None and self.shard.version >= self._budget:
            raise ConnectionClosedError("the run has all of its updates", over=True)
        if session.push.epoch != self.epoch:
            session.record.outcome = STALE
            return [Reply(session.worker)]
        if not self.shard.ledger.claim(session.worker, session.incarnation, sequence):
            session.record.outcome = DUPLICATE
            return [Reply(session.worker)]
        base_version = session.push.base_version
        return self.discipline.on_push(
            Push(session.worker, sequence, base_version, self.shard.version)
        )

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Apply):
                self._apply([self._sessions[push.worker] for push in action.pushes])
            elif isinstance(action, Reply):
                self._make_reply(self._sessions[action.worker])
            elif isinstance(action, Drop):
                self._sessions[action.push.worker].record.outcome = DROPPED

    def _apply(self, sessions: Sequence[_Session]) -> None:
        """One update out of what these sessions pushed, and what became of each of them; a refused
        gradient takes no part in it."""
        if self.discipline.locked:
            self._make_update(sessions)
        else:
            with sessions[0].applying:
                self._make_update(sessions)
        if self._requests:
            self._take_snapshots()

    def _make_update(self, sessions: Sequence[_Session]) -> None:
        if self._budget is not None and self.shard.version >= self._budget:
            for session in sessions:  # it was accepted together with the last one
                session.record.outcome = DROPPED
                self._settle(session)
            return
        gradients = [s.gradient for s in sessions if s.gradient is not None]
        version = sessions[0].updater.apply(gradients) if gradients else None
        applied_s = self._clock()
        for session in sessions:
            if version is not None and session.gradient is not None:
                record = session.record
                record.outcome = APPLIED
                record.version = version
                record.staleness = version - 1 - session.push.base_version
                record.applied_s = applied_s
                self.recent_staleness.append(record.staleness)
            self._settle(session)

    def _settle(self, session: _Session) -> None:
        if session.is_settled:
            return
        session.is_settled = True
        sequence, outcome = session.push.sequence, session.record.outcome
        self.shard.ledger.settle(session.worker, session.incarnation, sequence, outcome)

    def _make_reply(self, session: _Session) -> None:
        """Put the newest parameters into the session's slot, and make the header that goes with
        them; its own thread sends both."""
        slot, record = session.end.reply_slot, session.record
        version, record.mixed = self.shard.read(slot.values, slot.floats, slot.ints)
        if session.base is not None:
            session.base = slot.values.clone()  # the gradient that is under way has the former one
        if record.outcome == DROPPED:  # and answered; one whose worker is gone may come again
            self._settle(session)
        sequence = session.push.sequence
        session.reply = ReplyHeader(sequence, version, record.outcome, self.epoch, self._draining)
        if session.reply_made is not None:
            session.reply_made.notify()

    def _send_reply(self, session: _Session) -> None:
        """Send the reply, if it is made; only ever called by the session's own thread."""
        if session.reply is not None:
            session.end.send(session.reply)
            session.record.replied_s = self._clock()
            session.reply = None
            session.awaits_reply = False

    def _await_reply(self, session: _Session) -> None:
        """Wait until another session's push, a leave or a deadline answers this one."""
        if session.reply_made is None:
            return
        with session.reply_made:
            while session.reply is None and not self.stopping:
                session.reply_made.wait(TICK_S)
                self._carry_out(self.discipline.on_tick(self._clock()))
                if session.reply is None and not session.end.is_open():  # killed as it waited
                    self._carry_out(self.discipline.on_leave(session.worker))
                    break
        self._send_reply(session)
        if session.record.outcome == ACCEPTED:  # stopped before its round was full
            session.record.outcome = DROPPED

    def _record(self, session: _Session) -> None:
        push = session.push
        if session.record.outcome == REJECTED:
            self._log.warning(
                "refused a gradient of worker %d (batch %d): not finite, or far too large",
                session.worker,
                push.batch,
            )
        session_of = (session.worker, session.incarnation)
        self._events.record_line(_push_line, self.index, session_of, push, session.record)


def _push_line(shard: int, session: tuple[int, int], push: PushHeader, record: _PushRecord) -> str:
    """A push's event. There are more of them than of any other, so that it is not put together by
    json."""
    worker, incarnation = session
    return (
        f'{{"kind": "push", "shard": {shard}, "worker": {worker}, "incarnation": {incarnation}, '
        f'"sequence": {push.sequence}, "batch": {push.batch}, '
        f'"base_version": {push.base_version}, "outcome": "{record.outcome}", '
        f'"version": {_json(record.version)}, "staleness": {_json(record.staleness)}, '
        f'"mixed": {_json(record.mixed)}, "received_s": {record.received_s:.6f}, '
        f'"applied_s": {_seconds(record.applied_s)}, "replied_s": {_seconds(record.replied_s)}}}'
    )


def _json(value: int | bool | None) -> str:
    return "null" if value is None else str(value).lower()


def _seconds(value: float | None) -> str:
    return "null" if value is None else f"{value:.6f}"


def _cut(actions: Sequence[Action]) -> tuple[Sequence[Action], Sequence[Action]]:
    """Cut actions where an Apply follows a Reply: what was replied so far must leave before it."""
    replied = False
    for index, action in enumerate(actions):
        if replied and isinstance(action, Apply):
            return actions[:index], actions[index:]
        replied = replied or isinstance(action, Reply)
    return actions, ()
