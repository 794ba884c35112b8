"""Which optimizer the servers run, and how its learning rate changes with the shard's version.

A recipe names one of torch's element-wise optimizers; the servers build it on their slices:

    optimizer=offbeat.SGD(lr=0.1, momentum=0.9, groups={"*.bias": {"weight_decay": 0.0}})
    schedule=offbeat.cosine(warmup=100)
"""

import dataclasses
import fnmatch
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offbeat.errors import ConfigError, nearest

Schedule = Callable[[int, int | None], float]
"""(version, the run's expected number of updates or None) -> what the learning rate is multiplied
by."""

KINDS = (
    *("SGD", "Adam", "AdamW", "Adagrad", "RMSprop"),
    *("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop"),
)
"""Those of torch's optimizers that treat every element alike, so that a slice is as good as the
whole."""
REFUSED = {
    "Adafactor": "it needs whole matrices, and a server has slices of them",
    "Muon": "it needs whole matrices, and a server has slices of them",
    "LBFGS": "it computes the loss several times in a step, which no server can",
    "SparseAdam": "it takes sparse gradients only, and those that travel are dense",
}
NOT_OPTIONS = ("capturable", "differentiable", "foreach", "fused")
"""How torch computes an update, which is for the servers to say, not what it computes."""
SCALARS: dict[str, float | None] = {"step": 0.0, "mu_product": 1.0, "mu": 1.0, "eta": None}
"""What these optimizers keep once per Parameter, beside what they keep for every element, and what
it is before the first step; None: the learning rate."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """One of torch's optimizers by its class name, with its options and parameter groups.

    `groups` gives parameters whose names match a pattern (as a shell's, the first match wins) other
    options than the rest.
    """

    kind: str
    options: Mapping[str, Any]
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    members: Mapping[str, int] = field(default_factory=dict)
    """In which group each parameter is, where that goes by names and not by patterns: those that it
    does not name are in none."""

    def __post_init__(self) -> None:
        if self.kind in REFUSED:
            raise ConfigError(
                f"the optimizer {self.kind} cannot be used: {REFUSED[self.kind]}; these work: "
                f"{', '.join(KINDS)}"
            )
        if self.kind not in KINDS:
            raise ConfigError(f"unknown optimizer {self.kind!r}; {nearest(self.kind, KINDS)}")
        self._check_names(self.options, "")
        for pattern, options in self.groups.items():
            self._check_names(options, f" in the parameter group {pattern!r}")

    def _check_names(self, names: Iterable[str], where: str) -> None:
        """torch takes any name in a parameter group, and does nothing with those it does not
        know."""
        of_torch = inspect.signature(getattr(torch.optim, self.kind)).parameters
        known = [name for name in of_torch if name not in ("params", *NOT_OPTIONS)]
        for name in names:
            if name in NOT_OPTIONS:
                raise ConfigError(
                    f"{name}{where} is no option of {self.kind} here: the servers choose how an "
                    f"update is computed; leave it out (--fused asks for fused kernels)"
                )
            if name not in known:
                raise ConfigError(
                    f"{self.kind} has no option {name!r}{where}; {nearest(name, known)}"
                )

    def build(
        self, params: Sequence[torch.nn.Parameter], groups: Sequence[int], *, fused: bool = False
    ) -> torch.optim.Optimizer:
        """The torch optimizer over `params`, each in the group that `groups` gives its index of."""
        overrides: list[Mapping[str, Any]] = [{}, *self.groups.values()]
        members: dict[int, list[torch.nn.Parameter]] = {}
        for param, group in zip(params, groups, strict=True):
            members.setdefault(group, []).append(param)
        tables = [{"params": members[group], **overrides[group]} for group in sorted(members)]
        extra = {"fused": True} if fused else {}
        optimizer: torch.optim.Optimizer = getattr(torch.optim, self.kind)(
            tables, **self.options, **extra
        )
        return optimizer

    def check(self, *, fused: bool) -> None:
        """Have torch look at the options now rather than in the middle of a start."""
        probe = [torch.nn.Parameter(torch.zeros(1)) for _ in range(1 + len(self.groups))]
        try:
            optimizer = self.build(probe, range(len(probe)), fused=fused)
            for param in probe:
                param.grad = torch.zeros_like(param)
            optimizer.step()
        except (AssertionError, TypeError, ValueError, RuntimeError) as error:
            hint = "; try without --fused" if fused else ""
            raise ConfigError(f"torch refuses the optimizer {self.kind}: {error}{hint}") from error

    def state_per_element(self) -> list[int]:
        """How many numbers it keeps for each element, by group as `group_of` counts them."""
        probe = [torch.nn.Parameter(torch.zeros(2)) for _ in range(1 + len(self.groups))]
        optimizer = self.build(probe, range(len(probe)))
        for param in probe:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        return [
            sum(
                isinstance(v, torch.Tensor) and v.shape == (2,) for v in optimizer.state[p].values()
            )
            for p in probe
        ]

    def group_of(self, name: str) -> int:
        """0 for the parameters that no pattern matches, then the patterns in their order."""
        if self.members:
            return self.members.get(name, 0)
        for index, pattern in enumerate(self.groups, start=1):
            if fnmatch.fnmatchcase(name, pattern):
                return index
        return 0

    @property
    def tables(self) -> list[Mapping[str, Any]]:
        """The options of each group, as `group_of` counts them."""
        return [{**self.options, **group} for group in ({}, *self.groups.values())]

    @property
    def is_plain_sgd(self) -> bool:
        """Whether an update is nothing but params -= lr * gradient."""
        return self.kind == "SGD" and is_plain_sgd([self.options, *self.groups.values()])

    def with_lr(self, lr: float) -> "Optimizer":
        return dataclasses.replace(self, options={**self.options, "lr": lr})

    def scaled(self, factor: float) -> "Optimizer":
        """The same with so many times the learning rate, in every parameter group."""
        known = inspect.signature(getattr(torch.optim, self.kind)).parameters
        options = {"lr": known["lr"].default, **self.options}
        groups = {
            pattern: {**given, "lr": given["lr"] * factor} if "lr" in given else given
            for pattern, given in self.groups.items()
        }
        options["lr"] *= factor
        return dataclasses.replace(self, options=options, groups=groups)

    def __str__(self) -> str:
        """As one would write it: SGD(lr=0.1, momentum=0.5)."""
        groups = {"groups": dict(self.groups)} if self.groups else {}
        return _as_call(getattr(torch.optim, self.kind), {**self.options, **groups})


Groups = Mapping[str, Mapping[str, Any]]


def SGD(
    lr: float = 0.1,
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    maximize: bool = False,
    groups: Groups | None = None,
) -> Optimizer:
    options = {
        "lr": lr,
        "momentum": momentum,
        "dampening": dampening,
        "nesterov": nesterov,
        "weight_decay": weight_decay,
        "maximize": maximize,
    }
    return Optimizer(kind="SGD", options=options, groups=groups or {})


def Adam(lr: float = 1e-3, *, groups: Groups | None = None, **options: Any) -> Optimizer:
    return Optimizer(kind="Adam", options={"lr": lr, **options}, groups=groups or {})


def AdamW(lr: float = 1e-3, *, groups: Groups | None = None, **options: Any) -> Optimizer:
    return Optimizer(kind="AdamW", options={"lr": lr, **options}, groups=groups or {})


def Adagrad(lr: float = 1e-2, *, groups: Groups | None = None, **options: Any) -> Optimizer:
    return Optimizer(kind="Adagrad", options={"lr": lr, **options}, groups=groups or {})


def RMSprop(lr: float = 1e-3, *, groups: Groups | None = None, **options: Any) -> Optimizer:
    return Optimizer(kind="RMSprop", options={"lr": lr, **options}, groups=groups or {})


BY_NAME: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: SGD(lr=0.1),
    "momentum": lambda: SGD(lr=0.05, momentum=0.9),
    "nesterov": lambda: SGD(lr=0.05, momentum=0.9, nesterov=True),
    "adam": Adam,
    "adamw": AdamW,
    "adagrad": Adagrad,
    "rmsprop": RMSprop,
}
"""What `--optimizer NAME` stands for, with the learning rate it has without `--lr`."""


@dataclass(frozen=True, repr=False)
class _Made:
    """A schedule that can say how it was made: cosine(warmup=100)."""

    maker: Callable[..., Schedule]
    arguments: Mapping[str, Any]
    factor: Schedule

    def __call__(self, version: int, total: int | None) -> float:
        return self.factor(version, total)

    def __repr__(self) -> str:
        return _as_call(self.maker, self.arguments)


def constant() -> Schedule:
    return _Made(constant, {}, lambda version, total: 1.0)


def cosine(*, warmup: float = 0, final: float = 0.0) -> Schedule:
    """Up in a line during `warmup`, then down to `final` along half a cosine at the run's end.

    `warmup` is a number of updates, or below 1 the fraction of the run.
    """

    def factor(version: int, total: int | None) -> float:
        if total is None:
            raise ConfigError("the cosine schedule needs to know the run's length: give --steps")
        rising = warmup if warmup >= 1 else warmup * total
        if version < rising:
            return (version + 1) / (rising + 1)
        progress = min(1.0, (version - rising) / max(1, total - rising))
        return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return _Made(cosine, {"warmup": warmup, "final": final}, factor)


def step_decay(*, every: int, factor: float) -> Schedule:
    """Multiplied by `factor` after every so many updates."""
    given = {"every": every, "factor": factor}
    return _Made(step_decay, given, lambda version, total: float(factor ** (version // every)))


def schedule_name(schedule: Schedule) -> str:
    """How one of these was made; a user's own by its name."""
    if isinstance(schedule, _Made):
        return repr(schedule)
    return str(getattr(schedule, "__name__", type(schedule).__name__))


def is_plain_sgd(tables: Iterable[Mapping[str, Any]]) -> bool:
    """Whether these options ask SGD for nothing else than a learning rate."""
    extras = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
    return not any(table.get(name) for table in tables for name in extras)


def numbers_of(options: Mapping[str, Any]) -> list[float]:
    """Those that may change from step to step, in the order of their names."""
    found: list[float] = []
    for name in sorted(options):
        value = options[name]
        parts = value if isinstance(value, list | tuple) else [value]
        found += [float(part) for part in parts if is_number(part)]
    return found


def with_numbers(options: Mapping[str, Any], numbers: Iterable[float]) -> dict[str, Any]:
    """The same options with other numbers, as `numbers_of` gave them."""
    given = iter(numbers)

    def renewed(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(renewed(part) for part in value)
        return type(value)(next(given)) if is_number(value) else value

    return {name: renewed(options[name]) for name in sorted(options)}


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_call(maker: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """What one would write to get it: the learning rate, and all that is not as without saying."""
    known = inspect.signature(maker).parameters
    told = [
        f"{name}={value!r}"
        for name, value in arguments.items()
        if name == "lr" or name not in known or value != known[name].default
    ]
    return f"{maker.__name__}({', '.join(told)})"
