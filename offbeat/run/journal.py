"""A server's journal: what it has on its disk before it answers, with --ack durable.

Entries are handed over under the shard's lock, which takes no longer than to note where their bytes
lie. A thread of the journal's own writes them, and brings all that wait to the disk at once: one
fsync for everybody (group commit). Then it tells how far the disk has it. Who hands an entry over
leaves its payload as it is until then. Segments (segments.py) that a checkpoint covers are removed.

    journal = Journal(folder, mark, epoch=0, told=..., failed=..., log=...)
    for entry in journal.read(): ...
    journal.begin(number)                    # of the next entry
    number = journal.append(Head(UPDATE, 0, version=7), [payload])
    journal.wait(number, timeout_s)
    journal.close()

A disk that is full, or fails, makes everybody wait: entries are tried again in another file, since
nobody knows what of the first one a failed fsync has left, with growing pauses and for `patience_s`
in all. Then `failed` is called, and nothing more is written or promised.
"""

import contextlib
import fcntl
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from offbeat.errors import JournalError
from offbeat.run.segments import (
    SUFFIX,
    Entry,
    Head,
    beginning,
    list_segments,
    read_entries,
    segment_path,
)

SEGMENT_BYTES = 64 << 20
"""From which size on the next entries go into another file."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
PATIENCE_S = 60.0
CLOSE_TIMEOUT_S = 10.0
LOCK_TIMEOUT_S = 10.0
"""How long a predecessor, which was killed, may take to be gone."""
MOST_PARTS = 512
"""Of one system call; what the kernel takes is 1,024."""


class File(Protocol):
    """One that is only ever added to."""

    def write(self, parts: Sequence[memoryview]) -> None:
        """Raises an OSError, as the other two do."""

    def sync(self) -> None:
        """What was written is on the disk when this returns."""

    def close(self) -> None: ...


class Disk:
    """What a journal asks of a file system; a test has one that loses what was not synced."""

    def create(self, path: Path) -> File:
        """A new file; one of that name that is there already is another one, and goes."""
        path.unlink(missing_ok=True)
        return _PlainFile(path)

    def sync_folder(self, folder: Path) -> None:
        """The names in it are on the disk when this returns."""
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _PlainFile(File):
    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o644)

    def write(self, parts: Sequence[memoryview]) -> None:
        left = deque(part for part in parts if part.nbytes)
        while left:
            written = os.writev(self._descriptor, list(itertools.islice(left, MOST_PARTS)))
            while left and written >= left[0].nbytes:
                written -= left.popleft().nbytes
            if written:
                left[0] = left[0][written:]

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An entry that was handed over."""

    head: Head
    payload: Sequence[memoryview]


