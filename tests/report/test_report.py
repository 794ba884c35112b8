"""Reports: figures of made-up runs whose truth is known, and what is written about them."""

import itertools
import json
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from offbeat.bench.report import write_run
from offbeat.cli import main
from offbeat.errors import RunDirError
from offbeat.report.document import Line, LinePlot, Table, short
from offbeat.report.groups import mean_curve, shortened, sort_runs
from offbeat.report.many_runs import describe_runs
from offbeat.report.one_run import describe_run, histogram
from offbeat.report.record import read_run
from offbeat.report.statistics import Sample, best_of, differ, two_sided
from offbeat.report.summary import summarise
from offbeat.report.svg import draw, log_ticks, ticks
from offbeat.report.write import write_report

SEEDS = 3


def write_grid(folder: Path, **more: Any) -> None:
    """Two disciplines, one and two workers, three seeds: lock-free is quicker, sync scores more."""
    for seed in range(SEEDS):
        for workers in (1, 2):
            for discipline, score, step_s in (("sync", 0.93, 0.02), ("lock-free", 0.90, 0.01)):
                write_run(
                    folder / f"{discipline}-{workers}w" / f"seed-{seed}",
                    discipline=discipline,
                    workers=workers,
                    seed=seed,
                    gradients=200,
                    score=score,
                    step_s=step_s,
                    **more,
                )


# -- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("t", "freedom", "probability"),
    [(12.706, 1, 0.05), (4.303, 2, 0.05), (2.776, 4, 0.05), (63.657, 1, 0.01), (1.96, 1e7, 0.05)],
)
def test_students_t_as_in_the_tables(t: float, freedom: float, probability: float) -> None:
    assert two_sided(t, freedom) == pytest.approx(probability, rel=2e-3)


def test_a_difference_is_named_only_where_the_spread_allows_it() -> None:
    low, high = Sample((0.70, 0.71, 0.72)), Sample((0.90, 0.91, 0.92))
    near = Sample((0.715, 0.72, 0.73))
    assert differ(low, high)
    assert not differ(low, near)
    assert not differ(Sample((0.7,)), Sample((0.9,))), "one run shows no spread"
    assert differ(Sample((1.0, 1.0, 1.0)), Sample((2.0, 2.0, 2.0)))
    assert not differ(Sample((1.0, 1.0)), Sample((2.0, 2.0))), "equal by chance, as steps are"
    assert not differ(Sample((1.0, 1.0)), Sample((1.0, 1.0)))
    # t = 6.1 with 4 degrees of freedom: enough for one comparison, not for one of thirty
    one, other = Sample((0.80, 0.81, 0.82)), Sample((0.85, 0.86, 0.87))
    assert differ(one, other)
    assert not differ(one, other, num_comparisons=30)


def test_the_best_and_who_cannot_be_told_from_it() -> None:
    samples = [Sample((0.70, 0.71, 0.72)), Sample((0.90, 0.91, 0.92)), Sample((0.905, 0.91, 0.925))]
    assert best_of(samples, most=True) == (2, [1])
    assert best_of(samples, most=False) == (0, [])


# -- reading ---------------------------------------------------------------------------------------


def test_a_curve_counts_training_alone(tmp_path: Path) -> None:
    """The evaluator of these runs scores everything after the end; that is not training's time."""
    write_run(tmp_path / "r", discipline="apply-reply", workers=1, gradients=100, step_s=0.1)
    record = read_run(tmp_path / "r")
    curve = record.curve()
    assert [gradients for _, gradients, _ in curve] == list(range(5, 101, 5))
    assert curve[-1][0] == pytest.approx(record.train_time_s, abs=0.05)
    assert curve[0][0] == pytest.approx(5 * 0.1, rel=0.2)
    assert all(a < b for (a, *_), (b, *_) in itertools.pairwise(curve))


def test_nothing_is_reached_after_the_end_of_training(tmp_path: Path) -> None:
    """The last gradients are applied after their replies; one push, and the time of its checkpoint,
    were not written down."""
    write_run(tmp_path / "r", discipline="lock-free", workers=2, gradients=100, step_s=0.1)
    pushes = tmp_path / "r" / "events" / "ps-0.jsonl"
    events = [json.loads(line) for line in pushes.read_text().splitlines()]
    late = [{**e, "applied_s": e["received_s"] + 0.3 * (e["version"] > 90)} for e in events]
    kept = [event for event in late if event["version"] != 95]
    pushes.write_text("".join(json.dumps(event) + "\n" for event in kept))
    record = read_run(tmp_path / "r")
    assert record.train_time_s == pytest.approx(kept[-1]["applied_s"] - record.first_s)
    assert max(time_s for time_s, *_ in record.curve()) <= record.train_time_s


