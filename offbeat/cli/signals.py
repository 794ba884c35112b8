"""Which signals are one and the same wish to stop. Asked by whoever turns them into one: the
command, for its runs, and the roles of a cluster.

A batch system tells a task twice: Slurm sends SIGTERM to every task of a step, and to srun, which
passes it on to them; twice Ctrl-C at srun sends SIGINT, and SIGTERM right behind it. Whoever took
the second one for impatience would leave without a checkpoint.
"""

import math
import signal
import time
from collections.abc import Callable

ECHO_S = 5.0
"""So long after a signal no SIGTERM or SIGHUP says anything new."""


class Echoes:
    """Of the signals that one process gets."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._heard_s = -math.inf

    def is_one(self, number: int) -> bool:
        """Whether this signal, which has just come, is no more than the last one once again. Ctrl-C
        is a person's, and never is."""
        before_s, now_s = self._heard_s, self._now()
        if number != signal.SIGINT and now_s < before_s + ECHO_S:
            return True
        self._heard_s = now_s
        return False
