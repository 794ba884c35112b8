"""Columns of numbers come back to the bit, however large they are."""

import math
import random

import pytest

from offbeat.report.columns import PAGE, Longest, Mean, Seconds, Wholes, count_until


def test_whole_numbers_of_any_size_come_back() -> None:
    column, numbers = Wholes(), [0, 7, 2**32 - 1, 2**32, -5, 2**62, 3]
    for number in numbers:
        column.append(number)
    assert list(column) == numbers
    assert [column[index] for index in range(len(column))] == numbers
    assert column[-1] == 3
    with pytest.raises(OverflowError):
        column.append(2**70)
    assert list(column) == numbers, "what did not fit has left nothing"


def test_seconds_come_back_to_the_bit_and_their_sum_is_exact() -> None:
    chance = random.Random(0)
    times = [round(chance.expovariate(1) * 10 ** chance.randrange(-5, 5), 6) for _ in range(5000)]
    column = Seconds()
    for time_s in times:
        column.append(time_s)
    assert [column[index] for index in range(len(column))] == times
    assert max(times) > 2**32 / 1e6, "none of them needs a wide column"
    assert column.total_s == pytest.approx(math.fsum(times), rel=1e-15)


def test_the_longest_time_of_each_number_is_kept() -> None:
    held = Longest()
    for number, time_s in ((1, 0.25), (1, 0.125), (5 * PAGE, 0.5), (5 * PAGE + 1, 10_000.0)):
        held.add(number, time_s)
    held.add(5 * PAGE + 1, 20_000.000001)
    assert [held[n] for n in (0, 1, PAGE, 5 * PAGE)] == [0.0, 0.25, 0.0, 0.5]
    assert held[5 * PAGE + 1] == 20_000.000001


def test_a_mean_of_many_numbers_is_that_of_all_of_them() -> None:
    chance = random.Random(0)
    values = [chance.gauss(0, 1) for _ in range(10_000)]
    mean = Mean()
    for value in values:
        mean.add(value)
    assert mean.mean == pytest.approx(math.fsum(values) / len(values), rel=1e-14)
    assert (mean.count, mean.most) == (len(values), max(values))


def test_how_many_are_not_after_each_end() -> None:
    assert count_until([3.0, 1.0, 2.0, 2.0, 9.0], [2.0, 0.5, 9.0, 2.0]) == {0.5: 0, 2.0: 3, 9.0: 5}
