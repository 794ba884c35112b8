"""What a master that takes another one's place in a cluster goes on with: RUN/cluster.json.

Servers and workers outlive their master there, and count their lives by what it tells them: so no
number may come twice, whoever dies, and when. What is told next is on the disk before it is told.

    mine = Succession.begin(folder, num_servers=2, incarnation=3)
    mine.epochs         # what each server is to call its next life
    mine.incarnation    # the one of rank 0, which is the master's own
    mine.remember(0, epoch=4), mine.write()
"""

import secrets
import threading
from collections.abc import Sequence
from typing import Any, Self

from offbeat.cluster.bootstrap import INCARNATIONS_PER_EPOCH
from offbeat.run.rundir import RunFolder


class Succession:
    """Used by several threads of the master: the books are not alone in connecting to servers."""

    def __init__(
        self,
        folder: RunFolder,
        run: str,
        epochs: Sequence[int],
        incarnation: int,
        got: dict[int, list[Any]],
    ) -> None:
        self.run = run
        self.incarnation = incarnation
        self.epochs = list(epochs)
        self.got = got
        """What of each server's events is here: the number of the last answer that brought any."""
        self._folder = folder
        self._lock = threading.Lock()

    @classmethod
    def begin(cls, folder: RunFolder, num_servers: int, incarnation: int = 0) -> Self:
        """Take the place of whoever was there, if anybody was. `incarnation` is new to the run's
        checkpoints: server 0 numbers those of workers by its own epoch, so that these begin above
        all that any server was given."""
        before = folder.read_json(folder.cluster) if folder.cluster.exists() else {}
        epochs = list(before.get("epochs", ()))
        if len(epochs) != num_servers:
            first = -(-incarnation // INCARNATIONS_PER_EPOCH)
            epochs = [max([first, *epochs])] * num_servers
        mine = cls(
            folder,
            str(before.get("run") or secrets.token_hex(8)),
            epochs,
            max(incarnation, before.get("incarnation", 0)),
            {int(shard): number for shard, number in before.get("got", {}).items()},
        )
        mine.write()
        return mine

    def remember(self, shard: int, epoch: int) -> None:
        """A server has said which life it is in."""
        with self._lock:
            is_new = self.epochs[shard] <= epoch
            self.epochs[shard] = max(self.epochs[shard], epoch + 1)
        if is_new:
            self.write()

    def write(self) -> None:
        """For the next one: each number one above what is told from here on."""
        with self._lock:
            state = {
                "run": self.run,
                "epochs": [epoch + 1 for epoch in self.epochs],
                "incarnation": self.incarnation + 1,
                "got": dict(self.got),
            }
            self._folder.write_json(self._folder.cluster, state)
