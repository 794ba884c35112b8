"""Update rules: how the gradients of one update become the one that the optimizer is given.

A discipline says *when* gradients are applied, and which together; a rule makes one out of them,
and any rule goes with any discipline. Called by shard.py for every update:

    rule = Mean()
    gradient = rule(gradients, staleness, params, out)

It sees each gradient's staleness and worker, the shard's parameters, and, where it asks for them
(`needs_base`), the parameters that each gradient was computed on. One of your own works like a
recipe: `--reduce path/file.py:Class`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from offbeat.plugins import Plugin


@dataclass(slots=True)
class Gradient:
    """One worker's gradient of a slice, as the shard sees it; the memory stays the caller's. Every
    push makes one: frozen, that would take four times as long."""

    values: Tensor
    """Of sparse tensors the rows that it has, and no others (rows.py)."""
    mask: Sequence[bool] | None = None
    """For each tensor of the manifest, whether it got a gradient; None: all did."""
    floats: Tensor | None = None
    ints: Tensor | None = None
    worker: int = 0
    base_version: int = 0
    """The version of the parameters that it was computed on."""
    base: Tensor | None = None
    """Those parameters, for a rule that `needs_base`."""
    rates: Tensor | None = None
    """The numbers of the optimizer's options that its worker wants; None: the servers' own."""
    ids: Sequence[Tensor] = ()
    """Which rows it has of each sparse tensor."""


class Rule(Plugin, ABC):
    """One gradient out of those that make an update."""

    needs_base: ClassVar[bool] = False
    """Whether it looks at the parameters that a gradient was computed on. The server then keeps a
    copy of them for each worker."""

    @abstractmethod
    def __call__(
        self,
        gradients: Sequence[Gradient],
        staleness: Sequence[int],
        params: Tensor,
        out: Tensor,
    ) -> Tensor:
        """The gradient to give the optimizer, for the shard's parameters as they are. `gradients`
        come in the order of the discipline, at least one, and `staleness` with them. The result is
        one of theirs as it is, or `out`, which is as large; nothing else is changed."""


class Sum(Rule):
    name = "sum"

    def __call__(
        self,
        gradients: Sequence[Gradient],
        staleness: Sequence[int],
        params: Tensor,
        out: Tensor,
    ) -> Tensor:
        if len(gradients) == 1:
            return gradients[0].values
        torch.add(gradients[0].values, gradients[1].values, out=out)
        for gradient in gradients[2:]:
            out.add_(gradient.values)
        return self.of_sum(out, len(gradients))

    def of_sum(self, total: Tensor, count: int) -> Tensor:
        """The same, in place, where somebody else has added up so many of them."""
        return total


class Mean(Sum):
    name = "mean"

    def of_sum(self, total: Tensor, count: int) -> Tensor:
        return total.div_(count) if count > 1 else total


BUILT_IN: dict[str, type[Rule]] = {kind.name: kind for kind in (Mean, Sum)}
