"""A script that has called `distribute` in a run that has not begun: rank 0's, to its first step.

Until then the script may change weights, the optimizer's state and options as it likes, by
`load_state_dict` or else: the run begins with what there is then. The other ranks wait in their
own call of `distribute`, and a run that has begun is joined at once. Made by distribute.py; a Loop
takes its place.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from offbeat.loops.description import describe_loop
from offbeat.loops.job import make_loop_job
from offbeat.loops.loop import Loop
from offbeat.loops.seat import Seat
from offbeat.run.checkpoint import list_checkpoints


class Waiting:
    """What a Loop is to others, as far as there is none. `joined` makes it."""

    def __init__(self, seat: Seat, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Raises a ModelError or a ConfigError where they cannot be trained."""
        make_loop_job(seat.config, describe_loop(model, optimizer))
        self._seat = seat
        self._model = model
        self._optimizer = optimizer
        self._trained = [(p, p.requires_grad) for p in model.parameters()]
        """What is frozen or thawed until the first step the other ranks know nothing of."""
        self.step_number = 0
        self.next_loss: float | None = None
        self.meanwhile: Callable[[], None] | None = None
        self._scores: list[tuple[Mapping[str, float], bool | None]] = []

    @property
    def may_wait(self) -> bool:
        folder = self._seat.folder
        if self._seat.rank != 0 or folder is None:
            return False
        return not list_checkpoints(folder.checkpoints)

    def joined(self) -> Loop:
        """Begin the run, or come into it."""
        with self._as_it_was():
            loop = Loop(self._seat, self._model, self._optimizer)
        loop.next_loss, loop.meanwhile = self.next_loss, self.meanwhile
        self._seat.reports(loop.progress)
        self._seat.loop = loop
        self._optimizer._offbeat_loop = loop  # type: ignore[attr-defined]
        loop.join()
        self._optimizer.state.clear()  # the servers have it
        for scores, most in self._scores:
            loop.scored(scores, most)
        return loop

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """With those parameters trained that were when `distribute` was called."""
        now = [parameter.requires_grad for parameter, _ in self._trained]
        for parameter, trained in self._trained:
            parameter.requires_grad_(trained)
        yield
        for (parameter, _), trained in zip(self._trained, now, strict=True):
            parameter.requires_grad_(trained)

    @property
    def num_known(self) -> int:
        return 0 if self.may_wait else self.joined().num_known

    def step(self) -> None:
        self.joined().step()

    def scored(self, scores: Mapping[str, float], most: bool | None) -> None:
        """Of the model that the run is going to begin with, as far as anybody knows."""
        self._scores.append((scores, most))

    def finish(self) -> None:
        self.joined().finish()

    def close(self) -> None:
        """There is nothing to leave."""

    def kept(self) -> defaultdict[Any, Any]:
        """What the optimizer keeps so far."""
        return self._optimizer.state

    def check_loading(self) -> None:
        """Any state will do."""

    def loaded(self) -> None:
        """It stays with the optimizer until the run begins."""
