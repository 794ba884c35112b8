"""Whether what a run asks for fits onto the nodes of a cluster, and what is missing if not. Pure.

>>> four = [Ask(who=f"worker {n}", resources={"CPU": 1.0}) for n in range(4)]
>>> find_lack(four, [{"CPU": 2.0}, {"CPU": 2.0}])
''
>>> find_lack(four, [{"CPU": 2.0}])
'the run needs 4 CPUs, and it has 2'
>>> find_lack([Ask(who="worker 0", resources={"CPU": 3.0})], [{"CPU": 2.0}, {"CPU": 2.0}])
'worker 0 needs a node with 3 CPUs, and none has so much left: the largest has 2 CPUs'
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GIB = 1 << 30
KNOWN = ("CPU", "GPU", "memory")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What one role needs of the node that it is on."""

    who: str
    resources: Mapping[str, float]


def find_lack(asks: Sequence[Ask], nodes: Sequence[Mapping[str, float]]) -> str:
    """What is missing, in words; nothing: all fit, the largest placed first, each onto the node
    that has the most left."""
    for name in KNOWN:
        asked = sum(ask.resources.get(name, 0.0) for ask in asks)
        there = sum(node.get(name, 0.0) for node in nodes)
        if asked > there:
            return f"the run needs {_count(name, asked)}, and it has {_number(name, there)}"
    left = [{name: node.get(name, 0.0) for name in KNOWN} for node in nodes]
    for ask in sorted(asks, key=lambda ask: _size(ask.resources), reverse=True):
        fitting = [n for n in left if all(n[k] >= v for k, v in ask.resources.items())]
        if not fitting:
            largest = max(left, key=_size)
            most = {name: largest[name] for name in ask.resources}
            return (
                f"{ask.who} needs a node with {in_words(ask.resources)}, and none has so much "
                f"left: the largest has {in_words(most) or 'nothing'}"
            )
        chosen = max(fitting, key=_size)
        for name, count in ask.resources.items():
            chosen[name] -= count
    return ""


def most_at_once(asked: Sequence[Sequence[Ask]], nodes: Sequence[Mapping[str, float]]) -> int:
    """How many runs fit side by side, whichever of them: as many of the largest as there is room
    for."""
    largest = max(asked, key=lambda asks: [_sum(asks, name) for name in ("GPU", "CPU", "memory")])
    most = 0
    while most < len(asked) and not find_lack([*largest] * (most + 1), nodes):
        most += 1
    return most


def _sum(asks: Sequence[Ask], name: str) -> float:
    return sum(ask.resources.get(name, 0.0) for ask in asks)


def in_words(resources: Mapping[str, float]) -> str:
    """2 CPUs, 1 GPU and 4 GiB of memory; what else a node may have is left out."""
    counts = [_count(name, resources[name]) for name in KNOWN if resources.get(name, 0.0)]
    return " and ".join(filter(None, (", ".join(counts[:-1]), *counts[-1:])))


def _size(resources: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(resources.get(name, 0.0) for name in ("GPU", "CPU", "memory"))


def _count(name: str, value: float) -> str:
    number = _number(name, value)
    if name == "memory":
        return f"{number} of memory"
    return f"{number} {name}{'s' * (value != 1)}"


def _number(name: str, value: float) -> str:
    return f"{value / GIB:.3g} GiB" if name == "memory" else f"{value:g}"