class Journal:
    """Owns its folder, and a thread from `begin` to `close`."""

    def __init__(
        self,
        folder: Path,
        mark: bytes,
        *,
        epoch: int,
        told: Callable[[int], None],
        failed: Callable[[BaseException], None],
        log: logging.Logger,
        disk: Disk | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`told` is called with the number of the last entry that is on the disk, `failed` with
        what it came to, both by the journal's thread."""
        self.folder = folder
        self.durable = 0
        """The number of the last entry that is on the disk."""
        self._mark = mark
        self._epoch = epoch
        self._told = told
        self._failed = failed
        self._log = log
        self._disk = disk or Disk()
        self._patience_s = patience_s
        self._next = 1
        self._changed = threading.Condition()
        """Something waits, is on the disk, or is over; held for moments only."""
        self._waiting: deque[_Waiting] = deque()
        self._borders: deque[int] = deque()
        """Entries that are to be the last of their segments."""
        self._sealed = 0
        """The last one of them."""
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._file: File | None = None
        self._size = 0
        self._lock: int | None = None
        self._thread: threading.Thread | None = None

    # -- before it begins ----------------------------------------------------------------------

    def open(self) -> None:
        """Make the folder this process's alone."""
        try:
            self._open()
        except OSError as error:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None
            raise JournalError(
                f"cannot use {self.folder} for a journal: {error.strerror or error}"
            ) from error

    def _open(self) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            for folder in (self.folder.parent, self.folder.parent.parent):
                self._disk.sync_folder(folder)
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise
            self._closing.wait(FIRST_PAUSE_S)

    def read(self) -> Iterator[Entry]:
        """What former lives of the server have left."""
        return read_entries(self.folder, self._mark)

    def begin(self, number: int) -> None:
        """From now on entries are taken, the first of them with this number."""
        self._next, self.durable = number, number - 1
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    # -- for whoever has something to write ----------------------------------------------------

    @property
    def last(self) -> int:
        """The number of the last entry that was handed over."""
        return self._next - 1

    def append(self, head: Head, payload: Sequence[memoryview] = ()) -> int:
        """Hand an entry over; returns its number. One thread at a time."""
        with self._changed:
            number = self._next
            self._next += 1
            if self._failure is None:
                numbered = replace(head, number=number, epoch=self._epoch)
                self._waiting.append(_Waiting(numbered, payload))
                self._changed.notify_all()
        return number

    def roll(self) -> None:
        """What comes from now on goes into another file, so that those before can be removed."""
        with self._changed:
            if self._sealed < self.last:
                self._sealed = self.last
                self._borders.append(self.last)

    def wait(self, number: int, timeout_s: float) -> bool:
        """Until the disk has everything up to this entry; False: it does not come to that."""
        with self._changed:
            self._changed.wait_for(lambda: self.durable >= number or self._is_over, timeout_s)
            return self.durable >= number

    @property
    def _is_over(self) -> bool:
        return self._failure is not None or (self._thread is None and self._closing.is_set())

    def forget(self, below: int) -> None:
        """Entries below this one are covered: remove the segments that have no other."""
        segments = list_segments(self.folder)
        firsts = [segment.first for segment in segments[1:]]
        if segments and segments[-1].first <= self._sealed:  # nothing is added to it any more
            firsts.append(self._sealed + 1)
        for segment, after in zip(segments, firsts, strict=False):
            if after > below:
                return
            try:
                segment.path.unlink(missing_ok=True)
            except OSError as error:  # it takes room, and does no harm
                self._log.warning("cannot remove %s: %s", segment.path, error.strerror or error)

    def close(self) -> None:
        """Bring what waits to the disk, once, and let go of the folder."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
            self._thread = None
        if self._lock is not None:
            remove_if_empty(self.folder)
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # also for children that have a copy of it
            os.close(self._lock)
            self._lock = None

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while batch := self._take():
                self._bring(batch)
                with self._changed:
                    self.durable = batch[-1].head.number
                    self._changed.notify_all()
                self._told(self.durable)
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._waiting.clear()
                self._changed.notify_all()
            if not self._closing.is_set():
                self._failed(error)
        finally:
            self._let_go_of_file()

    def _take(self) -> list[_Waiting]:
        """All that wait, of one segment; nothing: it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing.is_set())
            batch: list[_Waiting] = []
            while self._waiting and not (batch and self._is_border(batch[-1].head.number)):
                batch.append(self._waiting.popleft())
            return batch

    def _is_border(self, number: int) -> bool:
        return bool(self._borders) and self._borders[0] <= number

    def _bring(self, batch: Sequence[_Waiting]) -> None:
        """To the disk, as often as it takes."""
        pause_s, deadline_s = FIRST_PAUSE_S, time.monotonic() + self._patience_s
        while True:
            try:
                self._write(batch)
                return
            except OSError as error:
                self._let_go_of_file()
                reason = error.strerror or str(error)
                if time.monotonic() > deadline_s or self._closing.is_set():
                    raise JournalError(
                        f"cannot write the journal in {self.folder}: {reason}; what was answered "
                        f"is safe: make room, or mend the disk, and go on with --resume"
                    ) from error
            self._log.error(
                "cannot write the journal in %s: %s; every push waits, and it is tried again "
                "within %g s", self.folder, reason, pause_s
            )  # fmt: skip
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _write(self, batch: Sequence[_Waiting]) -> None:
        first = batch[0].head.number
        while self._is_border(first - 1):
            self._let_go_of_file()
            with self._changed:
                self._borders.popleft()
        if self._size > SEGMENT_BYTES:
            self._let_go_of_file()
        if self._file is None:
            self._create(first)
        assert self._file is not None
        parts = []
        for each in batch:
            parts += [memoryview(each.head.packed(each.payload)), *each.payload]
        self._file.write(parts)
        self._file.sync()
        self._size += sum(part.nbytes for part in parts)

    def _create(self, first: int) -> None:
        path = segment_path(self.folder, first)
        self._file = self._disk.create(path)
        self._size = 0
        self._file.write([memoryview(beginning(self._mark, first, self._epoch))])
        self._disk.sync_folder(self.folder)

    def _let_go_of_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # whatever it was about, nobody relies on it
                file.close()


def remove_journal(folder: Path) -> None:
    """All that is in it is in a checkpoint."""
    for path in sorted(folder.glob(f"*{SUFFIX}"), reverse=True):
        path.unlink()
    remove_if_empty(folder)


def remove_if_empty(folder: Path) -> None:
    """Where journals were."""
    with contextlib.suppress(OSError):  # there is something in it
        folder.rmdir()
