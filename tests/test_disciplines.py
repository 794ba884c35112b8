"""The promises of each discipline, with scripted interleavings and, where it pays, all of them."""

import itertools
import math
import random

import pytest
from helpers import make_discipline

from offbeat.config import DISCIPLINES
from offbeat.disciplines import (
    Action,
    Apply,
    ApplyReply,
    Bounded,
    Discipline,
    Drop,
    LockFree,
    Push,
    Reply,
    ReplyApply,
    Sync,
)
from offbeat.family import Buffer, Gathering, Rennala, Ringmaster


def push(worker: int, sequence: int = 1) -> Push:
    return Push(worker, sequence)


def replied(actions: list[Action]) -> list[int]:
    return [a.worker for a in actions if isinstance(a, Reply)]


def applied(actions: list[Action]) -> list[Push]:
    return [p for a in actions if isinstance(a, Apply) for p in a.pushes]


# -- asynchronous ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_apply_reply_contains_the_own_gradient_and_waits_for_nobody(workers: int) -> None:
    discipline = ApplyReply(range(workers))
    for sequence in (1, 2, 3):  # worker 0 alone, all others stalled
        assert discipline.on_push(push(0, sequence)) == [Apply((push(0, sequence),)), Reply(0)]


@pytest.mark.parametrize("kind", [ReplyApply, LockFree])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_reply_apply_replies_first_and_applies_exactly_once(
    kind: type[Discipline], workers: int
) -> None:
    discipline = kind(range(workers))
    for sequence in (1, 2, 3):
        assert discipline.on_push(push(0, sequence)) == [Reply(0), Apply((push(0, sequence),))]


def test_only_lock_free_goes_without_a_lock() -> None:
    unlocked = [n for n in DISCIPLINES if not make_discipline(n, range(2)).locked]
    assert unlocked == ["lock-free"]


@pytest.mark.parametrize("name", ["apply-reply", "reply-apply", "lock-free"])
def test_asynchronous_ones_ignore_joins_leaves_and_time(name: str) -> None:
    discipline = make_discipline(name, range(2))
    assert discipline.on_join(7) == []
    assert discipline.on_leave(1) == []
    assert discipline.on_tick(1e9) == []
    assert replied(discipline.on_push(push(7))) == [7]


# -- sync --------------------------------------------------------------------------------------


