"""The batch script for Slurm, run with an srun that starts its tasks on this machine."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from srun import Job

from offbeat.run.checkpoint import newest_checkpoint
from offbeat.run.events import read_events

pytestmark = pytest.mark.slow

Submit = Callable[..., Job]


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Submit]:
    with contextlib.ExitStack() as jobs:
        yield lambda *flags, **known: jobs.enter_context(
            contextlib.closing(Job(tmp_path, *flags, **known))
        )


def applied(run_dir: Path) -> Counter[tuple[int, int, int]]:
    return Counter(
        (event["shard"], event["worker"], event["sequence"])
        for event in read_events(run_dir / "events")
        if event["kind"] == "push" and event["outcome"] == "applied"
    )


@pytest.mark.parametrize(("shape", "servers", "workers"), [("1,3,2", 2, 4), ("3", 1, 2)])
def test_the_batch_script_makes_one_run(
    shape: str, servers: int, workers: int, submit: Submit
) -> None:
    job = submit("--epochs", "10", shape=shape, SERVERS=str(servers))
    assert job.wait() == 0, job.text()
    summary = job.summary()
    assert summary["status"] == "finished" and len(summary["workers"]) == workers
    counts = applied(job.run_dir)
    assert set(counts.values()) == {1} and {shard for shard, _, _ in counts} == set(range(servers))
    per_worker = {(shard, worker) for shard, worker, _ in counts}
    assert len(per_worker) == servers * workers
    assert len(counts) == servers * summary["gradients"], "all gradients are in, in every shard"
    assert "Traceback" not in job.text()


@pytest.mark.parametrize("discipline", ["sync", "lock-free"])
def test_a_job_that_is_cancelled_keeps_a_checkpoint_and_goes_on_when_it_is_requeued(
    discipline: str, submit: Submit
) -> None:
    """Nothing that was done is lost: the servers stay until the master has what they have."""
    flags = ["--epochs", "4000", "--checkpoint-every", "1000000"]
    job = submit(*flags, shape="1,2", SERVERS="1", DISCIPLINE=discipline)
    job.wait_until(lambda: job.num_pushes() > 200, "200 pushes")
    job.cancel()
    assert job.wait() == 130, job.text()
    summary = job.summary()
    assert summary["status"] == "interrupted"
    assert "without a last" not in (job.run_dir / "logs" / "master.log").read_text()
    kept = newest_checkpoint(job.run_dir / "checkpoints").version
    assert kept == summary["updates"] > 0 and summary["not_kept"] == 0
    again = submit(*flags, shape="1,2", SERVERS="1", DISCIPLINE=discipline)
    again.wait_until(lambda: again.num_pushes() > summary["gradients"] + 200, "going on")
    again.cancel()
    assert again.wait() == 130, again.text()
    assert again.summary()["updates"] > kept and again.summary()["not_kept"] == 0
    assert max(applied(again.run_dir).values()) == 1
    assert "Traceback" not in again.text()
