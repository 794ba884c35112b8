"""The rest of the family of disciplines: those that drop what is old, or gather gradients.

disciplines.py has the idea, and what a server promises; these are classes of the same kind, with no
thread, socket, clock or arithmetic either. Where their papers differ is said in docs/staleness.md.

    >>> ringmaster = Ringmaster([0, 1], max_delay=2)
    >>> ringmaster.on_push(old := Push(worker=0, sequence=1, base_version=3, version=5))
    [Drop(push=old), Reply(worker=0)]
    >>> buffer = Buffer([0, 1], buffer_size=2)
    >>> buffer.on_push(first := Push(0, 1)), buffer.on_push(second := Push(0, 2))
    [Reply(0)], [Apply((first, second)), Reply(0)]

A gradient that is gathered is *pending*: its worker has its reply, and may push again before the
gradient goes in. The ledger keeps what has to be known of it, and the server a copy.
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from offbeat.disciplines import (
    Action,
    AllReduce,
    Apply,
    ApplyReply,
    Bounded,
    Discipline,
    Drop,
    LockFree,
    Push,
    Reply,
    ReplyApply,
    Sync,
)
from offbeat.plugins import Option


class Ringmaster(ApplyReply):
    """Apply-reply, but what is `max_delay` versions old or older is dropped, and answered at once.

    From Maranjyan, Tyurin and Richtarik 2025. Infinity is apply-reply.
    """

    name = "ringmaster"
    options = (
        Option(
            name="max_delay",
            default=16,
            least=1,
            always_shown=True,
            help="the staleness from which on a gradient is dropped, or inf",
        ),
    )

    def __init__(self, workers: Iterable[int], *, max_delay: float = 16) -> None:
        super().__init__(workers)
        self.max_delay = max_delay

    def on_push(self, push: Push) -> list[Action]:
        if push.staleness >= self.max_delay:
            return [Drop(push), Reply(push.worker)]
        return super().on_push(push)


class Gathering(Discipline):
    """Answers everybody at once, and makes one update of every `size` gradients.

    When nobody is left who could fill it, what was gathered makes a smaller update.
    """

    merges = True

    def __init__(self, workers: Iterable[int], size: int) -> None:
        super().__init__(workers)
        self.size = size
        self.gathered: list[Push] = []

    @abstractmethod
    def on_push(self, push: Push) -> list[Action]:
        """Whether it is gathered is what they differ in."""

    def on_leave(self, worker: int) -> list[Action]:
        super().on_leave(worker)
        return [] if self.present else self._close()

    def _gather(self, push: Push) -> list[Action]:
        self.gathered.append(push)
        closed = self._close() if len(self.gathered) >= self.size else []
        return [*closed, Reply(push.worker)]

    def _close(self) -> list[Action]:
        pushes, self.gathered = tuple(self.gathered), []
        return [Apply(pushes)] if pushes else []


class Rennala(Gathering):
    """An update is `collect` gradients that were computed on the present version; older ones are
    dropped. A worker that is quick computes several on the same parameters.

    From Tyurin and Richtarik 2023.
    """

    name = "rennala"
    options: ClassVar[tuple[Option, ...]] = (
        Option(
            name="collect",
            default=4,
            least=1,
            most=10**6,
            always_shown=True,
            help="how many gradients of the present version make an update",
        ),
    )

    def __init__(self, workers: Iterable[int], *, collect: int = 4) -> None:
        super().__init__(workers, int(collect))

    @property
    def gradients_per_update(self) -> int:
        """With those that are dropped: whoever did not close an update is at one that is old."""
        return self.size + max(0, len(self.present) - 1)

    def on_push(self, push: Push) -> list[Action]:
        if push.staleness > 0:
            return [Drop(push), Reply(push.worker)]
        return self._gather(push)


class Buffer(Gathering):
    """An update is any `buffer_size` gradients, whatever they were computed on.

    From Nguyen et al. 2022, where it is called FedBuff. 1 is apply-reply.
    """

    name = "buffer"
    options: ClassVar[tuple[Option, ...]] = (
        Option(
            name="buffer_size",
            default=4,
            least=1,
            most=10**6,
            always_shown=True,
            help="how many gradients make an update",
        ),
    )

    def __init__(self, workers: Iterable[int], *, buffer_size: int = 4) -> None:
        super().__init__(workers, int(buffer_size))

    @property
    def gradients_per_update(self) -> int:
        return self.size

    def on_push(self, push: Push) -> list[Action]:
        return self._gather(push)


BUILT_IN: dict[str, type[Discipline]] = {
    kind.name: kind
    for kind in (
        *(Sync, ApplyReply, ReplyApply, LockFree, Bounded),
        *(Ringmaster, Rennala, Buffer),
        AllReduce,
    )
}
"""All of Offbeat's own, by their names."""
