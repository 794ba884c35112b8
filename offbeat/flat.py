"""Any nn.Module as one flat vector: the manifest that says where each tensor lies, and the views.

The parameters that train are laid end to end, in the order of `named_parameters`, as float32.
That vector is what servers keep and what travels. In a worker, float32 parameters are views into
it, so a reply is usable as it arrives; parameters of another dtype are cast from it and their
gradients to it.

    >>> flat = FlatModel(torch.nn.Linear(3, 2))
    >>> [(t.name, t.offset, t.numel) for t in flat.manifest.tensors]
    [('weight', 0, 6), ('bias', 6, 2)]
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.errors import ModelError

PROTOCOL = 6
"""Raised with every change of what travels between worker and server."""
MAX_NAMED = 4
"""Of the tensors that a notice is about."""
COMPILED = "_orig_mod"
"""What `torch.compile` calls the module that it wraps."""
MAX_KNOWN = 4
"""Sets of gradient slots whose layout is remembered; a worker has two, used in turn."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor and its place in a flat vector; `stride` tells the order its elements lie in
    there."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    offset: int
    numel: int
    sparse: bool = field(default=False, compare=False)
    """Its gradient is a few of its rows. A checkpoint is the same either way."""

    @property
    def width(self) -> int:
        """How many elements a row of a sparse tensor has; 0: it is dense."""
        return self.shape[1] if self.sparse else 0

    def view(self, flat: Tensor) -> Tensor:
        """This tensor as a view of `flat`, which holds all of them."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class RowPart:
    """Of a sparse tensor's gradient the rows that there are, each once and in ascending order."""

    ids: Tensor
    values: Tensor


Part = Tensor | RowPart | None
"""A tensor's gradient: its elements as they lie in memory, or rows; None: it has none."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Ordered names, shapes, dtypes and offsets of all that a model's state consists of; the names
    are those of the model before it was compiled."""

    tensors: tuple[TensorSpec, ...]
    """What trains and travels."""
    floats: tuple[TensorSpec, ...]
    """Float buffers, such as BatchNorm's running mean."""
    ints: tuple[TensorSpec, ...]
    """Integer buffers, such as the number of batches tracked."""
    frozen: tuple[str, ...]
    """Parameters that do not train: kept, never pushed."""
    aliases: dict[str, str]
    """Further names of tied tensors, by the name under which each is stored."""

    @property
    def num_elements(self) -> int:
        return _size(self.tensors)

    @property
    def num_floats(self) -> int:
        return _size(self.floats)

    @property
    def num_ints(self) -> int:
        return _size(self.ints)

    @functools.cached_property
    def is_sparse(self) -> bool:
        """Whether the gradient of any tensor is a few of its rows."""
        return any(spec.sparse for spec in self.tensors)

    @property
    def rounded(self) -> tuple[str, ...]:
        """What has more digits in the model than the servers keep, which is float32's."""
        specs = (*self.tensors, *self.floats)
        return tuple(spec.name for spec in specs if spec.dtype == "float64")

    @property
    def rounded_in_words(self) -> str:
        """For a person, as a run begins; empty: nothing is."""
        if not (names := self.rounded):
            return ""
        more = len(names) - MAX_NAMED
        named = ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
        return f"rounded to float32's precision, though float64 in the model: {named}"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Manifest":
        """Raises a ValueError, TypeError or KeyError where that is no manifest."""

        def specs(key: str) -> tuple[TensorSpec, ...]:
            found = tuple(
                TensorSpec(**{**v, "shape": tuple(v["shape"]), "stride": tuple(v["stride"])})
                for v in values[key]
            )
            _check(found)
            return found

        names = [*values["frozen"], *values["aliases"], *dict(values["aliases"]).values()]
        if not all(isinstance(name, str) for name in names):
            raise TypeError("a name that is no text")
        return cls(
            tensors=specs("tensors"),
            floats=specs("floats"),
            ints=specs("ints"),
            frozen=tuple(values["frozen"]),
            aliases=dict(values["aliases"]),
        )

    def fingerprint(self, optimizer: str) -> str:
        """What worker and server must agree on before anything is pushed."""
        agreed = {"manifest": self.to_json(), "optimizer": optimizer, "protocol": PROTOCOL}
        return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()

    def difference(self, other: "Manifest") -> str:
        """The first thing in which another one is not like this one, in words."""
        for what in ("tensors", "floats", "ints"):
            mine: tuple[TensorSpec, ...] = getattr(self, what)
            theirs: tuple[TensorSpec, ...] = getattr(other, what)
            for a, b in itertools.zip_longest(mine, theirs):
                if a != b:
                    return f"{_in_words(a)} there, {_in_words(b)} here"
        return "which parameters are frozen or tied"

    def in_short(self) -> list[list[Any]]:
        """Names, shapes and kinds of what is trained: enough to say what differs."""
        return [[spec.name, list(spec.shape), spec.dtype] for spec in self.tensors]

    def state_dict(
        self, params: Tensor, floats: Tensor, ints: Tensor, frozen: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """A plain state_dict out of flat vectors; every tensor owns its memory, tied ones share
        it."""
        state = dict(frozen)
        for specs, flat in ((self.tensors, params), (self.floats, floats), (self.ints, ints)):
            for spec in specs:
                dtype = getattr(torch, spec.dtype)
                state[spec.name] = spec.view(flat).detach().to(dtype, copy=True)
        for alias, name in self.aliases.items():
            state[alias] = state[name]
        return state


def _check(specs: Sequence[TensorSpec]) -> None:
    """That tensors which somebody describes lie one after the other, each within its place."""
    offset = 0
    for spec in specs:
        numbers = (*spec.shape, *spec.stride, spec.offset, spec.numel)
        if not isinstance(spec.name, str) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"{spec} is no tensor")
        if not isinstance(getattr(torch, spec.dtype, None), torch.dtype):
            raise ValueError(f"{spec.dtype!r} is nothing that a tensor is made of")
        last = sum((n - 1) * step for n, step in zip(spec.shape, spec.stride, strict=True))
        if (
            spec.offset != offset
            or math.prod(spec.shape) != spec.numel
            or (spec.numel and last >= spec.numel)
        ):
            raise ValueError(f"{spec.name} is not where it can be")
        if spec.sparse and len(spec.shape) < 2:
            raise ValueError(f"{spec.name} has no rows")
        offset += spec.numel


