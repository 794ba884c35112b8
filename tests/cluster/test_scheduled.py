"""Who is who among the tasks of a Slurm step, and in pods: decided by each for itself, alike."""

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli import main, roles
from offbeat.cluster.endpoint import Endpoint
from offbeat.cluster.hosts import Hosts, Task
from offbeat.cluster.remote import WorkDone
from offbeat.cluster.scheduled import (
    expand_counts,
    expand_nodes,
    find_scheduled,
    spread,
)
from offbeat.config import make_config
from offbeat.errors import ConfigError, RunDirError
from offbeat.run.rundir import RunFolder, create_run_folder, describe_run


def step(task: int, node: int, nodes: str, counts: str, **more: str) -> dict[str, str]:
    found = {
        "SLURM_PROCID": str(task),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": "0",
    }
    return {**found, **more}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("gpu5,gpu7", ["gpu5", "gpu7"]),
        ("node[01-03,07],gpu5", ["node01", "node02", "node03", "node07", "gpu5"]),
        ("node[9-11].rack", ["node9.rack", "node10.rack", "node11.rack"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_slurms_list_of_nodes(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@pytest.mark.parametrize("text", ["", "node[1-", "node[a-b]", "a b", "node[1-2"])
def test_what_is_no_list_of_nodes(text: str) -> None:
    with pytest.raises(ConfigError, match="no list of nodes"):
        expand_nodes(text)


def test_slurms_count_of_tasks() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1] and expand_counts("4") == [4]
    with pytest.raises(ConfigError, match="how many tasks"):
        expand_counts("2x3")


def test_servers_are_spread_over_nodes() -> None:
    assert spread(["a", "a", "a", "b", "c", "c"]) == [0, 3, 4, 1, 5, 2]


def test_all_tasks_of_a_step_agree_on_who_is_who() -> None:
    """Three nodes with three, one and two tasks; two servers."""
    nodes = [0, 0, 0, 1, 2, 2]
    found = [
        find_scheduled(step(task, node, "n[1-3]", "3,1,2"), servers=2)
        for task, node in enumerate(nodes)
    ]
    (hosts,) = {hosts for hosts, _ in found}
    first = 20_000 + 12 * 7 % 120 * 100
    assert hosts.ps == (f"n1:{first}", f"n2:{first + 1}")
    assert hosts.num_workers == 4
    assert [task for _, task in found] == [
        Task("ps", 0),
        Task("master", 0),
        Task("worker", 0),
        Task("ps", 1),
        Task("worker", 1),
        Task("worker", 2),
    ]


def test_steps_of_one_node_have_ports_of_their_own() -> None:
    ports = {
        find_scheduled(step(0, 0, "n1", "3", **more), servers=1)[0].ps
        for more in ({}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "13"})
    }
    assert len(ports) == 3
    hosts, _ = find_scheduled(step(0, 0, "n1", "3"), servers=1, port=7000)
    assert hosts.ps == ("n1:7000",)


@pytest.mark.parametrize(
    ("environment", "servers", "says"),
    [
        (step(0, 0, "n1", "2"), 2, r"2 servers and a master want 3 tasks, and the step has 2"),
        (step(1, 1, "n[1-2]", "2(x2)"), 1, "start them with srun --distribution=block"),
        (step(0, 0, "n[1-2]", "2"), 1, "names 2 nodes, and tasks of 1"),
        (step(9, 0, "n1", "2"), 1, "distribution=block"),
        ({"SLURM_PROCID": "0"}, 1, "neither is set"),
        ({"SLURM_PROCID": "x"}, 1, "SLURM_PROCID is to be a whole number, and is 'x'"),
        ({}, 1, "what srun or a pod's manifest says, and here is neither"),
        ({"OFFBEAT_ROLE": "cook"}, 1, "OFFBEAT_ROLE is 'cook'"),
        ({"OFFBEAT_ROLE": "ps"}, 1, "OFFBEAT_PS is to name the servers"),
        (
            {"OFFBEAT_ROLE": "ps", "OFFBEAT_PS": "a:1", "OFFBEAT_NUM_WORKERS": "1"},
            1,
            "says not which one of its kind",
        ),
        (
            {
                "OFFBEAT_ROLE": "ps",
                "OFFBEAT_PS": "a:1",
                "OFFBEAT_NUM_WORKERS": "1",
                "HOSTNAME": "ps-3",
            },
            1,
            "there is no ps 3",
        ),
    ],
)
def test_what_makes_no_cluster_is_said_in_a_line(
    environment: dict[str, str], servers: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        find_scheduled(environment, servers=servers)


@pytest.mark.parametrize(
    ("more", "task"),
    [
        ({"OFFBEAT_ROLE": "ps", "HOSTNAME": "offbeat-ps-1"}, Task("ps", 1)),
        ({"OFFBEAT_ROLE": "worker", "JOB_COMPLETION_INDEX": "2"}, Task("worker", 2)),
        ({"OFFBEAT_ROLE": "master", "HOSTNAME": "offbeat-master-x7k2p"}, Task("master", 0)),
    ],
)
def test_a_pods_number_is_its_jobs_or_its_sets(more: dict[str, Any], task: Task) -> None:
    known = {"OFFBEAT_PS": "p-0.o:7000,p-1.o:7000", "OFFBEAT_NUM_WORKERS": "3"}
    hosts, found = find_scheduled({**known, **more}, servers=1)
    assert found == task
    assert hosts == Hosts(
        ps=("p-0.o:7000", "p-1.o:7000"),
        worker=("worker-0:1", "worker-1:1", "worker-2:1"),
        master="master:1",
    )
    assert hosts.rank_of("worker", 2) == 3


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (0, ("ps", 0)),
        (1, ("master", {"servers": "1", "discipline": "sync", "threads": "1"})),
        (2, 1),
    ],
)
def test_one_command_is_for_all_tasks_who_take_what_is_theirs(
    task: int, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in step(task, 0, "127.0.0.1", "3").items():
        monkeypatch.setenv(name, value)
    assert who_is_called(monkeypatch) == [expected]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ps", ("ps", 0)),
        ("chief", ("master", {"servers": "1", "discipline": "sync", "threads": "1"})),
        ("worker", 1),
    ],
)
def test_the_same_with_tf_config(kind: str, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which beats what else there is."""
    cluster = {"ps": ["127.0.0.1:7000"], "chief": ["c:1"], "worker": ["w:1"]}
    told = {"cluster": cluster, "task": {"type": kind, "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(told))
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert who_is_called(monkeypatch) == [expected]


def who_is_called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """By one command that is the same for all."""
    called: list[Any] = []

    def serve(endpoint: Endpoint, index: int, **of_server: str | None) -> bool:
        called.append(("ps", index))
        return False

    def lead(
        endpoint: Endpoint, given: Any, from_file: Any, resume: str | None, callbacks: Any
    ) -> None:
        called.append(("master", given))
        raise KeyboardInterrupt

    def work(endpoint: Endpoint, rank: int, given: Any, *, scores: bool) -> None:
        assert given == {"threads": "1"}, "the rest is the master's"
        called.append(rank)
        raise KeyboardInterrupt

    monkeypatch.setattr(roles, "serve", serve)
    monkeypatch.setattr(roles, "master", lead)
    monkeypatch.setattr(roles, "work", work)
    flags = ["--servers", "1", "--discipline", "sync", "--threads", "1"]
    main(["role", "auto", *flags])
    return called


@pytest.mark.parametrize(
    ("reason", "stopped", "role", "code"),
    [
        ("the run is finished", False, "auto", 0),
        ("the run is interrupted", False, "auto", 130),
        ("told to stop", True, "auto", 130),
        ("the run is interrupted", False, "worker", 0),
    ],
)
def test_a_worker_says_whether_its_job_is_done(
    reason: str, stopped: bool, role: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Job starts it again otherwise. Whoever starts workers by hand looks after them."""
    done = WorkDone(
        num_steps=1, loss=0.0, time_s=1.0, metric_name="accuracy", scores={}, reason=reason
    )
    monkeypatch.setattr(roles, "work", lambda *told, **more: (done, stopped))
    cluster = {"ps": ["127.0.0.1:7000"], "chief": ["c:1"], "worker": ["w:1"]}
    told = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(told))
    assert main(["role", role]) == code


