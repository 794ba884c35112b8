"""All rows of the matrix, by their numbers."""

from matrix import clocks, ending, evaluators, halts, partitions, processes, reading, saving, soak

MODULES = (processes, saving, reading, clocks, evaluators, halts, partitions, ending, soak)
ROWS = {row.number: row for module in MODULES for row in module.ROWS}
