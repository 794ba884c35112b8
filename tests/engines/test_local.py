"""The engine `local`: real processes, and what becomes of a run when some of them die."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers import DROPPING, IN_AN_UPDATE, num_dealt_with
from processes import LocalRun, leftovers, wait_until_gone

import offbeat
from offbeat.cli import main
from offbeat.config import DISCIPLINES
from offbeat.run.checkpoint import list_checkpoints, newest_checkpoint

Start = Callable[..., LocalRun]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts runs, and ends what a failing test leaves of them."""
    runs: list[LocalRun] = []

    def start(*flags: str, **options: str) -> LocalRun:
        runs.append(LocalRun(tmp_path, *flags, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
        for pid in run.pids():
            os.kill(pid, signal.SIGKILL)


def assert_every_gradient_counted_once(run: LocalRun, workers: int, steps: int) -> None:
    """No push was applied twice, and each worker's last one is in."""
    seen = set()
    for push in run.events("push"):
        if push["outcome"] == "applied":
            key = (push["shard"], push["worker"], push["sequence"])
            assert key not in seen, f"{key} was applied twice"
            seen.add(key)
    applied = newest_checkpoint(run.run_dir / "checkpoints").applied()
    assert {worker: sequence for worker, (_, sequence) in applied.items()} == dict.fromkeys(
        range(workers), steps
    )


# -- a quiet run -----------------------------------------------------------------------------------


def test_a_run_is_as_many_processes_as_roles_and_ends_by_itself(start: Start) -> None:
    run = start("--workers", "2", "--servers", "2", "--steps", "2000", "--eval-every", "400")
    run.wait_for_steps(10)  # of which the launcher hears before it starts the evaluator
    run.wait_until(
        lambda: len(run.pids()) >= 5, "two servers, the master, a worker, the evaluator were there"
    )
    assert len(run.pids()) == 5
    for role in ("ps --index 0", "ps --index 1", "master", "worker --index 1", "evaluator"):
        assert len(run.pids(role)) == 1, role
    assert run.wait() == 0, run.text()
    assert leftovers(run.run_dir) == []
    assert not (run.run_dir / "cluster.json").exists()
    summary = run.summary()
    assert (summary["status"], summary["engine"], summary["lost_updates"]) == (
        "finished",
        "local",
        0,
    )
    assert summary["gradients"] == summary["updates"] == 4000
    assert summary["test_accuracy"] > 0.9
    assert 0.5 < summary["staleness"]["mean"] < 1.5
    assert_every_gradient_counted_once(run, 2, 2000)
    scores = [event["version"] for event in run.events("score")]
    assert scores[-1] == 4000 and len(set(scores)) == len(scores), "each is scored once"
    last_lines = run.text().splitlines()[-3:]
    assert [line.partition(":")[0] for line in last_lines] == [
        "Test-Accuracy",
        "Total Time",
        "Final Cost",
    ]


@pytest.mark.slow
def test_sync_in_processes_gives_the_bits_of_threads(start: Start) -> None:
    flags = ("--discipline", "sync", "--workers", "3", "--servers", "2", "--epochs", "2")
    run = start(*flags, recipe="momentum")
    other = start(*flags, "--engine", "inproc", recipe="momentum", run="r2")
    assert (run.wait(), other.wait()) == (0, 0)
    assert_same(offbeat.load(run.run_dir), offbeat.load(other.run_dir))


def assert_same(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert state.keys() == other.keys()
    for name, value in state.items():
        assert torch.equal(value, other[name]), name


# -- stopping and going on -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "servers"),
    [
        (signal.SIGTERM, "1"),
        (signal.SIGTERM, "2"),
        (signal.SIGINT, "2"),
    ],
)
def test_a_sync_run_that_was_stopped_and_resumed_equals_one_that_was_not(
    start: Start, number: signal.Signals, servers: str
) -> None:
    """With batch norm, dropout, augmentation, Adam and a moving average, to the bit."""
    flags = ("--discipline", "sync", "--servers", servers, "--steps", "400", "--eval-every", "150")
    run = start(*flags, recipe="dropout")
    run.wait_for_steps(100)
    began = time.monotonic()
    run.process.send_signal(number)
    assert run.wait() == 130, run.text()
    assert time.monotonic() - began < 10, "5 s where nobody else wants the cores"
    assert leftovers(run.run_dir) == []
    assert run.summary()["status"] == "interrupted"
    version = newest_checkpoint(run.run_dir / "checkpoints").version
    assert 100 <= version < 400
    assert "offbeat train --resume" in run.text()

    whole = start(*flags, recipe="dropout", run="whole")
    resumed = start("--resume", str(run.run_dir))
    assert (whole.wait(), resumed.wait()) == (0, 0), resumed.text()
    assert_same(offbeat.load(run.run_dir), offbeat.load(whole.run_dir))
    assert_same(offbeat.load(run.run_dir, ema=True), offbeat.load(whole.run_dir, ema=True))
    assert run.summary()["test_accuracy"] == whole.summary()["test_accuracy"]
    assert run.summary()["updates"] == 400


@pytest.mark.slow
@pytest.mark.parametrize("change", [("--servers", "3"), ("--workers", "3")])
def test_a_run_goes_on_with_other_numbers_of_servers_and_workers(
    start: Start, change: tuple[str, str]
) -> None:
    run = start("--steps", "100000", "--workers", "2", "--servers", "2", recipe="momentum")
    run.wait_for_steps(300)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 130
    before = newest_checkpoint(run.run_dir / "checkpoints")
    resumed = start("--resume", str(run.run_dir), *change, "--epochs", "400")
    assert resumed.wait() == 0, resumed.text()
    after = newest_checkpoint(run.run_dir / "checkpoints")
    flag, count = change
    assert len(after.shards) == (int(count) if flag == "--servers" else 2)
    workers = int(count) if flag == "--workers" else 2
    # 240 examples in batches of 10, 400 times: 9600 gradients in all, of which some were done
    assert set(after.applied()) == set(range(workers))
    assert {s for _, s in after.applied().values()} == {400 * 24 // workers}
    assert after.version > before.version
    assert resumed.summary()["test_accuracy"] > 0.9


@pytest.mark.slow
def test_resuming_what_is_no_run_or_is_under_way_is_one_line(start: Start, tmp_path: Path) -> None:
    run = start("--steps", "100000")
    run.wait_for_steps(5)
    for folder, message in ((str(run.run_dir), "is in use"), (str(tmp_path / "no"), "is that a")):
        done = subprocess.run(
            [sys.executable, "-m", "offbeat", "train", "--resume", folder],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2
        assert message in done.stderr and len(done.stderr.splitlines()) == 1
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130


@pytest.mark.slow
def test_when_the_launcher_is_killed_everybody_leaves_and_a_checkpoint_is_kept(
    start: Start,
) -> None:
    run = start("--steps", "20000", "--servers", "2")
    run.wait_for_steps(100)
    run.process.kill()
    run.process.wait()
    wait_until_gone(run.run_dir)
    run.close()
    kept = newest_checkpoint(run.run_dir / "checkpoints")
    assert min(sequence for _, sequence in kept.applied().values()) >= 100, "the master kept it"


@pytest.mark.slow
def test_two_runs_at_once_do_not_disturb_each_other(start: Start) -> None:
    runs = [start("--steps", "1500", "--seed", str(k), run=f"r{k}") for k in range(2)]
    assert [run.wait() for run in runs] == [0, 0]
    for run in runs:
        assert leftovers(run.run_dir) == []
        assert run.summary()["gradients"] == 3000
        assert_every_gradient_counted_once(run, 2, 1500)


# -- deaths ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("discipline", ["sync", "lock-free"])
def test_a_killed_worker_is_replaced_and_nothing_is_applied_twice(
    start: Start, discipline: str
) -> None:
    run = start("--steps", "4000", "--workers", "3", "--discipline", discipline)
    run.wait_for_steps(100, 0, 1, 2)
    before = run.num_steps(0)
    run.kill("worker --index 1")
    run.wait_until(lambda: run.num_steps(0) > before + 200, "the others had gone on")
    assert run.wait() == 0, run.text()
    assert "worker 1 was killed by SIGKILL: starting it again (1 of 3)" in run.text()
    assert "process" in run.text(), "its last words are shown"
    assert {push["incarnation"] for push in run.events("push") if push["worker"] == 1} == {0, 1}
    assert_every_gradient_counted_once(run, 3, 4000)
    assert run.summary()["restarts"] == 1
    assert run.summary()["lost_updates"] == 0


@pytest.mark.slow
def test_a_killed_master_is_replaced_and_the_books_are_kept(start: Start) -> None:
    run = start("--steps", "4000", "--eval-every", "500", "--servers", "2")
    run.wait_for_steps(200)
    run.kill("master")
    assert run.wait() == 0, run.text()
    assert "the master was killed by SIGKILL" in run.text()
    assert_every_gradient_counted_once(run, 2, 4000)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["worker --index 1", "master", "ps --index 1"])
def test_rounds_that_wait_for_their_norm_outlive_whoever_is_killed(start: Start, role: str) -> None:
    flags = ("--discipline", "sync", "--servers", "3", "--workers", "3", "--clip-norm", "0.1")
    run = start(*flags, "--steps", "1000", "--checkpoint-every", "100", "--eval-every", "0")
    for steps in (200, 500):
        run.wait_for_steps(steps, 0)
        run.kill(role)
    assert run.wait() == 0, run.text()
    applied_s = sorted(push["applied_s"] for push in run.events("push") if push["applied_s"])
    assert all(b - a < 15 for a, b in itertools.pairwise(applied_s)), "nobody was out of patience"
    assert all("norm" in push for push in run.events("push") if push["outcome"] == "applied")
    assert [row["gradients"] for row in run.summary()["kept"]] == [3000] * 3


@pytest.mark.slow
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_a_killed_server_gets_its_shard_back_and_the_loss_is_reported(
    start: Start, discipline: str
) -> None:
    flags = ("--discipline", discipline, "--servers", "2", "--steps", "4000")
    run = start(*flags, "--checkpoint-every", "300", "--eval-every", "0")
    run.wait_until(
        lambda: len(list_checkpoints(run.run_dir / "checkpoints")) >= 3, "checkpoints were made"
    )
    run.kill("ps --index 1")
    assert run.wait() == 0, run.text()
    assert "server 1 was killed by SIGKILL: starting it again" in run.text()
    rejoins = run.events("rejoin")
    assert {event["worker"] for event in rejoins} == {0, 1}
    assert {(event["shard"], event["epoch"]) for event in rejoins} == {(1, 1)}
    final = newest_checkpoint(run.run_dir / "checkpoints")
    planned = 4000 if discipline == "sync" else 8000
    lost = run.summary()["lost_updates"]
    if discipline in IN_AN_UPDATE or discipline in DROPPING:
        kept = run.summary()["kept"]
        assert lost == sum(row["lost"] for row in kept)
        assert [num_dealt_with(row, discipline) + row["lost"] for row in kept] == [8000, 8000]
    else:
        assert [shard.version for shard in final.shards] == [planned, planned - lost]
    assert [row["gradients"] for row in run.summary()["kept"]] == [8000, 8000]


@pytest.mark.slow
def test_a_hung_worker_is_declared_gone_and_replaced(start: Start) -> None:
    run = start("--steps", "4000", "--discipline", "sync", "--worker-timeout", "1.5")
    run.wait_for_steps(100)
    run.kill("worker --index 1", signal.SIGSTOP)
    assert run.wait() == 0, run.text()
    assert "worker 1 was silent for 1.5 s: starting it again" in run.text()
    assert_every_gradient_counted_once(run, 2, 4000)


@pytest.mark.slow
def test_when_restarts_are_used_up_the_run_stops_and_says_why(start: Start) -> None:
    run = start("--steps", "1000000", "--max-restarts", "1")
    for count in (1, 2):
        run.wait_until(lambda: len(run.pids("worker --index 1")) == 1, "the worker was there")
        run.wait_until(lambda n=count: run.incarnations(1) >= n, "it had begun")
        run.kill("worker --index 1")
    assert run.wait() == 1
    assert leftovers(run.run_dir) == []
    text = run.text()
    assert "worker 1 was killed by SIGKILL, and was started again 1 times before" in text
    assert "--max-restarts" in text and "offbeat train --resume" in text
    assert run.summary()["status"] == "failed"
    assert newest_checkpoint(run.run_dir / "checkpoints").version > 0


def test_an_error_in_the_users_code_stops_the_run_with_role_step_and_place(start: Start) -> None:
    run = start(recipe="fails")
    assert run.wait() == 1
    assert "failed at step 6: KeyError: 'the sixth batch' (recipes.py, line" in run.text()
    assert "starting it again" not in run.text(), "trying again would not help"
    assert leftovers(run.run_dir) == []


@pytest.mark.slow
def test_a_keyboard_interrupt_of_the_recipes_own_is_an_error_like_any_other(start: Start) -> None:
    run = start(recipe="interrupts")
    assert run.wait() == 1, run.text()
    assert "failed at step 1: KeyboardInterrupt: in a loss (recipes.py, line" in run.text()
    assert leftovers(run.run_dir) == []
    assert run.summary()["status"] == "failed"


# -- the first seconds -----------------------------------------------------------------------------


def test_a_run_that_is_stopped_before_its_first_step_says_what_is_true(start: Start) -> None:
    """The master is held up, so that there is no checkpoint, and nothing to go on from."""
    run = start("--steps", "100000", recipe="large")
    run.wait_until(lambda: len(run.pids("master")) == 1, "the master was there")
    run.kill("master", signal.SIGSTOP)
    assert not list_checkpoints(run.run_dir / "checkpoints"), "it was stopped in time"
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()
    assert time.monotonic() - began < 5
    text = run.text()
    assert "stopping: nothing was learned yet" in text
    assert "interrupted before the first checkpoint: there is nothing to go on from" in text
    assert "--resume" not in text and "does not end by itself" not in text
    assert leftovers(run.run_dir) == []


@pytest.mark.slow
def test_a_run_that_is_resumed_and_stopped_at_once_can_be_resumed_again(start: Start) -> None:
    run = start("--steps", "60", "--eval-every", "0")
    assert run.wait() == 0
    again = start("--resume", str(run.run_dir), "--steps", "100000")
    again.wait_until(lambda: len(again.pids("master")) == 1, "the master was there")
    again.process.send_signal(signal.SIGINT)
    assert again.wait() == 130
    assert "offbeat train --resume" in again.text(), "there is a checkpoint"
    assert "does not end by itself" not in again.text()
    kept = newest_checkpoint(run.run_dir / "checkpoints")
    assert min(sequence for _, sequence in kept.applied().values()) >= 60


@pytest.mark.slow
def test_a_start_says_what_it_waits_for(start: Start) -> None:
    run = start("--steps", "100000", recipe="large")
    run.wait_until(lambda: len(run.pids("ps")) == 1, "the server was there")
    run.kill("ps", signal.SIGSTOP)
    run.wait_until(lambda: "waiting for server 0" in run.text(), "it was said")
    run.kill("ps", signal.SIGCONT)
    run.wait_for_steps(1)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()


# -- exporting -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_export_writes_what_load_gives(start: Start, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run = start("--steps", "50", "--engine", "inproc", recipe="momentum")
    assert run.wait() == 0
    for flags, ema in (([], False), (["--ema"], True)):
        target = tmp_path / "model.safetensors"
        assert main(["export", str(run.run_dir), str(target), *flags]) == 0
        assert_same(load_file(target), offbeat.load(run.run_dir, ema=ema))
    assert main(["export", str(run.run_dir), str(tmp_path / "no" / "file")]) == 1
    assert json.loads((run.run_dir / "config.json").read_text())["config"]["engine"] == "inproc"


@pytest.mark.slow
def test_towers_and_lines_on_the_console_in_processes(start: Start) -> None:
    run = start("--devices", "cpu,cpu", "--steps", "40", "--batch-size", "3", "--log-every", "10")
    assert run.wait() == 0, run.text()
    examples = [worker["examples"] for worker in run.summary()["workers"]]
    assert run.summary()["gradients"] == 80 and sum(examples) == 80 * 6
    lines = re.findall(r"step (\d+), loss = \d+\.\d\d \(\d+\.\d examples/sec; ", run.text())
    assert lines == ["10", "20", "30", "40"], "rank 0's"
