"""What may go wrong, row by row, at full count: what was tried how often, and what did not hold.

    python scripts/faults.py                            # every row at full count: hours
    python scripts/faults.py --rows 1,5 --trials 100    # fewer of some
    python scripts/faults.py --seconds 500 --json F     # as many as fit; F adds up what calls find
    python scripts/faults.py --first 5000 --json F      # from another seed on
    python scripts/faults.py --trials 0 --json F --into docs/reliability.md    # only the table
    python scripts/faults.py --off                      # each protection switched off: is it missed?
    python scripts/faults.py --row 4 --seed 17          # one trial

The rows are in tests/support/matrix, and docs/reliability.md says what they are about. Exits with 1
where something did not hold, or a protection was not missed.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "support"), str(Path(__file__).parents[1])]

from matrix.row import Row  # noqa: E402 - found there
from matrix.rows import ROWS  # noqa: E402
from matrix.tally import (  # noqa: E402
    Tally,
    caught_line,
    read_tallies,
    table,
    write_into,
    write_tallies,
)
from matrix.trying import Amount, recoveries, switch_off, try_once, try_row  # noqa: E402


def main() -> int:
    asked = _read_arguments()
    if asked.seed is not None:
        return show(asked.rows, asked.seed)
    rows = _possible(asked.rows)
    if asked.off:
        return try_without(rows, asked.jobs, asked.json)
    until_s = time.monotonic() + asked.seconds
    found = {}
    for row in rows if asked.trials != 0 else ():
        if time.monotonic() < until_s:
            amount = Amount(asked.trials or row.full, asked.first, until_s)
            found[row.number] = try_all(row, amount, asked.jobs, asked.json)
    tallies = read_tallies(asked.json) if asked.json else found
    print(*table(tallies), sep="\n")
    if asked.into:
        write_into(asked.into, tallies)
    return any(tally.violations for tally in found.values())


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", "--row", type=_rows, default=list(ROWS.values()), help="as 1,5")
    parser.add_argument("--trials", type=int, help="of each; by default its full count")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="add what is found to what is in there")
    parser.add_argument("--into", type=Path, help="write the table into this page")
    parser.add_argument("--off", action="store_true", help="switch off each protection")
    parser.add_argument("--seed", type=int, help="only this one, of one row")
    asked = parser.parse_args()
    if asked.into and not asked.json:
        parser.error("--into takes its figures out of --json FILE")
    return asked


def _rows(text: str) -> list[Row]:
    numbers = [int(part) for part in text.split(",")]
    if unknown := [number for number in numbers if number not in ROWS]:
        raise argparse.ArgumentTypeError(f"no row {unknown[0]}; there are {sorted(ROWS)}")
    return [ROWS[number] for number in numbers]


def _possible(rows: Sequence[Row]) -> list[Row]:
    found = []
    for row in sorted(rows, key=lambda row: row.number):
        if (why_not := row.why_not()) is None:
            found.append(row)
        else:
            print(f"row {row.number} ({row.fault}) is left out: {why_not}", flush=True)
    return found


def show(rows: Sequence[Row], seed: int) -> int:
    violations = []
    for row in rows:
        trial = try_once(row.number, seed)
        violations += trial.violations
        times = ", ".join(f"{each:.3f} s" for each in recoveries(trial))
        print(f"row {row.number}, seed {seed}: {row.fault}", f"must: {row.must}", sep="\n")
        print(f"counts {trial.counted}; recovery: {times or 'none'}")
        print(*trial.violations or ["all is well"], sep="\n")
    return bool(violations)


def try_all(row: Row, amount: Amount, num_jobs: int, file: Path | None) -> Tally:
    """And put down at once what came of it, so that nothing is lost of a call that is ended."""
    before = read_tallies(file) if file else {}
    began_s = time.monotonic()
    found = try_row(row, amount, num_jobs)
    for seed, what in found.violations:
        print(f"row {row.number}: {what}")
        print(f"    python scripts/faults.py --row {row.number} --seed {seed}")
    print(
        f"row {row.number}: {found.trials:,} of {amount.trials:,} trials, "
        f"{len(found.violations)} violations, {time.monotonic() - began_s:.1f} s",
        flush=True,
    )
    if file:
        tally = before.setdefault(row.number, Tally(row.fault, row.must, row.full))
        tally.add(found)
        write_tallies(file, before)
    return found


def try_without(rows: Sequence[Row], num_jobs: int, file: Path | None) -> int:
    found = {row.number: Tally(row.fault, row.must, row.full) for row in rows}
    for row, off, after, how in switch_off(rows, num_jobs):
        shown = f"after {after} seeds: {how}" if after else "not missed"
        print(f"row {row.number}, {off}: {shown}", flush=True)
        found[row.number].caught[off] = how
    print(caught_line(found) or "no protections")
    if file:
        tallies = read_tallies(file)
        for number, tally in found.items():
            tallies.setdefault(number, Tally(tally.fault, tally.must, tally.full)).add(tally)
        write_tallies(file, tallies)
    return not all(how for tally in found.values() for how in tally.caught.values())


if __name__ == "__main__":
    sys.exit(main())
