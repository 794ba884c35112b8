"""A round that a server has closed, and does not let go in before it is told the norm of the whole
gradient, of which it has a slice; norms.py asks for it, and tells it. sessions.py has them:

    rounds = Rounds(host, mutex, turn, clock)
    rounds.close(updater, pushes)       # it is held
    rounds.ask(wait_s=0.2).norms        # of this slice
    rounds.end(number, norm)            # it goes in

Everything is done under the shard's lock, but for what is asked.
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from offbeat.clipping import Arriving
from offbeat.disciplines import Push
from offbeat.ledger import Ledger
from offbeat.pushes import Action, PushRecord
from offbeat.roles.calls import RoundPart
from offbeat.roles.session import POLL_S, Session
from offbeat.rules import Gradient
from offbeat.shard import Begun, Shard, Updater
from offbeat.streams import Mark


@dataclass(eq=False, slots=True)
class ClosedRound:
    """Written under the shard's lock."""

    number: int
    """How many were closed, with this one."""
    pushes: Sequence[Push]
    records: Sequence[PushRecord]
    """Of those that make the update."""
    updater: Updater
    begun: Begun | None = None
    """None: nobody took part."""
    tensors: Sequence[int] = ()
    norms: Arriving | None = None
    """Of this slice's part of each of these tensors."""
    is_held: bool = False
    """The norm of the whole is not known yet."""
    replies: Sequence[Action] = ()
    """What follows when it has gone in."""
    events: list[Callable[[], Sequence[Action]]] = field(default_factory=list)
    """What the ledger is told, and asks for, after that."""
    orphans: list[PushRecord] = field(default_factory=list)
    """Those whose workers left meanwhile."""

    def put_off(self, actions: Sequence[Action]) -> None:
        self.events.append(lambda: actions)

    def part(self, here: RoundPart) -> RoundPart:
        """What a server that is `here` tells of it; waits for a device that measures."""
        norms = [] if self.norms is None else self.norms.values()
        return dataclasses.replace(
            here,
            number=self.number,
            pushes=frozenset((push.worker, push.sequence) for push in self.pushes),
            norms=dict(zip(self.tensors, norms, strict=True)),
        )


class Host(Protocol):
    """What the sessions do."""

    shard: Shard
    ledger: Ledger

    def here(self) -> Sequence[Session]:
        """Those that there are at this moment."""

    def gradients_of(self, records: Sequence[PushRecord]) -> list[Gradient]:
        """Of those that make an update."""

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Under the shard's lock."""

    def write_down(self, record: PushRecord) -> None:
        """It is known what became of it."""