@pytest.mark.parametrize("flags", [["--index", "1"], ["--ps", "a:1", "--worker", "b:1"]])
def test_who_says_more_than_auto_is_told_so(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["role", "auto", *flags]) == 2
    assert "role auto finds out by itself who it is" in capsys.readouterr().err


def a_run(folder: Path, *, checkpoint: bool, **options: Any) -> Path:
    config = make_config({"engine": "cluster", "run_dir": str(folder / "run"), **options})
    made = create_run_folder(config)
    made.write_json(made.config, describe_run(config))
    if checkpoint:
        (made.checkpoints / "00000012").mkdir()
    return made.path


def test_the_same_command_goes_on_with_its_run(tmp_path: Path) -> None:
    """As a scheduler gives it to a master that died."""
    given = {"recipe": "alexnet", "servers": "2", "epochs": "7", "run_dir": str(tmp_path / "run")}
    assert roles.find_former(given, {}) is None, "there is none yet"
    path = a_run(tmp_path, checkpoint=True, recipe="alexnet", servers=2, epochs=7)
    assert roles.find_former(given, {}) == str(path)
    assert roles.find_former({"run_dir": str(path)}, {"epochs": 7}) == str(path)
    assert roles.find_former({**given, "epochs": "8"}, {}) is None, "that is another run"
    assert roles.find_former({"recipe": "alexnet"}, {}) is None, "its folder has a name of its own"


def test_a_run_that_came_to_no_checkpoint_is_put_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        path = a_run(tmp_path, checkpoint=False, epochs=7)
        assert roles.find_former({"epochs": "7", "run_dir": str(path)}, {}) is None
        assert not path.exists() and (tmp_path / f"run-{number}" / "config.json").exists()
    assert f"put aside: {tmp_path / 'run-2'}" in capsys.readouterr().out
    path = a_run(tmp_path, checkpoint=False, epochs=7)
    with RunFolder(path).locked(), pytest.raises(RunDirError, match="is in use"):
        roles.find_former({"epochs": "7", "run_dir": str(path)}, {})
