"""The files that a role's events lie in: NAME.jsonl, and when that is full NAME.1.jsonl, and so on.

Written by events.py, and by engines that are sent lines from elsewhere; listed by whoever reads. A
file that is full, or long when its role ends, is archived (archive.py) and becomes NAME.1.jsonl.gz.
That is put down under another name and renamed before the lines go, so that at every moment an
event is in one file that a reader takes, and in no second one: where both are there, the lines are
what is read.

>>> file = EventFile.create(folder, "ps-0")
>>> file.write('{"kind": "run"}\\n'), file.close()
"""

import itertools
import os
from fnmatch import fnmatchcase
from pathlib import Path

from offbeat.run.archive import Archive

FULL_BYTES = 1 << 23
"""About 17,000 pushes or 40,000 steps."""
LONG_BYTES = 1 << 20
"""A file that is closed with less stays as it is, for a person to read."""
ARCHIVED = ".gz"
HALF = ".tmp"
"""What is being archived, and what a role that was killed then leaves."""


class EventFile:
    """Lines of one role; used by one thread at a time. Nothing is open in between."""

    def __init__(self, path: Path) -> None:
        self._is_closed = False
        self._begin(path)

    @classmethod
    def create(cls, folder: Path, name: str) -> "EventFile":
        return cls(free_path(folder / f"{name}.jsonl"))

    def _begin(self, path: Path) -> None:
        path.write_bytes(b"")
        self._path = path
        self._num_bytes = 0
        self._archive = Archive()

    def write(self, text: str) -> None:
        assert not self._is_closed
        data = text.encode()
        with self._path.open("ab") as file:
            file.write(data)
        self._num_bytes += len(data)
        self._archive.add(text)
        if self._num_bytes >= FULL_BYTES and self._archive.is_whole:
            self._archive_it()
            self._begin(free_path(self._path))

    def flush(self) -> None:
        """It is written already."""

    def close(self) -> None:
        self._is_closed = True
        if self._num_bytes >= LONG_BYTES and self._archive.is_whole:
            self._archive_it()

    def _archive_it(self) -> None:
        """Lines go only when what is archived has reached the disk."""
        archived = archive_path(self._path)
        beside = archived.with_name(archived.name + HALF)
        with beside.open("wb") as file:
            file.write(self._archive.end())
            file.flush()
            os.fsync(file.fileno())
        beside.rename(archived)
        self._path.unlink()


def free_path(path: Path) -> Path:
    """This one, or the next free number behind the name: a process that was killed may have left
    half a line, so whoever takes its place begins a file of its own."""
    name, first = in_time(path.name)
    for number in itertools.count(first):
        path = path.with_name(f"{name}.{number}.jsonl" if number else f"{name}.jsonl")
        if not path.exists() and not archive_path(path).exists():
            break
    return path


def remove_halves(folder: Path) -> None:
    """Of archives whose roles were killed as they made them, and are gone: the lines are there."""
    for path in folder.glob(f"*.jsonl{ARCHIVED}{HALF}"):
        path.unlink()


def archive_path(path: Path) -> Path:
    return path.with_name(path.name + ARCHIVED)


def event_files(folder: Path, pattern: str) -> list[Path]:
    """Those whose names are like `pattern`, a role's in the order of time, each by the name that
    it has, or had, before it was archived.

    A file that is archived meanwhile may escape who goes through the folder, under both its names;
    but only once, and so not twice in a row."""
    found = {*_names(folder), *_names(folder)}
    return [folder / n for n in sorted(found, key=in_time) if fnmatchcase(n, pattern)]


def _names(folder: Path) -> set[str]:
    found = (*folder.glob("*.jsonl"), *folder.glob(f"*.jsonl{ARCHIVED}"))
    return {path.name.removesuffix(ARCHIVED) for path in found}


def in_time(name: str) -> tuple[str, int]:
    """NAME.jsonl, then what came after it: NAME.1.jsonl, NAME.2.jsonl, ..."""
    stem, _, number = name.removesuffix(".jsonl").partition(".")
    return stem, int(number) if number.isdecimal() else 0
