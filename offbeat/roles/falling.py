"""When the learning rate falls that goes by a score (decline.py): the master's part of it.

How often it is to fall the evaluator writes into the run's folder; here a version is found at which
all servers can do so, since none of them is there yet. Those versions are facts of the run from
then on: servers are told them, keep them with their shards, and are given them again when they come
back, or the run goes on.
"""

from collections.abc import Sequence

from offbeat.run.rundir import RunFolder

AHEAD = 1
"""So many times as far ahead as the servers came between two looks at them, which is longer than it
takes to tell them."""


class Falls:
    def __init__(self, folder: RunFolder, versions: Sequence[int] = ()) -> None:
        self.versions = list(versions)
        """From each of them on the rate is lower by one step."""
        self._folder = folder
        self._seen: int | None = None

    def know(self, versions: Sequence[int]) -> None:
        """What a checkpoint has, where that is more."""
        self.versions = max(self.versions, list(versions), key=len)

    def look(self, version: int) -> int | None:
        """The furthest server is at this version; returns that of a fall which is new."""
        before, self._seen = self._seen, version
        if self._folder.num_falls() <= len(self.versions):
            return None
        ahead = 1 + AHEAD * max(0, version - (version if before is None else before))
        self.versions.append(max([version + ahead, *self.versions]))
        return self.versions[-1]
