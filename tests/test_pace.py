"""How many local steps each worker takes, and that all of them go through what they should."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cross_entropy, num_dealt_with, toy_data, toy_job, toy_recipe
from processes import LocalRun
from torch import Tensor, nn

import offbeat
from offbeat import SGD, AdamW
from offbeat.accounts import Account
from offbeat.config import DISCIPLINES
from offbeat.errors import ConfigError
from offbeat.local_steps import LocalTowers
from offbeat.pace import Pace
from offbeat.report.write import write_report
from offbeat.roles import run
from offbeat.roles.faults import make_faults
from offbeat.roles.worker import Worker
from offbeat.run.checkpoint import Checkpoint
from offbeat.run.events import read_events
from offbeat.run.making import make_job
from offbeat.shard import ShardState

NUM_EXAMPLES = 240


# -- one worker ------------------------------------------------------------------------------------


def test_slower_workers_take_fewer_steps_and_one_at_least() -> None:
    pace = Pace(50)
    assert pace.num_steps(1) == 50, "nobody has said anything"
    pace.measured(50, within_s=2.0)
    assert (pace.speed, pace.num_steps(1)) == (25.0, 50)
    for fastest, expected in [(25.0, 50), (75.0, 16), (25.1, 49), (1e6, 1), (10.0, 50), (0.0, 50)]:
        pace.told(fastest)
        assert pace.num_steps(2) == expected, fastest
    exact = Pace(100)
    exact.measured(29, within_s=1.0)
    exact.told(100.0)
    assert exact.num_steps(1) == 29, "not what 29 / 100 * 100 is in floating point"
    exact.measured(2, within_s=0.0)  # a clock that is too coarse
    assert exact.num_steps(1) == 100


def test_a_push_that_is_made_again_stands_for_as_many_steps() -> None:
    """Other servers have it, and know it by its number."""
    pace = Pace(50)
    pace.measured(50, within_s=2.0)
    pace.told(75.0)
    pace.pushed(1, 50, 50)
    pace.pushed(2, 16, 66)
    assert [pace.num_steps(step) for step in (1, 2, 3)] == [50, 16, 16]
    assert [pace.batches(step) for step in (0, 1, 2, 3)] == [None, 50, 66, None]


# -- what is said of it ----------------------------------------------------------------------------


def test_what_can_be_asked_for_and_what_not() -> None:
    config = offbeat.config.make_config({"local_steps": "50:auto", "accumulate": 2})
    assert (config.local_steps, config.paces, config.most_local_steps) == ("50:auto", True, 50)
    assert config.batches_per_step == 100 and config.variant == "apply-reply, 50:auto local steps"
    for plain in (50, "50", 50.0):
        config = offbeat.config.make_config({"local_steps": plain})
        assert (config.local_steps, config.paces, config.most_local_steps) == (50, False, 50)
    for nonsense in ("50:auto:2", "50:fast", "auto", ":auto", "2.5:auto", True):
        with pytest.raises(ConfigError, match="a whole number, or NUMBER:auto, not"):
            offbeat.config.make_config({"local_steps": nonsense})
    for options, line in [
        ({"local_steps": "0:auto"}, "local_steps must be at least 1, not 0"),
        ({"local_steps": "1:auto"}, "leaves slower workers no fewer to take"),
        ({"local_steps": "8:auto", "discipline": "allreduce"}, "allreduce has none: say 8"),
        (
            {"local_steps": "8:auto", "engine": "ray", "workers": "2..4", "steps": 9},
            "where workers come and go any of them does any step: say 8",
        ),
        ({"outer_optimizer": "sgd"}, "give --local-steps H too"),
    ]:
        with pytest.raises(ConfigError, match=line):
            offbeat.config.make_config(options)


def test_workers_that_may_come_and_go_have_steps_of_one_length() -> None:
    config = offbeat.config.make_config({"local_steps": "8:auto", "split": "shared"})
    with pytest.raises(ConfigError, match="say --split disjoint, or 8"):
        make_job(config, toy_recipe(), elastic=True)


# -- the data --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 7}, {"steps": 2}])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_worker_has_as_many_batches_as_without(length: dict[str, int], accumulate: int) -> None:
    """In whatever steps it goes through them, and wherever it begins again."""
    shape: dict[str, Any] = {"workers": 2, "accumulate": accumulate, **length}
    plain = toy_job(local_steps=4, **shape)
    paced = toy_job(local_steps="4:auto", **shape)
    for rank in range(2):
        expected = list(plain.step_batches(rank))
        whole = list(paced.step_batches(rank))
        assert paced.num_batches(rank) == len(whole) == len(expected)
        assert [b.number for b in whole] == [b.number for b in expected]
        assert all(map(same, whole, expected))
        ends = [b.number for b in whole if b.ends_step]
        assert ends == sorted({*range(11, len(whole), 12)} | {len(whole) - 1})
        for start in range(len(whole) + 1):
            rest = list(paced.step_batches(rank, start))
            assert [b.number for b in rest] == list(range(start, len(whole)))
            assert all(map(same, rest, whole[start:]))


def same(one: Any, other: Any) -> bool:
    alike = all(torch.equal(a, b) for a, b in zip(one.batch, other.batch, strict=True))
    return alike and (one.epoch, one.number) == (other.epoch, other.number)


def test_a_stream_is_gone_on_with_at_a_batch() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(zip(*toy_data(), strict=True))

    recipe = toy_recipe(data=lambda config: (Stream(), None))
    job = toy_job(recipe, workers=1, local_steps="5:auto", steps=6)
    whole = list(job.step_batches(0))
    assert [b.number for b in whole] == list(range(30)), "24 are an epoch"
    assert [b.number for b in whole if b.ends_step] == [23, 29]
    rest = list(job.step_batches(0, 25))
    assert all(map(same, rest, whole[25:])) and len(rest) == 5


# -- live, with a clock that goes by batches -------------------------------------------------------


class Time:
    """A worker's: nothing takes any but computing a batch, and being held up."""

    def __init__(self, stop: Any) -> None:
        self.now = 0.0
        self._stop = stop

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return bool(self._stop.is_set())


