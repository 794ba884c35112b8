"""Headers in memory that two processes share: no system call while the other one is awake.

A box holds one message, and the next one only when that was answered. Whoever is about to wait for
the other one says so first, and looks once more. A message for somebody who sleeps goes over the
socket, which wakes it; who falls asleep just as something is put in is rung for, with a beat. Used
by sockets.py, for both directions of a connection:

    if box.reader_sleeps():
        send(message)
    elif box.put(message):      # and now it does
        ring()

    message = box.take()        # None: nothing new
    box.sleeps(True)
    if not box.has_come():
        wait_for_the_socket()
    box.sleeps(False)
"""

import platform
import threading

from offbeat.errors import ConnectionClosedError
from offbeat.memory import ALIGNMENT, aligned

IN_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether a processor shows others what it has written in the order in which it wrote it. Where it
may not, headers travel over the socket."""
_COUNT, _SLEEPS, _MESSAGE = 0, ALIGNMENT, 2 * ALIGNMENT


class Box:
    """One end of it, as either process has it. `memory`: `Box.num_bytes` of zeros to begin with."""

    def __init__(self, memory: memoryview, message_bytes: int) -> None:
        self._count = memory[_COUNT : _COUNT + 8].cast("Q")
        self._sleeps = memory[_SLEEPS : _SLEEPS + 1]
        self._message = memory[_MESSAGE : _MESSAGE + message_bytes]
        self._num_put = 0
        self._num_taken = 0
        self._fence = threading.Lock()
        """To take a lock has a processor finish its writing before it reads on."""

    @staticmethod
    def num_bytes(message_bytes: int) -> int:
        return _MESSAGE + aligned(message_bytes)

    def reader_sleeps(self) -> bool:
        return self._sleeps[0] != 0

    def put(self, message: bytes) -> bool:
        """Returns whether the reader has to be woken."""
        self._message[:] = message
        self._num_put += 1
        self._count[0] = self._num_put  # what the other process may have written is not asked for
        with self._fence:
            return self._sleeps[0] != 0

    def has_come(self) -> bool:
        return self._count[0] != self._num_taken

    def take(self) -> bytes | None:
        """What has come; a ConnectionClosedError where that cannot be."""
        count = self._count[0]
        if count == self._num_taken:
            return None
        if count != self._num_taken + 1:
            raise ConnectionClosedError("the other end's headers are out of order")
        self._num_taken = count
        return self._message.tobytes()

    def sleeps(self, sleeps: bool) -> None:
        """Whether the reader is about to look no more, so that it has to be woken."""
        self._sleeps[0] = sleeps
        with self._fence:
            pass
