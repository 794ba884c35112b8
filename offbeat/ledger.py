"""What one server decides and remembers: who is there, and what becomes of every push.

It is told what happened, when, and at which version the shard is, and answers with actions, as the
disciplines do, one of which it asks:

    Apply(pushes)      make one update out of those of these that `take_part` returns
    Reply(worker)      send this worker the newest parameters
    Dismiss(reason)    send away the worker whose push this answers: the run is over
    Snapshot(request)  keep a copy of the shard as it is now
    Copy(record)       keep a copy of this push's gradient: its worker's reply is next
    Write(record)      write this push down in the journal, with its gradient
    Send(record)       the reply to this push, which is made, may leave

The last two are for a server that promises: what it has answered is on its disk. A reply is made
as ever, when the discipline says so, and leaves when the journal is on the disk up to what was
last in it then: so what a worker is shown will be there after any crash, and so will its gradient.

A push whose reply comes before anything is decided on it is *pending*: its worker goes on, and may
push again, before it is applied or dropped. What becomes of it then is told by `take_decided`.

There is no thread, socket, clock or tensor in this file. roles/sessions.py carries the actions out
for live workers; whoever has a virtual clock, and counts updates instead of making them, drives the
very same code (tests/simulation does).

    ledger = Ledger(ApplyReply([0]))
    ledger.join(0, incarnation=0)
    actions = ledger.push(record := PushRecord(0, 0, sequence=1), version=0)
    ledger.take_part(actions[0].pushes, version=0), ledger.applied(actions[0].pushes, 1, now=0.5)

Where the discipline is not `locked`, pushes of different workers may come from different threads at
the same time: what they change here is each worker's own. Who comes and goes is told one at a time.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from offbeat.accounts import (
    ACCEPTED,
    APPLIED,
    DROPPED,
    DUPLICATE,
    STALE,
    Account,
    AccountBook,
    Accounts,
    copied,
)
from offbeat.disciplines import Action as DisciplineAction
from offbeat.disciplines import Apply, Discipline, Drop, Push, Reply
from offbeat.pushes import (
    ABSTAINING,
    Action,
    Copy,
    Dismiss,
    PushRecord,
    Send,
    Snapshot,
    SnapshotRequest,
    Write,
    replies_first,
)

RECENT = 256
"""Of so many gradients the staleness is remembered, for whoever looks on."""


@runtime_checkable
class Reopening(Protocol):
    """A discipline that can take its last Apply back."""

    def on_reopen(self, pushes: Sequence[Push]) -> None:
        """That Apply, of these, and what followed it do not happen; nobody has pushed since. Of
        those who left meanwhile nothing is taken."""


@dataclass(slots=True)
class Member:
    """A worker that is connected."""

    incarnation: int
    is_finished: bool = False
    """It has said that its work is done, and waits for the end of the run."""
    speed: float = 0.0
    """Local steps per second, as it told last; 0: it did not."""
    pushed: int = 0
    """The last push that its connection has brought."""
    num_heard: int = 0
    heard_s: float = 0.0
    """When it was first seen that so many messages had come of it."""


class Ledger:
    """`discipline` belongs to the ledger from here on."""

    def __init__(
        self,
        discipline: Discipline,
        *,
        epoch: int = 0,
        budget: int | None = None,
        in_step: bool = False,
        promises: bool = False,
    ) -> None:
        """`epoch`: how often the server was started before. `budget`: after so many updates no
        gradient is taken any more, and workers are told that the run is over. `in_step`: all
        servers have the same rounds, so that a push of which nothing comes here stands for one,
        unless its connection brought it twice.
        `promises`: nobody is answered before the server's disk has what that says."""
        self.discipline = discipline
        self.epoch = epoch
        self.budget = budget
        self.in_step = in_step
        self.promises = promises
        self.durable = 0
        """The number of the last entry of the journal that is on the disk."""
        self.is_founded = False
        """A checkpoint is, on which the journal rests."""
        self._withheld: dict[int, tuple[PushRecord, int]] = {}
        """By worker, whose reply is made, and which entry it waits for."""
        self.members: dict[int, Member] = {}
        self.finished: set[int] = set()
        """Workers that are through, whether or not they are still connected."""
        self._newest: dict[int, int] = {}
        """The newest incarnation of each worker that ever came, or is in the accounts."""
        self.is_draining = False
        """Workers are to take no further step."""
        self.is_closing = False
        """The server is being stopped: a round that this cuts off is not closed."""
        self.request: SnapshotRequest | None = None
        """The newest one, until it is taken."""
        self.recent_staleness: deque[int] = deque(maxlen=RECENT)
        self._book = AccountBook()
        self.under_way: dict[int, PushRecord] = {}
        """Each worker's last push."""
        self._over: dict[int, int] = {}
        """Of each worker the last push that is of a round which is over at another server."""
        self.pending: dict[tuple[int, int], PushRecord] = {}
        """Those that are, by worker and sequence."""
        self._decided: list[PushRecord] = []
        """That were pending."""
        self._unmet: list[SnapshotRequest] = []
        """The newest request, until it is met."""

    # -- accounts ------------------------------------------------------------------------------

    def load(self, accounts: Mapping[int, Account]) -> None:
        """Go on from a checkpoint's accounts. Workers that were through come again, and say so.
        Whoever promises has lost nothing: what is missing later on came too late."""
        self._book.load(accounts, are_heard=self.promises)
        self._newest = {worker: account.incarnation for worker, account in accounts.items()}

    @property
    def accounts(self) -> Mapping[int, Account]:
        return self._book.accounts

    def copy_accounts(self) -> Accounts:
        """For a checkpoint; of a server that promises, what is pending is in the journal."""
        return copied(self._book.accounts) if self.promises else self._book.copy()

    # -- who is there --------------------------------------------------------------------------

    def is_outdated(self, worker: int, incarnation: int) -> bool:
        """Whether a newer process of this worker is here already, or was: nothing would come of
        what this one pushes, and others would wait for it."""
        return incarnation < self._newest.get(worker, 0)

    def join(self, worker: int, incarnation: int, now: float = 0.0) -> tuple[int, Sequence[Action]]:
        """A worker comes, and no former connection of it is left. Returns the last of its pushes
        that is settled, after which it goes on."""
        self.members[worker] = Member(incarnation, heard_s=now)
        self._newest[worker] = max(incarnation, self._newest.get(worker, 0))
        self.finished.discard(worker)
        settled = self._book.admit(worker, incarnation)
        return settled, self._note(self.discipline.on_join(worker))

    def batches(self, worker: int) -> int:
        """How many of its batches are behind the push after which it goes on."""
        return self._book.batches(worker)

    def finish(self, worker: int, sequence: int) -> Sequence[Action]:
        """The worker has done all of its steps, `sequence` the last: nobody waits for it."""
        member = self.members[worker]
        member.is_finished = True
        self._book.finish(worker, member.incarnation, sequence)
        self.finished.add(worker)
        return self._note(self.discipline.on_leave(worker))

    def vanish(self, worker: int) -> Sequence[Action]:
        """A worker that waits for its reply is not there any more; it will `leave`."""
        return self._note(self.discipline.on_leave(worker))

    def leave(self, worker: int) -> Sequence[Action]:
        """A worker's connection has ended."""
        member = self.members.pop(worker)
        if self._withheld:
            self._withheld.pop(worker, None)
        if self.is_closing or member.is_finished:
            return ()
        return self._note(self.discipline.on_leave(worker))

    def leave_out(self, workers: Sequence[int]) -> Sequence[Action]:
        """Wait no longer for those of these workers that are not here."""
        actions: list[Action] = []
        for worker in workers:
            if worker not in self.members:
                actions += self._note(self.discipline.on_leave(worker))
        return actions

    @property
    def awaited(self) -> frozenset[int]:
        """Workers that are waited for, and are not here."""
        return frozenset(self.discipline.present - set(self.members))

    def silent_s(self, worker: int, num_heard: int, now: float) -> float:
        """For how long nothing has come of a worker, of whom so many messages have come so far."""
        member = self.members[worker]
        if num_heard != member.num_heard:
            member.num_heard, member.heard_s = num_heard, now
        return now - member.heard_s

    @property
    def fastest(self) -> float:
        """The speed of the fastest worker that is here and has work to do; 0: nobody told any."""
        here = list(self.members.values())  # somebody may come meanwhile
        return max((member.speed for member in here if not member.is_finished), default=0.0)

    # -- one push ------------------------------------------------------------------------------

    def push(self, record: PushRecord, version: int) -> Sequence[Action]:
        """A gradient has come."""
        if self.budget is not None and version >= self.budget:
            return (Dismiss("the run has all of its updates"),)
        self.under_way[record.worker] = record
        is_new = self._hear(record)
        if record.epoch != self.epoch:
            record.outcome = STALE
        elif not self._book.claim(record.worker, record.incarnation, record.sequence):
            record.outcome = DUPLICATE
        elif self._over.pop(record.worker, 0) == record.sequence:
            record.outcome = DROPPED
            return (Reply(record.worker), *self._note(self.discipline.on_join(record.worker)))
        takes_turn = self.in_step and is_new and record.worker in self.discipline.present
        if record.outcome in ABSTAINING and not takes_turn:
            return (Reply(record.worker),)
        push = Push(record.worker, record.sequence, record.base_version, version)
        actions = self._note(self.discipline.on_push(push))
        if self.promises and record.outcome != DROPPED:
            record.is_answered_first = replies_first(actions, push)
            return (Write(record), *actions)
        return actions

    def _hear(self, record: PushRecord) -> bool:
        """Whether its connection has not brought it before. A step that is done again, for another
        server, comes over a new one, or of a worker that has said that it was through."""
        member = self.members.get(record.worker)
        if member is None:
            return True
        if 0 < record.speed < math.inf:
            member.speed = record.speed
        is_new, member.pushed = record.sequence > member.pushed, record.sequence
        return is_new

    def pass_over(self, pushes: Mapping[int, int]) -> Sequence[Action]:
        """Rounds that have these pushes are over at another server, and were not made here, since
        this one was started anew: who takes part in the next one there does so here, too."""
        actions: list[Action] = []
        for worker, sequence in pushes.items():
            if worker in self.members or worker in self.discipline.present:
                self._over[worker] = max(sequence, self._over.get(worker, 0))
            record = self.under_way.get(worker)
            if record is None or record.sequence != sequence or not self._is_gathered(record):
                continue
            actions += self._note(self.discipline.on_leave(worker))
            actions += [Reply(worker), *self._note(self.discipline.on_join(worker))]
        return actions

    def _is_gathered(self, record: PushRecord) -> bool:
        """Whether it waits for others, and its worker for it."""
        is_here = record.worker in self.members and not record.is_decided
        return is_here and record.outcome not in (*ABSTAINING, DROPPED)

    def take_part(self, pushes: Sequence[Push], version: int) -> list[PushRecord]:
        """Which of these make the update: none where the budget was spent meanwhile, and not those
        that were rejected."""
        records = [self._record_of(push) for push in pushes]
        if self.budget is not None and version >= self.budget:
            for record in records:
                record.outcome = DROPPED
            return []
        return [record for record in records if record.outcome == ACCEPTED]

    def applied(self, pushes: Sequence[Push], version: int | None, now: float) -> None:
        """The update was made, and is this version; None: nobody took part."""
        for push in pushes:
            record = self._record_of(push)
            if version is not None and record.outcome == ACCEPTED:
                record.outcome = APPLIED
                record.version = version
                record.staleness = version - 1 - record.base_version
                record.applied_s = now
                self.recent_staleness.append(record.staleness)
            if record.outcome not in ABSTAINING:
                self._settle(record)
            if record.is_pending:
                self._end_waiting(record)

    def replied(self, record: PushRecord) -> None:
        """The reply to it is made. Only then is a dropped one settled: one whose worker is gone may
        come again."""
        if record.outcome == DROPPED:
            self._settle(record)

    def abandon(self, record: PushRecord) -> None:
        """Nothing more will become of it, unless it is pending: the server was stopped before its
        round was full."""
        if record.outcome == ACCEPTED and (self.is_closing or not record.is_pending):
            record.outcome = DROPPED

    def take_decided(self) -> Sequence[PushRecord]:
        """Those that were pending, and of which it is known now what becomes of them; once."""
        if not self._decided:
            return ()
        decided, self._decided = self._decided, []
        return decided

    def abandon_pending(self) -> Sequence[PushRecord]:
        """The server was stopped: nothing will become of these any more. No account has them."""
        for record in self.pending.values():
            self.abandon(record)
        return list(self.pending.values())

    @property
    def reopens(self) -> bool:
        """Whether an Apply that was not carried out can be taken back."""
        return isinstance(self.discipline, Reopening)

    def reopen(self, pushes: Sequence[Push]) -> None:
        """The last Apply, of these, is taken back."""
        assert isinstance(self.discipline, Reopening), "asked for by nobody else"
        self.discipline.on_reopen(pushes)

    def tick(self, now: float) -> Sequence[Action]:
        return self._note(self.discipline.on_tick(now))

    def _settle(self, record: PushRecord) -> None:
        if not record.is_settled:
            record.is_settled = True
            self._book.settle(
                record.worker,
                record.incarnation,
                record.sequence,
                record.outcome,
                record.batch + 1,
            )

    def _note(self, actions: Sequence[DisciplineAction]) -> Sequence[Action]:
        """Write down what is dropped, and what is pending from now on; the rest is for whoever
        carries actions out."""
        is_locked = self.discipline.locked
        if is_locked:
            self._decide(actions)
        kept: list[Action] = []
        for action in actions:
            if isinstance(action, Drop):
                self._drop(self._record_of(action.push))
                continue
            if is_locked and isinstance(action, Reply):
                record = self.under_way.get(action.worker)
                if record is not None and self._is_open(record):
                    self._defer(record)
                    kept.append(Copy(record))
            kept.append(action)
        return kept

    def _record_of(self, push: Push) -> PushRecord:
        if self.pending and (found := self.pending.get((push.worker, push.sequence))):
            return found
        return self.under_way[push.worker]

    def _decide(self, actions: Sequence[DisciplineAction]) -> None:
        """A reply may come before what is decided together with it."""
        for action in actions:
            if isinstance(action, Apply):
                for push in action.pushes:
                    self._record_of(push).is_decided = True
            elif isinstance(action, Drop):
                self._record_of(action.push).is_decided = True

    def _is_open(self, record: PushRecord) -> bool:
        known = record.is_decided or record.is_pending
        return not known and record.outcome not in ABSTAINING

    def _drop(self, record: PushRecord) -> None:
        if record.outcome not in ABSTAINING:
            record.outcome = DROPPED
        if record.is_pending:  # its reply was made long ago
            self._settle(record)
            self._end_waiting(record)

    def _defer(self, record: PushRecord) -> None:
        record.is_pending = True
        self.pending[record.worker, record.sequence] = record
        self._book.defer(record.worker, record.incarnation, record.sequence, record.batch + 1)

    def _end_waiting(self, record: PushRecord) -> None:
        del self.pending[record.worker, record.sequence]
        self._decided.append(record)

    # -- what is promised ----------------------------------------------------------------------

    def withholds(self, record: PushRecord, entry: int) -> bool:
        """The reply to it is made, and the journal has come to this entry: whether the reply has to
        wait until `on_durable`, or `on_founded`, says `Send`."""
        if self.is_founded and entry <= self.durable:
            return False
        self._withheld[record.worker] = record, entry
        return True

    def on_durable(self, entry: int) -> Sequence[Action]:
        """The journal is on the disk up to this entry."""
        self.durable = max(self.durable, entry)
        return self._sendable()

    def on_founded(self) -> Sequence[Action]:
        """A checkpoint is on the disk, and what a server that comes anew goes on from: it, or a
        later one."""
        self.is_founded = True
        return self._sendable()

    def _sendable(self) -> Sequence[Action]:
        if not self.is_founded:
            return ()
        found = [record for record, entry in self._withheld.values() if entry <= self.durable]
        for record in found:
            del self._withheld[record.worker]
        return [Send(record) for record in found]

    def restore(self, record: PushRecord) -> None:
        """A former life of the server settled it, so the journal says."""
        newest = self._newest.get(record.worker, 0)
        self._newest[record.worker] = max(record.incarnation, newest)
        self._settle(record)

    def regather(self, answered: Sequence[PushRecord]) -> list[list[PushRecord]]:
        """Which updates to make of what was answered in a former life, and is in none: as when
        nobody is left, what was gathered makes one, and what waited for its turn makes its own."""
        if self.discipline.merges:
            return [list(answered)] if answered else []
        return [[record] for record in answered]

    # -- snapshots -----------------------------------------------------------------------------

    def want(self, at_version: int, version: int) -> Sequence[Action]:
        """The master wants a snapshot; an earlier request that was not met is forgotten."""
        self.request = SnapshotRequest(at_version)
        self._unmet = [self.request]
        return self.due(version)

    @property
    def is_request_met(self) -> bool:
        return self.request is not None and self.request.snapshot is not None

    def take(self) -> Any:
        """What was kept for the newest request, once; None: there is nothing."""
        request = self.request
        if request is None or request.snapshot is None:
            return None
        self.request = None
        return request.snapshot

    def due(self, version: int) -> Sequence[Action]:
        """The snapshot to take, now that the shard is at this version. Of several threads one is
        told so: whoever takes the request out of its list."""
        unmet = self._unmet
        try:
            return (Snapshot(unmet.pop()),) if version >= unmet[0].at_version else ()
        except IndexError:
            return ()
