"""Runs that end before their work is done because of their scores, and the best that is kept."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DROPPING, num_dealt_with, toy_job, toy_recipe
from torch import nn

import offbeat
from offbeat.config import DISCIPLINES, make_config
from offbeat.engines.inproc import InprocEngine
from offbeat.errors import CheckpointError, ConfigError
from offbeat.recipes.metrics import Scores, direction_of
from offbeat.report.write import write_report
from offbeat.roles.evaluator import Found
from offbeat.roles.judging import Referee, make_judges, make_referee, past_scores, reason_of
from offbeat.run.checkpoint import newest_checkpoint
from offbeat.run.events import EventLog, read_events
from offbeat.run.making import make_job
from offbeat.run.rundir import RunFolder
from offbeat.run.stopping import Judge

MANY = 1_000_000
"""Steps that no test waits for."""


def train(recipe: offbeat.Recipe, run_dir: Path, **options: Any) -> offbeat.Result:
    return offbeat.train(
        recipe, run_dir=run_dir, engine="inproc", quiet=True, threads=1, device="cpu", **options
    )


class Scripted:
    """A metric that scores what a test says, the last one over and over again."""

    def __init__(self, scores: Iterable[float], *, most: bool = True) -> None:
        self.__name__ = "points"
        self.higher_is_better = most
        self.states: list[dict[str, torch.Tensor]] = []
        """What was scored."""
        *first, last = scores
        self._scores = itertools.chain(first, itertools.repeat(last))

    def __call__(self, model: nn.Module, batch: Any) -> tuple[float, float]:
        self.states.append({name: t.clone() for name, t in model.state_dict().items()})
        return next(self._scores), 1.0


# -- the judge -------------------------------------------------------------------------------------


def judged(scores: Iterable[float], **options: Any) -> Judge:
    judge = Judge("points", **{"most": True, **options})
    return judge.add_all(enumerate(scores, start=1))


@pytest.mark.parametrize(
    ("scores", "options", "best", "reason"),
    [
        ([0.5, 0.8, 0.9], {"stop_at": 0.9}, (3, 0.9), "points 0.9 at version 3 has reached 0.9"),
        ([0.5, 0.8], {"stop_at": 0.9}, (2, 0.8), None),
        ([0.5, 0.2], {"stop_at": 0.2, "most": False}, (2, 0.2), "points 0.2 at version 2"),
        ([0.5, 0.3], {"stop_at": 0.2, "most": False}, (2, 0.3), None),
        ([5.0], {"stop_at": math.inf}, (1, 5.0), None),
        ([5.0], {"stop_at": math.inf, "most": False}, (1, 5.0), None),
        ([1, 3, 2, 3], {"patience": 2}, (2, 3), "no better points than 3 at version 2 in 2 scores"),
        ([1, 3, 2, 4, 3], {"patience": 2}, (4, 4), None),
        ([3, 4], {"patience": 1, "most": False}, (1, 3), "in 1 score "),
        ([math.nan, math.inf], {"patience": 2}, None, "no better points in 2 scores"),
        ([math.nan, 1, 1], {"patience": 2}, (2, 1), None),
        ([1, 1, 9], {"patience": 1}, (3, 9), "than 1 at version 1"),
        ([], {"stop_at": 1.0, "patience": 1}, None, None),
    ],
)
def test_what_follows_from_scores(
    scores: list[float], options: dict[str, Any], best: Any, reason: str | None
) -> None:
    judge = judged(scores, **options)
    assert judge.best == best
    assert (reason is None) == (judge.reason is None) and (reason or "") in (judge.reason or "")


def test_a_version_that_is_scored_twice_counts_once() -> None:
    judge = judged([5.0], patience=2)
    judge.add_all([(1, 5.0)] * 5 + [(2, 4.0)])
    assert judge.reason is None


def test_skipped_versions_that_are_made_up_for_are_not_in_a_row() -> None:
    judge = judged([], patience=2).add_all([(10, 5.0), (40, 6.0), (20, 4.0), (30, 4.5)])
    assert judge.reason is None
    judge.add_all([(35, 7.0), (50, 6.5)])
    assert judge.best == (35, 7.0) and judge.reason is None
    assert "than 7 at version 35 in 2 scores" in str(judge.add_all([(60, 6.5)]).reason)


def test_what_is_better_is_known_or_said() -> None:
    assert direction_of("accuracy", offbeat.accuracy) is True
    assert direction_of("loss", print) is False
    assert direction_of("bits", print) is None
    assert direction_of("bits", Scripted([1.0], most=False)) is False


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_a_run_that_is_good_enough_ends_in_order(tmp_path: Path, discipline: str) -> None:
    result = train(
        toy_recipe(),
        tmp_path / "r",
        discipline=discipline,
        workers=3,
        servers=2,
        steps=MANY,
        eval_every=20,
        stop_at=0.85,
    )
    summary = result.summary
    assert summary["status"] == "finished" and not result.interrupted
    assert summary["reason"].startswith("stopped early: accuracy ")
    assert summary["reason"].endswith(" has reached 0.85 (--stop-at)")
    assert summary["gradients"] < MANY and (summary["lost_updates"], summary["not_kept"]) == (0, 0)
    kept = newest_checkpoint(tmp_path / "r" / "checkpoints")
    for shard, row in zip(kept.shards, summary["kept"], strict=True):
        assert num_dealt_with(row, discipline) == row["gradients"] == summary["gradients"]
        assert row["version"] == shard.version
        assert discipline in DROPPING or shard.version == summary["updates"]
    scores = [e for e in read_events(tmp_path / "r" / "events") if e["kind"] == "score"]
    assert scores[-1]["version"] == kept.version, "the last one is scored"
    assert summary["reason"].split("stopped early: ")[1] in report_of(result)


def report_of(result: offbeat.Result) -> str:
    return write_report([result.run_dir], result.run_dir)[1].read_text()


def test_a_loss_is_good_enough_when_it_is_low(tmp_path: Path) -> None:
    x = torch.randn(240, 6)
    data = (x, x.sum(dim=1, keepdim=True))
    recipe = toy_recipe(
        lambda: nn.Linear(6, 1),
        data=lambda config: (data, data),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    )
    result = train(recipe, tmp_path / "r", steps=MANY, eval_every=10, stop_at=0.01)
    assert "loss" in result.summary["reason"] and (result.test_metric or 1) <= 0.01


def test_patience_is_for_scores_in_a_row(tmp_path: Path) -> None:
    metric = Scripted([1, 5, 3, 6, 6, 2, 4])
    result = train(toy_recipe(metric=metric), tmp_path / "r", steps=MANY, eval_every=10, patience=3)
    scores = [score for _, score in past_scores(tmp_path / "r" / "events")]
    assert scores[:7] == [1, 5, 3, 6, 6, 2, 4], "what came after that decided nothing"
    assert result.summary["reason"].startswith("stopped early: no better points than 6 at version")
    assert result.best == (result.summary["best"]["version"], 6)


def test_a_run_that_has_all_its_steps_done_was_not_stopped(tmp_path: Path) -> None:
    result = train(
        toy_recipe(), tmp_path / "r", steps=30, eval_every=10, stop_at="loss=0", patience=9
    )
    assert result.summary["reason"] is None and result.summary["gradients"] == 60
    assert not (tmp_path / "r" / "enough.json").exists()


def test_to_go_on_takes_another_wish(tmp_path: Path) -> None:
    recipe, run_dir = toy_recipe(metric=Scripted([5, 4])), tmp_path / "r"
    first = train(recipe, run_dir, steps=MANY, eval_every=10, patience=2)
    before = first.summary["gradients"]
    with pytest.raises(ConfigError, match=r"nothing left to do: no better .* say --stop-at or"):
        offbeat.resume(run_dir, recipe)
    with pytest.raises(ConfigError, match="has reached 4"):
        offbeat.resume(run_dir, recipe, patience=9, stop_at=4)
    recipe = toy_recipe(metric=Scripted([4, 4, 9, 8]))
    again = offbeat.resume(run_dir, recipe, patience=9, stop_at=8.5)
    assert again.summary["status"] == "finished" and again.summary["gradients"] > before
    assert again.summary["reason"].endswith("has reached 8.5 (--stop-at)")
    steps = again.summary["gradients"]
    last = offbeat.resume(run_dir, recipe, patience=MANY, stop_at="inf", steps=steps, quiet=True)
    assert last.summary["reason"] is None and last.summary["gradients"] == 2 * steps


def test_a_run_that_was_interrupted_goes_on_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five scores that are not the best are enough, before and after the break together."""
    recipe, run_dir = toy_recipe(metric=Scripted([9, 1])), tmp_path / "r"
    original, done = InprocEngine.status, list[bool]()

    def interrupt(self: InprocEngine) -> Any:
        if not done and len(metric.states) > 2:
            done.append(True)
            raise KeyboardInterrupt
        return original(self)

    metric: Any = recipe.metric
    monkeypatch.setattr(InprocEngine, "status", interrupt)
    first = train(recipe, run_dir, steps=MANY, eval_every=10, patience=60)
    assert first.interrupted and first.summary["reason"] is None
    before = len(list(past_scores(run_dir / "events")))
    result = offbeat.resume(run_dir, recipe, patience=before + 1)
    after = len(list(past_scores(run_dir / "events")))
    assert "no better points than 9" in result.summary["reason"] and after <= before + 4


