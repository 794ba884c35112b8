"""What takes how much of a GPU's memory, said when there is none left.

Called where roles fail (roles/run.py). What a run puts on a GPU on purpose is arithmetic over sizes
that are known; what torch has reserved beyond that is activations, captured steps and spare memory;
and what is taken beyond that is somebody else's:

    raise explained(error, job, ranks=[0, 1])
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.config import AUTO
from offbeat.errors import DeviceMemoryError
from offbeat.flat import FlatModel, Manifest
from offbeat.optim import Optimizer
from offbeat.run.job import Job

NUM_SLOTS = 2
"""For the gradients of each worker; replies arrive in its model."""
UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass(frozen=True)
class Usage:
    """Of a device, in bytes."""

    free: int
    total: int
    reserved: int
    """By torch in this process, used or not."""


def usage_of(device: torch.device) -> Usage:
    free, total = torch.cuda.mem_get_info(device)
    return Usage(free, total, torch.cuda.memory_reserved(device))


def explained(
    error: BaseException,
    job: Job,
    ranks: Sequence[int],
    model: FlatModel | None = None,
    look: Callable[[torch.device], Usage] = usage_of,
) -> BaseException:
    """What to say instead of `error` where a GPU is out of memory, else `error` itself. `ranks`:
    the workers of this process; `model`: one of theirs, where there is one yet."""
    if not isinstance(error, torch.OutOfMemoryError):
        return error
    found = re.search(r"GPU (\d+)", str(error))
    device = torch.device("cuda", int(found[1]) if found else 0)
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    try:
        usage = look(device)
    except RuntimeError:  # nothing can be learnt from this device any more
        return error
    line = describe(
        str(device),
        asked[1] if asked else None,
        usage,
        parts_of(job, device, ranks, model),
        remedies(job, device),
    )
    better = DeviceMemoryError(line)
    better.__cause__ = error
    return better


def describe(
    device: str, asked: str | None, usage: Usage, parts: Mapping[str, int], remedies: Sequence[str]
) -> str:
    """All of it in one line; `parts` are those of the run that are known, in bytes."""
    shares = {
        **parts,
        "activations, captured steps and spare memory": usage.reserved - sum(parts.values()),
        "other processes and CUDA itself": usage.total - usage.free - usage.reserved,
    }
    takes = ", ".join(f"{name} {in_units(size)}" for name, size in shares.items() if size > 0)
    return (
        f"{device} is out of memory: {asked or 'more'} was asked for, {in_units(usage.free)} of "
        f"{in_units(usage.total)} are free; what takes how much there: {takes}; try "
        f"{' or '.join(remedies)}"
    )


def parts_of(
    job: Job, device: torch.device, ranks: Sequence[int], model: FlatModel | None = None
) -> dict[str, int]:
    """What these workers have put on `device`, and the servers that are threads beside them, or
    what they have in place of servers."""
    vector = _num_bytes(job.manifest.num_elements, torch.float32)
    parts: dict[str, int] = {}
    if job.server_device == device:
        sessions = job.config.workers
        updaters = 1 if job.config.chosen.kind.locked else sessions
        parts |= {
            "the servers' parameters": vector,
            "their optimizer state": _state_bytes(job.optimizer, job.manifest),
            "their moving average": vector if job.recipe.ema is not None else 0,
            "their slots": 0 if job.lends_gradients else vector * NUM_SLOTS * sessions,
            "updates in the making": vector * updaters,
        }
    if ranks and not job.facts.served and device in map(job.slot_device, ranks):  # one a process
        parts |= {
            "the parameters": vector,
            "their optimizer state": _state_bytes(job.optimizer, job.manifest),
            "their moving average": vector if job.recipe.ema is not None else 0,
            "sums of gradients": vector,
            "updates in the making": vector,
        }
    replicas = [place for rank in ranks for place in job.devices(rank)].count(device)
    of_model = vector + _beside(job.manifest) if model is None else _model_bytes(model)
    models, gradients = ("model", "gradient") if replicas == 1 else ("models", "gradients")
    parts |= {
        f"{replicas} {models} of workers": replicas * of_model,
        f"{replicas} {gradients}": replicas * vector,
        "training data": 0 if job.train is None else job.train.bytes_on(device),
    }
    first = [rank for rank in ranks if job.devices(rank)[0] == device]
    if job.config.accumulate > 1:
        parts["gradients of several batches"] = len(first) * vector
    if job.inner is not None:
        of_worker = 3 * vector + _state_bytes(job.inner, job.manifest)
        parts["workers' own optimizer state"] = len(first) * of_worker
    return parts


def remedies(job: Job, device: torch.device) -> list[str]:
    """Those that are left; the first is the one that helps most often."""
    config = job.config
    own = (job.slot_device(rank) for rank in range(config.workers))
    found = {
        f"a smaller --batch-size than {config.batch_size}": config.batch_size is not None,
        "--data-device cpu": config.data_device == AUTO,
        "--server-device cpu": device in own,
        "--capture off": config.capture == AUTO,
        f"fewer --workers than {config.workers}": config.workers > 1,
    }
    return [remedy for remedy, is_left in found.items() if is_left]


def in_units(num_bytes: int) -> str:
    for name, size in UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {name}"
    return f"{num_bytes} bytes"


def _state_bytes(optimizer: Optimizer, manifest: Manifest) -> int:
    """What the optimizer keeps for each element."""
    kept = [*optimizer.state_per_element(), 0]  # of those in NO_GROUP, the last, nothing
    elements = sum(spec.numel * kept[optimizer.group_of(spec.name)] for spec in manifest.tensors)
    return _num_bytes(elements, torch.float32)


def _beside(manifest: Manifest) -> int:
    """A model's buffers."""
    return _num_bytes(manifest.num_floats, torch.float32) + _num_bytes(
        manifest.num_ints, torch.int64
    )


def _model_bytes(model: FlatModel) -> int:
    """With what is frozen, and what is no view of the flat vector; each storage once."""
    tensors: list[Tensor] = [model.params, *model.module.parameters(), *model.module.buffers()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _num_bytes(count: int, dtype: torch.dtype) -> int:
    return count * dtype.itemsize
