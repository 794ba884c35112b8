"""What came of a row's trials so far: added up over calls and machines, and shown as a table.

No trial is made here, and no row looked up: scripts/faults.py puts the two together.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CONFIDENCE = 0.95
BEGIN = "<!-- faults at full count: written by scripts/faults.py -->"
END = "<!-- end of faults at full count -->"


@dataclass
class Tally:
    fault: str
    must: str
    full: int
    seeds: list[tuple[int, int]] = field(default_factory=list)
    """The first of each stretch of them that was tried, and how many."""
    trials: int = 0
    """As the row counts them: kills, pushes, bytes."""
    violations: list[tuple[int, str]] = field(default_factory=list)
    """Which seeds showed one, and what it was."""
    recoveries_s: list[float] = field(default_factory=list)
    caught: dict[str, str] = field(default_factory=dict)
    """By protection, how the trials noticed that it was switched off; empty: they did not."""

    def add(self, other: "Tally") -> None:
        """What was tried elsewhere, or before; no seed twice, or a row would seem surer than it
        is."""
        for first, count in other.seeds:
            for mine, num in self.seeds:
                if first < mine + num and mine < first + count:
                    raise ValueError(
                        f"seeds {mine} to {mine + num - 1} were tried before: begin with another "
                        f"one, as --first {mine + num}"
                    )
        self.fault, self.must, self.full = other.fault, other.must, other.full
        self.seeds = _joined([*self.seeds, *other.seeds])
        self.trials += other.trials
        self.violations += other.violations
        self.recoveries_s += other.recoveries_s
        self.caught |= other.caught

    @property
    def next_seed(self) -> int:
        """From which on none was tried."""
        return max((first + count for first, count in self.seeds), default=0)

    @property
    def bound(self) -> float:
        return upper_bound(len(self.violations), self.trials)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Tally":
        pairs = {key: [tuple(pair) for pair in found[key]] for key in ("seeds", "violations")}
        return cls(**{**found, **pairs})


def _joined(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, count in sorted(stretches):
        if found and sum(found[-1]) == first:
            first, count = found[-1][0], found.pop()[1] + count
        found.append((first, count))
    return found


def upper_bound(num_bad: int, num_trials: int) -> float:
    """How often it fails at most, at 95% (Clopper and Pearson's bound; 3/n where nothing did)."""
    if not num_trials:
        return 1.0
    if not num_bad:
        return min(1.0, 3 / num_trials)
    low, high = num_bad / num_trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _at_most(num_bad, num_trials, middle) > 1 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def _at_most(count: int, n: int, p: float) -> float:
    """How probable it is that no more than so many of n fail, where each does with p."""
    if p >= 1.0 or count >= n:
        return float(count >= n)
    logs = [
        math.lgamma(n + 1)
        - math.lgamma(k + 1)
        - math.lgamma(n - k + 1)
        + k * math.log(p)
        + (n - k) * math.log1p(-p)
        for k in range(count + 1)
    ]
    return math.fsum(map(math.exp, logs))


def quantile(values: Sequence[float], share: float) -> float:
    """The least of them that so many are not above."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def read_tallies(path: Path) -> dict[int, Tally]:
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {int(number): Tally.from_json(tally) for number, tally in found.items()}


def write_tallies(path: Path, tallies: Mapping[int, Tally]) -> None:
    lines = [f"{json.dumps(str(n))}: {json.dumps(asdict(tallies[n]))}" for n in sorted(tallies)]
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    temporary.replace(path)


def table(tallies: Mapping[int, Tally]) -> list[str]:
    """In Markdown."""
    lines = [
        "| # | fault | what must happen | trials | violations | 95% bound | recovery p50 | p99 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number in sorted(tallies):
        each = tallies[number]
        if not each.trials:
            continue
        cells = [f"{each.trials:,}", f"{len(each.violations):,}", f"{each.bound:.2g}"]
        for share in (0.5, 0.99):
            found = quantile(each.recoveries_s, share) if each.recoveries_s else None
            cells.append("" if found is None else f"{found:.2f} s")
        lines.append(f"| {number} | {each.fault} | {each.must} | {' | '.join(cells)} |")
    return lines


def caught_line(tallies: Mapping[int, Tally]) -> str:
    """Empty: no protection was switched off."""
    all_of_them = [how for tally in tallies.values() for how in tally.caught.values()]
    return f"{sum(map(bool, all_of_them))} of {len(all_of_them)} caught" if all_of_them else ""


def write_into(path: Path, tallies: Mapping[int, Tally]) -> None:
    """Between the two marks of a page."""
    before, found, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, also_found, after = rest.partition(END)
    if not found or not also_found:
        raise ValueError(f"{path} has no place for the table: two lines, {BEGIN} and {END}")
    lines = ["", *table(tallies)]
    if caught := caught_line(tallies):
        lines += ["", f"Protections switched off, each in its turn: {caught}."]
    path.write_text("\n".join([before + BEGIN, *lines, "", END + after]), encoding="utf-8")
