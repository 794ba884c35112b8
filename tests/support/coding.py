"""Two codecs: one that keeps something from gradient to gradient, one whose length varies."""

import dataclasses

import torch
from torch import Tensor

from offbeat.plugins import Option
from offbeat.transport.base import Layout
from offbeat.transport.codec import Codec


def coded(layout: Layout, codec: Codec | None, replies: Codec | None = None) -> Layout:
    """With room for what these make, in shared memory too."""
    sizes = [each and each.capacity(layout.num_elements) for each in (codec, replies)]
    return dataclasses.replace(
        layout, coded_bytes=sizes[0], coded_reply_bytes=sizes[1], codes_always=True
    )


class Halves(Codec):
    """bfloat16; what rounding takes away goes with the next gradient."""

    def __init__(self) -> None:
        self.residual: Tensor | float = 0.0

    def capacity(self, num_elements: int) -> int:
        return 2 * num_elements

    def encode(self, values: Tensor, wire: Tensor) -> int:
        values += self.residual
        halves = wire.view(torch.bfloat16).copy_(values)
        self.residual = values - halves
        return wire.numel()

    def decode(self, wire: Tensor, values: Tensor) -> None:
        if wire.numel() != self.capacity(values.numel()):
            raise ValueError(f"{wire.numel()} bytes for {values.numel()} values")
        values.copy_(wire.view(torch.bfloat16))


class Largest(Codec):
    """The `most` values of the largest size, less those that are zero, each with its place."""

    options = (Option(name="most", default=8, least=1, help="how many values"),)

    def __init__(self, *, most: float = 8) -> None:
        self.most = int(most)

    def capacity(self, num_elements: int) -> int:
        return 8 * min(self.most, num_elements)

    def encode(self, values: Tensor, wire: Tensor) -> int:
        places = values.abs().topk(wire.numel() // 8).indices
        places = places[values[places] != 0]
        pairs = wire[: 8 * len(places)].view(torch.int32).view(2, -1)
        pairs[0].copy_(places)
        pairs[1].view(torch.float32).copy_(values[places])
        return 8 * len(places)

    def decode(self, wire: Tensor, values: Tensor) -> None:
        if wire.numel() % 8:
            raise ValueError(f"{wire.numel()} bytes are no pairs")
        pairs = wire.view(torch.int32).view(2, -1)
        values.zero_()
        values[pairs[0].long()] = pairs[1].view(torch.float32)
