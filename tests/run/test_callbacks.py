"""Callbacks: what they are told, when, and that nobody waits for them."""

import json
import math
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cross_entropy, toy_recipe
from torch import nn

import offbeat
from offbeat.errors import ConfigError, NonFiniteLossError, RecipeError
from offbeat.recipes.callbacks import End, Evaluation, Start, Steps
from offbeat.run import callbacks as calling
from offbeat.run.events import EventLog, Followed, read_events

TIMEOUT_S = 60.0


class Recorder(offbeat.Callback):
    """Writes down what it is told, and in which threads."""

    def __init__(self) -> None:
        self.starts: list[Start] = []
        self.steps: list[Steps] = []
        self.evaluations: list[Evaluation] = []
        self.ends: list[End] = []
        self.order: list[str] = []
        self.threads: set[threading.Thread] = set()

    def _heard(self, what: str) -> None:
        self.order.append(what)
        self.threads.add(threading.current_thread())

    def on_start(self, run: Start) -> None:
        self._heard("start")
        self.starts.append(run)

    def on_step(self, steps: Steps) -> None:
        self._heard("step")
        self.steps.append(steps)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._heard("evaluation")
        self.evaluations.append(evaluation)

    def on_end(self, end: End) -> None:
        self._heard("end")
        self.ends.append(end)


def train(recipe: offbeat.Recipe | str, run_dir: Path, *callbacks: Any, **options: Any) -> Any:
    given = {"threads": 1, "workers": 2, **options}
    return offbeat.train(recipe, run_dir=run_dir, callbacks=callbacks, **given)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "TELL_EVERY_S", 0.001)


def assert_told(recorder: Recorder, result: Any) -> None:
    """All that there was to tell of a run that is over."""
    assert recorder.order[0] == "start" and recorder.order[-1] == "end"
    assert len(recorder.starts) == len(recorder.ends) == 1
    last = recorder.steps[-1]
    assert last.gradients == result.summary["gradients"]
    assert last.version == result.summary["updates"]
    assert last.examples == sum(w["examples"] for w in result.summary["workers"])
    assert last.loss is not None
    rates = [(s.gradients_per_s or 0, s.examples_per_s or 0) for s in recorder.steps]
    assert any(rates[0]) and all(e == pytest.approx(10 * g) for g, e in rates)
    scored = [e for e in read_events(result.run_dir / "events") if e["kind"] == "score"]
    found = [(e.version, e.scores, e.at_s) for e in recorder.evaluations]
    assert found == [(e["version"], e["scores"], e["at_s"]) for e in scored]
    (end,) = recorder.ends
    assert (end.status, end.reason) == ("finished", None)
    assert end.summary == result.summary


@pytest.mark.usefixtures("often")
def test_a_run_is_told_from_its_start_to_its_end(run_dir: Path) -> None:
    recorder, here = Recorder(), threading.current_thread()
    result = train(toy_recipe(epochs=20), run_dir, recorder, eval_every=40)
    assert_told(recorder, result)
    told = [(steps.gradients, steps.version) for steps in recorder.steps]
    assert told == sorted(set(told)) and len(told) > 1
    assert recorder.steps[-1].lr == 0.1
    (thread,) = recorder.threads
    assert thread is not here and thread.name == "callbacks"
    (start,) = recorder.starts
    assert start.run_dir == run_dir and start.config["workers"] == 2 and not start.is_resumed
    assert start.resolved["lr"] == 0.1 and start.total_updates == 480
    assert start.metric == "accuracy"
    assert start.higher_is_better == {"accuracy": True, "loss": False}


def test_a_short_run_tells_its_steps_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "TELL_EVERY_S", TIMEOUT_S)
    recorder = Recorder()
    result = train(toy_recipe(), run_dir, recorder, steps=2, workers=1)
    assert_told(recorder, result)
    assert recorder.order == ["start", "evaluation", "step", "end"]


def test_every_method_may_be_left_out(run_dir: Path) -> None:
    assert train(toy_recipe(), run_dir, offbeat.Callback()).summary["status"] == "finished"
    assert not (run_dir / "logs" / "callbacks.log").read_text()


def test_a_recipe_makes_callbacks_for_each_run(tmp_path: Path) -> None:
    made: list[Recorder] = []

    def make() -> list[Recorder]:
        made.append(Recorder())
        return made[-1:]

    recipe = toy_recipe(callbacks=make)
    for name in ("a", "b"):
        train(recipe, tmp_path / name, quiet=True)
    assert [recorder.starts[0].run_dir.name for recorder in made] == ["a", "b"]
    assert all(recorder.order.count("end") == 1 for recorder in made)


def test_without_callbacks_there_is_no_thread_and_no_log(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling.Caller, "_run", lambda self: pytest.fail("nobody is to be told"))
    train(toy_recipe(), run_dir, quiet=True)
    assert not (run_dir / "logs" / "callbacks.log").exists()


@pytest.mark.usefixtures("often")
def test_training_does_not_wait_for_a_slow_callback(run_dir: Path) -> None:
    """One that comes to no end before training does is told of all that it missed in one go."""
    asked = threading.Event()

    class Slow(Recorder):
        def on_step(self, steps: Steps) -> None:
            super().on_step(steps)
            for _ in range(int(TIMEOUT_S * 100)):
                if (run_dir / "state.json").exists():
                    return
                asked.wait(0.01)
            raise AssertionError("training waits")

    slow = Slow()
    result = train(toy_recipe(epochs=20), run_dir, slow, eval_every=40, quiet=True)
    assert_told(slow, result)
    assert len(slow.steps) <= 3


