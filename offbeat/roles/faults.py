"""Slow, dying and lying workers, injected where they would happen: --slow-worker, --kill-worker
and --lying-worker; and somebody who looks on may slow a worker down (run/orders.py).

A worker tells its faults where it is; in an ordinary run nothing happens then.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from offbeat.config import TrainConfig
from offbeat.run.orders import Standing


class Faults:
    def __init__(
        self,
        rank: int,
        slowdown: float,
        dies_at: int | None,
        factor: float,
        clock: Callable[[], float],
        stop: threading.Event,
        orders: Standing,
    ) -> None:
        """`slowdown`: how many times as long everything takes, unless `orders` say something else;
        `dies_at`: at which step; `factor`: by what gradients are multiplied."""
        self._rank = rank
        self._slowdown = slowdown
        self._dies_at = dies_at
        self._factor = factor
        self._clock = clock
        self._stop = stop
        self._slowdowns = orders.slowdowns

    def begin(self, step: int) -> None:
        """A step begins."""
        if step == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def computed(self, start_s: float, prepare_s: float) -> None:
        """A gradient was computed since `start_s`, on a batch that took `prepare_s`; it was not yet
        pushed. Wait as if on a slower machine: there, what a worker does itself takes longer, and
        its waiting for others does not."""
        slowdown = self._slowdowns.get(self._rank, self._slowdown)
        if slowdown == 1:
            return
        own_s = self._clock() - start_s + prepare_s
        self._stop.wait((slowdown - 1) * own_s)

    def pushing(self, gradient: Iterable[Tensor]) -> None:
        """These, each for a server, are about to be pushed."""
        if self._factor == 1:
            return
        for values in gradient:
            values.mul_(self._factor)
            if values.is_cuda:  # what marks it as there was set before
                torch.cuda.current_stream(values.device).synchronize()


def make_faults(
    config: TrainConfig,
    rank: int,
    incarnation: int,
    *,
    clock: Callable[[], float],
    stop: threading.Event,
    orders: Standing | None = None,
) -> Faults:
    """What the options say of this worker; one that was started again does not die again."""
    slowdown = config.slowdowns.get(rank, 1.0)
    dies_at = None if incarnation else config.kills.get(rank)
    factor = config.lies.get(rank, 1.0)
    return Faults(rank, slowdown, dies_at, factor, clock, stop, orders or Standing())
