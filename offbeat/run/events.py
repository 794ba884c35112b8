"""What happened in a run, as lines of JSON: files for each role under RUN/events.

Every report is a pure function of these files. `record` may be called from any thread and never
waits for another one or for the disk; whoever owns the log calls `flush` from time to time and
`close` at the end. Kinds of events, with the fields that matter:

    push   by a server: shard, outcome (applied, dropped, rejected, duplicate), version, worker,
           incarnation, sequence, batch, base_version, staleness, mixed, received_s, applied_s,
           replied_s, lr (the learning rate, where no parameter group says otherwise), and norm
           where the server clips (below); where there are no servers by each worker, of its own.
           again: out of a journal, of an update that was made before (--ack durable)
    step   by a worker: worker, step, epoch, loss, examples, outcome, start_s, compute_s, prepare_s,
           exchange_s, and with --clip-norm the gradient's norm before it was clipped
    diverged by a worker whose loss is no number any more: worker, step, batch (its last one), and
           base_versions, of each shard: what it was computed on; at_s
    rejoin by a worker that found a server again: worker, shard, epoch, former_epoch (the same where
           only the connection broke), version, seen_version, at_s; whole: another server, which
           has all that the first had answered
    anew   by a worker that pushed to such another server what it had computed before: worker,
           shard, sequence, epoch; former_epoch and base_version, which it was computed on; at_s
    score  by the evaluator: version, metric (null: NaN or infinite), count, at_s, every (of how
           many updates one is due); scores: all of them by their names, the metric first. By rank
           0's script, which counts nothing: higher_is_better, by their names, since nobody knew of
           them before
    run    phase: start, restart (role, index, reason, and the ranks of a crew that shared the
           process), placed (role, index, host, pid, on Ray node, else began, by which a process is
           known from another one of that number; start has these too, of the engine's own), order
           (what somebody who looks on asked for: what, worker, factor, words; refused: why it was
           not done) and end (status, reason) by the engine;
           checkpoint (version; shards: of each its version, and the SHA-256 of its file) and
           books (shards: version and accounts, as in the last checkpoint; see ledger.py) by the
           master; load (shard, epoch, version) by a server;
           fall, of a learning rate that goes by scores: at which version, by the master, and by
           each server (shard); at_s

Times are seconds since the run's start, on a clock that never goes back. Files that are full are
archived (event_files.py); who reads by `read_events` or `Followed` does not notice.
"""

import itertools
import json
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from offbeat.run.archive import parsed, read_archive
from offbeat.run.event_files import EventFile, archive_path, event_files, in_time

READ_AT_ONCE = 1000
"""Lines."""
LINE_BYTES = 250
"""About as long as an event was before it was archived."""


class Sink(Protocol):
    """Where lines go: a file, or something that carries them to where the files are."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class EventLog:
    """Appends events to a role's files, or to another sink for whole lines."""

    def __init__(self, sink: Sink | Path) -> None:
        self._pending: deque[dict[str, Any] | tuple[Callable[..., str], tuple[Any, ...]]] = deque()
        self._sink: Sink = EventFile(sink) if isinstance(sink, Path) else sink
        self._writing = threading.Lock()
        self._closed = False

    @classmethod
    def create(cls, folder: Path, name: str) -> "EventLog":
        return cls(EventFile.create(folder, name))

    def record(self, kind: str, **fields: Any) -> None:
        self._pending.append({"kind": kind, **fields})

    def record_line(self, write: Callable[..., str], *values: Any) -> None:
        """The same, for the most frequent events: `write` makes a line of JSON out of `values`, in
        the thread that flushes."""
        self._pending.append((write, values))

    def flush(self) -> None:
        """Write out what was recorded so far."""
        with self._writing:
            lines = []
            while self._pending:
                event = self._pending.popleft()
                if isinstance(event, dict):
                    lines.append(json.dumps({k: _plain(k, v) for k, v in event.items()}))
                else:
                    write, values = event
                    lines.append(write(*values))
            if lines:
                self._sink.write("\n".join(lines) + "\n")
            if not self._closed:
                self._sink.flush()

    def close(self) -> None:
        self.flush()
        self._closed = True
        self._sink.close()


