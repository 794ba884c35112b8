"""Which optimizer the servers run, and how its learning rate changes with the shard's version.

A recipe names one of torch's optimizers, or one of the user's; the servers build it on their
slices:

    optimizer=offbeat.SGD(lr=0.1, momentum=0.9, groups={"*.bias": {"weight_decay": 0.0}})
    optimizer=offbeat.optimizer(torch.optim.Adadelta, rho=0.95)
    schedule=offbeat.cosine(warmup=100)

What an optimizer's update of an element depends on is probing.py's to find out.
"""

import dataclasses
import fnmatch
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offbeat.errors import ConfigError, in_a_line, nearest
from offbeat.plugins import find, parse

Schedule = Callable[[int, int | None], float]
"""(version, the run's expected number of updates or None) -> what the learning rate is multiplied
by."""

KINDS = (
    *("SGD", "Adam", "AdamW", "Adagrad", "RMSprop"),
    *("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop"),
)
"""Those of torch's optimizers that treat every element alike, so that a slice is as good as the
whole."""
WHOLE = ("Adafactor", "Muon")
"""Those of torch's whose update of an element depends on the rest of its tensor."""
SPARSE = ("SparseAdam",)
"""Those of torch's that take sparse gradients only; they treat every element of a row alike."""
REFUSED = {"LBFGS": "it computes the loss several times in a step, which no server can"}
NOT_OPTIONS = ("capturable", "differentiable", "foreach", "fused")
"""How torch computes an update, which is for the servers to say, not what it computes."""
NO_GROUP = -1
"""Where a parameter is that nothing steps."""
OF_TORCH: dict[str, type[torch.optim.Optimizer]] = {
    name: getattr(torch.optim, name) for name in (*KINDS, *WHOLE, *SPARSE, *REFUSED)
}


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer by its class, with its options and parameter groups.

    `kind` is the class: a name in torch.optim, or where to find one of the user's, as
    package.module:Class or path/to/file.py:Class.

    `groups` gives parameters whose names match a pattern (as a shell's, the first match wins) other
    options than the rest, or an Optimizer of their own.

    `whole_tensors` says that the update of an element depends on the rest of its tensor.
    """

    kind: str
    options: Mapping[str, Any]
    groups: Mapping[str, "Mapping[str, Any] | Optimizer"] = field(default_factory=dict)
    by_name: Mapping[str, int] = field(default_factory=dict)
    """In which group each parameter is, where that goes by names and not by patterns: those that it
    does not name are in none."""
    whole_tensors: bool = False
    given: type[torch.optim.Optimizer] | None = field(default=None, repr=False, compare=False)
    """The class itself, where the recipe has it at hand."""

    def __post_init__(self) -> None:
        _refuse(self.maker)
        self._check_options(self.options, "")
        if "lr" not in self.options:
            raise ConfigError(f"{self.kind} needs a learning rate: give lr")
        for pattern, options in self.groups.items():
            if not isinstance(options, Optimizer):
                self._check_options(options, f" in the parameter group {pattern!r}")
            elif options.groups:
                raise ConfigError(f"the optimizer of the parameter group {pattern!r} has groups")

    @property
    def maker(self) -> type[torch.optim.Optimizer]:
        """The class."""
        return self.given or find(self.kind, OF_TORCH, torch.optim.Optimizer, "optimizer")

    @property
    def rows_only(self) -> bool:
        """Whether it takes sparse gradients, and no others."""
        return any(issubclass(self.maker, OF_TORCH[name]) for name in SPARSE)

    @property
    def members(self) -> "list[Optimizer]":
        """What each group's parameters are stepped by, as `group_of` counts them."""
        return [
            group
            if isinstance(group, Optimizer)
            else dataclasses.replace(self, options={**self.options, **group}, groups={})
            for group in ({}, *self.groups.values())
        ]

    @property
    def classes(self) -> str:
        """In a word, whose state is kept."""
        return " ".join(dict.fromkeys(member.maker.__qualname__ for member in self.members))

    def _check_options(self, options: Mapping[str, Any], where: str) -> None:
        """torch takes any name in a parameter group, and does nothing with those it does not
        know."""
        known, takes_any = _options_of(self.maker)
        for name, value in options.items():
            if name in NOT_OPTIONS:
                raise ConfigError(
                    f"{name}{where} is no option of {self.kind} here: the servers choose how an "
                    f"update is computed; leave it out (--fused asks for fused kernels)"
                )
            if name not in known and not takes_any:
                raise ConfigError(
                    f"{self.kind} has no option {name!r}{where}; {nearest(name, known)}"
                )
            if not _is_plain(value):
                raise ConfigError(
                    f"{name}{where} of {self.kind} must be made of numbers and text, which every "
                    f"process can be told, not a {type(value).__name__}"
                )

    def build(
        self, params: Sequence[torch.nn.Parameter], groups: Sequence[int], *, fused: bool = False
    ) -> torch.optim.Optimizer:
        """The torch optimizer over `params`, each in the group that `groups` gives its index of;
        its own groups are in that order. Where all are in none there is nothing to step but what
        torch insists on."""
        members: dict[int, list[torch.nn.Parameter]] = {}
        for param, group in zip(params, groups, strict=True):
            if group != NO_GROUP:
                members.setdefault(group, []).append(param)
        if not members:
            members[0] = [torch.nn.Parameter(torch.zeros(1, 1))]
        inside = {group: members[group] for group in sorted(members)}
        if any(isinstance(options, Optimizer) for options in self.groups.values()):
            each = self.members
            return _Together(
                [each[group]._build([{"params": p}], fused) for group, p in inside.items()]
            )
        overrides: list[Any] = [{}, *self.groups.values()]
        return self._build([{"params": p, **overrides[g]} for g, p in inside.items()], fused)

    def _build(self, tables: list[dict[str, Any]], fused: bool) -> torch.optim.Optimizer:
        extra = {"fused": True} if fused else {}
        make: Callable[..., torch.optim.Optimizer] = self.maker
        return make(tables, **self.options, **extra)

    def check(self, *, fused: bool) -> None:
        """Have torch look at the options now rather than in the middle of a start."""
        try:
            self.build_probe(fused=fused).step()
        except Exception as error:
            hint = "; try without --fused" if fused else ""
            raise ConfigError(
                f"torch refuses the optimizer {self.kind}: {complaint(error)}{hint}"
            ) from error

    def check_shapes(self, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """Have torch look at the tensors by their names and shapes: some optimizers take matrices
        only."""
        params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for _, shape in shapes]
        try:
            self.build(params, [self.group_of(name) for name, _ in shapes])
        except Exception as error:
            raise ConfigError(
                f"torch refuses the optimizer {self.kind} for this model: {complaint(error)}; "
                f"others can have one of their own: groups={{'*.bias': offbeat.AdamW(lr=...)}}"
            ) from error

    def build_probe(self, *, fused: bool = False) -> torch.optim.Optimizer:
        """Over a small matrix for each group, with gradients: something to try."""
        probe = [torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(1 + len(self.groups))]
        for param, member in zip(probe, self.members, strict=True):
            zeros = torch.zeros_like(param)
            param.grad = zeros.to_sparse(1) if member.rows_only else zeros
        return self.build(probe, range(len(probe)), fused=fused)

    def state_per_element(self) -> list[int]:
        """How many numbers it keeps for each element of a matrix, by group as `group_of` counts
        them."""
        optimizer = self.build_probe()
        optimizer.step()
        return [
            sum(isinstance(v, torch.Tensor) and v.shape == p.shape for v in kept.values())
            for group in optimizer.param_groups
            for p in group["params"]
            for kept in (optimizer.state[p],)
        ]

    def group_of(self, name: str) -> int:
        """0 for the parameters that no pattern matches, then the patterns in their order; where it
        goes by names, NO_GROUP for those that are in none."""
        if self.by_name:
            return self.by_name.get(name, NO_GROUP)
        for index, pattern in enumerate(self.groups, start=1):
            if fnmatch.fnmatchcase(name, pattern):
                return index
        return 0

    @property
    def is_plain_sgd(self) -> bool:
        """Whether an update is nothing but params -= lr * gradient."""
        return all(
            member.maker is torch.optim.SGD
            and not any(value for key, value in member.options.items() if key != "lr")
            for member in self.members
        )

    def with_lr(self, lr: float) -> "Optimizer":
        return dataclasses.replace(self, options={**self.options, "lr": lr})

    def scaled(self, factor: float) -> "Optimizer":
        """The same with so many times the learning rate, in every parameter group."""

        def of_group(given: Any) -> Any:
            if isinstance(given, Optimizer):
                return given.scaled(factor)
            return {**given, "lr": given["lr"] * factor} if "lr" in given else given

        options = {**self.options, "lr": self.options["lr"] * factor}
        groups = {pattern: of_group(given) for pattern, given in self.groups.items()}
        return dataclasses.replace(self, options=options, groups=groups)

    def __str__(self) -> str:
        """As one would write it: SGD(lr=0.1, momentum=0.5)."""
        shown = {
            pattern: Shown(str(group)) if isinstance(group, Optimizer) else dict(group)
            for pattern, group in self.groups.items()
        }
        more: dict[str, Any] = {"groups": shown} if shown else {}
        if self.whole_tensors:
            more["whole_tensors"] = True
        return as_call(self.maker, {**self.options, **more})


class Shown(str):
    """Shown as it is, without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


class _Together(torch.optim.Optimizer):
    """Several optimizers, each for parameters of its own, as one: one state, all groups."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for member in members for group in member.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.defaults = members[0].defaults
        self.param_groups = groups
        self.members = members
        for member in members:
            self.state.update(member.state)
            member.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for member in self.members:
            member.step()


def _refuse(maker: Any) -> None:
    """What no server can run is an error of one line."""
    if not (isinstance(maker, type) and issubclass(maker, torch.optim.Optimizer)):
        shown = getattr(maker, "__name__", repr(maker))
        raise ConfigError(
            f"{shown} is no optimizer: give a class that is derived from torch.optim.Optimizer"
        )
    for name, reason in REFUSED.items():
        if issubclass(maker, OF_TORCH[name]):
            raise ConfigError(
                f"the optimizer {maker.__name__} cannot be used: {reason}; these work: "
                f"{', '.join((*KINDS, *WHOLE, *SPARSE))}, and your own"
            )
    if inspect.isabstract(maker) or maker.step is torch.optim.Optimizer.step:
        raise ConfigError(f"{maker.__name__} is abstract: it has no step of its own")
    if "lr" not in (found := _options_of(maker))[0] and not found[1]:
        raise ConfigError(
            f"the optimizer {maker.__name__} has no option lr, which schedules and --lr change"
        )


def _options_of(maker: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names of its options, and whether it takes any other name too."""
    _, *rest = inspect.signature(maker).parameters.values()
    named = [p.name for p in rest if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in rest)
    return [name for name in named if name not in NOT_OPTIONS], takes_any


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def complaint(error: Exception) -> str:
    """torch's own complaints say enough; of another's the place helps."""
    known = isinstance(error, AssertionError | TypeError | ValueError | RuntimeError)
    return str(error).partition("\n")[0] if known and str(error) else in_a_line(error)


Groups = Mapping[str, Mapping[str, Any] | Optimizer]


def optimizer(
    kind: str | type[torch.optim.Optimizer],
    *,
    groups: Groups | None = None,
    whole_tensors: bool = False,
    **options: Any,
) -> Optimizer:
    """Any optimizer: its class, a name in torch.optim, or package.module:Class of your own.

        offbeat.optimizer(torch.optim.Adadelta, lr=1.0, rho=0.9)

    Servers have slices of tensors, so an update of an element must depend on nothing but what
    concerns this element. Of one of your own that is tried out when a job is made, on a small
    matrix; where it is not so, each server gets whole tensors. `whole_tensors`: say so, where
    trying would not show it.
    """
    if isinstance(kind, str):
        maker, given = find(kind, OF_TORCH, torch.optim.Optimizer, "optimizer"), None
    else:
        maker, given = kind, kind
    _refuse(maker)
    default = inspect.signature(maker).parameters.get("lr")
    if default is not None and default.default is not default.empty:
        options = {"lr": default.default, **options}
    return Optimizer(
        kind=kind if isinstance(kind, str) else kind.__qualname__,
        options=options,
        groups=groups or {},
        whole_tensors=whole_tensors,
        given=given,
    )


def named_optimizer(text: str) -> Optimizer:
    """What `--optimizer` stands for: momentum, Adadelta, Adadelta:rho=0.95, file.py:Class."""
    if text in BY_NAME:
        return BY_NAME[text]()
    source, parts = parse(text, {**OF_TORCH, **dict.fromkeys(BY_NAME, torch.optim.Optimizer)})
    options = {}
    for part in filter(None, parts):
        name, _, value = part.partition("=")
        try:
            options[name] = json.loads(f"[{value[1:-1]}]" if value.startswith("(") else value)
        except ValueError:
            raise ConfigError(
                f"{source} takes options as {source}:lr=0.1:NAME=VALUE, with a colon before each; "
                f"values are numbers, true, false or [0.9,0.99], not {part!r}"
            ) from None
    if source in BY_NAME:
        base = BY_NAME[source]()
        return optimizer(base.kind, **{**base.options, **options})
    return optimizer(source, **options)


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


@dataclass(frozen=True)
class Length:
    """How long a run is, as a schedule sees it."""

    total: int | None = None
    """Updates that a shard will have seen in the end; None: not known."""
    per_epoch: int | None = None
    """Updates while every worker goes through its data once; None: not known."""
    shift: int = 0
    """Of a run that was cut into other shares on its way: how many more updates than it has it
    would have behind it, had it been cut like this from the beginning."""

    def epoch(self, version: int) -> float:
        """How many epochs are over at this version."""
        return max(0, version + self.shift) / self.updates_per_epoch

    def version(self, epoch: float) -> float:
        """Where so many epochs are over."""
        return max(0, epoch * self.updates_per_epoch - self.shift)

    @property
    def updates_per_epoch(self) -> int:
        if self.per_epoch is None:
            raise ConfigError(
                "a schedule by epochs needs data whose length is known; give it in updates"
            )
        return self.per_epoch


class OfRun:
    """A schedule that is told beforehand how long the run is, and can say how it was made."""

    def in_run(self, length: Length) -> Schedule:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Made(OfRun):
    """One of those below: cosine(warmup=100)."""

    maker: Callable[..., Schedule]
    arguments: Mapping[str, Any]
    factor: Callable[[int, Length], float]
    length: Length | None = None

    def in_run(self, length: Length) -> Schedule:
        return dataclasses.replace(self, length=length)

    def __call__(self, version: int, total: int | None) -> float:
        return self.factor(version, self.length or Length(total))

    def __repr__(self) -> str:
        return as_call(self.maker, self.arguments)


def constant() -> Schedule:
    return Made(constant, {}, lambda version, length: 1.0)


def cosine(
    *, warmup: float = 0, warmup_epochs: float | None = None, final: float = 0.0
) -> Schedule:
    """Up in a line during `warmup`, then down to `final` along half a cosine at the run's end.

    `warmup` is a number of updates, or below 1 the fraction of the run; or it lasts
    `warmup_epochs`.
    """
    if warmup and warmup_epochs is not None:
        raise ConfigError("warmup and warmup_epochs both say how long: give one of the two")

    def factor(version: int, length: Length) -> float:
        total = length.total
        if total is None:
            raise ConfigError("the cosine schedule needs to know the run's length: give --steps")
        rising = warmup if warmup >= 1 else warmup * total
        if warmup_epochs is not None:
            rising = length.version(warmup_epochs)
        if version < rising:
            return (version + 1) / (rising + 1)
        progress = min(1.0, (version - rising) / max(1, total - rising))
        return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))

    given = {"warmup": warmup, "warmup_epochs": warmup_epochs, "final": final}
    return Made(cosine, given, factor)


def step_decay(
    *, every: int | None = None, every_epochs: float | None = None, factor: float
) -> Schedule:
    """Multiplied by `factor` after every so many updates, or epochs. An epoch has fewer updates in
    sync, where a round is one: to compare disciplines, go by epochs."""
    if (every is None) == (every_epochs is None):
        raise ConfigError("step_decay takes every (updates) or every_epochs: give one of the two")

    def decayed(version: int, length: Length) -> float:
        if every is not None:
            return float(factor ** (version // every))
        return float(factor ** int(length.epoch(version) // (every_epochs or 1)))

    given = {"every": every, "every_epochs": every_epochs, "factor": factor}
    return Made(step_decay, given, decayed)


def schedule_name(schedule: Any) -> str:
    """How one of these was made; a user's own by its name."""
    if isinstance(schedule, OfRun):
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
        return _like(value, next(given)) if is_number(value) else value

    return {name: renewed(options[name]) for name in sorted(options)}


def _like(value: float, number: float) -> float:
    """Whole where it was, as far as it still is."""
    return int(number) if isinstance(value, int) and number.is_integer() else number


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_call(maker: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """What one would write to get it: the learning rate, and all that is not as without saying."""
    known = inspect.signature(maker).parameters
    told = [
        f"{name}={value!r}"
        for name, value in arguments.items()
        if name == "lr" or name not in known or value != known[name].default
    ]
    return f"{maker.__name__}({', '.join(told)})"
