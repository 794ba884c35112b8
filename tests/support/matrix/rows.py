"""All rows of the matrix, by their numbers."""

from matrix import (
    clocks,
    ending,
    evaluators,
    fencing,
    files,
    halts,
    partitions,
    processes,
    reading,
    saving,
    soak,
    wire,
)
from matrix.row import Row

MODULES = (processes, saving, partitions, halts, fencing, reading)
MODULES += (clocks, evaluators, ending, soak, wire, files)
_all_of_them: list[Row] = [row for module in MODULES for row in module.ROWS]
ROWS = {row.number: row for row in sorted(_all_of_them, key=lambda row: row.number)}
