"""Update rules: how the gradients of one update become the one that the optimizer is given.

A discipline says *when* gradients are applied, and which together; a rule makes one out of them,
and any rule goes with any discipline. Called by shard.py for every update:

    rule = Mean()
    gradient = rule(gradients, staleness, params, out)

It sees each gradient's staleness and worker, the shard's parameters, and, where it asks for them
(`needs_base`), the parameters that each gradient was computed on. One of your own works like a
recipe: `--rule path/file.py:Class`.

In the equations g is a gradient, tau its staleness, x the parameters and x' those that g was
computed on; all products are element by element. What the papers have that is different here is in
docs/staleness.md.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from offbeat.plugins import Option, Plugin, find, parse, read_options

SMALL = 1e-12
"""Beside what may be zero, below a fraction's line."""


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
    sees_params: ClassVar[bool] = True
    """Whether it looks at any parameters."""
    remembers: ClassVar[bool] = False
    """Whether it keeps something for each element from one update to the next."""
    of_several: ClassVar[bool] = False
    """Whether it means nothing where every update is made of one gradient."""
    has_momentum: ClassVar[bool] = False
    """Whether it has one, beside which the optimizer's would be a second."""

    shares_a_pass: ClassVar[bool] = False
    """Whether it shares out one step among the updates while every worker pushes once."""

    updates_per_pass: float = 1.0
    """How many updates there are while every worker pushes once. Whoever makes the rule says it."""

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

    def state(self) -> dict[str, Tensor]:
        """What it remembers, for a checkpoint: vectors as long as the parameters."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave, which is the rule's from now on; also from nothing."""


# -- of several gradients --------------------------------------------------------------------------


class Sum(Rule):
    """g1 + g2 + ..."""

    name = "sum"
    sees_params = False
    of_several = True

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
    """(g1 + ... + gn) / n"""

    name = "mean"
    of_several = False

    def of_sum(self, total: Tensor, count: int) -> Tensor:
        return total.div_(count) if count > 1 else total


class Trimmed(Rule):
    """Of each element the mean without some of its largest and as many of its smallest."""

    sees_params = False
    of_several = True

    def __call__(
        self,
        gradients: Sequence[Gradient],
        staleness: Sequence[int],
        params: Tensor,
        out: Tensor,
    ) -> Tensor:
        count = len(gradients)
        if count == 1:
            return gradients[0].values
        most = (count - 1) // 2  # one or two are left then
        left_out = min(self.left_out(count), most)
        in_order = torch.stack([gradient.values for gradient in gradients]).sort(dim=0).values
        return torch.mean(in_order[left_out : count - left_out], dim=0, out=out)

    @abstractmethod
    def left_out(self, count: int) -> int:
        """How many of so many at each end."""


class TrimmedMean(Trimmed):
    """Against a few workers that lie (Yin et al. 2018)."""

    name = "trimmed-mean"
    options = (
        Option(
            name="liars",
            default=1,
            least=1,
            most=10**6,
            always_shown=True,
            help="how many of the largest, and of the smallest, are left out",
        ),
    )

    def __init__(self, *, liars: float = 1) -> None:
        self.liars = int(liars)

    def left_out(self, count: int) -> int:
        return self.liars


class Median(Trimmed):
    """The middle of each element, or the mean of the two in the middle (Yin et al. 2018)."""

    name = "median"

    def left_out(self, count: int) -> int:
        return (count - 1) // 2


# -- of each gradient by itself --------------------------------------------------------------------


class OfEach(Rule):
    """Something is made of each gradient by itself; of several it is their mean."""

    def __call__(
        self,
        gradients: Sequence[Gradient],
        staleness: Sequence[int],
        params: Tensor,
        out: Tensor,
    ) -> Tensor:
        made = self.of_one(gradients[0], staleness[0], params, out)
        if len(gradients) == 1:
            return made
        if made is not out:
            out.copy_(made)
        other = torch.empty_like(out)
        for gradient, age in zip(gradients[1:], staleness[1:], strict=True):
            out.add_(self.of_one(gradient, age, params, other))
        return out.div_(len(gradients))

    @abstractmethod
    def of_one(self, gradient: Gradient, staleness: int, params: Tensor, out: Tensor) -> Tensor:
        """Its own values, or `out`."""


