"""The norm of a round's gradient where several servers have a slice of it each.

A server that has closed a round measures its slice, and holds the round until it is told the norm
of the whole. The master's process has threads that ask all servers and tell them, over calls
(calls.py); no server needs to know another one. What is to be done is decided by `Meeting`, which
has neither thread nor clock. Started with the master's books (run.py), where a run needs it:

    norms = Norms(job, network, log=log, clock=clock)
    norms.start()
    norms.check()       # now and then: raises what it failed with
    norms.close()
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence

from offbeat.clipping import joined_norm
from offbeat.errors import ConnectionClosedError
from offbeat.roles.calls import RoundPart
from offbeat.roles.master import RemoteServer
from offbeat.run.job import Job
from offbeat.transport.base import Network

WAIT_S = 0.2
"""How long a server that has no round to tell of may keep us waiting."""
PAUSE_S = 0.05
"""Before a server that went away is looked for again."""
LEAVE_S = 1.0
"""How long a server that does not answer may keep us from leaving."""
STARTED_ANEW_S = 1.0
"""How long a server that was started anew is waited for: gradients for its former self are lost,
so that it may have no such round."""


class Meeting:
    """Where the servers' slices of one round meet.

    A round closes at every server, within the time that gradients take to arrive, since nobody
    takes a step before all have answered, and whoever comes takes part in the same one everywhere.
    Two slices are of one round if every worker that is in both gave the same push. A server that
    will never have it, since it or a worker died, is left out: its part of the round is lost, and
    the norm is that of what goes in.
    """

    def __init__(self, num_servers: int, patience_s: float) -> None:
        """`patience_s`: how long a server without the round is waited for, whatever the reason."""
        self._patience_s = patience_s
        self._epochs: list[int | None] = [None] * num_servers
        """Of each server, when the last norm was told."""
        self._since_s: float | None = None
        """When a held round was first seen."""
        self._asked_s: Sequence[float] = ()
        self._seen: list[tuple[int, float]] = [(0, 0.0)] * num_servers
        """The number of each server's last round, and when that was first seen."""
        self.doubtful: set[int] = set()
        """Servers that are to be asked again: they may have opened their round again."""

    def look(
        self, parts: Sequence[RoundPart | None], now_s: float, asked_s: Sequence[float] = ()
    ) -> dict[int, float]:
        """What each server has, None where it cannot be reached; returns the norms to tell, by
        server. `asked_s`: when each was asked for it; none given: now."""
        self._asked_s = asked_s or [now_s] * len(parts)
        self.doubtful.clear()
        for index, part in enumerate(parts):
            if part is not None:
                self._note(index, part, now_s)
        held = {index: part for index, part in enumerate(parts) if part is not None and part.held}
        if not held:
            self._since_s = None
            return {}
        self._since_s = now_s if self._since_s is None else self._since_s
        found = {index: self._norm(index, part, parts, now_s) for index, part in held.items()}
        known = {index: norm for index, norm in found.items() if norm is not None}
        if known:
            self._since_s = None
            self._epochs = [None if part is None else part.epoch for part in parts]
        return known

    def _note(self, index: int, part: RoundPart, now_s: float) -> None:
        if self._epochs[index] is None:
            self._epochs[index] = part.epoch
        if self._seen[index][0] != part.number:
            self._seen[index] = (part.number, now_s)

    def _norm(
        self, own: int, mine: RoundPart, parts: Sequence[RoundPart | None], now_s: float
    ) -> float | None:
        """That of a held round, where nobody has to be waited for."""
        slices = []
        for index, part in enumerate(parts):
            if part is not None and _is_same(part, mine):
                if part.pushes != mine.pushes and self._doubts(own, index):
                    return None
                slices.append(part.norms)
            elif part is None or not self._lacks(index, part, mine, now_s):
                return None
        return joined_norm(slices)

    def _doubts(self, one: int, other: int) -> bool:
        """Whether one of two slices was told of before the other one was there: the worker that is
        in one only may have come to both."""
        pairs = ((one, other), (other, one))
        old = {index for index, its in pairs if self._asked_s[index] < self._seen[its][1]}
        self.doubtful |= old
        return bool(old)

    def _lacks(self, index: int, part: RoundPart, mine: RoundPart, now_s: float) -> bool:
        """Whether a server will have no such round."""
        since_s = self._since_s or 0.0
        if self._asked_s[index] < since_s:  # the workers may have come to it since then
            return False
        if not part.present & {w for w, _ in mine.pushes}:
            return True
        if _is_past(part, mine) or _is_idle(part, mine):
            return True
        is_new = part.epoch != self._epochs[index]
        most_s = min(STARTED_ANEW_S, self._patience_s) if is_new else self._patience_s
        return now_s - since_s > most_s


