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
from collections import deque


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
    """Carries messages of one length, one part after the other; of several messages at the same
    time in turn, as connections over one network card do.

        link = Link(clock, event, takes_s=0.1, num_parts=2)
        link.carry(7)
        clock.next()        # event
        link.over()         # None: only its first part was carried; 7 the next time
    """

    def __init__(self, clock: Clock, event: int, takes_s: float, num_parts: int) -> None:
        self._clock = clock
        self._event = event
        self._part_s = takes_s / num_parts
        self._num_parts = num_parts
        self._waiting: deque[tuple[int, int]] = deque()
        """Which message, and how many parts of it are left; the first one's is under way."""

    def carry(self, message: int) -> None:
        self._waiting.append((message, self._num_parts))
        if len(self._waiting) == 1:
            self._clock.after(self._part_s, self._event)

    def over(self) -> int | None:
        """The message of which that part was the last."""
        message, left = self._waiting.popleft()
        if left > 1:
            self._waiting.append((message, left - 1))
        if self._waiting:
            self._clock.after(self._part_s, self._event)
        return None if left > 1 else message
