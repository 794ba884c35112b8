"""Copies of gradients whose workers were answered before these go in.

A worker that has its reply writes its next gradient, and the one after that into the same memory.
Called by sessions.py, under the shard's lock, and on a device in the order that the lock gives:

    copies.keep(record, gradient)      # before the reply is made
    record.copy                        # makes an update
    copies.give_back(record)           # when that is told
"""

import dataclasses
from typing import Any

from torch import Tensor

from offbeat.pushes import PushRecord
from offbeat.rules import Gradient

TENSORS = ("values", "floats", "ints", "base", "rates")
"""What a gradient has in memory that is not its own, but for rows."""


class Copies:
    """Owns their memory, and keeps what is given back for the next ones: it is as much as ever was
    in use at once. On a device it could go to nobody else before all streams are through with
    it."""

    def __init__(self) -> None:
        self._spare: list[Gradient] = []

    def keep(self, record: PushRecord, gradient: Gradient | None) -> None:
        """None: it was refused, and there is nothing to keep."""
        if gradient is None:
            return
        # of rows there are as many as it happens to have, never on a device; which ones they are
        # is its own already
        fits = not gradient.ids and self._spare
        record.copy = _copied(gradient, self._spare.pop() if fits else None)

    def give_back(self, record: PushRecord) -> None:
        if record.copy is not None and not record.copy.ids:
            self._spare.append(record.copy)
        record.copy = None


def _copied(gradient: Gradient, spare: Gradient | None) -> Gradient:
    """`spare`: one of the same shard's, whose memory is free."""
    copies: dict[str, Any] = {}
    for name in TENSORS:
        theirs: Tensor | None = getattr(gradient, name)
        mine: Tensor | None = getattr(spare, name, None)
        if theirs is not None:
            mine = theirs.clone() if mine is None else mine.copy_(theirs)
            copies[name] = mine
    return dataclasses.replace(gradient, **copies)