@pytest.mark.parametrize("error", [KeyError("mine"), SystemExit(3)])
@pytest.mark.parametrize("hook", ["on_step", "on_evaluation"])
def test_a_callback_that_fails_is_told_and_only_ended_from_then_on(
    run_dir: Path,
    hook: str,
    error: BaseException,
    often: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Failing(Recorder):
        pass

    def fail(self: Recorder, argument: object) -> None:
        self.order.append("failed")
        raise error

    setattr(Failing, hook, fail)
    fail.__name__ = hook
    failing, fine = Failing(), Recorder()
    result = train(toy_recipe(epochs=20), run_dir, failing, fine, eval_every=40)
    assert_told(fine, result)
    assert failing.order.count("failed") == 1
    assert failing.order[failing.order.index("failed") + 1 :] == ["end"]
    shown = capsys.readouterr().out
    assert shown.count(f"the callback Failing.{hook} failed: {type(error).__name__}: ") == 1
    log = (run_dir / "logs" / "callbacks.log").read_text()
    assert "Traceback" in log and "raise error" in log


def test_a_callback_that_cannot_begin_is_left_alone(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(Recorder):
        def on_start(self, run: Start) -> None:
            super().on_start(run)
            raise ValueError("no")

    failing = Failing()
    train(toy_recipe(), run_dir, failing)
    assert failing.order == ["start"]
    assert "the callback Failing.on_start failed: ValueError: no (" in capsys.readouterr().out


def test_a_callback_that_does_not_end_is_not_waited_for_for_ever(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calling, "END_TIMEOUT_S", 0.05)
    released = threading.Event()

    class Stuck(offbeat.Callback):
        def on_end(self, end: End) -> None:
            released.wait(TIMEOUT_S)

    try:
        train(toy_recipe(), run_dir, Stuck())
    finally:
        released.set()
    assert "callbacks did not end within 0.05 s" in capsys.readouterr().out


@pytest.mark.usefixtures("often")
def test_ctrl_c_is_told_as_the_end(run_dir: Path) -> None:
    class Stopping(Recorder):
        def on_step(self, steps: Steps) -> None:
            if not self.steps:
                os.kill(os.getpid(), signal.SIGINT)
            super().on_step(steps)

    stopping = Stopping()
    result = train(toy_recipe(), run_dir, stopping, epochs=10_000, quiet=True)
    assert result.interrupted
    assert [end.status for end in stopping.ends] == ["interrupted"]

    resumed = Recorder()
    done = int(result.summary["gradients"])
    offbeat.resume(
        run_dir, toy_recipe(), callbacks=[resumed], epochs=done // 24 + 2, quiet=True, workers=2
    )
    assert resumed.starts[0].is_resumed and resumed.ends[0].status == "finished"
    times = [evaluation.at_s for evaluation in resumed.evaluations]
    assert times and min(times) > result.summary["total_time_s"], "none of those before"


def test_a_failure_is_told_as_the_end_with_its_reason(run_dir: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(model, batch) * math.nan

    recorder = Recorder()
    with pytest.raises(NonFiniteLossError):
        train(toy_recipe(loss=loss), run_dir, recorder, quiet=True)
    (end,) = recorder.ends
    assert end.status == "failed" and "the loss became nan" in str(end.reason)
    assert end.summary == json.loads((run_dir / "summary.json").read_text())


@pytest.mark.usefixtures("often")
@pytest.mark.slow
def test_processes_are_told_of_too_also_when_one_dies(run_dir: Path) -> None:
    recorder = Recorder()
    result = train("toy:recipe", run_dir, recorder, engine="local", kill_worker="1@20", quiet=True)
    assert result.summary["restarts"] == 1
    assert recorder.order[0] == "start" and recorder.order.count("end") == 1
    assert recorder.ends[0].summary == result.summary
    assert recorder.steps[-1].version == result.summary["updates"]
    assert recorder.evaluations[-1].scores == result.test_scores
    assert recorder.evaluations[-1].version == result.summary["updates"]


def broken() -> list[offbeat.Callback]:
    raise OSError("no disk")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [sys], "a callback must be an offbeat.Callback, not <module"),
        (broken, "the recipe's callbacks function failed: OSError: no disk"),
    ],
)
def test_callbacks_of_a_recipe_that_are_none_are_refused(
    run_dir: Path, make: Any, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        train(toy_recipe(callbacks=make), run_dir)
    assert not run_dir.exists()


def test_what_is_no_callback_is_refused(run_dir: Path) -> None:
    with pytest.raises(RecipeError, match="must be a function that makes them"):
        toy_recipe(callbacks=[Recorder()])
    with pytest.raises(ConfigError, match=r"must be an offbeat\.Callback, not 3"):
        train(toy_recipe(), run_dir, 3)
    for given in (3, Recorder(), Recorder):
        with pytest.raises(ConfigError, match="callbacks must be a list of them"):
            offbeat.train(toy_recipe(), callbacks=given, run_dir=run_dir)  # type: ignore[arg-type]
    assert not run_dir.exists()


def test_events_are_followed_line_by_line(tmp_path: Path) -> None:
    """What was there before, half a line, and a file that comes later."""
    log = EventLog.create(tmp_path, "evaluator")
    log.record("score", version=1)
    log.flush()
    followed = Followed(tmp_path, "evaluator*.jsonl")
    assert list(followed.read()) == []
    log.record("score", version=2)
    log.close()
    with (tmp_path / "evaluator.1.jsonl").open("w") as half:
        half.write('{"kind": "score", "version": 3}\n{"kind": "sco')
        half.flush()
        assert [event["version"] for event in followed.read()] == [2, 3]
        half.write('re", "version": 4}\n')
    assert [event["version"] for event in followed.read()] == [4]
    assert list(followed.read()) == []
