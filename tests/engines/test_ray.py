"""The engine `ray`, on a real cluster of three nodes that are all this machine: where roles are,
who dies, and what is left."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import RECIPE_FILE, LocalRun
from rays import (
    CPUS_EACH,
    NUM_NODES,
    RayNodes,
    RayRun,
    actors,
    taking_jobs,
    wait_for,
)

import offbeat

pytestmark = pytest.mark.ray

SLOWLY = ("--slow-worker", "0:40x,1:40x", "--checkpoint-every", "20")


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayNodes]:
    nodes = RayNodes()
    yield nodes
    nodes.close()


@pytest.fixture
def nodes(cluster: RayNodes) -> Iterator[RayNodes]:
    """All of them there, and in the end nothing of any run."""
    cluster.heal()
    yield cluster
    wait_for(lambda: not actors(), "no actor is left", 20)


def test_roles_are_spread_over_the_nodes_and_the_run_is_like_any_other(
    tmp_path: Path, nodes: RayNodes
) -> None:
    flags = ("--discipline", "sync", "--workers", "2", "--servers", "2", "--eval-every", "20")
    run = RayRun(tmp_path, nodes, *flags)
    assert run.wait() == 0, run.text()
    placed = run.placed()
    assert set(placed) == {"ps-0", "ps-1", "master-0", "worker-1", "evaluator-0"}
    assert len({placed[name]["node"] for name in placed}) == NUM_NODES
    assert placed["master-0"]["node"] == placed["evaluator-0"]["node"] == nodes.head()
    summary = run.summary()
    assert summary["status"] == "finished" and summary["engine"] == "ray"
    assert [shard["lost"] for shard in summary["kept"]] == [0, 0]
    assert run.num_steps(0) == run.num_steps(1) > 0
    assert (run.run_dir / "logs" / "worker-1.log").exists()

    local = LocalRun(tmp_path, *flags, run="l")
    assert local.wait() == 0, local.text()
    ours, theirs = offbeat.load(run.run_dir), offbeat.load(local.run_dir)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), "to the bit"


@pytest.mark.parametrize("discipline", ["sync", "lock-free"])
def test_a_worker_and_a_server_that_are_killed_come_back(
    tmp_path: Path, nodes: RayNodes, discipline: str
) -> None:
    """The server gets its slice back."""
    kill = ("--kill-worker", "1@30")
    flags = ("--discipline", discipline, "--steps", "200", "--servers", "2", *SLOWLY, *kill)
    run = RayRun(tmp_path, nodes, *flags)
    run.wait_until(lambda: run.incarnations(1) == 2, "worker 1 was there again")
    os.kill(run.placed()["ps-1"]["pid"], signal.SIGKILL)
    assert run.wait() == 0, run.text()
    assert "worker 1 died: starting it again (1 of 3)" in run.text()
    assert "server 1 died: starting it again (1 of 3)" in run.text()
    loads = [e for e in run.events("run") if e["phase"] == "load" and e["shard"] == 1]
    assert [e["epoch"] for e in loads] == [0, 1]
    summary = run.summary()
    assert summary["status"] == "finished"
    assert summary["kept"][0]["gradients"] == 400, "all that both had to do"


@pytest.mark.parametrize("discipline", ["sync", "lock-free"])
def test_a_node_dies_with_all_that_is_on_it(
    tmp_path: Path, nodes: RayNodes, discipline: str
) -> None:
    flags = ("--discipline", discipline, "--steps", "200", "--servers", "2", *SLOWLY)
    run = RayRun(tmp_path, nodes, *flags)
    run.wait_for_steps(30)
    others = (run.placed()[name]["node"] for name in ("worker-1", "ps-0", "ps-1"))
    doomed = next(node for node in others if node != nodes.head())  # where the command is
    there = [name for name, event in run.placed().items() if event["node"] == doomed]
    nodes.kill(doomed)
    assert run.wait() == 0, run.text()
    again = {n for n, e in run.placed().items() if e["node"] != doomed}
    assert set(there) <= again, "each of them is somewhere else now"
    assert run.summary()["status"] == "finished"


MEETING = """
import os
from pathlib import Path
def meeting(model, batch):
    meeting.count = getattr(meeting, "count", 0) + 1
    if model.training and meeting.count % 20 == 1:
        here = Path(__file__).with_name("here") / str(meeting.count)
        here.mkdir(parents=True, exist_ok=True)
        (here / str(os.getpid())).touch()
        deadline_s = time.monotonic() + 60
        while len(list(here.iterdir())) < WANTED:
            assert time.monotonic() < deadline_s, "the other run does not come"
            time.sleep(0.02)
    return cross_entropy(model, batch)