def test_a_sync_update_has_as_many_gradients_as_workers(tmp_path: Path) -> None:
    write_run(tmp_path / "r", discipline="sync", workers=2, gradients=100)
    *_, (_, gradients, _) = read_run(tmp_path / "r").curve()
    assert gradients == 100


def test_a_last_score_that_is_no_number_is_not_passed_over(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, gradients=100, seed=ord(name))
    scores = tmp_path / "a" / "events" / "evaluator.jsonl"
    *lines, last = scores.read_text().splitlines(keepends=True)
    scores.write_text("".join(lines) + json.dumps({**json.loads(last), "metric": None}) + "\n")
    summary = summarise(tmp_path / "a")
    assert summary["test_accuracy"] is summary["test_metric"] is None
    assert summary["metric_is_nan"] and not summarise(tmp_path / "b")["metric_is_nan"]
    record = read_run(tmp_path / "a")
    assert len(record.curve()) == len(lines), "what can be drawn is"
    assert "test accuracy nan" in describe_run(record).lead
    runs = findings_of(tmp_path).runs
    assert [run.score is None for run in runs] == [True, False]
    *_, table = describe_runs(runs, None).sections[-1].tables
    assert [row[table.header.index("test accuracy")] == "nan" for row in table.rows] == [
        True,
        False,
    ]


def test_lines_that_are_no_events_are_counted_and_told(tmp_path: Path) -> None:
    write_run(tmp_path / "r", workers=1, gradients=50)
    events = tmp_path / "r" / "events" / "worker-0.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    lines[10:10] = ["\0\0\0\n", '{"kind": "step"}\n', "3\n"]
    events.write_text("".join(lines) + '{"kind": "st')
    record = read_run(tmp_path / "r")
    assert (record.gradients, record.unreadable) == (50, 3)
    assert "3 lines of the event files could not be read" in describe_run(record).lead


def test_what_a_role_wrote_after_its_restart_comes_after_what_it_wrote_before(
    tmp_path: Path,
) -> None:
    write_run(tmp_path / "r", workers=1, gradients=130)
    events = tmp_path / "r" / "events"
    before = summarise(tmp_path / "r")
    lines = (events / "worker-0.jsonl").read_text().splitlines(keepends=True)
    parts = ["", *(f".{n}" for n in range(1, 13))]  # .10 sorts before .2
    for number, part in enumerate(parts):
        (events / f"worker-0{part}.jsonl").write_text(
            "".join(lines[10 * number : 10 * number + 10])
        )
    assert summarise(tmp_path / "r") == before
    assert list(read_run(tmp_path / "r").workers[0].steps) == list(range(1, 131))


def test_a_run_that_was_resumed_and_goes_on_is_not_finished(tmp_path: Path) -> None:
    write_run(tmp_path / "r", gradients=20)
    end = json.loads((tmp_path / "r/events/engine.jsonl").read_text())
    start = {"kind": "run", "phase": "start", "at_s": end["at_s"] + 5}
    (tmp_path / "r/events/engine.1.jsonl").write_text(json.dumps(start) + "\n")
    assert read_run(tmp_path / "r").status == "unfinished"


def test_a_version_whose_push_was_lost_stands_at_its_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path / "r", workers=1, gradients=100, step_s=0.1)
    whole = read_run(tmp_path / "r").curve()
    pushes = tmp_path / "r/events/ps-0.jsonl"
    kept = [
        line for line in pushes.read_text().splitlines(True) if json.loads(line)["version"] != 50
    ]
    pushes.write_text("".join(kept))
    committed = {
        "kind": "run",
        "phase": "checkpoint",
        "version": 50,
        "at_s": 1 + whole[9][0] + 0.01,
    }
    (tmp_path / "r/events/master.jsonl").write_text(json.dumps(committed) + "\n")
    time_s, gradients, _ = read_run(tmp_path / "r").curve()[9]
    assert time_s == pytest.approx(whole[9][0], abs=0.02) and gradients == 49


def test_waiting_is_what_a_server_held_back(tmp_path: Path) -> None:
    write_run(tmp_path / "r", workers=1, gradients=10, step_s=1.0)
    pushes = tmp_path / "r" / "events" / "ps-0.jsonl"
    changed = []
    for line in pushes.read_text().splitlines():
        event = json.loads(line)
        changed.append(json.dumps({**event, "replied_s": event["received_s"] + 0.075}) + "\n")
    pushes.write_text("".join(changed))
    worker = read_run(tmp_path / "r").workers[0]
    assert worker.exchange_s[3] == pytest.approx(0.1)
    assert worker.waited_s(3) == pytest.approx(0.075)


