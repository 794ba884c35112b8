"""How many local steps a worker takes before it pushes, where slower ones take fewer.

    H of the fastest worker, floor(H * own speed / the fastest's) of any other one, at least 1

so that all of them push about as often (Liu et al. 2024, "Asynchronous Local-SGD Training for
Language Modeling": dynamic local updates). A worker measures its own speed from one push to the
next, waiting excluded, and tells server 0 with every push; the reply says that of the fastest
worker that is there. There is no torch and no clock here. A worker (roles/worker.py) has one:

    pace = Pace(50)
    pace.num_steps(1)                   # 50: nobody has said anything yet
    pace.measured(50, within_s=2.0)     # 25 local steps per second
    pace.told(fastest=75.0)
    pace.num_steps(2)                   # 16
"""

import math


class Pace:
    """Of one worker, whose thread uses it."""

    def __init__(self, most: int) -> None:
        """`most`: what the fastest takes."""
        self.speed = 0.0
        """Local steps per second from the last push but one to the last; 0: there was none."""
        self._most = most
        self._fastest = 0.0
        self._taken: dict[int, tuple[int, int]] = {}

    def measured(self, num_steps: int, within_s: float) -> None:
        """So many local steps took so long, without what was waited for others."""
        self.speed = num_steps / max(within_s, 1e-9)

    def told(self, fastest: float) -> None:
        """0: nobody knows."""
        self._fastest = fastest

    def num_steps(self, step: int) -> int:
        """For this push; one that is done again takes as many as it did."""
        if step in self._taken:
            return self._taken[step][0]
        if not (self.speed and self._fastest):
            return self._most
        share = min(1.0, self.speed / self._fastest)
        return max(1, math.floor(self._most * share + 1e-9))  # 29% of 100 are 29

    def pushed(self, step: int, num_steps: int, batches: int) -> None:
        """`batches`: how many were gone through with it."""
        self._taken[step] = num_steps, batches

    def batches(self, step: int) -> int | None:
        """How many were gone through with this push; None: it was another process's."""
        return self._taken[step][1] if step in self._taken else None
