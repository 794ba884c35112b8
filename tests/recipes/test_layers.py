"""The fast local response normalisation is torch's own, forwards and backwards."""

import pytest
import torch
from torch import nn

from offbeat.layers import LocalResponseNorm, truncated_normal

CASES = [
    {"size": 9, "alpha": 1e-3, "beta": 0.75, "k": 1.0},
    {"size": 5, "alpha": 1e-2, "beta": 0.5, "k": 2.0},
    {"size": 4, "alpha": 0.3, "beta": 0.75, "k": 1.0},  # an even size reaches further back
    {"size": 1, "alpha": 0.1, "beta": 1.0, "k": 0.5},
]


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_torch(
    case: dict[str, float], form: torch.memory_format
) -> None:
    generator = torch.Generator().manual_seed(0)
    base = 3 * torch.randn(3, 16, 5, 7, generator=generator)
    towards = torch.randn(3, 16, 5, 7, generator=generator)
    size = int(case["size"])
    rest = {key: value for key, value in case.items() if key != "size"}
    found = []
    for norm in (LocalResponseNorm(size, **rest), nn.LocalResponseNorm(size, **rest)):
        x = base.clone(memory_format=form).requires_grad_()
        y = norm(x)
        y.backward(towards)
        assert x.grad is not None
        found.append((y.detach(), x.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_fewer_channels_than_neighbours() -> None:
    x = torch.randn(2, 3, 4, 4)
    ours = LocalResponseNorm(9, alpha=1e-1)(x)
    torch.testing.assert_close(ours, nn.LocalResponseNorm(9, alpha=1e-1)(x))


def test_gradients_are_the_slopes_that_small_steps_find() -> None:
    norm = LocalResponseNorm(3, alpha=0.5, beta=0.75, k=1.0)
    x = torch.randn(1, 4, 2, 2, requires_grad=True)
    step = 1e-2
    towards = torch.randn(1, 4, 2, 2)
    (norm(x) * towards).sum().backward()
    assert x.grad is not None
    for place in ((0, 0, 0, 0), (0, 2, 1, 1), (0, 3, 0, 1)):
        up, down = x.detach().clone(), x.detach().clone()
        up[place] += step
        down[place] -= step
        slope = ((norm(up) - norm(down)) * towards).sum() / (2 * step)
        assert abs(slope.item() - x.grad[place].item()) < 2e-3


def test_it_computes_in_float32_under_autocast() -> None:
    norm = LocalResponseNorm(9, alpha=1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm(torch.randn(1, 16, 3, 3).bfloat16()).dtype == torch.float32


def test_truncated_normal_resamples_beyond_two_deviations() -> None:
    layer = truncated_normal(nn.Linear(300, 300), deviation=0.1, bias=0.25)
    assert layer.weight.abs().max() <= 0.2
    assert abs(layer.weight.std().item() - 0.08796) < 1e-3, "not clamped, which would give 0.0943"
    assert bool((layer.bias == 0.25).all())
    assert truncated_normal(nn.Linear(3, 3, bias=False), deviation=0.1).bias is None
