"""Aliases: Parameters that are views of a slice, and what a torch optimizer keeps for them.

shard.py runs optimizers on them. What an optimizer keeps for each of its Parameters becomes tensors
with names, which say how to put it back, whatever it was and however the slices are cut then:

    optimizer.element.NAME      shaped as the Parameter: over the slice
    optimizer.scalar.NAME       a tensor of one number: one for each segment
    optimizer.int.NAME          a number of Python's, likewise (also float, bool, none)
    optimizer.has.KIND.NAME     which segments have it
    optimizer.TENSOR.NAME       of any other shape: of the tensor with this index
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.errors import ConfigError
from offbeat.flat import TensorSpec

PREFIX = "optimizer."
ELEMENT, SCALAR, HAS = "element", "scalar", "has"
NUMBERS = {"bool": torch.bool, "int": torch.int64, "float": torch.float64, "none": torch.bool}
"""What Python's own numbers are kept as, by the names of their types."""

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""What tensors can be made of that travel and are kept."""

State = Mapping[str, Any]
"""What torch keeps for one Parameter."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one tensor that lies in a slice: elements lo to hi of the slice."""

    tensor: int
    group: int
    lo: int
    hi: int
    spec: TensorSpec | None = None
    """What it looks like, where the optimizer has to see it whole."""
    width: int = 0
    """Of a sparse tensor how many elements a row has: the optimizer sees rows. 0: it is dense."""


class Alias:
    """A Parameter that is a view of some neighbouring segments of a slice."""

    def __init__(self, storage: Tensor, segments: Sequence[Segment]) -> None:
        self.segments = list(segments)
        self.lo = segments[0].lo
        self.hi = segments[-1].hi
        self.view = self.of(storage)
        self.param = nn.Parameter(self.view)

    def of(self, flat: Tensor) -> Tensor:
        """This part of a vector over the slice; a single number as a vector of one, which tells
        what is kept for it from what is kept once."""
        return self.shaped(flat[self.lo : self.hi])

    def shaped(self, part: Tensor) -> Tensor:
        """So many elements as the optimizer sees them."""
        spec, width = self.segments[0].spec, self.segments[0].width
        if width:
            return part.view(-1, width)
        return part if spec is None or not spec.shape else part.as_strided(spec.shape, spec.stride)

    def cut(self, value: Any, whole: "Alias") -> Any:
        """This alias's share of what is kept for `whole`, in memory of its own."""
        if not isinstance(value, Tensor):
            return value
        is_shared = value.shape != whole.view.shape
        return (value if is_shared else value[self.lo - whole.lo : self.hi - whole.lo]).clone()


def pack(aliases: Sequence[Alias], kept: Mapping[Any, State], num_elements: int) -> dict[str, Any]:
    """What is kept for all aliases, in the CPU's memory."""
    num_segments = sum(len(alias.segments) for alias in aliases)
    packed: dict[str, Tensor] = {}
    first = 0
    for alias in aliases:
        places = slice(first, first + len(alias.segments))
        first = places.stop
        for name, value in kept.get(alias.param, {}).items():
            kind = _kind_of(name, value, alias.view)
            if kind is None:
                copies = {f"{PREFIX}{s.tensor}.{name}": _copy(value) for s in alias.segments}
                packed.update(copies)
                continue
            key = f"{kind}.{name}"
            size = num_elements if kind == ELEMENT else num_segments
            dtype = value.dtype if isinstance(value, Tensor) else NUMBERS[kind]
            flat = packed.setdefault(PREFIX + key, torch.zeros(size, dtype=dtype))
            has = packed.setdefault(f"{PREFIX}{HAS}.{key}", torch.zeros(num_segments))
            has[places] = 1
            if kind == ELEMENT:
                alias.of(flat).copy_(value)
            else:
                flat[places] = 0 if value is None else value
    return packed


