"""Where a script is: which of how many workers, of which run. `here` is None outside of any.

Set by the role's process before it runs the script; what the script calls looks here.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat.config import TrainConfig
from offbeat.roles.context import FolderRecords
from offbeat.roles.control import Control
from offbeat.run.addresses import Cluster
from offbeat.run.rundir import RunFolder

if TYPE_CHECKING:
    from offbeat.loops.loop import Loop


@dataclass(kw_only=True)
class Place:
    config: TrainConfig
    folder: RunFolder
    rank: int
    incarnation: int
    cluster: Cluster
    control: Control
    records: FolderRecords
    log: logging.Logger
    loop: "Loop | None" = None
    """Once the script has called `distribute`."""

    @property
    def clock(self) -> Callable[[], float]:
        return self.cluster.clock


here: Place | None = None
