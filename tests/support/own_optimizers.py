"""Optimizers as people write their own."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Stepping(Optimizer):
    """Calls `change` for every parameter with a gradient."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.change(param, param.grad, self.state[param], group)

    def change(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        raise NotImplementedError


class Signs(Stepping):
    """Element by element, with numbers of Python's, and state that is assigned anew."""

    def change(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            state.update(step=0, share=1.0, warm=False, mean=torch.zeros_like(param), last=None)
            state["anchor"] = param.clone()
        state["step"] += 1
        state["share"] *= 0.7
        state["warm"] = state["step"] > 2
        state["mean"] = group["beta"] * state["mean"] + (1 - group["beta"]) * grad
        pull = 1 - group["beta"] ** state["step"] + state["share"] * 0.3
        param.sub_(group["lr"] * pull * (state["mean"].sign() + 0.1 * grad))
        param.lerp_(state["anchor"], 0.01 if state["warm"] else 0.02)


class Trusting(Stepping):
    """A step as long as the tensor is; keeps a vector that has another shape than the tensor."""

    def change(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            state["norms"] = torch.zeros(2)
        state["norms"].lerp_(torch.stack([param.norm(), grad.norm()]), 0.5)
        ratio = (state["norms"][0] + 1) / (state["norms"][1] + 1)
        param.sub_(group["lr"] * ratio * grad)


class Together(Stepping):
    """Looks at all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()
        for param in params:
            if param.grad is not None:
                param.sub_(self.param_groups[0]["lr"] * param.grad / norm)


class Counting(Stepping):
    """Counts where no checkpoint looks."""

    count = 0

    def change(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        self.count += 1
        param.sub_(group["lr"] * grad / self.count)


class Listing(Stepping):
    """Keeps a list."""

    def change(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        state.setdefault("history", []).append(grad)
        param.sub_(group["lr"] * grad)


class Noisy(Stepping):
    """Element by element, but never twice the same."""

    def change(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        param.sub_(group["lr"] * (grad + torch.randn_like(grad)))


class Failing(Stepping):
    """Has no `change`."""


class Rateless(Optimizer):
    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class Decaying(torch.optim.Optimizer):
    """Takes sparse gradients, and makes all parameters smaller."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.99).add_(param.grad, alpha=-group["lr"])
