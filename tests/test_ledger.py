"""The ledger, driven without threads, sockets or waiting: by a world whose clock jumps."""

import heapq
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers import make_discipline

from offbeat.accounts import (
    ACCEPTED,
    APPLIED,
    DROPPED,
    DUPLICATE,
    REJECTED,
    STALE,
    Account,
    Accounts,
    accounts_from,
    accounts_to_json,
)
from offbeat.disciplines import Apply, Reply
from offbeat.ledger import Action, Dismiss, Ledger, PushRecord, Snapshot, cut

DISCIPLINES: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync with a backup": {"backup_workers": 1},
    "sync with a deadline": {"round_timeout_s": 1.5},
    "apply-reply": {},
    "reply-apply": {},
    "lock-free": {},
    "bounded": {"staleness": 2},
    "ringmaster": {"max_delay": 2},
    "rennala": {"collect": 5},
    "buffer": {"buffer_size": 5},
    "buffer with much in it": {"buffer_size": 17},
}


def make_ledger(name: str = "apply-reply", workers: int = 1, **options: Any) -> Ledger:
    chosen = make_discipline(name.split(" with ")[0], range(workers), **DISCIPLINES[name])
    return Ledger(chosen, **options)


class World:
    """One shard that counts its updates instead of making them, and its workers.

    It does what roles/sessions.py and roles/exchange.py do for real ones. `inside` has every
    gradient that is in, so that the books can be held against something.
    """

    def __init__(self, name: str, num_workers: int, num_steps: int, draw: random.Random) -> None:
        self.name = name
        self.num_workers, self.num_steps = num_workers, num_steps
        self.draw = draw
        self.now = 0.0
        self.version = 0
        self.inside: list[tuple[int, int]] = []
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.ledger = make_ledger(name, num_workers)
        self.checkpoint: tuple[int, list[tuple[int, int]], Accounts] = (0, [], {})
        self.life = [0] * num_workers
        """Counts connections, so that what was planned for a former one does not happen."""
        self.incarnation = [0] * num_workers
        self.base = [0] * num_workers
        self.sent = [0] * num_workers

    def plan(self, delay_s: float, event: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + delay_s, self.count, event))

    def run(self) -> None:
        for worker in range(self.num_workers):
            self.plan(self.draw.random(), lambda worker=worker: self.join(worker))
        self.plan(0.1, self.tick)
        while len(self.ledger.finished) < self.num_workers:
            assert self.events and self.now < 1000, "somebody waits for ever"
            self.now, _, event = heapq.heappop(self.events)
            event()

    def tick(self) -> None:
        self.carry_out(self.ledger.tick(self.now))
        self.plan(0.1, self.tick)

    # -- workers -------------------------------------------------------------------------------

    def join(self, worker: int) -> None:
        self.life[worker] += 1
        settled, actions = self.ledger.join(worker, self.incarnation[worker], self.now)
        self.sent[worker] = max(self.sent[worker], settled)
        self.base[worker] = self.version
        self.carry_out(actions)
        self.go_on(worker)

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
        record = PushRecord(
            worker,
            self.incarnation[worker],
            self.sent[worker],
            base_version=self.base[worker],
            epoch=self.ledger.epoch,
            received_s=self.now,
            outcome=REJECTED if self.draw.random() < 0.05 else ACCEPTED,
        )
        self.carry_out(self.ledger.push(record, self.version))

    def kill(self, worker: int) -> None:
        """Its successor knows only what the server tells it."""
        if worker in self.ledger.members and worker not in self.ledger.finished:
            self.life[worker] += 1
            self.carry_out(self.ledger.leave(worker))
            self.incarnation[worker] += 1
            self.sent[worker] = 0
            self.plan(self.draw.random(), lambda: self.join(worker))

    # -- the server ----------------------------------------------------------------------------

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Apply):
                part = self.ledger.take_part(action.pushes, self.version)
                self.version += bool(part)
                self.inside += [(record.worker, record.sequence) for record in part]
                self.ledger.applied(action.pushes, self.version if part else None, self.now)
                self.carry_out(self.ledger.due(self.version))
            elif isinstance(action, Reply):
                self.ledger.replied(self.ledger.under_way[action.worker])
                self.base[action.worker] = self.version
                self.go_on(action.worker)
            elif isinstance(action, Snapshot):
                self.checkpoint = (self.version, list(self.inside), self.ledger.copy_accounts())

    def save(self) -> None:
        self.carry_out(self.ledger.want(self.version + 1, self.version))

    def restart(self) -> None:
        """The server dies, and comes back as the last checkpoint has it. Workers that were not
        through go on with their next step."""
        self.ledger = make_ledger(self.name, self.num_workers, epoch=self.ledger.epoch + 1)
        self.version, self.inside = self.checkpoint[0], list(self.checkpoint[1])
        self.ledger.load(self.checkpoint[2])
        for worker in range(self.num_workers):
            self.life[worker] += 1
            self.plan(self.draw.random(), lambda worker=worker: self.join(worker))


