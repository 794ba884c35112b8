"""A learning rate that falls when a score gets no better: what is decided, where, and from when."""

import contextlib
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cross_entropy, toy_job, toy_recipe
from scripted import ScriptedServer, run_master
from torch.optim.lr_scheduler import ReduceLROnPlateau

import offbeat
from offbeat.decline import Decline, Plateau
from offbeat.errors import ConfigError
from offbeat.recipes.metrics import Scores
from offbeat.roles.evaluator import Found
from offbeat.roles.falling import Falls
from offbeat.roles.judging import RateReferee
from offbeat.run.checkpoint import newest_checkpoint
from offbeat.run.events import EventLog, read_events
from offbeat.run.rundir import RunFolder

OPTIONS: list[dict[str, Any]] = [
    {"mode": "min", "patience": 2},
    {"mode": "max", "patience": 0, "threshold": 0.1, "cooldown": 2, "factor": 0.5, "min_lr": 0.01},
    {"mode": "min", "patience": 1, "threshold": 0.2, "threshold_mode": "abs", "eps": 0.01},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_rates_are_those_of_torch(options: dict[str, Any], seed: int) -> None:
    torchs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = ReduceLROnPlateau(torchs, **options)
    made = offbeat.schedule(ReduceLROnPlateau, **options)
    assert isinstance(made, Plateau) and made.most is not None
    decline = Decline(made, most=made.most, every=10)
    drawn = random.Random(seed)
    for version in range(10, 500, 10):
        value = drawn.choice([drawn.uniform(0.5, 2), float("nan")])
        scheduler.step(value)
        decline.add(version, value)
        assert made.lr(0.3, len(decline.falls)) == torchs.param_groups[0]["lr"]
    assert decline.falls


def test_a_score_that_was_not_due_does_not_count() -> None:
    """As that of a run that was stopped, and goes on: it would fall sooner than without."""
    made = offbeat.plateau(patience=1)
    assert isinstance(made, Plateau)
    decline = Decline(made, most=False, every=100)
    told = [decline.add(v, 1.0) for v in (100, 200, 250, 250, 200, 301, 399, 400)]
    assert told == [False] * 5 + [True] + [False] * 2 and decline.falls == [301]


def told_again(folder: RunFolder, *, every: int = 10, **options: Any) -> RateReferee:
    """As an evaluator begins that comes anew, or after a resume."""
    recipe = toy_recipe(schedule=offbeat.plateau(**{"patience": 1, "metric": "loss", **options}))
    return RateReferee(toy_job(recipe, eval_every=every), folder, lambda line: None)


def score(referee: RateReferee, version: int, value: float, events: EventLog | None = None) -> None:
    scores = Scores({"loss": value}, 1)
    if events is not None:
        events.record("score", version=version, metric=value, scores=scores.values, every=10)
        events.flush()
    referee.scored(Found(version, {}), scores)


@pytest.fixture
def scored(tmp_path: Path) -> RunFolder:
    """A run whose evaluator was slow, and went back to what it had skipped."""
    folder = RunFolder(tmp_path)
    folder.events.mkdir()
    referee = told_again(folder)
    with contextlib.closing(EventLog.create(folder.events, "evaluator")) as events:
        for version, value in ((10, 1.0), (40, 1.0), (70, 1.0), (100, 0.5), (110, 0.6)):
            score(referee, version, value, events)
        for version in (20, 30, 50, 60, 80, 90):
            score(referee, version, 1.1, events)
    assert folder.read_falls() == [70]
    return folder


@pytest.mark.parametrize("every", [5, 10, 50])
def test_a_run_that_goes_on_counts_on_from_what_counted(scored: RunFolder, every: int) -> None:
    """Skipped scores did not, nor does it matter of how many updates one is due now."""
    score(told_again(scored, every=every), 150, 0.6)
    assert scored.read_falls() == [70, 150], "the second in a row"


@pytest.mark.parametrize("happened", [[], [40], [40, 110]])
def test_what_has_happened_stands_whatever_scores_say_now(
    scored: RunFolder, happened: list[int]
) -> None:
    scored.write_json(scored.falls, {"scored": happened})
    referee = told_again(scored)
    score(referee, 120, 0.4)
    assert scored.read_falls() == happened
    for version in (130, 140):
        score(referee, version, 0.5)
    assert scored.read_falls() == [*happened, 140]


def test_a_fall_whose_score_nobody_wrote_down_is_not_made_again(scored: RunFolder) -> None:
    """Its evaluator died; the next one scores the same checkpoint."""
    score(told_again(scored), 120, 0.6)
    referee = told_again(scored)
    score(referee, 120, 0.6)
    assert scored.read_falls() == [70, 120]
    score(referee, 130, 0.6)
    assert scored.read_falls() == [70, 120], "it counts anew"


def test_a_rate_that_is_as_low_as_it_gets_is_not_said_to_fall(tmp_path: Path) -> None:
    """Nor would it fall that often at once in a run that goes on to lower ones."""
    folder = RunFolder(tmp_path)
    folder.events.mkdir()
    referee = told_again(folder, patience=0, factor=0.5, min_lr=0.04)  # of 0.1
    for version in range(10, 100, 10):
        score(referee, version, 1.0)
    assert folder.read_falls() == [20, 30]
    lower = told_again(folder, patience=0, factor=0.5, min_lr=0.01)
    score(lower, 100, 1.0)
    score(lower, 110, 1.0)
    assert folder.read_falls() == [20, 30, 110]


def test_an_infinite_score_counts_as_it_is_written_down() -> None:
    made = offbeat.plateau(patience=0)
    assert isinstance(made, Plateau)
    for value in (float("inf"), float("nan")):
        assert Decline(made, most=True, every=1).add(1, value)


def test_it_is_shown_as_it_was_made() -> None:
    assert repr(offbeat.plateau(patience=3, metric="loss")) == "plateau(patience=3, metric='loss')"


def test_falls_are_at_versions_that_lie_ahead(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    falls = Falls(folder)
    assert [falls.look(version) for version in (30, 50)] == [None, None]
    folder.write_json(folder.falls, {"scored": [40]})
    assert falls.look(60) == 81, "as far again as between two looks, and one"
    assert falls.look(200) is None and falls.versions == [81]
    falls.know([[80], []])
    assert falls.versions == [81], "what is known here is as much"


def test_a_fall_that_is_due_waits_until_it_is_known_how_quick_the_servers_are(
    tmp_path: Path,
) -> None:
    """As at the first looks of a run that goes on, whose workers come as they like."""
    folder = RunFolder(tmp_path)
    folder.write_json(folder.falls, {"scored": [40, 50]})
    falls = Falls(folder)
    falls.know([[91]])
    assert [falls.look(version) for version in (95, 95, 95, 97)] == [None] * 4
    assert falls.look(127) == 158 and falls.versions == [91, 158]


def test_servers_that_come_back_with_less_are_as_quick_as_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    falls = Falls(folder)
    assert [falls.look(version) for version in (10, 40, 70)] == [None] * 3
    folder.write_json(folder.falls, {"scored": [40]})
    assert falls.look(50) == 81


@pytest.mark.parametrize(("discipline", "ahead"), [("lock-free", 6), ("sync", 1)])
def test_updates_that_are_under_way_have_their_rate(
    tmp_path: Path, discipline: str, ahead: int
) -> None:
    """Without a lock as many may be as there are workers."""
    folder, server = RunFolder(tmp_path), Told([])
    folder.write_json(folder.falls, {"scored": [40]})
    recipe = toy_recipe(schedule=offbeat.plateau())
    run_master(folder, toy_job(recipe, workers=6, discipline=discipline), [server])
    assert server.falls[0] % 10 == ahead, "beside the ten of a stride"


class Told(ScriptedServer):
    """One that is ten updates further at each look, and was told of `falls`."""

    def __init__(self, falls: list[int]) -> None:
        super().__init__([])
        self.falls = falls

    def call(self, message: Any, tensors: Any, timeout_s: float) -> tuple[Any, Any]:
        if message["ask"] == "fall":
            self.falls = message["versions"]
        answer, tensors = super().call(message, tensors, timeout_s)
        if message["ask"] == "status":
            self.version += 10
            done = list(range(6)) if self.version > 100 else []
            answer |= {"version": self.version, "finished": done, "falls": self.falls}
        return answer, tensors


def test_a_master_that_comes_anew_learns_from_the_servers_what_fell(tmp_path: Path) -> None:
    """The one before it did not come to tell all of them; no checkpoint has it either."""
    folder, servers = RunFolder(tmp_path), [Told([91]), Told([])]
    folder.write_json(folder.falls, {"scored": [40]})
    job = toy_job(toy_recipe(schedule=offbeat.plateau()), servers=2, workers=1)
    assert run_master(folder, job, list(servers)) == "finished"
    assert [server.falls for server in servers] == [[91], [91]]
    assert '"fall"' not in (tmp_path / "master.jsonl").read_text(), "it fell already"


@pytest.mark.parametrize(
    ("schedule", "num_told"), [(offbeat.plateau(), 1), (offbeat.constant(), 0)]
)
def test_a_run_that_goes_on_with_another_schedule_does_not_fall(
    tmp_path: Path, schedule: Any, num_told: int
) -> None:
    folder, server = RunFolder(tmp_path), Told([])
    folder.write_json(folder.falls, {"scored": [40]})
    run_master(folder, toy_job(toy_recipe(schedule=schedule), workers=1), [server])
    assert len(server.falls) == num_told
    assert (tmp_path / "master.jsonl").read_text().count('"fall"') == num_told


def slow_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    threading.Event().wait(0.002)  # a step takes a while, or the run is over before it is scored
    return cross_entropy(model, batch)


def same(model: torch.nn.Module, batch: Any) -> tuple[float, float]:
    """A metric that never gets better."""
    return 1.0, 1.0


def train(run_dir: Path, **options: Any) -> offbeat.Result:
    schedule = offbeat.plateau(factor=0.5, patience=0, metric="same")
    metrics = {"accuracy": offbeat.accuracy, "same": offbeat.metric(same, higher_is_better=False)}
    recipe = toy_recipe(loss=slow_loss, metric=None, metrics=metrics, schedule=schedule)
    given = {"engine": "inproc", "quiet": True, "threads": 1, "device": "cpu", **options}
    if run_dir.exists():
        return offbeat.resume(run_dir, recipe, **options)
    return offbeat.train(recipe, run_dir=run_dir, **given)


def rates_of(run_dir: Path) -> dict[int, dict[int, float]]:
    """By shard and version."""
    found: dict[int, dict[int, float]] = {}
    for event in read_events(run_dir / "events"):
        if event["kind"] == "push":
            found.setdefault(event["shard"], {})[event["version"]] = event["lr"]
    return found


@pytest.mark.parametrize("discipline", ["sync", "lock-free", "bounded:1"])
def test_all_servers_fall_at_the_same_version_and_go_on_so(run_dir: Path, discipline: str) -> None:
    shape = {"workers": 2, "servers": 2, "discipline": discipline, "eval_every": 30}
    train(run_dir, steps=300, **shape)
    falls = newest_checkpoint(run_dir / "checkpoints").falls
    assert falls, "there was time for one"
    told = [e for e in read_events(run_dir / "events") if e.get("phase") == "fall"]
    assert [e["version"] for e in told if "shard" not in e] == list(falls)
    for shard, rates in rates_of(run_dir).items():
        mine = [e["version"] for e in told if e.get("shard") == shard]
        assert len(mine) == len(falls)
        if mine == list(falls):  # it was told in time
            for version, lr in rates.items():  # that of the update which made it
                assert lr == 0.1 * 0.5 ** sum(fall < version for fall in falls)
    before = max(rates_of(run_dir)[0])
    train(run_dir, steps=360)
    after = newest_checkpoint(run_dir / "checkpoints").falls
    assert after[: len(falls)] == falls
    goes_on = rates_of(run_dir)[0][before + 1]
    assert goes_on == 0.1 * 0.5 ** sum(fall <= before for fall in after)


def test_falls_that_were_decided_on_outlive_a_run_that_was_stopped(run_dir: Path) -> None:
    """The scores of its first part count in the second."""
    train(run_dir, workers=1, steps=55, eval_every=30)
    assert not (run_dir / "falls.json").exists(), "that of the end was not due"
    train(run_dir, steps=110)
    assert json.loads((run_dir / "falls.json").read_text())["scored"][0] in (60, 90)


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ({}, {"eval_every": 0}, "needs scores along the way: give --eval-every"),
        ({"metric": "acuracy"}, {}, "goes by 'acuracy'; did you mean 'accuracy'"),
    ],
)
def test_what_cannot_fall_is_refused_in_a_line(
    schedule: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        toy_job(toy_recipe(schedule=offbeat.plateau(**schedule)), **options)


def test_a_direction_that_nobody_told_is_asked_for() -> None:
    recipe = toy_recipe(metric=same, schedule=offbeat.plateau())
    with pytest.raises(ConfigError, match="whether more same is better: say mode='min'"):
        toy_job(recipe)
    toy_job(toy_recipe(metric=same, schedule=offbeat.plateau(mode="max")))


def test_without_test_data_there_is_nothing_to_go_by() -> None:
    data = lambda config: (toy_recipe().data(config)[0], None)  # noqa: E731
    with pytest.raises(ConfigError, match="needs test data to score on"):
        toy_job(toy_recipe(data=data, schedule=offbeat.plateau()))