def plain_name(name: str) -> str:
    """What a tensor or module is called where `torch.compile` wraps nothing."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


def describe(module: nn.Module, *, anywhere: bool = False) -> Manifest:
    """The manifest of `module`, or a ModelError that says why it cannot be trained. `anywhere`: it
    may be on a GPU already."""
    persistent = {plain_name(name) for name in module.state_dict(keep_vars=True)}
    trained: list[tuple[str, Tensor]] = []
    floats: list[tuple[str, Tensor]] = []
    ints: list[tuple[str, Tensor]] = []
    frozen: list[str] = []
    for own_name, parameter in module.named_parameters():
        name = plain_name(own_name)
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"parameter {name} has no shape yet: run a batch through the model first"
            )
        if parameter.is_meta:
            raise _has_no_values(f"parameter {name}")
        if not anywhere and parameter.device.type != "cpu":
            raise ModelError(
                f"parameter {name} is on {parameter.device}; model() must return it on the CPU"
            )
        if not parameter.requires_grad:
            frozen.append(name)
        elif parameter.is_complex():
            raise ModelError(f"parameter {name} is complex; only real ones can be trained")
        else:
            trained.append((name, parameter))
    for own_name, buffer in module.named_buffers():
        name = plain_name(own_name)
        if buffer.is_meta:
            raise _has_no_values(f"buffer {name}")
        if name not in persistent:
            continue
        if buffer.is_complex():
            raise ModelError(f"buffer {name} is complex; register it with persistent=False")
        (floats if buffer.is_floating_point() else ints).append((name, buffer))
    if not trained:
        raise ModelError("the model has no trainable parameter: nothing requires a gradient")
    if not sum(p.numel() for _, p in trained):
        raise ModelError("the model's trainable parameters are all empty")
    return Manifest(
        tensors=_lay_out(trained, _sparse_names(module)),
        floats=_lay_out(floats),
        ints=_lay_out(ints),
        frozen=tuple(frozen),
        aliases=_aliases(module, persistent),
    )


def _has_no_values(what: str) -> ModelError:
    return ModelError(
        f"{what} is on meta, where it has no values: model.to_empty(device='cpu'), and what "
        f"initialises it, give it some"
    )


class FlatModel:
    """A module whose trainable parameters live in, or are cast from, one flat float32 vector.

    `params` belongs to this object, and may be written by a server's reply while the worker waits
    for it; `refresh()` must be called after that. One thread uses a FlatModel at a time.
    """

    def __init__(self, module: nn.Module, manifest: Manifest | None = None) -> None:
        self.module = module
        self.manifest = manifest or describe(module)
        self._buffer_names = {plain_name(name): name for name, _ in module.named_buffers()}
        by_name = self._by_name()
        self.parameters = [by_name[spec.name] for spec in self.manifest.tensors]
        self.params = torch.empty(self.manifest.num_elements)
        self._views = [spec.view(self.params) for spec in self.manifest.tensors]
        self._known_pieces: dict[tuple[int, ...], list[list[tuple[Tensor, int, int]]]] = {}
        self.is_a_view = all(spec.dtype == "float32" for spec in self.manifest.tensors)
        """Whether parameters show what `params` holds without being converted."""
        self.keeps_gradients = False
        """Whether those that were taken stay in the parameters too."""
        with torch.no_grad():
            for view, parameter in zip(self._views, self.parameters, strict=True):
                view.copy_(parameter)
        self.refresh()

    def move(self, device: torch.device) -> None:
        """From now on module and parameters live on `device`."""
        self.module.to(device)
        self.adopt(self.params.to(device))

    def adopt(self, params: Tensor) -> None:
        """From now on the parameters live in `params`, which a server writes its replies to."""
        self.params = params
        self._views = [spec.view(params) for spec in self.manifest.tensors]
        self.refresh()

    def refresh(self) -> list[str]:
        """Make the module's parameters show what `params` holds now.

        Returns the names of parameters that had been given other memory since the last time (by
        `.to()`, an assigning load, `p.data = ...`): what the servers hold is the truth, so they are
        put back.
        """
        moved = []
        for spec, parameter, view in zip(
            self.manifest.tensors, self.parameters, self._views, strict=True
        ):
            if parameter.data_ptr() == view.data_ptr() and parameter.dtype == view.dtype:
                continue
            dtype = getattr(torch, spec.dtype)
            with torch.no_grad():
                if spec.dtype != "float32" and parameter.dtype == dtype:
                    parameter.copy_(view)
                else:
                    parameter.data = view.to(dtype)
                    moved.append(spec.name)
        return moved

    def check_identity(self) -> None:
        """Name a parameter that was replaced by another object: nothing would train it any more."""
        current = self._by_name()
        for spec, parameter in zip(self.manifest.tensors, self.parameters, strict=True):
            if current.get(spec.name) is not parameter:
                raise ModelError(
                    f"parameter {spec.name} was replaced in training; change it in place instead"
                )

    def take_gradient(self, slices: Sequence[Tensor]) -> list[bool]:
        """Write the gradient into `slices`, which together make up the flat vector, and let go of
        it.

        Returns, for each tensor of the manifest, whether it got a gradient; where it got none,
        zeros are written.
        """
        present = []
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for spec, parameter, pieces in zip(
            self.manifest.tensors, self.parameters, self._pieces(slices), strict=True
        ):
            gradient = parameter.grad
            present.append(gradient is not None)
            if gradient is None:
                for target, _, _ in pieces:
                    target.zero_()
                continue
            if not self.keeps_gradients:
                parameter.grad = None
            flat = _flattened(gradient, spec)
            for target, start, end in pieces:
                targets.append(target)
                sources.append(flat if end - start == spec.numel else flat[start:end])
        if targets:
            torch._foreach_copy_(targets, sources)
        return present

    def take_parts(self) -> list[Part]:
        """The gradient of each tensor of the manifest, of sparse ones the rows that it has; and let
        go of them."""
        parts: list[Part] = []
        for spec, parameter in zip(self.manifest.tensors, self.parameters, strict=True):
            gradient = parameter.grad
            if not self.keeps_gradients:
                parameter.grad = None
            if gradient is None:
                parts.append(None)
            else:
                parts.append(_rows(gradient) if spec.sparse else _flattened(gradient, spec))
        return parts

    def touched(self) -> dict[int, Tensor]:
        """Which rows of sparse tensors have a gradient, by the tensors' indices."""
        return {
            index: _rows(gradient).ids
            for index, (spec, parameter) in enumerate(
                zip(self.manifest.tensors, self.parameters, strict=True)
            )
            if spec.sparse and (gradient := parameter.grad) is not None
        }

    def drop_gradient(self) -> None:
        """Let go of it, as if it had never been computed."""
        for parameter in self.parameters:
            parameter.grad = None

    def _pieces(self, slices: Sequence[Tensor]) -> list[list[tuple[Tensor, int, int]]]:
        """For each tensor, where its elements from start to end go. A connection's slots are the
        same over and over again, so this is worked out once for each of them."""
        key = tuple(piece.data_ptr() for piece in slices)
        if key not in self._known_pieces:
            if len(self._known_pieces) >= MAX_KNOWN:
                self._known_pieces.clear()  # connections come and go
            bounds = _bounds(slices)
            found = []
            for spec in self.manifest.tensors:
                pieces = []
                for target, (lo, hi) in zip(slices, bounds, strict=True):
                    start, end = max(lo, spec.offset), min(hi, spec.offset + spec.numel)
                    if start < end:
                        inside = target[start - lo : end - lo]
                        pieces.append((inside, start - spec.offset, end - spec.offset))
                found.append(pieces)
            self._known_pieces[key] = found
        return self._known_pieces[key]

    def write_buffers(self, floats: Tensor, ints: Tensor) -> None:
        """Copy the module's buffers out."""
        for specs, flat in ((self.manifest.floats, floats), (self.manifest.ints, ints)):
            for spec in specs:
                spec.view(flat).copy_(self._buffer(spec))

    def read_buffers(self, floats: Tensor, ints: Tensor) -> None:
        """Copy buffers into the module."""
        for specs, flat in ((self.manifest.floats, floats), (self.manifest.ints, ints)):
            for spec in specs:
                self._buffer(spec).copy_(spec.view(flat))

    def frozen(self) -> dict[str, Tensor]:
        """Copies of the parameters that do not train."""
        by_name = self._by_name()
        return {name: by_name[name].detach().to("cpu", copy=True) for name in self.manifest.frozen}

    def _by_name(self) -> dict[str, nn.Parameter]:
        return {plain_name(name): p for name, p in self.module.named_parameters()}

    def _buffer(self, spec: TensorSpec) -> Tensor:
        """Looked up each time: a module may assign it anew."""
        return self.module.get_buffer(self._buffer_names[spec.name]).detach()