@pytest.mark.parametrize("name", DISCIPLINES)
@pytest.mark.parametrize("seed", range(20))
def test_whoever_dies_the_books_say_what_is_in(name: str, seed: int) -> None:
    draw = random.Random(f"{name} {seed}")
    world = World(name, num_workers=3, num_steps=20, draw=draw)
    for _ in range(draw.randint(0, 5)):
        victim = draw.randrange(3)
        world.plan(draw.uniform(0, 25), lambda victim=victim: world.kill(victim))
    for _ in range(draw.randint(0, 2)):
        world.plan(draw.uniform(0, 20), world.save)
    if draw.random() < 0.5:
        world.plan(draw.uniform(5, 20), world.restart)
    world.run()
    assert len(set(world.inside)) == len(world.inside), "none is in twice"
    for worker, account in world.ledger.accounts.items():
        assert account.gradients == world.num_steps
        assert account.applied == sum(who == worker for who, _ in world.inside)
    if world.ledger.epoch == 0:
        assert not any(account.lost for account in world.ledger.accounts.values())
    if not world.ledger.discipline.merges:
        assert world.version == len(world.inside)


def one_push(ledger: Ledger, worker: int = 0, sequence: int = 1, version: int = 0) -> PushRecord:
    record = PushRecord(worker, 0, sequence, base_version=version, epoch=ledger.epoch)
    for action in ledger.push(record, version):
        if isinstance(action, Apply):
            part = ledger.take_part(action.pushes, version)
            ledger.applied(action.pushes, version + 1 if part else None, now=2.5)
    return record


def test_a_gradient_that_is_applied() -> None:
    ledger = make_ledger()
    assert ledger.join(0, incarnation=0) == (0, [])
    record = PushRecord(0, 0, 1, base_version=3, received_s=1.0)
    apply, reply = ledger.push(record, version=7)
    assert isinstance(apply, Apply) and reply == Reply(0)
    assert ledger.take_part(apply.pushes, 7) == [record]
    ledger.applied(apply.pushes, 8, now=1.5)
    assert (record.outcome, record.version, record.staleness) == (APPLIED, 8, 4)
    assert ledger.accounts == {0: Account(0, 1, applied=1, batches=1)}
    assert list(ledger.recent_staleness) == [4]
    event = json.loads(record.event_line(2))
    assert event["kind"] == "push" and event["shard"] == 2 and event["applied_s"] == 1.5
    assert event["replied_s"] is None and event["mixed"] is False


def test_a_push_of_another_epoch_and_one_that_came_before_are_only_answered() -> None:
    ledger = make_ledger(epoch=2)
    ledger.join(0, 0)
    stale = PushRecord(0, 0, 1, epoch=1)
    assert ledger.push(stale, 0) == (Reply(0),) and stale.outcome == STALE
    assert one_push(ledger).outcome == APPLIED, "the stale one had claimed nothing"
    again = one_push(ledger)
    assert again.outcome == DUPLICATE and ledger.accounts[0].applied == 1