class Scripted(Worker):
    def __init__(self, job: Any, rank: int, *given: Any, **more: Any) -> None:
        self.time = more["clock"] = Time(more["stop"])
        super().__init__(job, rank, *given, **more)
        stop: Any = self.time
        self._faults = make_faults(job.config, rank, 0, clock=self.time, stop=stop)

    def _compute(self, *given: Any, **more: Any) -> None:
        super()._compute(*given, **more)
        self.time.now += 1.0


@pytest.fixture
def by_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Worker", Scripted)


def numbered(optimizer: Any = None, **fields: Any) -> tuple[offbeat.Recipe, Counter[int]]:
    """Its data have numbers, and how often each of them was computed on is counted."""
    inputs, labels = toy_data(NUM_EXAMPLES)
    seen: Counter[int] = Counter()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            seen.update(batch[2].tolist())
        return cross_entropy(model, batch)

    data = (inputs, labels, torch.arange(NUM_EXAMPLES))
    recipe = toy_recipe(
        optimizer=optimizer or SGD(lr=0.05, momentum=0.9),
        data=lambda config: (data, data),
        loss=loss,
        **fields,
    )
    return recipe, seen


def train(folder: Path, recipe: offbeat.Recipe, **options: Any) -> offbeat.Result:
    shape = {"workers": 2, "device": "cpu", "local_steps": "6:auto", **options}
    return offbeat.train(recipe, run_dir=folder, engine="inproc", quiet=True, threads=1, **shape)


def steps_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    found = [e for e in read_events(folder / "events") if e["kind"] == "step"]
    return sorted((e for e in found if e["worker"] == rank), key=lambda event: event["step"])


def pushes_of(folder: Path, rank: int) -> list[int]:
    found = {
        e["sequence"]: e["batch"]
        for e in read_events(folder / "events")
        if e["kind"] == "push" and e["worker"] == rank
    }
    assert list(found) == sorted(found)
    return list(found.values())