def test_sync_holds_everybody_until_the_round_is_full() -> None:
    sync = Sync(range(3))
    assert sync.on_push(push(2)) == []
    assert sync.on_push(push(0)) == []
    in_rank_order = Apply((push(0), push(1), push(2)))
    assert sync.on_push(push(1)) == [in_rank_order, Reply(0), Reply(1), Reply(2)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_sync_applies_in_rank_order_whoever_comes_first(order: tuple[int, ...]) -> None:
    sync = Sync(range(3))
    actions = [action for worker in order for action in sync.on_push(push(worker))]
    assert actions == [Apply((push(0), push(1), push(2))), Reply(0), Reply(1), Reply(2)]


def test_sync_never_releases_a_fast_worker_into_the_next_round() -> None:
    sync = Sync(range(2))
    sync.on_push(push(0, 1))
    sync.on_push(push(1, 1))
    assert sync.on_push(push(0, 2)) == []  # worker 1 has not even begun round 2
    assert applied(sync.on_push(push(1, 2))) == [push(0, 2), push(1, 2)]


def test_sync_with_one_worker_is_apply_reply() -> None:
    sync = Sync([0])
    for sequence in (1, 2):
        assert sync.on_push(push(0, sequence)) == [Apply((push(0, sequence),)), Reply(0)]


def test_sync_waits_for_workers_that_have_not_come_yet() -> None:
    sync = Sync(range(2))
    sync.on_join(0)
    assert sync.on_push(push(0)) == []
    sync.on_join(1)
    assert applied(sync.on_push(push(1))) == [push(0), push(1)]


def test_a_departure_in_the_middle_of_a_round_completes_it() -> None:
    sync = Sync(range(3))
    sync.on_push(push(0))
    sync.on_push(push(2))
    assert sync.on_leave(1) == [Apply((push(0), push(2))), Reply(0), Reply(2)]


def test_a_stalled_worker_stalls_the_round_until_it_leaves() -> None:
    sync = Sync(range(2))
    sync.on_push(push(0))
    assert sync.on_tick(1e9) == []
    assert applied(sync.on_leave(1)) == [push(0)]


def test_a_worker_that_leaves_takes_its_waiting_gradient_with_it() -> None:
    sync = Sync(range(3))
    sync.on_push(push(1))
    assert sync.on_leave(1) == [Drop(push(1))]
    sync.on_push(push(0))
    assert applied(sync.on_push(push(2))) == [push(0), push(2)]


def test_the_last_worker_to_leave_closes_nothing() -> None:
    sync = Sync([0])
    assert sync.on_leave(0) == []


def test_a_late_joiner_is_waited_for() -> None:
    sync = Sync(range(2))
    sync.on_push(push(0))
    sync.on_join(2)
    assert sync.on_push(push(1)) == []
    assert applied(sync.on_push(push(2))) == [push(0), push(1), push(2)]


def test_a_joiner_belongs_to_the_round_it_joined_in() -> None:
    sync = Sync(range(2))
    for worker in (0, 1):
        sync.on_push(push(worker))
    sync.on_join(5)  # gets round 1's parameters
    sync.on_push(push(0, 2))
    sync.on_push(push(1, 2))
    assert applied(sync.on_push(push(5, 1))) == [push(0, 2), push(1, 2), push(5, 1)]


def test_a_round_that_nothing_came_of_is_opened_again_for_a_joiner() -> None:
    sync = Sync(range(3))
    for worker in (0, 1):
        sync.on_push(push(worker))
    closed = applied(sync.on_push(push(2)))
    assert sync.on_leave(1) == []
    sync.on_reopen(closed)
    sync.on_join(1)
    assert sync.round == 0 and applied(sync.on_push(push(1, 7))) == [push(0), push(1, 7), push(2)]
    assert sync.round_of == dict.fromkeys(range(3), 1)


def test_backup_workers_close_the_round_early_and_the_late_one_is_dropped_and_answered() -> None:
    sync = Sync(range(3), backup_workers=1)
    assert sync.on_push(push(2, 1)) == []
    assert sync.on_push(push(0, 1)) == [Apply((push(0, 1), push(2, 1))), Reply(0), Reply(2)]
    assert sync.on_push(push(1, 1)) == [Drop(push(1, 1)), Reply(1)]
    assert sync.on_push(push(1, 2)) == []  # back in step: it joins the second round
    assert applied(sync.on_push(push(0, 2))) == [push(0, 2), push(1, 2)]


def test_backup_workers_may_not_empty_a_round() -> None:
    sync = Sync(range(2), backup_workers=1)
    sync.on_leave(1)
    assert applied(sync.on_push(push(0))) == [push(0)]


def test_a_deadline_closes_the_round_counted_from_the_first_gradient_seen() -> None:
    sync = Sync(range(2), round_timeout_s=5)
    assert sync.on_tick(100) == []  # nobody waits yet
    sync.on_push(push(0, 1))
    assert sync.on_tick(101) == []
    assert sync.on_tick(105.9) == []
    assert sync.on_tick(106) == [Apply((push(0, 1),)), Reply(0)]
    assert sync.on_push(push(1, 1)) == [Drop(push(1, 1)), Reply(1)]
    sync.on_push(push(0, 2))
    assert sync.on_tick(106.5) == []  # the new round has a deadline of its own


def test_nobody_has_waited_for_a_round_that_everybody_has_left() -> None:
    sync = Sync(range(2), round_timeout_s=5)
    sync.on_push(push(0, 1)), sync.on_tick(100)
    sync.on_leave(0), sync.on_join(0)
    sync.on_push(push(1, 1))
    assert sync.on_tick(106) == [], "it has only just begun to wait"
    assert sync.on_tick(111) == [Apply((push(1, 1),)), Reply(1)]


# -- bounded -----------------------------------------------------------------------------------


def test_bounded_zero_keeps_the_pace_of_sync_with_separate_updates() -> None:
    bounded = Bounded(range(2), staleness=0)
    assert bounded.on_push(push(0)) == [Apply((push(0),))]
    assert bounded.on_push(push(1)) == [Apply((push(1),)), Reply(0), Reply(1)]


def test_bounded_lets_a_worker_run_ahead_by_s_and_no_more() -> None:
    bounded = Bounded(range(2), staleness=2)
    assert replied(bounded.on_push(push(0, 1))) == [0]
    assert replied(bounded.on_push(push(0, 2))) == [0]
    assert replied(bounded.on_push(push(0, 3))) == []  # 3 ahead
    assert replied(bounded.on_push(push(1, 1))) == [0, 1]


def test_bounded_infinity_is_apply_reply() -> None:
    bounded, asynchronous = Bounded(range(3), staleness=math.inf), ApplyReply(range(3))
    for sequence in range(1, 50):
        assert bounded.on_push(push(0, sequence)) == asynchronous.on_push(push(0, sequence))


def test_bounded_with_one_worker_never_waits() -> None:
    bounded = Bounded([0], staleness=0)
    for sequence in (1, 2, 3):
        assert bounded.on_push(push(0, sequence)) == [Apply((push(0, sequence),)), Reply(0)]


def test_a_finished_worker_leaves_the_count() -> None:
    bounded = Bounded(range(2), staleness=0)
    bounded.on_push(push(0))
    assert replied(bounded.on_leave(1)) == [0]
    assert replied(bounded.on_push(push(0, 2))) == [0]


def test_a_joining_worker_starts_at_the_minimum() -> None:
    bounded = Bounded(range(2), staleness=1)
    for sequence in (1, 2, 3):
        bounded.on_push(push(0, sequence))
        bounded.on_push(push(1, sequence))
    bounded.on_push(push(0, 4))
    bounded.on_join(2)
    assert bounded.clock[2] == 3
    assert replied(bounded.on_push(push(0, 5))) == []  # 2 ahead of both others
    bounded.on_push(push(1, 4))
    assert replied(bounded.on_push(push(2, 1))) == [0, 2]


def test_a_worker_that_comes_back_is_no_further_ahead_than_at_other_servers() -> None:
    """Its connection to one of two servers broke, and the others went on there. As the slowest one
    it would wait there for them, and they at the other server for it."""
    servers = [Bounded(range(2), staleness=0) for _ in range(2)]
    for server in servers:
        server.on_push(push(0, 1))
    assert replied(servers[0].on_leave(1)) == [0]
    servers[0].on_join(1)
    for server in servers:
        assert replied(server.on_push(push(1, 1))) in ([0, 1], [1])
        assert server.clock == {0: 1, 1: 1}


def test_who_was_away_for_long_is_not_waited_for_as_long() -> None:
    bounded = Bounded(range(2), staleness=1)
    bounded.on_leave(1)
    for sequence in range(1, 11):
        assert replied(bounded.on_push(push(0, sequence))) == [0]
    bounded.on_join(1)
    assert bounded.clock == {0: 10, 1: 8}


# -- those that drop or gather -----------------------------------------------------------------


def aged(worker: int, sequence: int, staleness: int, version: int = 100) -> Push:
    return Push(worker, sequence, base_version=version - staleness, version=version)


@pytest.mark.parametrize("max_delay", [1, 2, 7])
def test_ringmaster_drops_what_is_that_old_and_answers_it(max_delay: int) -> None:
    ringmaster = Ringmaster(range(2), max_delay=max_delay)
    young, old = aged(0, 1, max_delay - 1), aged(1, 1, max_delay)
    assert ringmaster.on_push(young) == [Apply((young,)), Reply(0)]
    assert ringmaster.on_push(old) == [Drop(old), Reply(1)]


def test_ringmaster_infinity_is_apply_reply() -> None:
    ringmaster, asynchronous = Ringmaster(range(3), max_delay=math.inf), ApplyReply(range(3))
    for staleness in range(50):
        old = aged(1, staleness + 1, staleness)
        assert ringmaster.on_push(old) == asynchronous.on_push(old)


def test_rennala_gathers_several_of_one_worker_and_answers_each_at_once() -> None:
    rennala = Rennala(range(2), collect=3)
    first, second, third = aged(0, 1, 0), aged(0, 2, 0), aged(1, 1, 0)
    assert rennala.on_push(first) == [Reply(0)]
    assert rennala.on_push(second) == [Reply(0)]
    assert rennala.on_push(third) == [Apply((first, second, third)), Reply(1)]
    old = aged(0, 3, 1, version=101)
    assert rennala.on_push(old) == [Drop(old), Reply(0)]
    assert rennala.gathered == [], "what is dropped stands for nothing"


def test_buffer_takes_any_and_answers_each_at_once() -> None:
    buffer = Buffer(range(2), buffer_size=2)
    old, new = aged(1, 1, 9), aged(0, 1, 0)
    assert buffer.on_push(old) == [Reply(1)]
    assert buffer.on_push(new) == [Apply((old, new)), Reply(0)], "its reply has its own gradient"
    assert buffer.on_push(aged(0, 2, 0)) == [Reply(0)]


def test_a_buffer_of_one_is_apply_reply() -> None:
    buffer, asynchronous = Buffer(range(3), buffer_size=1), ApplyReply(range(3))
    for sequence in range(1, 9):
        assert buffer.on_push(push(1, sequence)) == asynchronous.on_push(push(1, sequence))


@pytest.mark.parametrize(
    "gathering", [Rennala(range(2), collect=5), Buffer(range(2), buffer_size=5)]
)
def test_what_was_gathered_goes_in_when_nobody_is_left_who_could_add_to_it(
    gathering: Discipline,
) -> None:
    gathering.on_push(push(0, 1))
    gathering.on_push(push(1, 1))
    assert gathering.on_leave(1) == [], "its gradient stays, and worker 0 goes on"
    gathering.on_push(push(0, 2))
    assert gathering.on_leave(0) == [Apply((push(0, 1), push(1, 1), push(0, 2)))]
    assert gathering.on_leave(0) == gathering.on_leave(1) == [], "once"
    gathering.on_join(1)
    assert gathering.on_push(push(1, 2)) == [Reply(1)]


def test_how_many_updates_there_are_where_several_gradients_make_one() -> None:
    assert Buffer(range(3), buffer_size=4).num_updates([5, 5, 5]) == 4, "the last one is smaller"
    rennala = Rennala(range(3), collect=4)
    assert rennala.gradients_per_update == 6, "the two who did not close it are at old ones"
    assert rennala.num_updates([12, 12, 12]) == 6
    assert Rennala([0], collect=4).num_updates([12]) == 3
    assert Ringmaster(range(3), max_delay=1).num_updates([12, 12, 12]) == 36


class World:
    """Workers that push as soon as they are answered, in an order drawn at random.

    Counts versions as a shard would, so that staleness and clocks can be checked.
    """

    def __init__(self, discipline: Discipline, num_workers: int, seed: int) -> None:
        self.discipline = discipline
        self.random = random.Random(seed)
        self.version = 0
        self.base = dict.fromkeys(range(num_workers), 0)
        self.base_of: dict[Push, int] = {}
        self.sequence = dict.fromkeys(range(num_workers), 0)
        self.computing = set(range(num_workers))
        self.staleness: list[int] = []
        self.applied: list[Push] = []
        self.dropped: list[Push] = []

    def step(self) -> None:
        worker = self.random.choice(sorted(self.computing))
        self.computing.remove(worker)
        self.sequence[worker] += 1
        base, version = self.base[worker], self.version
        pushed = Push(worker, self.sequence[worker], base_version=base, version=version)
        self.base_of[pushed] = self.base[worker]
        self.carry_out(self.discipline.on_push(pushed))

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Apply(pushes):
                    self.version += 1
                    self.applied += pushes
                    self.staleness += [self.version - 1 - self.base_of[p] for p in pushes]
                case Reply(worker):
                    assert worker not in self.computing, "answered twice"
                    self.computing.add(worker)
                    self.base[worker] = self.version
                case Drop(dropped):
                    self.dropped.append(dropped)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("name", DISCIPLINES)
def test_any_interleaving_applies_each_push_once_and_strands_nobody(
    name: str, num_workers: int, seed: int
) -> None:
    world = World(make_discipline(name, range(num_workers), staleness=1), num_workers, seed)
    for _ in range(500):
        world.step()
    waiting = set(range(num_workers)) - world.computing
    assert waiting != set(range(num_workers)), "everybody waits for somebody"
    assert len(set(world.applied)) == len(world.applied)
    assert not set(world.applied) & set(world.dropped)
    not_in = set(world.base_of) - set(world.applied) - set(world.dropped)
    if isinstance(world.discipline, Gathering):
        assert not waiting and not_in == set(world.discipline.gathered)
    else:
        assert {p.worker for p in not_in} <= waiting, "only a waiting round may be unapplied"
    drops = isinstance(world.discipline, Rennala | Ringmaster) and num_workers > 1
    assert drops or not world.dropped


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_gathering_ones_keep_their_promises_in_any_interleaving(
    size: int, num_workers: int, seed: int
) -> None:
    for discipline in (
        Rennala(range(num_workers), collect=size),
        Buffer(range(num_workers), buffer_size=size),
    ):
        world = World(discipline, num_workers, seed)
        for _ in range(1000):
            world.step()
            assert world.computing == set(range(num_workers)), "nobody waits"
            assert len(discipline.gathered) < size
        assert len(world.applied) == size * world.version, "never more, never fewer"
        if isinstance(discipline, Rennala):
            assert set(world.staleness) == {0}
        else:
            assert not world.dropped


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("max_delay", [1, 3, 5])
def test_ringmaster_applies_nothing_that_is_older(max_delay: int, seed: int) -> None:
    world = World(Ringmaster(range(6), max_delay=max_delay), 6, seed)
    for _ in range(2000):
        world.step()
    assert set(world.staleness) == set(range(max_delay))
    assert len(world.applied) + len(world.dropped) == 2000 and world.dropped


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("num_workers", "bound"), [(2, 0), (2, 1), (3, 1), (3, 2), (5, 1)])
def test_bounded_keeps_its_bounds_in_any_interleaving(
    num_workers: int, bound: int, seed: int
) -> None:
    discipline = Bounded(range(num_workers), staleness=bound)
    world = World(discipline, num_workers, seed)
    for _ in range(1000):
        world.step()
        slowest = min(discipline.clock.values())
        assert all(discipline.clock[w] - slowest <= bound for w in world.computing)
    assert max(world.staleness) <= (num_workers - 1) * (2 * bound + 1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("name", "offset"), [("apply-reply", -1), ("reply-apply", 0)])
