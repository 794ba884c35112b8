"""What the servers' optimizers are told before each update, as a function of the version.

Those of torch.optim.lr_scheduler are run on a stand-in for the optimizer, from the beginning up to
the version that is asked for. shard.py asks before each update, TensorBoard for what it shows.

    schedule=offbeat.schedule(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1)
    schedule=offbeat.schedule("StepLR", per="epoch", step_size=30)
"""

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from offbeat.decline import Plateau, plateau
from offbeat.errors import ConfigError, nearest
from offbeat.optim import (
    NOT_OPTIONS,
    SGD,
    Length,
    OfRun,
    Optimizer,
    Schedule,
    Shown,
    as_call,
    schedule_name,
)
from offbeat.plugins import find

UPDATE, EPOCH = "update", "epoch"
OF_TORCH: dict[str, type[LRScheduler]] = {
    name: getattr(lr_scheduler, name) for name in lr_scheduler.__all__
}
TRIED = 1000
"""How many updates are looked at to find out what a scheduler does."""
THE_SERVERS = ("optimizer", "last_epoch", "verbose")
"""Arguments of torch's schedulers that are not for a recipe to give."""


def schedule(kind: str | type[LRScheduler], *, per: str = UPDATE, **options: Any) -> Schedule:
    """One of torch's schedulers: its class, its name, or package.module:Class of your own.

    `per`: whether it makes a step with every "update" or every "epoch", that is whenever the
    workers have gone through their data once. Where it takes `total_steps` it need not be told:
    that is how many updates, or epochs, the run has. Schedulers that take others (SequentialLR,
    ChainedScheduler) are given what this function returns.
    """
    maker = find(kind, OF_TORCH, LRScheduler, "scheduler") if isinstance(kind, str) else kind
    _refuse(maker)
    if maker is ReduceLROnPlateau:
        return _by_score(per, options)
    if per not in (UPDATE, EPOCH):
        raise ConfigError(f"a schedule goes per update or per epoch, not per {per!r}")
    known = [name for name in inspect.signature(maker).parameters if name not in THE_SERVERS]
    for name in options:
        if name not in known:
            raise ConfigError(f"{maker.__name__} has no option {name!r}; {nearest(name, known)}")
    parameters = inspect.signature(maker).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if missing := [
        n for n in needed if n not in (*THE_SERVERS, "total_steps") and n not in options
    ]:
        raise ConfigError(f"{maker.__name__} needs {', '.join(missing)}")
    return TorchSchedule(maker, options, per)


def _refuse(maker: Any) -> None:
    if not (isinstance(maker, type) and issubclass(maker, LRScheduler)):
        raise ConfigError(
            f"{getattr(maker, '__name__', repr(maker))} is no scheduler: give a class that is "
            f"derived from torch.optim.lr_scheduler.LRScheduler"
        )
    if issubclass(maker, ReduceLROnPlateau) and maker is not ReduceLROnPlateau:
        raise ConfigError(
            f"{maker.__name__} cannot be used: it goes by a score, which servers do not know; "
            f"ReduceLROnPlateau itself, or offbeat.plateau(...), works"
        )
    if maker is LRScheduler:
        raise ConfigError("LRScheduler is abstract: it says nothing of the learning rate")


def _by_score(per: str, options: Mapping[str, Any]) -> Schedule:
    """torch's ReduceLROnPlateau is what decline.py does."""
    if per != UPDATE:
        raise ConfigError("ReduceLROnPlateau goes by scores: leave per out, and say --eval-every")
    known = list(inspect.signature(plateau).parameters)
    for name in options:
        if name not in known:
            raise ConfigError(f"ReduceLROnPlateau has no option {name!r}; {nearest(name, known)}")
    return plateau(**options)


