"""Ray, where it is installed, and the cluster that a run is placed on.

    with joined("auto", asks) as cluster:       # the one that is there, or one of this machine
        cluster.check(asks)                     # what does not fit says so, before anything starts

Called by the api and the engine `ray`; an actor (actor.py) needs no more than Ray itself.
"""

import contextlib
import hashlib
import importlib
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.cluster.fitting import Ask, find_lack, in_words
from offbeat.errors import ConfigError, in_a_line
from offbeat.run.rundir import num_cores

AUTO, LOCAL = "auto", "local"
ADDRESS_VARIABLE = "RAY_ADDRESS"
NICENESS_VARIABLE = "RAY_worker_niceness"
"""Ray's own default is 15: on a machine with anything else to do, roles would be last."""
NODE_LABEL = "ray.io/node-id"
INSTALL = "pip install 'offbeat[ray]'"
LOOK_TIMEOUT_S = 30.0
"""How long a node may take to say whether it sees a file."""


def find_ray() -> Any:
    """The library; a ConfigError says how to install it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"the engine ray needs Ray, which is not installed: {INSTALL}") from error


class RayCluster:
    """One that this process has joined."""

    def __init__(self, ray: Any, notice: str | None) -> None:
        self.ray = ray
        self.notice = notice
        """What to say of how it was found."""
        self.node: str = ray.get_runtime_context().get_node_id()
        """Where this process is."""
        self.host: str = ray.util.get_node_ip_address()

    def nodes(self) -> dict[str, Mapping[str, float]]:
        """What those have that are there, all in all."""
        return {n["NodeID"]: n["Resources"] for n in self.ray.nodes() if n["Alive"]}

    def free(self) -> Mapping[str, float]:
        """What nobody uses."""
        found: Mapping[str, float] = self.ray.available_resources()
        return found

    def free_of_each(self) -> dict[str, Mapping[str, float]]:
        """What nobody uses, by node."""
        state = importlib.import_module("ray._private.state")
        found: dict[str, Mapping[str, float]] = state.available_resources_per_node()
        return {node: free for node, free in found.items() if node in self.nodes()}

    def who_see(self, file: Path) -> list[str]:
        """The nodes, this one first, where the same thing lies at this path."""
        others = [node for node in self.nodes() if node != self.node]
        affinity = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        look, digest = self.ray.remote(_sees), _digest(file)
        waits = {
            look.options(
                num_cpus=0, max_retries=0, scheduling_strategy=affinity(node, soft=False)
            ).remote(str(file.absolute()), digest): node
            for node in others
        }
        done, late = (
            self.ray.wait(list(waits), num_returns=len(waits) or 1, timeout=LOOK_TIMEOUT_S)
            if waits
            else ([], [])
        )
        for wait in late:
            self.ray.cancel(wait, force=True)
        return [self.node, *(waits[wait] for wait in done if self._says_yes(wait))]

    def _says_yes(self, wait: Any) -> bool:
        try:
            return bool(self.ray.get(wait))
        except self.ray.exceptions.RayError:
            return False  # the node has gone

    def has_room_here(self, resources: Mapping[str, float]) -> bool:
        """Whether this process's own node has so much at all."""
        mine = self.nodes().get(self.node, {})
        return all(mine.get(name, 0.0) >= count for name, count in resources.items())

    def check(self, asks: Sequence[Ask]) -> None:
        """A ConfigError says what is missing for all of this."""
        if lack := find_lack(asks, list(self.nodes().values())):
            raise ConfigError(f"the Ray cluster is too small: {lack}")


def _digest(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def _sees(file: str, digest: str | None) -> bool:
    return _digest(Path(file)) == digest


@contextlib.contextmanager
def joined(address: str | None, asks: Sequence[Ask]) -> Iterator[RayCluster]:
    """The cluster at this address; auto: the one that Ray finds, or else one of this machine's own
    with room for what is asked; local: that in any case. What was joined, or started, here is left
    when the block ends; who has joined one before stays there."""
    ray = find_ray()
    if ray.is_initialized():
        yield RayCluster(ray, None)
        return
    notice = _join(ray, address or AUTO, asks)
    try:
        yield RayCluster(ray, notice)
    finally:
        ray.shutdown()


def _join(ray: Any, address: str, asks: Sequence[Ask]) -> str:
    if address.startswith("ray://"):
        raise ConfigError(
            f"{address} is for clients outside of a cluster, whom its nodes cannot call: start the "
            f"run on one of the nodes, or with: ray job submit -- offbeat train --engine ray ..."
        )
    quietly: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address not in (AUTO, LOCAL) or (address == AUTO and _is_one_here()):
        try:
            ray.init(address=address, **quietly)
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = os.environ.get(ADDRESS_VARIABLE, address) if address == AUTO else address
            raise ConfigError(f"no Ray cluster answers at {where}: {in_a_line(error)}") from error
        return f"on the Ray cluster at {ray.get_runtime_context().gcs_address}"
    asked = sum(ask.resources.get("CPU", 0.0) for ask in asks)
    num_cpus = max(num_cores(), math.ceil(asked))  # roles share cores, as on one machine ever
    if NICENESS_VARIABLE not in os.environ:
        quietly["_system_config"] = {"worker_niceness": os.nice(0)}
    ray.init(address=LOCAL, num_cpus=num_cpus, include_dashboard=False, **quietly)
    found = "" if address == LOCAL else "no Ray cluster was found: "
    return f"{found}one of this machine's own is started for the run"


def _is_one_here() -> bool:
    """Whether this machine is a node of one, or the environment names one. Ray itself would ask
    for a while at the address of the last one that there was, though it is gone."""
    if os.environ.get(ADDRESS_VARIABLE):
        return True
    services = importlib.import_module("ray._private.services")
    return bool(services.find_gcs_addresses())


def describe_free(cluster: RayCluster) -> str:
    return in_words(cluster.free()) or "nothing"
