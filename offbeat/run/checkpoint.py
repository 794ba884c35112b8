"""Checkpoints: RUN/checkpoints/<version>/ with manifest.json and one safetensors file per shard.

A checkpoint is complete or absent: it is written under a temporary name, flushed to the disk, and
renamed. Every file's SHA-256 stands in manifest.json, whose own stands in manifest.sha256; loading
believes nothing else.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from offbeat.accounts import Accounts, accounts_from, accounts_to_json, joined
from offbeat.aliases import DTYPES, PREFIX, is_per_segment, modernised, owner_of, progress
from offbeat.errors import CheckpointError, in_a_line
from offbeat.flat import Manifest
from offbeat.shard import ShardState, tensors_in

FORMAT = 3
FROZEN = "frozen.safetensors"
BUFFERS = {"floats", "ints"}
"""Of a shard's tensors those that the first alone has."""
KINDS = {
    **dict.fromkeys(("params", "ema", "floats"), (torch.float32,)),
    "ints": (torch.int64,),
}
"""What these are made of."""
READABLE_FORMATS = (1, 2, 3)
"""Of the first one every gradient up to the last that was in counts as applied; before the third
the names of an optimizer's state did not say what is kept for each element and what once."""
_NONSENSE = (
    *(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    SafetensorError,
)
"""What is raised where files that are not damaged hold something else than a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    version: int
    manifest: Manifest
    shards: tuple[ShardState, ...]
    frozen: dict[str, Tensor]
    plan: dict[str, Any] = field(default_factory=dict)
    """How the work was cut into shares: what a run that goes on from here compares with its own."""
    optimizer: str | None = None
    """Whose state it holds, by the names of its classes; None: not known."""

    def check_model(self, manifest: Manifest) -> None:
        """Raises a CheckpointError where it is of another model."""
        if self.manifest != manifest:
            raise CheckpointError(
                f"the model is not the one in the checkpoint: {self.manifest.difference(manifest)}"
            )

    @property
    def has_ema(self) -> bool:
        return all("ema" in shard.tensors for shard in self.shards)

    def state_dict(self, *, ema: bool = False) -> dict[str, Tensor]:
        """What `module.load_state_dict` takes; with `ema`, of the moving average where there is
        one."""
        key = "ema" if ema and self.has_ema else "params"
        params = torch.cat([shard.tensors[key] for shard in self.shards])
        first = self.shards[0].tensors
        floats = first.get("floats", torch.empty(0))
        ints = first.get("ints", torch.empty(0, dtype=torch.int64))
        return self.manifest.state_dict(params, floats, ints, self.frozen)

    def recut(self, slices: Sequence[tuple[int, int]]) -> tuple[ShardState, ...]:
        """The same state in other slices, whose journals begin anew. Where shards stood at
        different versions the new ones take the newest, and of each worker the last gradient that
        is in any of them."""
        if list(slices) == self.slices:
            return self.shards
        keys = {key for shard in self.shards for key in shard.tensors} - BUFFERS
        whole = {key: _over_elements(self.shards, key) for key in keys if _is_over_elements(key)}
        by_tensor = self._by_tensor(keys)
        shards = []
        for index, (lo, hi) in enumerate(slices):
            tensors = {key: value[lo:hi].clone() for key, value in whole.items()}
            inside = tensors_in(self.manifest, lo, hi)
            for key, values in by_tensor.items():
                owner = owner_of(key)
                if owner is None:
                    tensors[key] = values[inside].clone()
                elif owner in inside:
                    tensors[key] = values
            if index == 0:
                first = self.shards[0].tensors
                tensors |= {key: first[key] for key in ("floats", "ints") if key in first}
            shards.append(
                ShardState(
                    version=max(s.version for s in self.shards),
                    tensors=tensors,
                    accounts=joined(s.accounts for s in self.shards),
                    falls=self.falls,
                )
            )
        return tuple(shards)

    @property
    def falls(self) -> tuple[int, ...]:
        """As far as any of the shards was told."""
        return max((shard.falls for shard in self.shards), key=len)

    def for_optimizer(self, name: str) -> "Checkpoint":
        """The same for this optimizer, which begins anew where another one's state is held."""
        if self.optimizer in (None, name):
            return self
        shards = [
            dataclasses.replace(
                shard,
                tensors={k: v for k, v in shard.tensors.items() if not k.startswith(PREFIX)},
            )
            for shard in self.shards
        ]
        return dataclasses.replace(self, shards=tuple(shards))

    @property
    def slices(self) -> list[tuple[int, int]]:
        """How the parameters are cut into these shards."""
        sizes = [shard.tensors["params"].numel() for shard in self.shards]
        return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))

    def applied(self) -> dict[int, tuple[int, int]]:
        """Each worker's last gradient that is settled in some shard, as (incarnation, sequence):
        where it goes on."""
        accounts = joined(shard.accounts for shard in self.shards)
        return {worker: (a.incarnation, a.sequence) for worker, a in accounts.items()}

    @property
    def next_incarnation(self) -> int:
        """What whoever goes on from here calls its workers and servers: it is new to the
        accounts."""
        return 1 + max((incarnation for incarnation, _ in self.applied().values()), default=0)

    def batches(self) -> dict[int, int]:
        """How many each worker has gone through with that one."""
        accounts = joined(shard.accounts for shard in self.shards)
        return {worker: account.batches for worker, account in accounts.items()}

    def _by_tensor(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """What the optimizer keeps once per tensor; of one that lies in several shards, as the
        shard has it in which it was stepped most often."""
        found: dict[str, Tensor] = {}
        most = torch.full((len(self.manifest.tensors),), -1.0, dtype=torch.float64)
        for shard, (lo, hi) in zip(self.shards, self.slices, strict=True):
            inside = torch.tensor(tensors_in(self.manifest, lo, hi), dtype=torch.int64)
            steps = progress(shard.tensors, len(inside))
            more = steps > most[inside]
            most[inside[more]] = steps[more]
            for key in keys:
                owner, mine = owner_of(key), shard.tensors.get(key)
                if is_per_segment(key) and mine is not None:
                    values = found.setdefault(key, torch.zeros(len(most), dtype=mine.dtype))
                    values[inside[more]] = mine[more]
                elif owner is not None and mine is not None and owner in inside[more]:
                    found[key] = mine
        return found


def _over_elements(shards: Sequence[ShardState], key: str) -> Tensor:
    """A number for each parameter; an optimizer that was not stepped yet in a shard has zeros."""
    kind = next(shard.tensors[key].dtype for shard in shards if key in shard.tensors)
    parts = [s.tensors.get(key, torch.zeros_like(s.tensors["params"], dtype=kind)) for s in shards]
    return torch.cat(parts)


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Commit a checkpoint into `folder`; returns where it is.

    It is named after its version, or by the next number where that is taken: shard 0 may stand
    still while others go on.
    """
    number = checkpoint.version
    while (final := folder / f"{number:08d}").exists():
        number += 1
    temporary = folder / f".{final.name}.{os.getpid()}.tmp"
    try:
        _clear(folder)
        temporary.mkdir(parents=True)
        files = {f"shard-{k}.safetensors": s.tensors for k, s in enumerate(checkpoint.shards)}
        if checkpoint.frozen:
            files[FROZEN] = checkpoint.frozen
        digests = {name: _write_tensors(temporary / name, t) for name, t in files.items()}
        text = json.dumps(_describe(checkpoint, digests), indent=1)
        _write(temporary / "manifest.json", text.encode())
        _write(temporary / "manifest.sha256", _sha256(text.encode()).encode())
        _sync_folder(temporary)
        temporary.rename(final)
        _sync_folder(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"cannot write {final}: {error.strerror or error}") from error
    return final


def _clear(folder: Path) -> None:
    """What a process left behind that was killed while it wrote; in containers they all have the
    same number. Only one writes at a time."""
    for path in folder.glob(".*.tmp"):
        shutil.rmtree(path)


def shard_digests(path: Path) -> list[str]:
    """The SHA-256 of each shard's file in a checkpoint."""
    described = json.loads(_read(path / "manifest.json"))
    return [described["files"][f"shard-{k}.safetensors"] for k in range(len(described["shards"]))]


def load_checkpoint(path: Path) -> Checkpoint:
    """One checkpoint, every byte of it checked; a CheckpointError names the file that is bad."""
    text = _read(path / "manifest.json")
    if _sha256(text) != _read(path / "manifest.sha256").decode(errors="replace"):
        raise CheckpointError(f"{path / 'manifest.json'} is damaged: its SHA-256 is wrong")
    try:
        return _read_checkpoint(path, json.loads(text))
    except _NONSENSE as error:
        raise CheckpointError(f"{path} makes no sense: {in_a_line(error)}") from error


def _read_checkpoint(path: Path, described: Any) -> Checkpoint:
    """What is in files whose digests are right. Whoever wrote them may have meant ill: then it is
    one of `_NONSENSE`."""
    if described["format"] not in READABLE_FORMATS:
        raise CheckpointError(f"{path} is of format {described['format']!r}; this reads {FORMAT}")
    names = [f"shard-{k}.safetensors" for k in range(len(described["shards"]))]
    if others := set(described["files"]) - {*names, FROZEN}:
        raise ValueError(f"a file {min(others)!r}")
    contents = {}
    for name, digest in described["files"].items():
        raw = _read(path / name)
        if _sha256(raw) != digest:
            raise CheckpointError(f"{path / name} is damaged: its SHA-256 is wrong")
        contents[name] = load_tensors(raw)
    shards = tuple(
        ShardState(
            version=_whole(entry["version"]),
            tensors=_tensors(contents[name], described["format"]),
            accounts=_accounts(entry),
            falls=tuple(map(_whole, entry.get("falls", ()))),
            entry=_whole(entry.get("entry", 0)),
        )
        for name, entry in zip(names, described["shards"], strict=True)
    )
    optimizer = described.get("optimizer")
    found = Checkpoint(
        version=_whole(described["version"]),
        manifest=Manifest.from_json(described["manifest"]),
        shards=shards,
        frozen=contents.get(FROZEN, {}),
        plan=dict(described["plan"]),
        optimizer=None if optimizer is None else str(optimizer),
    )
    _check(found)
    return found


def _whole(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} where a number is counted")
    return number


def _check(found: Checkpoint) -> None:
    """That its parts fit together."""
    manifest, first = found.manifest, found.shards[0].tensors
    for state in found.shards:
        params = state.tensors["params"]
        for name, tensor in state.tensors.items():
            if tensor.dtype not in KINDS.get(name, DTYPES):
                raise ValueError(f"{name} is {tensor.dtype}")
            if _is_over_elements(name) and tensor.shape != (params.numel(),):
                raise ValueError(f"{name} is {list(tensor.shape)}, params {list(params.shape)}")
    sizes = {
        "params": (sum(s.tensors["params"].numel() for s in found.shards), manifest.num_elements),
        "floats": (first["floats"].numel() if "floats" in first else 0, manifest.num_floats),
        "ints": (first["ints"].numel() if "ints" in first else 0, manifest.num_ints),
    }
    for name, (there, needed) in sizes.items():
        if there != needed:
            raise ValueError(f"{there} {name}, and the model has {needed}")
    for (lo, hi), state in zip(found.slices, found.shards, strict=True):
        inside = len(tensors_in(manifest, lo, hi))
        for name, tensor in state.tensors.items():
            if is_per_segment(name) and tensor.shape != (inside,):
                raise ValueError(f"{name} is {list(tensor.shape)}, of {inside} tensors")
    specs = (*manifest.tensors, *manifest.floats, *manifest.ints)
    if lost := set(manifest.aliases.values()) - {spec.name for spec in specs} - found.frozen.keys():
        raise ValueError(f"another name for {min(lost)!r}, which is not there")


def _is_over_elements(key: str) -> bool:
    """Whether there is a number for each parameter."""
    return key not in BUFFERS and not is_per_segment(key) and owner_of(key) is None


def write_weights(path: Path, state: dict[str, Tensor]) -> None:
    """A state_dict as a safetensors file of its own, complete or absent."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # tied tensors are written once per name: the format knows no sharing
    tensors = {name: tensor.clone() for name, tensor in state.items()}
    try:
        _write_tensors(temporary, tensors)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """What `write_weights` wrote."""
    try:
        return load_tensors(_read(path))
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def list_checkpoints(folder: Path) -> list[Path]:
    """The committed checkpoints in a folder, oldest first."""
    return sorted((p for p in folder.glob("*") if p.name.isdigit()), key=lambda p: int(p.name))


def newest_checkpoint(folder: Path) -> Checkpoint:
    """The newest one that is whole."""
    complaints = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return load_checkpoint(path)
        except CheckpointError as error:
            complaints.append(str(error))
    reason = "; ".join(complaints) or "there is none"
    raise CheckpointError(f"no valid checkpoint in {folder}: {reason}")


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep`."""
    for path in list_checkpoints(folder)[:-keep]:
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise CheckpointError(f"cannot remove {path}: {error.strerror or error}") from error


def _describe(checkpoint: Checkpoint, digests: Mapping[str, str]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": checkpoint.version,
        "shards": [
            {
                "version": s.version,
                "accounts": accounts_to_json(s.accounts),
                **({"falls": list(s.falls)} if s.falls else {}),
                **({"entry": s.entry} if s.entry else {}),
            }
            for s in checkpoint.shards
        ],
        "plan": checkpoint.plan,
        "optimizer": checkpoint.optimizer,
        "files": dict(digests),
        "manifest": checkpoint.manifest.to_json(),
    }


def _tensors(tensors: dict[str, Tensor], form: int) -> dict[str, Tensor]:
    return tensors if form >= FORMAT else modernised(tensors)


def _accounts(entry: Mapping[str, Any]) -> Accounts:
    if "accounts" in entry:
        return accounts_from(entry["accounts"])
    return accounts_from({worker: [i, s, s] for worker, (i, s) in entry["applied"].items()})


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    _write(path, raw := _as_bytes(tensors))
    return _sha256(raw)


def digest_of(state: ShardState) -> str:
    """The SHA-256 of the file that it would be in."""
    return _sha256(_as_bytes(state.tensors))


def _as_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    return save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()})


def _write(path: Path, raw: bytes) -> None:
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