def write_dropped(run: Path, rank: int, every: int) -> None:
    """Have each so many-th gradient of a worker be dropped."""
    path = run / "events" / f"worker-{rank}.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "step"]
    for step in steps[::every]:
        step["outcome"] = "dropped"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_whose_gradients_were_dropped_is_told(tmp_path: Path) -> None:
    """By how much of each worker's share: who is slow may have none that count."""
    for seed in (0, 1):
        shape: dict[str, Any] = {"workers": 2, "seed": seed, "gradients": 200}
        write_run(tmp_path / f"r{seed}", discipline="ringmaster:2", **shape)
        write_dropped(tmp_path / f"r{seed}", rank=1, every=4)
        write_run(tmp_path / f"a{seed}", discipline="apply-reply", **shape)
    records = [read_run(tmp_path / f"r{seed}") for seed in (0, 1)]
    counts = [[record.workers[rank].gradients for record in records] for rank in (0, 1)]
    dropped = [-(-count // 4) for count in counts[1]]
    (section,) = [s for s in describe_run(records[0]).sections if s.title == "What the workers did"]
    (table,) = section.tables
    column = table.header.index("dropped")
    shown = [row[column] for row in table.rows]
    assert shown == ["0", f"{dropped[0]} ({dropped[0] / counts[1][0]:.1%})"]
    (fates,) = [
        s
        for s in describe_runs(findings_of(tmp_path).runs, None).sections
        if s.title == "What became of the gradients"
    ]
    _, by_worker = fates.tables
    share = f"{sum(dropped)} ({sum(dropped) / sum(counts[1]):.1%})"
    assert [row[1:] for row in by_worker.rows] == [
        ("ringmaster:2", "worker 0", str(sum(counts[0])), "0"),
        ("ringmaster:2", "worker 1", str(sum(counts[1])), share),
    ]


def test_a_rate_is_that_of_the_time_in_which_all_were_at_work(tmp_path: Path) -> None:
    """Worker 1 does its half alone, after the others; 100 a second before, 10 from then on."""
    write_run(tmp_path / "r", workers=2, gradients=10)
    steps = [(0, 0.02 * i, 0.02) for i in range(100)] + [(1, 0.2 * i, 0.2) for i in range(50)]
    for rank in (0, 1):
        lines = [
            {
                "kind": "step",
                "worker": worker,
                "step": number,
                "loss": 1.0,
                "examples": 1,
                "outcome": "applied",
                "start_s": start_s,
                "compute_s": compute_s,
                "prepare_s": 0.0,
                "exchange_s": 0.0,
            }
            for number, (worker, start_s, compute_s) in enumerate(steps, start=1)
            if worker == rank
        ]
        path = tmp_path / "r" / "events" / f"worker-{rank}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = read_run(tmp_path / "r")
    assert record.full_rate() == pytest.approx((100 + 10) / 2)
    assert record.gradients / record.train_time_s == pytest.approx(150 / 10)


# -- many runs -------------------------------------------------------------------------------------


def findings_of(folder: Path, target: float | None = None) -> Any:
    runs = [shortened(read_run(p.parent)) for p in sorted(folder.rglob("config.json"))]
    return sort_runs(runs, target)


def test_runs_are_sorted_into_cells(tmp_path: Path) -> None:
    write_grid(tmp_path)
    grid = findings_of(tmp_path)
    assert [(dict(c.setting)["workers"], c.variant, len(c.runs)) for c in grid.groups] == [
        (1, "sync", 3),
        (1, "lock-free", 3),
        (2, "sync", 3),
        (2, "lock-free", 3),
    ]
    alone, _, both, _ = grid.groups
    assert alone.rate.mean == pytest.approx(1 / (0.02), rel=0.05)
    assert grid.speed_up(both).mean == pytest.approx(2, rel=0.05)
    assert grid.speed_up(alone).values == (1, 1, 1)


def test_what_else_differs_is_a_setting_and_what_follows_is_not(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        for workers, threads in ((1, 2), (2, 1)):
            name = tmp_path / f"{lr}-{workers}"
            write_run(
                name, gradients=20, lr=lr, workers=workers, threads=threads, run_dir=str(name)
            )
    names = [[name for name, _ in setting] for setting in findings_of(tmp_path).settings]
    assert names == [["workers", "servers", "lr"]] * 4
    write_run(tmp_path / "more", gradients=20, lr=0.1, workers=2, threads=2)
    assert "threads" in dict(findings_of(tmp_path).settings[0])


def test_a_mean_curve_stands_at_the_same_numbers_of_gradients() -> None:
    one = ((1.0, 10, 0.5), (2.0, 20, 0.7))
    other = ((3.0, 10, 0.6), (5.0, 20, 0.9))
    first, last = mean_curve([one, other])
    assert (first.gradients, first.time_s, first.score) == (10, 2.0, pytest.approx(0.55))
    assert (last.gradients, last.time_s, last.band) == (20, 3.5, (0.7, 0.9))
    missed = ((0.5, 5, 0.4), (1.0, 15, 0.6))  # scored at other moments
    assert [mean.gradients for mean in mean_curve([one, missed])] == [10, 15]
    assert mean_curve([one, missed])[0].score == pytest.approx((0.5 + 0.5) / 2)
    many = tuple((float(n), n, 0.5) for n in range(1000))
    places = [mean.gradients for mean in mean_curve([many])]
    assert len(places) <= 30 and places[0] == 0 and places[-1] == 999


def test_winners_are_named_and_ties_are_not(tmp_path: Path) -> None:
    write_grid(tmp_path)
    write_report([tmp_path])
    text = (tmp_path / "report.md").read_text()
    rows = re.findall(r"^\| (\d workers?, 1 server) \|(.*)\|$", text, re.MULTILINE)
    for _, cells in rows[:2]:
        accuracy, _, _, rate = (cell.strip() for cell in cells.split("|"))
        assert accuracy.startswith("sync: 0.9")
        assert rate.startswith("lock-free: ")
    folder = tmp_path / "same"
    for seed in range(SEEDS):
        for discipline in ("sync", "lock-free"):
            name = folder / f"{discipline}-{seed}"
            write_run(name, discipline=discipline, seed=seed, gradients=100)
    write_report([folder])
    assert "no difference seen, n=3" in (folder / "report.md").read_text()


def test_the_target_is_the_highest_whole_percent_that_all_reached(tmp_path: Path) -> None:
    write_grid(tmp_path)
    grid = findings_of(tmp_path)
    tops = [max(score for *_, score in run.curve) for run in grid.runs]
    assert grid.goal.target == math.floor(min(tops) * 100) / 100
    strict = findings_of(tmp_path, 0.92)
    sync, lock_free, *_ = strict.groups
    assert sync.time_to_target is not None and sync.num_reached == 3
    assert lock_free.time_to_target is None and lock_free.num_reached == 0
    run = sync.runs[0]
    time_s, gradients = strict.goal.reached(run)
    before = [score for _, n, score in run.curve if n < gradients]
    assert all(score < 0.92 for score in before)
    assert (time_s, gradients) in [(t, n) for t, n, _ in run.curve]


def test_copies_of_a_run_are_no_further_evidence(tmp_path: Path) -> None:
    for copy in range(3):
        for discipline, score in (("sync", 0.9), ("lock-free", 0.8)):
            write_run(
                tmp_path / f"{discipline}-{copy}", discipline=discipline, gradients=50, score=score
            )
    cell = findings_of(tmp_path).groups[0]
    assert (len(cell.runs), cell.num_seeds, cell.score.n) == (3, 1, 1)
    write_report([tmp_path])
    assert "no difference seen, n=1" in (tmp_path / "report.md").read_text()


def test_one_worker_that_is_held_up_is_no_measure(tmp_path: Path) -> None:
    write_run(tmp_path / "a", workers=1, gradients=50, slow_worker="0:3x")
    write_run(tmp_path / "b", workers=2, gradients=50, slow_worker="0:3x")
    assert all(
        findings_of(tmp_path).speed_up(cell) is None for cell in findings_of(tmp_path).groups
    )
    write_run(tmp_path / "c", workers=1, gradients=50)
    write_run(tmp_path / "d", workers=2, gradients=50)
    grid = findings_of(tmp_path)
    found = [cell for cell in grid.groups if grid.speed_up(cell) is not None]
    assert len(found) == 4, "the slowed down too, beside the one that is not"
    write_report([tmp_path])


def test_options_of_sync_alone_make_no_settings(tmp_path: Path) -> None:
    write_run(tmp_path / "a", discipline="sync", rule="sum", gradients=20)
    write_run(tmp_path / "b", discipline="bounded", gradients=20)
    grid = findings_of(tmp_path)
    assert len(grid.settings) == 1 and grid.variants == ["sync, sum", "bounded:1"]


def test_runs_of_different_metrics_are_reported_apart(tmp_path: Path) -> None:
    for name in ("accuracy", "bits"):
        write_run(tmp_path / name, gradients=20)
        change_metric(tmp_path / name, name)
    with pytest.raises(RunDirError, match="judged by accuracy and by bits"):
        write_report([tmp_path])


def add_scores(run: Path, ways: dict[str, bool | None], **functions: Any) -> None:
    """Other metrics beside the accuracy, as functions of it."""
    described = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**described, "metrics": ways}))
    scores = run / "events" / "evaluator.jsonl"
    events = [json.loads(line) for line in scores.read_text().splitlines()]
    for event in events:
        found = {name: function(event["metric"]) for name, function in functions.items()}
        event["scores"] = {"accuracy": event["metric"], **found}
    scores.write_text("".join(json.dumps(event) + "\n" for event in events))


