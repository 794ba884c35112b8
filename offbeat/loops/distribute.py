"""What a script calls: `distribute`, and where it is.

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = offbeat.distribute(model, optimizer)

Started by itself the script runs as if none of this were there. Started by `offbeat launch`, the
optimizer keeps its parameter groups, its class and whoever holds it; `step` is an exchange with the
servers, which keep what it would have kept. What they keep is what `state_dict` gives.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _profiler_enabled
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from offbeat.errors import ModelError
from offbeat.loops import seat
from offbeat.loops.loop import Loop
from offbeat.loops.scores import read_values
from offbeat.loops.waiting import Waiting


def distribute(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, whose `step()` is an exchange with the servers where the script was launched.

    The run begins with the weights and the optimizer's state that rank 0 has at its first step, or
    those of the checkpoint that it goes on from; the other ranks' models have them from here on.
    One model and one optimizer in a script; parameters are the model's own.
    """
    here = seat.taken
    if here is None:
        return optimizer
    if here.loop is not None:
        raise ModelError(
            "distribute was called before: a run has one model and one optimizer; put several "
            "models into an nn.ModuleList, and their parameters into groups of one optimizer"
        )
    waiting = Waiting(here, model, optimizer)
    here.loop = waiting
    _take_over(optimizer)
    optimizer._offbeat_loop = waiting if waiting.may_wait else waiting.joined()  # type: ignore[attr-defined]
    return optimizer


def seed() -> int:
    """The run's (`--seed`), which is another one in each run of a comparison; 0 where the script
    runs alone."""
    return 0 if seat.taken is None else seat.taken.config.seed


def log(*, higher_is_better: bool | None = None, **values: float) -> None:
    """Tell the run what only the script knows. `loss`: that of the step that comes next. All others
    are scores of the model as it is now, by any names: `accuracy=0.93`, `test_loss=0.21`. Those of
    rank 0 are the run's; what other ranks tell is left out.

    `higher_is_better`: of these scores, where their names do not say so: accuracy is better the
    higher, a loss or an error the lower.
    """
    here = seat.taken
    loss, scores = read_values(values)
    if here is None or (here.loop is None and not scores):
        return
    if here.loop is None:
        raise ModelError("scores come after offbeat.distribute, which finds the run")
    if loss is not None:
        here.loop.next_loss = loss
    if scores:
        here.loop.scored(scores, higher_is_better)


def _take_over(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer another `step`, in place: a scheduler or a trainer may hold it already."""
    of_torch = type(optimizer)
    vars(optimizer).pop("step", None)  # a scheduler's, around that of its class
    told: dict[str, Any] = {"_offbeat_class": of_torch}
    if of_torch.zero_grad is torch.optim.Optimizer.zero_grad:
        told["zero_grad"] = _zero_grad
    optimizer.__class__ = type(of_torch.__name__, (_Distributed, of_torch), told)


def _step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Exchange the gradient for new parameters; returns what `closure`, which computes it, does."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and not loss.is_cuda:
            self._offbeat_loop.next_loss = float(loss.detach())
    self._opt_called = True  # which schedulers look at
    self._offbeat_loop.step()
    return loss


_hooked_step = torch.optim.Optimizer.profile_hook_step(_step)  # type: ignore[arg-type, unused-ignore]


def _quick_step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Where nobody looks on: what torch puts around a step takes as long as the step of a small
    model's server."""
    own = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
    if own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks or _profiler_enabled():
        return _hooked_step(self, closure)
    return _step(self, closure)


_quick_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
_quick_step.hooked = True  # type: ignore[attr-defined] # or torch would do so again


def _zero_grad(self: Any, set_to_none: bool = True) -> None:
    """torch's own, without what a profiler would see where there is none."""
    if not set_to_none or _profiler_enabled():
        torch.optim.Optimizer.zero_grad(self, set_to_none)
        return
    for group in self.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


class _Distributed(torch.optim.Optimizer):
    _offbeat_loop: Waiting | Loop
    step = _quick_step

    def state_dict(self) -> dict[str, Any]:
        """As torch gives it, with what the servers' optimizers keep; on every rank."""
        own, self.state = self.state, self._offbeat_loop.kept()
        try:
            return super().state_dict()
        finally:
            self.state = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The groups are taken over. So is the rest, from rank 0 and before its first step."""
        self._offbeat_loop.check_loading()
        super().load_state_dict(state_dict)
        self._offbeat_loop.loaded()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ModelError(
            "a distributed optimizer has its parameter groups from the start: make them before "
            "offbeat.distribute, with a rate of 0 where they are to train later"
        )
