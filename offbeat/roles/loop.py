"""One thread that serves many workers of a server, where what each of them wants takes little time.

A thread for each would take turns with the others at the interpreter's lock, and with a small
slice that takes longer than the work itself. So here nobody is waited for: whoever has said
something is dealt with at once, and replies leave as soon as they are made, whichever push, leave
or deadline made them. What is done to the shard stays with roles/sessions.py, which has one:

    loop = Loop(host, clock, "ps-0-loop")
    loop.serve(session)     # until the worker leaves or the server stops
    loop.wake()             # a reply was made in another thread
    loop.join()
"""

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from offbeat.errors import ConnectionClosedError
from offbeat.ledger import Ledger
from offbeat.pushes import Action
from offbeat.roles.session import POLL_S, TICK_S, Session
from offbeat.transport.base import PushHeader

STOP_TIMEOUT_S = 10.0
HEAR_S = 0.005
"""How often connections are looked at while there are pushes to deal with all the time."""
HUNG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)


class Host(Protocol):
    """What is done on behalf of a session; none of it waits."""

    ledger: Ledger

    def push(self, session: Session, header: PushHeader) -> Sequence[Action]:
        """Deal with a gradient up to where replies have to leave; returns what comes after."""

    def act(self, event: Callable[[], Sequence[Action]]) -> None:
        """Carry out what the ledger answers to something else than a push."""

    def close_push(self, session: Session) -> None:
        """It has its reply, or will have none: write it down."""

    def look_at(self, session: Session) -> None:
        """Nothing has come that is a push: is the worker through, or gone?"""


@dataclass(eq=False, slots=True)
class _Member:
    """A session that is served here, and the thread that waits for its end."""

    session: Session
    descriptor: int
    error: BaseException | None = None
    over: threading.Event = field(default_factory=threading.Event)


