"""Clipping: a gradient that is too large is made smaller before an optimizer is given it.

As torch's clip_grad_norm_ and clip_grad_value_ do it in a plain loop, to the bit. A device is told
what to do, and nobody waits for it. Whoever has the whole of what an update is made of clips it: a
worker its own gradient (towers.py), and where several make one update the only server what its rule
made of them (shard.py). Of several servers each measures its slice, and clips it when it is told
the norm of the whole (roles/norms.py).

    clip = ClipNorm(1.0, sizes=[42, 7])
    norm = clip(gradient, out=gradient)     # as it was before; still on its device
    Arriving(norm).value()                  # later, by whoever wants to know
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
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
        self.scale(gradient, norm, out)
        return norm

    def measure(
        self, gradient: Tensor, present: Sequence[bool], sizes: list[int] | None = None
    ) -> Tensor:
        """The norm of each tensor that has a gradient, or of the part of it that is here; `sizes`
        as above."""
        pieces = torch.split(gradient, sizes or self._sizes)
        norms = [
            torch.linalg.vector_norm(piece)
            for piece, has_one in zip(pieces, present, strict=True)
            if has_one
        ]
        return torch.stack(norms) if norms else gradient.new_empty(0)

    def scale(self, gradient: Tensor, norm: Tensor, out: Tensor) -> None:
        """Write the gradient, clipped, to `out`; `norm` is that of the whole."""
        torch.mul(gradient, torch.clamp(self._most / (norm + TINY), max=1.0), out=out)


def joined_norm(slices: Iterable[Mapping[int, float]]) -> float:
    """The norm of a gradient out of the norms that its slices have of their tensors, by number: the
    bits of torch's, where no tensor is cut."""
    parts: dict[int, list[float]] = {}
    for norms in slices:
        for tensor, norm in norms.items():
            parts.setdefault(tensor, []).append(norm)
    whole = [
        torch.linalg.vector_norm(torch.tensor(found)) if len(found) > 1 else torch.tensor(found[0])
        for _, found in sorted(parts.items())
    ]
    return torch.linalg.vector_norm(torch.stack(whole)).item() if whole else 0.0


class Arriving:
    """A number, or several, on the way from a device to the CPU."""

    def __init__(self, numbers: Tensor) -> None:
        is_cuda = numbers.device.type == "cuda"
        here = torch.empty(numbers.shape, pin_memory=is_cuda)
        self._numbers = here.copy_(numbers, non_blocking=True)
        self._mark = make_mark(numbers.device)
        self._mark.set()

    def value(self) -> float:
        """Waits for it; any thread may ask."""
        self._mark.wait()
        return self._numbers.item()

    def values(self) -> list[float]:
        """Waits for them; any thread may ask."""
        self._mark.wait()
        return [float(number) for number in self._numbers.tolist()]
