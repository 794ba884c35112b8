"""Slow, dying and lying workers, injected where they would happen: --slow-worker, --kill-worker
and --lying-worker.

A worker tells its faults where it is; in an ordinary run there are none, and nothing happens.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from offbeat.config import TrainConfig


class Faults:
    """None."""

    def begin(self, step: int) -> None:
        """A step begins."""

    def computed(self, start_s: float, prepare_s: float) -> None:
        """A gradient was computed since `start_s`, on a batch that took `prepare_s`; it was not yet
        pushed."""

    def pushing(self, gradient: Iterable[Tensor]) -> None:
        """These, each for a server, are about to be pushed."""


class InjectedFaults(Faults):
    def __init__(
        self,
        slowdown: float,
        dies_at: int | None,
        factor: float,
        clock: Callable[[], float],
        stop: threading.Event,
    ) -> None:
        """`slowdown`: how many times as long everything takes; `dies_at`: at which step; `factor`:
        by what gradients are multiplied."""
        self._slowdown = slowdown
        self._dies_at = dies_at
        self._factor = factor
        self._clock = clock
        self._stop = stop

    def begin(self, step: int) -> None:
        if step == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def computed(self, start_s: float, prepare_s: float) -> None:
        """Wait as if on a slower machine: there, what a worker does itself takes longer, and its
        waiting for others does not."""
        own_s = self._clock() - start_s + prepare_s
        self._stop.wait((self._slowdown - 1) * own_s)

    def pushing(self, gradient: Iterable[Tensor]) -> None:
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
) -> Faults:
    """What the options say of this worker; one that was started again does not die again."""
    slowdown = config.slowdowns.get(rank, 1.0)
    dies_at = None if incarnation else config.kills.get(rank)
    factor = config.lies.get(rank, 1.0)
    if slowdown == factor == 1 and dies_at is None:
        return Faults()
    return InjectedFaults(slowdown, dies_at, factor, clock, stop)
