"""One worker's connection to a server, and the push of it that is being dealt with.

Made by sessions.py, which says when a reply is made, and when it is sent.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from offbeat.accounts import REJECTED
from offbeat.pushes import PushRecord
from offbeat.rows import Ids, Known, Rows
from offbeat.rules import Gradient
from offbeat.shard import Updater, usable
from offbeat.transport.base import PushHeader, ReplyHeader, ServerEnd, Slot

POLL_S = 0.2
"""How often workers that say nothing are looked at, and whether the server is to stop."""
TICK_S = 0.05
"""How often the discipline is told the time while somebody waits for a reply."""
LARGE_FROM = 500_000
"""Elements from which on a session has a thread of its own, and a gradient is looked at before the
lock is taken, since that takes so long that others should not have to wait for it. With a small
one, threads that take turns at the interpreter's lock cost more than they gain."""


@dataclass(eq=False, slots=True)
class Session:
    """Written by the thread that serves it, and under the shard's lock by the thread that closes a
    sync round or lets a bounded worker go on."""

    end: ServerEnd
    worker: int
    incarnation: int
    updater: Updater
    reply_made: threading.Condition | None
    """None in lock-free, where a session's own thread makes every reply."""
    outbox: "deque[Session] | None" = None
    """Where it is put when its reply is made, for the loop that serves it along with others; None:
    it has a thread of its own."""
    base: Tensor | None = None
    """The parameters that its next gradient is computed on, where the rule looks at them."""
    rows: Rows | None = None
    """Where sparse tensors lie in the slice, if any do."""
    known: Known | None = None
    """Which of their rows the worker has, as they are."""
    trusts_worker: bool = field(init=False)
    """On a device the worker, of the same process, has looked at a gradient; nobody waits again."""
    record: PushRecord = field(init=False)
    """There is none before the first push comes."""
    gradient: Gradient | None = None
    """None: refused, because an element of it is no usable number."""
    reply: ReplyHeader | None = None
    """One that is made, but not yet sent."""
    withheld: ReplyHeader | None = None
    """One that is made, and may not be sent before the journal is on the disk."""
    awaits_reply: bool = False
    is_finished: bool = False
    """The worker has said that its work is done."""
    is_gone: bool = False
    """The worker has left, or was sent away."""
    attended: threading.Lock = field(default_factory=threading.Lock)
    """Held by the worker's thread while it deals with a push, so that it does not leave meanwhile;
    before any other lock."""
    applying: threading.Lock = field(default_factory=threading.Lock)
    """Lock-free, held while its gradient goes in and is written down: by nobody else but who takes
    a snapshot, for which everybody stands still a moment."""

    def __post_init__(self) -> None:
        self.trusts_worker = self.end.reply_slot.is_on_device

    def begin(self, header: PushHeader, now: float) -> None:
        """Look at a push, before anybody is told of it."""
        self.record = PushRecord(
            self.worker,
            self.incarnation,
            header.sequence,
            header.batch,
            header.base_version,
            header.epoch,
            now,
            speed=header.speed,
        )
        slot = self.end.gradient_slot(header)
        ids: Ids | None = ()
        if self.rows is not None:
            slot = slot.filled(header)
            ids = _read_rows(self.rows, slot)
        if header.void or ids is None or not (self.trusts_worker or usable(slot.values)):
            self.gradient = None
            self.record.outcome = REJECTED
            return
        self.gradient = Gradient(
            slot.values,
            slot.mask.tolist() if header.masked else None,
            slot.floats,
            slot.ints,
            self.worker,
            header.base_version,
            self.base,
            slot.rates if slot.rates.numel() else None,
            ids,
        )

    def take_reply(self, header: ReplyHeader, *, withhold: bool = False) -> None:
        """The reply slot is filled, by whichever thread: `send_reply` has something to send, or
        (`withhold`) will have when `release` says so."""
        if self.rows is not None and self.known is not None and self.known.news is not None:
            slot, news = self.end.reply_slot, self.known.news
            header.num_rows = self.rows.write(news, slot.rows)
            header.num_bytes = self.rows.num_values(news) * slot.values.element_size()
        if self.base is not None:  # the gradient that is under way has the former one
            self.base = self.end.reply_slot.values.clone()
        self.withheld = header
        if not withhold:
            self.release()

    def release(self) -> None:
        """What is made may be sent."""
        self.reply, self.withheld = self.withheld, None
        if self.outbox is not None:
            self.outbox.append(self)
        elif self.reply_made is not None:
            self.reply_made.notify()

    def send_reply(self, clock: Callable[[], float]) -> None:
        """Send the reply, if it is made; only ever called by the thread that serves the session."""
        if self.reply is not None:
            self.end.send(self.reply)
            self.record.replied_s = clock()
            if self.end.num_coded:
                self.record.coding_s, self.end.coding_s = self.end.coding_s, 0.0
            self.reply = None
            self.awaits_reply = False


def _read_rows(rows: Rows, slot: Slot) -> Ids | None:
    """Which rows a gradient has; None: what it says makes no sense."""
    try:
        return rows.read(slot.rows, slot.values.numel())
    except ValueError:
        return None
