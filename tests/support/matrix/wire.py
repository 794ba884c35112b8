"""The rows of what comes over connections."""

from . import doors, exchanges, frames, lengths, refusals

ROWS = (*exchanges.ROWS, *refusals.ROWS, *frames.ROWS, *lengths.ROWS, *doors.ROWS)
