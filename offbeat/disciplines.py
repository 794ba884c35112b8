"""The update disciplines: nothing but the order of Apply and Reply. START HERE.

A server asks its discipline what to do whenever something happens: a worker pushed a gradient,
joined, left, or time went by. The answer is a list of actions, which the server carries out in
that order:

    Apply(pushes)   make one update of the shard out of these gradients, in this order
    Reply(worker)   send this worker the newest parameters; it goes on to its next step
    Drop(push)      forget this gradient; it came too late

There is no thread, socket, clock or arithmetic in this file, so the same classes run in a live
server and in tests that script every interleaving:

    >>> ApplyReply([0, 1]).on_push(push := Push(worker=0, sequence=1)) == [Apply((push,)), Reply(0)]
    True
    >>> ReplyApply([0, 1]).on_push(push) == [Reply(0), Apply((push,))]
    True

Each class also says what there is to know about it, so that nobody has to ask for its name. One of
your own works like a recipe: `--discipline path/file.py:Class`; examples/drop_stale.py is one.
More of Offbeat's are in family.py, with the list of all.

What a server promises in return, and what the classes rely on: one event at a time (unless
`locked` is False); pushes of those only who joined or got a reply; every push once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from offbeat.plugins import Option, Plugin


@dataclass(frozen=True, slots=True)
class Push:
    """A gradient on its way up; the numbers that it consists of stay with the server."""

    worker: int
    sequence: int
    base_version: int = 0
    """The version of the shard that it was computed on."""
    version: int = 0
    """The version of the shard when it came."""

    @property
    def staleness(self) -> int:
        return self.version - self.base_version


@dataclass(frozen=True, slots=True)
class Apply:
    pushes: tuple[Push, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    worker: int


@dataclass(frozen=True, slots=True)
class Drop:
    push: Push


Action = Apply | Reply | Drop


class Discipline(Plugin, ABC):
    """The rule for when a pushed gradient is applied and when its worker gets parameters back.

    `workers` are those the run starts with. They count as present from the beginning, so that
    nobody runs ahead while others are on their way; one that never comes must be reported as left.
    """

    in_rounds: ClassVar[bool] = False
    """Whether it waits for a gradient of every worker, so that it is late when a round closed."""
    merges: ClassVar[bool] = False
    """Whether an update may be made out of several gradients."""
    locked: ClassVar[bool] = True
    """Whether the server must keep events and actions of different workers apart."""
    exact: ClassVar[bool] = True
    """Whether every version can be had as it was when asked for before it is there."""
    served: ClassVar[bool] = True
    """Whether there are servers; else each worker keeps all there is, and makes every update."""

    def __init__(self, workers: Iterable[int]) -> None:
        self.present = set(workers)

    @classmethod
    def complaint(cls, num_workers: int, values: Mapping[str, float]) -> str:
        """What makes no sense for so many workers; nothing: it does."""
        return ""

    @property
    def gradients_per_update(self) -> int:
        """How many gradients there are to an update while all workers are at work."""
        return 1

    def num_updates(self, steps: Sequence[int]) -> int:
        """About how many updates there will be if the workers take so many steps."""
        return -(-sum(steps) // self.gradients_per_update)

    @abstractmethod
    def on_push(self, push: Push) -> list[Action]:
        """`push.worker` sent a gradient and waits for its reply."""

    def on_join(self, worker: int) -> list[Action]:
        """`worker` came, and is given the newest parameters together with this event."""
        self.present.add(worker)
        return []

    def on_leave(self, worker: int) -> list[Action]:
        """`worker` is gone: finished, dead or declared so. It waits for no reply any more."""
        self.present.discard(worker)
        return []

    def on_tick(self, now: float) -> list[Action]:
        """It is `now`, in seconds on any clock that never goes back."""
        return []


class ApplyReply(Discipline):
    """Asynchronous: a worker gets parameters that have its own gradient, and waits for nobody."""

    name = "apply-reply"

    def on_push(self, push: Push) -> list[Action]:
        return [Apply((push,)), Reply(push.worker)]


class ReplyApply(Discipline):
    """Asynchronous: a worker gets the newest parameters; its gradient is applied after that."""

    name = "reply-apply"

    def on_push(self, push: Push) -> list[Action]:
        return [Reply(push.worker), Apply((push,))]


class LockFree(ReplyApply):
    """Reply-apply with no mutual exclusion anywhere, as in Project Adam and Hogwild.

    It keeps no state that a push changes, which is why events may come from many threads at once.
    """

    name = "lock-free"
    locked = False
    exact = False


class Sync(Discipline):
    """On the beat: a round is a gradient from every worker present, one update, a reply to each.

    With `backup_workers` b a round closes when all but b have come; with `round_timeout_s` at the
    first tick so long after its first gradient was seen. Whoever is late is dropped and answered.
    """

    name = "sync"
    in_rounds = True
    merges = True
    options: ClassVar[tuple[Option, ...]] = (
        Option(
            name="backup_workers",
            default=0,
            most=10**6,
            help="close a round without this many of the slowest",
        ),
        Option(
            name="round_timeout_s",
            default=math.inf,
            help="close a round this many seconds after its first gradient",
            whole=False,
            above=True,
            unit="s",
        ),
    )

    def __init__(
        self, workers: Iterable[int], *, backup_workers: int = 0, round_timeout_s: float = math.inf
    ) -> None:
        super().__init__(workers)
        self.backup_workers = backup_workers
        self.round_timeout_s = round_timeout_s
        self.round = 0
        self.round_of = dict.fromkeys(self.present, 0)  # whose parameters each worker computes on
        self.arrived: dict[int, Push] = {}
        self.waiting_since: float | None = None

    @classmethod
    def complaint(cls, num_workers: int, values: Mapping[str, float]) -> str:
        backups = f"{(count := values.get('backup_workers', 0)):g} of {num_workers}"
        why = f"below the number of workers: {backups} would leave nobody to wait for"
        return "" if count < num_workers else f"backup_workers must be {why}"

    @property
    def gradients_per_update(self) -> int:
        return max(1, len(self.round_of))

    def num_updates(self, steps: Sequence[int]) -> int:
        return max(steps, default=0)  # who has the most to do makes the last rounds alone

    def on_push(self, push: Push) -> list[Action]:
        if self.round_of[push.worker] < self.round:
            self.round_of[push.worker] = self.round
            return [Drop(push), Reply(push.worker)]
        self.arrived[push.worker] = push
        return self._close_if_full()

    def on_join(self, worker: int) -> list[Action]:
        self.round_of[worker] = self.round
        return super().on_join(worker)

    def on_leave(self, worker: int) -> list[Action]:
        super().on_leave(worker)
        abandoned = self.arrived.pop(worker, None)
        self.waiting_since = self.waiting_since if self.arrived else None
        return ([Drop(abandoned)] if abandoned else []) + self._close_if_full()

    def on_tick(self, now: float) -> list[Action]:
        if not self.arrived:
            return []
        self.waiting_since = now if self.waiting_since is None else self.waiting_since
        return self._close() if now - self.waiting_since >= self.round_timeout_s else []

    def on_reopen(self, pushes: Sequence[Push]) -> None:  # the ledger says when
        self.round -= 1
        self.round_of.update({push.worker: self.round for push in pushes})
        self.arrived = {push.worker: push for push in pushes if push.worker in self.present}

    def _close_if_full(self) -> list[Action]:
        enough = max(1, len(self.present) - self.backup_workers)
        return self._close() if len(self.arrived) >= enough else []

    def _close(self) -> list[Action]:
        ranks = sorted(self.arrived)  # a fixed order makes the sum of a round the same to the bit
        pushes = tuple(self.arrived[rank] for rank in ranks)
        self.arrived, self.waiting_since = {}, None
        self.round += 1
        self.round_of.update(dict.fromkeys(ranks, self.round))
        return [Apply(pushes), *(Reply(rank) for rank in ranks)]


class AllReduce(Sync):
    """Sync, but workers make the mean among themselves, as torch's DistributedDataParallel does."""

    name = "allreduce"
    served = False
    options = ()


