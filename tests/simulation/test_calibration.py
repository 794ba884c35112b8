"""What times are taken out of a run's events: those that went by, each once."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from offbeat.bench.report import write_run
from offbeat.config import make_config
from offbeat.errors import ConfigError, RunDirError
from offbeat.simulation.calibration import (
    LOOK_SHARE,
    MERGE_SHARE,
    WARM_UP,
    Recording,
    read_recording,
)

Event = dict[str, Any]


def step(worker: int, number: int, start_s: float, *parts_s: float, **more: Any) -> Event:
    """`parts_s`: to compute, to prepare, to exchange."""
    names = ("compute_s", "prepare_s", "exchange_s")
    event = {"kind": "step", "worker": worker, "step": number, "start_s": start_s}
    return {**event, **dict(zip(names, parts_s, strict=True)), **more}


def push(
    worker: int,
    sequence: int,
    received_s: float,
    applied_s: float | None,
    replied_s: float,
    version: int | None,
    **more: Any,
) -> Event:
    times = {"received_s": received_s, "applied_s": applied_s, "replied_s": replied_s}
    event = {"kind": "push", "shard": 0, "worker": worker, "sequence": sequence}
    outcome = {"outcome": "applied", "version": version, "staleness": 0}
    return {**event, **times, **outcome, **more}


def write(
    folder: Path, events: Iterable[Event], options: Mapping[str, Any], **described: Any
) -> Path:
    config = make_config({"recipe": "made-up", **options}).to_json()
    (folder / "events").mkdir(parents=True)
    told = {"config": config, "metric": "accuracy", **described}
    (folder / "config.json").write_text(json.dumps(told), encoding="utf-8")
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events" / "all.jsonl").write_text(lines, encoding="utf-8")
    return folder


NUM_STEPS = 40


def one_worker(compute_s: float = 0.1) -> list[Event]:
    """Each step: 100 ms of computing, 2 ms up, 3 to look and apply, 4 to reply, 5 down; 1 to
    prepare the next batch meanwhile."""
    events = []
    for number in range(1, NUM_STEPS + 1):
        start_s = 5 + number * (compute_s + 0.014)
        up_s = start_s + compute_s + 0.002
        events.append(push(0, number, up_s, up_s + 0.003, up_s + 0.007, number))
        events.append(
            step(0, number, start_s, compute_s, 0.001, 0.013, up=800.0, down=400.0, whole=1600.0)
        )
    return events


def read(tmp_path: Path, events: Sequence[Event], **options: Any) -> Recording:
    return read_recording(write(tmp_path / "run", events, {"workers": 1, **options}))


def test_each_part_of_a_step_is_found(tmp_path: Path) -> None:
    timing = read(tmp_path, one_worker()).timing
    (steps,) = timing.steps
    assert len(steps) == NUM_STEPS - NUM_STEPS // 10, "the first ones are not looked at"
    for found in steps:
        assert found == pytest.approx((0.1, 0.001, 0.002, 0.005))
    for service in timing.services:
        looks_s, applies_s = LOOK_SHARE * 0.003, (1 - LOOK_SHARE) * 0.003
        assert service == pytest.approx((looks_s, applies_s, 0.004))
    assert timing.merge_s == pytest.approx(MERGE_SHARE * 0.003)
    assert (timing.whole_bytes, timing.up_bytes, timing.down_bytes) == (1600.0, 800.0, 400.0)
    assert timing.cores == math.inf, "nobody said that they shared any"


def test_the_figures_of_the_run_are_those_of_the_same_time(tmp_path: Path) -> None:
    found = read(tmp_path, one_worker()).figures
    assert found.gradients == pytest.approx(NUM_STEPS - NUM_STEPS // 10, abs=1)
    assert found.gradients / found.time_s == pytest.approx(1 / 0.114)
    assert found.waited_s / found.steps_s == pytest.approx(0.013 / 0.114)
    assert set(found.staleness) == {0}


def test_a_straggler_s_waiting_is_not_its_computing(tmp_path: Path) -> None:
    held = [dict(event) for event in one_worker(0.3 + 0.002)]  # 3x, and of the batch before too
    timing = read(tmp_path, held, slow_worker="0:3x").timing
    assert timing.steps[0][5].compute_s == pytest.approx(0.1)


def test_of_a_server_that_was_busy_nothing_is_learned_about_the_way_up(tmp_path: Path) -> None:
    events = []
    for number in range(1, NUM_STEPS + 1):
        at_s = 5 + 0.1 * number
        # both are computed at the same moment; worker 1 waits for worker 0, but for once
        first, second = (0, 1) if number != 20 else (1, 0)
        events += [
            push(first, number, at_s + 0.051 + first / 1000, at_s + 0.055, at_s + 0.06, 2 * number),
            push(second, number, at_s + 0.061, at_s + 0.064, at_s + 0.066, 2 * number + 1),
            step(first, number, at_s, 0.05, 0.001, 0.012),
            step(second, number, at_s, 0.05, 0.001, 0.019),
        ]
    timing = read(tmp_path, events, workers=2).timing
    assert all(found.up_s == pytest.approx(0.001) for found in timing.steps[0])
    assert all(found.up_s == pytest.approx(0.002) for found in timing.steps[1])
    applied = {round(1000 * (each.look_s + each.apply_s), 6) for each in timing.services}
    assert applied == {3, 4}


def test_where_the_reply_comes_first_the_same_is_found(tmp_path: Path) -> None:
    events = []
    for number in range(1, NUM_STEPS + 1):
        at_s = 5 + 0.1 * number
        events += [
            push(0, number, at_s + 0.051, at_s + 0.066, at_s + 0.061, number),
            step(0, number, at_s, 0.05, 0.0, 0.012),
        ]
    timing = read(tmp_path, events, discipline="reply-apply").timing
    expected = (LOOK_SHARE * 0.01, 0.005, (1 - LOOK_SHARE) * 0.01)
    assert all(service == pytest.approx(expected) for service in timing.services)
    assert all(found.down_s == pytest.approx(0.001) for found in timing.steps[0])


def test_of_rounds_what_merging_took_is_taken_off(tmp_path: Path) -> None:
    events = []
    for number in range(1, NUM_STEPS + 1):
        at_s = 5 + 0.1 * number
        applied_s = at_s + 0.06 + 0.01 * (1 + 2 * MERGE_SHARE)
        for worker in range(3):
            replied_s = applied_s + 0.002 * (worker + 1)
            received_s = at_s + 0.05 + 0.005 * worker
            events.append(push(worker, number, received_s, applied_s, replied_s, number))
            exchange_s = replied_s - at_s - 0.05 + 0.001
            events.append(step(worker, number, at_s, 0.05, 0.0, exchange_s))
    timing = read(tmp_path, events, workers=3, discipline="sync").timing
    for service in timing.services:
        assert service.look_s + service.apply_s == pytest.approx(0.01)
        assert service.reply_s == pytest.approx(0.002)


def test_what_was_computed_on_too_few_cores_would_take_less_on_its_own(tmp_path: Path) -> None:
    options = {"workers": 4, "servers": 1, "seed": 0, "discipline": "apply-reply"}
    write_run(tmp_path / "run", gradients=2000, step_s=0.01, **options)
    file = tmp_path / "run" / "config.json"
    described = json.loads(file.read_text())
    assert compute_s(read_recording(tmp_path / "run")) == pytest.approx(0.008, rel=0.01)
    described |= {"environment": {"cores": 2}, "job": {"engine": "local"}}
    file.write_text(json.dumps(described))
    shared = read_recording(tmp_path / "run")
    assert shared.timing.cores == 2
    assert 0.35 < compute_s(shared) / 0.008 < 0.7, "four computed on two of them, most of the time"
    described["job"]["engine"] = "cluster"
    file.write_text(json.dumps(described))
    assert read_recording(tmp_path / "run").timing.cores == math.inf
    described["job"]["engine"] = "local"
    described["resolved"] = {"devices": ["cuda:0"] * 4, "threads": 3}
    file.write_text(json.dumps(described))
    on_gpu = read_recording(tmp_path / "run").timing
    assert (on_gpu.cores, on_gpu.threads) == (math.inf, 3)


def compute_s(recording: Recording) -> float:
    found = [step.compute_s for steps in recording.timing.steps for step in steps]
    return sum(found) / len(found)


def without(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event["kind"] != kind]


def test_a_run_that_says_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"cannot read .*config\.json.*is that a run\?"):
        read_recording(tmp_path / "nowhere")
    cases: list[tuple[str, Sequence[Event], dict[str, Any], type[Exception], str]] = [
        ("short", one_worker()[:16], {}, RunDirError, "too short: of each worker it takes 10"),
        ("missing", one_worker(), {"workers": 2}, RunDirError, "no steps of 1 of its workers"),
        ("unserved", one_worker(), {"discipline": "allreduce"}, ConfigError, "has no servers"),
        ("overlap", one_worker(), {"overlap": True}, ConfigError, "without --overlap"),
        ("auto", one_worker(), {"local_steps": "4:auto"}, ConfigError, "without :auto"),
        ("no-push", without(one_worker(), "push"), {}, RunDirError, "how long its servers take"),
        ("odd", [{"kind": "step"}], {}, RunDirError, "has an event that"),
    ]
    for name, events, options, error, words in cases:
        folder = write(tmp_path / name, events, {"workers": 1, **options})
        with pytest.raises(error, match=words):
            read_recording(folder)


def test_of_a_long_run_the_first_steps_of_each_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "run", gradients=2000, workers=2, servers=1, seed=0)
    timing = read_recording(tmp_path / "run").timing
    assert [len(steps) for steps in timing.steps] == [pytest.approx(1000 - WARM_UP, abs=8)] * 2
