"""For a worker whose own thread does what its session's thread would: deal with its pushes.

sessions.py gives one to each end; those of a transport between threads take it, where all there is
to do is to tell a device (transport/inproc.py). What goes wrong is raised in the worker's thread,
and passed on to the session's, which ends.
"""

from typing import Protocol

from offbeat.roles.session import Session
from offbeat.transport.base import PushHeader


class Host(Protocol):
    """What is done on behalf of a session."""

    def take(self, session: Session, header: PushHeader) -> None:
        """Follow a gradient as far as nobody else has to be waited for."""

    def await_reply(self, session: Session) -> None:
        """Wait a moment for somebody else to answer it."""


class SessionAttendant:
    def __init__(self, host: Host, session: Session) -> None:
        self._host = host
        self._session = session

    def push(self, header: PushHeader) -> None:
        with self._session.attended:
            if not self._session.is_gone:
                self._host.take(self._session, header)

    def wait(self, timeout_s: float) -> bool:
        session = self._session
        with session.attended:
            if session.is_gone or not session.awaits_reply:
                return False
            self._host.await_reply(session)
        return True