class Loop:
    """Its thread is there from the first session on until the ledger is closing."""

    def __init__(self, host: Host, clock: Callable[[], float], name: str) -> None:
        self.outbox: deque[Session] = deque()
        """Whose reply is made, by whichever thread; sent here."""
        self._host = host
        self._ledger = host.ledger
        self._clock = clock
        self._name = name
        self._arrivals: deque[_Member] = deque()
        self._door = threading.Lock()
        """Held while the thread begins or ends, and while somebody comes to it."""
        self._thread: threading.Thread | None = None
        self._ears, self._bell = -1, -1
        # what follows is the thread's own
        self._members: dict[int, _Member] = {}
        """By descriptor."""
        self._waiting: dict[Session, _Member] = {}
        """For a reply that somebody else's push, a leave or a deadline makes."""
        self._look_at_s = 0.0
        self._hear_at_s = 0.0
        self._is_awake = False
        """Pushes are looked for where they lie, so that nobody has to tell of them."""
        self._poll = select.poll()

    def serve(self, session: Session) -> None:
        """Have a session served, and wait until it is over; raises what ended it."""
        descriptor = session.end.descriptor
        if descriptor is None:
            raise ConnectionClosedError("the connection was closed")
        member = _Member(session, descriptor)
        with self._door:
            if self._ledger.is_closing:
                return
            if self._thread is not None and self._bell < 0:
                raise ConnectionClosedError("the thread that serves all workers has failed")
            self._arrivals.append(member)
            if self._thread is None:
                self._start()
        self.wake()
        member.over.wait()
        if member.error is not None:
            raise member.error

    def wake(self) -> None:
        """There is something to do that no worker has said."""
        with self._door:
            if self._bell >= 0:
                with contextlib.suppress(BlockingIOError):  # it has not heard the last one yet
                    os.write(self._bell, b"\0")

    def join(self) -> None:
        """Wait for the thread to end, which a ledger that is closing sees to."""
        self.wake()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)

    def _start(self) -> None:
        self._ears, self._bell = os.pipe()
        os.set_blocking(self._ears, False)
        os.set_blocking(self._bell, False)
        self._poll.register(self._ears, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while not self._ledger.is_closing:
                self._take_turn()
            self._send_replies()
            for member in list(self._waiting.values()):
                self._answer(member)
        except BaseException as failure:  # of the loop itself: whoever waits for it is told
            error = failure
        with self._door:
            os.close(self._ears)
            os.close(self._bell)
            self._bell = -1
        for member in [*self._members.values(), *self._arrivals]:
            self._release(member, error)

    def _take_turn(self) -> None:
        """Deal with the pushes that are here; where there are none, wait for somebody to say
        something."""
        pushing = self._pushing() if self._is_awake else ()
        for member in pushing:
            self._heed(member, self._listen)
        now_s = time.monotonic()
        if not pushing:
            self._hear(self._wait())
        elif now_s >= self._hear_at_s:
            self._hear(self._poll.poll(0))
            self._hear_at_s = now_s + HEAR_S
        if now_s >= self._look_at_s:
            self._look_around()
            self._look_at_s = now_s + self._patience_s

    def _pushing(self) -> Sequence[_Member]:
        """Who has a push here that can be dealt with."""
        return [
            member
            for member in self._members.values()
            if member.session.end.has_push() and member.session not in self._waiting
        ]

    def _wait(self) -> Sequence[tuple[int, int]]:
        """Wait until somebody says something over its connection; returns who. When several do at
        once there is enough to do to stay awake, and they need not say it there."""
        came_meanwhile = False
        if self._is_awake:
            self._stay_awake(False)
            came_meanwhile = bool(self._pushing())
        ready = self._poll.poll(0 if came_meanwhile else 1e3 * self._patience_s)
        if came_meanwhile or len(ready) > 1:
            self._stay_awake(True)
        return ready

    def _stay_awake(self, awake: bool) -> None:
        self._is_awake = awake
        for member in self._members.values():
            member.session.end.rest(not awake)

    @property
    def _patience_s(self) -> float:
        return TICK_S if self._waiting else POLL_S

    def _hear(self, ready: Sequence[tuple[int, int]]) -> None:
        """Deal with whoever says something over its connection, or hangs up."""
        for descriptor, _ in ready:
            member = self._members.get(descriptor)
            if member is None:
                self._hear_bell()
            else:
                waits = member.session in self._waiting
                self._heed(member, self._vanish if waits else self._listen)

    def _hear_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):  # somebody hung up in this turn, no bell
            os.read(self._ears, select.PIPE_BUF)
        self._send_replies()
        while self._arrivals:
            member = self._arrivals.popleft()
            former = self._members.get(member.descriptor)
            if member.session.end.descriptor is None:
                self._release(member, ConnectionClosedError("the connection was closed"))
                continue
            if former is not None:  # its connection was closed, and the number was free again
                self._release(former, ConnectionClosedError("the connection was closed"))
            self._admit(member)

    def _admit(self, member: _Member) -> None:
        self._members[member.descriptor] = member
        self._poll.register(member.descriptor, select.POLLIN)
        end = member.session.end
        end.rest(not self._is_awake)
        if end.has_push():  # from before anybody was told to say so
            self._heed(member, self._listen)

    def _look_around(self) -> None:
        """Time has gone by."""
        for member in list(self._waiting.values())[:1]:
            self._heed(member, self._tick)
        for member in list(self._members.values()):
            if member.session.end.descriptor is None:  # closed by another thread, unheard
                self._release(member, ConnectionClosedError("the connection was closed"))
            elif member.session not in self._waiting:
                has_push = member.session.end.has_push()  # of which nobody told, or not in time
                self._heed(member, self._listen if has_push else self._look_at)

    # -- one session ---------------------------------------------------------------------------

    def _heed(self, member: _Member, deal_with: Callable[[_Member], None]) -> None:
        """What fails ends the session on whose behalf it was done; its own thread tells of it."""
        try:
            deal_with(member)
        except BaseException as error:  # also a user's sys.exit(), or everybody would wait for ever
            self._release(member, error)
        self._send_replies()

    def _tick(self, _: _Member) -> None:
        self._host.act(lambda: self._ledger.tick(self._clock()))

    def _look_at(self, member: _Member) -> None:
        self._host.look_at(member.session)

    def _vanish(self, member: _Member) -> None:
        """A worker is gone that waited for its reply; unless it was the one before it, whose
        connection had the same number."""
        if member.session.end.is_open():
            return
        self._host.act(lambda: self._ledger.vanish(member.session.worker))
        self._answer(member)

    def _listen(self, member: _Member) -> None:
        session = member.session
        header = session.end.receive(0.0)
        if header is None:
            self._host.look_at(session)
            return
        later = self._host.push(session, header)
        self._send_replies()
        if later:
            self._host.act(lambda: later)
            self._send_replies()
        if session.awaits_reply:  # until then, all there is to hear is that it hangs up
            self._waiting[session] = member
            self._poll.modify(member.descriptor, HUNG_UP)
        else:
            self._host.close_push(session)

    def _send_replies(self) -> None:
        while self.outbox:
            session = self.outbox.popleft()
            session.send_reply(self._clock)
            if session in self._waiting:
                self._answer(self._waiting[session])

    def _answer(self, member: _Member) -> None:
        """It waits no longer."""
        del self._waiting[member.session]
        self._host.close_push(member.session)
        self._poll.modify(member.descriptor, select.POLLIN)

    def _release(self, member: _Member, error: BaseException | None) -> None:
        """The session is over here; what is left to do, its own thread does."""
        if member.over.is_set():
            return
        if self._members.get(member.descriptor) is member:
            del self._members[member.descriptor]
            self._poll.unregister(member.descriptor)
        self._waiting.pop(member.session, None)
        member.error = error
        member.over.set()