class Weighted(OfEach):
    """w(tau) g: a smaller step for what is stale."""

    sees_params = False

    def of_one(self, gradient: Gradient, staleness: int, params: Tensor, out: Tensor) -> Tensor:
        weight = self.weight(staleness)
        return gradient.values if weight == 1 else torch.mul(gradient.values, weight, out=out)

    @abstractmethod
    def weight(self, staleness: int) -> float: ...


class StalenessAware(Weighted):
    """g / tau (Zhang et al. 2016)"""

    name = "staleness-aware"

    def weight(self, staleness: int) -> float:
        return 1 / max(1, staleness)


class DelayAdaptive(Weighted):
    """min(1, c / tau) g (Mishchenko et al. 2022; Koloskova et al. 2022)"""

    name = "delay-adaptive"
    options = (
        Option(
            name="c",
            default=0,
            whole=False,
            help="the staleness up to which a step is whole; 0: that of workers of one speed",
        ),
    )

    def __init__(self, *, c: float = 0) -> None:
        self.c = c

    def weight(self, staleness: int) -> float:
        return min(1.0, (self.c or max(1.0, self.updates_per_pass)) / max(1, staleness))


class Exponential(Weighted):
    """exp(-beta tau) g (Chan and Lane 2014)"""

    name = "exponential"
    options = (
        Option(name="beta", default=0.1, whole=False, always_shown=True, help="how fast it falls"),
    )

    def __init__(self, *, beta: float = 0.1) -> None:
        self.beta = beta

    def weight(self, staleness: int) -> float:
        return math.exp(-self.beta * staleness)


class DelayCompensated(OfEach):
    """g + s g g (x - x'): about what g would be at x (Zheng et al. 2017)"""

    name = "dc-asgd"
    needs_base = True
    options: ClassVar[tuple[Option, ...]] = (
        Option(
            name="strength",
            default=0.04,
            whole=False,
            always_shown=True,
            help="s: how much is made up for",
        ),
    )

    def __init__(self, *, strength: float = 0.04) -> None:
        self.strength = strength

    def of_one(self, gradient: Gradient, staleness: int, params: Tensor, out: Tensor) -> Tensor:
        assert gradient.base is not None, "it was asked for"
        values = gradient.values
        torch.sub(params, gradient.base, out=out).mul_(values).mul_(values)
        return self.scaled(out, values).add_(values)

    def scaled(self, product: Tensor, values: Tensor) -> Tensor:
        """In place, by s; `values` is g."""
        return product.mul_(self.strength)


class Remembering(OfEach):
    """Keeps vectors as long as the parameters, by their names."""

    remembers = True

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def vector(self, name: str, like: Tensor) -> Tensor:
        """Zeros, to begin with."""
        if (found := self.kept.get(name)) is None:
            found = self.kept.setdefault(name, torch.zeros_like(like))
        return found

    def state(self) -> dict[str, Tensor]:
        return dict(self.kept)

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.kept = dict(state)


class AdaptiveDelayCompensated(Remembering, DelayCompensated):
    """The same with s / sqrt(m), m being the running mean of g g (Zheng et al. 2017)"""

    name = "dc-asgd-a"
    options = (
        Option(
            name="strength",
            default=2,
            whole=False,
            always_shown=True,
            help="s: how much is made up for",
        ),
        Option(name="decay", default=0.95, whole=False, most=1, help="of the running mean"),
    )

    def __init__(self, *, strength: float = 2, decay: float = 0.95) -> None:
        Remembering.__init__(self)
        self.strength = strength
        self.decay = decay

    def scaled(self, product: Tensor, values: Tensor) -> Tensor:
        mean = self.vector("square", values)
        mean.mul_(self.decay).addcmul_(values, values, value=1 - self.decay)
        return product.mul_(self.strength).div_(mean.sqrt().add_(SMALL))


