"""A group of processes: they meet where they are told to, have what rank 0 hands out, add up, and
hear at once that one of them is gone."""

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from processes import free_ports

from offbeat.errors import ConfigError, ConnectionClosedError
from offbeat.transport.group import Group, _is_here, _prepare_nccl

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
def started(
    meeting: str, size: int, program: str = PROGRAM, variables: Sequence[str] = ()
) -> Iterator[list[subprocess.Popen[str]]]:
    """`variables` of their environment: those with RANK in them are another one's for each."""
    given = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, meeting, str(rank), str(size)],
            stdout=subprocess.PIPE,
            text=True,
            env=given | dict(v.replace("RANK", str(rank)).split("=") for v in variables),
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


# -- NCCL ------------------------------------------------------------------------------------------

GPU = torch.device("cuda", 0)


class Sum:
    """One on a GPU that takes so many looks; `error`: what it comes to; `lost`: the GPU is."""

    lost = False

    def __init__(self, num_looks: int = 0, error: str = "") -> None:
        self.num_looks = num_looks
        self.error = error
        self.is_taken = False

    def is_completed(self) -> bool:
        if self.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        self.num_looks -= 1
        return self.num_looks < 0

    def wait(self) -> None:
        assert self.num_looks < 0, "it would wait for ever where somebody is gone"
        self.is_taken = True
        if self.error:
            raise RuntimeError(self.error)


def waiting(*sums: Sum, check: Callable[[], None] = lambda: None) -> Group:
    group = Group("file:/nowhere", rank=0, size=2, check=check, gpu=GPU)
    for one in sums:
        group._note(cast("dist.Work", one), is_on_gpu=True)
    return group


def test_a_sum_on_the_gpu_is_awaited_by_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = Sum(), Sum(50), Sum(3)
    group = waiting(*sums)
    group.wait()
    assert all(one.is_taken for one in sums)
    group.wait()  # for nothing
    monkeypatch.setattr("offbeat.transport.group.SPIN_S", 0.0)
    waiting(late := Sum(5)).wait()
    assert late.is_taken, "also one that takes long"


def test_a_wait_for_the_gpu_ends_when_it_is_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        if never.num_looks < 10**9 - 20:
            raise ConnectionClosedError("told to stop", over=True)

    never = Sum(10**9)
    with pytest.raises(ConnectionClosedError, match="told to stop"):
        waiting(never, check=check).wait()
    monkeypatch.setattr("offbeat.transport.group.TIMEOUT", datetime.timedelta(seconds=0.05))
    with pytest.raises(ConnectionClosedError, match="NCCL was not through with a sum"):
        waiting(never).wait()


NCCL_ERROR = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, remote \
process exited or there was a network error, NCCL version 2.28.9
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting.
Last error:
socketProgress: Connection closed by remote peer localhost<54321>
"""


def test_what_nccl_failed_with_is_its_last_words() -> None:
    with pytest.raises(ConnectionClosedError) as told:
        waiting(Sum(2, NCCL_ERROR)).wait()
    last = "socketProgress: Connection closed by remote peer localhost<54321>"
    assert str(told.value) == f"another worker is gone ({last})" and not told.value.over
    lost = Sum()
    lost.lost = True
    with pytest.raises(ConnectionClosedError, match=r"gone \(CUDA error: unspecified"):
        waiting(lost).wait()


def test_nccl_that_does_not_work_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    group = waiting()
    monkeypatch.setattr(torch, "ones", lambda *shape, **place: torch.zeros(1))
    refused = Sum(0, "NCCL error\nLast error:\nDuplicate GPU detected : rank 0 and rank 1\n")
    monkeypatch.setattr(group, "begin", lambda sums: group._on_gpus.append(refused))
    with pytest.raises(ConfigError, match=r"\(Duplicate GPU.* say --server-device cpu") as told:
        group._try(GPU)
    assert "\n" not in str(told.value)


def test_it_goes_by_the_same_interface_and_leaves_failures_to_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": "lo"})
    _prepare_nccl()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    os.environ.update(NCCL_SOCKET_IFNAME="eth0", TORCH_NCCL_ASYNC_ERROR_HANDLING="3")
    _prepare_nccl()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth0", "who says so means it"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


# -- on a GPU --------------------------------------------------------------------------------------

ON_GPU = """
import json, sys, time
import torch
from offbeat.errors import ConfigError, ConnectionClosedError
from offbeat.transport.group import Group

