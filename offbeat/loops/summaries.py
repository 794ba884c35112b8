"""What TensorBoard shows of somebody's own loop: its loss, rate, pace, staleness and scores, all by
rank 0. Its model is the script's, and is not looked into."""

import logging
import math
from collections.abc import Callable
from typing import Any

from offbeat.run.job import Job
from offbeat.run.rundir import RunFolder
from offbeat.run.tensorboard import LOSS_EVERY, Summaries


class LoopSummaries(Summaries):
    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        log: logging.Logger,
        clock: Callable[[], float],
        groups: list[dict[str, Any]],
    ) -> None:
        """`groups`: the optimizer's, whose rates are the script's affair."""
        super().__init__(job, folder, log, clock)
        self._groups = groups
        self._since_loss = 0

    def stepped(self, loss: float, version: int) -> None:
        """Rank 0 has taken a step; its loss is NaN where the script did not tell it."""
        if self._is_on and self._since_loss % LOSS_EVERY == 0 and math.isfinite(loss):
            self._file.scalar("loss", loss, version)
        self._since_loss += 1

    def _learning_rate(self, version: int) -> float:
        return float(self._groups[0]["lr"])
