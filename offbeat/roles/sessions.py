"""The workers that are connected to one server, and what is done to its shard on their behalf.

One thread per worker (its session) receives that worker's pushes and sends its replies; with small
slices in shared memory one does so for all (loop.py), and where slots are on a device the worker's
own thread does (attendant.py). What is to be done the ledger says, and here it is carried out.
Under the shard's lock: decide, apply, copy the parameters into reply slots. Outside it: sending, so
that a slow reader delays nobody. The lock-free discipline runs the same code with no lock and an
updater for each thread. Used by roles/server.py:

    sessions = Sessions(shard, Ledger(Sync(range(2))), index=0, ...)
    sessions.load(state)
    sessions.serve(end, worker=0, incarnation=0)     # a thread each, from the hello to the end
"""

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offbeat.accounts import DROPPED, REJECTED
from offbeat.disciplines import Apply, Push, Reply
from offbeat.errors import ConnectionClosedError
from offbeat.ledger import Ledger
from offbeat.pushes import Action, Copy, Dismiss, PushRecord, Send, Snapshot, Write, cut
from offbeat.roles.attendant import SessionAttendant
from offbeat.roles.copies import Copies
from offbeat.roles.journalling import Journalling, Recovered
from offbeat.roles.loop import Loop
from offbeat.roles.rounds import Rounds
from offbeat.roles.session import LARGE_FROM, POLL_S, TICK_S, Session
from offbeat.rows import Known
from offbeat.rules import Gradient
from offbeat.run.events import EventLog
from offbeat.shard import Shard, ShardState, Updater
from offbeat.streams import NO_MARK, Scope, make_mark, make_streams
from offbeat.transport.base import PushHeader, ReplyHeader, ServerEnd, WelcomeHeader

MAKE_WAY_TIMEOUT_S = 10.0
"""How long a worker that comes again waits for its former connection to end."""
WORKER_TIMEOUT_S = 30.0


