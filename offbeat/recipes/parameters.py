"""Recipes with parameters: a function that makes one, as `def recipe(width: int = 64) -> Recipe`.

`--set width=128`, or `set={"width": 128}`, says with which values; base.py calls this for whoever
loads a recipe. A value that came as text is read as what the parameter is: by its annotation, else
by its default, else as what it looks like.
"""

import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from offbeat.errors import OffbeatError, RecipeError, in_a_line, nearest

NAMES = {
    type(None): "none",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}
"""The kinds of values that there are; text is read as the first of them that it can be."""
BY_NAME = {"None": type(None), "bool": bool, "int": int, "float": float, "str": str}
TRUE_OR_FALSE = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
Value = None | bool | int | float | str


def read_parameters(
    function: Callable[..., Any], name: str, given: Mapping[str, Any]
) -> dict[str, Value]:
    """The values to call `function` with; `name` is what the user calls it."""
    parameters = _signature(function).parameters
    known = {key: p for key, p in parameters.items() if p.kind not in _VARIADIC}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in given:
        if key not in known and not takes_any:
            hint = nearest(key, known) if known else "it takes none"
            raise RecipeError(f"{name} has no parameter {key!r}; {hint}")
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in given:
            raise RecipeError(f"{name} needs a value for {key}: --set {key}=VALUE")
    return {key: _read(key, value, _kinds_of(known.get(key))) for key, value in given.items()}


def call_with(function: Callable[..., Any], name: str, values: Mapping[str, Value]) -> Any:
    try:
        return function(**values)
    except OffbeatError:
        raise
    except (Exception, SystemExit) as error:
        raise RecipeError(f"the recipe {name} could not be made: {in_a_line(error)}") from error


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:  # an annotation of what is imported for type checkers only
        return inspect.signature(function)


def _kinds_of(parameter: inspect.Parameter | None) -> list[type]:
    """What a value may be; nothing: anything."""
    if parameter is None:
        return []
    annotation, default = parameter.annotation, parameter.default
    if annotation is parameter.empty:
        return [type(default)] if type(default) in NAMES and default is not None else []
    if isinstance(annotation, str):
        kinds = [BY_NAME.get(part.strip(), object) for part in annotation.split("|")]
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = list(typing.get_args(annotation))
    else:
        kinds = [annotation]
    is_known = all(kind in NAMES for kind in kinds)
    return [kind for kind in NAMES if kind in kinds] if is_known else []


def _read(key: str, value: Any, kinds: list[type]) -> Value:
    for kind in kinds or NAMES:
        try:
            return _as(kind, value)
        except (ValueError, OverflowError):
            continue
    wanted = " or ".join(NAMES[kind] for kind in kinds or NAMES)
    raise RecipeError(f"the parameter {key} must be {wanted}, not {value!r}")


def _as(kind: type, value: Any) -> Value:
    """Raises a ValueError where it is no such thing."""
    is_text = isinstance(value, str)
    if kind is type(None) and (value is None or (is_text and value.lower() == "none")):
        return None
    if kind is bool and is_text and value.lower() in TRUE_OR_FALSE:
        return TRUE_OR_FALSE[value.lower()]
    if kind is float and (is_text or type(value) in (int, float)):
        if math.isfinite(number := float(value)):
            return number
    elif kind is int and is_text:
        return int(value)
    elif type(value) is kind and kind in (bool, int, str):
        return typing.cast("Value", value)
    raise ValueError
