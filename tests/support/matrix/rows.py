"""All rows of the matrix, by their numbers."""

from matrix import processes, saving

ROWS = {row.number: row for module in (processes, saving) for row in module.ROWS}
