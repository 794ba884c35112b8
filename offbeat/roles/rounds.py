"""A round that a server has closed, and does not let go in before it is told the norm of the whole
gradient, of which it has a slice. sessions.py has the last one; norms.py asks for it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from offbeat.clipping import Arriving
from offbeat.disciplines import Push
from offbeat.pushes import Action, PushRecord
from offbeat.roles.calls import RoundPart
from offbeat.shard import Begun, Updater


@dataclass(eq=False, slots=True)
class ClosedRound:
    """Written under the shard's lock."""

    number: int
    """How many were closed, with this one."""
    pushes: Sequence[Push]
    records: Sequence[PushRecord]
    """Of those that make the update."""
    updater: Updater
    begun: Begun | None = None
    """None: nobody took part."""
    tensors: Sequence[int] = ()
    norms: Arriving | None = None
    """Of this slice's part of each of these tensors."""
    is_held: bool = False
    """The norm of the whole is not known yet."""
    replies: Sequence[Action] = ()
    """What follows when it has gone in."""
    events: list[Callable[[], Sequence[Action]]] = field(default_factory=list)
    """What the ledger is told, and asks for, after that."""
    orphans: list[PushRecord] = field(default_factory=list)
    """Those whose workers left meanwhile."""

    def put_off(self, actions: Sequence[Action]) -> None:
        self.events.append(lambda: actions)

    def part(self, here: RoundPart) -> RoundPart:
        """What a server that is `here` tells of it; waits for a device that measures."""
        norms = [] if self.norms is None else self.norms.values()
        return dataclasses.replace(
            here,
            number=self.number,
            pushes=frozenset((push.worker, push.sequence) for push in self.pushes),
            norms=dict(zip(self.tensors, norms, strict=True)),
        )