WAYS = {"accuracy": True, "missed": False, "loss": False}


def write_scored_grid(folder: Path, ways: dict[str, bool | None] = WAYS) -> None:
    write_grid(folder)
    for config in folder.rglob("config.json"):
        add_scores(config.parent, ways, missed=lambda a: 1 - a, loss=lambda a: 2 - 2 * a)


def test_other_scores_have_curves_and_the_test_loss_a_column(tmp_path: Path) -> None:
    write_scored_grid(tmp_path)
    page, text = (path.read_text() for path in write_report([tmp_path]))
    for title in ("Test accuracy over time", "Test loss", "Test missed"):
        assert f"## {title}\n" in text and title in page
    header = next(line for line in text.splitlines() if "test accuracy (± sd)" in line)
    assert "test loss (± sd)" in header and "missed" not in header
    findings = findings_of(tmp_path)
    assert findings.other_metrics == ["missed", "loss"]
    run = findings.runs[0]
    assert run.score_by("missed") == pytest.approx(1 - run.score)
    assert "best test accuracy" in text


def test_a_target_by_name_has_the_runs_judged_by_that_metric(tmp_path: Path) -> None:
    write_scored_grid(tmp_path)
    assert main(["report", str(tmp_path), "--target", "missed=0.08"]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "best test missed" in text and "soonest at 0.08" in text and "Training" not in text
    goal = findings_of(tmp_path, ("missed", 0.08)).goal
    assert (goal.metric, goal.most, goal.target) == ("missed", False, 0.08)
    by_missed, by_accuracy = (findings_of(tmp_path, t) for t in (("missed", 0.08), 0.92))
    assert [g.time_to_target for g in by_missed.groups] == [
        g.time_to_target for g in by_accuracy.groups
    ]
    with pytest.raises(RunDirError, match="no run was scored by 'mised'; did you mean 'missed'"):
        write_report([tmp_path], target=("mised", 0.08))


def test_a_direction_that_nobody_told_is_guessed_with_a_word_about_it(tmp_path: Path) -> None:
    write_scored_grid(tmp_path, {**WAYS, "missed": None})
    goal = findings_of(tmp_path, ("missed", 0.08)).goal
    assert goal.is_guess and not goal.most
    write_report([tmp_path], target=("missed", 0.08))
    assert "Training lowers missed" in (tmp_path / "report.md").read_text()


def test_a_direction_that_was_told_beats_what_training_does(tmp_path: Path) -> None:
    write_scored_grid(tmp_path, {**WAYS, "missed": True})
    goal = findings_of(tmp_path, ("missed", 0.5)).goal
    assert goal.most and not goal.is_guess


def test_the_report_of_a_run_says_when_it_was_good_enough(tmp_path: Path) -> None:
    write_run(tmp_path / "r", gradients=100)
    add_scores(tmp_path / "r", WAYS, loss=lambda a: 2 - 2 * a)
    curve = read_run(tmp_path / "r").curve("loss")
    first = next(at_s for at_s, _, value in curve if value <= 1.0)
    write_report([tmp_path / "r"], target=("loss", 1.0))
    text = (tmp_path / "r" / "report.md").read_text()
    assert f"| s of training to loss 1 | {short(first)} |" in text, "the lower the better"
    write_report([tmp_path / "r"], target=2.0)
    assert "s of training to accuracy 2 | not reached" in (tmp_path / "r/report.md").read_text()
    with pytest.raises(RunDirError, match="no run was scored by 'los'; did you mean 'loss'"):
        write_report([tmp_path / "r"], target=("los", 1.0))


def test_the_report_of_a_run_has_all_of_its_scores(tmp_path: Path) -> None:
    write_run(tmp_path / "r", gradients=100)
    add_scores(tmp_path / "r", WAYS, loss=lambda a: None if a > 0.8 else 2 - 2 * a)
    document = describe_run(read_run(tmp_path / "r"))
    assert "test accuracy 0.8" in document.lead and "test loss nan" in document.lead
    titles = [plot.title for section in document.sections for plot in section.plots]
    assert {"test accuracy over time", "test loss over time", "test loss over gradients"} <= {
        *titles
    }
    record = read_run(tmp_path / "r")
    assert 0 < len(record.curve("loss")) < len(record.curve())
    summary = summarise(tmp_path / "r")
    assert summary["test_loss"] is None and summary["test_scores"]["loss"] is None
    write_report([tmp_path / "r"])


def test_a_run_from_before_there_were_several_has_its_report(tmp_path: Path) -> None:
    write_run(tmp_path / "r", gradients=100)
    summary = summarise(tmp_path / "r")
    assert summary["test_scores"] == {"accuracy": summary["test_accuracy"]}
    assert summary["test_loss"] is None and summary["higher_is_better"] == {}
    write_report([tmp_path / "r"])


def test_which_way_a_metric_is_better_may_be_unknown(tmp_path: Path) -> None:
    for seed in range(SEEDS):
        for discipline in ("sync", "lock-free"):
            name = tmp_path / f"{discipline}-{seed}"
            write_run(name, discipline=discipline, seed=seed, gradients=20)
            change_metric(name, "bits")
            scores = name / "events" / "evaluator.jsonl"
            scores.write_text(scores.read_text().splitlines(keepends=True)[-1])
    write_report([tmp_path], target=0.5)
    text = (tmp_path / "report.md").read_text()
    assert "cannot be told" in text and "best test" not in text and "soonest" not in text


def test_a_lower_loss_is_better_without_a_look_at_the_curves(tmp_path: Path) -> None:
    for seed in range(SEEDS):
        for discipline, score in (("sync", 0.5), ("lock-free", 0.9)):
            name = tmp_path / f"{discipline}-{seed}"
            write_run(name, discipline=discipline, seed=seed, gradients=20, score=score)
            change_metric(name, "loss")
    write_report([tmp_path])
    text = (tmp_path / "report.md").read_text()
    assert re.search(r"best test loss.*\n.*\n\| 2 workers, 1 server \| sync: ", text)
    assert "Training" not in text, "what it does to the loss is no reason"


def test_a_run_that_does_not_know_its_metric_changes_no_others(tmp_path: Path) -> None:
    """One that could not begin, beside one that broke off."""
    for name in ("a", "b"):
        write_run(tmp_path / name, gradients=20)
        (tmp_path / name / "events" / "engine.jsonl").unlink()
    change_metric(tmp_path / "a", "metric")
    for events in (tmp_path / "a" / "events").iterdir():
        events.unlink()
    write_report([tmp_path])
    assert "test accuracy" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("score", [0.0, 0.02, 0.62, 0.99, 1.0])
def test_a_single_score_has_an_axis_within_what_it_can_be(tmp_path: Path, score: float) -> None:
    write_run(tmp_path / "r", gradients=40)
    scores = tmp_path / "r" / "events" / "evaluator.jsonl"
    last = scores.read_text().splitlines()[-1]
    scores.write_text(json.dumps({**json.loads(last), "metric": score}) + "\n")
    plot = next(p for s in describe_run(read_run(tmp_path / "r")).sections for p in s.plots)
    numbers = re.findall(r'class="end">([\d.-]+)<', draw(plot))
    assert len(numbers) >= 3 and all(0 <= float(number) <= 1 for number in numbers)


@pytest.mark.parametrize("score", [0.1, 0.99, 1e-14])
def test_runs_that_all_score_the_same_can_be_drawn(tmp_path: Path, score: float) -> None:
    for seed in range(SEEDS):
        write_run(tmp_path / str(seed), seed=seed, gradients=40)
        scores = tmp_path / str(seed) / "events" / "evaluator.jsonl"
        events = [{**json.loads(line), "metric": score} for line in scores.read_text().splitlines()]
        scores.write_text("".join(json.dumps(event) + "\n" for event in events))
    write_report([tmp_path])
    write_report([tmp_path / "0"])


def change_metric(run: Path, metric: str) -> None:
    described = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**described, "metric": metric}))


