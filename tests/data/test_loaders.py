"""A torch DataLoader as data: its parts are kept, and what it goes through is cut into shares."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import toy_data, toy_job, toy_recipe
from processes import processes
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL

import offbeat
from offbeat.data.batches import Share, Source
from offbeat.data.sources import make_source
from offbeat.errors import ConfigError, DataError
from offbeat.importing import import_file

NUM = 23


class Numbers(Dataset[Any]):
    """The numbers from 0 on, and who read each of them."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        self.read.append(index)
        return index, os.getpid(), offbeat.rank()


class Stream(IterableDataset[Any]):
    def __init__(self, *, asks: bool) -> None:
        self.asks = asks

    def __iter__(self) -> Iterator[int]:
        rank, size = (offbeat.rank(), offbeat.world_size()) if self.asks else (0, 1)
        if (info := get_worker_info()) is not None:
            rank, size = rank + size * info.id, size * info.num_workers
        return iter(range(rank, NUM, size))


class ByEpoch:
    """A sampler of the user's: other indices, and other numbers of them, in every epoch."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 7 + 2 * self.epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, self.epoch + len(self)))


class Endless:
    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number % NUM
            number += 1


def share(rank: int = 0, count: int = 1, *, size: int = 4, disjoint: bool = True) -> Share:
    return Share(rank=rank, num_shares=count, batch_size=size, seed=3, disjoint=disjoint)


def read(source: Source, which: Share, epoch: int = 0, first: int = 0) -> list[list[int]]:
    """The numbers in each batch."""
    with source.opened(lambda line: None) as reader:
        found = []
        for batch in reader.train(which, epoch, first):
            numbers = batch[0] if isinstance(batch, list | tuple) else batch
            found.append(numbers.tolist() if isinstance(numbers, Tensor) else [numbers])
        return found


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def loaded(**options: Any) -> Source:
    return make_source(DataLoader(Numbers(), **options), "training")


# -- what each worker goes through -----------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_shuffling_loader_is_gone_through_as_its_dataset_would_be(num_workers: int) -> None:
    source = loaded(batch_size=5, shuffle=True, num_workers=num_workers)
    plain = make_source(Numbers(), "training")
    for which in (share(0, 2), share(1, 2), share(1, 2, disjoint=False)):
        assert read(source, which, 2) == read(plain, which, 2)
    given = loaded(shuffle=True, generator=torch.Generator().manual_seed(5))
    own = flat(read(given, share()))
    assert own == flat(read(given, share())) != flat(read(plain, share())), "its seed counts too"


def test_one_in_order_stays_in_order() -> None:
    source = loaded(batch_size=4)
    assert flat(read(source, share(1, 2))) == list(range(1, NUM, 2))
    assert flat(read(source, share(1, 2), 5)) == list(range(1, NUM, 2))
    assert flat(read(source, share(1, 2, disjoint=False))) == list(range(NUM))


def test_a_distributed_sampler_leaves_the_cutting_to_the_run() -> None:
    sampler = DistributedSampler(Numbers(), num_replicas=3, rank=1, shuffle=False)
    assert flat(read(loaded(sampler=sampler), share(1, 2))) == list(range(1, NUM, 2))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_are_counted_beforehand(drop_last: bool, shuffle: bool) -> None:
    source = loaded(batch_size=4, drop_last=drop_last, shuffle=shuffle)
    for which in (share(0, 2), share(1, 2), share(disjoint=False)):
        batches = read(source, which)
        assert source.num_batches(which) == len(batches)
        assert all(len(batch) == 4 for batch in batches) or not drop_last


def test_a_sampler_of_the_users_is_cut_anew_in_every_epoch() -> None:
    source = loaded(sampler=ByEpoch())
    for epoch in (0, 3):
        shares = [flat(read(source, share(rank, 2), epoch)) for rank in range(2)]
        everything = list(range(epoch, 2 * epoch + 7 + epoch))
        assert shares == [everything[0::2], everything[1::2]]


def test_a_sampler_that_draws_gives_everybody_the_same_to_cut() -> None:
    torch.manual_seed(0)
    drawn = [WeightedRandomSampler([1.0] * NUM, 12), None]
    drawn[1] = WeightedRandomSampler([1.0] * NUM, 12, generator=torch.Generator())
    for sampler in drawn:
        source = loaded(sampler=sampler)
        before = torch.get_rng_state()
        whole = flat(read(source, share()))
        parts = [flat(read(source, share(rank, 2))) for rank in range(2)]
        assert parts == [whole[0::2], whole[1::2]]
        assert whole != flat(read(source, share(), 1))
        mine, others = (flat(read(source, share(r, 2, disjoint=False))) for r in range(2))
        assert mine != others, "whoever goes through all of it does so in an order of its own"
        assert torch.equal(before, torch.get_rng_state())


def test_batches_of_a_batch_sampler_are_cut_as_they_are() -> None:
    sampler = BatchSampler(SequentialSampler(range(NUM)), 3, drop_last=False)
    source = loaded(batch_sampler=sampler)
    batches = read(source, share(1, 2, size=1))
    assert batches == [[n for n in range(at, at + 3) if n < NUM] for at in range(3, NUM, 6)]
    assert source.num_batches(share(1, 2, size=1)) == len(batches) == 4
    assert source.num_examples is None and source.own_batches == "batch_sampler"


def test_without_batching_each_item_is_a_batch() -> None:
    source = make_source(DataLoader([[1, 2], [3], [4]], batch_size=None), "training")  # type: ignore[arg-type]
    with source.opened(lambda line: None) as reader:
        assert list(reader.train(share(0, 2, size=1), 0)) == [[1, 2], [4]]
    assert "batch_size=None" in (source.own_batches or "")


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"sampler": WeightedRandomSampler([1.0] * NUM, NUM)},
        {"batch_sampler": BatchSampler(SequentialSampler(range(NUM)), 3, drop_last=False)},
    ],
)
def test_a_pass_that_begins_in_the_middle_reads_nothing_before_it(options: Any) -> None:
    dataset = Numbers()
    source = make_source(DataLoader(dataset, **options), "training")
    which = share(0, 2, size=1 if "batch_sampler" in options else 4)
    whole = read(source, which, 1)
    dataset.read.clear()
    assert read(source, which, 1, first=2) == whole[2:]
    assert dataset.read == flat(whole[2:])


def test_the_place_to_go_on_is_found_where_epochs_differ_in_length() -> None:
    source = loaded(sampler=ByEpoch())  # 7, 9, 11 examples: 2, 3, 3 batches of four
    assert [source.find(share(), start) for start in (0, 1, 2, 4, 5, 7)] == [
        *((0, 0, 0), (1, 0, 1), (2, 1, 0), (4, 1, 2), (5, 2, 0), (7, 2, 2))
    ]
    endless = loaded(sampler=Endless())
    assert endless.find(share(), 1000) == (1000, 0, 1000)
    assert endless.num_batches(share()) is None


# -- the processes that read -----------------------------------------------------------------------


def test_readers_know_their_worker_and_last_as_long_as_they_are_to() -> None:
    for persistent in (False, True):
        loader = DataLoader(Numbers(), num_workers=1, persistent_workers=persistent)
        source = make_source(loader, "training")
        with source.opened(lambda line: None) as reader:
            seen = [[batch[1:] for batch in reader.train(share(1, 2), e)] for e in range(2)]
        pids = [{int(pid) for epoch_pids, _ in epoch for pid in epoch_pids} for epoch in seen]
        assert (pids[0] == pids[1]) == persistent and os.getpid() not in pids[0]
        assert {int(rank) for epoch in seen for _, ranks in epoch for rank in ranks} == {1}
        assert not multiprocessing.active_children()


def test_readers_end_with_whoever_gives_up() -> None:
    for persistent in (False, True):
        loader = DataLoader(Numbers(), num_workers=2, persistent_workers=persistent)
        source = make_source(loader, "training")
        with source.opened(lambda line: None) as reader:
            batches = reader.train(share(size=1), 0)
            next(batches)
            assert len(multiprocessing.active_children()) == 2
        assert not multiprocessing.active_children()


def test_readers_die_with_a_process_that_is_killed() -> None:
    ears, mouth = os.pipe()
    child = os.fork()
    if not child:
        with make_source(DataLoader(Numbers(), num_workers=1), "training").opened(print) as reader:
            _, pids, _ = next(reader.train(share(size=1), 0))
            os.write(mouth, f"{int(pids[0])}".encode())
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    pid = int(os.read(ears, 100))
    os.close(ears)
    os.close(mouth)
    deadline = time.monotonic() + MP_STATUS_CHECK_INTERVAL / 2  # torch's own watch takes longer
    while pid in {each for each, _, _ in processes()}:
        assert time.monotonic() < deadline


def touch(number: int) -> None:
    Path(os.environ["OFFBEAT_TEST_FOLDER"], f"{number}-{os.getpid()}").touch()


def test_a_loaders_own_start_of_a_reader_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBEAT_TEST_FOLDER", str(tmp_path))
    read(loaded(num_workers=2, worker_init_fn=touch), share())
    assert sorted(p.name.partition("-")[0] for p in tmp_path.iterdir()) == ["0", "1"]


class Own(DataLoader[Any]):
    """A class that is made in another way."""

    def __init__(self, factor: int) -> None:
        super().__init__(Numbers(), batch_size=4)
        self.factor = factor

    def __iter__(self) -> Any:
        return (self.factor * batch[0] for batch in super().__iter__())


def test_a_loaders_class_is_kept() -> None:
    found = read(make_source(Own(10), "training"), share(1, 2))
    assert flat(found) == list(range(10, 10 * NUM, 20))


IN_A_FILE = """
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index ** 2

