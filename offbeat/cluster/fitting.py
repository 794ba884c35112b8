"""Whether what a run asks for fits onto the nodes of a cluster, and what is missing if not. Pure.

>>> four = [Ask(who=f"worker {n}", resources={"CPU": 1.0}) for n in range(4)]
>>> find_lack(four, [{"CPU": 2.0}, {"CPU": 2.0}])
''
>>> find_lack(four, [{"CPU": 2.0}])
'the run needs 4 CPUs, and it has 2'
>>> find_lack([Ask(who="worker 0", resources={"CPU": 3.0})], [{"CPU": 2.0}, {"CPU": 2.0}])
'worker 0 needs a node with 3 CPUs, and none has so much left: the largest has 2 CPUs'
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

GIB = 1 << 30
KNOWN = ("CPU", "GPU", "memory")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What one role needs of the node that it is on."""

    who: str
    resources: Mapping[str, float]
    needs_folder: bool = False
    """Only a node that sees the run's folder will do."""


def find_lack(
    asks: Sequence[Ask],
    nodes: Sequence[Mapping[str, float]],
    homes: Collection[int] | None = None,
) -> str:
    """What is missing, in words; nothing: all fit, those that need the folder first, then the
    largest, each onto the node that has the most left. `homes`: which of the nodes see the run's
    folder, if not all do."""
    for name in KNOWN:
        asked = sum(ask.resources.get(name, 0.0) for ask in asks)
        there = sum(node.get(name, 0.0) for node in nodes)
        if asked > there:
            return f"the run needs {_count(name, asked)}, and it has {_number(name, there)}"
    left = [{name: node.get(name, 0.0) for name in KNOWN} for node in nodes]
    seeing = left if homes is None else [left[index] for index in homes]
    bound = [ask for ask in asks if ask.needs_folder and homes is not None]
    for ask in (*_largest_first(bound), *_largest_first(a for a in asks if a not in bound)):
        could = seeing if ask in bound else left
        fitting = [n for n in could if all(n[k] >= v for k, v in ask.resources.items())]
        if not fitting:
            largest = max(could, key=_size, default=dict.fromkeys(KNOWN, 0.0))
            most = {name: largest[name] for name in ask.resources}
            kind = " that sees the run's folder" if ask in bound else ""
            return (
                f"{ask.who} needs a node{kind} with {in_words(ask.resources)}, and none has so "
                f"much left: the largest has {in_words(most) or 'nothing'}"
            )
        chosen = max(fitting, key=_size)
        for name, count in ask.resources.items():
            chosen[name] -= count
    return ""


def most_at_once(
    asked: Sequence[Sequence[Ask]],
    nodes: Sequence[Mapping[str, float]],
    homes: Collection[int] | None = None,
) -> int:
    """How many runs fit side by side, whichever of them: as many of the largest as there is room
    for."""
    largest = max(asked, key=lambda asks: [_sum(asks, name) for name in ("GPU", "CPU", "memory")])
    most = 0
    while most < len(asked) and not find_lack([*largest] * (most + 1), nodes, homes):
        most += 1
    return most


def _largest_first(asks: Iterable[Ask]) -> list[Ask]:
    return sorted(asks, key=lambda ask: _size(ask.resources), reverse=True)


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