# -- the best --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ema", [None, 0.9])
def test_the_best_weights_are_kept_beside_the_newest(tmp_path: Path, ema: float | None) -> None:
    metric, run_dir = Scripted([2, 7, 7, 3, 1, 0]), tmp_path / "r"
    result = train(
        toy_recipe(metric=metric, ema=ema),
        run_dir,
        steps=MANY,
        eval_every=10,
        patience=4,
        keep=1,
        keep_best=True,
    )
    assert result.best is not None and result.best[1] == 7 and result.summary["keeps_best"]
    best = result.state_dict(best=True)
    for name, value in metric.states[1].items():
        assert torch.equal(best[name], value), "the first of two that are equal"
    assert not torch.equal(best["0.weight"], result.state_dict()["0.weight"])
    toy_recipe().model().load_state_dict(offbeat.load(run_dir, best=True))
    offbeat.export(run_dir, tmp_path / "best.safetensors", best=True)
    assert (tmp_path / "best.safetensors").read_bytes() == (
        run_dir / "best.safetensors"
    ).read_bytes()


def test_without_it_there_is_no_best_to_load(tmp_path: Path) -> None:
    result = train(toy_recipe(), tmp_path / "r", steps=3)
    assert result.best is not None and not result.summary["keeps_best"]
    with pytest.raises(CheckpointError, match="keeps no best weights: that takes --keep-best"):
        result.state_dict(best=True)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path)
    for path in (found.events, found.checkpoints):
        path.mkdir()
    return found


