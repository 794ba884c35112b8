"""What a run's events say of its updates: which gradients made each of them, and what every one of
these was computed on. No torch.

    recorded = Recorded.read(folder.events, num_shards=2)
    recorded.lives[0][0].updates[1]          # of shard 0, when its server was there first
    recorded.lives[0][0].updates[1][0].bases # the versions of all shards that it was computed on

A server that was started again, with an older state, makes some versions a second time; so a
version belongs to one of a server's *lives*. A gradient that was computed again for a server that
had lost it is another one of the same number. One that a server has out of its journal is not: the
updates that it makes again are events once more (`again`), and its life begins where the checkpoint
was that it went on from.
"""

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.accounts import APPLIED, REJECTED
from offbeat.errors import RunDirError
from offbeat.run.events import read_events

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """A shard at a version, in one of its server's lives."""

    shard: int
    life: int
    version: int

    def __str__(self) -> str:
        again = f" of its server's life {self.life + 1}" if self.life else ""
        return f"version {self.version} of shard {self.shard}{again}"


@dataclass(eq=False, slots=True)
class Computed:
    """A gradient, whatever became of it."""

    worker: int
    sequence: int
    batch: int
    """The last one of its step."""
    bases: Sequence[Point | None]
    """What it was computed on, of each shard; None: nobody wrote that down."""
    at_s: float
    """When a server had it first."""
    num_uses: int = 0
    """In how many shards' updates it is."""
    is_unusable: bool = False
    """Its loss, or an element of it, was no number."""
    before: "Computed | None" = None
    """What its worker had computed before it."""

    def __str__(self) -> str:
        return f"step {self.sequence} of worker {self.worker}"


@dataclass(eq=False, slots=True)
class Life:
    """What one server process made of its shard."""

    shard: int
    number: int
    begins: int
    """The version that it was given."""
    epoch: int
    source: Point | None = None
    """Where that was made; None: when training began."""
    falls: list[int] = field(default_factory=list)
    """From which versions on the learning rate is lower, as far as it was told in this life."""
    updates: dict[int, list[Computed]] = field(default_factory=dict)
    """By the version that they made; gradients in the order in which they came."""
    rates: dict[int, float] = field(default_factory=dict)
    """What each was made with."""
    norms: dict[int, float] = field(default_factory=dict)
    """Of each, where its server was told the norm of the whole gradient."""
    ends: int = 0
    """The last version up to which no update is missing."""

    def has(self, version: int) -> bool:
        return self.begins <= version <= self.ends


@dataclass(frozen=True)
class Committed:
    """A checkpoint."""

    version: int
    shards: Sequence[tuple[int, str]]
    """Of each the version, and the SHA-256 of its file."""


@dataclass(frozen=True)
class Recorded:
    lives: Sequence[Sequence[Life]]
    """Of each shard, in the order of time."""
    losses: Mapping[tuple[int, int], frozenset[float]]
    """Of a worker's step: what it wrote down, every time that it did it."""
    checkpoints: Sequence[Committed]
    gradients: Sequence[Computed]
    """All of them, also those that went in nowhere."""

    @property
    def unusable(self) -> Computed | None:
        """The first one that was."""
        found = [gradient for gradient in self.gradients if gradient.is_unusable]
        return min(found, key=lambda gradient: gradient.at_s, default=None)

    @classmethod
    def read(cls, events: Path, num_shards: int) -> "Recorded":
        reading = _Reading(num_shards)
        for event in read_events(events):
            reading.take(event)
        return reading.recorded()


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A gradient's slice, as a server wrote it down."""

    at_s: float
    point: Point
    """What it was computed on, of that server's shard."""
    made: int | None
    """The version that it went into."""
    batch: int
    lr: float | None
    norm: float | None
    is_unusable: bool
    again: bool = False
    """Out of a journal."""


Tried = Mapping[int, list[_Arrival]]
"""Of one gradient, at each shard; several, where servers made its update again."""


@dataclass(frozen=True, slots=True)
class _Rejoin:
    """A worker found another server where one had been."""

    at_s: float
    shard: int
    former_epoch: int
    seen_version: int
    is_whole: bool = False
    """The other one had all that the first had answered: what had not come was pushed again."""


@dataclass(frozen=True, slots=True)
class _Anew:
    """A worker pushed to another server what it had computed on the former one's parameters."""

    former_epoch: int
    base_version: int


Key = tuple[int, int, int]
"""Worker, incarnation, sequence."""


