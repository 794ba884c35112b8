"""A slow link: when bytes arrive, by a clock that jumps; and that they arrive as they were sent."""

import json
import socket
import subprocess
import sys
import threading

import pytest

from offbeat.bench.link import CHUNK, Wire


def test_bytes_take_their_turn_and_then_their_time() -> None:
    wire = Wire(bytes_per_s=1000, delay_s=0.5)
    assert wire.send(500, now_s=10.0) == 11.0
    assert wire.send(500, now_s=10.0) == 11.5, "behind those before it"
    assert wire.send(1000, now_s=20.0) == 21.5, "what was not used is not saved up"


def test_a_link_without_a_rate_is_only_late() -> None:
    wire = Wire(delay_s=0.5)
    assert [wire.send(10**9, now_s=3.0) for _ in range(2)] == [3.5, 3.5]


@pytest.mark.parametrize(("rate", "delay_s"), [(1e6, 0.1), (1e5, 0.0)])
def test_what_is_under_way_is_bounded(rate: float, delay_s: float) -> None:
    wire = Wire(rate, delay_s)
    assert rate * delay_s < wire.most_chunks * CHUNK < rate * delay_s + (1 << 19)


def test_bytes_arrive_as_they_were_sent_and_an_end_is_passed_on() -> None:
    sent, received = bytes(range(256)) * 4096, bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            connection, _ = server.accept()
            with connection:
                while len(received) < len(sent):
                    received.extend(connection.recv(1 << 16))
                connection.sendall(b"thanks")

        taker = threading.Thread(target=take)
        taker.start()
        port = server.getsockname()[1]
        command = [sys.executable, "-m", "offbeat.bench.link", f"127.0.0.1:{port}", "--count", "2"]
        with subprocess.Popen(
            [*command, "--mbit", "800", "--delay-ms", "5"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as link:
            assert link.stdout is not None
            other, mine = json.loads(link.stdout.readline())
            with socket.create_connection(("127.0.0.1", mine), timeout=30) as connection:
                connection.sendall(sent)
                assert connection.recv(64) == b"thanks"
                assert connection.recv(64) == b"", "it is over there, and so here"
            taker.join()
            with socket.create_connection(("127.0.0.1", other), timeout=30) as left_open:
                server.accept()[0].close()
                assert left_open.recv(64) == b"", "and the other way is open still"
                output, complaints = link.communicate(timeout=30)
            assert (link.returncode, complaints) == (0, b"")
            assert json.loads(output) == [len(sent), len(b"thanks")]
    assert received == sent
