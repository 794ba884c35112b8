"""Simulated runs come out as can be worked out by hand, and the same each time."""

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from offbeat.config import make_config
from offbeat.roles.session import LARGE_FROM
from offbeat.simulation import timing as timing_module
from offbeat.simulation.clock import Clock, Link
from offbeat.simulation.timing import ServiceTimes, StepTimes, Timing
from offbeat.simulation.virtual import Figures, Setup, VirtualRun

FREE = ServiceTimes(0.0, 0.0, 0.0)


def made(
    *computes_s: float, service: ServiceTimes = FREE, prepare_s: float = 0.0, **more: Any
) -> Timing:
    """Each of these workers takes as long for each step."""
    steps = [[StepTimes(compute_s, prepare_s, 0.0, 0.0)] for compute_s in computes_s]
    return Timing(steps=steps, services=[service], **more)


def figures(
    timing: Timing,
    discipline: str,
    workers: int,
    *,
    gradients: int = 3000,
    warm_up: int = 300,
    seed: int = 0,
    **setup: Any,
) -> Figures:
    chosen = make_config({"discipline": discipline, "workers": workers}).chosen
    asked = Setup(
        discipline=lambda ranks: chosen.kind(ranks, **chosen.values), workers=workers, **setup
    )
    return VirtualRun(asked, timing, seed=seed).go(gradients, warm_up)


def mean(found: Figures) -> float:
    return sum(value * count for value, count in found.staleness.items()) / found.staleness.total()


# -- the clock -------------------------------------------------------------------------------------


def test_work_and_waiting_end_in_the_order_of_time() -> None:
    clock = Clock()
    clock.after(0.3, 1)
    clock.work(0.2, 2)
    clock.work(0.4, 3)
    found = [(clock.next(), clock.now_s) for _ in range(3)]
    assert found == [(2, pytest.approx(0.2)), (1, pytest.approx(0.3)), (3, pytest.approx(0.4))]
    with pytest.raises(IndexError):
        clock.next()


def test_more_work_than_cores_goes_on_more_slowly() -> None:
    clock = Clock(cores=2)
    for event in range(4):
        clock.work(1.0, event)
    clock.after(1.0, 9)  # by then all are half done
    assert clock.next() == 9
    clock.work(0.25, 8)  # five on two cores
    found = [(clock.next(), clock.now_s) for _ in range(5)]
    assert found[0] == (8, pytest.approx(1.0 + 0.25 * 5 / 2))
    assert [event for event, _ in found[1:]] == [0, 1, 2, 3], "the least number comes first"
    assert found[-1][1] == pytest.approx(4.25 / 2), "nothing is lost, and no core stands still"


def test_a_link_carries_messages_in_turn() -> None:
    clock = Clock()
    link = Link(clock, event=1, takes_s=1.0, num_parts=4)
    link.carry(7)
    clock.after(0.3, 2)
    over = []
    for _ in range(9):
        if clock.next() == 2:
            link.carry(8)
        elif (message := link.over()) is not None:
            over.append((message, clock.now_s))
    assert over == [(7, pytest.approx(1.5)), (8, pytest.approx(2.0))]
    with pytest.raises(IndexError):
        clock.next()


# -- disciplines -----------------------------------------------------------------------------------


def test_a_sync_round_takes_as_long_as_the_slowest_and_the_server() -> None:
    service = ServiceTimes(look_s=0.01, apply_s=0.02, reply_s=0.03)
    found = figures(made(0.1, 0.3, 0.2, service=service, merge_s=0.005), "sync", 3)
    # whoever is last is looked at, the three are merged, and its reply is the second one; then it
    # is looked at while nobody else is
    assert found.updates == 1000 and set(found.staleness) == {0}
    last_reply_s = 0.01 + 0.02 + 2 * 0.005 + 2 * 0.03
    assert found.time_s / found.updates == pytest.approx(0.3 + last_reply_s)