def _in_words(spec: TensorSpec | None) -> str:
    return "nothing" if spec is None else f"{spec.name} {list(spec.shape)} {spec.dtype}"


def _size(specs: Sequence[TensorSpec]) -> int:
    return specs[-1].offset + specs[-1].numel if specs else 0


def _sparse_names(module: nn.Module) -> set[str]:
    """The parameters that every layer which has them looks up, with sparse gradients: one that is
    the weight of another layer too has a dense one."""
    kinds = nn.Embedding | nn.EmbeddingBag
    found: dict[int, tuple[str, bool]] = {}
    for own_name, part in module.named_modules(remove_duplicate=False):
        for key, parameter in part.named_parameters(own_name, recurse=False):
            name, so_far = found.get(id(parameter), (plain_name(key), True))
            found[id(parameter)] = name, so_far and isinstance(part, kinds) and part.sparse
    return {name for name, is_sparse in found.values() if is_sparse}


def _lay_out(
    named: Sequence[tuple[str, Tensor]], sparse: Collection[str] = ()
) -> tuple[TensorSpec, ...]:
    specs = []
    offset = 0
    for name, tensor in named:
        specs.append(
            TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                stride=_dense_stride(tensor),
                dtype=str(tensor.dtype).removeprefix("torch."),
                offset=offset,
                numel=tensor.numel(),
                sparse=name in sparse and tensor.numel() > 0 and tensor.is_contiguous(),
            )
        )
        offset += tensor.numel()
    return tuple(specs)


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides where it fills its memory without gaps (channels_last does), else
    plain ones."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()


