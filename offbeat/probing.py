"""What an optimizer's update of an element depends on, found out by trying. Called when a job is
made.

Servers have slices, and every one an optimizer of its own. Of torch's optimizers it is known
whether they bear that; one of the user's is stepped on two small matrices: together, each alone,
and cut in pieces. Whatever makes a difference in a bit, it depends on. Whether one takes sparse
gradients is tried likewise, torch's own included, since that depends on their options too.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.aliases import check_kept
from offbeat.errors import ConfigError, in_a_line
from offbeat.flat import Manifest
from offbeat.optim import OF_TORCH, WHOLE, Optimizer, complaint
from offbeat.rows import make_sparse, trust_rows

SHAPE = (6, 4)
NUM_STEPS = 3
CUT = 11
"""Where a matrix is cut; in no middle, and between no rows."""
SEEDS = (1, 2)


class Reach(enum.IntEnum):
    """How much an optimizer has to see for the update of one element."""

    ELEMENT = 0
    TENSOR = 1
    MODEL = 2


def reach_of(optimizer: Optimizer) -> Reach:
    """The most that any of its groups needs; a ConfigError for one that cannot be checkpointed."""
    return max(_reach_of_one(member) for member in optimizer.members)


def check_rows(optimizer: Optimizer, manifest: Manifest, *, fused: bool = False) -> None:
    """A ConfigError where a sparse tensor's optimizer takes no rows, or another one's nothing
    else."""
    trained = [s for s in manifest.tensors if not optimizer.by_name or s.name in optimizer.by_name]
    members = optimizer.members
    for spec in trained:
        member = members[optimizer.group_of(spec.name)]
        if member.rows_only and not spec.sparse:
            raise ConfigError(
                f"the optimizer {member.kind} takes sparse gradients only, and that of {spec.name} "
                f"is dense: give it to the embeddings with sparse=True alone, as "
                f"offbeat.AdamW(groups={{'PATTERN': offbeat.optimizer({member.kind!r})}})"
            )
    for index in sorted({optimizer.group_of(spec.name) for spec in trained if spec.sparse}):
        reason = _refusal(members[index], fused)
        if reason:
            name = next(s.name for s in trained if s.sparse and optimizer.group_of(s.name) == index)
            raise ConfigError(
                f"the optimizer {members[index]} cannot be used for {name}, whose gradient is "
                f"sparse: {reason}; these can: SGD without momentum and weight decay, Adagrad, "
                f"SparseAdam, also for it alone (groups={{{name!r}: offbeat.SGD(lr=0.1)}})"
            )


def _refusal(optimizer: Optimizer, fused: bool) -> str:
    """Why it cannot be given one row of a matrix, twice; empty: it can."""
    trust_rows()
    param = nn.Parameter(torch.ones(SHAPE))
    try:
        made = optimizer.build([param], [0], fused=fused)
        for _ in range(2):
            param.grad = make_sparse(torch.tensor([1]), torch.ones(1, SHAPE[1]), SHAPE[0])
            made.step()
    except Exception as error:
        return complaint(error)
    if any(isinstance(kept, Tensor) and kept.is_sparse for kept in made.state[param].values()):
        return "what it keeps is sparse too, which no checkpoint can hold"
    if not bool((param[2:] == 1).all()):
        return "it changes rows that have no gradient"
    return ""


def _reach_of_one(optimizer: Optimizer) -> Reach:
    said = Reach.TENSOR if optimizer.whole_tensors else Reach.ELEMENT
    if optimizer.maker in OF_TORCH.values():
        return Reach.TENSOR if optimizer.maker.__name__ in WHOLE else said
    try:
        with torch.random.fork_rng(devices=[]):
            return max(said, _try_out(optimizer))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the optimizer {optimizer.kind} failed when it was tried out: {in_a_line(error)}"
        ) from error


def _try_out(optimizer: Optimizer) -> Reach:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(2, *SHAPE, generator=generator)
    gradients = torch.randn(NUM_STEPS, 2, *SHAPE, generator=generator)
    together, again = (
        _stepped(optimizer, [*matrices], [[*g] for g in gradients], seed) for seed in SEEDS
    )
    if not torch.equal(together, again):
        return Reach.ELEMENT  # it draws random numbers, so that bits tell nothing
    alone = [
        _stepped(optimizer, [matrices[i]], [[g[i]] for g in gradients], SEEDS[0]) for i in (0, 1)
    ]
    if not torch.equal(together, torch.cat(alone)):
        return Reach.MODEL
    try:
        in_pieces = _stepped(
            optimizer, _pieces(matrices), [_pieces(g) for g in gradients], SEEDS[0]
        )
    except Exception:  # one that wants matrices
        return Reach.TENSOR
    return Reach.ELEMENT if torch.equal(together, in_pieces) else Reach.TENSOR


def _stepped(
    optimizer: Optimizer, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]], seed: int
) -> Tensor:
    """What becomes of these parameters, end to end."""
    torch.manual_seed(seed)
    params = [nn.Parameter(value.clone()) for value in values]
    made = optimizer.build(params, [0] * len(params))
    before = _own_numbers(made)
    for step in gradients:
        for param, gradient in zip(params, step, strict=True):
            param.grad = gradient.clone()
        made.step()
    _check_kept(optimizer, made, before)
    return torch.cat([param.detach().flatten() for param in params])


def _pieces(matrices: Tensor) -> list[Tensor]:
    return [part for m in matrices for part in (m.flatten()[:CUT], m.flatten()[CUT:])]


def _check_kept(
    optimizer: Optimizer, made: torch.optim.Optimizer, before: Mapping[str, Any]
) -> None:
    """A checkpoint has what is kept for each Parameter, and nothing else."""
    for name, value in _own_numbers(made).items():
        if before.get(name) != value:
            raise ConfigError(
                f"the optimizer {optimizer.kind} counts in its {name}, which no checkpoint has: "
                f"keep it in self.state[parameter]"
            )
    for param, kept in made.state.items():
        check_kept(kept, param)


def _own_numbers(made: torch.optim.Optimizer) -> dict[str, Any]:
    """The numbers that it has beside its state: its groups', and attributes of its own."""
    found = {
        f"param_groups[{index}][{key!r}]": value
        for index, group in enumerate(made.param_groups)
        for key, value in group.items()
    }
    found |= {name: value for name, value in vars(made).items() if not name.startswith("_opt")}
    kinds = (bool, int, float, tuple, Tensor)
    return {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in found.items()
        if isinstance(value, kinds)
    }