def read_events(folder: Path, names: str = "*") -> Iterator[dict[str, Any]]:
    """Every event in a run's events folder, or of roles whose `names` match this pattern, file by
    file, a role's in the order of time. A last
    line that was cut off is left out; another one that is no event, as a crash of the machine may
    leave, is of kind `unreadable`, and so is what is missing of an archive."""
    for path in event_files(folder, f"{names}.jsonl"):
        try:
            file = path.open(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            yield from read_archive(archive_path(path))
            continue
        with file:
            while lines := list(itertools.islice(file, READ_AT_ONCE)):
                if not lines[-1].endswith("\n"):
                    lines.pop()
                yield from parsed(lines)


class Followed:
    """The events that are written from now on into the files of a folder whose names are like
    `pattern`, which are those that files have before they are archived; `from_start`: those that
    are there already, too. Used by one thread."""

    def __init__(self, folder: Path, pattern: str, *, from_start: bool = False) -> None:
        self._folder = folder
        self._pattern = pattern
        self._known: dict[Path, _Place] = {}
        self._reached_s: dict[str, float] = {}
        """By each role's name, whose files come one after the other."""
        if not from_start:
            for place in self._places().values():
                place.pass_over()

    def _places(self) -> dict[Path, "_Place"]:
        paths = event_files(self._folder, self._pattern)
        return {path: self._known.setdefault(path, _Place(path)) for path in paths}

    def read(self) -> Iterator[dict[str, Any]]:
        """Those that are new, file by file; a line that is not whole yet is left for later."""
        for _, events in self.read_files():
            yield from events

    def read_files(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """The same, with the name of each file that has any."""
        for path, place in self._places().items():
            if events := place.read():
                yield path.name, events

    def read_some(self, num_bytes: int) -> list[dict[str, Any]]:
        """About so many bytes of those that are new, of the role that is furthest behind in time:
        so all come to the same moment together. Nothing, when nothing is new."""
        behind = [(*in_time(p.name), place) for p, place in self._places().items() if place.unread]
        behind.sort(key=lambda each: (self._reached_s.get(each[0], -1.0), *each[:2]))
        for name, _, place in behind:
            if events := place.read(num_bytes):
                self._reached_s[name] = moment_of(events[-1]) or self._reached_s.get(name, -1.0)
                return events
        return []

    @property
    def share_read(self) -> float:
        """Of all that is there."""
        places = self._places().values()
        total = sum(place.size for place in places)
        return 1.0 - sum(place.unread for place in places) / total if total else 1.0


class _Place:
    """How far a file was read, before it was archived and after that."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._num_events = 0
        self._archived: Iterator[dict[str, Any]] | None = None
        """What is still to be read of it, once it is."""
        self._is_over = False

    @property
    def size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return archive_path(self._path).stat().st_size

    @property
    def unread(self) -> int:
        """How many bytes are new; of an archive all are until it is through."""
        if self._is_over:
            return 0
        return self.size - (self._offset if self._path.exists() else 0)

    def pass_over(self) -> None:
        """All that is there, without looking at it: an archive is not added to."""
        try:
            self._num_events += self._lines().count(b"\n")
        except FileNotFoundError:
            self._is_over = True

    def read(self, num_bytes: int = -1) -> list[dict[str, Any]]:
        """What is new, or about so much of it."""
        if self._is_over:
            return []
        if self._archived is None:
            try:
                whole = self._lines(num_bytes)
            except FileNotFoundError:
                events = read_archive(archive_path(self._path))
                self._archived = itertools.islice(events, self._num_events, None)
            else:
                lines = whole.decode(errors="replace").split("\n")[:-1]
                self._num_events += len(lines)
                return parsed(lines)
        wanted = None if num_bytes < 0 else max(1, num_bytes // LINE_BYTES)
        found = list(itertools.islice(self._archived, wanted))
        self._is_over = wanted is None or len(found) < wanted
        return found

    def _lines(self, num_bytes: int = -1) -> bytes:
        """Those that are new and whole; at least one, if there is one."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            found = file.read(num_bytes)
            if len(found) == num_bytes and b"\n" not in found:
                found += file.readline()
        whole, newline, _ = found.rpartition(b"\n")
        self._offset += len(whole + newline)
        return whole + newline


def moment_of(event: dict[str, Any]) -> float | None:
    """When it happened, as far as it says so."""
    at_s = next((event[k] for k in ("at_s", "received_s", "start_s") if k in event), None)
    return float(at_s) if isinstance(at_s, int | float) else None


def _plain(key: str, value: Any) -> Any:
    """Times to the microsecond, more digits say nothing; and null for what JSON has no number
    for."""
    if isinstance(value, dict):
        return {name: _plain("", inner) for name, inner in value.items()}
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        if key.endswith("_s"):
            return round(value, 6)
    return value
