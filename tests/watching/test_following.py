"""A run's folder, and a folder of runs, as somebody sees them who looks on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_gathering import a_run, described, phase, push, step

from offbeat.bench.report import write_run
from offbeat.errors import ConfigError, RunDirError
from offbeat.run.events import EventLog, Followed
from offbeat.run.orders import Order, OrderBox
from offbeat.run.places import place_of_process
from offbeat.run.rundir import RunFolder
from offbeat.watching import following
from offbeat.watching import hub as hub_module
from offbeat.watching.following import FollowedRun, last_lines
from offbeat.watching.hub import Hub
from offbeat.watching.usage import Usage


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "TICK_OF_MANY_S", 0.05)
    monkeypatch.setattr(hub_module, "TICK_S", 0.05)


def begin(path: Path, **about: Any) -> RunFolder:
    folder = RunFolder(path)
    for part in (folder.logs, folder.events):
        part.mkdir(parents=True)
    folder.config.write_text(json.dumps(described(**about)), encoding="utf-8")
    return folder


def write(folder: RunFolder, name: str, *events: dict[str, Any]) -> None:
    with (folder.events / f"{name}.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(event)}\n" for event in events)


def read_all(run: FollowedRun) -> dict[str, Any]:
    for _ in range(3):
        run.tick()
    return run.view(0)


def one_view(hub: Hub, name: str) -> dict[str, Any]:
    stream = hub.stream(name, lambda: False)
    for text in stream:
        view: dict[str, Any] = json.loads(text or "{}")
        if view.get("status"):
            return view
    raise AssertionError


# -- one run ---------------------------------------------------------------------------------------


def test_files_come_to_the_same_moment_together(tmp_path: Path) -> None:
    """A server's file is much longer than a worker's."""
    folder = begin(tmp_path / "run")
    for name, every in (("worker-0", 2), ("ps-0", 1)):
        make = step if name == "worker-0" else push
        write(folder, name, *(make(0, n, 0.1 * n) for n in range(1, 1001, every)))
    followed = Followed(folder.events, "*.jsonl", from_start=True)
    reached = {"step": 0.0, "push": 0.0}
    while events := followed.read_some(5000):
        last = events[-1]
        reached[last["kind"]] = last.get("start_s", last.get("received_s"))
        assert abs(reached["step"] - reached["push"]) < 10
    assert reached["push"] == pytest.approx(100) and followed.share_read == 1


def test_who_took_a_dead_ones_place_comes_after_it(tmp_path: Path) -> None:
    folder = begin(tmp_path / "run")
    write(folder, "worker-1", *(step(1, n, 0.1 * n) for n in range(1, 101)))
    write(folder, "worker-1.1", *(step(1, n, 0.1 * n) for n in range(101, 201)))
    with (folder.events / "worker-1.jsonl").open("a") as file:
        file.write('{"kind": "st')  # which nobody ends any more
    followed = Followed(folder.events, "*.jsonl", from_start=True)
    numbers = []
    while events := followed.read_some(3000):
        numbers += [event["step"] for event in events]
    assert numbers == list(range(1, 201))


def test_a_line_longer_than_a_bite_is_read(tmp_path: Path) -> None:
    write(begin(tmp_path / "run"), "master", phase("end", 1.0, status="finished", reason="x" * 900))
    followed = Followed(tmp_path / "run" / "events", "*.jsonl", from_start=True)
    assert [event["kind"] for event in followed.read_some(100)] == ["run"]
    assert followed.read_some(100) == []


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    folder = begin(tmp_path / "run")
    path = folder.events / "worker-0.jsonl"
    path.write_text('{"kind": "st')
    followed = Followed(folder.events, "*.jsonl", from_start=True)
    assert followed.read_some(100) == []
    path.write_text('{"kind": "step"}\n')
    assert followed.read_some(100) == [{"kind": "step"}]


def test_a_run_is_followed_as_it_goes_on(run_dir: Path) -> None:
    run = FollowedRun(run_dir)
    assert not run.tick() and "hint" in run.view(0), "there is no folder yet"
    folder = begin(run_dir)
    with folder.locked():
        write(folder, "engine", phase("start", 1.0))
        write(folder, "all", *a_run(2, 10))
        view = read_all(run)
        assert view["status"]["status"] == "running" and view["status"]["gradients"] == 20
        assert view["about"]["recipe"] == "toy" and view["about"]["variant"] == "apply-reply"
        write(folder, "all", step(0, 11, 5.0))
        run.tick()
        later = run.view(view["tick"])
        assert later["status"]["gradients"] == 21 and "about" not in later
        write(folder, "engine", phase("end", 6.0, status="interrupted", reason=None))
        assert read_all(run)["status"]["status"] == "interrupted"


def test_a_killed_run_says_so_and_one_that_goes_on_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "SILENT_S", 0.0)
    folder = begin(run_dir)
    write(folder, "engine", phase("start", 1.0))
    run = FollowedRun(run_dir)
    with folder.locked():
        assert read_all(run)["status"]["status"] == "running", "somebody holds the folder"
    shown = run.view(0)["tick"]
    assert run.tick()
    status = run.view(shown)["status"]
    assert run.view(0)["tick"] > shown, "whoever looks on is told"
    assert status["status"] == "killed" and "is gone" in status["reason"]
    with folder.locked():
        write(folder, "engine.1", phase("start", 9.0))
        assert read_all(run)["status"]["status"] == "running"


def test_what_is_no_run_is_told(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "config.json").write_text('{"config": {}}')
    with pytest.raises(RunDirError, match="does not describe a run"):
        FollowedRun(run_dir).tick()


def test_the_last_lines_of_logs(run_dir: Path) -> None:
    folder = begin(run_dir)
    write(folder, "engine", phase("start", 1.0))
    log = folder.logs / "worker-1.log"
    log.write_text("".join(f"line {n}\n" for n in range(5000)) + "x" * 900)
    run = FollowedRun(run_dir)
    view = read_all(run)
    assert view["roles"][0][0] == "worker-1"
    assert len(view["roles"][0][-1]) == 240, "no longer than a person reads"
    lines = run.lines_of("worker-1")
    assert len(lines) == 60 and lines[-2] == "line 4999"
    assert run.lines_of("../config") == run.lines_of("nobody") == []
    assert last_lines(log, 1)[0].startswith("xxx")


def test_a_process_of_this_machine_is_measured() -> None:
    here = place_of_process()
    usage = Usage()
    places = {
        "master": here,
        "worker-1": {**here, "host": "elsewhere"},
        "worker-2": {**here, "began": -1},
    }
    first = usage.look(places)
    assert first["worker-1"] is None and first["worker-2"] is None, "another process of that number"
    assert first["master"] is not None and first["master"].memory_bytes > 1e6
    sum(range(300_000))
    again = usage.look(places)["master"]
    assert again is not None and again.cpu is not None and again.cpu >= 0


def test_roles_are_measured_while_the_run_goes_on(run_dir: Path) -> None:
    folder = begin(run_dir)
    write(folder, "engine", phase("start", 1.0, **place_of_process()))
    write(folder, "engine", phase("placed", 1.1, role="ps", index=0, host="afar", pid=1, began=1))
    with folder.locked():
        rows = {row[0]: row for row in read_all(FollowedRun(run_dir))["roles"]}
    assert rows["launcher"][2] > 1e6 and rows["ps-0"][1:3] == ["afar", None]


# -- several ---------------------------------------------------------------------------------------


def test_runs_of_a_folder_each_in_a_line(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "one", workers=2, gradients=50)
    folder = begin(tmp_path / "b")
    hub = Hub(tmp_path)
    try:
        assert hub.setup() == {"single": None}
        with folder.locked():
            write(folder, "engine", *a_run(2, 30))
            for text in hub.stream(None, lambda: False):
                rows = json.loads(text or '{"runs": {}}')["runs"]
                if all("gradients" in rows.get(name, {}) for name in ("a/one", "b")):
                    break
        assert rows["a/one"]["status"] == "finished" and rows["b"]["status"] == "running"
        assert rows["b"]["gradients"] == 60 and rows["b"]["progress"] == 0.3
        view = one_view(hub, "a/one")
        assert view["status"]["gradients"] == 50
    finally:
        hub.close()


def test_no_name_leads_out_of_the_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "secret", workers=1, gradients=5)
    write_run(tmp_path / "runs" / "one", workers=1, gradients=5)
    hub = Hub(tmp_path / "runs")
    try:
        for name in ("../secret", "/etc", str(tmp_path / "secret"), "", "one/../../secret"):
            with pytest.raises(RunDirError, match="there is no run"):
                next(iter(hub.stream(name, lambda: False)))
            with pytest.raises(RunDirError):
                hub.lines_of(name, "master")
            with pytest.raises(RunDirError):
                hub.order(name, Order("stop"))
    finally:
        hub.close()


def test_a_grid_as_it_fills(tmp_path: Path) -> None:
    grid = {"recipe": "made-up", "disciplines": ["sync", "lock-free"], "workers": [2]}
    grid |= {"servers": [1], "seeds": 2, "options": {}}
    (tmp_path / "compare.json").write_text(json.dumps(grid))
    path = tmp_path / "sync-2w-1s" / "seed-0"
    write_run(path, workers=2, gradients=50, discipline="sync")
    from offbeat.report.summary import summarise

    (path / "summary.json").write_text(json.dumps(summarise(path)))
    hub = Hub(tmp_path)
    try:
        for text in hub.stream(None, lambda: False):
            view = json.loads(text or "{}")
            if view.get("runs"):
                break
    finally:
        hub.close()
    assert view["grid"]["cells"] == 4 and view["grid"]["done"] == 1
    cells = view["grid"]["settings"]["sync, 2 workers, 1 server"]
    assert cells == {"0": "sync-2w-1s/seed-0", "1": "sync-2w-1s/seed-1"}
    row = view["runs"]["sync-2w-1s/seed-0"]
    assert row["status"] == "finished" and row["score"]["values"][0][0] == "accuracy"


def test_watchers_share_what_was_read(run_dir: Path) -> None:
    write_run(run_dir, workers=2, gradients=50)
    hub = Hub(run_dir)
    try:
        assert hub.setup() == {"single": "run"}
        views = [one_view(hub, "run") for _ in range(3)]
        assert len(hub._texts) <= 2 and len({view["status"]["gradients"] for view in views}) == 1
    finally:
        hub.close()


# -- orders ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ([], "an object"),
        ({"what": "rm"}, "unknown order"),
        ({"what": "slow", "worker": 1}, "needs a factor"),
        ({"what": "slow", "worker": 1, "factor": 0.5}, "from 1 to 100"),
        ({"what": "slow", "worker": 1, "factor": float("nan")}, "from 1 to 100"),
        ({"what": "slow", "worker": 1, "factor": True}, "needs a factor"),
        ({"what": "stop_worker", "worker": "1"}, "needs the rank"),
        ({"what": "stop_worker", "worker": -1}, "needs the rank"),
        ({"what": "stop_worker"}, "needs the rank"),
    ],
)
def test_an_order_that_makes_no_sense(message: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Order.read(message)


def test_orders_are_taken_once_and_in_turn(tmp_path: Path) -> None:
    box = OrderBox(tmp_path / "orders")
    assert box.take() == []
    given = [Order("checkpoint"), Order("slow", 1, 2.0), Order("stop_worker", 1), Order("stop")]
    for order in given:
        box.give(order)
    (tmp_path / "orders" / "9.json").write_text("{")
    taken = box.take()
    assert taken[:4] == given and isinstance(taken[4], str)
    assert box.take() == []


def test_a_run_that_is_over_takes_no_orders(run_dir: Path) -> None:
    write_run(run_dir, workers=2, gradients=50)
    hub = Hub(run_dir)
    try:
        with pytest.raises(ConfigError, match="is not under way"):
            hub.order("run", Order("stop"))
        assert not (run_dir / "orders").exists()
    finally:
        hub.close()


def test_an_order_lies_where_the_engine_looks(run_dir: Path) -> None:
    folder = begin(run_dir)
    write(folder, "engine", phase("start", 1.0))
    hub = Hub(run_dir)
    try:
        with folder.locked():
            hub.order("run", Order("slow", 1, 3.0))
            with pytest.raises(ConfigError, match="no worker 7"):
                hub.order("run", Order("slow", 7, 3.0))
    finally:
        hub.close()
    assert OrderBox(folder.orders).take() == [Order("slow", 1, 3.0)]


def test_looking_on_takes_no_torch(run_dir: Path) -> None:
    """It would take more memory than all else."""
    write_run(run_dir, workers=2, gradients=50)
    program = (
        "import sys\n"
        "from offbeat.cli import main\n"
        "main(['watch', '--text', sys.argv[1]])\n"
        "sys.exit('imported torch' if 'torch' in sys.modules else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(run_dir)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "TERM": "dumb"},
    )
    assert done.returncode == 0, done.stderr
    assert "gradients 50" in done.stdout


def test_events_of_an_event_log_are_followed(run_dir: Path) -> None:
    folder = begin(run_dir)
    log = EventLog.create(folder.events, "engine")
    run = FollowedRun(run_dir)
    log.record("run", phase="start", at_s=1.0)
    log.flush()
    assert read_all(run)["status"]["status"] == "running"
    log.record("run", phase="end", at_s=2.0, status="finished", reason=None)
    log.close()
    assert read_all(run)["status"]["progress"] == 1.0
