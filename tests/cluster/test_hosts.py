"""Clusters by file, by flags and by TF_CONFIG; and who is which rank in them."""

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli import main
from offbeat.cluster.hosts import (
    TF_VARIABLE,
    Hosts,
    Task,
    find_hosts,
    is_loopback,
    read_hosts,
    split_address,
)
from offbeat.errors import ConfigError

FILE = """
ps = ["a:1", "b:2"]
worker = ["c:3", "d:4"]
"""


def test_a_file_with_a_master_and_one_without(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(FILE + 'master = "e:5"\n')
    hosts = read_hosts(path)
    assert hosts == Hosts(ps=("a:1", "b:2"), worker=("c:3", "d:4"), master="e:5")
    assert hosts.num_workers == 3
    assert [hosts.rank_of("master", 0), hosts.rank_of("worker", 0), hosts.rank_of("worker", 1)] == [
        0,
        1,
        2,
    ]
    path.write_text(FILE)
    hosts = read_hosts(path)
    assert hosts.num_workers == 2
    assert [hosts.rank_of("master", 0), hosts.rank_of("worker", 0), hosts.rank_of("worker", 1)] == [
        0,
        0,
        1,
    ], "worker 0 is the master"
    assert hosts.addresses == ("tcp:a:1", "tcp:b:2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no server"),
        ('ps = ["a:1"]', "neither a worker nor a master"),
        ('ps = "a:1"\nworker = ["b:1"]', "ps must be a list"),
        ('ps = [1]\nworker = ["b:1"]', "ps must be a list"),
        ('ps = ["a"]\nworker = ["b:1"]', "'a' is no address"),
        ('ps = ["a:0"]\nworker = ["b:1"]', "is no address"),
        ('ps = ["a:70000"]\nworker = ["b:1"]', "is no address"),
        ('ps = ["::1:7000"]\nworker = ["b:1"]', "IPv6"),
        ('ps = ["a:1", "a:1"]\nworker = ["b:1"]', "same address"),
        ('ps = ["a:1"]\nworkers = ["b:1"]', "did you mean 'worker'"),
        ('ps = ["a:1"]\nmaster = 3', "master must be one address"),
        ("ps = [", "not valid TOML"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_a_line(
    content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as raised:
        read_hosts(path)
    assert str(path) in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the cluster file"):
        read_hosts(tmp_path / "none.toml")


def tf_config(task: dict[str, Any], **cluster: list[str]) -> dict[str, str]:
    return {TF_VARIABLE: json.dumps({"cluster": cluster, "task": task})}


@pytest.mark.parametrize("chief", ["chief", "master"])
def test_tf_config_as_kubernetes_operators_set_it(chief: str) -> None:
    cluster = {chief: ["m:1"], "worker": ["w:1", "w:2"], "ps": ["p:1"], "evaluator": ["e:1"]}
    for kind, index, role in [
        (chief, 0, "master"),
        ("worker", 1, "worker"),
        ("ps", 0, "ps"),
        ("evaluator", 0, "evaluator"),
    ]:
        found = find_hosts(tf_config({"type": kind, "index": index}, **cluster))
        assert found is not None
        assert found == (
            Hosts(ps=("p:1",), worker=("w:1", "w:2"), master="m:1"),
            Task(role, index),
        )


def test_tf_config_without_a_chief_has_worker_0_as_master() -> None:
    found = find_hosts(tf_config({"type": "worker", "index": 0}, worker=["w:1"], ps=["p:1"]))
    assert found is not None
    hosts, task = found
    assert task is not None and hosts.rank_of(task.role, task.index) == 0


@pytest.mark.parametrize(
    "raw",
    [
        "{",
        "[]",
        "{}",
        '{"cluster": []}',
        '{"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": "cook"}}',
        '{"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": "ps", "index": "0"}}',
        '{"cluster": {"ps": ["a:1"], "chief": ["b:1"], "master": ["c:1"]}, "task": {}}',
    ],
)
def test_a_tf_config_that_makes_no_sense(raw: str) -> None:
    with pytest.raises(ConfigError, match=TF_VARIABLE):
        find_hosts({TF_VARIABLE: raw})


def test_flags_and_files_beat_the_environment_and_do_not_mix(tmp_path: Path) -> None:
    environment = tf_config({"type": "ps", "index": 0}, worker=["w:1"], ps=["p:1"])
    found = find_hosts(environment, ps=["a:1"], worker=["b:1"])
    assert found == (Hosts(ps=("a:1",), worker=("b:1",)), None)
    path = tmp_path / "c.toml"
    path.write_text(FILE)
    assert find_hosts(environment, file=str(path)) == (read_hosts(path), None)
    with pytest.raises(ConfigError, match="not both"):
        find_hosts({}, file=str(path), ps=["a:1"])
    assert find_hosts({}) is None


def test_addresses_and_loopback() -> None:
    assert split_address("[::1]:7000") == ("::1", 7000)
    assert split_address("localhost:80") == ("localhost", 80)
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("10.1.2.3")
    with pytest.raises(ConfigError, match="nobody knows the host"):
        is_loopback("no-such-host.invalid")


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ps"], "a role belongs to a cluster"),
        (["cook", "--ps", "127.0.0.1:1", "--worker", "a:1"], "unknown role 'cook'"),
        (["--ps", "127.0.0.1:1", "--worker", "a:1"], "which role?"),
        (["ps", "--index", "1", "--ps", "127.0.0.1:1", "--worker", "a:1"], "there is no ps 1"),
        (["worker", "--index", "1", "--ps", "a:1", "--worker", "a:1"], "there is no worker 1"),
        (["ps", "--index", "-1", "--ps", "a:1", "--worker", "a:1"], "-1"),
        (["ps", "--ps", "127.0.0.1:1", "--worker", "a:1", "--lr", "1"], "--lr is for the master"),
        (["ps", "--ps", "127.0.0.1:1", "--worker", "a:1", "--join"], "only a worker can join"),
        (["ps", "--ps", "10.0.0.1:1", "--worker", "a:1"], "offbeat token"),
        (["ps", "--ps", "127.0.0.1:1", "--worker", "a:1", "--bind", "0.0.0.0"], "offbeat token"),
        (["worker", "--join", "--ps", "a:1", "--worker", "a:1", "--lr", "1"], "for the master"),
        (["evaluator", "--ps", "a:1", "--worker", "a:1", "--resume", "r"], "for the master"),
        (["master", "--ps", "a:1", "--worker", "a:1", "--workers", "3"], "the cluster has 1 work"),
        (["master", "--ps", "a:1", "--worker", "a:1", "--index", "1"], "there is one master"),
        (["ps", "--ps", "a:1", "--worker", "a:1", "--tls-cert", "x"], "belong together"),
        (["ps", "--ps", "a:1", "--worker", "a:1", "--token-file", "/none"], "cannot read a token"),
        (["ps", "--cluster", "/none.toml"], "cannot read the cluster file"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OFFBEAT_TOKEN", raising=False)
    assert main(["role", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_token_is_long_and_never_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token"]) == main(["token"]) == 0
    first, second = capsys.readouterr().out.split()
    assert first != second and len(first) >= 40
