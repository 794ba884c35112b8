"""The master keeps the run's books: it asks the servers for snapshots and commits checkpoints.

A thread of its own beside rank 0's training, so that nobody waits for the disk. It asks every
shard for its state at the same version; in sync that is the same round everywhere.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path

from torch import Tensor

from offbeat.checkpoint import Checkpoint, ShardState, prune_checkpoints, save_checkpoint
from offbeat.errors import CheckpointError
from offbeat.events import EventLog
from offbeat.job import Job
from offbeat.roles.server import Server, Snapshot

SNAPSHOT_TIMEOUT_S = 60.0


class Master:
    """Commits a checkpoint every `eval_every` updates, and one when asked; tells `committed`."""

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
        self._log = log
        self._clock = clock
        self._finished = threading.Event()

    def run(self) -> None:
        """Commit at every multiple of `eval_every`, until `finish`."""
        every = self.job.config.eval_every
        due = every
        while every and due and not self._finished.is_set():
            wishes = [server.snapshot(due) for server in self._servers]
            try:
                snapshots = self._collect(wishes)
            except CancelledError:
                return
            if snapshots is None:
                return
            try:
                self._commit(snapshots)
            except CheckpointError as error:  # training goes on; the next one may succeed
                self._log.error("%s", error)
            due = (max(s.version for s in snapshots) // every + 1) * every

    def finish(self) -> None:
        """Stop waiting for further versions: there will be none."""
        self._finished.set()

    def commit_now(self) -> Path:
        """Commit the shards as they are; raises CheckpointError if that fails."""
        wishes = [server.snapshot() for server in self._servers]
        return self._commit([wish.result(SNAPSHOT_TIMEOUT_S) for wish in wishes])

    def _collect(self, wishes: "Sequence[Future[Snapshot]]") -> list[Snapshot] | None:
        while wait(wishes, timeout=0.2).not_done:
            if self._finished.is_set():
                return None
        return [wish.result() for wish in wishes]

    def _commit(self, snapshots: Sequence[Snapshot]) -> Path:
        shards = tuple(
            ShardState(version=s.version, tensors=s.state, claimed=s.claimed) for s in snapshots
        )
        checkpoint = Checkpoint(
            version=shards[0].version,
            manifest=self.job.manifest,
            shards=shards,
            frozen=self._frozen,
        )
        path = save_checkpoint(self._folder, checkpoint)
        prune_checkpoints(self._folder, self.job.config.keep)
        self._events.record(
            "run", phase="checkpoint", version=checkpoint.version, at_s=self._clock()
        )
        self._log.info("committed %s", path.name)
        self._committed(path)
        return path
