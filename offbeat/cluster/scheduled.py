"""Which role a process has that Slurm or Kubernetes started: `offbeat role auto`.

    srun --ntasks 6 offbeat role auto --servers 2 --recipe alexnet
    OFFBEAT_ROLE=worker OFFBEAT_PS=ps-0.offbeat:7000 OFFBEAT_NUM_WORKERS=4 offbeat role auto

Every task of a Slurm step finds out by itself, from what srun tells all of them alike, who is who:
servers are spread over the nodes, the first of the other tasks is the master, the rest are workers.
In a pod its manifest says so, but for its number, which is the Job's or the StatefulSet's. Pure:
what is decided depends on the environment alone.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.cluster.hosts import Hosts, Task, split_address
from offbeat.config import ROLES
from offbeat.errors import ConfigError

FIRST_PORT, NUM_PORTS, PORTS_EACH = 20_000, 120, 100
"""Where a step's servers listen follows from its number, so that two on a node do not meet; below
what systems give away by themselves."""
PLACES = ("SLURM_PROCID", "OFFBEAT_ROLE")
"""What shows that a scheduler has started this process, with all that it has to know."""


def find_scheduled(
    environment: Mapping[str, str], *, servers: int, port: int | None = None
) -> tuple[Hosts, Task]:
    """The cluster, and what this process is in it. `servers`: how many of a step's tasks; `port`:
    of the first one's, where it is not to follow from the step's number."""
    if "OFFBEAT_ROLE" in environment:
        return _in_pod(environment)
    if "SLURM_PROCID" in environment:
        return _in_step(Step.read(environment), servers, port)
    raise ConfigError(
        "role auto goes by what srun or a pod's manifest says, and here is neither: "
        f"{' nor '.join(PLACES)} is not set"
    )


@dataclass(frozen=True, kw_only=True)
class Step:
    """What srun tells each of its tasks."""

    task: int
    nodes: Sequence[str]
    """Of each task."""
    number: int
    """Of the job and the step in it."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "Step":
        task = _whole("SLURM_PROCID", environment)
        names = expand_nodes(_either(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
        of_nodes = _either(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        counts = expand_counts(of_nodes)
        if len(names) != len(counts):
            raise ConfigError(f"Slurm names {len(names)} nodes, and tasks of {len(counts)}")
        nodes = [name for name, n in zip(names, counts, strict=True) for _ in range(n)]
        mine = names[_whole("SLURM_NODEID", environment)]
        if not 0 <= task < len(nodes) or nodes[task] != mine:
            raise ConfigError(
                f"task {task} is on {mine}, which is not where blocks of tasks would have it: "
                f"start them with srun --distribution=block"
            )
        job, step = (environment.get(f"SLURM_{what}_ID", "0") for what in ("JOB", "STEP"))
        number = (int(job) * 7 if job.isdecimal() else 0) + (int(step) if step.isdecimal() else 0)
        return cls(task=task, nodes=nodes, number=number)


def _in_step(step: Step, servers: int, port: int | None) -> tuple[Hosts, Task]:
    if len(step.nodes) < servers + 1:
        raise ConfigError(
            f"{servers} servers and a master want {servers + 1} tasks, and the step has "
            f"{len(step.nodes)}: raise --ntasks, or lower --servers"
        )
    serving = spread(step.nodes)[:servers]
    first = port or FIRST_PORT + step.number % NUM_PORTS * PORTS_EACH
    others = [task for task in range(len(step.nodes)) if task not in serving]
    places = [f"{step.nodes[task]}:{first + k}" for k, task in enumerate([*serving, *others])]
    master, *workers = places[servers:]
    hosts = Hosts(ps=tuple(places[:servers]), worker=tuple(workers), master=master).validated()
    if step.task in serving:
        return hosts, Task("ps", serving.index(step.task))
    rank = others.index(step.task)
    return hosts, Task("worker", rank - 1) if rank else Task("master", 0)


def spread(nodes: Sequence[str]) -> list[int]:
    """The tasks in an order that goes round the nodes: the first of each, then the second ones."""
    seen: dict[str, int] = {}
    turns = []
    for task, node in enumerate(nodes):
        turns.append((seen.get(node, 0), task))
        seen[node] = seen.get(node, 0) + 1
    return [task for _, task in sorted(turns)]


def expand_nodes(text: str) -> list[str]:
    """Out of Slurm's short form: node[01-03,07],gpu5."""
    found: list[str] = []
    names = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    if ",".join(names) != text:
        raise ConfigError(f"{text!r} is no list of nodes as Slurm writes it")
    for name in names:
        parts = re.split(r"\[([^\]]*)\]", name)
        choices = [
            _numbers(part, text) if index % 2 else [part] for index, part in enumerate(parts)
        ]
        found += ["".join(chosen) for chosen in itertools.product(*choices)]
    if not found or any(not re.fullmatch(r"[\w.-]+", name) for name in found):
        raise ConfigError(f"{text!r} is no list of nodes as Slurm writes it")
    return found


def _numbers(ranges: str, text: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ConfigError(f"{text!r} is no list of nodes as Slurm writes it")
        low, high = match[1], match[2] or match[1]
        found += [f"{n:0{len(low)}d}" for n in range(int(low), int(high) + 1)]
    return found


def expand_counts(text: str) -> list[int]:
    """Out of Slurm's short form: 2(x3),1."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(f"{text!r} says not how many tasks each node has, as Slurm would")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _in_pod(environment: Mapping[str, str]) -> tuple[Hosts, Task]:
    role = environment["OFFBEAT_ROLE"]
    if role not in ROLES:
        raise ConfigError(f"OFFBEAT_ROLE is {role!r}, and a role is one of {', '.join(ROLES)}")
    servers = tuple(filter(None, environment.get("OFFBEAT_PS", "").split(",")))
    if not servers:
        raise ConfigError("OFFBEAT_PS is to name the servers: ps-0.offbeat:7000,ps-1.offbeat:7000")
    for address in servers:
        split_address(address)
    num_workers = _whole("OFFBEAT_NUM_WORKERS", environment)
    hosts = Hosts(
        ps=servers,
        worker=tuple(f"worker-{index}:1" for index in range(num_workers)),
        master="master:1",
    )
    index = _ordinal(environment) if role in ("ps", "worker") else 0
    if role in ("ps", "worker"):
        hosts.where(role, index)
    return hosts.validated(), Task(role, index)


def _ordinal(environment: Mapping[str, str]) -> int:
    """A pod's number: of an indexed Job, or of a StatefulSet, whose pods are called so."""
    if "JOB_COMPLETION_INDEX" in environment:
        return _whole("JOB_COMPLETION_INDEX", environment)
    name = environment.get("HOSTNAME", "")
    match = re.fullmatch(r".*-(\d+)", name.partition(".")[0])
    if match is None:
        raise ConfigError(
            f"the pod is called {name!r}, which says not which one of its kind it is: make it one "
            f"of a StatefulSet, or of a Job with completionMode Indexed"
        )
    return int(match[1])


def _whole(name: str, environment: Mapping[str, str]) -> int:
    value = environment.get(name)
    if value is None or not value.isdecimal():
        raise ConfigError(f"{name} is to be a whole number, and is {value!r}")
    return int(value)


def _either(environment: Mapping[str, str], *names: str) -> str:
    for name in names:
        if environment.get(name):
            return environment[name]
    raise ConfigError(f"srun sets {' or '.join(names)}, and neither is set")
