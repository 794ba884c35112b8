"""A small language model: it learns to write Python, one character at a time.

    offbeat train --recipe examples/char_lm.py:recipe --discipline bounded:2
    python examples/char_lm.py

The text is the source of a few modules of Python's own library, so nothing has to be downloaded.
The metric is not an accuracy but bits per character: 7 would be guessing, and lower is better.
"""

import importlib
import inspect
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import offbeat

CONTEXT = 64
NUM_SYMBOLS = 128  # ASCII
MODULES = ["argparse", "dataclasses", "logging", "pathlib", "random", "textwrap", "threading"]


class CharModel(nn.Module):
    """A recurrent network whose input and output share one embedding matrix."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_SYMBOLS, width)
        self.recur = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, NUM_SYMBOLS)
        self.out.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        """[batch, time] symbols -> [batch, time, symbols] scores of what comes next."""
        hidden, _ = self.recur(self.embed(text))
        return self.out(hidden)


class Windows(torch.utils.data.Dataset):
    """Pieces of a text, each with the same piece one character further on."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return piece[:-1], piece[1:]


def data(config: offbeat.TrainConfig) -> tuple[Windows, Windows]:
    sources = [inspect.getsource(importlib.import_module(name)) for name in MODULES]
    raw = "".join(sources).encode("ascii", errors="replace")
    text = torch.tensor(list(raw))
    cut = len(text) * 9 // 10
    return Windows(text[:cut]), Windows(text[cut:])


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def bits_per_character(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[float, int]:
    num_characters = batch[1].numel()
    return loss(model, batch).item() * num_characters / math.log(2), num_characters


recipe = offbeat.Recipe(
    model=CharModel,
    data=data,
    loss=loss,
    metric=bits_per_character,
    optimizer=offbeat.Adam(lr=3e-3),
    batch_size=32,
    epochs=3,
)

if __name__ == "__main__":
    result = offbeat.train(recipe)
    print(f"{result.test_metric:.2f} bits per character")