def unpack(
    packed: Mapping[str, Tensor], alias: Alias, place: int, scalars_on: torch.device
) -> dict[str, Any]:
    """What is kept for one alias, whose first segment is the one at `place`."""
    found: dict[str, Any] = {}
    device = alias.view.device
    for kind, name, values in parts_of(packed):
        if kind == str(alias.segments[0].tensor):
            found[name] = values.to(device, copy=True)
        if kind.isdecimal() or not packed[f"{PREFIX}{HAS}.{kind}.{name}"][place]:
            continue
        if kind == ELEMENT:
            found[name] = torch.empty_like(alias.view, dtype=values.dtype).copy_(alias.of(values))
        elif kind == SCALAR:
            found[name] = values[place].to(scalars_on, copy=True)
        else:
            found[name] = None if kind == "none" else values[place].item()
    return found


def check_kept(kept: State, view: Tensor) -> None:
    """A ConfigError for what could not be packed."""
    for name, value in kept.items():
        _kind_of(name, value, view)


def parts_of(packed: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, name and values of what is kept."""
    for key, values in packed.items():
        kind, _, name = key.removeprefix(PREFIX).partition(".")
        if key.startswith(PREFIX) and kind != HAS:
            yield kind, name, values


def is_per_segment(key: str) -> bool:
    """Whether there is one number for each segment under this key."""
    kind = key.removeprefix(PREFIX).partition(".")[0]
    return key.startswith(PREFIX) and kind in (SCALAR, HAS, *NUMBERS)


def owner_of(key: str) -> int | None:
    """Whose it is, of what is kept for one tensor; None: it is not of that kind."""
    kind = key.removeprefix(PREFIX).partition(".")[0]
    return int(kind) if key.startswith(PREFIX) and kind.isdecimal() else None


def differ(packed: Mapping[str, Tensor]) -> bool:
    """Whether the segments' own values are not all the same, so that none can stand for all."""
    return any(
        owner_of(key) is not None or (is_per_segment(key) and bool((v != v[0]).any()))
        for key, v in packed.items()
    )


def progress(tensors: Mapping[str, Tensor], num_segments: int) -> Tensor:
    """How far each segment is: its number of steps where there is one, else whether it began."""
    most = torch.zeros(num_segments, dtype=torch.float64)
    for key, values in tensors.items():
        if is_per_segment(key) and (f".{HAS}." in key or key.endswith(".step")):
            most = torch.maximum(most, values.double())
    return most


def modernised(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As it is kept now, out of a checkpoint of a time when names did not say what is what."""
    once = ("step", "mu_product", "mu", "eta")
    old = {key.removeprefix(PREFIX): v for key, v in tensors.items() if key.startswith(PREFIX)}
    found = {key: values for key, values in tensors.items() if not key.startswith(PREFIX)}
    begun = old.get("step", old.get("begun"))
    for name, values in old.items():
        if name == "begun" or begun is None:
            continue
        key = f"{SCALAR if name in once else ELEMENT}.{name}"
        found[PREFIX + key] = values
        found[f"{PREFIX}{HAS}.{key}"] = (begun != 0).float()
    return found


class Beginning(dict[str, Any]):
    """What an optimizer keeps for one Parameter, and how each part of it was when it was made."""

    def __init__(self, made: Mapping[str, Any]) -> None:
        super().__init__(made)
        self.first = {key: _own(value) for key, value in made.items()}

    def __setitem__(self, key: str, value: Any) -> None:
        self.first.setdefault(key, _own(value))
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *made: Any, **more: Any) -> None:
        for key, value in dict(*made, **more).items():
            self[key] = value


def _kind_of(name: str, value: Any, view: Tensor) -> str | None:
    """How it is kept; None: as it is, for one tensor."""
    if isinstance(value, Tensor) and value.dtype in DTYPES:
        if value.shape == view.shape:
            return ELEMENT
        return SCALAR if value.dim() == 0 else None
    kind = "none" if value is None else type(value).__name__
    if kind not in NUMBERS:
        raise ConfigError(
            f"the optimizer keeps a {kind} as {name!r}, which no checkpoint can hold: it takes "
            f"numbers and real tensors"
        )
    return kind


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
