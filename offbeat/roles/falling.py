"""When the learning rate falls that goes by a score (decline.py): the master's part of it.

How often it is to fall the evaluator writes into the run's folder; here a version is found at which
all servers can do so, since none of them is there yet. Those versions are facts of the run from
then on: servers are told them, keep them with their shards, and are given them again when they come
back, or the run goes on.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from offbeat.run.rundir import RunFolder

AHEAD = 1
"""So many times as far ahead as the servers came between two looks at them, which is longer than it
takes to tell them."""
NUM_STRIDES = 2
"""How many of the last such stretches count, the longest of them: in one of two that follow each
other servers that stood still may just have begun."""


class Falls:
    def __init__(self, folder: RunFolder, under_way: int = 1) -> None:
        """`under_way`: how many updates may have begun that are in no version yet; each has its
        rate."""
        self.versions: list[int] = []
        """From each of them on the rate is lower by one step."""
        self._folder = folder
        self._under_way = under_way
        self._seen: int | None = None
        self._strides: deque[int] = deque(maxlen=NUM_STRIDES)

    def know(self, each: Iterable[Sequence[int]]) -> None:
        """What checkpoints have, or servers were told by the master before this one, where that is
        more."""
        self.versions = max([self.versions, *map(list, each)], key=len)

    def look(self, version: int) -> int | None:
        """The furthest server is at this version; returns that of a fall which is new. There is
        none before it is known how quick they are: one that is due waits."""
        before, self._seen = self._seen, version
        if before is not None and version > before:
            self._strides.append(version - before)
        if len(self._strides) < NUM_STRIDES or len(self._folder.read_falls()) <= len(self.versions):
            return None
        ahead = self._under_way + AHEAD * max(self._strides)
        self.versions.append(max([version + ahead, *self.versions]))
        return self.versions[-1]