def scores(metric: float) -> Scores:
    return Scores({"points": metric}, 1)


def found(version: int) -> Found:
    return Found(version, {"w": torch.tensor([float(version)])})


def make(folder: RunFolder, told: Callable[[str], None] = lambda line: None, **options: Any) -> Any:
    job = toy_job(toy_recipe(metric=Scripted([1.0])), **options)
    return Referee(job, folder, told).scored


def test_another_metric_than_the_first_may_be_what_is_enough(run_dir: Path) -> None:
    """The lower the better, where that is so; the best is still the first one's."""
    metrics = {
        "accuracy": Scripted([0.9, 0.8, 0.7]),
        "missed": Scripted([5.0, 4.0, 3.0, 2.0], most=False),
    }
    recipe = toy_recipe(metric=None, metrics=metrics)
    result = train(recipe, run_dir, steps=MANY, eval_every=10, stop_at="missed=3", keep_best=True)
    assert "missed 3 at version" in str(result.summary["reason"])
    assert result.summary["best"]["metric"] == 0.9
    with pytest.raises(ConfigError, match=r"nothing left to do: missed 3 .*reached 3"):
        offbeat.resume(run_dir, recipe)


@pytest.mark.parametrize(
    ("stop_at", "message"),
    [
        ("los=3", "goes by 'los', which nothing is scored by; did you mean 'loss'"),
        ("odd=3", "goes by 'odd', of which nobody said whether more is better"),
        ("loss=x", "stop_at must be a number, or METRIC=NUMBER, not 'loss=x'"),
        ("=3", "stop_at must be a number, or METRIC=NUMBER, not '=3'"),
        ("loss=-inf", "stop_at must be finite, or inf: never"),
    ],
)
def test_what_nothing_can_be_enough_of_is_refused(stop_at: str, message: str) -> None:
    metrics = {"accuracy": offbeat.accuracy, "odd": lambda model, batch: (1.0, 1.0)}
    with pytest.raises(ConfigError, match=message):
        toy_job(toy_recipe(metric=None, metrics=metrics), stop_at=stop_at)