def test_a_metric_that_training_lowers_is_best_where_it_is_lowest(tmp_path: Path) -> None:
    for seed in range(SEEDS):
        for discipline, score in (("sync", -3.0), ("lock-free", -2.0)):
            name = tmp_path / f"{discipline}-{seed}"
            write_run(name, discipline=discipline, seed=seed, gradients=100, score=score)
            change_metric(name, "bits")
    write_report([tmp_path])
    text = (tmp_path / "report.md").read_text()
    assert "Training lowers bits" in text
    assert re.search(r"\| 2 workers, 1 server \| sync: -", text)
    assert "soonest" not in text, "there is no target unless one is given"


def test_runs_that_did_not_finish_are_listed_and_not_counted(tmp_path: Path) -> None:
    write_grid(tmp_path)
    write_run(tmp_path / "failed", discipline="sync", gradients=5, score=0.1, status="failed")
    engine = tmp_path / "failed" / "events" / "engine.jsonl"
    end = json.loads(engine.read_text())
    engine.write_text(json.dumps({**end, "reason": "the loss became nan"}) + "\n")
    grid = findings_of(tmp_path)
    assert sum(len(cell.runs) for cell in grid.groups) == 12
    document = describe_runs(grid.runs, None)
    assert "1 did not finish" in document.lead
    last = document.sections[-1].tables[0]
    assert any("failed: the loss became nan" in row for row in last.rows)


