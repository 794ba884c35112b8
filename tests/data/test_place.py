"""Who reads what: data and datasets that know which worker they are for."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import toy_data, toy_job, toy_recipe
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import offbeat
from offbeat import place
from offbeat.config import TrainConfig
from offbeat.data.sources import make_source
from offbeat.place import Place, at, placed
from offbeat.run.making import rejoin_job


def here() -> tuple[int, int, bool]:
    return offbeat.rank(), offbeat.world_size(), offbeat.is_master()


def test_outside_of_a_run_one_is_rank_0_of_1() -> None:
    assert here() == (0, 1, True)


def test_a_place_is_this_threads_for_the_time_being() -> None:
    seen = []
    with at(Place(rank=1, world_size=3)):
        assert here() == (1, 3, False)
        thread = threading.Thread(target=lambda: seen.append(here()))
        thread.start()
        thread.join()
    assert here() == (0, 1, True) and seen == [(0, 1, True)]


def test_who_makes_items_is_elsewhere_than_who_uses_them() -> None:
    def items() -> Iterator[int]:
        for _ in range(2):
            yield offbeat.rank()

    for found in placed(items(), Place(rank=2, world_size=3)):
        assert found == 2 and offbeat.rank() == 0


def test_a_process_may_have_a_place_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_of_process", [Place()])
    place.settle(Place(rank=1, world_size=2))
    with at(Place(rank=3, world_size=4)):
        assert here() == (3, 4, False)
    assert here() == (1, 2, False)


class Counted:
    """A recipe's data function, and for whom it was called."""

    def __init__(self, *, asks: bool) -> None:
        self.asks = asks
        self.calls: list[int] = []

    def __call__(self, config: TrainConfig) -> Any:
        x, y = toy_data()
        assert offbeat.is_master() in (True, False), "to ask for that alone cuts nothing"
        if self.asks:
            self.calls.append(offbeat.rank())
            x, y = (t[offbeat.rank() :: offbeat.world_size()] for t in (x, y))
        else:
            self.calls.append(-1)
        return TensorDataset(x, y) if self.asks else (x, y), toy_data()


def seen(job: Any, rank: int) -> Tensor:
    return torch.cat([batch[0] for epoch, batch in job.batches(rank) if epoch == 0])


def test_data_that_asks_for_whom_it_is_made_is_made_for_each_and_not_cut_again() -> None:
    data = Counted(asks=True)
    job = toy_job(toy_recipe(data=data), workers=3)
    assert job.facts.by_rank and job.facts.num_batches == [8, 8, 8]
    assert job.facts.total_updates == 48 and job.config.eval_every == 24
    for rank in range(3):
        expected = toy_data()[0][rank::3]
        found = seen(job, rank)
        assert torch.equal(found.sort(0).values, expected.sort(0).values)
        assert not torch.equal(found, expected), "in an order of its own"
    assert data.calls == [0, 1, 2]


def test_data_that_does_not_ask_is_made_once() -> None:
    data = Counted(asks=False)
    job = toy_job(toy_recipe(data=data), workers=3)
    assert [len(seen(job, rank)) for rank in range(3)] == [80, 80, 80]
    assert not job.facts.by_rank and data.calls == [-1]


def test_a_process_makes_no_data_for_nothing() -> None:
    calls = []

    def data(config: TrainConfig) -> Any:
        calls.append(1)
        return TensorDataset(*toy_data()), toy_data()

    recipe = toy_recipe(data=data)
    job = toy_job(recipe)
    shared = {"test": make_source(toy_data(), "test")}
    calls.clear()
    of_evaluator = rejoin_job(job.config, recipe, job.facts, shared, needs=["test"])
    assert of_evaluator.test is shared["test"] and not calls
    of_worker = rejoin_job(job.config, recipe, job.facts, {"train": job.train}, needs=["train"])
    assert of_worker.train is job.train and not calls
    rejoin_job(job.config, recipe, job.facts, shared, needs=["train"])
    assert calls == [1]


def test_in_a_run_every_function_knows_its_worker(run_dir: Path) -> None:
    heard: set[tuple[str, int]] = set()

    class Told(Dataset[Any]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Any:
            heard.add(("dataset", offbeat.rank()))
            x, y = toy_data(20)
            return x[index], y[index]

    def loss(model: Any, batch: Any) -> Tensor:
        heard.add(("loss", offbeat.rank()))
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    recipe = toy_recipe(data=lambda config: (Told(), None), loss=loss)
    for feed in ("direct", "batching"):
        heard.clear()
        offbeat.train(
            recipe, engine="inproc", feed=feed, steps=2, run_dir=run_dir / feed, quiet=True
        )
        assert heard == {(what, rank) for what in ("dataset", "loss") for rank in (0, 1)}


IN_A_FILE = """
import os
from pathlib import Path

import torch

import offbeat

def data(config):
    here = f"{offbeat.rank()}-of-{offbeat.world_size()}"
    Path(os.environ["OFFBEAT_TEST_FOLDER"], f"{here}-{os.getpid()}").touch()
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(offbeat.rank()))
    return (x, (x.sum(1) > 0).long()), (x, (x.sum(1) > 0).long())

recipe = offbeat.Recipe(
    model=lambda: torch.nn.Linear(4, 2),
    data=data,
    loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    batch_size=10,
)
"""


@pytest.mark.slow
def test_processes_make_their_own_and_the_evaluator_none(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setenv("OFFBEAT_TEST_FOLDER", str(notes))
    file = tmp_path / "by_rank.py"
    file.write_text(IN_A_FILE)
    result = offbeat.train(
        f"{file}:recipe", engine="local", run_dir=run_dir, quiet=True, device="cpu"
    )
    assert result.summary["gradients"] == 12
    called = sorted(path.name.rsplit("-", 1) for path in notes.iterdir())
    assert [name for name, _ in called] == ["0-of-2", "0-of-2", "1-of-2"]
    assert str(os.getpid()) in [pid for _, pid in called], "the launcher, to know of how much"