@pytest.mark.parametrize("overlap", [False, True])
def test_in_rounds_a_worker_of_a_third_of_the_speed_takes_a_third(
    tmp_path: Path, by_batches: None, overlap: bool
) -> None:
    """Three epochs of 12 batches for each; the first steps are taken before anybody knows. With
    overlap the second ones are, too."""
    recipe, seen = numbered(epochs=3)
    train(tmp_path / "r", recipe, discipline="sync", slow_worker="1:3x", overlap=overlap)
    assert [e["local_steps"] for e in steps_of(tmp_path / "r", 0)] == [6] * 6
    slow = [e["local_steps"] for e in steps_of(tmp_path / "r", 1)]
    expected = [6, 6, 2, 2] if overlap else [6, 2, 2, 2, 2, 2]
    assert slow[: len(expected)] == expected
    assert sum(slow) == 36
    assert set(seen.values()) == {3} and len(seen) == NUM_EXAMPLES
    assert pushes_of(tmp_path / "r", 1) == [n - 1 for n in itertools.accumulate(slow)]
    rows = offbeat.api.summarise(tmp_path / "r")["workers"]
    assert [row["local_steps"] for row in rows] == [6.0, pytest.approx(36 / len(slow))]


@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize("more", [{}, {"accumulate": 2, "servers": 2}], ids=["plain", "several"])
def test_every_epoch_is_gone_through_once_under_every_discipline(
    tmp_path: Path, by_batches: None, discipline: str, more: dict[str, Any]
) -> None:
    recipe, seen = numbered(epochs=4)
    result = train(
        tmp_path / "r", recipe, discipline=discipline, slow_worker="1:3x", workers=3, **more
    )
    assert set(seen.values()) == {4} and len(seen) == NUM_EXAMPLES
    several = more.get("accumulate", 1)
    for rank in range(3):
        steps = steps_of(tmp_path / "r", rank)
        assert sum(e["examples"] for e in steps) == 4 * 80
        assert all(1 <= e["local_steps"] <= 6 for e in steps)
        assert pushes_of(tmp_path / "r", rank)[-1] == 31
    fastest = [e["local_steps"] for e in steps_of(tmp_path / "r", 0)]
    assert fastest == ([6, 2] if several == 1 else [4]) * 4, "an epoch has eight batches"
    if discipline in ("sync", "bounded"):  # elsewhere it may be through before the others begin
        assert 2 in {e["local_steps"] for e in steps_of(tmp_path / "r", 1)[1:]}
    kept = result.summary["kept"]
    dealt_with = {num_dealt_with(shard, discipline) for shard in kept}
    assert dealt_with == {result.summary["gradients"]}
    assert result.summary["test_loss"] < 0.9


def test_one_worker_is_as_without(tmp_path: Path) -> None:
    """It is the fastest, to the bit; its schedule goes by its own steps."""
    for name, optimizer in (("a", AdamW(lr=0.01)), ("s", SGD(lr=0.1))):
        recipe = toy_recipe(optimizer=optimizer, schedule=offbeat.cosine(warmup=5))
        shape: dict[str, Any] = {"workers": 1, "epochs": 2}
        plain = train(tmp_path / f"{name}p", recipe, **{**shape, "local_steps": 6})
        paced = train(tmp_path / f"{name}a", recipe, **shape)
        assert_same(paced, plain)


def assert_same(found: offbeat.Result, other: offbeat.Result) -> None:
    for name, value in other.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


