"""A ledger that promises, in a world whose clock jumps and whose machine goes down: what was
answered is in, once, whatever the disk had by then.

The disk of this world has what it was told of when its last sync began, and perhaps some more. What
recovers (roles/journalling.py) is done here with counts instead of gradients.
"""

import dataclasses
import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from helpers import make_discipline

from offbeat.accounts import ACCEPTED, APPLIED, DROPPED, REJECTED, Accounts
from offbeat.disciplines import Apply, Reply
from offbeat.ledger import Ledger
from offbeat.pushes import Action, PushRecord, Send, Snapshot, Write

DISCIPLINES: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync with a backup": {"backup_workers": 1},
    "apply-reply": {},
    "reply-apply": {},
    "bounded": {"staleness": 2},
    "ringmaster": {"max_delay": 2},
    "rennala": {"collect": 5},
    "buffer": {"buffer_size": 5},
    "buffer with much in it": {"buffer_size": 17},
}
Key = tuple[int, int]


@dataclass(frozen=True)
class Line:
    """An entry of the journal: a push, what made an update, or what was dropped."""

    push: PushRecord | None = None
    update: tuple[Key, ...] = ()
    is_made: bool = False
    dropped: PushRecord | None = None


@dataclass
class Kept:
    version: int
    inside: list[Key]
    accounts: Accounts
    entry: int


