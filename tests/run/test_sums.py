"""What adds up gradients where there are no servers, and where they lie."""

from typing import Any

import pytest
import torch
from helpers import toy_job

from offbeat.errors import ConfigError
from offbeat.run.footprint import parts_of, remedies
from offbeat.run.sums import Places, Sums, choose_sums
from offbeat.towers import CPU

APART = [["cuda:0"], ["cuda:1"]]
SHARED = [["cuda:0"], ["cuda:1"], ["cuda:0"]]
MIXED = [["cuda:0"], ["cpu"]]
TOWERS = [["cuda:0", "cuda:1"], ["cuda:2", "cuda:1"]]


@pytest.mark.parametrize(
    ("wanted", "places", "expected", "why"),
    [
        ("auto", APART, ("nccl", True), "each worker has one of its own"),
        ("cuda", APART, ("nccl", True), "each worker has one of its own"),
        ("cpu", APART, ("gloo", False), "--server-device cpu says so"),
        ("auto", APART[:1], ("nccl", True), "each worker has one of its own"),
        ("auto", SHARED, ("gloo", False), "workers 0 and 2 share cuda:0, where NCCL refuses to"),
        ("cuda", SHARED, ("gloo", True), "workers 0 and 2 share cuda:0, where NCCL refuses to"),
        ("cpu", SHARED, ("gloo", False), "--server-device cpu says so"),
        ("auto", MIXED, ("gloo", False), "worker 1 computes on the CPU"),
        ("cpu", MIXED, ("gloo", False), "--server-device cpu says so"),
        ("auto", [["cpu"]], ("gloo", False), "worker 0 computes on the CPU"),
        ("auto", [["cuda:0", "cpu"]], ("nccl", True), "each worker has one of its own"),
        ("auto", [["cpu", "cuda:0"]], ("gloo", False), "worker 0 computes on the CPU"),
        ("auto", [["cuda:0", "cuda:0"]], ("nccl", True), "each worker has one of its own"),
        ("auto", TOWERS, ("gloo", False), "workers 0 and 1 share cuda:1, where NCCL refuses to"),
    ],
)
def test_nccl_is_for_workers_with_gpus_of_their_own(
    wanted: str, places: Places, expected: tuple[str, bool], why: str
) -> None:
    assert choose_sums(wanted, places, has_nccl=True) == Sums(*expected, why)


@pytest.mark.parametrize(("wanted", "on_gpus"), [("auto", False), ("cuda", True)])
def test_without_nccl_it_is_gloo(wanted: str, on_gpus: bool) -> None:
    expected = Sums("gloo", on_gpus, "torch was built without NCCL")
    assert choose_sums(wanted, APART, has_nccl=False) == expected


def test_what_stands_in_the_way_of_cuda_is_said() -> None:
    with pytest.raises(ConfigError, match="cannot be on cuda: worker 1 computes on the CPU"):
        choose_sums("cuda", MIXED, has_nccl=True)


def test_a_line_says_which_and_why() -> None:
    lines = [
        choose_sums(wanted, places, has_nccl=True).line
        for wanted, places in (("auto", APART), ("auto", SHARED), ("cuda", SHARED))
    ]
    shared = "workers 0 and 2 share cuda:0, where NCCL refuses to"
    assert lines == [
        "gradients are added up with NCCL, on the GPUs: each worker has one of its own",
        f"gradients are added up with gloo, in the CPU's memory: {shared}",
        f"gradients are added up with gloo, from the GPU by way of the CPU's memory: {shared}",
    ]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("options", "backend", "devices"),
    [
        ({}, "nccl", ["cuda:0", "cuda:1"]),
        ({"server_device": "cpu"}, "gloo", ["cpu", "cpu"]),
        ({"workers": 3}, "gloo", ["cpu", "cpu", "cpu"]),
        ({"workers": 3, "server_device": "cuda"}, "gloo", ["cuda:0", "cuda:1", "cuda:0"]),
        ({"device": "cpu"}, "gloo", ["cpu", "cpu"]),
        ({"device": "cuda:1"}, "gloo", ["cpu", "cpu"]),
        ({"workers": 1, "devices": "cuda:1,cuda:0"}, "nccl", ["cuda:1"]),
        ({"engine": "ray", "gpus_per_worker": 1.0}, "nccl", ["cuda:0", "cuda:0"]),
        ({"engine": "ray", "gpus_per_worker": 0.5}, "gloo", ["cpu", "cpu"]),
        ({"engine": "ray", "gpus_per_worker": 1.0, "device": "cpu"}, "gloo", ["cpu", "cpu"]),
        ({"engine": "ray"}, "gloo", ["cpu", "cpu"]),
    ],
)
def test_each_workers_parameters_lie_where_it_computes_or_all_in_the_cpus_memory(
    options: dict[str, Any], backend: str, devices: list[str]
) -> None:
    """On Ray each sees the GPUs that are its own, and numbers them from 0."""
    job = toy_job(**{"discipline": "allreduce", "workers": 2, **options})
    assert job.sums.backend == backend
    found = [str(job.slot_device(rank)) for rank in range(job.config.workers)]
    assert found == devices
    assert str(job.layout(0, job.slot_device(0)).device) == found[0]
    assert job.server_device == job.layout(0).device == CPU, "there are no servers"
    where = "cuda" if job.sums.on_gpus else "cpu"
    assert job.resolved["server_device"] == where and job.resolved["backend"] == backend


def test_parameters_on_cuda_take_gpus() -> None:
    with pytest.raises(ConfigError, match="worker 0 computes on the CPU; leave --server-device"):
        toy_job(discipline="allreduce", workers=2, server_device="cuda")


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_is_full_is_told_of_them() -> None:
    job = toy_job(discipline="allreduce", workers=2)
    other = torch.device("cuda", 1)
    assert parts_of(job, other, ranks=[1])["sums of gradients"] == 4 * job.manifest.num_elements
    assert "sums of gradients" not in parts_of(job, other, ranks=[0])
    assert "--server-device cpu" in remedies(job, other)
    on_cpu = toy_job(discipline="allreduce", workers=2, server_device="cpu")
    assert "sums of gradients" not in parts_of(on_cpu, other, ranks=[1])
    assert "--server-device cpu" not in remedies(on_cpu, other)