meets = toy_recipe(loss=meeting)
"""


def meeting_of(num_workers: int) -> str:
    """A file of recipes with one whose workers wait for each other, of whatever run, every 20
    steps: until so many have come."""
    return RECIPE_FILE + MEETING.replace("WANTED", str(num_workers))


def test_two_runs_at_once(tmp_path: Path, nodes: RayNodes) -> None:
    """Each master takes all of a node, so that only one can be where the commands are; neither run
    is ever far ahead of the other."""
    source = meeting_of(2)
    flags = ("--workers", "1", "--cpus-per-worker", str(CPUS_EACH), "--steps", "40")
    runs = [RayRun(tmp_path, nodes, *flags, recipe="meets", source=source, run=r) for r in "ab"]
    assert [run.wait() for run in runs] == [0, 0], [run.text() for run in runs]
    masters = {run.placed()["master-0"]["node"] for run in runs}
    assert nodes.head() in masters and len(masters) == 2


def test_a_run_that_is_too_large_says_what_is_missing(tmp_path: Path, nodes: RayNodes) -> None:
    most = CPUS_EACH * NUM_NODES
    run = RayRun(tmp_path, nodes, "--workers", str(most))
    assert run.wait() == 2
    assert f"the run needs {most + 1} CPUs, and it has {most}" in run.text()
    assert not run.run_dir.exists()
    run = RayRun(tmp_path, nodes, "--cpus-per-worker", str(CPUS_EACH + 1), "--workers", "1")
    assert run.wait() == 2
    assert f"the master needs a node with {CPUS_EACH + 1} CPUs, and none has" in run.text()


def test_ctrl_c_or_the_death_of_the_command_ends_the_run_and_resume_goes_on(
    tmp_path: Path, nodes: RayNodes
) -> None:
    run = RayRun(tmp_path, nodes, "--steps", "200", *SLOWLY)
    run.wait_for_steps(20)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()
    assert run.summary()["status"] == "interrupted"
    wait_for(lambda: not actors(), "no actor is left", 10)
    dying = RayRun(tmp_path, nodes, "--resume", str(run.run_dir))
    dying.wait_for_steps(60)
    pids = dying.pids()
    dying.process.kill()
    dying.wait()
    wait_for(lambda: not set(pids) & set(actors()), "all actors are gone", 15)
    on = RayRun(tmp_path, nodes, "--resume", str(run.run_dir))
    assert on.wait() == 0, on.text()
    assert on.summary()["status"] == "finished"
    assert on.summary()["kept"][0]["applied"] == 400


def test_the_master_dies_with_its_node(tmp_path: Path, nodes: RayNodes) -> None:
    """Nodes that are larger than those where the command is, so that it is on one of these; each
    has room for the server besides, so that the other one is large enough wherever that is."""
    large = [nodes.add(CPUS_EACH + 2) for _ in range(2)]
    each = ("--cpus-per-worker", str(CPUS_EACH + 1))
    slowly = (
        "--slow-worker",
        "0:60x",
        "--checkpoint-every",
        "20",
    )  # longer than it takes to notice
    run = RayRun(tmp_path, nodes, "--workers", "1", "--steps", "300", *each, *slowly)
    run.wait_for_steps(30, 0)
    there = run.placed()["master-0"]["node"]
    assert there in large
    nodes.kill(there)
    assert run.wait() == 0, run.text()
    assert "the master died with its node: starting it again" in run.text()
    assert run.placed()["master-0"]["node"] in large
    assert run.summary()["status"] == "finished"
    assert run.summary()["kept"][0]["applied"] == 300


PROGRAM = """
import sys
import ray
import offbeat
from recipes import recipe

@ray.remote
def one():
    return 1

if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False)
    result = offbeat.train(recipe, engine="ray", run_dir=sys.argv[2], steps=30, quiet=True)
    print("accuracy", result.test_metric, "and", ray.get(one.remote()))
"""


def test_train_within_a_ray_program(tmp_path: Path, nodes: RayNodes) -> None:
    (tmp_path / "recipes.py").write_text(RECIPE_FILE)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", nodes.address, str(tmp_path / "run")]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "and 1" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["engine"] == "ray"


SCRIPT = """
import sys
import torch
import offbeat
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = offbeat.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
for step in range(int(sys.argv[1])):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    loss.backward()
    offbeat.log(loss=loss.item())
    optimizer.step()
