"""The grid of `offbeat bench links`: networks, what is done about them, and seeds.

A setting is a dict of train's options, and nothing else; one whose options this build does not have
is not offered. Imports no torch, since the flags are made of this.

>>> [cell.name for cell in make_cells([Network(mbit=10, delay_ms=20)], ["plain", "local-8"], 1)]
['10mbit-20ms-plain-0', '10mbit-20ms-local-8-0']
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from offbeat.config import options
from offbeat.errors import ConfigError, nearest

PLAIN = "plain"
GRADIENTS_AND_REPLIES = {"compress": "int8", "compress_replies": "bf16"}
"""Either way of a link is as narrow as the other one."""
SETTINGS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "bf16": {"compress": "bf16"},
    "int8": {"compress": "int8"},
    "topk": {"compress": "topk:0.01"},
    "int8+bf16": GRADIENTS_AND_REPLIES,
    "topk+delta": {"compress": "topk:0.01", "compress_replies": "delta"},
    "overlap": {"overlap": True},
    "overlap+int8+bf16": {"overlap": True, **GRADIENTS_AND_REPLIES},
    "local-8": {"local_steps": 8},
    "local-64": {"local_steps": 64},
    "local-8+int8+bf16": {"local_steps": 8, **GRADIENTS_AND_REPLIES},
    "local-8+overlap": {"local_steps": 8, "overlap": True},
    "local-8-sum": {"local_steps": 8, "outer_optimizer": "SGD:lr=1"},
    "diloco-64": {"discipline": "sync", "local_steps": 64},
}
"""Each is plain apply-reply but for these options. A sum: what the workers moved adds up, instead
of each one's counting as one of four."""
RATES = (math.inf, 1000.0, 100.0, 10.0)
"""Mbit/s."""
DELAYS = (0.0, 20.0, 100.0)
"""Milliseconds, there and back."""


@dataclass(frozen=True, kw_only=True)
class Network:
    mbit: float = math.inf
    """A second, each way; inf: what loopback has."""
    delay_ms: float = 0.0
    """There and back."""

    @property
    def name(self) -> str:
        return f"{rate_in_words(self.mbit, '')}-{self.delay_ms:g}ms"

    @property
    def words(self) -> str:
        return f"{rate_in_words(self.mbit)}, {self.delay_ms:g} ms there and back"


BESIDE = Network()
"""What all others are beside: loopback, without a delay."""


def rate_in_words(mbit: float, per_s: str | None = None) -> str:
    """100 Mbit/s; with another `per_s`, a part of a name: 100mbit."""
    if math.isinf(mbit):
        return "loopback"
    number, unit = (mbit / 1000, "Gbit") if mbit >= 1000 else (mbit, "Mbit")
    return f"{number:g} {unit}/s" if per_s is None else f"{number:g}{unit.lower()}{per_s}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run."""

    network: Network
    setting: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.network.name}-{self.setting}-{self.seed}"

    @property
    def options(self) -> dict[str, Any]:
        return SETTINGS[self.setting]

    @property
    def batches_per_gradient(self) -> int:
        return int(self.options.get("local_steps", 1))


def offered(known: Mapping[str, Any] | None = None) -> list[str]:
    """The settings that this build has all options of; `known`: its options."""
    known = options() if known is None else known
    return [name for name, wanted in SETTINGS.items() if wanted.keys() <= known.keys()]


def make_cells(networks: Sequence[Network], settings: Sequence[str], seeds: int) -> list[Cell]:
    """Seed by seed, so that a machine that slows down in between does so for all of them."""
    return [
        Cell(network=network, setting=setting, seed=seed)
        for seed, network, setting in itertools.product(range(seeds), networks, settings)
    ]


def chosen(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """Those whose names one of the patterns matches; all of them, where there is none."""
    for pattern in patterns:
        if not any(fnmatchcase(cell.name, pattern) for cell in cells):
            raise ConfigError(
                f"no cell is like {pattern!r}; {nearest(pattern, [cell.name for cell in cells])}"
            )
    return [
        cell
        for cell in cells
        if not patterns or any(fnmatchcase(cell.name, pattern) for pattern in patterns)
    ]
