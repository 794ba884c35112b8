"""What the recipes' models need and torch has only slowly, or otherwise."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Layer = TypeVar("Layer", nn.Conv2d, nn.Linear)


def truncated_normal(layer: Layer, *, deviation: float, bias: float = 0.0) -> Layer:
    """Give the layer weights from a normal distribution that is cut off at two deviations, and
    biases (where it has any) of `bias`."""
    nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
    if layer.bias is not None:
        nn.init.constant_(layer.bias, bias)
    return layer


class LocalResponseNorm(nn.Module):
    """Each element over a power of what its `size` neighbouring channels hold, as torch's module of
    the same name computes it: x / (k + alpha / size * sum of squares) ** beta.

    The sum over neighbours is a product with a banded matrix, and so is its gradient: several times
    as fast on a CPU as torch's own way over padded slices, best in channels_last.

        >>> norm = LocalResponseNorm(9, alpha=1e-3, beta=0.75, k=1.0)
        >>> x = torch.randn(2, 64, 6, 6)
        >>> torch.allclose(norm(x), nn.LocalResponseNorm(9, alpha=1e-3, beta=0.75, k=1.0)(x))
        True
    """

    def __init__(
        self, size: int, *, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
    ) -> None:
        super().__init__()
        self.size = size
        self.alpha = alpha
        self.beta = beta
        self.k = k
        self._bands: dict[tuple[int, torch.device], Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # squares and powers want float32
            result: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
                x.float(), self._band(x), self.beta, self.k
            )
        return result

    def extra_repr(self) -> str:
        return f"{self.size}, alpha={self.alpha}, beta={self.beta}, k={self.k}"

    def _band(self, x: Tensor) -> Tensor:
        """[c, c], with alpha / size where a channel (row) counts among another's (column's)
        neighbours: as torch has it, size // 2 before it and (size - 1) // 2 behind."""
        key = (x.shape[1], x.device)
        if key not in self._bands:
            channels = torch.arange(x.shape[1], device=x.device)
            distance = channels[:, None] - channels[None, :]
            near = (distance >= -(self.size // 2)) & (distance <= (self.size - 1) // 2)
            self._bands[key] = near.float() * (self.alpha / self.size)
        return self._bands[key]


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, band: Tensor, beta: float, k: float) -> Tensor:
        scale = _over_neighbours(x * x, band).add_(k)
        ctx.save_for_backward(x, band, scale)
        ctx.beta = beta
        return _inverse_power(scale, beta).mul_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        x, band, scale = ctx.saved_tensors
        direct = _inverse_power(scale, ctx.beta).mul_(gradient)
        through = _over_neighbours((direct * x).div_(scale), band.t())
        return direct.addcmul_(through, x, value=-2 * ctx.beta), None, None, None


def _over_neighbours(values: Tensor, band: Tensor) -> Tensor:
    """[b, c, ...] -> the same, each channel's neighbours summed up."""
    if values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last):
        return (values.permute(0, 2, 3, 1) @ band).permute(0, 3, 1, 2)
    return (band.t() @ values.flatten(2)).view(values.shape)


def _inverse_power(scale: Tensor, beta: float) -> Tensor:
    """scale ** -beta, in memory of its own."""
    if beta == 0.75 and scale.device.type == "cpu":  # several times as fast there as a power
        root = scale.rsqrt()
        return root.sqrt().mul_(root)
    return scale.pow(-beta)