def _aliases(module: nn.Module, persistent: set[str]) -> dict[str, str]:
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for own_name, tensor in named:
        name = plain_name(own_name)
        original = first.setdefault(id(tensor), name)
        if original != name and name in persistent:
            aliases[name] = original
    return aliases


def _flattened(gradient: Tensor, spec: TensorSpec) -> Tensor:
    """The gradient's elements in the order in which its parameter's lie in memory."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().to_dense()  # which sums in the order of `_rows`
    if gradient.stride() != spec.stride:
        laid_out = torch.empty_strided(
            spec.shape, spec.stride, dtype=gradient.dtype, device=gradient.device
        )
        gradient = laid_out.copy_(gradient)
    return gradient.as_strided((spec.numel,), (1,))


def _rows(gradient: Tensor) -> RowPart:
    """Of one that is dense after all every row."""
    if not gradient.is_sparse:
        return RowPart(torch.arange(len(gradient), device=gradient.device), gradient)
    gradient = gradient.coalesce()
    return RowPart(gradient.indices()[0], gradient.values())


def _bounds(slices: Sequence[Tensor]) -> list[tuple[int, int]]:
    bounds = []
    lo = 0
    for piece in slices:
        bounds.append((lo, lo + piece.numel()))
        lo += piece.numel()
    return bounds
