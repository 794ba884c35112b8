"""Headers in shared memory: what is put in is taken once, and who sleeps has to be woken."""

import threading

import pytest

from offbeat.errors import ConnectionClosedError
from offbeat.transport.boxes import Box


def both_ends() -> tuple[Box, Box]:
    memory = memoryview(bytearray(Box.num_bytes(4)))
    return Box(memory, 4), Box(memory, 4)


def test_what_is_put_in_is_taken_once() -> None:
    writer, reader = both_ends()
    assert not reader.has_come() and reader.take() is None
    writer.put(b"this")
    assert reader.has_come() and reader.take() == b"this"
    assert not reader.has_come() and reader.take() is None
    writer.put(b"that")
    assert reader.take() == b"that"


def test_the_writer_is_told_whether_the_reader_sleeps() -> None:
    writer, reader = both_ends()
    assert not writer.put(b"this")
    reader.sleeps(True)
    assert writer.put(b"that")
    reader.sleeps(False)
    assert not writer.put(b"last")


@pytest.mark.parametrize("count", [2, 7, 2**64 - 1])
def test_a_count_that_cannot_be_is_the_end_of_a_connection_and_of_nothing_else(count: int) -> None:
    memory = memoryview(bytearray(Box.num_bytes(4)))
    writer, reader = Box(memory, 4), Box(memory, 4)
    memory[:8].cast("Q")[0] = count
    with pytest.raises(ConnectionClosedError, match="out of order"):
        reader.take()
    writer.put(b"this")
    assert reader.take() == b"this"


def test_nobody_sleeps_through_a_message() -> None:
    """Reader and writer as sockets.py has them; a lost ring would leave the reader waiting."""
    to, fro = both_ends(), both_ends()
    bells = threading.Semaphore(0), threading.Semaphore(0)

    def take(box: Box, bell: threading.Semaphore) -> None:
        while box.take() is None:
            box.sleeps(True)
            if not box.has_come():
                assert bell.acquire(timeout=10)
            box.sleeps(False)

    def answer() -> None:
        for _ in range(2_000):
            take(to[1], bells[0])
            if fro[0].put(b"back"):
                bells[1].release()

    thread = threading.Thread(target=answer)
    thread.start()
    for _ in range(2_000):
        if to[0].put(b"here"):
            bells[0].release()
        take(fro[1], bells[1])
    thread.join(10)
    assert not thread.is_alive()
