"""`offbeat bench train`: what is left of a machine's gradients per second.

Each discipline, beside the ceiling and beside torch's DistributedDataParallel; `offbeat bench
peers` (peers.py) has more that it is beside.
"""

from collections.abc import Sequence
from typing import Any

from offbeat.bench.contenders import CEILING, DDP
from offbeat.bench.rig import rates_of
from offbeat.bench.tables import Row


def train(*, disciplines: Sequence[str], **options: Any) -> list[Row]:
    """Gradients per second of the ceiling, of each discipline and of DDP; `options` are those of
    `rates_of`."""
    rates = rates_of((CEILING, *disciplines, DDP), **options)
    rows: list[Row] = []
    for name, found in rates.items():
        row: Row = {"": name, "gradients/s": found}
        row["of the ceiling"] = [a / b for a, b in zip(found, rates[CEILING], strict=True)]
        row["times ddp"] = [a / b for a, b in zip(found, rates[DDP], strict=True)]
        rows.append(row)
    return rows
