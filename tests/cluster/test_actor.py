"""What an actor is told and tells, without Ray: where the others are, and the mirror of a folder
that it does not see; and what is said where Ray is missing."""

import json
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from rays import wait_for

from offbeat.cluster.actor import FILE_NAME, Mirror, Order, Told, sees_run
from offbeat.cluster.rays import find_ray
from offbeat.config import make_config
from offbeat.engines.actors import Calls
from offbeat.errors import ConfigError, ConnectionClosedError
from offbeat.roles.control import Control
from offbeat.run.addresses import Cluster
from offbeat.run.events import EventLog
from offbeat.run.rundir import RunFolder
from offbeat.transport.security import Terms
from offbeat.transport.sockets import call_engine


def a_cluster(**more: object) -> Cluster:
    return Cluster(
        ps=("unix:@a", "unix:@b"),
        epochs=(0, 0),
        incarnations=(0, 0),
        began_s=0.0,
        nodes=("one", "?"),
        from_afar=("tcp:127.0.0.1:7", ""),
        key="k",
        **more,  # type: ignore[arg-type]
    )


def an_order(**more: object) -> Order:
    found = {"role": "worker", "index": 1, "generation": 2, "engine": "", "key": "k", "token": b""}
    found |= {"run_dir": "/nowhere", "described": {"config": {}}, "initial": None, "folder": "/"}
    found |= {"path": (), "options": {}, "is_shown": False}
    return Order(**{**found, **more})  # type: ignore[arg-type]


def test_servers_of_ones_own_node_are_reached_by_its_memory() -> None:
    cluster = a_cluster()
    assert cluster.address(0, "one") == "unix:@a"
    assert cluster.address(0, "other") == "tcp:127.0.0.1:7"
    assert cluster.address(1, "one") == "", "it has not said yet where it is"
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


def test_what_is_told_keeps_the_clock_that_it_began_with() -> None:
    told = Told()
    told({"cluster": a_cluster().to_json(), "elapsed_s": 5.0})
    first = told.wait()
    assert first.clock() == pytest.approx(5.0, abs=1.0)
    told({"cluster": a_cluster().to_json(), "elapsed_s": 100.0})
    assert told.cluster().began_s == first.began_s


def test_a_folder_of_the_same_name_is_not_the_run_s(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert not sees_run(tmp_path, a_cluster())
    a_cluster().write(folder)
    assert sees_run(tmp_path, a_cluster())
    Cluster(ps=(), epochs=(), incarnations=(), began_s=0.0, key="another").write(folder)
    assert not sees_run(tmp_path, a_cluster())


def test_a_mirror_tells_whole_lines_and_leaves_nothing(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    control = Control(theirs)
    order = an_order(described={"config": {"seed": 3}}, initial=b"weights")
    mirror = Mirror(order, tmp_path, control)
    folder = mirror.folder
    assert json.loads(folder.config.read_text()) == {"config": {"seed": 3}}
    assert folder.initial.read_bytes() == b"weights"
    events = EventLog.create(folder.events, "worker-1")
    events.record("step", worker=1)
    events.close()
    (folder.logs / "worker-1.log").write_text("one\ntw")
    mirror.close()
    theirs.close()
    told = [json.loads(line) for line in _all_of(ours).splitlines()]
    texts: dict[str, str] = {}
    for message in told:
        assert FILE_NAME.fullmatch(message["file"])
        texts[message["file"]] = texts.get(message["file"], "") + message["text"]
    assert json.loads(texts["events/worker-1.jsonl"])["worker"] == 1
    assert texts["logs/worker-1.log"] == "one\ntw"
    assert [path.name for path in tmp_path.iterdir()] == ["states"]


def _all_of(line: socket.socket) -> bytes:
    found = b""
    with line:
        while part := line.recv(65536):
            found += part
    return found


@pytest.mark.parametrize(
    "name",
    ["events/../x.jsonl", "/etc/passwd", "events/a.txt", "checkpoints/a.log", "logs/a/b.log"],
)
def test_no_other_file_can_be_written_by_an_actor(name: str) -> None:
    assert FILE_NAME.fullmatch(name) is None


def test_only_who_knows_the_token_gets_through_to_the_engine() -> None:
    calls = Calls("127.0.0.1", b"a token that is long enough")
    calls.start()
    try:
        with pytest.raises(ConnectionClosedError, match="token"):
            call_engine(calls.address, {}, 5.0, Terms(token=b"another token of that length"))
        terms = Terms(token=b"a token that is long enough")
        with call_engine(calls.address, {"name": "ps-0"}, 5.0, terms) as line:
            found: list[tuple[socket.socket, dict[str, object]]] = []

            def came() -> bool:
                found.extend(calls.come())
                return bool(found)

            wait_for(came, "the call came through")
            (end, hello) = found[0]
            assert hello == {"name": "ps-0"}
            line.sendall(b"up\n")
            end.sendall(b"down\n")
            assert (end.recv(10), line.recv(10)) == (b"up\n", b"down\n")
            end.close()
    finally:
        calls.close()


def test_control_takes_orders_that_come_in_pieces() -> None:
    ours, theirs = socket.socketpair()
    control = Control(theirs)
    told: list[dict[str, object]] = []
    control.told = told.append
    control.start()
    with ours:
        ours.sendall(b'{"cluster": 1}\n{"st')
        wait_for(lambda: bool(told), "the first line was heard")
        assert not control.stop.is_set()
        ours.sendall(b'op": true}\n')
        assert control.stop.wait(5)
        control.close()
    assert told == [{"cluster": 1}, {"stop": True}]


def test_a_missing_library_is_answered_by_its_install_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'offbeat\[ray\]'"):
        find_ray()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cpus_per_worker": 2}, "cpus_per_worker belongs to the engine ray"),
        ({"workers": "2..4"}, "most_workers belongs to the engine ray"),
        ({"engine": "ray", "workers": "4..2"}, "the first number is the smaller one"),
        ({"engine": "ray", "workers": "2..4", "discipline": "sync"}, "asynchronous disciplines"),
        ({"engine": "ray", "cpus_per_worker": 1.5}, "must be whole for Ray"),
        ({"engine": "ray", "gpus_per_worker": -1}, "must be 0 or more"),
        ({"engine": "ray", "devices": "cpu,cpu"}, "say --gpus-per-worker"),
        ({"run_dir": "s3://bucket/run"}, "is no path"),
    ],
)
def test_what_makes_no_sense_is_said(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config(options)


def test_a_range_of_workers_is_two_options() -> None:
    config = make_config({"engine": "ray", "workers": "2..8"})
    assert (config.workers, config.most_workers, config.split) == (2, 8, "shared")


def test_threads_end_with_the_calls() -> None:
    before = threading.active_count()
    calls = Calls("127.0.0.1", b"a token that is long enough")
    calls.start()
    calls.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before:
        assert time.monotonic() < deadline
