"""What may go wrong, row by row, at full count: what was tried how often, and what did not hold.

    python scripts/faults.py                            # every row at full count: hours
    python scripts/faults.py --rows 1,5 --trials 100    # fewer of some
    python scripts/faults.py --seconds 500 --json F     # as many as fit; said again, it goes on
    python scripts/faults.py --first 5000 --json G      # from another seed on, on another machine
    python scripts/faults.py --trials 0 --json F --add G            # both together
    python scripts/faults.py --trials 0 --json F --into docs/reliability.md    # only the table
    python scripts/faults.py --off                      # each protection switched off
    python scripts/faults.py --row 4 --seed 17          # one trial

The rows are in tests/support/matrix, and docs/reliability.md says what they are about. Exits with 1
where something did not hold, or a protection was not missed.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).parents[1] / "tests" / "support"),
    str(Path(__file__).parents[1]),
]

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
    for path in asked.add:
        add(read_tallies(path), asked.json)
    found = {}
    for row in rows if asked.trials != 0 else ():
        before = read_tallies(asked.json).get(row.number) if asked.json else None
        amount = _amount(row, asked.trials, asked.first, before)
        if amount.trials > 0 and time.monotonic() < until_s:
            found[row.number] = try_all(row, replace(amount, until_s=until_s), asked.jobs)
            if asked.json:
                add({row.number: found[row.number]}, asked.json)
    tallies = read_tallies(asked.json) if asked.json else found
    print(*table(tallies), sep="\n")
    if asked.into:
        write_into(asked.into, tallies)
    return any(tally.violations for tally in found.values())


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", "--row", type=_rows, default=list(ROWS.values()), help="as 1,5")
    parser.add_argument("--trials", type=int, help="of each; by default what FILE lacks of all")
    parser.add_argument("--first", type=int, help="the first seed; by default after FILE's last")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="add what is found to what is in there")
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="other FILEs, to this one")
    parser.add_argument("--into", type=Path, help="write the table into this page")
    parser.add_argument("--off", action="store_true", help="switch off each protection")
    parser.add_argument("--seed", type=int, help="only this one, of one row")
    asked = parser.parse_args()
    if (asked.into or asked.add) and not asked.json:
        parser.error("--into and --add go with --json FILE")
    return asked


def _amount(row: Row, trials: int | None, first: int | None, before: Tally | None) -> Amount:
    """By default what is lacking, from the next seed on."""
    lacks = row.full - (before.trials if before else 0)
    next_seed = before.next_seed if before else 0
    if first is not None and first < next_seed:
        raise SystemExit(
            f"row {row.number}: seeds up to {next_seed - 1} were tried before: begin later, or put "
            f"what is found into another file"
        )
    return Amount(lacks if trials is None else trials, next_seed if first is None else first)


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


def try_all(row: Row, amount: Amount, num_jobs: int) -> Tally:
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
    return found


def add(found: Mapping[int, Tally], file: Path) -> None:
    """Each row at once, so that nothing is lost of a call that is ended."""
    tallies = read_tallies(file)
    for number, each in found.items():
        tallies.setdefault(number, Tally(each.fault, each.must, each.full)).add(each)
    write_tallies(file, tallies)


def try_without(rows: Sequence[Row], num_jobs: int, file: Path | None) -> int:
    found = {row.number: Tally(row.fault, row.must, row.full) for row in rows}
    for row, off, after, how in switch_off(rows, num_jobs):
        shown = f"after {after} seeds: {how}" if after else "not missed"
        print(f"row {row.number}, {off}: {shown}", flush=True)
        found[row.number].caught[off] = how
    print(caught_line(found) or "no protections")
    if file:
        add(found, file)
    return not all(how for tally in found.values() for how in tally.caught.values())


if __name__ == "__main__":
    sys.exit(main())
