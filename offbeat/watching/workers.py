"""What is gathered of one worker, and of one server, while a run goes on. Used by gathering.py.

A step's parts are known when the servers have told how long its gradient lay there: until then it
is put aside, as the servers' events are read in files of their own.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.watching.series import Axis, Column, rounded
from offbeat.watching.waits import Waits

NUM_HELD = 512
"""Pushes of a worker of which it is kept how long a server had them."""
NUM_RECENT = 256
"""So many of its steps are kept one by one: more than are read at different moments from different
files."""
NUM_STALENESS = 32
"""So many of a worker's newest gradients are its staleness as it is now."""
CARRIED = ("up", "down", "whole")


@dataclass(slots=True)
class Step:
    """When it began, and how long its parts took."""

    number: int
    start_s: float
    compute_s: float
    prepare_s: float
    exchange_s: float
    end_s: float
    waited_s: float = 0.0

    @property
    def parts_s(self) -> tuple[float, float, float, float]:
        """In the order of a report's PARTS."""
        return self.compute_s, self.prepare_s, self.waited_s, self.exchange_s - self.waited_s


class WorkerState:
    """`axis` has its columns."""

    def __init__(self, rank: int, axis: Axis) -> None:
        self.rank = rank
        self.num_steps = 0
        self.number = 0
        """Of the step that is furthest."""
        self.loss: float | None = None
        self.outcomes = {"dropped": 0, "rejected": 0}
        self.restarts = 0
        self.incarnation = 0
        self.last_s = 0.0
        """When its last step was over."""
        self.away_since_s: float | None = None
        self.why_away = ""
        self.stopped = False
        self.slowdown = 1.0
        self.staleness: deque[int] = deque(maxlen=NUM_STALENESS)
        self.recent: deque[Step] = deque(maxlen=NUM_RECENT)
        self.losses, self.num_losses = axis.column(), axis.column()
        self.stale, self.num_stale = axis.column(), axis.column()
        self.parts: list[Column] = [axis.column() for _ in range(4)]
        self._axis = axis
        self._carried = self._each = dict.fromkeys(CARRIED, 0)
        self._num_alike = 0
        """So many of the last steps had `_each`; those before them `_carried`."""
        self._held_s: dict[int, float] = {}
        self._unsettled: deque[tuple[Step, int]] = deque()

    def held(self, sequence: int, time_s: float) -> None:
        """A server has replied to this push after so long; of several it is the slowest."""
        self._held_s[sequence] = max(self._held_s.get(sequence, 0.0), time_s)
        if len(self._held_s) > NUM_HELD:
            del self._held_s[next(iter(self._held_s))]

    def stepped(self, event: Mapping[str, Any], step: Step) -> None:
        self.num_steps += 1
        if step.number > self.number:
            self.number = step.number
        if step.end_s > self.last_s:
            self.last_s = step.end_s
        self.away_since_s = None
        if (outcome := event["outcome"]) in self.outcomes:
            self.outcomes[outcome] += 1
        if "up" in event:
            self._carried = self.carried
            self._each = {name: int(event[name]) for name in CARRIED}
            self._num_alike = 0
        self._num_alike += 1

    @property
    def carried(self) -> dict[str, int]:
        """Bytes; a step that says nothing of them has as many as the one before."""
        return {n: self._carried[n] + self._num_alike * self._each[n] for n in CARRIED}

    def put_aside(self, step: Step, tick: int) -> None:
        self._unsettled.append((step, tick))
        if len(self._unsettled) > NUM_HELD:
            self._settle(self._unsettled.popleft()[0])

    def settle(self, tick: int) -> None:
        """Steps that were there at an earlier tick: what servers have to say of them is there."""
        while self._unsettled and self._unsettled[0][1] < tick:
            self._settle(self._unsettled.popleft()[0])

    def _settle(self, step: Step) -> None:
        step.waited_s = min(step.exchange_s, self._held_s.pop(step.number, 0.0))
        at = self._axis.index(step.start_s)
        compute, prepare, wait, exchange = self.parts
        compute.values[at] += step.compute_s
        prepare.values[at] += step.prepare_s
        wait.values[at] += step.waited_s
        exchange.values[at] += step.exchange_s - step.waited_s
        self.recent.append(step)

    def mean_staleness(self) -> float | None:
        if not self.staleness:
            return None
        return rounded(sum(self.staleness) / len(self.staleness))


@dataclass
class ShardState:
    """One server's."""

    versions: Column
    waits: Waits
    version: int = 0
    epoch: int = 0
    restarts: int = 0