def test_mean_staleness_is_about_the_number_of_workers(name: str, offset: int, seed: int) -> None:
    num_workers = 4
    world = World(make_discipline(name, range(num_workers)), num_workers, seed)
    for _ in range(2000):
        world.step()
    mean = sum(world.staleness) / len(world.staleness)
    assert mean == pytest.approx(num_workers + offset, abs=0.1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("backup_workers", [0, 1, 2])
def test_sync_is_never_stale_and_drops_only_with_backup_workers(
    backup_workers: int, seed: int
) -> None:
    world = World(Sync(range(4), backup_workers=backup_workers), 4, seed)
    for _ in range(1000):
        world.step()
    assert set(world.staleness) == {0}
    assert bool(world.dropped) == bool(backup_workers)
    assert not set(world.dropped) & set(world.applied)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", DISCIPLINES)
def test_leaves_and_joins_at_any_time_strand_nobody(name: str, seed: int) -> None:
    num_workers = 4
    discipline = make_discipline(name, range(num_workers), staleness=1)
    world = World(discipline, num_workers, seed)
    for turn in range(600):
        if turn % 50 == 25:
            gone = world.random.randrange(num_workers)
            world.computing.discard(gone)
            world.carry_out(discipline.on_leave(gone))
            assert world.computing, "a leave must not strand the others"
        if turn % 50 == 40:
            world.base[gone] = world.version
            world.carry_out(discipline.on_join(gone))
            world.computing.add(gone)
        world.step()
    assert not set(world.dropped) & set(world.applied)


def test_names_in_the_configuration_are_those_that_exist() -> None:
    kinds = [type(make_discipline(name, range(2), staleness=1)).__name__ for name in DISCIPLINES]
    assert kinds[:5] == ["Sync", "ApplyReply", "ReplyApply", "LockFree", "Bounded"]
    assert kinds[5:] == ["Ringmaster", "Rennala", "Buffer"]
