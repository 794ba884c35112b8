"""Runs under a virtual clock, with everything going wrong: as many seeds as there is time for.

    make chaos SEEDS=100000                     # on all cores; what did not hold, and how to see it
    python scripts/chaos.py --seed 17           # one of them, with every event as a line
    python scripts/chaos.py --planted           # after how many seeds each planted bug is found

What is simulated, and what is not, is said in tests/support/simulated/ and docs/reliability.md.
Exits with 1 where something did not hold.
"""

import argparse
import contextlib
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "support")]

from simulated.bugs import BUGS, found_at  # noqa: E402 - found there
from simulated.faults import simulate  # noqa: E402

AT_ONCE = 250
"""Seeds, which a process runs before it tells of them."""
Told = tuple[int, int, int, list[tuple[int, str]]]
"""How many seeds, events and pushes; and which seeds had something to complain of, with what."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, help="only this one, with its events")
    parser.add_argument("--planted", action="store_true", help="find the planted bugs instead")
    asked = parser.parse_args()
    if asked.seed is not None:
        return show(asked.seed)
    if asked.planted:
        return find_planted(min(asked.seeds, 2000))
    return run_all(range(asked.first, asked.first + asked.seeds), asked.jobs)


def show(seed: int) -> int:
    outcome = simulate(seed, traced=True)
    print(*outcome.trace, "", outcome.plan, sep="\n")
    print(*outcome.complaints or ["all is well"], sep="\n")
    return bool(outcome.complaints)


def run_all(seeds: range, num_jobs: int) -> int:
    began_s = time.monotonic()
    num_seeds = num_events = num_pushes = num_bad = 0
    parts = [seeds[at : at + AT_ONCE] for at in range(0, len(seeds), AT_ONCE)]
    with contextlib.ExitStack() as stack:
        told: Iterable[Told] = map(run_some, parts)
        if num_jobs > 1:
            pool = multiprocessing.get_context("spawn").Pool(num_jobs, prepare)
            told = stack.enter_context(pool).imap_unordered(run_some, parts)
        for counted, events, pushes, bad in told:
            num_seeds, num_events = num_seeds + counted, num_events + events
            num_pushes, num_bad = num_pushes + pushes, num_bad + len(bad)
            for seed, complaint in bad:
                print(f"seed {seed}: {first_line(complaint)}")
                print(f"    python scripts/chaos.py --seed {seed}", flush=True)
    took_s = time.monotonic() - began_s
    print(
        f"{num_seeds} seeds, {num_events} events, {num_pushes} pushes, {num_bad} violations, "
        f"{num_seeds / took_s:.0f} seeds/s on {num_jobs} processes"
    )
    return bool(num_bad)


def prepare() -> None:
    simulate(0)
    settle()


def settle() -> None:
    """What is there by now stays, and need not be looked through for garbage."""
    gc.collect()
    gc.freeze()


def run_some(seeds: range) -> Told:
    num_events = num_pushes = 0
    bad = []
    for seed in seeds:
        outcome = simulate(seed)
        num_events, num_pushes = num_events + outcome.num_events, num_pushes + outcome.num_pushes
        if outcome.complaints:
            bad.append((seed, outcome.complaints[0]))
    return len(seeds), num_events, num_pushes, bad


def find_planted(most: int) -> int:
    prepare()
    found = dict(search(most))
    print(f"{sum(map(bool, found.values()))} of {len(found)} caught within {most} seeds")
    return not all(found.values())


def search(most: int) -> Iterator[tuple[str, int]]:
    for name, bug in BUGS.items():
        after, how = found_at(bug, lambda seed: simulate(seed).complaints, most)
        shown = f"after {after} seeds: {first_line(how)}" if after else "not found"
        print(f"{name}: {shown}", flush=True)
        yield name, after


def first_line(complaint: str) -> str:
    lines = complaint.splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


if __name__ == "__main__":
    sys.exit(main())
