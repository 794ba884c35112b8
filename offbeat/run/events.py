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
    score  by the evaluator: version, metric (null: NaN or infinite), count, at_s, every (of how
           many updates one is due); scores: all of them by their names, the metric first. By rank
           0's script, which counts nothing: higher_is_better, by their names, since nobody knew of
           them before
    run    phase: start, restart (role, index, reason, and the ranks of a crew that shared the
           process), placed (on Ray: role, index, node, host, pid) and end (status, reason) by the
           engine;
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
from offbeat.run.event_files import EventFile, archive_path, event_files

READ_AT_ONCE = 1000
"""Lines."""


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
    `pattern`, which are those that files have before they are archived. Used by one thread."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder = folder
        self._pattern = pattern
        self._places: dict[Path, _Place] = {}
        for path in event_files(folder, pattern):
            place = self._places[path] = _Place(path)
            place.pass_over()

    def read(self) -> Iterator[dict[str, Any]]:
        """Those that are new, file by file; a line that is not whole yet is left for later."""
        for _, events in self.read_files():
            yield from events

    def read_files(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """The same, with the name of each file that has any."""
        for path in event_files(self._folder, self._pattern):
            place = self._places.setdefault(path, _Place(path))
            if events := place.read():
                yield path.name, events


class _Place:
    """How far a file was read, before it was archived and after that."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._num_events = 0
        self._is_over = False

    def pass_over(self) -> None:
        """All that is there, without looking at it: an archive is not added to."""
        try:
            self._num_events += self._lines().count(b"\n")
        except FileNotFoundError:
            self._is_over = True

    def read(self) -> list[dict[str, Any]]:
        if self._is_over:
            return []
        try:
            whole = self._lines()
        except FileNotFoundError:
            self._is_over = True
            events = read_archive(archive_path(self._path))
            return list(itertools.islice(events, self._num_events, None))
        lines = whole.decode(errors="replace").split("\n")[:-1]
        self._num_events += len(lines)
        return parsed(lines)

    def _lines(self) -> bytes:
        """Those that are new and whole."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole + newline)
        return whole + newline


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