def _is_same(part: RoundPart, mine: RoundPart) -> bool:
    """Whether two slices are of one round. One that was let go in has to have a push in common."""
    theirs, ours = dict(part.pushes), dict(mine.pushes)
    common = theirs.keys() & ours.keys()
    return all(theirs[w] == ours[w] for w in common) and (part.held or bool(common))


def _is_past(part: RoundPart, mine: RoundPart) -> bool:
    """Whether a server is at a later step already."""
    theirs = dict(part.pushes)
    return any(theirs.get(worker, sequence) > sequence for worker, sequence in mine.pushes)


def _is_idle(part: RoundPart, mine: RoundPart) -> bool:
    """Whether everybody at a server was answered there, and waits for us: what is late there may be
    in time here, and those who were in time there have left."""
    answered, waiting = dict(part.answered), dict(mine.waiting)
    return all(w in waiting and answered.get(w, -1) >= waiting[w] for w in part.present)


class Norms:
    """A thread for each server, which asks it and tells it."""

    def __init__(
        self, job: Job, network: Network, *, log: logging.Logger, clock: Callable[[], float]
    ) -> None:
        indices = range(len(job.slices))
        self._servers = [RemoteServer(network, k, job.agreement, job.layout(k)) for k in indices]
        self._meeting = Meeting(len(self._servers), job.config.worker_timeout)
        self._parts: list[RoundPart | None] = [None for _ in indices]
        """What each server told last."""
        self._asked_s = [0.0 for _ in indices]
        """When it was asked for that."""
        self._known: dict[int, float] = {}
        """The norms that are to be told."""
        self._changed = threading.Condition()
        """Held by whoever looks at the two."""
        self._log = log
        self._clock = clock
        self._closed = threading.Event()
        self._failure: Exception | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(server,), name="norms", daemon=True)
            for server in self._servers
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raises what a thread failed with: rounds would be held for ever."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._closed.set()
        deadline_s = time.monotonic() + LEAVE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self, server: RemoteServer) -> None:
        try:
            while not self._closed.is_set():
                self._take_turn(server)
        except Exception as error:  # for whoever checks
            self._failure = self._failure or error
        finally:
            server.close()

    def _take_turn(self, server: RemoteServer) -> None:
        asked_s = self._clock()
        part = self._ask(server)
        norm = self._meet(server.index, part, asked_s)
        if part is not None and norm is not None:
            self._tell(server, part.number, norm)

    def _meet(self, index: int, part: RoundPart | None, asked_s: float) -> float | None:
        """Bring a server's part, and wait a moment for the norm of the round that it holds."""
        with self._changed:
            self._parts[index], self._asked_s[index] = part, asked_s
            found = self._meeting.look(self._parts, self._clock(), self._asked_s)
            for known, norm in found.items():
                self._known[known] = norm
                self._parts[known] = _let_go(self._parts[known])
            self._changed.notify_all()
            if part is not None and part.held:
                self._changed.wait_for(lambda: self._is_told(index), WAIT_S)
            return self._known.pop(index, None)

    def _is_told(self, index: int) -> bool:
        """The norm, or that it has to be asked again."""
        return index in self._known or index in self._meeting.doubtful

    def _ask(self, server: RemoteServer) -> RoundPart | None:
        try:
            return server.round(WAIT_S)
        except ConnectionClosedError as error:
            self._log.debug("server %d tells no norm: %s", server.index, error)
            self._closed.wait(PAUSE_S)
            return None

    def _tell(self, server: RemoteServer, number: int, norm: float) -> None:
        try:
            server.end_round(number, norm)
        except ConnectionClosedError as error:  # its round is lost with it
            self._log.info("server %d was told no norm: %s", server.index, error)


def _let_go(part: RoundPart | None) -> RoundPart | None:
    """The same when its round is as good as in."""
    return None if part is None else dataclasses.replace(part, held=False)