class Rounds:
    """The last round of a server, which may be held."""

    def __init__(
        self, host: Host, mutex: threading.Lock, turn: Mark, clock: Callable[[], float]
    ) -> None:
        """`mutex` is the shard's lock, and `turn` the mark after what was last told to be done to
        it."""
        self.last: Sequence[Push] = ()
        """What the last update was made of, where none is held."""
        self._host = host
        self._turn = turn
        self._clock = clock
        self._mutex = mutex
        self._round: ClosedRound | None = None
        self._changed = threading.Condition(mutex)
        """A round was closed, or has gone in."""
        self._count = 0

    @property
    def held(self) -> ClosedRound | None:
        return self._round if self._round is not None and self._round.is_held else None

    def close(self, updater: Updater, pushes: Sequence[Push]) -> None:
        """Begin an update, which `end` ends; nothing is decided in between."""
        host = self._host
        records = host.ledger.take_part(pushes, host.shard.version)
        self._count += 1
        self._round = ClosedRound(self._count, pushes, records, updater)
        if gradients := host.gradients_of(records):
            self._round.begun = begun = updater.begin(gradients)
            self._round.tensors, self._round.norms = updater.measure(begun)
            self._round.is_held = True
        else:
            host.ledger.applied(pushes, None, self._clock())
        self._changed.notify_all()

    def ask(self, wait_s: float) -> RoundPart:
        """The last round here, as soon as it waits for its norm; after `wait_s` in any case."""
        with self._changed:
            self._changed.wait_for(lambda: self.held or self._host.ledger.is_closing, wait_s)
            found, here = self._round, self._who_is_here()
        return here if found is None else found.part(here)

    def _who_is_here(self) -> RoundPart:
        ledger = self._host.ledger
        accounts = ledger.accounts
        present = frozenset(w for w, m in ledger.members.items() if not m.is_finished)
        here = [session for session in self._host.here() if session.worker in present]
        return RoundPart(
            ledger.epoch,
            present=present,
            waiting=frozenset((s.worker, s.record.sequence) for s in here if s.awaits_reply),
            answered=frozenset(
                (s.worker, accounts[s.worker].sequence if s.worker in accounts else 0)
                for s in here
                if not s.awaits_reply
            ),
            held=self.held is not None,
            version=self._host.shard.version,
            pushes=frozenset((push.worker, push.sequence) for push in self.last),
        )

    def end(self, number: int, norm: float) -> None:
        """The round of this number goes in; said again, that changes nothing."""
        held, host = self.held, self._host
        if held is None or held.begun is None or held.number != number:
            return
        held.is_held = False
        self._turn.order()
        version = held.updater.end(held.begun, norm)
        self._turn.set()
        for record in held.records:
            record.lr, record.norm = held.updater.lr, lambda: norm
        host.ledger.applied(held.pushes, version, self._clock())
        self._write_orphans(held)
        host.carry_out(host.ledger.due(version))
        host.carry_out(held.replies)
        self.go_on(held.events)
        self._changed.notify_all()

    def go_on(self, events: Sequence[Callable[[], Sequence[Action]]]) -> None:
        """With what came while a round was held; it may close the next one."""
        for event in events:
            if (held := self.held) is not None:
                held.events.append(event)
            else:
                self._host.carry_out(event())

    def reopen(self) -> Sequence[Callable[[], Sequence[Action]]]:
        """Take back that a round was closed, since nothing has come of that yet; returns what came
        meanwhile. Who left is not in it any more."""
        held, ledger = self.held, self._host.ledger
        if held is None or held.begun is None or ledger.is_closing:
            return ()
        held.is_held = False
        held.updater.cancel(held.begun)
        ledger.reopen(held.pushes)
        self._write_orphans(held)
        self._round = None
        self._changed.notify_all()
        return held.events

    def abandon(self) -> None:
        """The server is stopped: a round that waits for its norm does not go in."""
        with self._mutex:
            if (held := self.held) is not None:
                held.is_held = False
                self._write_orphans(held)
            self._changed.notify_all()

    # -- who comes and goes meanwhile ----------------------------------------------------------

    def must_wait(self, told: Mapping[int, int] | None) -> bool:
        """Whoever comes takes part in the same round at all servers, and is given its parameters.
        So one that is held has to go in first: always where a worker comes in first, and elsewhere
        if it was over there; if not, the worker is in it there."""
        held, ledger = self.held, self._host.ledger
        if ledger.is_closing:
            return False
        if held is None:
            return told is not None and self.gathers(told)
        if told is None or not ledger.reopens:
            return True
        return any(told.get(push.worker, -1) >= push.sequence for push in held.pushes)

    def gathers(self, told: Mapping[int, int]) -> bool:
        """Whether a round is open here that was over where the worker comes from: this server was
        started anew, and the worker's push for it went to its former self. So nothing comes of
        that worker before the round has gone in; or it would be a step behind here for good."""
        if self._host.shard.joint_clip is None or self.held is not None:
            return False
        return any(
            session.awaits_reply and told.get(session.worker) == session.record.sequence
            for session in self._host.here()
        )

    def wait(self, told: Mapping[int, int] | None) -> None:
        """Without what is held while somebody comes, which everybody else needs meanwhile."""
        with self._changed:
            while self.must_wait(told):
                self._changed.wait(POLL_S)

    def takes(self, record: PushRecord) -> bool:
        """Whether a push whose worker is gone goes in all the same, and is written down then."""
        if self._host.shard.joint_clip is None:
            return False
        with self._mutex:
            held = self.held
            is_in = held is not None and any(one is record for one in held.records)
            if held is not None and is_in:
                held.orphans.append(record)
        return is_in

    def _write_orphans(self, held: ClosedRound) -> None:
        """The round has gone in, or does not."""
        for record in held.orphans:
            self._host.ledger.abandon(record)
            self._host.write_down(record)
