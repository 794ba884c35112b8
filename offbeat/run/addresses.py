"""Where the servers of a run are: written by the engine, read by every role.
Where there are none, where the workers meet.

On one machine it is RUN/cluster.json; on several ones each process is told by its engine. It is
looked at anew for every connection, so that a server that was started again is found at its new
address.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from offbeat.errors import ConnectionClosedError, RunDirError
from offbeat.run.rundir import RunFolder
from offbeat.transport.base import CallEnd, Layout, Message, Network, WorkerEnd
from offbeat.transport.security import OPEN, Terms
from offbeat.transport.sockets import connect, connect_for_calls


@dataclass(frozen=True, kw_only=True)
class Cluster:
    ps: tuple[str, ...]
    """The servers' addresses, on their own machines."""
    epochs: tuple[int, ...]
    """How often each server was started before."""
    incarnations: tuple[int, ...]
    """How often each worker was started before."""
    began_s: float
    """When the run began, on the machine's monotonic clock."""
    nodes: tuple[str, ...] = ()
    """Which machine each server is on; none: there is only one."""
    from_afar: tuple[str, ...] = ()
    """The servers' addresses for other machines; an empty one: it has not said yet."""
    key: str = ""
    """Of this run of its engine, on several machines: whoever finds it in a folder sees the run's
    own."""
    meeting: str = ""
    """Where workers meet that have no servers (transport/group.py); empty: they have some."""

    def clock(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.began_s

    def address(self, shard: int, node: str) -> str:
        """Of a server, for whoever is on this machine."""
        if not self.nodes or self.nodes[shard] == node:
            return self.ps[shard]
        return self.from_afar[shard]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def write(self, folder: RunFolder) -> None:
        folder.write_json(folder.cluster, self.to_json())

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Cluster":
        plain: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in found.items()
        }
        return cls(**plain)

    @classmethod
    def read(cls, folder: RunFolder) -> "Cluster":
        if not folder.cluster.exists():
            raise RunDirError(f"no run is under way in {folder.path}: there is no cluster.json")
        return cls.from_json(folder.read_json(folder.cluster))


@dataclass(frozen=True, kw_only=True)
class Home:
    """What a process of a run knows of the place where it is."""

    cluster: Callable[[], Cluster]
    """As it is now."""
    node: str = ""
    """This machine; empty: there is only one."""
    host: str = ""
    """Its address for the others."""
    terms: Terms = OPEN
    """On which they meet."""

    @classmethod
    def alone(cls, folder: RunFolder) -> "Home":
        """On the only machine."""
        return cls(cluster=lambda: Cluster.read(folder))


class ClusterNetwork(Network):
    """The servers where they are at the moment."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def connect(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float, params: Tensor
    ) -> WorkerEnd:
        return connect(self._address(shard), hello, layout, timeout_s, self._home.terms)

    def connect_for_calls(
        self, shard: int, hello: Message, layout: Layout, timeout_s: float
    ) -> CallEnd:
        address = self._address(shard)
        return connect_for_calls(address, hello, layout, timeout_s, self._home.terms)

    def _address(self, shard: int) -> str:
        try:
            found = self._home.cluster().address(shard, self._home.node)
        except RunDirError as error:
            raise ConnectionClosedError(str(error)) from error
        if not found:
            raise ConnectionClosedError(f"server {shard} has not said yet where it is")
        return found