loader = DataLoader(Squares(), num_workers=1, multiprocessing_context="spawn")
"""


def test_a_reader_that_is_started_anew_finds_what_a_recipes_file_has(tmp_path: Path) -> None:
    path = tmp_path / "squares_file.py"
    path.write_text(IN_A_FILE)
    module = import_file(path, "recipe", DataError)
    try:
        assert flat(read(make_source(module.loader, "training"), share())) == [
            n**2 for n in range(8)
        ]
    finally:
        del sys.modules[module.__name__]
        sys.path.remove(str(tmp_path))


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("in_a_loader", [True, False])
def test_a_stream_that_knows_its_worker_is_cut_by_itself(
    num_workers: int, in_a_loader: bool
) -> None:
    for asks in (True, False):
        told: list[str] = []
        data: Any = Stream(asks=asks)
        if in_a_loader:
            data = DataLoader(data, batch_size=2, num_workers=num_workers)
        with make_source(data, "training").opened(told.append) as reader:
            found = [
                sorted(int(n) for batch in reader.train(share(1, 2, size=2), e) for n in batch)
                for e in range(2)
            ]
        assert found[0] == found[1]
        if asks or not in_a_loader:
            assert found[0] == list(range(1, NUM, 2))
        assert [line.split(",")[0] for line in told] == (
            []
            if asks
            else ["every worker reads all of the training data and leaves out what is not its own"]
        )


def test_streams_of_all_workers_cover_everything() -> None:
    source = make_source(DataLoader(Stream(asks=False), batch_size=2), "training")
    parts = [flat(read(source, share(rank, 3, size=2))) for rank in range(3)]
    assert sorted(n for part in parts for n in part) == list(range(NUM))


# -- test data -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Numbers(), batch_size=5, shuffle=True, drop_last=True),
        DataLoader(Numbers(), batch_size=5, num_workers=1, persistent_workers=True),
        DataLoader(Numbers(), batch_sampler=BatchSampler(range(NUM), 5, drop_last=False)),
        DataLoader(Stream(asks=True), batch_size=5, drop_last=True),
    ],
)
def test_test_data_is_gone_through_in_order_each_example_once(loader: Any) -> None:
    source, before = make_source(loader, "test"), torch.get_rng_state()
    batches = [batch[0] if isinstance(batch, list) else batch for batch in source.in_order(500)]
    assert [int(n) for batch in batches for n in batch] == list(range(NUM))
    assert len(batches[0]) == 5 and torch.equal(before, torch.get_rng_state()), "others may draw"
    assert source.first(2) is not None and not multiprocessing.active_children()


# -- in a run --------------------------------------------------------------------------------------


def loader_recipe(**options: Any) -> Any:
    data = TensorDataset(*toy_data())
    loaders = (DataLoader(data, **options), DataLoader(data, batch_size=50))
    return toy_recipe(data=lambda config: loaders, batch_size=10)


def test_the_batch_size_is_the_loaders_unless_somebody_says_otherwise() -> None:
    assert toy_job(loader_recipe(batch_size=16)).config.batch_size == 16
    job = toy_job(loader_recipe(batch_size=16), batch_size=24, workers=1)
    assert len(next(job.batches(0))[1][0]) == 24 and job.num_steps(0) == 20
    by_batch = loader_recipe(batch_sampler=BatchSampler(range(240), 7, drop_last=False))
    with pytest.raises(ConfigError, match=r"batch_sampler decides .* leave --batch-size out"):
        toy_job(by_batch, batch_size=24)
    job = toy_job(by_batch, workers=2)
    assert job.facts.num_batches == [18, 17] and job.config.batch_size is None
    assert job.num_steps(1) == 34 and job.facts.total_updates == 70 and job.config.eval_every == 35


def test_a_share_without_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="worker 0 of 3 no batch at all; lower workers or batch"):
        toy_job(loader_recipe(batch_size=100, drop_last=True), workers=3)
    with pytest.raises(DataError, match="the training data is empty: its DataLoader"):
        make_source(DataLoader([]), "training")  # type: ignore[arg-type]


@pytest.mark.parametrize("feed", ["direct", "batching"])
@pytest.mark.parametrize("devices", [None, "cpu,cpu"])
def test_a_run_with_loaders_leaves_no_process_behind(
    run_dir: Path, feed: str, devices: str | None
) -> None:
    recipe = loader_recipe(batch_size=10, shuffle=True, num_workers=1, persistent_workers=True)
    options = {} if devices is None else {"devices": devices}
    result = offbeat.train(
        recipe, engine="inproc", feed=feed, run_dir=run_dir, quiet=True, **options
    )
    assert result.test_accuracy is not None and result.test_accuracy > 0.8
    assert result.summary["gradients"] == (48 if devices is None else 24)
    assert not multiprocessing.active_children()


def test_a_run_with_loaders_goes_on_with_the_bits_of_one_that_was_never_stopped(
    run_dir: Path, tmp_path: Path
) -> None:
    for options in ({"batch_size": 10, "shuffle": True}, {"sampler": None, "batch_size": 10}):
        if "sampler" in options:
            options["sampler"] = WeightedRandomSampler([1.0] * 240, 100)
        recipe = loader_recipe(**options)
        made = {"engine": "inproc", "discipline": "sync", "quiet": True}
        name = "-".join(options)
        whole = offbeat.train(recipe, **made, steps=15, run_dir=tmp_path / f"{name}-whole")
        begun = offbeat.train(recipe, **made, steps=7, run_dir=tmp_path / name)
        done = offbeat.resume(begun.run_dir, recipe, steps=15)
        for tensor, other in zip(
            whole.state_dict().values(), done.state_dict().values(), strict=True
        ):
            assert torch.equal(tensor, other)


LOADERS_IN_A_FILE = """
import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import offbeat