class Sessions:
    """`shard` and `ledger` belong to the sessions from here on."""

    def __init__(
        self,
        shard: Shard,
        ledger: Ledger,
        *,
        index: int,
        events: EventLog,
        log: logging.Logger,
        clock: Callable[[], float],
        worker_timeout_s: float = WORKER_TIMEOUT_S,
        journalling: Journalling | None = None,
    ) -> None:
        """`journalling`: what a ledger that promises needs."""
        self.shard = shard
        self.ledger = ledger
        self.loaded = threading.Event()
        """The master has given this server its shard."""
        self.recovered: Recovered | None = None
        """What the journal of its former life had beyond that."""
        self._index = index
        self._events = events
        self._log = log
        self._clock = clock
        self._worker_timeout_s = worker_timeout_s
        self._is_locked = ledger.discipline.locked
        self._mutex = threading.Lock()
        self._lock: contextlib.AbstractContextManager[Any] = (
            self._mutex if self._is_locked else contextlib.nullcontext()
        )
        self._is_large = shard.params.numel() >= LARGE_FROM
        self._streams = make_streams(shard.params.device)
        self._turn = make_mark(shard.params.device) if self._is_locked else NO_MARK
        """After what was last told to be done to the shard: every thread has a stream of its own,
        and a device does it in the order in which it was decided on."""
        self.rounds = Rounds(self, self._mutex, self._turn, clock)
        self._copies = Copies()
        """Of the gradients that are pending."""
        self._journalling = journalling
        self._membership = threading.Condition()
        """Held while somebody comes or goes; before the lock, where both are."""
        self._sessions: dict[int, Session] = {}
        self._shared_updater: Updater | None = None  # in lock-free, of those that the loop serves
        self._spare_updaters: list[Updater] = []
        """In lock-free those of sessions that are over, for those that come: what they have counted
        is part of the version."""
        self.loop = Loop(self, clock, f"ps-{index}-loop")

    def in_stream(self) -> Scope:
        """For every thread of the server: where its work on the shard goes."""
        return self._streams.new()()

    # -- for the server ------------------------------------------------------------------------

    def load(self, state: ShardState) -> bool:
        """Go on from `state`; False: there is one already."""
        with self._membership, self._lock:
            if self.loaded.is_set():
                return False
            self.shard.load(state)
            self._streams.wait_for_all()  # sessions have streams of their own
            self.ledger.load(state.accounts)
            if self._journalling is not None:
                self.recovered = self._journalling.recover(
                    self.shard, lambda: self._updater(in_loop=False), self.ledger, state
                )
            self.loaded.set()
        return True

    def on_durable(self, entry: int) -> None:
        """The journal is on the disk up to this entry."""
        self.act(lambda: self.ledger.on_durable(entry))
        self._ring()

    def cover(self, entry: int) -> None:
        """A checkpoint is on the disk, and a snapshot that was taken at this entry as well."""
        if self._journalling is None:
            return
        self.act(self.ledger.on_founded)
        self._ring()
        with self._lock:
            needed = self._journalling.needed_beside(entry)
        self._journalling.journal.forget(needed)

    def wait_for_disk(self, entry: int, timeout_s: float) -> bool:
        """Until the disk has what is shown; False: it does not come to that."""
        return self._journalling is None or self._journalling.journal.wait(entry, timeout_s)

    def tell(self, event: Callable[[], Sequence[Action]]) -> None:
        """Carry out what the ledger answers to something that no push brought about."""
        with self._membership:
            self.act(event)
        self.loop.wake()

    def show(self) -> ShardState:
        """The shard as it is now, for somebody who leaves it as it is."""
        with self._membership, self._lock:
            return self._state()

    def close(self, reason: str, *, over: bool) -> None:
        """End all sessions, and tell the workers why."""
        self.rounds.abandon()
        self._abandon_pending()
        for session in list(self._sessions.values()):
            session.end.close(reason, over=over)

    # -- a worker comes and goes ---------------------------------------------------------------

    def serve(
        self,
        end: ServerEnd,
        worker: int,
        incarnation: int,
        told: Mapping[int, int] | None = None,
    ) -> None:
        """A session's thread, until the worker leaves or the server stops. `told`: which pushes
        the last round had at the server where the worker came in first; None: this is it."""
        session = self._join(end, worker, incarnation, told)
        if session is None:
            return
        try:
            if session.outbox is not None:
                self.loop.serve(session)
            while session.outbox is None and not self.ledger.is_closing:
                header = end.receive(POLL_S)
                if header is not None:
                    self._handle(session, header)
                else:
                    self.look_at(session)
        finally:
            self._leave(session)

    def _join(
        self, end: ServerEnd, worker: int, incarnation: int, told: Mapping[int, int] | None
    ) -> Session | None:
        while not self.loaded.wait(POLL_S):
            if self.ledger.is_closing:
                return None
        admitted = None
        while admitted is None:
            if told is not None and self.rounds.gathers(told):
                with self._membership:
                    if not self._may_come(end, worker, incarnation):
                        return None
                self.tell(lambda: self.ledger.leave_out([worker]))
            self.rounds.wait(told)
            with self._membership:
                if not self._may_come(end, worker, incarnation):
                    return None
                with self._lock:
                    self._pass_over(told)
                    if not self.rounds.must_wait(told):
                        admitted = self._admit(end, worker, incarnation)
        session, welcome, entry = admitted
        self.loop.wake()
        while not self.wait_for_disk(entry, POLL_S):
            if self.ledger.is_closing:
                break
        end.attend(SessionAttendant(self, session))
        end.welcome(welcome)
        joined = "worker %d (incarnation %d) joined at version %d"
        self._log.info(joined, worker, incarnation, welcome.version)
        return session

    def _may_come(self, end: ServerEnd, worker: int, incarnation: int) -> bool:
        """Whether no other process is this worker; if one is, whoever came is told so."""
        has_way = self.ledger.is_outdated(worker, incarnation) or self._make_way(worker)
        if self.ledger.is_outdated(worker, incarnation):  # perhaps since it waited
            end.refuse(f"a newer worker {worker} is here already")
            return False
        if not has_way:
            end.close("this worker's former connection does not come to its end")
        return has_way

    def _admit(
        self, end: ServerEnd, worker: int, incarnation: int
    ) -> tuple[Session, WelcomeHeader, int]:
        """Show it the shard as it is, and have it take part from now on; also in a round that is
        held. Returns the last entry of the journal then, too."""
        reopened = self.rounds.reopen()
        slot = end.reply_slot
        self._turn.order()
        slot.mark.order()
        known = None if self.shard.rows is None else Known()
        version, _ = self.shard.read(slot.values, slot.floats, slot.ints, known=known)
        in_loop = end.descriptor is not None and not self._is_large
        session = self._sessions[worker] = Session(
            end,
            worker,
            incarnation,
            updater=self._updater(in_loop=in_loop),
            reply_made=threading.Condition(self._mutex) if self._is_locked else None,
            outbox=self.loop.outbox if in_loop else None,
            base=slot.values.clone() if self.shard.rule.needs_base else None,
            rows=self.shard.rows,
            known=known,
        )
        slot.mark.set()
        self._turn.set()
        settled, actions = self.ledger.join(worker, incarnation, self._clock())
        self.carry_out(actions)
        self.rounds.go_on(reopened)
        welcome = WelcomeHeader(
            version,
            settled,
            self.ledger.epoch,
            self.ledger.is_draining,
            batches=self.ledger.batches(worker),
        )
        return session, welcome, 0 if self._journalling is None else self._journalling.last

    def _make_way(self, worker: int) -> bool:
        """End what is left of a worker's former session; False: it takes too long."""
        former = self._sessions.get(worker)
        if former is not None:
            former.end.close("another connection of the same worker took this one's place")
        return self._membership.wait_for(lambda: worker not in self._sessions, MAKE_WAY_TIMEOUT_S)

    def _updater(self, *, in_loop: bool) -> Updater:
        """One that no two threads use at the same time."""
        if not (self._is_locked or in_loop):
            if not self._spare_updaters:
                return self.shard.make_updater(shared=True)
            spare = self._spare_updaters.pop()
            spare.mark.order()  # what its last owner told a device to do
            return spare
        if self._shared_updater is None:
            self._shared_updater = self.shard.make_updater(shared=not self._is_locked)
        return self._shared_updater

    def look_at(self, session: Session) -> None:
        """Nothing has come of a worker that is a push: it may be through, or gone."""
        if session.end.finished_at is not None and not session.is_finished:
            self._finish(session, session.end.finished_at)
            return
        worker, num_heard, most_s = session.worker, session.end.num_heard, self._worker_timeout_s
        if self.ledger.silent_s(worker, num_heard, self._clock()) > most_s:
            raise ConnectionClosedError(f"nothing was heard of worker {worker} for {most_s:g} s")

    def _finish(self, session: Session, sequence: int) -> None:
        session.is_finished = True
        self.tell(lambda: self.ledger.finish(session.worker, sequence))
        self._log.info("worker %d finished", session.worker)

    def _leave(self, session: Session) -> None:
        with session.attended:
            session.is_gone = True
            if session.awaits_reply:
                self.close_push(session)
        with self._membership:
            try:
                self.tell(lambda: self.ledger.leave(session.worker))
            finally:
                del self._sessions[session.worker]
                if session.updater is not self._shared_updater:
                    self._spare_updaters.append(session.updater)
                self._membership.notify_all()
        self._log.info("worker %d left", session.worker)

    # -- one push ------------------------------------------------------------------------------

    def _handle(self, session: Session, header: PushHeader) -> None:
        """Follow a gradient to its end, in a thread that may wait for it."""
        self.take(session, header)
        while session.awaits_reply:
            self.await_reply(session)

    def take(self, session: Session, header: PushHeader) -> None:
        """Follow a gradient as far as nobody else has to be waited for."""
        later = self.push(session, header)
        session.send_reply(self._clock)
        if later:
            self.act(lambda: later)
        if not session.awaits_reply:
            self.close_push(session)
        self._ring()

    def _ring(self) -> None:
        """This thread may have made replies for workers that the loop serves."""
        if self.loop.outbox:
            self.loop.wake()

    def push(self, session: Session, header: PushHeader) -> Sequence[Action]:
        """Decide, apply and make replies in the discipline's order, up to where replies have to
        leave; returns what comes after that."""
        if self._is_large:
            session.begin(header, self._clock())
        with self._lock:
            if not self._is_large:
                session.begin(header, self._clock())
            if (held := self.rounds.held) is not None:
                session.awaits_reply = True  # the parameters are not yet those of its reply
                held.events.append(functools.partial(self._push_late, session))
                return ()
            now, later = cut(self.ledger.push(session.record, self.shard.version))
            session.awaits_reply = not (now and isinstance(now[0], Dismiss))
            self.carry_out(now)
        return later

    def act(self, event: Callable[[], Sequence[Action]]) -> None:
        """Carry out what the ledger answers to something else than a push."""
        with self._lock:
            self.carry_out(event())

    def carry_out(self, actions: Sequence[Action]) -> None:
        if actions:
            self._carry_out_all(actions)
        for record in self.ledger.take_decided():
            self._close_pending(record)

    def _carry_out_all(self, actions: Sequence[Action]) -> None:
        self._turn.order()
        for index, action in enumerate(actions):
            if (held := self.rounds.held) is not None and not isinstance(action, Snapshot):
                held.put_off(actions[index:])
                break
            if isinstance(action, Apply):
                self._apply(action.pushes)
                if (held := self.rounds.held) is not None:
                    held.replies = actions[index + 1 :]
                    break
            elif isinstance(action, Reply):
                self._reply_to(action.worker)
            elif isinstance(action, Copy):
                self._copies.keep(action.record, self._sessions[action.record.worker].gradient)
            elif isinstance(action, Snapshot):
                action.request.snapshot = self._snapshot()
            elif isinstance(action, Write):
                assert self._journalling is not None, "whoever promises has one"
                record = action.record
                self._journalling.write(record, self._sessions[record.worker].gradient)
            elif isinstance(action, Send):
                self._release(action.record)
            else:
                assert isinstance(action, Dismiss)
                raise ConnectionClosedError(action.reason, over=True)
        self._turn.set()

    def _apply(self, pushes: Sequence[Push]) -> None:
        if self.shard.joint_clip is not None:
            self.rounds.close(self._updater(in_loop=False), pushes)
            return
        if self._is_locked:  # of those who pushed everybody may be gone
            self._make_update(self._updater(in_loop=False), pushes)
        else:
            session = self._sessions[pushes[0].worker]
            with session.applying:
                self._make_update(session.updater, pushes)
        self.carry_out(self.ledger.due(self.shard.version))

    def _make_update(self, updater: Updater, pushes: Sequence[Push]) -> None:
        """One update out of what these sessions pushed, written down together with it."""
        records = self.ledger.take_part(pushes, self.shard.version)
        gradients = self.gradients_of(records)
        version = updater.apply(gradients) if gradients else None
        for record in records:
            record.lr = updater.lr
            record.norm = None if updater.norm is None else updater.norm.value
        self.ledger.applied(pushes, version, self._clock())
        self.rounds.last = pushes
        if self._journalling is not None:
            falls = self.shard.falls
            self._journalling.updated(pushes, records, version, updater.lr, falls)

    def gradients_of(self, records: Sequence[PushRecord]) -> list[Gradient]:
        found = [record.copy or self._sessions[record.worker].gradient for record in records]
        return [gradient for gradient in found if gradient is not None]

    def _snapshot(self) -> ShardState:
        """For a checkpoint."""
        state = self._state()
        if self._journalling is None:
            return state
        return dataclasses.replace(state, entry=self._journalling.snapshot())

    def _state(self) -> ShardState:
        """The shard and its accounts, with every update in both or in neither."""
        with contextlib.ExitStack() as standing_still:
            if not self._is_locked:
                standing_still.enter_context(self._membership)
                for session in self._sessions.values():
                    standing_still.enter_context(session.applying)
            self._turn.wait()  # for no more than that: somebody may be recording a step
            for updater in self.shard.updaters:
                updater.mark.wait()
            return self.shard.state(self.ledger.copy_accounts())

    def _reply_to(self, worker: int) -> None:
        """Unless it has left while a round was held."""
        session = self._sessions.get(worker)
        if session is not None and session.awaits_reply:
            self._make_reply(session)

    def _make_reply(self, session: Session) -> None:
        """Put the newest parameters into the session's slot, and make the header that goes with
        them; its own thread sends both."""
        slot, record, ledger = session.end.reply_slot, session.record, self.ledger
        version, record.mixed = self.shard.read(
            slot.values, slot.floats, slot.ints, session.updater, session.known
        )
        slot.mark.set()
        journalling = self._journalling
        if journalling is not None and record.outcome == DROPPED and not record.is_settled:
            journalling.dropped(record)
        ledger.replied(record)
        header = ReplyHeader(
            record.sequence,
            version,
            record.outcome,
            ledger.epoch,
            ledger.is_draining,
            fastest=ledger.fastest if record.speed else 0.0,
        )
        waits = journalling is not None and ledger.withholds(record, journalling.last)
        session.take_reply(header, withhold=waits)

    def _release(self, record: PushRecord) -> None:
        """Unless its worker has come anew meanwhile."""
        session = self._sessions.get(record.worker)
        if session is not None and session.record is record and session.withheld is not None:
            session.release()

    def await_reply(self, session: Session) -> None:
        """Wait a moment for another session's push, a leave or a deadline to answer this one."""
        assert session.reply_made is not None, "a lock-free push is answered at once"
        with session.reply_made:
            if session.reply is None and not self.ledger.is_closing:
                session.reply_made.wait(TICK_S)
                self.carry_out(self.ledger.tick(self._clock()))
            is_over = self.ledger.is_closing
            if session.reply is None and not session.end.is_open():  # killed as it waited
                self.carry_out(self.ledger.vanish(session.worker))
                is_over = True
        session.send_reply(self._clock)
        if is_over or not session.awaits_reply:
            self.close_push(session)
        self._ring()

    def close_push(self, session: Session) -> None:
        """It has its reply, or will have none: write it down."""
        record = session.record
        if session.awaits_reply and self.rounds.takes(record):
            session.awaits_reply = False
            return
        if record.is_pending and self._is_still_pending(record):
            session.awaits_reply = False
            return
        if session.awaits_reply or record.is_pending:
            session.awaits_reply = False
            self.ledger.abandon(record)
            if self._journalling is not None and record.outcome == DROPPED:
                with self._lock:
                    self._journalling.abandoned(record)
        self.write_down(record)

    def _is_still_pending(self, record: PushRecord) -> bool:
        """Then it is written down when it is known what becomes of it."""
        with self._lock:
            waits = (record.worker, record.sequence) in self.ledger.pending
            record.is_closed = waits and not self.ledger.is_closing
            return record.is_closed

    def _close_pending(self, record: PushRecord) -> None:
        """It is known what became of it: its memory is free."""
        self._copies.give_back(record)
        journalling = self._journalling
        if journalling is not None and record.outcome == DROPPED and journalling.is_open(record):
            journalling.dropped(record)
        if record.is_closed:
            self.write_down(record)

    def _abandon_pending(self) -> None:
        """The server is stopped. What was answered by one that promises is in its journal."""
        if self._journalling is not None:
            return
        with self._mutex:
            for record in self.ledger.abandon_pending():
                if record.is_closed:
                    record.is_closed = False
                    self.write_down(record)

    def write_down(self, record: PushRecord) -> None:
        if record.outcome == REJECTED:
            refused = (
                "refused a gradient of worker %d (batch %d): not finite, too large, or unreadable"
            )
            self._log.warning(refused, record.worker, record.batch)
        self._events.record_line(record.event_line, self._index)

    def end_round(self, number: int, norm: float) -> None:
        """The round of this number, which is held, goes in."""
        with self._lock:
            self.rounds.end(number, norm)
        self._ring()

    def here(self) -> Sequence[Session]:
        return list(self._sessions.values())  # one may leave

    # -- rounds that are held, or over elsewhere --------------------------------------------------

    def _pass_over(self, told: Mapping[int, int] | None) -> None:
        """What is over where a worker comes from, and was pushed to this server's former self."""
        if told and self.ledger.discipline.in_rounds and self.shard.joint_clip is None:
            self.carry_out(self.ledger.pass_over(told))

    def _push_late(self, session: Session) -> Sequence[Action]:
        """What came while a round was held; nothing comes of it where its worker left meanwhile,
        and was written down."""
        if not session.awaits_reply:
            return ()
        actions = self.ledger.push(session.record, self.shard.version)
        if actions and isinstance(actions[0], Dismiss):  # raised here it would send away the master
            session.end.close(actions[0].reason, over=True)
            return ()
        return actions
