"""Events in a twentieth of the room: many lines of JSON become one, with a column for each field,
and gzip does the rest. What comes back is equal to the bit, in the same order.

Made by event_files.py while a file of events is written, and read by events.py. A line of an
archive is a *block* of up to BLOCK events:

    {"order": ["same", 0, 2],            which of the shapes each event has
     "shapes": [[["kind", "version", "received_s"],
                 [["same", "push", 2], ["steps", [7, 1]], ["us", ["steps", [1310336, 2563]]]]]]}

A column is `same`, a value and how often; `steps`, whole numbers as differences to the one before;
`us`, seconds as whole microseconds; `gaps`, where null is, and a column of the others; or `plain`.
Columns, and not lines, since that leaves less than half of what gzip makes of the lines.

>>> archive = Archive(); archive.add('{"kind": "run"}\\n')
>>> Path("ps-0.jsonl.gz").write_bytes(archive.end())
>>> list(read_archive(Path("ps-0.jsonl.gz")))
"""

import gzip
import itertools
import json
import math
import operator
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

BLOCK = 1000
"""Events. Columns are long enough then, and a reader needs no more memory than that."""
PARSED_AT_ONCE = 100
"""Lines. While json reads, no other thread of the process can do anything."""
LEVEL = 6
"""Of gzip, at which it takes a third of the time that goes into an archive; 1 needs 15% more."""
MOST_S = 1e9
"""Times above that are written as they are; below it microseconds are exact."""

Event = dict[str, Any]
Column = list[Any]


class Archive:
    """Lines go in as they are written, so that the work is spread over a run; what has become of
    them is kept, a few hundred kB for each file."""

    def __init__(self) -> None:
        self._rest = ""
        """Of the last line, where that is not whole yet."""
        self._events: list[Event] = []
        self._gzip = zlib.compressobj(LEVEL, wbits=31)
        self._made: list[bytes] = []

    @property
    def is_whole(self) -> bool:
        """No line was begun and not ended."""
        return not self._rest

    def add(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        for start in range(0, len(lines), PARSED_AT_ONCE):
            self._events += parsed(lines[start : start + PARSED_AT_ONCE])
            if len(self._events) >= BLOCK:
                self._close_block()

    def end(self) -> bytes:
        """The whole file. Nothing comes after it."""
        self._close_block()
        return b"".join((*self._made, self._gzip.flush()))

    def _close_block(self) -> None:
        if self._events:
            line = json.dumps(to_block(self._events), separators=(",", ":")) + "\n"
            self._made.append(self._gzip.compress(line.encode()))
            self._events = []


def read_archive(path: Path) -> Iterator[Event]:
    """The events of an archive. Where it was cut off, or is damaged, an event of kind
    `unreadable` stands for the rest."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        try:
            line = file.readline()
            if not line:
                raise EOFError  # gzip takes no bytes at all for an empty file
            while line:
                yield from from_block(json.loads(line))
                line = file.readline()
        except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError):
            yield {"kind": "unreadable"}


def parsed(lines: list[str]) -> list[Event]:
    """Many lines at once take half as long as one by one, which is for finding a bad one."""
    try:
        events = json.loads(f"[{','.join(lines)}]")
    except ValueError:
        if len(lines) == 1:
            return [{"kind": "unreadable"}]
        return [event for line in lines for event in parsed([line])]
    unreadable = {"kind": "unreadable"}
    return [e if isinstance(e, dict) and "kind" in e else unreadable for e in events]


def to_block(events: Sequence[Event]) -> dict[str, Any]:
    """A block. Events of the same fields have their columns together."""
    numbers: dict[tuple[str, ...], int] = {}
    order = [numbers.setdefault(tuple(event), len(numbers)) for event in events]
    rows: list[list[Any]] = [[] for _ in numbers]
    for number, event in zip(order, events, strict=True):
        rows[number].append(event.values())
    columns = ([_to_column(column) for column in zip(*found, strict=True)] for found in rows)
    shapes = [[list(names), found] for names, found in zip(numbers, columns, strict=True)]
    return {"order": _to_column(order), "shapes": shapes}


def from_block(block: dict[str, Any]) -> list[Event]:
    found = [_rows(names, columns) for names, columns in block["shapes"]]
    if len(found) == 1:
        return list(found[0])
    return [next(found[number]) for number in _from_column(block["order"])]


def _rows(names: Sequence[str], columns: Iterable[Column]) -> Iterator[Event]:
    values = zip(*map(_from_column, columns), strict=True)
    return (dict(zip(names, row, strict=True)) for row in values)


def _to_column(column: Sequence[Any]) -> Column:
    kinds = set(map(type, column))
    if type(None) in kinds and len(kinds) > 1:
        gaps = [index for index, value in enumerate(column) if value is None]
        return ["gaps", gaps, _to_column([value for value in column if value is not None])]
    if len(kinds) > 1 or kinds & {dict, list}:
        return ["plain", list(column)]
    if column.count(column[0]) == len(column) and (column[0] or kinds != {float}):
        return ["same", column[0], len(column)]
    if kinds == {int}:
        return _whole(column)
    if kinds == {float} and (micros := _micros(column)) is not None:
        return ["us", _whole(micros)]
    return ["plain", list(column)]


def _whole(column: Sequence[int]) -> Column:
    """As differences where these are the smaller numbers, as they are of what counts up."""
    steps = [column[0], *itertools.starmap(operator.sub, zip(column[1:], column, strict=False))]
    is_shorter = sum(map(abs, steps)) < sum(map(abs, column))
    return ["steps", steps] if is_shorter else ["plain", list(column)]


def _micros(column: Sequence[float]) -> list[int] | None:
    """Whole microseconds; None: these are other numbers, of which something would be lost."""
    if not -MOST_S < min(column) <= max(column) < MOST_S or not all(map(math.isfinite, column)):
        return None
    micros = [round(value * 1e6) for value in column]
    is_exact = all(map(operator.eq, (whole / 1e6 for whole in micros), column))
    has_minus_zero = any(not value and math.copysign(1, value) < 0 for value in column)
    return micros if is_exact and not has_minus_zero else None


def _from_column(column: Column) -> Sequence[Any]:
    match column:
        case ["same", value, count]:
            return [value] * count
        case ["steps", steps]:
            return list(itertools.accumulate(steps))
        case ["us", inner]:
            return [whole / 1e6 for whole in _from_column(inner)]
        case ["gaps", gaps, inner]:
            found = list(_from_column(inner))
            for index in gaps:
                found.insert(index, None)
            return found
        case ["plain", [*values]]:
            return values
    raise ValueError("not a column")