def test_only_failed_runs_make_a_report_too(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / str(seed), seed=seed, gradients=5, status="failed")
    page, _ = write_report([tmp_path])
    assert "2 did not finish" in page.read_text()


# -- what is written -------------------------------------------------------------------------------


@pytest.mark.parametrize("single", [False, True])
def test_a_report_is_a_pure_function_of_the_events(tmp_path: Path, single: bool) -> None:
    write_grid(tmp_path)
    what = tmp_path / "sync-2w" / "seed-0" if single else tmp_path
    before = [path.read_bytes() for path in write_report([what])]
    (what / "summary.json").write_text("{}")
    assert [path.read_bytes() for path in write_report([what])] == before


@pytest.mark.parametrize("single", [False, True])
def test_the_page_needs_nothing_else_and_every_number_is_in_a_table(
    tmp_path: Path, single: bool
) -> None:
    write_grid(tmp_path, slow={1: 3.0})
    what = tmp_path / "lock-free-2w" / "seed-0" if single else tmp_path
    page, text = (path.read_text() for path in write_report([what]))
    assert not re.search(r"https?:|src=|<script|@import|url\(", page.replace("xmlns", ""))
    drawn = re.findall(r"<svg viewBox.*?</svg>", page, re.DOTALL)
    for svg in drawn:
        ElementTree.fromstring(svg)
        assert "nan" not in svg and "inf" not in svg
    record = describe_run(read_run(what)) if single else None
    if record is not None:
        plots = [plot for section in record.sections for plot in section.plots]
        assert len([svg for svg in drawn if "role=" in svg]) == len(plots) == 8
    for title in re.findall(r"<title>.*?: ([\d.]+) \(.*? at ", page):
        assert title in text, "what the mouse shows stands in the tables"


