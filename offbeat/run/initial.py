"""What a run begins from instead of its recipe's own weights: --init FILE.safetensors, or --init
RUN for the newest checkpoint of another run.

Read once, by run/making.py before the run begins, and then kept in the run's own folder, where its
processes find it, and a run that goes on.

    initial = read_initial(Path("model.safetensors"), module)
    fill(module, initial.state)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from offbeat.errors import CheckpointError, ConfigError
from offbeat.flat import plain_name
from offbeat.run.checkpoint import newest_checkpoint

MAX_NAMED = 6
"""Of the differences, or of the tensors that a notice is about."""


@dataclass(frozen=True)
class Initial:
    """All tensors that a model's state consists of, with its dtypes."""

    state: Mapping[str, Tensor]
    notices: tuple[str, ...] = ()
    """What a person should know of it."""


def read_initial(source: Path, module: nn.Module) -> Initial:
    """The weights in a file, or in a run's folder, for this model; a ConfigError of one line says
    in what they differ from it."""
    found = {plain_name(name): tensor for name, tensor in _read(source).items()}
    wanted = _state_of(module)
    tied = dict(_known_by_others(found, module))
    told = {name: tensor for name, tensor in wanted.items() if name not in tied}
    if differences := list(_differences(found, told)):
        raise ConfigError(f"the weights in {source} are not this model's: {_some(differences)}")
    found |= tied
    _check_finite(source, found, module)
    state = {name: found[name].to(tensor.dtype) for name, tensor in wanted.items()}
    return Initial(state, tuple(_conversions(found, wanted)))


def fill(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in _state_of(module).items():
            tensor.copy_(state[name])


def _read(source: Path) -> dict[str, Tensor]:
    if not source.exists():
        raise ConfigError(f"init: there is no file or run {source}")
    try:
        if source.is_dir():
            return newest_checkpoint(source / "checkpoints").state_dict()
        return load_file(source)
    except CheckpointError as error:
        raise ConfigError(f"init: {error}; is {source} a run?") from error
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"init: {source} is no safetensors file ({error}); of torch's own formats, which may "
            f"hold programs, none is read: write it with safetensors.torch.save_file"
        ) from error


def _state_of(module: nn.Module) -> dict[str, Tensor]:
    """Its tensors by their plain names; what is no tensor is not kept."""
    return {
        plain_name(name): value
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor) and not name.endswith("_extra_state")
    }


def _known_by_others(
    found: Mapping[str, Tensor], module: nn.Module
) -> Iterator[tuple[str, Tensor]]:
    """Of tensors that have several names, those which a file has under others only."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        by_tensor.setdefault(id(tensor), []).append(plain_name(name))
    for names in by_tensor.values():
        there = next((found[name] for name in names if name in found), None)
        if there is not None:
            yield from ((name, there) for name in names if name not in found)


def _differences(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Iterator[str]:
    yield from (f"{name} is missing" for name in wanted if name not in found)
    yield from (f"{name} is not in the model" for name in found if name not in wanted)
    for name, ours in wanted.items():
        theirs = found.get(name)
        if theirs is None:
            continue
        if theirs.shape != ours.shape:
            yield f"{name} is {list(theirs.shape)} there, {list(ours.shape)} here"
        elif _family(theirs) != _family(ours):
            yield f"{name} is {_dtype(theirs)} there, {_dtype(ours)} here"


def _check_finite(source: Path, found: Mapping[str, Tensor], module: nn.Module) -> None:
    """Of buffers infinities are allowed, which masks have."""
    for name, _ in module.named_parameters():
        if not bool(found[plain_name(name)].isfinite().all()):
            raise ConfigError(f"the weights in {source} are not finite in {plain_name(name)}")


def _conversions(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Iterator[str]:
    changed: dict[str, list[str]] = {}
    for name, ours in wanted.items():
        if found[name].dtype != ours.dtype:
            how = f"{_dtype(found[name])} to {_dtype(ours)}"
            changed.setdefault(how, []).append(name)
    for how, names in changed.items():
        yield f"converted from {how}: {_some(names)}"


def _family(tensor: Tensor) -> str:
    """What is converted into each other."""
    if tensor.dtype == torch.bool or tensor.is_complex():
        return _dtype(tensor)
    return "float" if tensor.is_floating_point() else "int"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _some(names: list[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