@pytest.mark.parametrize("workers", [1, 2, 5, 16])
def test_staleness_of_equal_workers(workers: int) -> None:
    service = ServiceTimes(1e-4, 1e-4, 1e-4)
    timing = made(0.1, service=service)
    assert mean(figures(timing, "apply-reply", workers)) == pytest.approx(workers - 1, abs=0.02)
    assert mean(figures(timing, "reply-apply", workers)) == pytest.approx(workers, abs=0.02)
    assert mean(figures(timing, "lock-free", workers)) == pytest.approx(workers, abs=0.02)
    gathered = mean(figures(timing, "buffer:4", workers))
    assert gathered == pytest.approx((workers - 1) / 4, abs=0.5)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_bounded_keeps_its_bound_and_waits_for_the_straggler(bound: int) -> None:
    timing = made(0.1, 0.1, 0.35)
    found = figures(timing, f"bounded:{bound}", 3)
    assert max(found.staleness) <= (3 - 1) * (2 * bound + 1)
    assert found.gradients_per_s == pytest.approx(3 / 0.35, rel=0.01), "nobody goes ahead for long"
    free = figures(timing, "bounded:inf", 3)
    assert free.gradients_per_s == pytest.approx(2 / 0.1 + 1 / 0.35, rel=0.01)


def test_a_server_that_is_never_idle_sets_the_pace() -> None:
    service = ServiceTimes(0.001, 0.002, 0.003)
    few = figures(made(0.1, service=service), "apply-reply", 4)
    assert few.gradients_per_s == pytest.approx(4 / 0.106, rel=0.01)
    many = figures(made(0.1, service=service), "apply-reply", 64)
    assert many.gradients_per_s == pytest.approx(1 / 0.006, rel=0.01)
    assert mean(many) == pytest.approx(63, abs=0.1), "they queue, and are no more than they are"
    assert many.served_s / many.time_s == pytest.approx(1, abs=0.01)
    assert many.waited_s / many.steps_s == pytest.approx(1 - 0.1 / (64 * 0.006), abs=0.01)


def test_what_is_dropped_is_counted() -> None:
    found = figures(made(0.1), "ringmaster:4", 16)
    assert max(found.staleness) < 4
    assert found.dropped + found.staleness.total() == found.answered
    assert found.dropped > 0.5 * found.answered
    none = figures(made(0.1), "ringmaster:16", 16)
    assert none.dropped == 0


def test_a_round_is_closed_when_its_time_is_over() -> None:
    found = figures(made(0.1, 10.0), "sync:0:round_timeout=1", 2, gradients=200, warm_up=20)
    assert 1.0 < found.time_s / found.updates < 1.3, "its tick comes every 50 ms"
    assert found.dropped


# -- what takes time -------------------------------------------------------------------------------


def test_the_next_batch_is_prepared_while_the_exchange_is_under_way() -> None:
    service = ServiceTimes(0.01, 0.01, 0.02)
    short = figures(made(0.1, service=service, prepare_s=0.03), "apply-reply", 1)
    assert short.gradients_per_s == pytest.approx(1 / 0.14)
    assert short.waited_s / short.steps_s == pytest.approx(0.01 / 0.14)
    long = figures(made(0.1, service=service, prepare_s=0.05), "apply-reply", 1)
    assert long.gradients_per_s == pytest.approx(1 / 0.15)
    assert long.waited_s == pytest.approx(0)


def test_on_the_way_up_and_down_time_goes_by() -> None:
    timing = Timing(steps=[[StepTimes(0.1, 0.0, 0.02, 0.03)]], services=[FREE])
    found = figures(timing, "apply-reply", 1)
    assert found.gradients_per_s == pytest.approx(1 / 0.15)


def test_a_worker_that_is_held_up_takes_so_many_times_as_long() -> None:
    timing = made(0.1, prepare_s=0.01, service=ServiceTimes(0.0, 0.0, 0.02))
    slow = 1 / (0.1 + 2 * (0.1 + 0.01) + 0.02)
    alone = figures(timing, "apply-reply", 1, slowdowns={0: 3.0})
    assert alone.gradients_per_s == pytest.approx(slow)
    found = figures(timing, "apply-reply", 2, slowdowns={1: 3.0}, gradients=4000)
    assert found.gradients_per_s == pytest.approx(1 / (0.1 + 0.02) + slow, rel=0.02)


def test_workers_share_cores() -> None:
    timing = made(0.1)
    assert figures(timing, "apply-reply", 2, cores=2).gradients_per_s == pytest.approx(20)
    assert figures(timing, "apply-reply", 8, cores=2).gradients_per_s == pytest.approx(20)
    assert figures(timing, "apply-reply", 8, cores=math.inf).gradients_per_s == pytest.approx(80)
    threaded = made(0.1, threads=2)
    assert figures(threaded, "apply-reply", 8, cores=4).gradients_per_s == pytest.approx(20)
    assert figures(threaded, "apply-reply", 1, cores=1).gradients_per_s == pytest.approx(10)


