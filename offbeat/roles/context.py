"""What a role is given: all that it knows of the world around it.

Made by whoever starts the role: an engine, the process that an engine started (process.py), or a
role that a person started by hand (cluster/). `run_role` (run.py) makes a server, worker,
master or evaluator out of it, and cannot tell which of them it was.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.flat import FlatModel
from offbeat.roles.evaluator import CheckpointSource
from offbeat.roles.exchange import CONNECT_TIMEOUT_S
from offbeat.roles.master import Patience
from offbeat.run.events import EventLog, Sink
from offbeat.run.job import Job
from offbeat.run.orders import Standing
from offbeat.run.rundir import RunFolder, close_log
from offbeat.run.tensorboard import Summaries
from offbeat.transport.base import Listener, Network

Say = Callable[[str], None]
"""Shows a person a line."""
Progress = dict[str, Any]
"""How far a role is: ready (has it begun?), and what else is known of it: a worker's steps,
examples and loss; a server's staleness; the master's opened, version and staleness beside its own
worker's; an evaluator's score, and all of its scores. It is JSON."""


class Records(ABC):
    """The logs and events of one role or of several. Whoever made them flushes them from time to
    time, and closes them when all those roles have ended."""

    def __init__(self) -> None:
        self._events: list[EventLog] = []

    @abstractmethod
    def log(self, name: str) -> logging.Logger:
        """The log of the role of this name; the same one every time."""

    def events(self, name: str) -> EventLog:
        made = self._make_events(name)
        self._events.append(made)
        return made

    @abstractmethod
    def _make_events(self, name: str) -> EventLog: ...

    def flush(self) -> None:
        for events in list(self._events):
            events.flush()

    def close(self) -> None:
        for events in self._events:
            events.close()


class FolderRecords(Records):
    """In a run's folder; `given` are logs that are open already, and the caller's."""

    def __init__(
        self, folder: RunFolder, given: Mapping[str, logging.Logger] | None = None
    ) -> None:
        super().__init__()
        self._folder = folder
        self._given = given or {}
        self._logs: dict[str, logging.Logger] = {}

    def log(self, name: str) -> logging.Logger:
        if name in self._given:
            return self._given[name]
        if name not in self._logs:
            self._logs[name] = self._folder.open_log(name)
        return self._logs[name]

    def _make_events(self, name: str) -> EventLog:
        return EventLog.create(self._folder.events, name)

    def close(self) -> None:
        super().close()
        for log in self._logs.values():
            close_log(log)


class SentRecords(Records):
    """Of a role without a folder: its log is a console, and its events go where `sink` takes them,
    by the name of the file that they belong to."""

    def __init__(self, log: logging.Logger, sink: Callable[[str], Sink]) -> None:
        super().__init__()
        self._log = log
        self._sink = sink

    def log(self, name: str) -> logging.Logger:
        return self._log

    def _make_events(self, name: str) -> EventLog:
        return EventLog(self._sink(name))


@dataclass(frozen=True, kw_only=True)
class Context:
    """One role's. Every role needs the first four, and says below what else it takes."""

    job: Job
    records: Records
    clock: Callable[[], float]
    """Seconds since the run began; never goes back."""
    stop: threading.Event
    """Ends the role; a master's ends the run, with a checkpoint."""
    say: Say | None = None
    """None: nobody looks."""
    report: Callable[[Callable[[], Progress]], None] = lambda progress: None
    """Is given what tells how far the role is, before it runs."""
    network: Network | None = None
    """How the servers are reached; for workers and the master."""
    folder: RunFolder | None = None
    """For the master and the evaluator; None: it lies on another machine."""
    states: Path | None = None
    """For workers: where those of this machine keep what no server has; None: nowhere."""
    journal: Path | None = None
    """For a server that promises: where those of this machine keep their journals."""
    run: str = ""
    """For such a server: whose journal it is, where the folder may have seen other runs."""
    source: CheckpointSource | None = None
    """Where an evaluator finds checkpoints; None: in the folder."""
    generation: int = 0
    """A server's epoch, a worker's incarnation."""
    listener: Listener | None = None
    """For a server; None: somebody else hands its connections over."""
    stop_ends_run: bool = True
    """For a server: whether a stop is the run's end, or workers are to look for it again."""
    look: Callable[[], None] = lambda: None
    """For a server: called several times a second; what it raises ends it."""
    model: FlatModel | None = None
    """The role's replica; None: it makes one, since torch's generator is its own."""
    owns_process: bool = True
    """Whether torch's generator and number of threads are this role's alone."""
    summaries: Summaries | None = None
    """For the master and the evaluator; they belong to whoever made them."""
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    """How long a server may take to come, or to come back."""
    begins_at_once: bool = False
    """For a master: rank 0 does not wait until the servers are open. They are this run's for sure,
    and the other workers do not wait for the first checkpoint either."""
    orders: Standing = field(default_factory=Standing)
    """For workers and the master: what somebody who looks on has asked of them."""
    patience: Patience | None = None
    """For a master whose workers nobody starts again."""
