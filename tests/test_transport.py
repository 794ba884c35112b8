"""One suite that every transport passes; offbeat/transport/base.py is the contract it checks."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from rig import TRANSPORTS, knock, open_listener

from offbeat.errors import ConnectionClosedError
from offbeat.transport.base import Header, Layout, Listener, ServerEnd, WorkerEnd

LAYOUT = Layout(num_elements=5, num_tensors=2, num_floats=3, num_ints=1)
HELLO = {"worker": 3, "incarnation": 1}
T = 10.0

Connect = Callable[[], WorkerEnd]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Iterator[tuple[Listener, Connect]]:
    """A listener and a way to connect to it; whatever a test leaves open is closed for it."""
    listener = open_listener(request.param, LAYOUT)
    opened: list[WorkerEnd | ServerEnd] = []

    def connect() -> WorkerEnd:
        end = knock(listener, HELLO, LAYOUT)
        opened.append(end)
        return end

    accept = listener.accept

    def remembering(timeout_s: float) -> ServerEnd | None:
        end = accept(timeout_s)
        if end is not None:
            opened.append(end)
        return end

    listener.accept = remembering  # type: ignore[method-assign]
    yield listener, connect
    while opened:
        opened.pop().close()  # with the end goes its memory
    listener.close()


def header(sequence: int, **more: int) -> Header:
    return Header(worker=3, incarnation=1, sequence=sequence, base_version=0, batch=0, **more)


def connected(transport: tuple[Listener, Connect]) -> tuple[WorkerEnd, ServerEnd]:
    """Both ends of a connection, the welcome's parameters being 1, 2, 3, 4, 5."""
    listener, connect = transport
    ends: list[WorkerEnd] = []
    thread = threading.Thread(target=lambda: ends.append(connect()))
    thread.start()
    server = listener.accept(T)
    assert server is not None
    assert server.read_hello(T) == HELLO
    server.reply_slot.values.copy_(torch.arange(1.0, 6.0))
    server.welcome(header(0, reply_version=40))
    thread.join()
    return ends[0], server


def test_the_welcome_brings_the_hello_up_and_parameters_down(
    transport: tuple[Listener, Connect],
) -> None:
    worker, _ = connected(transport)
    assert worker.welcome.reply_version == 40
    assert worker.reply_slot.values.tolist() == [1, 2, 3, 4, 5]


def test_a_push_brings_header_gradient_mask_and_buffers(
    transport: tuple[Listener, Connect],
) -> None:
    worker, server = connected(transport)
    slot = worker.gradient_slot
    slot.values.copy_(torch.arange(5.0))
    slot.mask.copy_(torch.tensor([1, 0]))
    slot.floats.fill_(2.5)
    slot.ints.fill_(2**40)
    worker.push(Header(3, 1, 7, base_version=11, batch=13, void=True))
    received = server.receive(T)
    assert received == Header(3, 1, 7, base_version=11, batch=13, void=True)
    payload = server.gradient_slot(received)
    assert payload.values.tolist() == [0, 1, 2, 3, 4]
    assert payload.mask.tolist() == [1, 0]
    assert payload.floats.tolist() == [2.5] * 3
    assert payload.ints.tolist() == [2**40]


def test_a_reply_brings_parameters_and_buffers(transport: tuple[Listener, Connect]) -> None:
    worker, server = connected(transport)
    worker.push(header(1))
    assert server.receive(T) is not None
    server.reply_slot.values.fill_(8)
    server.reply_slot.floats.fill_(0.5)
    server.reply_slot.ints.fill_(-3)
    server.send(header(1, reply_version=41))
    reply = worker.wait_reply(T)
    assert reply is not None and reply.reply_version == 41
    assert worker.reply_slot.values.tolist() == [8] * 5
    assert worker.reply_slot.floats.tolist() == [0.5] * 3
    assert worker.reply_slot.ints.tolist() == [-3]


def test_a_gradient_outlives_the_writing_of_the_next_one(
    transport: tuple[Listener, Connect],
) -> None:
    """What reply-apply needs: the worker goes on while its last gradient is still being applied."""
    worker, server = connected(transport)
    worker.gradient_slot.values.fill_(1)
    worker.push(header(1))
    first = server.receive(T)
    assert first is not None
    payload = server.gradient_slot(first)
    server.send(header(1))
    worker.wait_reply(T)
    worker.gradient_slot.values.fill_(2)
    worker.push(header(2))
    assert payload.values.tolist() == [1] * 5
    second = server.receive(T)
    assert second is not None
    assert server.gradient_slot(second).values.tolist() == [2] * 5


def test_waiting_for_nothing_ends_with_the_timeout(transport: tuple[Listener, Connect]) -> None:
    worker, server = connected(transport)
    assert worker.wait_reply(0.01) is None
    assert server.receive(0.01) is None
    listener, _ = transport
    assert listener.accept(0.01) is None


def test_a_worker_that_leaves_is_noticed_after_what_it_pushed(
    transport: tuple[Listener, Connect],
) -> None:
    worker, server = connected(transport)
    worker.push(header(1))
    worker.close()
    worker.close()
    received = server.receive(T)
    assert received is not None and received.sequence == 1
    for _ in range(2):
        with pytest.raises(ConnectionClosedError):
            server.receive(T)
    server.send(header(1))  # nobody reads it; no harm


def test_a_server_that_leaves_is_noticed_with_its_reason(
    transport: tuple[Listener, Connect],
) -> None:
    worker, server = connected(transport)
    worker.push(header(1))
    server.close("out of memory")
    server.close()
    for _ in range(2):
        with pytest.raises(ConnectionClosedError, match="out of memory"):
            worker.wait_reply(T)


def try_to_join(connect: Connect, errors: list[Exception]) -> threading.Thread:
    """Ask to come in, in a thread of its own; what is answered instead of a welcome is kept."""

    def join() -> None:
        try:
            connect()
        except ConnectionClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    return thread


def test_a_refusal_reaches_the_worker(transport: tuple[Listener, Connect]) -> None:
    listener, connect = transport
    errors: list[Exception] = []
    thread = try_to_join(connect, errors)
    server = listener.accept(T)
    assert server is not None
    server.read_hello(T)
    server.refuse("wrong model")
    thread.join()
    assert "wrong model" in str(errors[0])


def test_a_worker_at_the_door_of_a_closing_listener_is_refused_at_once(
    transport: tuple[Listener, Connect],
) -> None:
    listener, connect = transport
    errors: list[Exception] = []
    threads = [try_to_join(connect, errors) for _ in range(4)]
    listener.close()
    for thread in threads:
        thread.join(T / 2)
    assert len(errors) == 4


def test_a_closed_listener_takes_nobody_in_but_keeps_its_connections(
    transport: tuple[Listener, Connect],
) -> None:
    worker, server = connected(transport)
    listener, connect = transport
    listener.close()
    listener.close()
    for _ in range(2):
        with pytest.raises(ConnectionClosedError):
            listener.accept(T)
    with pytest.raises(ConnectionClosedError):
        connect()
    worker.push(header(1))
    assert server.receive(T) is not None