def say(what):
    print(json.dumps(what), flush=True)

meeting, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
gpu = torch.device("cuda", 0)
group = Group(meeting, rank=rank, size=size, check=lambda: None, gpu=gpu)
try:
    group.meet(timeout_s=120)
except ConfigError as error:
    say(str(error))
    sys.exit(3)
given = torch.arange(6.0)
if rank == 0:
    group.hand_out({"version": 7}, {"given": given})
else:
    said, found = group.take_over()
    assert said == {"version": 7} and torch.equal(found["given"], given)
with torch.cuda.stream(torch.cuda.Stream(gpu)):
    for number in range(50):
        total = torch.full((1 << 20,), 1.0 + rank, device=gpu)
        said, largest = torch.ones(3), torch.tensor([rank, -rank], device=gpu)
        group.begin([total, said], largest)
        group.wait()
        assert bool((total == size * (size + 1) / 2).all()), number
        assert said.tolist() == [size] * 3 and largest.tolist() == [size - 1, 0]
    group.begin_to_part()
    group.wait()
    say("added up")
    if size > 1:
        if rank == size - 1:
            time.sleep(600)  # it takes part in no other sum
        group.begin([total, said])
        try:
            group.wait()
        except ConnectionClosedError as error:
            say(str(error))
group.close()
torch.cuda.synchronize()  # nothing there waits for anybody
say("left")
"""
ASIDE = ("NCCL_DEBUG_FILE=/dev/stderr",)
PRETENDED = (
    ('torch.device("cuda", 0)', 'torch.device("cpu")'),
    ("torch.cuda.stream(torch.cuda.Stream(gpu))", "contextlib.nullcontext()"),
    ("torch.cuda.synchronize()", "assert not group._on_gpus"),
    ("import json", "import contextlib, json"),
    ("def say(", 'offbeat.transport.group.BOTH = "cpu:gloo,cuda:gloo"\ndef say('),
    ("import torch\n", "import torch, offbeat.transport.group\n"),
)
ONE_GPU_FOR_TWO = (
    "NCCL_HOSTID=host-RANK",  # what keeps NCCL from seeing that they share it
    "NCCL_MULTI_RANK_GPU_ENABLE=1",
    "NCCL_NET=Socket",
    "NCCL_NVLS_ENABLE=0",
    *ASIDE,
)


def says(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    said: str = json.loads(line) if line else f"nothing more; it ended with {child.wait(30)}"
    if "Duplicate GPU" in said or "same GPU" in said:
        pytest.skip(f"this NCCL takes no two of one GPU: {said}")
    return said


@pytest.mark.slow
def test_it_all_goes_the_same_way_where_there_is_no_gpu(tmp_path: Path) -> None:
    """With gloo in NCCL's place: two backends of one group, and neither is left in order."""
    program = ON_GPU
    for there, here in PRETENDED:
        assert there in program
        program = program.replace(there, here)
    with started(f"file:{tmp_path / 'meeting'}", 2, program) as children:
        assert [says(child) for child in children] == ["added up", "added up"]
        children[1].send_signal(signal.SIGKILL)
        assert says(children[0]).startswith("another worker is gone (")
        assert says(children[0]) == "left"
        assert children[0].wait(30) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_one_alone_adds_up_with_nccl(tmp_path: Path) -> None:
    with started(f"file:{tmp_path / 'meeting'}", 1, ON_GPU, ASIDE) as (child,):
        assert [says(child), says(child)] == ["added up", "left"]
        assert child.wait(30) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_who_waits_for_nccl_hears_of_a_death(tmp_path: Path) -> None:
    """Two of one GPU, that NCCL takes for those of two machines."""
    with started(f"file:{tmp_path / 'meeting'}", 2, ON_GPU, ONE_GPU_FOR_TWO) as children:
        assert [says(child) for child in children] == ["added up", "added up"]
        children[1].send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        assert says(children[0]).startswith("another worker is gone (")
        assert says(children[0]) == "left"
        assert children[0].wait(30) == 0
        assert time.monotonic() - killed_s < 20, "no timeout has to pass"
