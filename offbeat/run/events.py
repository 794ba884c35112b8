"""What happened in a run, as lines of JSON: one file per role under RUN/events.

Every report is a pure function of these files. `record` may be called from any thread and never
waits for another one or for the disk; whoever owns the log calls `flush` from time to time and
`close` at the end. Kinds of events, with the fields that matter:

    push   by a server: shard, outcome (applied, dropped, rejected, duplicate), version, worker,
           incarnation, sequence, batch, base_version, staleness, mixed, received_s, applied_s,
           replied_s, lr (the learning rate, where no parameter group says otherwise), and norm
           where the server clips (below); where there are no servers by each worker, of its own
    step   by a worker: worker, step, epoch, loss, examples, outcome, start_s, compute_s, prepare_s,
           exchange_s, and with --clip-norm the gradient's norm before it was clipped
    diverged by a worker whose loss is no number any more: worker, step, batch (its last one), and
           base_versions, of each shard: what it was computed on; at_s
    rejoin by a worker that found a server again: worker, shard, epoch, former_epoch (the same where
           only the connection broke), version, seen_version, at_s
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

Times are seconds since the run's start, on a clock that never goes back.
"""

import itertools
import json
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

READ_AT_ONCE = 1000
"""Lines."""


class Sink(Protocol):
    """Where lines go: a file, or something that carries them to where the files are."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class EventLog:
    """Appends events to a file, or to another sink for whole lines."""

    def __init__(self, sink: Sink | Path) -> None:
        self._pending: deque[dict[str, Any] | tuple[Callable[..., str], tuple[Any, ...]]] = deque()
        self._sink: Sink = sink.open("w", encoding="utf-8") if isinstance(sink, Path) else sink
        self._writing = threading.Lock()
        self._closed = False

    @classmethod
    def create(cls, folder: Path, name: str) -> "EventLog":
        return cls(free_path(folder, name))

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


def free_path(folder: Path, name: str) -> Path:
    """NAME.jsonl, or the next free number behind the name: a process that was killed may have left
    half a line, so whoever takes its place begins a file of its own."""
    path = folder / f"{name}.jsonl"
    for number in itertools.count(1):
        if not path.exists():
            break
        path = folder / f"{name}.{number}.jsonl"
    return path


def read_events(folder: Path, names: str = "*") -> Iterator[dict[str, Any]]:
    """Every event in a run's events folder, or of roles whose `names` match this pattern, file by
    file, a role's in the order of time. A last
    line that was cut off is left out; another one that is no event, as a crash of the machine may
    leave, is of kind `unreadable`."""
    for path in sorted(folder.glob(f"{names}.jsonl"), key=_in_time):
        with path.open(encoding="utf-8", errors="replace") as file:
            while lines := list(itertools.islice(file, READ_AT_ONCE)):
                if not lines[-1].endswith("\n"):
                    lines.pop()
                yield from _parsed(lines)


class Followed:
    """The events that are written from now on into the files of a folder whose names are like
    `pattern`; `from_start`: those that are there already, too. Used by one thread."""

    def __init__(self, folder: Path, pattern: str, *, from_start: bool = False) -> None:
        self._folder = folder
        self._pattern = pattern
        found = () if from_start else folder.glob(pattern)
        self._offsets = {path: path.stat().st_size for path in found}
        self._reached_s: dict[str, float] = {}
        """By each role's name, whose files come one after the other."""

    def read(self) -> Iterator[dict[str, Any]]:
        """Those that are new, file by file; a line that is not whole yet is left for later."""
        for path in sorted(self._folder.glob(self._pattern), key=_in_time):
            yield from self._read(path)

    def read_some(self, num_bytes: int) -> list[dict[str, Any]]:
        """About so many bytes of those that are new, of the role that is furthest behind in time:
        so all come to the same moment together. Nothing, when nothing is new."""
        behind = [(*_in_time(path), path) for path, count in self.unread().items() if count]
        behind.sort(key=lambda each: (self._reached_s.get(each[0], -1.0), *each))
        for name, _, path in behind:
            if events := self._read(path, num_bytes):
                self._reached_s[name] = moment_of(events[-1]) or self._reached_s.get(name, -1.0)
                return events
        return []

    def unread(self) -> dict[Path, int]:
        """How many bytes of each file are new."""
        paths = self._folder.glob(self._pattern)
        return {path: path.stat().st_size - self._offsets.get(path, 0) for path in paths}

    def _read(self, path: Path, most: int = -1) -> list[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            found = file.read(most)
            if len(found) == most and b"\n" not in found:
                found += file.readline()
        whole, newline, _ = found.rpartition(b"\n")
        self._offsets[path] = self._offsets.get(path, 0) + len(whole + newline)
        return _parsed(whole.decode(errors="replace").splitlines()) if whole else []


def moment_of(event: dict[str, Any]) -> float | None:
    """When it happened, as far as it says so."""
    at_s = next((event[k] for k in ("at_s", "received_s", "start_s") if k in event), None)
    return float(at_s) if isinstance(at_s, int | float) else None


def _in_time(path: Path) -> tuple[str, int]:
    """NAME.jsonl, then what came after it: NAME.1.jsonl, NAME.2.jsonl, ..."""
    name, _, number = path.name.removesuffix(".jsonl").partition(".")
    return name, int(number) if number.isdecimal() else 0


def _parsed(lines: list[str]) -> list[dict[str, Any]]:
    """Many lines at once take half as long as one by one, which is for finding a bad one."""
    try:
        events = json.loads(f"[{','.join(lines)}]")
    except ValueError:
        if len(lines) == 1:
            return [{"kind": "unreadable"}]
        return [event for line in lines for event in _parsed([line])]
    unreadable = {"kind": "unreadable"}
    return [e if isinstance(e, dict) and "kind" in e else unreadable for e in events]


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
