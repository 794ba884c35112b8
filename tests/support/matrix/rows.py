"""All rows of the matrix, by their numbers."""

from matrix import processes

ROWS = {row.number: row for module in (processes,) for row in module.ROWS}