def test_a_plots_table_has_every_point() -> None:
    lines = (
        Line("a", 0, ((1, 0.5), (2, 0.75)), ((0.25, 0.6), (0.7, 0.8))),
        Line("b", 1, ((1, 0.1), (2, 0.2))),
    )
    plot = LinePlot("t", "x", "y", lines, ((1.5, "worker 1 started again"),))
    assert plot.table() == Table(
        ("x", "a", "b"),
        (
            ("1", "0.5 (0.25 to 0.6)", "0.1"),
            ("2", "0.75 (0.7 to 0.8)", "0.2"),
            ("1.5", "worker 1 started again", ""),
        ),
        "t: y",
    )
    apart = LinePlot("t", "x", "y", tuple(Line(n, 0, ((i, 1.0),)) for i, n in enumerate("abc")))
    assert apart.table().rows == (("a", "0", "1"), ("b", "1", "1"), ("c", "2", "1"))


def test_what_is_far_out_shares_the_last_bin_of_a_histogram() -> None:
    near = Counter({0: 10, 1: 500, 2: 480, 3: 5})
    plot = histogram("t", {0: near, 1: Counter({1: 4, 300: 1})})
    assert plot.bins == ("0", "1", "2", "3", "4", "5", "6", "7", "8+")
    assert plot.shares[1] == (0.5, 0.004) and plot.shares[-1] == (0, 0.001)
    assert sum(share for row in plot.shares for share in row) == pytest.approx(1)
    assert histogram("t", {0: Counter({0: 7})}).bins == ("0",)
    wide = histogram("t", {0: Counter(range(200))})
    assert len(wide.bins) <= 24 and wide.bins[0] == "0-8" and "+" not in wide.bins[-1]


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    write_run(
        tmp_path / "<b>x|b", recipe="a<script>alert(1)</script>", gradients=20, status="failed"
    )
    write_run(tmp_path / "y", recipe="other", gradients=20)
    page, text = (path.read_text() for path in write_report([tmp_path]))
    assert "<script>" not in page and "<b>x" not in page
    assert r"\|b" in text and "<b>" not in text and "<script>" not in text


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.81, 0.93, [0.8, 0.825, 0.85, 0.875, 0.9, 0.925, 0.95]),
        (0, 0, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round_numbers_around_the_values(
    low: float, high: float, expected: list[float]
) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1, 10, [1, 2, 5, 10]),
        (4, 1024, [3, 10, 30, 100, 300, 1000, 3000]),
        (0.3, 40_000, [0.1, 1, 10, 100, 1000, 10_000, 100_000]),
        (7, 7, [5, 10]),
        (1e-6, 1e9, [1e-6, 1e-3, 1, 1e3, 1e6, 1e9]),
    ],
)
def test_ticks_by_the_logarithm_are_round_numbers_too(
    low: float, high: float, expected: list[float]
) -> None:
    assert log_ticks(low, high, most=7) == pytest.approx(expected)


def test_a_line_by_the_logarithm_is_straight_where_it_multiplies() -> None:
    points = tuple((float(x), 5.0 * x) for x in (1, 10, 100))
    plot = LinePlot("t", "workers", "rate", (Line("ideal", 0, points),), log_x=True, log_y=True)
    places = [
        (float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', draw(plot))
    ]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and x1 > x0
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2) and y1 < y0


