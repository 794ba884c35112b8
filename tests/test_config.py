"""Flags, files and arguments: what is accepted, what is resolved, what is refused and how."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli import main
from offbeat.config import TrainConfig, make_config, options, read_config_file
from offbeat.errors import ConfigError


def test_the_flags_are_frozen() -> None:
    """Whoever changes this list changes the interface: say so in the CHANGELOG."""
    assert list(options()) == [
        "recipe",
        "set",
        "discipline",
        "servers",
        "workers",
        "epochs",
        "steps",
        "batch_size",
        "accumulate",
        "local_steps",
        "outer_optimizer",
        "overlap",
        "optimizer",
        "lr",
        "lr_scale",
        "clip_norm",
        "clip_value",
        "fused",
        "partition",
        "rule",
        "compress",
        "compress_replies",
        "compress_always",
        "backup_workers",
        "round_timeout",
        "staleness",
        "max_delay",
        "collect",
        "buffer_size",
        "ack",
        "split",
        "feed",
        "loader_workers",
        "seed",
        "init",
        "device",
        "devices",
        "amp",
        "capture",
        "compile",
        "server_device",
        "data_device",
        "threads",
        "engine",
        "ray_address",
        "most_workers",
        "cpus_per_worker",
        "gpus_per_worker",
        "memory_per_server",
        "worker_timeout",
        "max_restarts",
        "fresh_worker_state",
        "slow_worker",
        "kill_worker",
        "lying_worker",
        "run_dir",
        "data_dir",
        "eval_every",
        "eval_skipped",
        "stop_at",
        "patience",
        "keep_best",
        "checkpoint_every",
        "keep",
        "tensorboard",
        "summary_every",
        "track",
        "log_every",
        "quiet",
    ]


def test_defaults_are_valid_and_as_documented() -> None:
    config = TrainConfig().validated()
    assert (config.servers, config.workers, config.recipe) == (1, 2, "fashion-cnn")


@pytest.mark.parametrize(
    ("given", "staleness"),
    [
        ({"discipline": "bounded"}, 1.0),
        ({"discipline": "bounded:2"}, 2.0),
        ({"discipline": "bounded:inf"}, math.inf),
        ({"discipline": "bounded", "staleness": 0}, 0.0),
        ({"discipline": "bounded", "staleness": "inf"}, math.inf),
        ({"discipline": "bounded:3", "staleness": 3}, 3.0),
    ],
)
def test_bounded_takes_its_number_both_ways(given: dict[str, Any], staleness: float) -> None:
    config = make_config(given)
    assert (config.discipline, config.staleness) == ("bounded", staleness)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 0}, "workers must be at least 1, not 0"),
        ({"servers": 0}, "servers must be at least 1"),
        ({"servers": -2}, "servers must be at least 1"),
        ({"workers": "two"}, "workers must be a whole number, not 'two'"),
        ({"workers": 1.5}, "workers must be a whole number"),
        ({"workers": True}, "workers must be a whole number"),
        ({"lr": "nan"}, "lr must be a number"),
        ({"lr": 0}, "lr must be above 0"),
        ({"lr": "inf"}, "lr must be finite"),
        ({"lr": -1}, "lr must be above 0"),
        ({"lr_scale": "liner"}, "unknown lr_scale 'liner'; did you mean 'linear'"),
        ({"clip_norm": 0}, "clip_norm must be above 0, not 0"),
        ({"clip_norm": "nan"}, "clip_norm must be a number"),
        ({"clip_value": "inf"}, "clip_value must be finite"),
        ({"clip_value": -1}, "clip_value must be above 0, not -1"),
        ({"clip_value": 1, "clip_norm": 1}, "give one of the two"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"steps": -1}, "steps must be at least 1"),
        ({"steps": 5, "epochs": 1}, "give one of the two"),
        ({"accumulate": 0}, "accumulate must be at least 1"),
        ({"accumulate": 1.5}, "accumulate must be a whole number"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"threads": 100_000}, "threads must be at most 1024"),
        ({"stop_at": "nan"}, "stop_at must be a number"),
        ({"stop_at": "-inf"}, "stop_at must be finite, or inf: never"),
        ({"patience": 0}, "patience must be at least 1"),
        ({"patience": -2}, "patience must be at least 1"),
        ({"keep_best": "yes"}, "keep_best must be true or false"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"eval_every": -1}, "eval_every must be at least 0"),
        ({"discipline": "synch"}, "unknown discipline 'synch'; did you mean 'sync'"),
        ({"discipline": "xyz"}, "known: sync, apply-reply"),
        ({"discipline": "lock-free:2"}, "lock-free takes no number behind its name, not '2'"),
        ({"discipline": "sync:1:2"}, "sync takes one number behind its name"),
        ({"discipline": "sync:round_timout=2"}, "did you mean 'round_timeout'"),
        ({"discipline": "sync:round_timeout=0"}, "round_timeout must be above 0"),
        ({"discipline": "no.such.module:Class"}, "importing no.such.module failed"),
        ({"discipline": "no/such.py:Class"}, "no such discipline file"),
        ({"discipline": "math:sqrt"}, "math has no discipline 'sqrt'"),
        ({"discipline": "bounded:-1"}, "staleness must be 0, 1, 2"),
        ({"discipline": "bounded:1.5"}, "staleness must be 0, 1, 2"),
        ({"discipline": "bounded:x"}, "staleness must be a number"),
        ({"discipline": "bounded", "staleness": -1}, "staleness must be 0, 1, 2"),
        ({"discipline": "bounded:2", "staleness": 3}, "contradicts"),
        ({"discipline": "sync", "staleness": 3}, "belongs to the discipline bounded"),
        ({"backup_workers": 1}, "belongs to the discipline sync"),
        ({"rule": "sum"}, "is for updates of several gradients, as sync"),
        ({"discipline": "sync", "rule": "max"}, "unknown rule 'max'"),
        ({"discipline": "sync", "backup_workers": 2}, "backup_workers must be below"),
        ({"discipline": "sync", "backup_workers": -1}, "backup_workers must be at least 0"),
        ({"optimizer": "adan"}, "did you mean 'adam'"),
        ({"engine": "inprok"}, "did you mean 'inproc'"),
        ({"wrokers": 3}, "unknown option 'wrokers'; did you mean 'workers'"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + message):
        make_config(given)


def test_flag_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('workers = 3\nbatch-size = 7\ndiscipline = "sync"\n')
    config = make_config(read_config_file(file), {"workers": "5"})
    assert (config.workers, config.batch_size, config.discipline, config.servers) == (
        5,
        7,
        "sync",
        1,
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.toml", "wrokers = 3", "unknown key 'wrokers'; did you mean 'workers'"),
        ("c.toml", "workers = ", "not valid TOML"),
        ("c.json", "{", "not valid JSON"),
        ("c.json", "[1]", "no table of options"),
        ("c.toml", 'workers = "many"', "workers must be a whole number"),
        ("none.toml", None, "cannot read"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        make_config(read_config_file(path))


def test_a_runs_own_config_can_be_given_again(tmp_path: Path) -> None:
    config = make_config({"discipline": "bounded:inf", "lr": 0.5, "workers": 3})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"config": config.to_json(), "environment": {"torch": "x"}}))
    assert make_config(read_config_file(path)) == config


def test_every_option_has_help_and_survives_json() -> None:
    config = TrainConfig().validated()
    for name, option in options().items():
        assert option.metadata["help"], name
    again = make_config(json.loads(json.dumps(config.to_json(), allow_nan=False)))
    assert dataclasses.asdict(again) == dataclasses.asdict(config)


# -- the command line --------------------------------------------------------------------------


DURABLE = ("--ack", "durable")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--wrokers", "3"], "unknown argument '--wrokers'; did you mean '--workers'"),
        (["train", "--workers=0"], "workers must be at least 1"),
        (["train", "--worker", "3"], "did you mean '--workers'"),
        (["train", "--workers"], "expected one argument"),
        (["train", "extra"], "unknown argument 'extra'"),
        (["launch", "--epochs", "3", "t.py"], "unknown argument '--epochs'; recipes take it, and"),
        (["launch", "--no-compile", "t.py"], "'--no-compile'; recipes take it, and a script does"),
        (["launch", "-m", "t"], "unknown argument '-m'; give the module's file; the script's own"),
        (["launch", "--worker", "3"], "is no address"),
        (["trian"], "invalid choice: 'trian'"),
        (["train", "--recipe", "fashion-cn"], "did you mean 'fashion-cnn'"),
        (["train", "--recipe", "mine.py"], "mine.py:recipe"),
        (["train", "--recipe", "missing.py:recipe"], "no such recipe file"),
        (["train", "--recipe", "no.such.module:recipe"], "importing no.such.module failed"),
        (["train", "--recipe", "offbeat.recipes.fashion_cnn:recip"], "did you mean 'recipe'"),
        (["train", "--recipe", "offbeat.recipes.fashion_cnn:make_model"], "not an offbeat.Recipe"),
        (["train", "--recipe", "mnist-sigmoid", "--data-dir", "nowhere"], "data not found"),
        (["train", "--servers", "1000000"], "lower servers"),
        (["train", "--workers", "10001"], "lower workers"),
        (["train", "--optimizer", "rmsprop", "--fused"], "without --fused"),
        (["train", "--optimizer", "LBFGS"], "LBFGS cannot be used: it computes the loss several"),
        (["train", "--config", "missing.toml"], "cannot read the configuration file"),
        (["train", "--staleness", "-1"], "staleness"),
        (["train", "--ack", "durably"], "did you mean 'durable'"),
        (["train", *DURABLE, "--discipline", "lock-free"], "say --discipline reply-apply"),
        (["train", *DURABLE, "--discipline", "allreduce"], "a server's promise, and allreduce"),
        (["train", *DURABLE, "--engine", "ray"], "may start a server again on another node"),
        (["train", *DURABLE, "--server-device", "cuda"], "from the CPU's memory"),
        (
            [*("train", *DURABLE, "--discipline", "sync", "--clip-norm", "1"), "--servers", "2"],
            "is in none as a whole: say --servers 1",
        ),
    ],
)
def test_bad_input_is_one_line_exit_code_2_and_nothing_left(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert message in printed.err
    assert list(tmp_path.iterdir()) == []


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "train" in capsys.readouterr().out


def test_an_optimizer_of_the_users_is_found_from_other_folders() -> None:
    config = make_config({"optimizer": "my/lion.py:Lion:beta=0.5"})
    assert config.optimizer == f"{Path('my/lion.py').absolute()}:Lion:beta=0.5"
    assert make_config({"optimizer": "lions:Lion"}).optimizer == "lions:Lion"
    assert make_config({"optimizer": "Adadelta:rho=0.5"}).optimizer == "Adadelta:rho=0.5"