def test_a_link_carries_so_much_and_no_more() -> None:
    timing = made(0.1, up_bytes=1e6, down_bytes=5e5)  # 8 and 4 Mbit
    one = figures(timing, "apply-reply", 1, mbit=100)
    assert one.gradients_per_s == pytest.approx(1 / (0.1 + 0.08 + 0.04))
    many = figures(timing, "apply-reply", 16, mbit=100)
    assert many.gradients_per_s == pytest.approx(1 / 0.08, rel=0.01), "the narrower way"
    cut = figures(timing, "apply-reply", 16, mbit=100, servers=2)
    assert cut.gradients_per_s == pytest.approx(2 / 0.08, rel=0.02), "each has a link of its own"
    far = figures(timing, "apply-reply", 1, delay_ms=50)
    assert far.gradients_per_s == pytest.approx(1 / 0.15)


def test_more_servers_have_less_to_do_each() -> None:
    service = ServiceTimes(0.01, 0.01, 0.01)
    timing = made(
        0.1, service=service, whole_bytes=1e9
    )  # what does not go by the length is nothing
    found = figures(timing, "apply-reply", 64, servers=4)
    assert found.gradients_per_s == pytest.approx(4 / 0.03, rel=0.02)
    assert found.staleness.total() == pytest.approx(4 * found.gradients, rel=0.05)
    small = figures(made(0.1, service=service, whole_bytes=1.0), "apply-reply", 64, servers=4)
    assert small.gradients_per_s == pytest.approx(1 / 0.03, rel=0.02), "most of it stays as it is"


def test_without_a_lock_large_slices_are_served_side_by_side() -> None:
    service = ServiceTimes(0.01, 0.02, 0.01)
    assert timing_module.LARGE_FROM_BYTES == 4 * LARGE_FROM
    large = made(0.1, service=service, whole_bytes=float(timing_module.LARGE_FROM_BYTES))
    found = figures(large, "lock-free", 32)
    assert found.gradients_per_s == pytest.approx(32 / 0.12, rel=0.02)
    locked = figures(large, "reply-apply", 32)
    assert locked.gradients_per_s == pytest.approx(1 / 0.04, rel=0.02)


# -- chance ----------------------------------------------------------------------------------------


def varied(seed: int) -> Timing:
    chance = random.Random(seed)
    steps = [
        [
            StepTimes(*(chance.expovariate(1 / t) for t in (0.1, 0.01, 0.01, 0.01)))
            for _ in range(99)
        ]
        for _ in range(3)
    ]
    services = [ServiceTimes(*(chance.expovariate(1000) for _ in range(3))) for _ in range(50)]
    return Timing(steps=steps, services=services, merge_s=0.001)


@pytest.mark.parametrize("discipline", ["sync", "bounded:1", "lock-free", "rennala:3"])
@pytest.mark.parametrize("cores", [3, math.inf])
def test_the_same_seed_is_the_same_run(discipline: str, cores: float) -> None:
    def found(seed: int) -> Figures:
        asked = {"servers": 2, "cores": cores, "slowdowns": {1: 2.0}}
        return figures(varied(1), discipline, 7, gradients=700, seed=seed, **asked)

    assert found(0) == found(0)
    assert found(0) != found(1)


def drawn(apart: bool, workers: int = 2) -> Sequence[list[StepTimes]]:
    """Of one record, of which each step says its place."""
    steps = [[StepTimes(float(number), 0.0, 0.0, 0.0) for number in range(10_000)]]
    timing = Timing(steps=steps, services=[FREE])
    return [
        [next(found) for _ in range(1000)]
        for found in (timing.steps_of(rank, 0, apart=apart) for rank in range(workers))
    ]


def test_times_are_drawn_in_blocks_and_on_one_machine_from_the_same_time() -> None:
    (first, second) = drawn(apart=False)
    steps = [b.compute_s - a.compute_s for a, b in itertools.pairwise(first)]
    assert sum(step == 1 for step in steps) >= 900
    near = [abs(a.compute_s - b.compute_s) for a, b in zip(first, second, strict=True)]
    assert sum(n < timing_module.BLOCK for n in near) > 950 and max(near) > 0
    (first, second) = drawn(apart=True)
    near = [abs(a.compute_s - b.compute_s) for a, b in zip(first, second, strict=True)]
    assert sum(n < timing_module.BLOCK for n in near) < 200