class Bounded(Discipline):
    """Apply-reply, but nobody starts a step more than `staleness` clocks ahead of the slowest.

    A worker's clock is the number of its gradients that are in. 0 keeps everybody in step, as
    sync does, with separate updates; infinity is apply-reply.
    """

    name = "bounded"
    options = (
        Option(
            name="staleness",
            default=1,
            always_shown=True,
            help="how many steps one may be ahead of the slowest, or inf",
        ),
    )

    def __init__(self, workers: Iterable[int], *, staleness: float = 1) -> None:
        super().__init__(workers)
        self.staleness = staleness
        self.clock = dict.fromkeys(self.present, 0)
        self.former: dict[int, int] = {}  # of those who left
        self.waiting: set[int] = set()

    def on_push(self, push: Push) -> list[Action]:
        self.clock[push.worker] += 1
        self.waiting.add(push.worker)
        return [Apply((push,)), *self._release()]

    def on_join(self, worker: int) -> list[Action]:
        if worker not in self.clock:  # as at other servers, which it may never have left
            slowest = min(self.clock.values(), default=0)
            former = self.former.get(worker, slowest)
            self.clock[worker] = int(max(former, slowest - self.staleness - 1))
        return super().on_join(worker)

    def on_leave(self, worker: int) -> list[Action]:
        super().on_leave(worker)
        self.former[worker] = self.clock.pop(worker, self.former.get(worker, 0))
        self.waiting.discard(worker)
        return self._release()

    def _release(self) -> list[Action]:
        slowest = min(self.clock.values(), default=0)
        ready = sorted(w for w in self.waiting if self.clock[w] - slowest <= self.staleness)
        self.waiting.difference_update(ready)
        return [Reply(worker) for worker in ready]
