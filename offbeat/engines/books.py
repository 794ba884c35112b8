"""What an engine itself writes down: events/engine.jsonl, with a run's start, restarts and end."""

from collections.abc import Callable, Sequence
from typing import Any

from offbeat.run.events import EventLog
from offbeat.run.places import place_of_process
from offbeat.run.rundir import RunFolder


class Books:
    def __init__(self, folder: RunFolder, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._events = EventLog.create(folder.events, "engine")
        self._clock = clock
        self.record("start", **place_of_process())

    def record(self, phase: str, **more: Any) -> None:
        self._events.record("run", phase=phase, at_s=self._clock(), **more)
        self._events.flush()

    def close(self, status: str, failures: Sequence[Exception]) -> None:
        reason = str(failures[0]) if failures else None
        if status == "finished" and (early := self._folder.early_reason()) is not None:
            reason = f"stopped early: {early}"
        self.record("end", status=status, reason=reason)
        self._events.close()
