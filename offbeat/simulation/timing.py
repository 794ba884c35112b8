"""How long everything takes: what a simulated run draws its times from.

Made out of a recorded run's events (calibration.py), or written down by hand:

    step = StepTimes(compute_s=0.02, prepare_s=0.001, up_s=0.0001, down_s=0.0001)
    service = ServiceTimes(look_s=1e-4, apply_s=2e-4, reply_s=1e-4)
    timing = Timing(steps=[[step]], services=[service])

Imports no torch.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

BLOCK = 25
"""So many steps in a row are drawn as they followed each other: what makes one slow, as another
process on its machine, often lasts."""
FIXED_BYTES = 600_000
"""What a server does for each gradient takes as long as if its slice were longer by so much;
measured, docs/simulation.md."""
LARGE_FROM_BYTES = 2_000_000
"""As roles/session.py has it, in elements of four bytes."""
Drawn = TypeVar("Drawn")


class StepTimes(NamedTuple):
    """Of one step of one worker."""

    compute_s: float
    prepare_s: float
    """Of the next batch, while the exchange is under way."""
    up_s: float
    """From when the gradient is there until a server that has nothing else to do looks at it."""
    down_s: float
    """From when the last reply leaves until the worker goes on."""


class ServiceTimes(NamedTuple):
    """Of one server, for one gradient."""

    look_s: float
    """To receive it, and see whether it is usable."""
    apply_s: float
    """To make an update of it."""
    reply_s: float
    """To copy the parameters into a reply, and send that."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    steps: Sequence[Sequence[StepTimes]]
    """Of each worker that was looked at, in the order of time. Where there are more workers, they
    are like these again."""
    services: Sequence[ServiceTimes]
    """Of a server that has the whole vector, or as much of it as `servers` says."""
    merge_s: float = 0.0
    """What each further gradient of an update takes."""
    servers: int = 1
    """In so many slices the vector was cut."""
    whole_bytes: float = 0.0
    """What a gradient is in memory, over all servers; 0: not known."""
    up_bytes: float | None = None
    """What of it is sent; None: not known."""
    down_bytes: float | None = None
    cores: float = math.inf
    """That all workers and servers shared; inf: each had its own."""
    threads: int = 1
    """On so many of them a worker computes at a time."""

    @property
    def slice_bytes(self) -> float:
        return self.whole_bytes / self.servers

    @property
    def is_large(self) -> bool:
        """Whether sessions have threads of their own."""
        return self.slice_bytes >= LARGE_FROM_BYTES

    def cut(self, servers: int) -> "Timing":
        """The same with another number of servers. Part of what a service takes does not depend on
        how long the slice is; where that is not known, half of it."""
        if servers == self.servers:
            return self
        before, now = self.slice_bytes, self.whole_bytes / servers
        factor = (FIXED_BYTES + now) / (FIXED_BYTES + before)
        if not before:
            factor = 0.5 + 0.5 * self.servers / servers
        services = [ServiceTimes(*(factor * part_s for part_s in each)) for each in self.services]
        merge_s = factor * self.merge_s
        return dataclasses.replace(self, services=services, merge_s=merge_s, servers=servers)

    def steps_of(self, worker: int, seed: int, *, apart: bool) -> Iterator[StepTimes]:
        """Without an end: in blocks out of the record of a worker like this one, which begin
        anywhere. `apart`: on a machine of its own; or else what makes one worker slow makes all of
        them slow, so that all draw from the same time of the record, more or less."""
        found = self.steps[worker % len(self.steps)]
        if len(found) == 1:
            return itertools.repeat(found[0])
        chance = random.Random(f"{seed}: worker {worker}")
        if apart:
            starts = (chance.random() for _ in itertools.count())
        else:
            shared, width = random.Random(f"{seed}: machine"), BLOCK / len(found)
            starts = ((shared.random() + width * chance.random()) % 1 for _ in itertools.count())
        return itertools.chain.from_iterable(_blocks(found, starts, BLOCK))

    def services_of(self, chance: random.Random) -> Iterator[ServiceTimes]:
        found = self.services
        if len(found) == 1:
            return itertools.repeat(found[0])
        return (found[int(chance.random() * len(found))] for _ in itertools.count())

    def scaled(self, factor: float) -> "Timing":
        """Where everything that takes a core takes so many times as long."""
        steps = [[_scaled(step, factor) for step in each] for each in self.steps]
        services = [ServiceTimes(*(factor * part_s for part_s in each)) for each in self.services]
        merge_s = factor * self.merge_s
        return dataclasses.replace(self, steps=steps, services=services, merge_s=merge_s)


def _scaled(step: StepTimes, factor: float) -> StepTimes:
    return step._replace(compute_s=factor * step.compute_s, prepare_s=factor * step.prepare_s)


def _blocks(
    found: Sequence[Drawn], starts: Iterator[float], length: int
) -> Iterator[Sequence[Drawn]]:
    """`starts`: where each begins, as a part of all."""
    for start in starts:
        first = int(start * len(found))
        block = found[first : first + length]
        yield block
        if (missing := length - len(block)) > 0:  # the record goes on from its beginning
            yield found[:missing]
