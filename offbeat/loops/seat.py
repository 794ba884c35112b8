"""A script's seat in a run: which worker it is, and what belongs to that. Outside of any run none
is `taken`.

Set by running.py before it runs the script; what the script calls looks here. Who makes one knows
where the others are: process.py on one machine, cluster/scripts.py and engines/scripted.py on many.
"""

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from offbeat.config import TrainConfig
from offbeat.loops.description import Description
from offbeat.roles.context import Progress, Records
from offbeat.roles.exchange import CONNECT_TIMEOUT_S
from offbeat.roles.master import Patience
from offbeat.run.job import Job
from offbeat.run.orders import Standing
from offbeat.run.rundir import RunFolder
from offbeat.transport.base import Network


class Running(Protocol):
    """The loop of a script that has called `distribute`, or what stands for it at first."""

    step_number: int
    """Of the step that was done last, counted from 1."""
    next_loss: float | None
    """What the script has told of the step that comes next."""
    meanwhile: Callable[[], None] | None
    """What can be done while a gradient is under way."""

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
    rank: int
    incarnation: int
    clock: Callable[[], float]
    """Seconds since the run began."""
    stop: threading.Event
    """Ends the script; rank 0's ends the run, with a checkpoint."""
    records: Records
    log: logging.Logger
    states: Path
    """Where the workers of this machine keep what their scripts go on from."""
    network: Callable[[Job, Description], Network]
    """How the servers of this job are reached."""
    agree: Callable[[Description], Description]
    """Is told what this script trains, and returns what the run goes by when those know of it who
    have to: what rank 0 said first."""
    reports: Callable[[Callable[[], Progress]], None] = lambda progress: None
    """Is given what tells how far the loop is."""
    folder: RunFolder | None = None
    """The run's, for rank 0."""
    is_shown: bool = True
    """Whether a person sees what the script prints."""
    orders: Standing = field(default_factory=Standing)
    """What somebody who looks on has asked for."""
    patience: Patience | None = None
    """Rank 0's, where nobody starts workers again."""
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    loop: Running | None = None
    """Once the script has called `distribute`."""

    def say(self, line: str) -> None:
        """What a person should know, beside what the script prints."""
        self.log.warning("%s", line)
        if self.is_shown:
            print(f"offbeat: {line}", file=sys.stderr)


taken: Seat | None = None
