"""Who is where, when a run spans machines: cluster.toml, flags, or TF_CONFIG.

    ps = ["10.0.0.1:7000", "10.0.0.2:7000"]
    worker = ["10.0.0.3:7000", "10.0.0.4:7000"]
    master = "10.0.0.5:7000"        # without it worker 0 is the master

Only servers listen; the other addresses say how many there are. Imports no torch, so that what is
wrong with a cluster is said at once.
"""

import ipaddress
import json
import socket
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.config import ROLES
from offbeat.errors import ConfigError, nearest

TF_VARIABLE = "TF_CONFIG"
_KEYS = ("ps", "worker", "master")
_TF_NAMES = {"chief": "master"}
"""What TF_CONFIG calls otherwise."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The addresses of a cluster, as host:port."""

    ps: tuple[str, ...]
    worker: tuple[str, ...] = ()
    master: str | None = None

    @property
    def num_workers(self) -> int:
        """The master among them."""
        return len(self.worker) + (self.master is not None)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The servers', as the transport wants them."""
        return tuple(f"tcp:{address}" for address in self.ps)

    def rank_of(self, role: str, index: int) -> int:
        """A worker's rank; 0 is the master's, whatever it is called in this cluster."""
        if role == "master":
            if index:
                raise ConfigError(f"there is one master: index 0, not {index}")
            return 0
        if not 0 <= index < len(self.worker):
            raise ConfigError(
                f"there is no worker {index}: the cluster has {len(self.worker)}, counted from 0"
            )
        return index + (self.master is not None)

    def where(self, role: str, index: int) -> str:
        """The address that the cluster gives a role."""
        known = {"ps": self.ps, "worker": self.worker}.get(role)
        if known is None:
            return self.master or next(iter(self.worker), "")
        if not 0 <= index < len(known):
            raise ConfigError(
                f"there is no {role} {index}: the cluster has {len(known)}, counted from 0"
            )
        return known[index]

    def validated(self) -> "Hosts":
        for address in (*self.ps, *self.worker, *([self.master] if self.master else [])):
            split_address(address)
        if not self.ps:
            raise ConfigError("the cluster has no server: ps is empty or missing")
        if not self.num_workers:
            raise ConfigError("the cluster has neither a worker nor a master")
        if len(set(self.ps)) < len(self.ps):
            raise ConfigError("two servers of the cluster have the same address")
        return self


def split_address(address: str) -> tuple[str, int]:
    """host:port, or [::1]:port."""
    host, colon, port = address.rpartition(":")
    bare = host.strip("[]")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not bare or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is no address; one looks like 10.0.0.1:7000")
    if (":" in bare) != bracketed:
        raise ConfigError(f"{address!r} is no address; one of IPv6 looks like [::1]:7000")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens at `host`."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ConfigError(f"nobody knows the host {host!r}: {error.strerror or error}") from error
    return all(ipaddress.ip_address(str(ip).partition("%")[0]).is_loopback for ip in found)


def read_hosts(path: str | Path) -> Hosts:
    """Out of a cluster.toml."""
    try:
        table = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the cluster file {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    try:
        return make_hosts(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def make_hosts(table: Mapping[str, Any]) -> Hosts:
    for key, value in table.items():
        if isinstance(value, dict):
            raise ConfigError(f"[{key}] is a table; ps, worker and master stand at the top level")
        if key not in _KEYS:
            raise ConfigError(f"unknown key {key!r}; {nearest(key, _KEYS)}")
    master = table.get("master")
    if isinstance(master, list) and len(master) == 1:
        (master,) = master
    if master is not None and not isinstance(master, str):
        raise ConfigError("master must be one address")
    return Hosts(
        ps=_addresses(table, "ps"), worker=_addresses(table, "worker"), master=master
    ).validated()


def _addresses(table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = table.get(key, [])
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ConfigError(f'{key} must be a list of addresses, as ["10.0.0.1:7000"]')
    return tuple(found)


@dataclass(frozen=True)
class Task:
    """What TF_CONFIG says this process is."""

    role: str
    index: int


def read_tf_config(environment: Mapping[str, str]) -> tuple[Hosts, Task]:
    """What Kubernetes operators set for parameter-server jobs: cluster and task."""
    try:
        table = json.loads(environment[TF_VARIABLE])
        cluster, task = dict(table["cluster"]), dict(table.get("task", {}))
    except KeyError as error:
        raise ConfigError(f"{TF_VARIABLE} has no {error}: it wants cluster and task") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f'{TF_VARIABLE} is no JSON of the form {{"cluster": ..., "task": ...}}: {error}'
        ) from error
    cluster.pop("evaluator", None)  # which is not part of it
    renamed = {_TF_NAMES.get(str(name), str(name)): where for name, where in cluster.items()}
    if len(renamed) < len(cluster):
        raise ConfigError(f"{TF_VARIABLE} names both a chief and a master")
    try:
        hosts = make_hosts(renamed)
    except ConfigError as error:
        raise ConfigError(f"{TF_VARIABLE}: {error}") from error
    role, index = str(task.get("type", "")), task.get("index", 0)
    role = _TF_NAMES.get(role, role)
    if role not in ROLES or not isinstance(index, int) or isinstance(index, bool):
        raise ConfigError(f"{TF_VARIABLE}: the task is no role: {task}")
    return hosts, Task(role, index)


def find_hosts(
    environment: Mapping[str, str],
    *,
    file: str | None = None,
    ps: Sequence[str] = (),
    worker: Sequence[str] = (),
    master: str | None = None,
) -> tuple[Hosts, Task | None] | None:
    """The cluster that a file, flags or the environment describe; None where none of them does.
    A file and flags do not mix, and both beat the environment."""
    flags = bool(ps or worker or master)
    if file is not None and flags:
        raise ConfigError(
            "the cluster stands in --cluster or in --ps, --worker, --master: not both"
        )
    if file is not None:
        return read_hosts(file), None
    if flags:
        return Hosts(ps=tuple(ps), worker=tuple(worker), master=master).validated(), None
    return read_tf_config(environment) if TF_VARIABLE in environment else None
