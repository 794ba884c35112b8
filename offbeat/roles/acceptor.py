"""Who comes to a server's door, until it is known who that is.

Used by a server that an engine started, and by one that was started by hand.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable

from offbeat.errors import ConnectionClosedError
from offbeat.transport.base import Listener, Message, ServerEnd

POLL_S = 0.2
"""How often the door is looked at for whether it is to be closed."""
HELLO_TIMEOUT_S = 10.0
MAX_STRANGERS = 64
"""How many may be on their way in at the same time, not yet known to be ours."""
MAX_REASONS = 100
"""Why strangers were sent away: more are not told apart."""
CLOSE_TIMEOUT_S = 10.0
"""How long to wait for each thread of somebody who came in, in the end."""


class Acceptor:
    """Takes in whoever comes to a listener, each in a thread of its own: first the hello, then what
    `serve` makes of it. Of those who have not said it yet there are never many."""

    def __init__(
        self,
        listener: Listener,
        serve: Callable[[ServerEnd, Message], None],
        name: str,
        log: logging.Logger,
    ) -> None:
        self._listener = listener
        self._serve = serve
        self._name = name
        self._log = log
        self._sent_away: Counter[str] = Counter()
        self._closed = False
        self._strangers: set[ServerEnd] = set()
        self._threads: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Take nobody in any more. Any thread may call it, also twice."""
        self._closed = True
        self._listener.close()
        for end in list(self._strangers):
            end.close("the server was stopped")

    def join(self) -> None:
        """Wait for the threads to end, which `serve` has to see to."""
        for thread in [self._thread, *self._threads]:
            if thread.ident is not None:
                thread.join(CLOSE_TIMEOUT_S)

    def _accept(self) -> None:
        while not self._closed:
            try:
                end = self._listener.accept(POLL_S)
            except ConnectionClosedError:
                return
            if end is None:
                continue
            if len(self._strangers) >= MAX_STRANGERS:
                end.close("too many are waiting to be let in")
                continue
            self._strangers.add(end)
            name = f"{self._name}-session"
            thread = threading.Thread(target=self._greet, args=(end,), name=name, daemon=True)
            self._threads = [t for t in self._threads if t.is_alive()]
            self._threads.append(thread)
            thread.start()
            if self._closed and end in self._strangers:  # `close` did not know of this one
                end.close("the server was stopped")

    def _greet(self, end: ServerEnd) -> None:
        try:
            hello = end.read_hello(HELLO_TIMEOUT_S)
        except (ConnectionClosedError, OSError, ValueError) as error:
            end.close(str(error))
            self._note(str(error))
            return
        finally:
            self._strangers.discard(end)
        self._serve(end, hello)

    def _note(self, why: str) -> None:
        """That somebody was sent away: the first time, the tenth, the hundredth, ... since
        strangers must not be able to fill a disk."""
        if len(self._sent_away) < MAX_REASONS or why in self._sent_away:
            self._sent_away[why] += 1
            times = self._sent_away[why]
            if times == 10 ** (len(str(times)) - 1):
                self._log.warning("sent somebody away (%d): %.200s", times, why)
