"""The master keeps the run's books: it asks the servers for snapshots and commits checkpoints.

A thread of its own beside rank 0's training, so that nobody waits for the disk. It asks every shard
for its state at the same version; in sync that is the same round everywhere.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path

from torch import Tensor

from offbeat.checkpoint import Checkpoint, ShardState, prune_checkpoints, save_checkpoint
from offbeat.errors import CheckpointError
from offbeat.events import EventLog
from offbeat.job import Job
from offbeat.roles.server import Server, Snapshot

POLL_S = 0.2
SNAPSHOT_TIMEOUT_S = 60.0


class Master:
    """Commits a checkpoint every `eval_every` updates, and when asked to: at the start and the end.

    `committed` is told of every one that is worth scoring: all but the one at the start.
    """

    def __init__(
        self,
        job: Job,
        servers: Sequence[Server],
        folder: Path,
        frozen: dict[str, Tensor],
        *,
        committed: Callable[[Path], None],
        events: EventLog,
        log: logging.Logger,
        clock: Callable[[], float],
    ) -> None:
        self.job = job
        self._servers = servers
        self._folder = folder
        self._frozen = frozen
        self._committed = committed
        self._events = events
        self.log = log
        self._clock = clock
        self._finished = threading.Event()
        self._last_versions: list[int] = []

    def run(self) -> None:
        """Commit at every multiple of `eval_every`, until `finish`.

        A shard that is past the version asked for answers with the one it is at. Where the shards
        then disagree they were asked too late: ask further ahead, instead of keeping a mixture.
        """
        every = self.job.config.eval_every
        ahead = 1
        while every and not self._finished.is_set():
            newest = max(server.shard.version for server in self._servers)
            due = -(-(newest + ahead) // every) * every
            snapshots = self._snapshots_at(due)
            if snapshots is None:
                return
            if _agree(snapshots) or self.job.config.discipline == "lock-free":
                ahead = 1
                self._try_to_commit(snapshots)
            else:
                ahead *= 2

    def finish(self) -> None:
        """Stop waiting for further versions: there will be none."""
        self._finished.set()

    def commit_now(self) -> None:
        """Commit the shards as they are, unless that is done; raises CheckpointError if it
        fails."""
        wishes = [server.snapshot() for server in self._servers]
        snapshots = [wish.result(SNAPSHOT_TIMEOUT_S) for wish in wishes]
        if [s.version for s in snapshots] != self._last_versions:
            self._commit(snapshots)

    def _snapshots_at(self, version: int) -> list[Snapshot] | None:
        """Every shard at `version`; None: `finish` was called before they all got there."""
        wishes = [server.snapshot(version) for server in self._servers]
        while wait(wishes, timeout=POLL_S).not_done:
            if self._finished.is_set():
                return None
        return [wish.result() for wish in wishes]

    def _try_to_commit(self, snapshots: Sequence[Snapshot]) -> None:
        try:
            self._commit(snapshots)
        except CheckpointError as error:  # training goes on; the next one may succeed
            self.log.error("%s", error)

    def _commit(self, snapshots: Sequence[Snapshot]) -> None:
        for index, snapshot in enumerate(snapshots):
            if not bool(snapshot.state["params"].isfinite().all()):
                raise CheckpointError(
                    f"server {index} holds parameters that are not finite at version "
                    f"{snapshot.version}; the checkpoints before it are kept"
                )
        checkpoint = Checkpoint(
            version=snapshots[0].version,
            manifest=self.job.manifest,
            shards=tuple(
                ShardState(version=s.version, tensors=s.state, applied=s.applied) for s in snapshots
            ),
            frozen=self._frozen,
        )
        path = save_checkpoint(self._folder, checkpoint)
        prune_checkpoints(self._folder, self.job.config.keep)
        self._last_versions = [s.version for s in snapshots]
        at_s = self._clock()
        self._events.record("run", phase="checkpoint", version=checkpoint.version, at_s=at_s)
        self.log.info("committed %s", path.name)
        if checkpoint.version:
            self._committed(path)


def _agree(snapshots: Sequence[Snapshot]) -> bool:
    return len({snapshot.version for snapshot in snapshots}) == 1
