"""A script's seat in a run: which worker it is, and what belongs to that. Outside of any run none
is `taken`.

Set by the role's process before it runs the script; what the script calls looks here.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from offbeat.config import TrainConfig
from offbeat.roles.context import FolderRecords
from offbeat.roles.control import Control
from offbeat.run.addresses import Cluster
from offbeat.run.rundir import RunFolder


class Running(Protocol):
    """The loop of a script that has called `distribute`, or what stands for it at first."""

    step_number: int
    """Of the step that was done last, counted from 1."""
    next_loss: float
    """What the script has told of the step that comes next."""

    @property
    def num_known(self) -> int:
        """Steps that the servers have already, from an earlier life of the script."""

    def scored(self, scores: Mapping[str, float], most: bool | None) -> None:
        """What the script says of the model as it is now; `most`: more of it is better."""

    def finish(self) -> None:
        """The script is through: wait until everybody is, and the run with them."""

    def close(self) -> None:
        """Leave."""


@dataclass(kw_only=True)
class Seat:
    config: TrainConfig
    folder: RunFolder
    rank: int
    incarnation: int
    cluster: Cluster
    control: Control
    records: FolderRecords
    log: logging.Logger
    loop: Running | None = None
    """Once the script has called `distribute`."""

    @property
    def clock(self) -> Callable[[], float]:
        return self.cluster.clock


taken: Seat | None = None
