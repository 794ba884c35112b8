"""What a role that was started by hand is told on its command line; the rest comes from others."""

from dataclasses import dataclass

from offbeat.cluster.hosts import Hosts
from offbeat.transport.security import Terms


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """How a role that was started by hand meets the others."""

    hosts: Hosts
    terms: Terms
    start_timeout_s: float
