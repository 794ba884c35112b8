"""A push and what becomes of it, and what a server does about it, as its ledger says.

    record = PushRecord(worker=0, incarnation=0, sequence=1)
    record.event_line(shard=0)      # its event, when it is known what became of it

Made by whoever receives pushes (roles/session.py), and settled by ledger.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.accounts import ACCEPTED, DUPLICATE, STALE
from offbeat.disciplines import Apply, Push, Reply

ABSTAINING = (DUPLICATE, STALE)
"""Nothing comes of such a push, whatever it takes part in."""


@dataclass(slots=True)
class PushRecord:
    """One push, and what becomes of it. It is known by worker, incarnation and sequence."""

    worker: int
    incarnation: int
    sequence: int
    batch: int = 0
    base_version: int = 0
    """The version of the shard that its gradient was computed on."""
    epoch: int = 0
    """Of the server that it was meant for."""
    received_s: float = 0.0
    outcome: str = ACCEPTED
    """A gradient that is no usable number begins as rejected."""
    version: int | None = None
    """The one that it made."""
    staleness: int | None = None
    mixed: bool = False
    """Its reply was read while an update was under way."""
    applied_s: float | None = None
    replied_s: float | None = None
    is_settled: bool = False
    """The worker's account has it."""
    lr: float | None = None
    """The learning rate that its update was made with."""
    speed: float = 0.0
    """What its worker told of its own: local steps per second; 0: nothing."""
    norm: Callable[[], float] | None = None
    """Tells the norm of what its update was made with, before the server clipped that."""
    is_decided: bool = False
    """An Apply or a Drop has it."""
    is_pending: bool = False
    """It was answered before that; so it stays, whatever becomes of it."""
    is_answered_first: bool = False
    """Where the server promises: its reply comes before its update, or whatever becomes of it."""
    is_closed: bool = False
    """Its worker's session is done with it, and it was pending then."""
    copy: Any = None
    """Of its gradient, while it is pending; nobody looks into it here."""
    coding_s: float = 0.0
    """Seconds of a processor that it took to decode it, and to encode the reply."""

    def event_line(self, shard: int) -> str:
        """Its event. There are more of them than of any other, so that it is not put together by
        json."""
        version, staleness = self.version, self.staleness
        norm = "" if self.norm is None else f', "norm": {number(self.norm())}'
        lr = "" if self.lr is None else f', "lr": {number(self.lr)}'
        coding = "" if not self.coding_s else f', "coding_s": {self.coding_s:.6f}'
        return (
            f'{{"kind": "push", "shard": {shard}, "worker": {self.worker}, '
            f'"incarnation": {self.incarnation}, "sequence": {self.sequence}, '
            f'"batch": {self.batch}, "base_version": {self.base_version}, '
            f'"outcome": "{self.outcome}", "version": {"null" if version is None else version}, '
            f'"staleness": {"null" if staleness is None else staleness}, '
            f'"mixed": {"true" if self.mixed else "false"}, '
            f'"received_s": {self.received_s:.6f}, "applied_s": {_seconds(self.applied_s)}, '
            f'"replied_s": {_seconds(self.replied_s)}{lr}{norm}{coding}}}'
        )


@dataclass(eq=False, slots=True)
class SnapshotRequest:
    """The master wants a snapshot at the first version that is not below this one."""

    at_version: int
    snapshot: Any = None
    """What was kept for it; nobody looks into it here."""


@dataclass(frozen=True, slots=True)
class Dismiss:
    reason: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    request: SnapshotRequest


@dataclass(frozen=True, slots=True)
class Copy:
    record: PushRecord


@dataclass(frozen=True, slots=True)
class Write:
    record: PushRecord


@dataclass(frozen=True, slots=True)
class Send:
    record: PushRecord


Action = Apply | Reply | Dismiss | Snapshot | Copy | Write | Send


def replies_first(actions: Sequence[Action], push: Push) -> bool:
    """Whether the worker of this push is answered before its update is made."""
    for action in actions:
        if isinstance(action, Reply) and action.worker == push.worker:
            return True
        if isinstance(action, Apply) and push in action.pushes:
            return False
    return False


def cut(actions: Sequence[Action]) -> tuple[Sequence[Action], Sequence[Action]]:
    """Cut actions where an Apply follows a Reply: what was replied so far must leave before it."""
    replied = False
    for index, action in enumerate(actions):
        if replied and isinstance(action, Apply):
            return actions[:index], actions[index:]
        replied = replied or isinstance(action, Reply)
    return actions, ()


def number(value: float) -> str:
    """As JSON has it, which knows no NaN."""
    return repr(value) if math.isfinite(value) else "null"


def _seconds(value: float | None) -> str:
    return "null" if value is None else f"{value:.6f}"
