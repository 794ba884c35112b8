"""A clock that nobody has to wait for: it jumps from one event to the next.

There are two ways to be told later: after a time (a message under way, somebody who waits), and
when some work is done. Work needs a core, and where more of it is under way than there are cores,
all of it goes on more slowly, by the same factor. Used by virtual.py:

    clock = Clock(cores=2)
    clock.after(0.5, event=1)
    clock.work(0.2, event=2)
    clock.next()            # 2, and clock.now_s is 0.2

Events are whole numbers, which mean something to whoever made them. Of events at the same moment
the least number comes first, so that nothing depends on chance.
"""

import heapq
import math


class Clock:
    def __init__(self, cores: float = math.inf) -> None:
        """`cores`: inf: everybody who works has one to itself."""
        self.now_s = 0.0
        self._cores = cores
        self._later: list[tuple[float, int]] = []
        self._working: list[tuple[float, int]] = []
        """By how much each core of its own would have done when that is done."""
        self._worked_s = 0.0
        """How much it would have done by now."""

    def after(self, delay_s: float, event: int) -> None:
        heapq.heappush(self._later, (self.now_s + delay_s, event))

    def work(self, work_s: float, event: int) -> None:
        """`work_s`: how long it takes on a core of its own."""
        heapq.heappush(self._working, (self._worked_s + work_s, event))

    def next(self) -> int:
        """Go on to the next event; an IndexError: there is none."""
        later, working = self._later, self._working
        count = len(working)
        slowness = count / self._cores if count > self._cores else 1.0
        if working:
            done_s = self.now_s + (working[0][0] - self._worked_s) * slowness
            if not later or done_s <= later[0][0]:
                self.now_s = done_s
                self._worked_s, event = heapq.heappop(working)
                return event
        at_s, event = heapq.heappop(later)
        self._worked_s += (at_s - self.now_s) / slowness
        self.now_s = at_s
        return event


class Link:
    """What it carries at the same time goes on side by side, each with an equal part of it, as
    connections over one network card do.

        link = Link(clock, event)
        link.carry(0.1, item=7)     # `event` comes when something may be over
        link.over()                 # 7; None: there was more to carry meanwhile
    """

    def __init__(self, clock: Clock, event: int) -> None:
        self._clock = clock
        self._event = event
        self._carried: list[tuple[float, int]] = []
        """By how much would have been carried of something alone when that is over."""
        self._carried_s = 0.0
        """How much would have been by `_at_s`."""
        self._at_s = 0.0
        self._due_s = 0.0
        """When the next one is over, if nothing more comes."""

    def carry(self, takes_s: float, item: int) -> None:
        """`takes_s`: how long it takes alone."""
        now_s = self._clock.now_s
        if self._carried:
            self._carried_s += (now_s - self._at_s) / len(self._carried)
        self._at_s = now_s
        heapq.heappush(self._carried, (self._carried_s + takes_s, item))
        self._tell()

    def over(self) -> int | None:
        if self._clock.now_s != self._due_s or not self._carried:
            return None
        self._carried_s, item = heapq.heappop(self._carried)
        self._at_s = self._due_s
        if self._carried:
            self._tell()
        return item

    def _tell(self) -> None:
        """Whoever is told too early asks in vain."""
        left_s = max(0.0, self._carried[0][0] - self._carried_s) * len(self._carried)
        self._due_s = self._clock.now_s + left_s
        self._clock.after(left_s, self._event)