class World:
    """One shard that counts its updates, with a journal, and its workers, who never forget."""

    withholds = True
    regathers = True

    def __init__(self, name: str, num_workers: int, num_steps: int, draw: random.Random) -> None:
        self.name, self.num_workers, self.num_steps = name, num_workers, num_steps
        self.draw = draw
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.life = [0] * num_workers
        self.sent = [0] * num_workers
        self.base = [0] * num_workers
        self.epoch = 0
        self.version = 0
        self.inside: list[Key] = []
        self.journal: list[Line] = []
        self.synced = 0
        self.acknowledged: set[Key] = set()
        self.shown: list[int] = [0] * num_workers
        self.kept = Kept(0, [], {}, 0)
        self.ledger = self.make_ledger()
        self.ledger.on_founded()

    def make_ledger(self) -> Ledger:
        workers = range(self.num_workers)
        made = make_discipline(self.name.split(" with ")[0], workers, **DISCIPLINES[self.name])
        return Ledger(made, epoch=self.epoch, promises=True)

    def plan(self, delay_s: float, event: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + delay_s, self.count, event))

    def run(self) -> None:
        for worker in range(self.num_workers):
            self.plan(self.draw.random(), lambda worker=worker: self.rejoin(worker, 0))
        self.plan(0.1, self.sync)
        while len(self.ledger.finished) < self.num_workers:
            assert self.events and self.now < 1000, "somebody waits for ever"
            self.now, _, event = heapq.heappop(self.events)
            event()

    # -- workers -------------------------------------------------------------------------------

    def join(self, worker: int) -> None:
        self.life[worker] += 1
        settled, actions = self.ledger.join(worker, 0, self.now)
        assert settled <= self.sent[worker]
        answered = [sequence for who, sequence in self.acknowledged if who == worker]
        assert max(answered, default=0) <= settled, "what was answered is in"
        self.sent[worker] = settled  # what was not answered is pushed again
        self.carry_out(actions)
        self.see(worker)
        self.go_on(worker)

    def see(self, worker: int) -> None:
        """It is shown the parameters."""
        self.base[worker] = self.shown[worker] = self.version

    def go_on(self, worker: int) -> None:
        life = self.life[worker]
        is_through = self.sent[worker] >= self.num_steps
        then = self.finish if is_through else self.push
        self.plan(self.draw.expovariate(1.0), lambda: then(worker, life))

    def finish(self, worker: int, life: int) -> None:
        if self.life[worker] == life:
            self.carry_out(self.ledger.finish(worker, self.sent[worker]))

    def push(self, worker: int, life: int) -> None:
        if self.life[worker] != life:
            return
        self.sent[worker] += 1
        outcome = REJECTED if self.draw.random() < 0.1 else ACCEPTED
        record = PushRecord(
            worker,
            0,
            self.sent[worker],
            base_version=self.base[worker],
            epoch=self.ledger.epoch,
            outcome=outcome,
        )
        self.carry_out(self.ledger.push(record, self.version))

    def answered(self, record: PushRecord) -> None:
        self.acknowledged.add((record.worker, record.sequence))
        self.go_on(record.worker)

    # -- the server ----------------------------------------------------------------------------

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Write):
                self.journal.append(Line(push=dataclasses.replace(action.record)))
            elif isinstance(action, Apply):
                part = self.ledger.take_part(action.pushes, self.version)
                self.version += bool(part)
                self.inside += [(record.worker, record.sequence) for record in part]
                self.ledger.applied(action.pushes, self.version if part else None, self.now)
                keys = tuple((push.worker, push.sequence) for push in action.pushes)
                self.journal.append(Line(update=keys, is_made=bool(part)))
                self.carry_out(self.ledger.due(self.version))
            elif isinstance(action, Reply):
                self.reply(self.ledger.under_way[action.worker])
            elif isinstance(action, Send):
                self.answered(action.record)
            elif isinstance(action, Snapshot):
                accounts = self.ledger.copy_accounts()
                self.kept = Kept(self.version, list(self.inside), accounts, len(self.journal))
                self.synced = len(self.journal)  # a checkpoint is there when its journal is

    def reply(self, record: PushRecord) -> None:
        self.ledger.replied(record)
        if record.outcome == DROPPED:
            self.journal.append(Line(dropped=dataclasses.replace(record)))
        self.see(record.worker)
        is_withheld = self.ledger.withholds(record, len(self.journal))
        if not (is_withheld and self.withholds):
            self.answered(record)

    def sync(self) -> None:
        """It takes a while; what comes meanwhile is not in it."""
        end, life = len(self.journal), self.epoch
        self.plan(self.draw.expovariate(3.0), lambda: self.is_synced(end, life))

    def is_synced(self, end: int, life: int) -> None:
        if self.epoch == life:
            self.synced = max(self.synced, end)
            actions = self.ledger.on_durable(end)
            self.carry_out(actions if self.withholds else ())
        self.plan(0.01, self.sync)

    def save(self) -> None:
        self.carry_out(self.ledger.want(self.version, self.version))

    def crash(self) -> None:
        """The machine goes down: of what was not synced some may be on the disk."""
        del self.journal[self.draw.randint(self.synced, len(self.journal)) :]
        self.epoch += 1
        self.ledger = self.make_ledger()
        self.ledger.on_founded()
        kept = self.kept
        self.version, self.inside = kept.version, list(kept.inside)
        self.ledger.load(kept.accounts)
        self.recover(kept.entry)
        self.synced = len(self.journal)
        self.ledger.durable = self.synced
        for worker in range(self.num_workers):
            self.life[worker] += 1
            if worker in self.shown_too_much():
                raise AssertionError(f"worker {worker} was shown a version that is gone")
            life = self.life[worker]
            self.plan(
                self.draw.random(), lambda worker=worker, life=life: self.rejoin(worker, life)
            )

    def rejoin(self, worker: int, life: int) -> None:
        if self.life[worker] != life:  # it went down once more
            return
        if self.synced == len(self.journal):
            self.join(worker)
        else:  # what it would be shown is not on the disk yet
            self.plan(0.05, lambda: self.rejoin(worker, life))

    def shown_too_much(self) -> list[int]:
        """Who has a reply that shows what is not there any more."""
        life = [w for w in range(self.num_workers) if (w, self.sent[w]) in self.acknowledged]
        return [w for w in life if self.shown[w] > self.version]

    def recover(self, entry: int) -> None:
        waiting: dict[Key, PushRecord] = {}
        for number, line in enumerate(list(self.journal), start=1):
            if line.push is not None:
                waiting[line.push.worker, line.push.sequence] = line.push
            elif line.dropped is not None:
                waiting.pop((line.dropped.worker, line.dropped.sequence), None)
                if number > entry:
                    self.restore(line.dropped, DROPPED)
            else:
                records = [waiting.pop(key, None) for key in line.update]
                if number > entry:
                    assert all(records), "an update of what is not in the journal"
                    self.make([r for r in records if r is not None], is_made=line.is_made)
        answered = [record for record in waiting.values() if record.is_pending]
        for records in self.ledger.regather(answered) if self.regathers else ():
            self.make(records, is_made=True)
            keys = tuple((record.worker, record.sequence) for record in records)
            self.journal.append(Line(update=keys, is_made=True))

    def make(self, records: Sequence[PushRecord], *, is_made: bool) -> None:
        used = [r for r in records if r.outcome != REJECTED]
        self.version += bool(used) and is_made
        for record in records:
            if record.outcome == REJECTED:
                self.restore(record, REJECTED)
            else:
                self.restore(record, APPLIED if is_made else DROPPED)
                self.inside += [(record.worker, record.sequence)] * is_made

    def restore(self, record: PushRecord, outcome: str) -> None:
        record = dataclasses.replace(record, outcome=outcome, is_settled=False)
        self.ledger.restore(record)

    # -- the oracle ----------------------------------------------------------------------------

    def check(self) -> None:
        assert len(set(self.inside)) == len(self.inside), "none is in twice"
        for worker, account in self.ledger.accounts.items():
            assert account.gradients == self.num_steps
            assert account.applied == sum(who == worker for who, _ in self.inside)
            assert account.lost == 0, "nothing was lost"


def world_of(kind: type[World], name: str, seed: int) -> World:
    draw = random.Random(f"{name} {seed}")
    world = kind(name, num_workers=3, num_steps=15, draw=draw)
    for _ in range(draw.randint(0, 3)):
        world.plan(draw.uniform(0, 20), world.save)
    for _ in range(draw.randint(1, 3)):
        world.plan(draw.uniform(0, 20), world.crash)
    return world


@pytest.mark.parametrize("name", DISCIPLINES)
@pytest.mark.parametrize("seed", range(15))
def test_what_was_answered_is_in_whenever_the_machine_goes_down(name: str, seed: int) -> None:
    world = world_of(World, name, seed)
    world.run()
    world.check()


class Hasty(World):
    """Answers before the disk has it."""

    withholds = False


class Careless(World):
    """Forgets what it has answered, and not applied."""

    regathers = False


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Hasty, name) for name in DISCIPLINES] + [(Careless, "buffer"), (Careless, "rennala")],
)
def test_the_oracle_sees_a_broken_promise(kind: type[World], name: str) -> None:
    caught = 0
    for seed in range(15):
        world = world_of(kind, name, seed)
        try:
            world.run()
            world.check()
        except AssertionError:
            caught += 1
    assert caught > 0
