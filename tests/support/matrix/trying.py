"""Trials of rows, one after the other or many at a time. The same seeds are the same trials on any
number of processes; they are added up in the order of seeds.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import multiprocessing
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from matrix.row import Row, Trial
from matrix.rows import ROWS
from matrix.tally import Tally

MOST_OFF = 40
"""Seeds within which a row has to notice that a protection is switched off."""
MOST_AHEAD = 1000
"""So many trials may be over, or begun, before one of an earlier seed is."""
Told = tuple[int, Trial]


@dataclass(frozen=True)
class Amount:
    """Seeds from `first` on, until the row counts `trials`, or the time is up."""

    trials: int
    first: int = 0
    until_s: float = float("inf")
    """On the clock that never goes back."""


def try_once(number: int, seed: int, off: str | None = None) -> Trial:
    """`off`: with this protection switched off. A trial that breaks down has shown something."""
    row = ROWS[number]
    with row.protections[off]() if off else contextlib.nullcontext():
        try:
            return row.trial(seed)
        except Exception as error:
            lines = traceback.format_exception(error)
            return Trial((f"the trial broke down: {lines[-1].strip()} ({lines[-2].strip()})",))


def try_row(row: Row, amount: Amount, num_jobs: int) -> Tally:
    """Nothing more is begun when the time is up; what was begun then counts, too."""
    tally = Tally(row.fault, row.must, row.full)
    done = 0
    for seed, trial in _results(row, amount, 1 if row.alone else num_jobs):
        done += 1
        tally.trials += trial.counted
        tally.violations += [(seed, what) for what in trial.violations]
        tally.recoveries_s += [round(each, 4) for each in recoveries(trial)]
        if tally.trials >= amount.trials:
            break
    tally.seeds = [(amount.first, done)] if done else []
    return tally


def recoveries(trial: Trial) -> Iterator[float]:
    yield from trial.recoveries_s
    if trial.recovery_s is not None:
        yield trial.recovery_s


def _results(row: Row, amount: Amount, num_jobs: int) -> Iterator[Told]:
    """In the order of seeds."""
    seeds = itertools.count(amount.first)
    if num_jobs == 1:
        for seed in seeds:
            if time.monotonic() >= amount.until_s:
                return
            yield seed, try_once(row.number, seed)
    with _pool(num_jobs) as pool:
        begun: collections.deque[tuple[int, concurrent.futures.Future[Trial]]]
        begun = collections.deque()
        try:
            while True:
                busy = [future for _, future in begun if not future.done()]
                may_begin = time.monotonic() < amount.until_s and len(begun) < MOST_AHEAD
                if may_begin and len(busy) < num_jobs:  # what is begun is waited for in the end
                    seed = next(seeds)
                    begun.append((seed, pool.submit(try_once, row.number, seed)))
                elif not begun:
                    return
                elif begun[0][1].done():
                    seed, future = begun.popleft()
                    yield seed, future.result()
                else:
                    concurrent.futures.wait(busy, return_when="FIRST_COMPLETED")
        finally:
            for _, future in begun:
                future.cancel()


@contextlib.contextmanager
def _pool(num_jobs: int) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")  # a fork would inherit threads
    with concurrent.futures.ProcessPoolExecutor(num_jobs, mp_context=context) as pool:
        yield pool


def caught_after(number: int, off: str, most: int = MOST_OFF) -> tuple[int, str]:
    """After how many seeds the row notices that a protection is switched off, and how; 0: never."""
    for seed in range(most):
        if found := try_once(number, seed, off).violations:
            return seed + 1, found[0]
    return 0, ""


def switch_off(rows: Iterable[Row], num_jobs: int) -> Iterator[tuple[Row, str, int, str]]:
    """Each protection of each row in its turn: after how many seeds it was missed, and how."""
    cases = [(row, off) for row in rows for off in row.protections]
    if num_jobs == 1:
        for row, off in cases:
            yield (row, off, *caught_after(row.number, off))
        return
    with _pool(num_jobs) as pool:
        asked = [pool.submit(caught_after, row.number, off) for row, off in cases]
        for (row, off), future in zip(cases, asked, strict=True):
            yield (row, off, *future.result())