offbeat.log(error=loss.item())
print("worker", offbeat.rank(), "of", offbeat.world_size(), "is through")
"""


def test_a_script_of_ones_own(tmp_path: Path, nodes: RayNodes) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    where = ["--engine", "ray", "--ray-address", nodes.address, "--run-dir", "run"]
    command = [
        sys.executable,
        "-m",
        "offbeat",
        "launch",
        *where,
        "--servers",
        "2",
        "train.py",
        "50",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "worker 0 of 2 is through" in done.stdout
    assert "worker 1 of 2 is through" in (tmp_path / "run" / "logs" / "worker-1.log").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["gradients"] == 100
    assert summary["test_scores"]["error"] < 1


def test_a_node_that_does_not_see_the_folder_tells_what_it_would_write(
    tmp_path: Path, nodes: RayNodes
) -> None:
    """It has another file system where the run's folder is."""
    run_dir = tmp_path / "apart" / "run"
    run_dir.parent.mkdir()
    (tmp_path / "recipes.py").write_text(RECIPE_FILE)
    for node in list(nodes.nodes):
        if node != nodes.head():
            nodes.kill(node)
    with nodes.apart(run_dir.parent):
        run = RayRun(tmp_path, nodes, "--steps", "40", "--servers", "2", "--run-dir", str(run_dir))
        assert run.wait() == 0, run.text()
    far = {name for name, event in run.placed().items() if event["node"] != nodes.head()}
    assert far & {"ps-0", "ps-1", "worker-1"}, "somebody was there"
    assert run.num_steps(0) == run.num_steps(1) == 40
    for name in far:
        assert f"is {name}" in (run.run_dir / "logs" / f"{name}.log").read_text()
    assert [shard["applied"] for shard in run.summary()["kept"]] == [80, 80]


def test_more_workers_join_as_the_cluster_grows(tmp_path: Path, nodes: RayNodes) -> None:
    doomed = next(node for node in nodes.nodes if node != nodes.head())
    nodes.kill(doomed)  # what is left has room for a server and three workers
    slowly = ("--slow-worker", "0:40x,1:40x,2:40x", "--steps", "600")
    run = RayRun(tmp_path, nodes, "--workers", "2..4", *slowly)
    run.wait_until_placed("worker-2")
    assert "worker-3" not in run.placed()
    nodes.add()
    run.wait_until(lambda: run.num_steps(3) > 0, "the fourth worker is at work")
    assert run.wait() == 0, run.text()
    assert "there is room for worker 3: it joins" in run.text()
    assert run.summary()["kept"][0]["applied"] == 1200


def test_a_comparison_runs_cells_side_by_side_and_says_so(tmp_path: Path, nodes: RayNodes) -> None:
    """Neither is ever far ahead of the other."""
    (tmp_path / "recipes.py").write_text(meeting_of(3))
    where = ["--engine", "ray", "--ray-address", nodes.address, "--recipe", "recipes.py:meets"]
    grid = ["--disciplines", "sync,allreduce", "--workers", "2", "--seeds", "1", "--steps", "100"]
    command = [sys.executable, "-m", "offbeat", "compare", *where, *grid, "--out", "out"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "up to 2 runs side by side: times are not comparable then" in done.stdout
    report = (tmp_path / "out" / "report.md").read_text()
    assert "Up to 2 of them went on side by side" in report
    summaries = [
        json.loads(p.read_text()) for p in sorted((tmp_path / "out").rglob("summary.json"))
    ]
    assert [s["discipline"] for s in summaries] == ["allreduce", "sync"]
    mine, theirs = (s["test_scores"]["accuracy"] for s in summaries)
    assert mine == pytest.approx(theirs, abs=0.02), "it is the same training"


def test_a_cluster_of_this_machine_is_started_where_one_is_wanted(
    tmp_path: Path, nodes: RayNodes
) -> None:
    run = LocalRun(tmp_path, "--engine", "ray", "--ray-address", "local", "--steps", "40")
    assert run.wait() == 0, run.text()
    assert "one of this machine's own is started for the run" in run.text()
    assert run.summary()["kept"][0]["applied"] == 80


def test_a_submitted_job(tmp_path: Path) -> None:
    """To a cluster that has what takes jobs."""
    (tmp_path / "recipes.py").write_text(RECIPE_FILE)
    flags = "--recipe recipes.py:recipe --steps 40 --threads 1 --device cpu --run-dir"
    train = ["offbeat", "train", "--engine", "ray", *flags.split(), str(tmp_path / "run")]
    command = ["ray", "job", "submit", "--working-dir", ".", "--", *train]
    with taking_jobs() as environment:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "on the Ray cluster at" in done.stdout and "succeeded" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["kept"][0]["applied"] == 80


def test_workers_without_servers_meet_across_nodes(tmp_path: Path, nodes: RayNodes) -> None:
    kill = ("--kill-worker", "1@30", "--checkpoint-every", "10", "--slow-worker", "0:20x")
    run = RayRun(tmp_path, nodes, "--discipline", "allreduce", "--steps", "60", *kill)
    assert run.wait() == 0, run.text()
    assert "starting all workers again (1 of 3)" in run.text()
    placed = run.placed()
    assert placed["worker-1"]["node"] != placed["master-0"]["node"]
    assert run.summary()["status"] == "finished" and "ps-0" not in placed