@pytest.mark.parametrize(("epoch", "outcome"), [(0, DUPLICATE), (1, STALE)])
def test_servers_in_step_have_a_push_of_which_nothing_comes_take_its_turn(
    epoch: int, outcome: str
) -> None:
    ledger = make_ledger("sync", workers=2, in_step=True)
    ledger.load({0: Account(0, 5, applied=5)})
    for worker in (0, 1):
        ledger.join(worker, 0)
    idle = PushRecord(0, 0, 5, epoch=epoch)
    assert ledger.push(idle, 0) == [], "it waits for the other one"
    apply, *replies = ledger.push(other := PushRecord(1, 0, 1), 0)
    assert isinstance(apply, Apply) and replies == [Reply(0), Reply(1)]
    assert ledger.take_part(apply.pushes, 0) == [other]
    ledger.applied(apply.pushes, 1, now=0.0)
    assert (idle.outcome, other.outcome) == (outcome, APPLIED)
    assert ledger.accounts[0] == Account(0, 5, applied=5)


def test_who_leaves_before_its_turn_comes_keeps_its_outcome() -> None:
    ledger = make_ledger("sync", workers=2, in_step=True)
    ledger.load({0: Account(0, 5, applied=5)})
    for worker in (0, 1):
        ledger.join(worker, 0)
    ledger.push(idle := PushRecord(0, 0, 5), 0)
    assert ledger.leave(0) == [] and idle.outcome == DUPLICATE


def test_who_is_through_takes_no_turn() -> None:
    ledger = make_ledger("sync", workers=2, in_step=True)
    ledger.load({0: Account(0, 5, applied=5)})
    for worker in (0, 1):
        ledger.join(worker, 0)
    ledger.finish(0, 5)
    assert ledger.push(PushRecord(0, 0, 5), 0) == (Reply(0),)


def test_no_update_beyond_the_budget() -> None:
    ledger = make_ledger("reply-apply", 2, budget=1)
    ledger.join(0, 0), ledger.join(1, 0)
    records = [PushRecord(0, 0, 1), PushRecord(1, 0, 1)]
    answers = [ledger.push(record, version=0) for record in records]
    for version, actions in enumerate(answers):
        now, later = cut(actions)
        assert now == [Reply(version)] and isinstance(later[0], Apply)
        part = ledger.take_part(later[0].pushes, version)
        ledger.applied(later[0].pushes, version + 1 if part else None, 0.0)
    assert [record.outcome for record in records] == [APPLIED, DROPPED]
    (action,) = ledger.push(PushRecord(0, 0, 2), version=1)
    assert isinstance(action, Dismiss)


def test_a_dropped_gradient_is_settled_when_it_is_answered() -> None:
    ledger = make_ledger("sync with a backup", 2)
    ledger.join(0, 0), ledger.join(1, 0)
    one_push(ledger, worker=0)
    late = one_push(ledger, worker=1)
    assert late.outcome == DROPPED and 1 not in ledger.accounts
    ledger.replied(late)
    ledger.replied(late)
    assert ledger.accounts[1] == Account(0, 1, dropped=1, batches=1)


def test_a_snapshot_is_taken_once_at_the_version_that_was_asked_for() -> None:
    ledger = make_ledger()
    assert ledger.want(5, version=3) == () and not ledger.is_request_met
    assert ledger.due(4) == ()
    (action,) = ledger.due(5)
    assert isinstance(action, Snapshot) and ledger.due(6) == ()
    assert ledger.take() is None
    action.request.snapshot = "the shard"
    assert ledger.is_request_met and ledger.take() == "the shard" and ledger.take() is None
    (late,) = ledger.want(0, version=6)
    ledger.want(9, version=6)
    assert isinstance(late, Snapshot)
    late.request.snapshot = "of a request that was given up"
    assert not ledger.is_request_met


def test_silence_is_counted_from_the_last_message() -> None:
    ledger = make_ledger()
    ledger.join(0, 0, now=10.0)
    assert ledger.silent_s(0, num_heard=0, now=12.0) == 2.0
    assert ledger.silent_s(0, num_heard=4, now=13.0) == 0.0
    assert ledger.silent_s(0, num_heard=4, now=15.5) == 2.5


