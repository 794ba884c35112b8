"""Clipping: a gradient that is too large is made smaller before an optimizer is given it.

As torch's clip_grad_norm_ and clip_grad_value_ do it in a plain loop, to the bit. A device is told
what to do, and nobody waits for it. Whoever has the whole of what an update is made of clips it: a
worker its own gradient (towers.py), and where several make one update the only server what its rule
made of them (shard.py).

    clip = ClipNorm(1.0, sizes=[42, 7])
    norm = clip(gradient, out=gradient)     # as it was before; still on its device
    Arriving(norm).value()                  # later, by whoever wants to know
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from offbeat.streams import make_mark

TINY = 1e-6
"""What torch adds to a norm before it divides by it."""


class Clip(ABC):
    """It keeps nothing, so that threads may share one."""

    measures: ClassVar[bool]
    """Whether it needs to know the gradient's norm."""

    @abstractmethod
    def __call__(
        self,
        gradient: Tensor,
        out: Tensor,
        present: Sequence[bool] | None = None,
        sizes: list[int] | None = None,
    ) -> Tensor | None:
        """Write the flat gradient, clipped, to `out`, which may be the same memory. `present`: for
        each tensor whether it has one; None: all have. `sizes`: what there is of each tensor, where
        that is not the whole. Returns the norm that it had, of one that `measures`."""


class ClipValue(Clip):
    """No element is further from zero than `most`."""

    measures = False

    def __init__(self, most: float) -> None:
        self._most = most

    def __call__(
        self,
        gradient: Tensor,
        out: Tensor,
        present: Sequence[bool] | None = None,
        sizes: list[int] | None = None,
    ) -> Tensor | None:
        torch.clamp(gradient, -self._most, self._most, out=out)
        return None


class ClipNorm(Clip):
    """The norm of the whole is not above `most`; `sizes`: of the tensors that it consists of."""

    measures = True

    def __init__(self, most: float, sizes: Iterable[int]) -> None:
        self._most = most
        self._sizes = list(sizes)

    def __call__(
        self,
        gradient: Tensor,
        out: Tensor,
        present: Sequence[bool] | None = None,
        sizes: list[int] | None = None,
    ) -> Tensor | None:
        pieces: Sequence[Tensor] = torch.split(gradient, sizes or self._sizes)
        if present is not None:  # or zeros would be added in another order than torch's
            pieces = [piece for piece, has_one in zip(pieces, present, strict=True) if has_one]
        norm = torch.nn.utils.get_total_norm(pieces)
        torch.mul(gradient, torch.clamp(self._most / (norm + TINY), max=1.0), out=out)
        return norm


class Arriving:
    """A number on its way from a device to the CPU."""

    def __init__(self, number: Tensor) -> None:
        is_cuda = number.device.type == "cuda"
        self._number = torch.empty((), pin_memory=is_cuda).copy_(number, non_blocking=True)
        self._mark = make_mark(number.device)
        self._mark.set()

    def value(self) -> float:
        """Waits for it; any thread may ask."""
        self._mark.wait()
        return self._number.item()
