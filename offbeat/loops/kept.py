"""What a script's optimizer keeps for its parameters, on its way to the servers and back.

torch's optimizers keep a dict for each Parameter; servers keep the same for slices of one vector,
under names that aliases.py gives it. A run begins with what rank 0's optimizer has (job.py), and
`state_dict()` in a script is what the servers have at that moment (loop.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.aliases import PREFIX, Alias, pack, unpack
from offbeat.flat import TensorSpec
from offbeat.loops.description import Description
from offbeat.optim import Optimizer
from offbeat.run.checkpoint import Checkpoint
from offbeat.shard import ShardState, segments_of

Kept = Mapping[Any, Mapping[str, Any]]
"""An optimizer's `state`: what it keeps, by Parameter."""


def to_servers(
    kept: Kept,
    parameters: Sequence[nn.Parameter],
    described: Description,
    slices: Sequence[tuple[int, int]],
) -> list[dict[str, Tensor]]:
    """What each server's part of it is; `parameters` are those of the manifest, in its order."""
    if not kept:
        return [{} for _ in slices]
    params = torch.empty(described.manifest.num_elements)
    aliases = _aliases(described, params)
    flat = {
        alias.param: _as_served(kept.get(parameters[index], {}), parameters[index], described)
        for index, alias in aliases.items()
    }
    packed = pack(list(aliases.values()), flat, params.numel())
    shard = ShardState(version=0, tensors={"params": params, **packed}, accounts={})
    return [
        {key: values for key, values in cut.tensors.items() if key.startswith(PREFIX)}
        for cut in _checkpoint(described, [shard]).recut(slices)
    ]


def from_servers(
    shards: Sequence[ShardState], parameters: Sequence[nn.Parameter], described: Description
) -> dict[Any, dict[str, Any]]:
    """What these shards together keep for each Parameter that the optimizer has."""
    size = described.manifest.num_elements
    (whole,) = _checkpoint(described, shards).recut([(0, size)])
    found = {}
    for place, (index, alias) in enumerate(_aliases(described, whole.tensors["params"]).items()):
        parameter, spec = parameters[index], described.manifest.tensors[index]
        kept = unpack(whole.tensors, alias, place, torch.device("cpu"))
        if kept and spec.name in described.optimizer.by_name:
            found[parameter] = {
                name: _as_of(value, parameter, spec) for name, value in kept.items()
            }
    return found


def _checkpoint(described: Description, shards: Sequence[ShardState]) -> Checkpoint:
    return Checkpoint(version=0, manifest=described.manifest, shards=tuple(shards), frozen={})


def _aliases(described: Description, params: Tensor) -> dict[int, Alias]:
    """One for each tensor that is not empty, by its index."""
    segments = segments_of(described.manifest, described.optimizer, 0, params.numel(), whole=True)
    return {segment.tensor: Alias(params, [segment]) for segment in segments}


def _as_served(
    kept: Mapping[str, Any], parameter: nn.Parameter, described: Description
) -> dict[str, Any]:
    """As a server's optimizer has it: of float32, and a single number as a vector of one."""
    over_elements = () if parameter.dim() or not kept else _names_over_elements(described.optimizer)

    def served(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dtype == parameter.dtype:
            value = value.float()
        return value.reshape(1) if name in over_elements else value

    return {name: served(name, value) for name, value in kept.items()}


def _as_of(value: Any, parameter: nn.Parameter, spec: TensorSpec) -> Any:
    if not isinstance(value, Tensor) or not value.dim():
        return value
    value = value.reshape(()) if not spec.shape and value.shape == (1,) else value
    return value.to(parameter.device)


def _names_over_elements(optimizer: Optimizer) -> list[str]:
    """What it keeps for each element: of a single number that looks like what it keeps once."""
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    made = optimizer.members[0].build([param], [0])
    made.step()
    kept = made.state[param].items()
    return [name for name, value in kept if isinstance(value, Tensor) and value.dim()]
