"""A server's journal: what is on the disk is read again, and what is damaged is named."""

import errno
import logging
import os
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disks import FailingDisk, Forgetful, SlowDisk

from offbeat.errors import JournalError
from offbeat.run import journal as journal_module
from offbeat.run.journal import Journal, remove_journal
from offbeat.run.segments import (
    _HEAD,
    DROP,
    GRADIENT,
    UPDATE,
    Head,
    list_segments,
    read_entries,
)

MARK = bytes(range(32))
TIMEOUT_S = 20.0


def view(text: str) -> list[memoryview]:
    return [memoryview(text.encode())]


class Told:
    """A journal, and what it tells."""

    def __init__(self, folder: Path, first: int = 1, **options: Any) -> None:
        self.lines: list[str] = []
        self.durable: list[int] = []
        self.failures: list[BaseException] = []
        self.failed = threading.Event()
        log = logging.Logger("journal")
        log.addHandler(_Lines(self.lines))
        self.journal = Journal(
            folder,
            MARK,
            epoch=3,
            told=self.durable.append,
            failed=self._fail,
            log=log,
            **options,
        )
        self.journal.open()
        self.journal.begin(first)

    def _fail(self, error: BaseException) -> None:
        self.failures.append(error)
        self.failed.set()

    def add(self, text: str, kind: int = GRADIENT) -> int:
        """An entry, and wait until it is on the disk."""
        number = self.journal.append(Head(kind, 0, worker=1, sequence=7), view(text))
        assert self.journal.wait(number, TIMEOUT_S)
        return number

    def __enter__(self) -> "Told":
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def texts(folder: Path) -> list[str]:
    return [entry.payload.decode() for entry in read_entries(folder, MARK)]


# -- what is written is read -----------------------------------------------------------------------


def test_entries_come_back_as_they_were(tmp_path: Path) -> None:
    head = Head(GRADIENT, 0, 2, 5, 77, 8, 9, 10, 1.5, is_answered=True)
    with Told(tmp_path / "j") as told:
        assert told.journal.append(head, [memoryview(b"abc"), memoryview(b""), memoryview(b"d")])
        told.add("", UPDATE)
        told.journal.append(Head(DROP, 0, 1, is_refused=True))
    first, second, third = read_entries(tmp_path / "j", MARK)
    assert first.payload == b"abcd" and second.payload == b""
    assert first.head == Head(GRADIENT, 3, 2, 5, 77, 8, 9, 10, 1.5, is_answered=True, number=1), (
        "the epoch is the journal's"
    )
    assert (second.head.kind, third.head.is_refused, third.head.number) == (UPDATE, True, 3)


def test_all_that_wait_are_brought_to_the_disk_at_once(tmp_path: Path) -> None:
    disk = SlowDisk()
    with Told(tmp_path / "j", disk=disk) as told:
        told.add("first")
        disk.goes_on.clear()
        numbers = [told.journal.append(Head(GRADIENT, 0), view(str(k))) for k in range(50)]
        disk.goes_on.set()
        assert told.journal.wait(numbers[-1], TIMEOUT_S)
        assert disk.num_synced <= 4, "one fsync for all, or one was under way already"
    assert texts(tmp_path / "j") == ["first", *map(str, range(50))]


def test_a_later_life_adds_to_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    with Told(tmp_path / "j") as told:
        told.add("a")
    with Told(tmp_path / "j", first=2) as told:
        assert told.add("b") == 2
    assert texts(tmp_path / "j") == ["a", "b"]
    assert [segment.first for segment in list_segments(tmp_path / "j")] == [1, 2]


def test_what_is_covered_is_removed_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "j"
    with Told(folder) as told:
        for text in "ab":
            told.add(text)
        told.journal.roll()
        told.add("c")
        told.journal.forget(2)
        assert texts(folder) == ["a", "b", "c"], "the second is needed"
        told.journal.forget(3)
        assert texts(folder) == ["c"]
        told.journal.forget(9)
        assert texts(folder) == ["c"], "it is still added to"
        told.journal.roll()
        told.journal.forget(4)
        assert texts(folder) == []
        told.add("d")
        assert texts(folder) == ["d"]
    remove_journal(folder)
    assert not folder.exists()


