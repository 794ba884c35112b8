"""What a flag can name: a class of Offbeat's by its name, or one of the user's by where it is.

    bounded:2                    its first option is 2
    sync:1:round_timeout=5       another one by its name
    package.module:Class:2       path/file.py:Class

Disciplines and rules are such classes. Each says itself what it is called and what it can be told;
configuration, flags and reports read it from there. Imports no torch.
"""

import functools
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from offbeat.errors import ConfigError, nearest
from offbeat.importing import import_file, import_module


@dataclass(frozen=True, kw_only=True)
class Option:
    """Something that a plug-in can be told: an argument of its class, and a number."""

    name: str
    """Of the argument."""
    default: float
    help: str
    whole: bool = True
    """Whole numbers only, or infinity where `most` allows it."""
    least: float = 0
    above: bool = False
    """Above `least`, not `least` itself."""
    most: float = math.inf
    unit: str = ""
    """What the argument's name ends with, and the flag's does not: round_timeout_s."""
    always_shown: bool = False
    """Labels say it even where it is the default."""

    @property
    def flag(self) -> str:
        return self.name.removesuffix(f"_{self.unit}") if self.unit else self.name

    def read(self, text: str) -> float:
        """The value in a short form; a ConfigError where it is none."""
        try:
            if not math.isnan(value := float(text)):
                return value
        except ValueError:
            pass  # it is said below
        kind = "a number" if self.most == math.inf else "a whole number"
        raise ConfigError(f"{self.flag} must be {kind}, not {text!r}")

    def check(self, value: float) -> None:
        """A ConfigError where the class could do nothing with this value."""
        fits = value > self.least if self.above else value >= self.least
        whole = not self.whole or value == math.inf or float(value).is_integer()
        if fits and whole and value <= self.most:
            return
        if self.whole and self.most == math.inf:
            allowed = f"{self.least:g}, {self.least + 1:g}, {self.least + 2:g}, ... or inf"
            raise ConfigError(f"{self.flag} must be {allowed}, not {value:g}")
        if not fits:
            bound = f"above {self.least:g}" if self.above else f"at least {self.least:g}"
            raise ConfigError(f"{self.flag} must be {bound}, not {value:g}")
        raise ConfigError(f"{self.flag} must be at most {self.most:g}, not {value:g}")


class Plugin:
    """A class that a flag can name."""

    name: ClassVar[str]
    """What it is called in flags and reports; where it does not say, as its class."""
    options: ClassVar[tuple[Option, ...]] = ()
    """What it can be told; NAME:VALUE gives the first one."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "name" not in vars(cls):
            cls.name = cls.__name__


Kind = TypeVar("Kind", bound=Plugin)
Named = TypeVar("Named")
"""Whatever a name can lead to: a Plugin, or an optimizer."""


@dataclass(frozen=True)
class Choice(Generic[Kind]):
    """A class, where it is found, and what it is told: a value for each of its options."""

    kind: type[Kind]
    source: str
    values: Mapping[str, float]

    @classmethod
    def default(cls, kind: type[Kind]) -> "Choice[Kind]":
        """One of Offbeat's own, as it is when it is told nothing."""
        return cls(kind, kind.name, {option.name: option.default for option in kind.options})

    @property
    def label(self) -> str:
        """In a word: bounded:2."""
        label = self.kind.name
        for place, option in enumerate(self.kind.options):
            value = self.values[option.name]
            if value == option.default and not option.always_shown:
                continue
            if place == 0:
                label += f":{value:g}"
            elif option.unit:
                label += f", {value:g} {option.unit}"
            else:
                label += f", {option.flag} {value:g}"
        return label


def parse(text: str, built_in: Mapping[str, type[Named]]) -> tuple[str, list[str]]:
    """What names the class in `text`, and what follows it."""
    first, *rest = text.split(":")
    is_elsewhere = first.endswith(".py") or "." in first or "/" in first
    if first in built_in or not rest or not (is_elsewhere or rest[0].isidentifier()):
        return first, rest
    return f"{first}:{rest[0]}", rest[1:]


def find(
    source: str, built_in: Mapping[str, type[Named]], base: type[Any], what: str
) -> type[Named]:
    """The class that `source` names, or a ConfigError of one line."""
    if source in built_in:
        return built_in[source]
    module_name, colon, class_name = source.rpartition(":")
    if not colon:
        raise ConfigError(
            f"unknown {what} {source!r}; {nearest(source, built_in)} (your own: path/file.py:Class)"
        )
    if module_name.endswith(".py"):
        module = _import_once(Path(module_name).absolute(), what)
    else:
        module = import_module(module_name, ConfigError)
    known = {k: v for k, v in vars(module).items() if _is_usable(v, base)}
    if class_name not in known:
        hint = nearest(class_name, known) if known else f"there is no {what} in it"
        raise ConfigError(f"{module_name} has no {what} {class_name!r}; {hint}")
    found: type[Named] = known[class_name]
    return found


def _is_usable(value: Any, base: type[Any]) -> bool:
    return isinstance(value, type) and issubclass(value, base) and not inspect.isabstract(value)


@functools.cache
def _import_once(path: Path, what: str) -> Any:
    """A class must be the same one each time that it is asked for."""
    return import_file(path, what, ConfigError)


def read_options(kind: type[Plugin], source: str, parts: list[str]) -> dict[str, float]:
    """What the parts of a short form say, by the options' flags: VALUE for the first option,
    NAME=VALUE for any."""
    given: dict[str, float] = {}
    by_flag = {option.flag: option for option in kind.options}
    for place, part in enumerate(parts):
        flag, equals, value = part.partition("=")
        if not equals and (place or not kind.options):
            most = "one number" if kind.options else "no number"
            raise ConfigError(f"{source} takes {most} behind its name, not {':'.join(parts)!r}")
        if not equals:
            flag, value = kind.options[0].flag, part
        if flag not in by_flag:
            raise ConfigError(f"{source} has no option {flag!r}; {nearest(flag, by_flag)}")
        given[flag] = by_flag[flag].read(value)
    return given
