"""A run's folder, followed: its events, logs and processes, tick by tick.

Used by whoever serves or shows summaries (serving.py, text.py), in one thread. Nothing is written
into the folder, and nobody in the run knows that it is looked at.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.errors import RunDirError
from offbeat.run.events import Followed
from offbeat.run.rundir import RunFolder
from offbeat.watching.gathering import KILLED, RUNNING, STARTING, Gathered
from offbeat.watching.series import rounded
from offbeat.watching.summary import view
from offbeat.watching.usage import Usage, Use

CHUNK_BYTES = 1 << 18
MAX_TICK_S = 0.2
"""After so long what was read is shown, though there is more."""
SILENT_S = 2.0
"""A run of which nothing is heard for so long may be nobody's any more."""
LOOK_EVERY_S = 1.0
"""At logs and processes."""
LAST_BYTES, LINE_LENGTH = 4096, 240
NUM_LINES = 60
"""Of a log that somebody asks for."""


@dataclass
class _Log:
    size: int = -1
    last_line: str = ""
    changed: int = 0


class FollowedRun:
    """`tick` looks for what is new; `view` is what somebody is shown who knows an earlier tick."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = RunFolder(path)
        self.described: dict[str, Any] | None = None
        self.gathered: Gathered | None = None
        self.share_read = 1.0
        self._events = Followed(self.folder.events, "*.jsonl", from_start=True)
        self._usage = Usage()
        self._uses: dict[str, Use | None] = {}
        self._peaks: dict[str, int] = {}
        self._logs: dict[str, _Log] = {}
        self._looked_s = 0.0
        self._heard_s = time.monotonic()
        self._num_read = 0

    def tick(self) -> bool:
        """Whether there may be something new to show."""
        if self.gathered is None and not self._describe():
            return False
        assert self.gathered is not None
        before = (self.gathered.status, self.share_read)
        has_news = self._read(self.gathered)
        now_s = time.monotonic()
        if has_news:
            self._heard_s = now_s
        elif now_s > self._heard_s + SILENT_S:
            self._look_for_life(self.gathered)
        is_live = not self.gathered.is_over
        is_new = has_news or before != (self.gathered.status, self.share_read)
        if is_live:
            clock_s = self.gathered.at_s + now_s - self._heard_s
            self.gathered.tick(clock_s, is_behind=self.share_read < 1)
        elif is_new:
            self.gathered.tick()
            self.gathered.tick()  # nothing more is said of the steps that it put aside
        if now_s > self._looked_s + LOOK_EVERY_S:
            self._looked_s = now_s
            self._look_around(self.gathered)
        return is_live or is_new

    def _describe(self) -> bool:
        """Read config.json, which is there a moment after the folder."""
        try:
            self.described = self.folder.read_json(self.folder.config)
            self.gathered = Gathered(self.described)
        except RunDirError:
            return False
        except (LookupError, TypeError, ValueError) as error:
            what = f"{self.folder.config} does not describe a run: {error!r}"
            raise RunDirError(what) from error
        return True

    def _read(self, gathered: Gathered) -> bool:
        began_s, has_news = time.monotonic(), False
        while time.monotonic() < began_s + MAX_TICK_S:
            events = self._events.read_some(CHUNK_BYTES)
            if not events:
                self.share_read = 1.0
                return has_news
            has_news = True
            for event in events:
                gathered.add(event)
        self.share_read = self._events.share_read
        return has_news

    def _look_for_life(self, gathered: Gathered) -> None:
        """A run that ended in order has said so; of one that was killed nobody holds the folder."""
        if gathered.status in (RUNNING, STARTING):
            if not self.folder.is_locked():
                gathered.status = KILLED
                gathered.reason = "it did not end: the process that kept it is gone"
        elif gathered.status == KILLED and self.folder.is_locked():
            gathered.status, gathered.reason = RUNNING, None

    # -- logs and processes --------------------------------------------------------------------

    def _look_around(self, gathered: Gathered) -> None:
        for path in self.folder.logs.glob("*.log"):
            log = self._logs.setdefault(path.stem, _Log())
            size = path.stat().st_size
            if size != log.size:
                lines = last_lines(path, 1)
                log.size, log.changed = size, gathered.ticks
                log.last_line = lines[-1] if lines else ""
        self._uses = {} if gathered.is_over else self._usage.look(gathered.places)
        for name, use in self._uses.items():
            if use is not None:
                self._peaks[name] = max(self._peaks.get(name, 0), use.memory_bytes)

    def lines_of(self, role: str) -> list[str]:
        """The last ones of a role's log; of an unknown one there are none."""
        known = {path.stem: path for path in self.folder.logs.glob("*.log")}
        return last_lines(known[role], NUM_LINES) if role in known else []

    # -- what is shown -------------------------------------------------------------------------

    def view(self, since: int) -> dict[str, Any]:
        if self.gathered is None or self.described is None:
            return {"tick": 0, "since": 0, "hint": "the run's folder is being made"}
        found = view(self.gathered, since)
        found["read"] = rounded(self.share_read)
        found["roles"] = self._view_roles(since)
        if not since:
            found["about"] = about(self.path, self.described)
        return found

    def _view_roles(self, since: int) -> list[list[Any]]:
        """Name, host, memory, its peak and processors; and the log's last line where it is new."""
        assert self.gathered is not None
        places = self.gathered.places
        rows: list[list[Any]] = []
        for name in sorted({*places, *self._logs}, key=_order):
            place, use, log = places.get(name, {}), self._uses.get(name), self._logs.get(name)
            row: list[Any] = [
                name,
                place.get("host"),
                None if use is None else use.memory_bytes,
                self._peaks.get(name),
                None if use is None or use.cpu is None else rounded(use.cpu),
            ]
            if log is not None and (log.changed >= since or not since):
                row.append(log.last_line)
            rows.append(row)
        return rows


def about(path: Path, described: Mapping[str, Any]) -> dict[str, Any]:
    """What a person should know of a run that does not change any more."""
    config, job = described["config"], described.get("job") or {}
    environment = described.get("environment") or {}
    given = {k: v for k, v in config.items() if v not in (None, False, [], {}, "")}
    served = bool(job.get("served", True))
    return {
        "name": path.name,
        "path": str(path),
        "recipe": config["recipe"],
        "variant": job.get("variant") or config["discipline"],
        "workers": config["workers"],
        "servers": config["servers"] if served else 0,
        "metric": described["metric"],
        "in_rounds": bool(job.get("in_rounds")),
        "served": served,
        "engine": job.get("engine") or config.get("engine"),
        "script": (described.get("script") or {}).get("file"),
        "started": environment.get("started"),
        "options": {key: _plain(value) for key, value in given.items()},
        "resolved": {k: _plain(v) for k, v in (described.get("resolved") or {}).items()},
        "environment": {k: _plain(v) for k, v in environment.items()},
    }


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _order(name: str) -> tuple[int, str, int]:
    """The launcher, the master, servers, workers, the evaluator, and what else there is."""
    kind, _, number = name.partition("-")
    kinds = ("launcher", "master", "ps", "worker", "evaluator")
    at = kinds.index(kind) if kind in kinds else len(kinds)
    return at, kind, int(number) if number.isdecimal() else 0


def last_lines(path: Path, count: int) -> list[str]:
    """Of a log, no longer than a person reads."""
    most = LAST_BYTES * (1 + count // 20)
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        text = file.read(most).decode("utf-8", errors="replace")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if size > most:
        lines = lines[1:] or lines
    return [line[:LINE_LENGTH] for line in lines[-count:]]