class _Reading:
    def __init__(self, num_shards: int) -> None:
        self._lives: list[list[Life]] = [[] for _ in range(num_shards)]
        self._arrivals: dict[Key, list[_Arrival]] = defaultdict(list)
        self._rejoins: dict[int, list[_Rejoin]] = defaultdict(list)
        self._anew: dict[tuple[int, int, int, int], _Anew] = {}
        """By worker, sequence, shard, and the epoch of the other server."""
        self._losses: dict[tuple[int, int], set[float]] = defaultdict(set)
        self._checkpoints: list[Committed] = []
        self._diverged: list[Event] = []
        self._computed: dict[int, list[tuple[float, Computed]]] = defaultdict(list)
        """By each worker, and when a server had it first."""

    def take(self, event: Event) -> None:
        match event:
            case {"kind": "push"}:
                self._push(event)
            case {"kind": "step", "loss": float(loss)}:
                self._losses[event["worker"], event["step"]].add(loss)
            case {"kind": "diverged"}:
                self._diverged.append(event)
            case {"kind": "rejoin"} if event["epoch"] != event["former_epoch"]:
                found = (event["at_s"], event["shard"], event["former_epoch"])
                is_whole = bool(event.get("whole"))
                rejoin = _Rejoin(*found, event["seen_version"], is_whole)
                self._rejoins[event["worker"]].append(rejoin)
            case {"kind": "anew"}:
                at = event["worker"], event["sequence"], event["shard"], event["epoch"]
                self._anew[at] = _Anew(event["former_epoch"], event["base_version"])
            case {"kind": "run", "phase": "load"}:
                lives = self._of(event["shard"])
                lives.append(Life(event["shard"], len(lives), event["version"], event["epoch"]))
            case {"kind": "run", "phase": "fall", "shard": int(shard)}:
                self._life(shard).falls.append(event["version"])
            case {"kind": "run", "phase": "checkpoint", "shards": list(shards)}:
                told = [(version, digest) for version, digest in shards]
                self._checkpoints.append(Committed(event["version"], told))

    def _of(self, shard: int) -> list[Life]:
        if shard >= len(self._lives):
            raise RunDirError(
                f"the run had more servers once than the {len(self._lives)} that it ended with: "
                f"what was cut in another way cannot be replayed"
            )
        return self._lives[shard]

    def _life(self, shard: int) -> Life:
        if not (lives := self._of(shard)):
            raise RunDirError(f"the events of server {shard} do not say what it began with")
        return lives[-1]

    def _push(self, event: Event) -> None:
        life = self._life(event["shard"])
        made = event["version"] if event["outcome"] == APPLIED else None
        point = Point(life.shard, life.number, event["base_version"])
        is_unusable = event["outcome"] == REJECTED
        more = event["batch"], event.get("lr"), event.get("norm"), is_unusable
        found = _Arrival(event["received_s"], point, made, *more, bool(event.get("again")))
        self._arrivals[event["worker"], event["incarnation"], event["sequence"]].append(found)

    def recorded(self) -> Recorded:
        for rejoins in self._rejoins.values():
            rejoins.sort(key=lambda rejoin: rejoin.at_s)
        arrived: dict[tuple[int, int, int], list[tuple[float, Computed]]] = defaultdict(list)
        for key, arrivals in self._arrivals.items():
            for tried in self._tries(key, sorted(arrivals, key=lambda a: a.at_s)):
                self._settle(key, tried, arrived)
        for (shard, number, version), found in arrived.items():
            in_order = sorted(found, key=lambda each: each[0])
            self._lives[shard][number].updates[version] = [each for _, each in in_order]
        for lives in self._lives:
            _connect(lives)
        for event in self._diverged:
            self._diverge(event)
        for _, gradient in itertools.chain(*self._computed.values()):
            gradient.bases = [self._where_made(base) for base in gradient.bases]
        gradients = [g for found in self._computed.values() for g in _chained(found)]
        losses = {step: frozenset(found) for step, found in self._losses.items()}
        return Recorded(self._lives, losses, self._checkpoints, gradients)

    def _where_made(self, base: Point | None) -> Point | None:
        """What a life did not make itself, one before it did."""
        while base is not None:
            life = self._lives[base.shard][base.life]
            if base.version >= life.begins or life.source is None:
                return base
            base = Point(base.shard, life.source.life, base.version)
        return None

    def _settle(
        self,
        key: Key,
        tried: Tried,
        arrived: dict[tuple[int, int, int], list[tuple[float, Computed]]],
    ) -> None:
        """Put down a gradient, and in every update that it went into."""
        arrivals = list(itertools.chain(*tried.values()))
        into = [arrival for arrival in arrivals if arrival.made is not None]
        bases = [self._base(key, shard, tried) for shard in range(len(self._lives))]
        first = min(arrivals, key=lambda arrival: arrival.at_s)
        is_unusable = any(arrival.is_unusable for arrival in arrivals)
        gradient = Computed(key[0], key[2], first.batch, bases, first.at_s, len(into), is_unusable)
        self._computed[key[0]].append((first.at_s, gradient))
        for arrival in into:
            shard, number, version = arrival.point.shard, arrival.point.life, arrival.made
            assert version is not None
            arrived[shard, number, version].append((arrival.at_s, gradient))
            life = self._lives[shard][number]
            if arrival.lr is not None:
                life.rates[version] = arrival.lr
            if arrival.norm is not None:
                life.norms[version] = arrival.norm

    def _diverge(self, event: Event) -> None:
        """A gradient that was never sent, in the last life of every server."""
        bases = [
            Point(shard, lives[-1].number, version)
            for shard, (lives, version) in enumerate(
                zip(self._lives, event["base_versions"], strict=True)
            )
        ]
        worker, at_s = event["worker"], event["at_s"]
        found = Computed(worker, event["step"], event["batch"], bases, at_s, is_unusable=True)
        self._computed[worker].append((at_s, found))

    def _tries(self, key: Key, arrivals: Sequence[_Arrival]) -> Iterator[Tried]:
        """Those that are of one gradient: a worker computes it again only when it has found
        another server where one had been, and that lacks some of what the first had."""
        tried: dict[int, list[_Arrival]] = {}
        for arrival in arrivals:
            if tried and self._is_another(key, tried, arrival):
                yield tried
                tried = {}
            tried.setdefault(arrival.point.shard, []).append(arrival)
        if tried:
            yield tried

    def _is_another(self, key: Key, tried: Tried, arrival: _Arrival) -> bool:
        if arrival.again or self._anew_of(key, arrival.point) is not None:
            return False
        before = next(iter(tried.values()))[0]
        between = list(self._rejoins_of(key[0], before.at_s, arrival.at_s))
        is_new = any(not rejoin.is_whole for rejoin in between)
        return is_new or (arrival.point.shard in tried and not between)

    def _rejoins_of(
        self, worker: int, from_s: float, to_s: float = math.inf, shard: int | None = None
    ) -> Iterator[_Rejoin]:
        rejoins = self._rejoins.get(worker, [])
        first = bisect.bisect_left(rejoins, from_s, key=lambda rejoin: rejoin.at_s)
        for rejoin in rejoins[first:]:
            if rejoin.at_s > to_s:
                return
            if shard in (None, rejoin.shard):
                yield rejoin

    def _anew_of(self, key: Key, point: Point) -> _Anew | None:
        epoch = self._lives[point.shard][point.life].epoch
        return self._anew.get((key[0], key[2], point.shard, epoch))

    def _computed_on(self, key: Key, point: Point) -> Point:
        """What it was computed on that came to a server with this base."""
        if (anew := self._anew_of(key, point)) is None:
            return point
        before = self._lives[point.shard][: point.life]
        former = [life.number for life in before if life.epoch == anew.former_epoch]
        return Point(point.shard, former[-1], anew.base_version) if former else point

    def _base(self, key: Key, shard: int, tried: Tried) -> Point | None:
        """Of a server that died before it wrote the gradient down, the worker did when it found
        the next one."""
        if shard in tried:
            return self._computed_on(key, tried[shard][0].point)
        since_s = min(arrivals[0].at_s for arrivals in tried.values())
        rejoin = next(self._rejoins_of(key[0], since_s, shard=shard), None)
        if rejoin is None:
            return None
        lives = [life for life in self._lives[shard] if life.epoch == rejoin.former_epoch]
        return Point(shard, lives[-1].number, rejoin.seen_version) if lives else None


def _chained(found: Sequence[tuple[float, Computed]]) -> list[Computed]:
    """In the order in which their worker computed them, each with the one before."""
    in_order = [gradient for _, gradient in sorted(found, key=lambda each: each[0])]
    for before, gradient in itertools.pairwise(in_order):
        gradient.before = before
    return in_order


def _connect(lives: Sequence[Life]) -> None:
    """Find out how far each goes, and which of those before it made what it began with."""
    for life in lives:
        life.ends = life.begins
        while life.ends + 1 in life.updates:
            life.ends += 1
        before = [other for other in lives[: life.number] if other.has(life.begins)]
        if before:
            life.source = Point(life.shard, before[-1].number, life.begins)
        elif life.begins:
            raise RunDirError(
                f"server {life.shard} once began with version {life.begins}, and the events do not "
                f"say how that was made"
            )
