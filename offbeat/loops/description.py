"""What a script's model and optimizer are, as the servers have to know them: RUN/model.json.

Written by rank 0 when its script calls `distribute`; read by the servers and compared by the other
ranks. It is JSON: nothing of the user's is pickled.
"""

import inspect
import itertools
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offbeat.errors import ConnectionClosedError, ModelError
from offbeat.flat import Manifest, describe, plain_name
from offbeat.loops.script import class_in_script
from offbeat.optim import NOT_OPTIONS, Optimizer, with_numbers
from offbeat.run.rundir import RunFolder

POLL_S = 0.05
KEPT = ("kind", "options", "groups", "by_name")
"""What there is to know of an optimizer."""


@dataclass(frozen=True, kw_only=True)
class Description:
    manifest: Manifest
    optimizer: Optimizer
    script: str | None = None
    """The file that defines the optimizer's class, where that is the script itself."""

    def to_json(self) -> dict[str, Any]:
        optimizer = {name: getattr(self.optimizer, name) for name in KEPT}
        content = {"manifest": self.manifest.to_json(), "optimizer": optimizer}
        return {**content, "script": self.script}

    def write(self, folder: RunFolder) -> None:
        folder.write_json(folder.model, self.to_json())

    @classmethod
    def read(cls, folder: RunFolder) -> "Description":
        return cls.from_json(folder.read_json(folder.model))

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Description":
        told, script = found["optimizer"], found["script"]
        return cls(
            manifest=Manifest.from_json(found["manifest"]),
            optimizer=Optimizer(**told, given=_given(told["kind"], script)),
            script=script,
        )

    def is_like(self, other: "Description") -> bool:
        """Whether nothing differs but numbers among the options, which travel with each gradient
        and may have been changed since: by a schedule, or by what was loaded."""
        return self._without_numbers() == other._without_numbers()

    def agreed(self, known: "Description") -> "Description":
        """What the run goes by: what is known of it, unless this is something else, which the first
        server that is asked refuses."""
        return known if known.is_like(self) else self

    def _without_numbers(self) -> tuple[Any, ...]:
        optimizer = self.optimizer
        options = [with_numbers(m.options, itertools.repeat(0.0)) for m in optimizer.members]
        return self.manifest, optimizer.kind, optimizer.by_name, options

    @classmethod
    def wait_for(cls, folder: RunFolder, stop: threading.Event) -> "Description":
        """Until rank 0 has written it; a ConnectionClosedError where the run ends before."""
        while not folder.model.exists():
            if stop.wait(POLL_S):
                raise ConnectionClosedError("told to stop before the model was known", over=True)
        return cls.read(folder)


def describe_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Description:
    """Raises a ModelError or a ConfigError where they cannot be trained."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"distribute takes a model and its optimizer, not a {type(model)}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ModelError(f"distribute takes one of torch's optimizers, not a {type(optimizer)}")
    manifest = describe(model, anywhere=True)
    missing = set(option_names(optimizer)) - set(optimizer.param_groups[0])
    if missing and not _is_of_torch(class_of(optimizer)):
        raise ModelError(
            f"the servers cannot know the optimizer's option {min(missing)}: an optimizer of your "
            f"own keeps its options in its parameter groups"
        )
    first, *others = [options_of(optimizer, group) for group in optimizer.param_groups]
    kind, script = _whereabouts(class_of(optimizer))
    return Description(
        manifest=manifest,
        script=script,
        optimizer=Optimizer(
            kind=kind,
            given=_given(kind, script),
            options=first,
            groups={str(index): options for index, options in enumerate(others, start=1)},
            by_name=_by_name(model, optimizer),
        ),
    )


def options_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Of a parameter group what its class was told, as plain values."""
    return {name: plain(group[name]) for name in option_names(optimizer) if name in group}


def class_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """What the script made; a distributed one's own says what that was."""
    made: type[torch.optim.Optimizer] = getattr(optimizer, "_offbeat_class", type(optimizer))
    return made


def option_names(optimizer: torch.optim.Optimizer) -> list[str]:
    known = inspect.signature(class_of(optimizer).__init__).parameters
    return [name for name in known if name not in ("self", "params", *NOT_OPTIONS)]


def plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _whereabouts(kind: type[torch.optim.Optimizer]) -> tuple[str, str | None]:
    """Where the servers find it: in torch, in a module of the user's, or in the script itself."""
    if _is_of_torch(kind):
        return kind.__name__, None
    if kind.__module__ != "__main__":
        return f"{kind.__module__}:{kind.__qualname__}", None
    return kind.__qualname__, str(sys.modules["__main__"].__file__)


def _given(kind: str, script: str | None) -> type[torch.optim.Optimizer] | None:
    """The class, where its name alone does not lead to it."""
    return None if script is None else class_in_script(script, kind)


def _is_of_torch(kind: type[torch.optim.Optimizer]) -> bool:
    return getattr(torch.optim, kind.__name__, None) is kind


def _by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """In which group each of the model's parameters is; those in none are not trained."""
    names = {id(p): plain_name(name) for name, p in model.named_parameters()}
    members: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ModelError(
                    "the optimizer has a parameter that is not the model's: give distribute the "
                    "module that has all of them (an nn.ModuleList holds several)"
                )
            if parameter.requires_grad:
                members[names[id(parameter)]] = index
    if not members:
        raise ModelError("the optimizer has no parameter of the model that requires a gradient")
    return members