def test_each_worker_has_its_own_place_in_the_schedule() -> None:
    """The servers' versions stand for unlike numbers of steps."""
    job = toy_job(toy_recipe(optimizer=AdamW(lr=0.1)), workers=2, local_steps="6:auto", epochs=2)
    assert job.facts.total_updates is None
    towers = job.make_towers(1, job.make_model())
    assert isinstance(towers, LocalTowers)
    assert (towers._inner.total_steps, towers._inner.steps_per_update) == (24, 0.0)
    towers.begin(1000)
    assert towers.state()[1] == {"position": 0}
    towers.skip(7)
    assert towers.state()[1] == {"position": 7}
    several = toy_job(workers=2, local_steps="6:auto", epochs=2, accumulate=2)
    towers = several.make_towers(1, several.make_model())
    assert isinstance(towers, LocalTowers) and towers._inner.total_steps == 12
    towers.skip(7)
    assert towers.state()[1] == {"position": 3}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("lengths", [({"epochs": 1}, {"epochs": 3}), ({"steps": 3}, {"steps": 6})])
def test_a_run_goes_on_at_the_batch_where_it_was(
    tmp_path: Path, by_batches: None, fresh: bool, lengths: tuple[dict[str, int], dict[str, int]]
) -> None:
    """The servers know it, whatever the worker has kept; also in the middle of an epoch."""
    recipe, seen = numbered(AdamW(lr=0.01))
    shape = {"discipline": "sync", "slow_worker": "1:3x", "fresh_worker_state": fresh}
    train(tmp_path / "r", recipe, **shape, **lengths[0])
    before = pushes_of(tmp_path / "r", 1)
    assert before[-1] + 1 == sum(seen.values()) / 20 == (12 if "epochs" in lengths[0] else 18)
    offbeat.resume(tmp_path / "r", recipe, **lengths[1])
    assert set(seen.values()) == {3} and len(seen) == NUM_EXAMPLES
    after = pushes_of(tmp_path / "r", 1)
    assert after[: len(before)] == before and after[-1] == 35
    log = (tmp_path / "r/logs/worker-1.log").read_text()
    assert f"going on after batch {before[-1] + 1}" in log
    assert ("begins anew" in log) == fresh


def test_each_worker_goes_on_where_it_was_if_shares_are_the_same() -> None:
    """Though steps are others; with other shares after its part of what all have gone through."""
    shape: dict[str, Any] = {"workers": 2, "epochs": 4, "local_steps": "6:auto"}
    before = toy_job(**shape)
    accounts = {0: Account(3, 5, applied=5, batches=27), 1: Account(3, 9, applied=9, batches=17)}
    state = ShardState(version=14, tensors={}, accounts=accounts)
    kept = Checkpoint(
        version=14, manifest=before.manifest, shards=(state,), frozen={}, plan=before.plan
    )
    assert before.starts(kept) is None
    for steps, starts in {
        "4:auto": {0: (3, 6, 27), 1: (3, 4, 17)},
        "4": {0: (3, 6, 27), 1: (3, 4, 17)},
        "30:auto": {0: (3, 2, 27), 1: (3, 1, 17)},
    }.items():
        assert toy_job(**{**shape, "local_steps": steps}).starts(kept) == starts
    assert toy_job(**shape, batch_size=20).starts(kept) == {0: (3, 1, 11), 1: (3, 1, 11)}
    assert toy_job(**{**shape, "workers": 1}).starts(kept) == {0: (3, 7, 44)}
    short = toy_job(**{**shape, "epochs": 1}, batch_size=20)
    assert short.starts(kept) == {0: (3, 1, 6), 1: (3, 1, 6)}
    assert toy_job(**shape, split="shared").starts(kept) == {0: (3, 3, 22), 1: (3, 3, 22)}


@pytest.mark.parametrize(
    "options", [{"workers": 3}, {"local_steps": 6}, {"local_steps": "4:auto"}], ids=str
)
def test_a_run_that_is_cut_anew_goes_on_after_as_many_epochs(
    tmp_path: Path, by_batches: None, options: dict[str, Any]
) -> None:
    """Pushes of the slow one stand for fewer batches than its number says."""
    recipe, seen = numbered(epochs=2)
    train(tmp_path / "r", recipe, discipline="sync", slow_worker="1:3x", epochs=2)
    offbeat.resume(tmp_path / "r", recipe, epochs=4, **options)
    assert set(seen.values()) == {4} and len(seen) == NUM_EXAMPLES


