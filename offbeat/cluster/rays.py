"""Ray, where it is installed, and the cluster that a run is placed on.

    with joined("auto", asks) as cluster:       # the one that is there, or one of this machine
        cluster.check(asks)                     # what does not fit says so, before anything starts

Called by the api and the engine `ray`; an actor (actor.py) needs no more than Ray itself.
"""

import contextlib
import importlib
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from offbeat.cluster.fitting import Ask, find_lack, in_words
from offbeat.errors import ConfigError, in_a_line
from offbeat.run.rundir import num_cores

AUTO, LOCAL = "auto", "local"
ADDRESS_VARIABLE = "RAY_ADDRESS"
NODE_LABEL = "ray.io/node-id"
INSTALL = "pip install 'offbeat[ray]'"


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

    def has_room_here(self, resources: Mapping[str, float]) -> bool:
        """Whether this process's own node has so much at all."""
        mine = self.nodes().get(self.node, {})
        return all(mine.get(name, 0.0) >= count for name, count in resources.items())

    def check(self, asks: Sequence[Ask]) -> None:
        """A ConfigError says what is missing for all of this."""
        if lack := find_lack(asks, list(self.nodes().values())):
            raise ConfigError(f"the Ray cluster is too small: {lack}")


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
    quietly = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address not in (AUTO, LOCAL) or (address == AUTO and _is_one_here()):
        try:
            ray.init(address=address, **quietly)
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = os.environ.get(ADDRESS_VARIABLE, address) if address == AUTO else address
            raise ConfigError(f"no Ray cluster answers at {where}: {in_a_line(error)}") from error
        return f"on the Ray cluster at {ray.get_runtime_context().gcs_address}"
    asked = sum(ask.resources.get("CPU", 0.0) for ask in asks)
    num_cpus = max(num_cores(), math.ceil(asked))  # roles share cores, as on one machine ever
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