def describe_setup(run: Path, cores: int = 2) -> None:
    described = json.loads((run / "config.json").read_text())
    described["resolved"] = {
        "optimizer": "SGD(lr=0.1, momentum=0.5)",
        "lr": 0.1,
        "schedule": "cosine(warmup=100)",
        "steps": None,
        "devices": ["cpu", "cuda:0"],
    }
    described["environment"] = {
        "cpu": "Fast <CPU>",
        "cores": cores,
        "gpus": ["H200"],
        "torch": "2.13.0",
        "command": ["/usr/lib/offbeat/__main__.py", "train", "--recipe", "my file.py:recipe"],
    }
    (run / "config.json").write_text(json.dumps(described))


def test_a_report_says_how_a_run_was_set_up(tmp_path: Path) -> None:
    write_run(tmp_path / "r", gradients=20)
    _, text = write_report([tmp_path / "r"])
    assert "How it was run" not in text.read_text(), "an older one does not say"
    describe_setup(tmp_path / "r")
    page, text = write_report([tmp_path / "r"])
    for line in (
        "| optimizer | SGD(lr=0.1, momentum=0.5) |",
        "| learning rate | 0.1 |",
        "| schedule | cosine(warmup=100) |",
        "| devices | cpu, cuda:0 |",
        "| machine | Fast &lt;CPU&gt;, 2 cores, H200 |",
        "| command | offbeat train --recipe 'my file.py:recipe' |",
    ):
        assert line in text.read_text()
    assert "| steps |" not in text.read_text() and "| --lr |" not in text.read_text()
    assert "Fast &lt;CPU&gt;, 2 cores" in page.read_text()


def test_a_report_of_many_says_in_what_their_setups_differ(tmp_path: Path) -> None:
    for seed in range(4):
        write_run(tmp_path / str(seed), gradients=20, seed=seed)
        describe_setup(tmp_path / str(seed), cores=2 + 2 * (seed > 1))
    text = write_report([tmp_path])[1].read_text()
    assert text.count("How they were run") == text.count("| optimizer | SGD(lr=0.1") == 1
    assert "| machine | Fast &lt;CPU&gt;, 2 cores, H200; Fast &lt;CPU&gt;, 4 cores, H200 |" in text
    for seed in range(4):
        describe_setup(tmp_path / str(seed), cores=1 + seed)
    assert "| machine | 4 different ones |" in write_report([tmp_path])[1].read_text()


def test_numbers_as_people_write_them() -> None:
    given = [0.89312, 12.3456, 1234.5, 43210.9, 9.6e30, 0, 2.0, 0.00001234, math.nan, None]
    assert [short(value) for value in given] == [
        "0.8931",
        "12.35",
        "1234",
        "43,211",
        "9.6e+30",
        "0",
        "2",
        "1.2e-05",
        "-",
        "-",
    ]


# -- the command -----------------------------------------------------------------------------------


def test_the_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_grid(tmp_path / "grid")
    assert main(["report", str(tmp_path / "grid"), "--target", "0.8"]) == 0
    page, text = (tmp_path / "grid" / name for name in ("report.html", "report.md"))
    assert capsys.readouterr().out == f"wrote {page}\nwrote {text}\n"
    assert "soonest at 80%" in text.read_text()
    out = tmp_path / "elsewhere" / "deep"
    runs = [str(tmp_path / "grid" / f"sync-{n}w" / "seed-0") for n in (1, 2)]
    assert main(["report", *runs, "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "report.md"]
    assert "2 runs" in (out / "report.md").read_text()


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    broken = tmp_path / "broken"
    (broken / "events").mkdir(parents=True)
    (broken / "config.json").write_text("[]")
    for name, words in (
        ("empty", "there is no run in"),
        ("file", "is no folder"),
        ("missing", "is no folder"),
        ("broken", "does not describe a run"),
    ):
        assert main(["report", str(tmp_path / name)]) == 2
        assert words in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--target", "much"]) == 2
    assert "'much' is no number" in capsys.readouterr().err
    write_run(tmp_path / "run", gradients=10)
    with pytest.raises(RunDirError, match="cannot write the report"):
        write_report([tmp_path / "run"], tmp_path / "file")


def test_runs_behind_links_are_found_once(tmp_path: Path) -> None:
    write_run(tmp_path / "real", gradients=20)
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "one").symlink_to(tmp_path / "real")
    (tmp_path / "all" / "again").symlink_to(tmp_path / "all")
    page, _ = write_report([tmp_path / "all"])
    assert "made-up: apply-reply" in page.read_text()


def test_nobody_who_reads_what_was_written_is_no_error(tmp_path: Path) -> None:
    write_run(tmp_path / "run", gradients=10)
    command = f"{sys.executable} -m offbeat report {tmp_path / 'run'} > /dev/full"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    write_run(tmp_path / "run", gradients=10)
    program = (
        "import sys\n"
        "from offbeat.cli import main\n"
        "code = main(['report', sys.argv[1]])\n"
        "sys.exit('imported torch' if 'torch' in sys.modules else code)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
