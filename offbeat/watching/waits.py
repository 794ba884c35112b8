"""Who waits for whom: out of when a server received each push and when it replied.

Whoever was received last before a reply is who that reply waited for: in rounds the last one of the
round, under a bound the slowest, whose step let the others go. Used by gathering.py; pure.

    waits = Waits(num_workers=2)
    waits.add(worker=0, received_s=1.0, replied_s=1.5)
    waits.add(worker=1, received_s=1.4, replied_s=1.5)
    waits.shares()      # {0: {1: 0.8}}: worker 0 waited for worker 1 in 0.8 of that time
"""

from bisect import bisect_left, bisect_right
from collections import deque

OF_EACH, FEWEST, MOST = 12, 48, 512
"""So many of the newest pushes of each worker it is judged by, as long as they are so many."""


class Waits:
    """Of one shard."""

    def __init__(self, num_workers: int = 1) -> None:
        most = min(MOST, max(FEWEST, OF_EACH * num_workers))
        self._pushes: deque[tuple[float, int, float]] = deque(maxlen=most)

    def add(self, worker: int, received_s: float, replied_s: float) -> None:
        self._pushes.append((received_s, worker, replied_s))

    def shares(self) -> dict[int, dict[int, float]]:
        """Of the time that these pushes are of, how much each worker waited for which other one."""
        pushes = sorted(self._pushes)
        if len(pushes) < 2:
            return {}
        times = [received_s for received_s, _, _ in pushes]
        span_s = max(replied_s for _, _, replied_s in pushes) - times[0]
        found: dict[int, dict[int, float]] = {}
        for received_s, worker, replied_s in pushes:
            last = bisect_right(times, replied_s) - 1
            first = bisect_left(times, received_s)
            while last > first and pushes[last][1] == worker:
                last -= 1
            other = pushes[last][1]
            if last <= first or other == worker:
                continue
            mine = found.setdefault(worker, {})
            mine[other] = mine.get(other, 0.0) + (times[last] - received_s) / (span_s or 1.0)
        return found
