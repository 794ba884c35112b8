"""Where the first number is none, in a step that came to NaN: `offbeat replay RUN --until-nan`."""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from offbeat.data.batches import StepBatch, leaves, not_finite

MOST_NAMES = 5


@contextlib.contextmanager
def watching(module: nn.Module) -> Iterator[list[str]]:
    """What is written down of a forward pass in here: the modules whose output has numbers that are
    none, in the order in which they were through."""
    seen: list[str] = []
    with contextlib.ExitStack() as stack:
        for name, part in module.named_modules():
            hook = part.register_forward_hook(functools.partial(_look, seen, name))
            stack.callback(hook.remove)
        yield seen


def _look(seen: list[str], name: str, module: nn.Module, given: Any, output: Any) -> None:
    floats = [t for t in leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    count = sum(tensor.numel() for tensor in floats)
    bad = count - sum(int(tensor.isfinite().sum()) for tensor in floats)
    if bad:
        kind = type(module).__name__
        seen.append(f"{name} ({kind})" if name else f"the whole model ({kind})")
        seen[-1] += f": {bad:,} of {count:,} numbers"


def largest(module: nn.Module) -> str:
    """Of all parameters."""
    most = {
        name: float(p.detach().abs().max()) for name, p in module.named_parameters() if p.numel()
    }
    name = max(most, key=lambda name: (math.isnan(most[name]), most[name]))
    return f"the largest number of its parameters is {most[name]:g}, in {name}"


def told(batch: StepBatch, seen: Sequence[str], loss: float, module: nn.Module) -> list[str]:
    """What comes first: parameters, the batch, a module's output, the loss, a gradient."""
    lines = []
    if names := _bad(module, "data"):
        lines.append(f"parameters that are not finite: {names}")
    bad, count = not_finite(batch.batch)
    if bad:
        lines.append(f"{bad:,} of the {count:,} numbers in batch {batch.number} are not finite")
    if seen:
        lines.append(f"the first output that is not finite is that of {seen[0]}")
    if not math.isfinite(loss):
        lines.append(f"its loss is {loss}")
    if not lines and (names := _bad(module, "grad")):
        lines.append(f"its loss is {loss:g}, and the gradient is not finite in: {names}")
    return lines


def _bad(module: nn.Module, what: str) -> str:
    """The names of parameters whose numbers, or gradients, are not all finite."""
    found = []
    for name, parameter in module.named_parameters():
        tensor = getattr(parameter, what)
        if tensor is not None and not bool(tensor.isfinite().all()):
            found.append(f"{name} ({int((~tensor.isfinite()).sum()):,} of {tensor.numel():,})")
    more = [f"and {len(found) - MOST_NAMES} more"] if len(found) > MOST_NAMES else []
    return ", ".join([*found[:MOST_NAMES], *more])