def test_files_are_of_a_size_that_can_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 1000)
    with Told(tmp_path / "j") as told:
        for _ in range(9):
            told.add("x" * 400)
    assert [segment.first for segment in list_segments(tmp_path / "j")] == [1, 4, 7]


def test_two_processes_never_write_into_one(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(journal_module, "LOCK_TIMEOUT_S", 0.2)
    with Told(tmp_path / "j"), pytest.raises(JournalError, match=r"cannot use .*for a journal"):
        Told(tmp_path / "j")
    Told(tmp_path / "j").journal.close()


# -- damage ----------------------------------------------------------------------------------------


def small(folder: Path) -> tuple[Path, bytes, list[int]]:
    """A journal of three entries in one file: where it is, what is in it, and where each entry
    ends."""
    ends = []
    with Told(folder) as told:
        for text in ("one", "", "three"):
            told.add(text)
            (segment,) = list_segments(folder)
            ends.append(segment.path.stat().st_size)
    return segment.path, segment.path.read_bytes(), ends


def test_a_tail_that_is_torn_is_cut_at_every_byte(tmp_path: Path) -> None:
    path, whole, ends = small(tmp_path / "j")
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        expected = [
            text for text, end in zip(("one", "", "three"), ends, strict=True) if end <= length
        ]
        assert texts(tmp_path / "j") == expected, length
        path.write_bytes(whole[:length].ljust(4096, b"\0"))
        if length in (0, *ends):
            assert texts(tmp_path / "j") == expected, "room that was made, and not written to"


def test_a_flipped_bit_is_found_at_every_byte_and_named(tmp_path: Path) -> None:
    path, whole, _ = small(tmp_path / "j")
    for at in range(len(whole)):
        for bit in (0, 7):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(JournalError, match=path.name):
                texts(tmp_path / "j")


def test_there_is_no_memory_for_a_payload_that_is_not_there(tmp_path: Path) -> None:
    path, raw, ends = small(tmp_path / "j")
    head = bytearray(raw[ends[-2] : ends[-2] + _HEAD.size])
    head[-16:-8] = (1 << 39).to_bytes(8, "little")
    head[-4:] = zlib.crc32(head[:-4]).to_bytes(4, "little")
    path.write_bytes(raw[: ends[-2]] + head + raw[ends[-2] + _HEAD.size :])
    tracemalloc.start()
    try:
        assert len(texts(path.parent)) == 2, "what is before it"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_zeroed_head_in_the_midst_of_it_is_damage(tmp_path: Path) -> None:
    path, whole, ends = small(tmp_path / "j")
    path.write_bytes(whole[: ends[0]] + bytes(ends[1] - ends[0]) + whole[ends[1] :])
    with pytest.raises(JournalError, match="in entry 2"):
        texts(tmp_path / "j")


def test_a_file_that_is_missing_or_cut_short_in_between_is_damage(tmp_path: Path) -> None:
    folder = tmp_path / "j"
    with Told(folder) as told:
        for text in "abc":
            told.add(text)
            told.journal.roll()
    first, second, _ = (segment.path for segment in list_segments(folder))
    kept = second.read_bytes()
    second.write_bytes(kept[:-1])
    with pytest.raises(JournalError, match="ends before its entry 2"):
        texts(folder)
    second.unlink()
    with pytest.raises(JournalError, match="what is between them is lost"):
        texts(folder)
    second.write_bytes(kept)
    first.unlink()
    assert texts(folder) == ["b", "c"], "whoever reads it knows where it has to begin"


def test_another_runs_journal_is_refused(tmp_path: Path) -> None:
    with Told(tmp_path / "j") as told:
        told.add("a")
    with pytest.raises(JournalError, match="the journal of another run"):
        list(read_entries(tmp_path / "j", bytes(32)))


# -- disks that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["syncs", "writes"])
@pytest.mark.parametrize("before", [0, 2])
def test_what_fails_is_tried_again_in_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, before: int
) -> None:
    monkeypatch.setattr(journal_module, "FIRST_PAUSE_S", 0.001)
    disk = FailingDisk(errno.EIO)
    with Told(tmp_path / "j", disk=disk) as told:
        for text in "ab"[:before]:
            told.add(text)
        disk.left = {"sync": 3, "write": 0} if what == "syncs" else {"sync": 0, "write": 3}
        told.add("c")
        told.add("d")
        assert told.durable == list(range(1, before + 3)), "and nothing is promised meanwhile"
        assert len(told.lines) == 3 and all("Input/output error" in line for line in told.lines)
    assert texts(tmp_path / "j") == [*"ab"[:before], "c", "d"]


