"""The files of a journal: how entries lie in them, and what is there to be read after a crash.

A journal (journal.py, which writes it) is a folder of segments, NUMBER.journal, each named after
the first of its entries. Entries are numbered without a gap; an entry is a head, with a checksum of
its own, and a payload, whose checksum the head has:

    for entry in read_entries(folder, mark):
        entry.head.kind, entry.head.sequence, entry.payload

Files are only ever added to. So what a crash cuts off is an end: an entry that is not there as a
whole, or zeros, where the machine went down and the file system had made room already. Nothing of
that was promised to anybody, and it counts for nothing. Anything else that is not as it was written
is damage, a JournalError that names the file and the place.
"""

import dataclasses
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from offbeat.errors import JournalError

SUFFIX = ".journal"
FORMAT = b"OBJOURN1"
_BEGINNING = struct.Struct("<8s32sQII")
"""Of a segment: format, mark, number of the first entry, the server's epoch, checksum."""
_HEAD = struct.Struct("<BBHIIIQQqqqdQII")
_WITHOUT_SUM = _HEAD.size - 4
MAX_PAYLOAD = 1 << 40

GRADIENT, UPDATE, DROP = 1, 2, 3
"""Kinds of entries: a push with its gradient; which pushes made an update; one that was dropped."""
NO_VERSION = -1


@dataclass(frozen=True, slots=True)
class Head:
    """What an entry says of a push, or of an update."""

    kind: int
    epoch: int
    """Of the server that wrote it."""
    worker: int = 0
    incarnation: int = 0
    sequence: int = 0
    batch: int = 0
    base_version: int = 0
    version: int = NO_VERSION
    """That an update made; a push came at."""
    at_s: float = 0.0
    is_answered: bool = False
    """Its worker was answered before anything was decided on it."""
    is_refused: bool = False
    """There was no usable gradient."""
    number: int = 0
    """Its place in the journal; whoever writes it says so."""

    def packed(self, payload: Sequence[memoryview]) -> bytes:
        flags = self.is_answered | self.is_refused << 1
        length = sum(part.nbytes for part in payload)
        begun = _HEAD.pack(
            *(self.kind, flags, 0, self.epoch, self.worker, self.incarnation, self.number),
            *(self.sequence, self.batch, self.base_version, self.version, self.at_s, length),
            *(checksum(payload), 0),
        )[:_WITHOUT_SUM]
        return begun + zlib.crc32(begun).to_bytes(4, "little")


@dataclass(frozen=True, slots=True)
class Entry:
    head: Head
    payload: bytes


@dataclass(frozen=True, slots=True)
class Segment:
    path: Path
    first: int
    """The number of its first entry, as its name has it."""


def checksum(parts: Sequence[memoryview]) -> int:
    found = 0
    for part in parts:
        found = zlib.crc32(part, found)
    return found


def segment_path(folder: Path, first: int) -> Path:
    return folder / f"{first:016d}{SUFFIX}"


def beginning(mark: bytes, first: int, epoch: int) -> bytes:
    """What a segment begins with. `mark`: 32 bytes that tell whose journal it is."""
    begun = _BEGINNING.pack(FORMAT, mark, first, epoch, 0)[:-4]
    return begun + zlib.crc32(begun).to_bytes(4, "little")


def list_segments(folder: Path) -> list[Segment]:
    """In the order of their entries."""
    found = [p for p in folder.glob(f"*{SUFFIX}") if p.name.removesuffix(SUFFIX).isdigit()]
    segments = [Segment(path, int(path.name.removesuffix(SUFFIX))) for path in found]
    return sorted(segments, key=lambda segment: segment.first)


def read_entries(folder: Path, mark: bytes) -> Iterator[Entry]:
    """All that is there, one after the other."""
    try:
        yield from _read_all(list_segments(folder), mark)
    except OSError as error:
        where = error.filename or folder
        raise JournalError(f"cannot read {where}: {error.strerror or error}") from error


def _read_all(segments: Sequence[Segment], mark: bytes) -> Iterator[Entry]:
    number: int | None = None
    """Of the next entry; None: it may begin with any."""
    for index, segment in enumerate(segments):
        if number is not None and segment.first != number:
            raise JournalError(
                f"{segments[index - 1].path} ends before its entry {number}, and the next file, "
                f"{segment.path}, begins with {segment.first}: what is between them is lost"
            )
        later = segments[index + 1 :]
        end = later[0].first if later else None
        number = segment.first
        for entry in _read_segment(segment, mark, end):
            yield entry
            number += 1


def _read_segment(segment: Segment, mark: bytes, end: int | None) -> Iterator[Entry]:
    """Its entries; `end`: with which one the next file begins. What this one has from there on was
    written once more, after it could not be brought to the disk."""
    with segment.path.open("rb") as file:
        if not _has_begun(segment, file, mark):
            return
        number = segment.first
        while number != end and (entry := _next(segment, file, number)) is not None:
            yield entry
            number += 1


def _has_begun(segment: Segment, file: BinaryIO, mark: bytes) -> bool:
    begun = file.read(_BEGINNING.size)
    if len(begun) < _BEGINNING.size or (not any(begun) and _is_zero(file)):
        return False
    form, theirs, first, epoch, _ = _BEGINNING.unpack(begun)
    if begun != beginning(theirs, first, epoch) or (form, first) != (FORMAT, segment.first):
        raise JournalError(f"{segment.path} is damaged: its first {len(begun)} bytes are wrong")
    if theirs != mark:
        raise JournalError(
            f"{segment.path} is the journal of another run, or of this one with other options "
            f"(servers, optimizer, rule, clipping): go on with those, or remove it"
        )
    return True


def _next(segment: Segment, file: BinaryIO, number: int) -> Entry | None:
    """The next entry; None: there is none that was written to its end."""
    at = file.tell()
    raw = file.read(_HEAD.size)
    if len(raw) < _HEAD.size:
        return None
    where = f"{segment.path} is damaged at byte {at}, in entry {number}"
    if raw[_WITHOUT_SUM:] != zlib.crc32(raw[:_WITHOUT_SUM]).to_bytes(4, "little"):
        if not any(raw) and _is_zero(file):
            return None
        raise JournalError(f"{where}: its head is not as it was written")
    head, length, sum_of_payload = _unpacked(raw)
    if head.number != number or length > MAX_PAYLOAD:
        raise JournalError(f"{where}: it says that it is entry {head.number}")
    if length > os.fstat(file.fileno()).st_size - file.tell():
        return None  # and no memory for what is not there
    payload = file.read(length)
    if zlib.crc32(payload) != sum_of_payload:
        if not payload.rstrip(b"\0") and _is_zero(file):
            return None
        raise JournalError(f"{where}: its payload is not as it was written")
    return Entry(head, payload)


def _unpacked(raw: bytes) -> tuple[Head, int, int]:
    """A head, the length of what follows, and the checksum of that."""
    kind, flags, _, epoch, worker, incarnation, number, *more = _HEAD.unpack(raw)
    sequence, batch, base_version, version, at_s, length, payload_sum, _ = more
    head = Head(kind, epoch, worker, incarnation, sequence, batch, base_version, version, at_s)
    return (
        dataclasses.replace(
            head, is_answered=bool(flags & 1), is_refused=bool(flags & 2), number=number
        ),
        length,
        payload_sum,
    )


def _is_zero(file: BinaryIO) -> bool:
    """Whether nothing but zeros follows."""
    while chunk := file.read(1 << 20):
        if any(chunk):
            return False
    return True