def test_a_plain_run_can_go_on_so(tmp_path: Path, by_batches: None) -> None:
    recipe, seen = numbered(epochs=2)
    train(tmp_path / "r", recipe, discipline="sync", local_steps=5, epochs=2)
    offbeat.resume(tmp_path / "r", recipe, epochs=4, local_steps="5:auto", slow_worker="1:3x")
    assert set(seen.values()) == {4} and len(seen) == NUM_EXAMPLES


def test_the_length_may_be_given_in_steps(tmp_path: Path, by_batches: None) -> None:
    """Of the fastest: two epochs and a step of six, then."""
    recipe, seen = numbered()
    train(tmp_path / "r", recipe, discipline="sync", steps=5, slow_worker="1:3x")
    assert sum(seen.values()) == 2 * 30 * 10
    assert len(steps_of(tmp_path / "r", 0)) == 5 < len(steps_of(tmp_path / "r", 1))


def test_a_loss_that_is_no_number_is_explained(tmp_path: Path, by_batches: None) -> None:
    """The batches of that step are made again, and no others."""
    inputs, labels = toy_data()
    inputs[-1] = float("nan")
    recipe = toy_recipe(data=lambda config: ((inputs, labels), None))
    with pytest.raises(offbeat.RunError, match=r"6 of the 360 numbers in its batch are NaN"):
        train(tmp_path / "r", recipe, workers=1)


def test_a_report_says_how_many_each_took(tmp_path: Path, by_batches: None) -> None:
    recipe, _ = numbered(epochs=1)
    train(tmp_path / "r", recipe, discipline="sync", slow_worker="1:3x")
    write_report([tmp_path / "r"], tmp_path / "r")
    text = (tmp_path / "r/report.md").read_text()
    assert "| gradients | local steps in each | dropped | a second |" in text
    assert "| worker 0 | 2 | 6 |" in text


# -- deaths ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_worker_goes_on_at_its_batch(tmp_path: Path) -> None:
    """Of two, and nothing is gone through twice or left out. What it had not written down when it
    was killed the servers have."""
    flags = ("--workers", "2", "--servers", "2", "--local-steps", "5:auto", "--epochs", "20")
    killed = LocalRun(tmp_path, *flags, "--kill-worker", "1@9", recipe="momentum")
    assert killed.wait() == 0, killed.text()
    assert killed.incarnations(1) == 2
    steps = steps_of(killed.run_dir, 1)
    batches = [-1, *pushes_of(killed.run_dir, 1)]
    assert batches[-1] == 20 * 12 - 1
    assert len(steps) > 30 and {9, len(batches) - 1} <= {e["step"] for e in steps}
    for event in steps:
        assert batches[event["step"]] - batches[event["step"] - 1] == event["local_steps"]


@pytest.mark.slow
def test_a_server_that_dies_has_every_batch_in_its_books(tmp_path: Path) -> None:
    """Workers that were through go back to a push that it has, and make the same ones again."""
    slowly = ("--slow-worker", "0:5x,1:15x", "--epochs", "6", "--checkpoint-every", "5")
    run = LocalRun(
        tmp_path, "--local-steps", "5:auto", "--servers", "2", *slowly, recipe="momentum"
    )
    run.wait_for_steps(5)
    run.kill("ps --index 1")
    assert run.wait() == 0, run.text()
    for rank in range(2):
        batches = [-1, *pushes_of(run.run_dir, rank)]
        assert batches[-1] == 6 * 12 - 1
        for event in steps_of(run.run_dir, rank):
            assert batches[event["step"]] - batches[event["step"] - 1] == event["local_steps"]
    for shard in run.summary()["kept"]:
        counted = sum(shard[name] for name in ("applied", "dropped", "rejected", "lost"))
        assert (
            counted
            == shard["gradients"]
            == len(pushes_of(run.run_dir, 0)) + len(pushes_of(run.run_dir, 1))
        )
