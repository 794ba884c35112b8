"""A group of processes: they meet where they are told to, have what rank 0 hands out, add up, and
hear at once that one of them is gone."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import free_ports

from offbeat.errors import ConfigError, ConnectionClosedError
from offbeat.transport.group import Group, _is_here

PROGRAM = """
import json, sys, time
import torch
from offbeat.errors import ConnectionClosedError
from offbeat.transport.group import Group

meeting, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
group = Group(meeting, rank=rank, size=size, check=lambda: None)
group.meet(timeout_s=60)
given = {
    "matrix": torch.arange(6.0).reshape(2, 3).t(),
    "flag": torch.tensor(True),
    "none": torch.empty(0, 4),
    "short": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
}
message = {"version": 7, "text": "gl\\u00fcck"}
if rank == 0:
    group.hand_out(message, given)
else:
    said, found = group.take_over()
    assert said == message, said
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
total, largest = torch.full((3,), 1.0 + rank), torch.tensor([rank, -rank])
group.begin([total], largest)
group.wait()
print(json.dumps([total.tolist(), largest.tolist()]), flush=True)
if rank == size - 1:
    time.sleep(600)  # it takes part in no other sum
group.begin([total])
try:
    group.wait()
except ConnectionClosedError as error:
    print(json.dumps(str(error)), flush=True)
group.close()
"""


@contextlib.contextmanager
def started(meeting: str, size: int) -> Iterator[list[subprocess.Popen[str]]]:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, meeting, str(rank), str(size)],
            stdout=subprocess.PIPE,
            text=True,
            env={k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"},
        )
        for rank in range(size)
    ]
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_a_group_meets_hands_out_adds_up_and_hears_of_a_death() -> None:
    with started(f"tcp:127.0.0.1:{free_ports(1)[0]}", 3) as children:
        for child in children:
            assert child.stdout is not None
            assert json.loads(child.stdout.readline()) == [[6.0] * 3, [2, 0]]
        children[2].send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        for child in children[:2]:
            assert child.stdout is not None
            said = json.loads(child.stdout.readline())
            assert said.startswith("another worker is gone (") and "\n" not in said
            assert child.wait(30) == 0
        assert time.monotonic() - killed_s < 20, "no timeout has to pass"


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    group = Group(f"file:{tmp_path / 'meeting'}", rank=1, size=3, check=lambda: None)
    with pytest.raises(ConnectionClosedError, match=r"worker 0, 2 did not come within 0\.1 s"):
        group.meet(timeout_s=0.1)


def test_a_wait_for_the_others_ends_when_it_is_to(tmp_path: Path) -> None:
    def check() -> None:
        raise ConnectionClosedError("told to stop", over=True)

    group = Group(f"file:{tmp_path / 'meeting'}", rank=0, size=2, check=check)
    with pytest.raises(ConnectionClosedError, match="told to stop"):
        group.meet(timeout_s=60)


@pytest.mark.parametrize("meeting", ["", "here", "tcp:", "tcp:host", "udp:host:1", "tcp:host:x"])
def test_an_address_that_is_none_is_refused_in_a_line(meeting: str) -> None:
    with pytest.raises(ConfigError, match="workers meet at file:PATH or tcp:HOST:PORT"):
        Group(meeting, rank=0, size=2, check=lambda: None).meet(timeout_s=1)


@pytest.mark.parametrize(
    ("meeting", "is_here"),
    [
        ("file:/x", True),
        ("tcp:127.0.0.1:1", True),
        ("tcp:localhost:1", True),
        ("tcp:[::1]:1", True),
        ("tcp:10.0.0.1:1", False),
        ("tcp:node-1:1", False),
    ],
)
def test_on_one_machine_nobody_else_need_hear_them(meeting: str, is_here: bool) -> None:
    assert _is_here(meeting) is is_here
