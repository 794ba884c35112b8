"""What the CPU wants to know of a step that a device computes: its loss, whether its gradient is
usable, and where it was clipped by its norm what that was.

All of it is worked out by the device, behind the gradient, and comes over by itself: nobody asks
for a number, which would stop everything until it is there. Before a gradient is pushed its worker
waits for the device once, and then it is here as well. towers.py has one:

    reading.take(loss, gradient)     # told to the device, as a part of the step
    reading.sent()
    loss, is_usable = reading.wait()
"""

import math

import torch
from torch import Tensor

from offbeat.streams import make_mark


class Reading:
    """`device`: where losses and gradients are."""

    def __init__(self, device: torch.device) -> None:
        numbers = torch.zeros(3, pin_memory=device.type == "cuda")
        self._numbers, self._norm = numbers[:2], numbers[2]
        self._mark = make_mark(device)

    def take(self, loss: Tensor, gradient: Tensor) -> None:
        """As `shard.usable` does, of the gradient the square of its norm."""
        squares = torch.dot(gradient, gradient)
        self._numbers.copy_(torch.stack([loss.float(), squares]), non_blocking=True)

    def take_norm(self, norm: Tensor) -> None:
        self._norm.copy_(norm, non_blocking=True)

    def sent(self) -> None:
        """Nothing more is told that `wait` has to wait for."""
        self._mark.set()

    def wait(self) -> tuple[float, bool]:
        """The loss, and whether an optimizer can work with the gradient."""
        self._mark.wait()
        loss, squares = self._numbers.tolist()
        return loss, math.isfinite(squares)

    @property
    def norm(self) -> float:
        """What was taken of it, after `wait`."""
        return self._norm.item()