def test_who_is_here_who_is_awaited_and_who_is_through() -> None:
    ledger = make_ledger("sync", 3)
    ledger.join(0, 0), ledger.join(1, incarnation=4)
    assert ledger.awaited == {2} and ledger.members.keys() == {0, 1}
    assert ledger.is_outdated(1, 3) and not ledger.is_outdated(1, 4)
    waiting = one_push(ledger, worker=0)
    assert waiting.outcome == ACCEPTED and ledger.leave_out([0, 2]) == []
    actions = ledger.finish(1, sequence=0)
    assert isinstance(actions[0], Apply), "the round is full: nobody else is waited for"
    assert ledger.finished == {1} and ledger.leave(1) == () and ledger.members.keys() == {0}
    ledger.join(1, 5)
    assert ledger.finished == set(), "it came again, and is not through"


def test_a_worker_that_comes_again_is_told_where_to_go_on() -> None:
    ledger = make_ledger()
    ledger.join(0, 0)
    one_push(ledger), one_push(ledger, sequence=2, version=1)
    ledger.leave(0)
    assert ledger.join(0, incarnation=1)[0] == 2


def test_a_process_that_was_replaced_does_not_come_back() -> None:
    """Not even when its successor is gone: all that it pushes is taken for what came before."""
    ledger = make_ledger(workers=2)
    ledger.join(0, incarnation=1)
    ledger.leave(0)
    assert ledger.is_outdated(0, 0) and not ledger.is_outdated(0, 1)
    other = make_ledger(workers=2)
    other.load({0: Account(3, 5, applied=5)})
    assert other.is_outdated(0, 2) and not other.is_outdated(0, 3)
    assert not other.is_outdated(1, 0), "of this one nothing is known"


def test_time_alone_can_close_a_round() -> None:
    ledger = make_ledger("sync with a deadline", 2)
    ledger.join(0, 0), ledger.join(1, 0)
    one_push(ledger, worker=0)
    assert ledger.tick(10.0) == [] and ledger.tick(11.0) == []
    assert [type(action) for action in ledger.tick(11.5)] == [Apply, Reply]


def test_a_round_that_a_stop_cuts_off_is_not_closed() -> None:
    ledger = make_ledger("sync", 2)
    ledger.join(0, 0), ledger.join(1, 0)
    record = one_push(ledger, worker=0)
    ledger.is_closing = True
    assert ledger.leave(1) == () and record.outcome == ACCEPTED
    ledger.abandon(record)
    assert record.outcome == DROPPED and not record.is_settled


def test_the_fastest_is_one_that_is_here_and_has_work_to_do() -> None:
    """As workers told last; who is gone or through is waited for by nobody, and nothing is made of
    a speed that is none."""
    ledger = make_ledger(workers=3)
    assert ledger.fastest == 0.0
    for worker in range(3):
        ledger.join(worker, 0)
    told = {0: [20.0, 30.0], 1: [90.0, 60.0], 2: [10.0, 10.0]}
    for sequence in (1, 2):
        for worker, speeds in told.items():
            ledger.push(PushRecord(worker, 0, sequence, speed=speeds[sequence - 1]), 0)
    assert ledger.fastest == 60.0
    for sequence, nonsense in enumerate((0.0, -1.0, math.inf, math.nan), start=3):
        ledger.push(PushRecord(1, 0, sequence, speed=nonsense), 0)
        assert ledger.fastest == 60.0
    ledger.finish(1, 6)
    assert ledger.fastest == 30.0
    ledger.leave(0)
    assert ledger.fastest == 10.0
    ledger.join(0, 1)
    assert ledger.fastest == 10.0, "another process may be on another machine"


def test_a_worker_that_comes_again_is_told_how_far_it_was_in_its_data() -> None:
    """A push may stand for any number of batches."""
    ledger = make_ledger()
    ledger.join(0, 0)
    for sequence, batch in ((1, 49), (2, 65), (3, 66)):
        (apply, _) = ledger.push(record := PushRecord(0, 0, sequence, batch), sequence - 1)
        assert isinstance(apply, Apply)
        if sequence < 3:
            ledger.applied(apply.pushes, sequence, 0.0)
        assert record.batch == batch
    assert ledger.accounts[0].batches == 66, "of what is in"
    other = make_ledger()
    other.load(accounts_from(json.loads(json.dumps(accounts_to_json(ledger.copy_accounts())))))
    other.join(0, 1)
    assert (other.accounts[0].sequence, other.accounts[0].batches) == (2, 66)
