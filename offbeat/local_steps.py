"""Steps that a worker takes by itself, before it pushes by how much its parameters moved.

    H times:  params -= inner optimizer's step on the gradient there
    push:     where they began - where they are          (the servers' optimizer takes it off)

Towers of a worker with `--local-steps H`: a step of theirs is one of H batches, as with
`--accumulate`, but the parameters move from one batch to the next. The inner optimizer runs on a
shard of the worker's own, which is the whole vector. So its loop and its exchange, the servers and
every discipline know nothing of it: what a rule or an optimizer is given is a difference where it
was a gradient. Made by run/job.py:

    towers = LocalTowers([model], [device], inner=Inner(optimizer, ...), batches_per_step=1)
    towers.begin(version)                    # the parameters are those that a reply has brought
    towers.compute(...); towers.accumulate(count)        # a local step
    towers.compute(...); towers.take_gradient(slices, count)     # the last one, and the difference
    loss, is_usable = towers.wait()

With plain averaging by the servers (SGD with a rate of 1) sync is local SGD (Stich 2019), with
Nesterov's momentum DiLoCo (Douillard et al. 2023), whose inner optimizer keeps its state from one
exchange to the next, as here.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.aliases import Segment
from offbeat.optim import Optimizer, Schedule
from offbeat.rules import Gradient
from offbeat.shard import Shard, ShardState
from offbeat.towers import Towers

POSITION = "position"


@dataclass(frozen=True, kw_only=True)
class Inner:
    """What a worker steps by itself."""

    optimizer: Optimizer
    segments: Sequence[Segment]
    """Of the whole vector."""
    schedule: Schedule
    """In a run that is so many local steps long."""
    total_steps: int | None
    steps_per_update: float
    """How many local steps of one worker an update of the servers stands for; 0: nobody knows, and
    the schedule goes by the worker's own."""
    fused: bool = False

    def shard(self, params: Tensor) -> Shard:
        return Shard(
            params,
            self.segments,
            self.optimizer,
            schedule=self.schedule,
            total_updates=self.total_steps,
            fused=self.fused,
        )


class LocalTowers(Towers):
    """The model's parameters have memory of their own, which is never that of a slot: a reply stays
    there as it came."""

    def __init__(self, *given: Any, inner: Inner, batches_per_step: int, **more: Any) -> None:
        """`batches_per_step`: of a local step, whose gradient is their mean."""
        super().__init__(*given, **more, accumulates=True, apart=True)
        self._inner = inner
        self._batches_per_step = batches_per_step
        self._optimize({})
        self._start = self.model.params.clone()
        """Where they were when the last reply had come."""
        self._position = 0
        """How many local steps lie before this one, as the schedule counts them."""
        self._restart()

    def _optimize(self, kept: Mapping[str, Tensor]) -> None:
        """Begin with what the inner optimizer has `kept`."""
        params = self.model.params
        self._shard = self._inner.shard(params)
        state = {"params": params, **kept}
        self._shard.load(ShardState(version=0, tensors=state, accounts={}))
        self._updater = self._shard.make_updater()

    def _restart(self) -> None:
        self._num_batches = 0
        self._examples = 0
        self._examples_before = 0
        """Of the local steps so far."""
        self._loss = 0.0
        self._present: list[bool] = []
        self._num_usable = 0
        self._largest_norm: float | None = None

    # -- what a worker has for itself ----------------------------------------------------------

    @property
    def keeps(self) -> bool:
        return not self._updater.stateless

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        return self._updater.optimizer_state(), {POSITION: self._position}

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> bool:
        position = numbers.get(POSITION)
        if not isinstance(position, int) or position < 0 or not self._fits(tensors):
            return False
        self._optimize(tensors)
        self._position = position
        return True

    def _fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether it is what this optimizer keeps of this model; nothing, before its first step."""
        if not tensors:
            return True
        expected, shape_of = self._updater.first_state(), _shape_of
        return expected.keys() == tensors.keys() and all(
            shape_of(tensors[name]) == shape_of(tensor) for name, tensor in expected.items()
        )

    def skip(self, num_batches: int) -> None:
        self._position = max(self._position, num_batches // self._batches_per_step)

    # -- a step --------------------------------------------------------------------------------

    def begin(self, version: int) -> None:
        self._restart()
        self._start.copy_(self.model.params)
        # of asynchronous workers some are ahead of others, and no schedule goes back
        self._position = max(self._position, int(version * self._inner.steps_per_update))
        self._shard.tickets = itertools.count(self._position + 1)

    def accumulate(self, count: int) -> None:
        self._num_batches += 1
        self._examples += count
        if self._num_batches % self._batches_per_step:
            super().accumulate(count)
        else:
            self._step(count)

    def take_gradient(self, slices: Sequence[Tensor], count: int = 1) -> list[bool]:
        self._examples += count
        self._step(count)
        reading, difference = self._reading, self._gradients[0]
        assert reading is not None, "gradients are gathered"
        torch.sub(self._start, self.model.params, out=difference)
        reading.take(torch.tensor(self._loss, device=difference.device), difference)
        self._download(difference, slices)
        reading.sent()
        return self._present

    def wait(self) -> tuple[float, bool]:
        loss, is_usable = super().wait()
        self.norm = self._largest_norm
        return loss, is_usable and self._num_usable > 0

    def _step(self, count: int) -> None:
        """With what was computed last, on `count` examples. An unusable gradient changes nothing,
        as at a server."""
        assert self._reading is not None, "gradients are gathered"
        present, total = self._take_whole(self._reading, count)
        self._reading.sent()
        loss, is_usable = super().wait()
        self._note(loss, present)
        if not is_usable:
            self._tell("a local step was left out: its gradient is not finite, or too large")
            return
        self._num_usable += 1
        mask = None if all(present) else present
        self._position = self._updater.apply([Gradient(total, mask)])
        for model in self.models[1:]:
            model.params.copy_(self.model.params)

    def _note(self, loss: float, present: list[bool]) -> None:
        """The step's loss is the mean over its examples, and its norm the largest."""
        self._loss += (loss - self._loss) * (1 - self._examples_before / self._examples)
        self._examples_before = self._examples
        before = self._present or [False] * len(present)
        self._present = [a or b for a, b in zip(before, present, strict=True)]
        if self.norm is not None:
            self._largest_norm = max(self.norm, self._largest_norm or 0.0)


def _shape_of(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)
