"""What starts the roles where nobody said it, and which workers share a process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import toy_job, toy_recipe

import offbeat
from offbeat.errors import ConfigError
from offbeat.run.crews import find_crews, shared_gpu

CPU = torch.device("cpu")
ONE, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("devices", "crews"),
    [
        ([[CPU], [CPU]], [[0], [1]]),
        ([[ONE]], [[0]]),
        ([[ONE], [ONE], [ONE]], [[0, 1, 2]]),
        ([[ONE], [OTHER]], [[0], [1]]),
        ([[ONE], [OTHER], [ONE], [OTHER], [ONE]], [[0, 2, 4], [1, 3]]),
        ([[ONE, OTHER], [ONE, OTHER]], [[0], [1]]),  # towers
        ([[CPU], [ONE], [CPU], [ONE]], [[0], [1, 3], [2]]),
    ],
)
def test_whoever_computes_on_one_gpu_shares_a_process(
    devices: list[list[torch.device]], crews: list[list[int]]
) -> None:
    assert find_crews(devices) == crews


def test_a_gpu_is_shared_where_all_compute_on_it_and_on_nothing_else() -> None:
    assert shared_gpu([[ONE], [ONE]]) == shared_gpu([[ONE]]) == ONE
    for devices in ([[ONE], [OTHER]], [[CPU], [CPU]], [[ONE, OTHER]], [[ONE], [CPU]]):
        assert shared_gpu(devices) is None


@pytest.mark.parametrize(
    ("gpus", "options", "engine", "crews"),
    [
        (0, {}, "local", []),
        (0, {"workers": 1}, "local", []),
        (1, {}, "inproc", []),
        (1, {"workers": 1, "engine": "auto"}, "inproc", []),
        (1, {"device": "cpu"}, "local", []),
        (1, {"engine": "local"}, "local", []),
        (1, {"kill_worker": "1@5"}, "local", []),
        (1, {"server_device": "cuda"}, "inproc", []),
        (2, {"device": "cuda:1"}, "inproc", []),
        (2, {"devices": "cuda:0,cuda:1"}, "local", []),
        (2, {"devices": "cuda:0,cuda:1", "workers": 1}, "local", []),
        (2, {"workers": 2}, "local", []),
        (2, {"workers": 3}, "local", [[0, 2]]),
        (2, {}, "local", [[0, 2], [1, 3]]),
        (2, {"engine": "local"}, "local", []),
        (2, {"engine": "inproc"}, "inproc", []),
        (2, {"kill_worker": "1@5"}, "local", []),
        (4, {"workers": 4}, "local", []),
    ],
)
def test_auto_goes_by_the_gpus(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    options: dict[str, Any],
    engine: str,
    crews: list[list[int]],
) -> None:
    pretend(monkeypatch, gpus)
    job = toy_job(**{"workers": 4, **options})
    assert (job.facts.engine, job.facts.crews) == (engine, crews)
    assert (job.resolved["engine"], job.resolved["crews"]) == (engine, crews or None)
    assert job.config.engine == options.get("engine", "auto"), "a resumed run asks again"


def pretend(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


def test_the_servers_are_on_the_gpu_where_auto_means_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, 1)
    assert toy_job(workers=4).server_device == ONE
    pretend(monkeypatch, 2)
    assert toy_job(workers=4).server_device == CPU
    with pytest.raises(ConfigError, match="the servers cannot be on cuda"):
        toy_job(workers=4, server_device="cuda")


def test_a_crew_is_the_same_for_all_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 2)
    job = toy_job(workers=3)
    assert [job.crew(rank) for rank in range(3)] == [(0, 2), (1,), (0, 2)]


def test_a_resumed_run_goes_by_the_machine_it_is_resumed_on(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was begun as threads, as if all workers had shared a GPU."""
    recipe = toy_recipe()
    offered: list[Any] = []

    def threads(config: Any, devices: Any) -> tuple[str, list[list[int]]]:
        offered.append(config.engine)
        return "inproc", []

    monkeypatch.setattr("offbeat.run.making.choose_engine", threads)
    monkeypatch.setattr("offbeat.api._name_of", lambda recipe: "custom")
    begun = offbeat.train(recipe, run_dir=run_dir, quiet=True, steps=4, threads=1)
    resumed = offbeat.resume(run_dir, recipe, quiet=True, steps=8)
    assert offered == ["auto", "auto"]
    assert begun.summary["engine"] == resumed.summary["engine"] == "inproc"
