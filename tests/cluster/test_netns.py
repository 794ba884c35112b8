"""Runs on hosts of their own: network namespaces (support/hosts.py).

Needs the right to make them; skipped with a plain message where it is missing.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import DROPPING
from hosts import PORT, TIMEOUT_S, Net, NoHostsError, made

import offbeat
from offbeat.config import DISCIPLINES

pytestmark = pytest.mark.slow


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    try:
        with made(Net(tmp_path)) as net:
            yield net
    except NoHostsError as error:
        pytest.skip(str(error))


def one_machine(folder: Path, discipline: str, recipes: Path, *, epochs: int) -> float:
    """What the same recipe reaches with as many workers in one process."""
    result = offbeat.train(
        f"{recipes}:recipe",
        discipline=discipline,
        workers=4,
        servers=2,
        epochs=epochs,
        engine="inproc",
        quiet=True,
        device="cpu",
        run_dir=folder / "here",
    )
    return result.test_accuracy or 0.0


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_each_discipline_trains_on_hosts_of_their_own(discipline: str, net: Net) -> None:
    net.start("--discipline", discipline, "--epochs", "60", "--checkpoint-every", "100")
    summary = net.wait()
    assert summary["status"] == "finished"
    in_all = net.check_applied_once()
    assert discipline in DROPPING or in_all == dict.fromkeys(range(4), 60 * 6)
    here = one_machine(net.folder, discipline, net.recipes, epochs=60)
    assert abs(summary["test_accuracy"] - here) <= 0.05 and here > 0.85
    assert "precision @ 1" in net.hosts["evaluator"].text()
    for name, host in net.hosts.items():
        made = {path.name for path in host.folder.iterdir()} - {"out.txt", "cluster.toml"}
        assert made == ({"run"} if name == "master" else set()), "the run's folder is the master's"
        assert net.token not in host.text()
    for path in net.run_dir.rglob("*"):
        assert path.is_dir() or net.token.encode() not in path.read_bytes()


@pytest.mark.parametrize("discipline", ["sync", "apply-reply"])
def test_a_link_that_is_down_for_5_s(discipline: str, net: Net) -> None:
    net.start("--discipline", discipline, "--epochs", "1000", "--eval-every", "2000")
    net.wait_for_pushes(200)
    host = net.hosts["worker-1"]
    host.set_link(False)
    began_s = time.monotonic()
    net.wait_until(lambda: time.monotonic() - began_s > 5, "5 s")
    host.set_link(True)
    summary = net.wait()
    assert summary["status"] == "finished"
    assert net.check_applied_once() == dict.fromkeys(range(4), 6000), "nobody lost anything"


@pytest.mark.parametrize("discipline", ["sync", "lock-free"])
def test_a_link_that_is_down_for_good(discipline: str, net: Net) -> None:
    flags = ["--discipline", discipline, "--epochs", "1000", "--worker-timeout", "3"]
    net.start(*flags, "--eval-every", "2000")
    net.wait_for_pushes(200)
    net.hosts["worker-1"].set_link(False)
    summary = net.wait("worker-1")
    assert summary["status"] == "finished"
    counts = net.check_applied_once()
    assert [counts[rank] for rank in (0, 1, 3)] == [6000] * 3 and 0 < counts[2] < 6000
    assert "worker 2 is gone" in net.hosts["master"].text()


def test_100_megabits(net: Net) -> None:
    for host in net.hosts.values():
        host.limit("100mbit")
    net.start("--discipline", "lock-free", "--epochs", "30", recipe="wide")
    summary = net.wait()
    assert summary["status"] == "finished"
    assert net.check_applied_once() == dict.fromkeys(range(4), 30 * 6)


def test_100_ms_of_latency(net: Net) -> None:
    net.serve_port = PORT + 1
    for name in ("ps-0", "ps-1"):
        host = net.hosts[name]
        there = f"{host.address}:{PORT + 1}"
        host.start("-m", "offbeat.bench.link", there, "--at", str(PORT), "--delay-ms", "50")
        host.helpers.append(host.processes.pop())
    net.start("--discipline", "apply-reply", "--epochs", "10")
    summary = net.wait()
    assert summary["status"] == "finished"
    assert net.check_applied_once() == dict.fromkeys(range(4), 60)
    exchanges = [worker["exchange_s"] / worker["gradients"] for worker in summary["workers"]]
    assert min(exchanges) > 0.09, "the latency was there"


def test_the_hosts_are_apart(net: Net) -> None:
    """A token is asked for, whoever comes from another machine."""
    net.role("ps-0")
    first = net.hosts["ps-0"]
    net.wait_until(lambda: "listens at" in first.text(), "the server")
    stranger = net.hosts["worker-0"]
    flags = ["--ps", f"{first.address}:{PORT}", "--worker", "a:1,b:2"]
    process = stranger.start("-m", "offbeat", "role", "worker", "--index", "1", *flags)
    assert process.wait(TIMEOUT_S) == 1
    assert "asks for a token" in stranger.text()