def note(number):
    Path(os.environ["OFFBEAT_TEST_FOLDER"], str(os.getpid())).touch()

def data(config):
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(1))
    train = TensorDataset(x, (x.sum(1) > 0).long())
    return DataLoader(train, batch_size=5, shuffle=True, num_workers=1, worker_init_fn=note), None

recipe = offbeat.Recipe(
    model=lambda: torch.nn.Linear(4, 2),
    data=data,
    loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    epochs=1,
)
"""


@pytest.mark.slow
def test_readers_of_a_worker_that_is_killed_die_with_it(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setenv("OFFBEAT_TEST_FOLDER", str(notes))
    file = tmp_path / "own.py"
    file.write_text(LOADERS_IN_A_FILE)
    result = offbeat.train(
        f"{file}:recipe",
        engine="local",
        kill_worker="1@5",
        run_dir=run_dir,
        quiet=True,
        device="cpu",
    )
    assert result.summary["restarts"] and result.summary["gradients"] == 40
    readers = {int(path.name) for path in notes.iterdir()}
    assert len(readers) >= 3
    assert not readers & {pid for pid, _, _ in processes()}


def test_a_sampler_that_knows_its_worker_is_not_cut_twice() -> None:
    data = TensorDataset(torch.arange(40.0))
    loader = DataLoader(data, batch_size=2, sampler=offbeat.Sampler(data))
    job = toy_job(toy_recipe(data=lambda config: (loader, None)), workers=2, epochs=1)
    seen = [[int(x) for _, (batch,) in job.batches(rank) for x in batch] for rank in range(2)]
    assert [len(part) for part in seen] == [20, 20]
    assert sorted(seen[0] + seen[1]) == list(range(40))


def test_a_distributed_sampler_by_rank_is_refused() -> None:
    data = TensorDataset(torch.arange(40.0))

    def cut(config: Any) -> Any:
        sampler = DistributedSampler(data, offbeat.world_size(), offbeat.rank())
        return DataLoader(data, batch_size=2, sampler=sampler), None

    with pytest.raises(ConfigError, match="its shares are cut here"):
        toy_job(toy_recipe(data=cut), workers=2)


class Uncounted(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


@pytest.mark.parametrize("sampler", [Uncounted(), None], ids=["uncounted", "counted"])
def test_steps_of_several_batches_go_on_where_they_were(sampler: Any) -> None:
    data = TensorDataset(torch.arange(40.0))
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    recipe = toy_recipe(data=lambda config: (loader, None))
    job = toy_job(recipe, workers=1, steps=9, accumulate=4)
    whole = [b.tolist() for _, (b,) in job.batches(0)]
    assert [b.tolist() for _, (b,) in job.batches(0, 3)] == whole[12:]


def test_scores_come_with_the_updates_of_an_epoch() -> None:
    data = TensorDataset(*toy_data())
    batches = BatchSampler(SequentialSampler(data), 12, drop_last=False)  # 20 of them
    loader = DataLoader(data, batch_sampler=batches)
    recipe = toy_recipe(data=lambda config: (loader, data))
    assert toy_job(recipe, workers=1, accumulate=4).config.eval_every == 5


# -- torchdata's loader, which only the long tests have -------------------------------------------


def of_torchdata(test: Any) -> Any:
    """It calls what torch will do without."""
    ignored = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
    return pytest.mark.slow(ignored(test))


@pytest.fixture
def stateful() -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


@of_torchdata
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_is_gone_through_as_another_one(stateful: Any, num_workers: int) -> None:
    options = {"batch_size": 5, "num_workers": num_workers, "persistent_workers": num_workers > 0}
    for more in ({"shuffle": True}, {}, {"sampler": ByEpoch()}):
        found = make_source(stateful(Numbers(), **options, **more), "training")
        expected = loaded(**options, **more)
        for epoch in range(2):
            which = share(1, 2)
            assert read(found, which, epoch) == read(expected, which, epoch)
            assert found.num_batches(which) == expected.num_batches(which)
            assert read(found, which, epoch, 1) == read(expected, which, epoch)[1:]
    assert not multiprocessing.active_children()


@of_torchdata
def test_a_stateful_stream_is_cut_as_another_one(stateful: Any) -> None:
    for num_workers in (0, 1):
        loader = stateful(Stream(asks=False), batch_size=5, num_workers=num_workers)
        source = make_source(loader, "training")
        seen = [flat(read(source, share(rank, 2), first=first)) for rank, first in ((0, 0), (1, 1))]
        expected = make_source(DataLoader(Stream(asks=False), batch_size=5), "training")
        assert seen[0] == flat(read(expected, share(0, 2)))
        assert seen[1] == flat(read(expected, share(1, 2), first=1))


@of_torchdata
def test_a_run_with_a_stateful_loader_goes_on_in_the_middle_of_an_epoch(
    stateful: Any, tmp_path: Path
) -> None:
    data = TensorDataset(*toy_data())
    for name, options in {"here": {}, "there": {"num_workers": 1}}.items():
        loader = stateful(data, batch_size=10, shuffle=True, **options)
        recipe = toy_recipe(data=lambda config, loader=loader: (loader, None), batch_size=10)
        made = {"engine": "inproc", "discipline": "sync", "quiet": True}
        whole = offbeat.train(recipe, **made, steps=15, run_dir=tmp_path / f"{name}-whole")
        begun = offbeat.train(recipe, **made, steps=7, run_dir=tmp_path / name)
        done = offbeat.resume(begun.run_dir, recipe, steps=15)
        for tensor, other in zip(
            whole.state_dict().values(), done.state_dict().values(), strict=True
        ):
            assert torch.equal(tensor, other)
    assert not multiprocessing.active_children()


@of_torchdata
def test_a_stateful_loader_begins_where_the_run_does(stateful: Any) -> None:
    loader = stateful(Numbers(), batch_size=5)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match="a state of its own"):
        make_source(loader, "training")
