"""Where the servers of a run are: RUN/cluster.json, written by the engine, read by every role.

It is read anew for every connection, so that a server that was started again is found at its new
address.
"""

import dataclasses
import time
from dataclasses import dataclass

from torch import Tensor

from offbeat.errors import ConnectionClosedError, RunDirError
from offbeat.run.rundir import RunFolder
from offbeat.transport.base import CallEnd, Layout, Message, Network, WorkerEnd
from offbeat.transport.sockets import connect, connect_for_calls


@dataclass(frozen=True, kw_only=True)
class Cluster:
    ps: tuple[str, ...]
    """The servers' addresses."""
    epochs: tuple[int, ...]
    """How often each server was started before."""
    incarnations: tuple[int, ...]
    """How often each worker was started before."""
    began_s: float
    """When the run began, on the machine's monotonic clock."""

    def clock(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.began_s

    def write(self, folder: RunFolder) -> None:
        folder.write_json(folder.cluster, dataclasses.asdict(self))

    @classmethod
    def read(cls, folder: RunFolder) -> "Cluster":
        if not folder.cluster.exists():
            raise RunDirError(f"no run is under way in {folder.path}: there is no cluster.json")
        found = folder.read_json(folder.cluster)
        return cls(
            ps=tuple(found["ps"]),
            epochs=tuple(found["epochs"]),
            incarnations=tuple(found["incarnations"]),
            began_s=found["began_s"],
        )


class ClusterNetwork(Network):
    """The servers that cluster.json names at the moment."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def connect(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float, params: Tensor
    ) -> WorkerEnd:
        return connect(self._address(shard), hello, layout, timeout_s)

    def connect_for_calls(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float
    ) -> CallEnd:
        return connect_for_calls(self._address(shard), hello, layout, timeout_s)

    def _address(self, shard: int) -> str:
        try:
            return Cluster.read(self._folder).ps[shard]
        except RunDirError as error:
            raise ConnectionClosedError(str(error)) from error