@dataclass(frozen=True, repr=False)
class TorchSchedule(OfRun):
    """One of torch's schedulers by its class, with its options."""

    maker: type[LRScheduler]
    options: Mapping[str, Any]
    per: str
    length: Length = dataclasses.field(default_factory=Length)

    def in_run(self, length: Length) -> "TorchSchedule":
        return dataclasses.replace(self, length=length)

    def index(self, version: int) -> int:
        """How many steps it has made when this version's update begins."""
        return version if self.per == UPDATE else math.floor(self.length.epoch(version))

    @property
    def num_steps(self) -> int | None:
        """How many it makes in the run, the first value counted; None: not known."""
        total = self.length.total
        return None if total is None else 1 + self.index(max(0, total - 1))

    def build(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """torch's scheduler, for an optimizer that is at its beginning."""
        options = {name: _built(value, optimizer) for name, value in self.options.items()}
        named = inspect.signature(self.maker).parameters
        if "total_steps" in named and not options.keys() & {"total_steps", "epochs"}:
            options["total_steps"] = self.num_steps
        make: Any = self.maker
        made: LRScheduler = make(optimizer=optimizer, **options)
        enough, needed = getattr(made, "total_steps", None), self.num_steps
        if enough is not None and needed is not None and enough < needed:
            raise ConfigError(
                f"{self.maker.__name__} ends after {enough} steps, the run has {needed}; leave "
                f"total_steps out, and it is as long as the run"
            )
        return made

    def sets_rates(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's own learning rate makes no difference."""
        total = self.length.total
        last = TRIED if total is None else min(TRIED, max(0, total - 1))
        first, other = (Rates(each, self, total) for each in (optimizer, optimizer.scaled(2.0)))
        tried = sorted({0, min(1, last), last})
        return all(
            a["lr"] == b["lr"] for v in tried for a, b in zip(first.at(v), other.at(v), strict=True)
        )

    def own_rates(self) -> str:
        """The options that say what they are."""
        known = inspect.signature(self.maker).parameters
        return " and ".join(name for name in known if name.endswith("_lr")) or "rate"

    def __call__(self, version: int, total: int | None) -> float:
        """The learning rate of an optimizer that begins with 1."""
        alone = self if self.length.total is not None else self.in_run(Length(total))
        return float(Rates(SGD(lr=1.0), alone, total).at(version)[0]["lr"])

    def __repr__(self) -> str:
        options = {name: _shown(value) for name, value in self.options.items()}
        return as_call(self.maker, {**options, **({"per": EPOCH} if self.per == EPOCH else {})})


def in_run(schedule: Schedule, length: Length) -> Schedule:
    """The schedule of a run that is so long."""
    return schedule.in_run(length) if isinstance(schedule, OfRun) else schedule


class Rates:
    """What each of an optimizer's parameter groups is told before an update, by the groups'
    numbers. One thread asks, for versions that grow: to go back means to begin again."""

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule,
        total: int | None,
        falls: Sequence[int] = (),
    ) -> None:
        """`falls`: the versions from which on a rate that goes by scores is lower by one step;
        they may become more."""
        self._schedule = schedule
        self._falls = falls
        self._total = total
        self._bases = [member.options["lr"] for member in optimizer.members]
        self.only_lr = not isinstance(schedule, TorchSchedule)
        """Nothing but the learning rates change."""
        self._replay = _Replay(schedule, optimizer) if isinstance(schedule, TorchSchedule) else None

    def at(self, version: int) -> list[dict[str, Any]]:
        """For the update that makes `version` + 1."""
        if self._replay is not None:
            return self._replay.at(version)
        if isinstance(self._schedule, Plateau):
            num_falls = sum(fall <= version for fall in self._falls)
            return [{"lr": self._schedule.lr(base, num_falls)} for base in self._bases]
        scale = self._schedule(version, self._total)
        return [{"lr": base * scale} for base in self._bases]


class _Replay:
    """A scheduler of torch's at work on a stand-in."""

    def __init__(self, schedule: TorchSchedule, optimizer: Optimizer) -> None:
        self._schedule = schedule
        real = optimizer.build_probe()
        self._defaults = real.defaults
        self._groups = [
            {key: value for key, value in group.items() if key not in ("params", *NOT_OPTIONS)}
            for group in real.param_groups
        ]
        self._begin()

    def at(self, version: int) -> list[dict[str, Any]]:
        index = self._schedule.index(version)
        last = getattr(self._scheduler, "total_steps", None)
        if last is not None:  # a run may be longer than it was thought to be
            index = min(index, last - 1)
        if index < self._index:
            self._begin()
        while self._index < index:
            self._scheduler.step()
            self._index += 1
        return [
            {key: now[key] for key in group}
            for group, now in zip(self._groups, self._stand_in.param_groups, strict=True)
        ]

    def _begin(self) -> None:
        self._stand_in = _StandIn(self._groups, self._defaults)
        self._scheduler = self._schedule.build(self._stand_in)
        self._stand_in.step()  # torch warns of schedulers that come before the optimizer
        self._index = 0


class _StandIn(torch.optim.Optimizer):
    """Groups like the real one's, and nothing to step."""

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        tables = [{**group, "params": [torch.nn.Parameter(torch.zeros(1))]} for group in groups]
        super().__init__(tables, defaults)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def _built(value: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Schedulers that are given to another are made for the same optimizer."""
    if isinstance(value, TorchSchedule):
        return value.build(optimizer)
    if isinstance(value, list | tuple):
        return [_built(one, optimizer) for one in value]
    return value


def _shown(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_shown(one) for one in value]
    return Shown(schedule_name(value)) if callable(value) else value