class GapAware(Remembering):
    """g / (|x - x'| / c + 1), c being how far an element moves in an update (Barkai et al. 2020)"""

    name = "gap-aware"
    needs_base = True
    options = (
        Option(name="decay", default=0.999, whole=False, most=1, help="of the running mean c"),
    )

    def __init__(self, *, decay: float = 0.999) -> None:
        super().__init__()
        self.decay = decay

    def __call__(
        self,
        gradients: Sequence[Gradient],
        staleness: Sequence[int],
        params: Tensor,
        out: Tensor,
    ) -> Tensor:
        self.look(params, out)
        return super().__call__(gradients, staleness, params, out)

    def look(self, params: Tensor, out: Tensor) -> None:
        """How far they have moved since the last update; `out` is written to."""
        if "before" not in self.kept:
            self.vector("before", params).copy_(params)
            return
        moved = torch.sub(params, self.kept["before"], out=out).square_()
        self.kept["before"].copy_(params)
        if "square" in self.kept:
            self.kept["square"].lerp_(moved, 1 - self.decay)
        else:
            self.vector("square", params).copy_(moved)

    def of_one(self, gradient: Gradient, staleness: int, params: Tensor, out: Tensor) -> Tensor:
        assert gradient.base is not None, "it was asked for"
        if (square := self.kept.get("square")) is None:
            return gradient.values
        gap = torch.sub(params, gradient.base, out=out).abs_()
        gap.div_(square.sqrt().add_(SMALL)).add_(1)
        return torch.div(gradient.values, gap, out=out)


class Dana(Remembering):
    """v = gamma v + g for each worker by itself, and gamma v + g goes in (Hakimi et al. 2019)

    In the paper workers look ahead of the parameters by the momenta of all; in this form of it,
    which the paper calls slim, what the servers keep is the point looked at.
    """

    name = "dana"
    sees_params = False
    has_momentum = True
    options = (
        Option(name="momentum", default=0.9, whole=False, most=1, always_shown=True, help="gamma"),
    )

    def __init__(self, *, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = momentum

    def of_one(self, gradient: Gradient, staleness: int, params: Tensor, out: Tensor) -> Tensor:
        velocity = self.vector(f"worker-{gradient.worker}", params)
        velocity.mul_(self.momentum).add_(gradient.values)
        return torch.add(gradient.values, velocity, alpha=self.momentum, out=out)


class DelayedNesterov(Remembering):
    """g / n; and every n updates v = beta v + (their mean), with beta v beside it (Liu et al. 2024)

    n: the updates while every worker pushes once. With `spread` c each of them has c beta v of the
    last v, and the n-th the rest.
    """

    name = "delayed-nesterov"
    sees_params = False
    has_momentum = True
    shares_a_pass = True
    options = (
        Option(name="momentum", default=0.9, whole=False, most=1, always_shown=True, help="beta"),
        Option(
            name="spread",
            default=0,
            whole=False,
            most=1,
            help="c: the part of the momentum that each update has; at most 1/n",
        ),
    )

    def __init__(self, *, momentum: float = 0.9, spread: float = 0) -> None:
        super().__init__()
        self.momentum = momentum
        self.spread = spread

    @property
    def period(self) -> int:
        return max(1, round(self.updates_per_pass))

    def __call__(
        self,
        gradients: Sequence[Gradient],
        staleness: Sequence[int],
        params: Tensor,
        out: Tensor,
    ) -> Tensor:
        share = super().__call__(gradients, staleness, params, out)
        total, velocity = self.vector("total", params), self.vector("velocity", params)
        total.add_(share)
        version = gradients[0].base_version + staleness[0] + 1  # the one that this update makes
        part = min(self.spread, 1 / self.period)
        if version % self.period == 0:
            velocity.mul_(self.momentum).add_(total)
            total.zero_()
            part = 1 - part * self.period + part
        return share.add_(velocity, alpha=part * self.momentum)

    def of_one(self, gradient: Gradient, staleness: int, params: Tensor, out: Tensor) -> Tensor:
        return torch.div(gradient.values, self.period, out=out)


BUILT_IN: dict[str, type[Rule]] = {
    kind.name: kind
    for kind in (
        *(Mean, Sum, TrimmedMean, Median),
        *(StalenessAware, DelayAdaptive, Exponential, GapAware),
        *(DelayCompensated, AdaptiveDelayCompensated, Dana, DelayedNesterov),
    )
}


def make_rule(text: str, updates_per_pass: float = 1.0) -> Rule:
    """What `text` names, as dana:0.9 or path/file.py:Class, or a ConfigError."""
    source, parts = parse(text, BUILT_IN)
    kind = find(source, BUILT_IN, Rule, "rule")
    given = read_options(kind, source, parts)
    values = {}
    for option in kind.options:
        if option.flag in given:
            option.check(given[option.flag])
            values[option.name] = given[option.flag]
    rule = kind(**values)
    rule.updates_per_pass = updates_per_pass
    return rule
