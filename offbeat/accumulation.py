"""A step of several batches: the mean of their gradients and losses, each by its examples.

A device is told what to do, and nobody waits for it; a batch's own gradient may lie in memory that
the next one's is written to. towers.py has one:

    accumulation.add(gradient, loss, present, count=8)            # every batch but the last
    loss, present = accumulation.close(gradient, loss, present, count=8)
"""

import torch
from torch import Tensor


class Accumulation:
    """One thread uses it."""

    def __init__(self) -> None:
        self._count = 0
        """Examples of the step so far."""
        self._gradient: Tensor | None = None
        self._loss: Tensor | None = None
        self._present: list[bool] = []

    @property
    def is_begun(self) -> bool:
        return self._count > 0

    def add(self, gradient: Tensor, loss: Tensor, present: list[bool], count: int) -> None:
        """Put the mean over `count` more examples with the others; both tensors stay the
        caller's."""
        if not self._count or self._gradient is None or self._loss is None:
            self._gradient = (
                torch.empty_like(gradient) if self._gradient is None else self._gradient
            )
            self._gradient.copy_(gradient)
            self._loss, self._present, self._count = loss.clone(), present, count
            return
        self._count += count
        self._gradient.lerp_(gradient, count / self._count)
        self._loss.lerp_(loss, count / self._count)
        self._present = _either(self._present, present)

    def close(
        self, gradient: Tensor, loss: Tensor, present: list[bool], count: int
    ) -> tuple[Tensor, list[bool]]:
        """Put the last batch with the others: `gradient` becomes that of the step. Returns the
        step's loss, and which tensors have a gradient."""
        assert self._gradient is not None and self._loss is not None
        weight = count / (self._count + count)
        self._count = 0
        torch.lerp(self._gradient, gradient, weight, out=gradient)
        return torch.lerp(self._loss, loss, weight), _either(self._present, present)


def _either(one: list[bool], other: list[bool]) -> list[bool]:
    return [a or b for a, b in zip(one, other, strict=True)]