def test_what_a_failed_sync_left_behind_is_not_read(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(journal_module, "FIRST_PAUSE_S", 0.001)
    disk = FailingDisk(errno.EIO)
    with Told(tmp_path / "j", disk=disk) as told:
        told.add("a")
        disk.left["sync"] = 1
        told.add("b")
    first, second = (segment.path for segment in list_segments(tmp_path / "j"))
    assert first.read_bytes().endswith(b"b") and second.read_bytes().endswith(b"b")
    damaged = first.read_bytes()[:-1] + b"?"  # as a disk may have it that said it has failed
    first.write_bytes(damaged)
    assert texts(tmp_path / "j") == ["a", "b"]


def test_a_disk_that_stays_full_ends_it_with_a_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(journal_module, "FIRST_PAUSE_S", 0.001)
    disk = FailingDisk(errno.ENOSPC, writes=10**6)
    with Told(tmp_path / "j", disk=disk, patience_s=0.05) as told:
        number = told.journal.append(Head(GRADIENT, 0), view("a"))
        assert told.failed.wait(TIMEOUT_S)
        assert not told.journal.wait(number, 0.01) and told.durable == []
    (failure,) = told.failures
    assert "No space left on device" in str(failure) and "--resume" in str(failure)
    assert texts(tmp_path / "j") == []


@pytest.mark.parametrize("syncs", [True, False])
def test_what_was_told_to_be_there_is_there_after_the_machine_went_down(
    tmp_path: Path, syncs: bool
) -> None:
    """Without its fsync the journal tells the same, and it is not so."""
    with Told(tmp_path / "j", disk=Forgetful(syncs=syncs)) as told:
        for text in "abc":
            told.add(text)
        assert told.durable[-1] == 3
    assert texts(tmp_path / "j") == (["a", "b", "c"] if syncs else [])


def test_a_real_disk_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    of_file, of_folder = os.fdatasync, os.fsync

    def note(what: str, sync: Callable[[int], None]) -> Callable[[int], None]:
        def noted(descriptor: int) -> None:
            synced.append(what)
            sync(descriptor)

        return noted

    monkeypatch.setattr(os, "fdatasync", note("file", of_file))
    monkeypatch.setattr(os, "fsync", note("folder", of_folder))
    with Told(tmp_path / "run" / "j") as told:
        assert synced == ["folder"] * 2, "that the folder is there"
        told.add("a")
        assert synced[2:] == ["folder", "file"], "its name, and what is in it"
        told.add("b")
        assert synced[4:] == ["file"]


def test_closing_brings_what_waits_to_the_disk(tmp_path: Path) -> None:
    disk = SlowDisk()
    told = Told(tmp_path / "j", disk=disk)
    disk.goes_on.clear()
    for text in "abc":
        told.journal.append(Head(GRADIENT, 0), view(text))
    threading.Timer(0.05, disk.goes_on.set).start()
    told.journal.close()
    assert texts(tmp_path / "j") == ["a", "b", "c"]
    deadline_s = time.monotonic() + TIMEOUT_S
    while threading.active_count() > 1 and time.monotonic() < deadline_s:
        threading.Event().wait(0.01)