def test_whoever_takes_a_dead_evaluators_place_goes_on_from_what_is_written_down(
    folder: RunFolder,
) -> None:
    events = EventLog.create(folder.events, "evaluator")
    for version, metric in ((1, 5.0), (2, 4.0), (3, math.nan)):
        events.record("score", version=version, metric=metric, count=1, at_s=0.0)
    events.close()
    told: list[str] = []
    scored = make(folder, told.append, patience=3, keep_best=True)
    scored(found(3), scores(4.0))
    assert not told, "that one is known"
    scored(found(4), scores(4.5))
    assert "no better points than 5 at version 1" in told[0] and folder.enough.exists()
    assert folder.read_best() == (4, 4.5), "of those whose weights could be kept"
    scored(found(5), scores(9.0))
    assert folder.read_best() == (5, 9.0) and len(told) == 1, "the last one counts too"


def test_a_run_goes_on_whose_skipped_scores_were_worse(folder: RunFolder) -> None:
    """Of those that were made in time no two were so in a row."""
    with contextlib.closing(EventLog.create(folder.events, "evaluator")) as events:
        for version, metric in ((10, 5.0), (40, 6.0), (20, 4.0), (30, 4.5)):
            events.record("score", version=version, metric=metric, count=1, at_s=0.0)
    job = toy_job(toy_recipe(metric=Scripted([1.0])), patience=2)
    assert reason_of(make_judges(job, folder.events)) is None


def test_a_run_that_is_over_is_not_ended(folder: RunFolder) -> None:
    folder.write_state("finished", None)
    make(folder, stop_at=1.0)(found(1), scores(2.0))
    assert not folder.enough.exists()
    make_referee(toy_job(), folder, None)(found(1), scores(2.0))
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "checkpoints",
        "events",
        "state.json",
    ]


# -- what cannot work ------------------------------------------------------------------------------


def bits(model: nn.Module, batch: Any) -> tuple[float, float]:
    return 1.0, 1.0


@pytest.mark.parametrize("option", [{"stop_at": 0.9}, {"patience": 2}, {"keep_best": True}])
@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"metric": bits}, {}, r"metric=offbeat.metric\(bits, higher_is_better=False\)"),
        ({"data": lambda config: (torch.zeros(9, 6), None)}, {}, "need test data to score on"),
        ({}, {"engine": "cluster"}, "an evaluator beside training, which a cluster has not"),
    ],
)
def test_what_cannot_be_judged_is_refused_at_the_start(
    fields: dict[str, Any], options: dict[str, Any], option: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_job(make_config({**options, **option}), toy_recipe(**fields))


def test_without_scores_along_the_way_nothing_is_stopped() -> None:
    for option in ({"stop_at": 0.9}, {"patience": 2}):
        with pytest.raises(ConfigError, match="give --eval-every"):
            toy_job(eval_every=0, **option)
    assert toy_job(eval_every=0, keep_best=True).config.keep_best
