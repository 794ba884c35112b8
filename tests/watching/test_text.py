"""The view in a terminal, and what is said where there is none."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_following import begin, write
from test_gathering import a_run, gathered_from, phase

from offbeat.bench.report import write_run
from offbeat.cli import main
from offbeat.run.orders import Order
from offbeat.watching import text
from offbeat.watching.following import about
from offbeat.watching.hub import Hub
from offbeat.watching.source import Source
from offbeat.watching.summary import view
from offbeat.watching.text import draw_run, draw_runs, is_over, merge, show, spark


def drawn(what: Any, width: int = 100, height: int = 40) -> str:
    console = Console(width=width, height=height, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def a_view(workers: int, **more: Any) -> dict[str, Any]:
    gathered = gathered_from([*a_run(workers, 50), *more.pop("events", ())], workers=workers)
    described = {
        "config": {"recipe": "toy", "workers": workers, "servers": 2, "discipline": "sync"}
    }
    return {
        **view(gathered, 0),
        "about": about(Path("runs/one"), {**described, "metric": "accuracy"}),
        **more,
    }


def test_a_run_on_a_screen() -> None:
    restart = phase("restart", 8.0, role="worker", index=1, reason="was killed by SIGKILL")
    found = drawn(draw_run(a_view(2, events=[restart]), 100, 40))
    for words in (
        *("toy: sync, 2 workers, 2 servers", "running", "gradients 100", "loss 0.02"),
        *("worker 0", "at work", "50 of 100", "was killed by SIGKILL", "restarts 1"),
    ):
        assert words in found, found
    assert max(map(len, found.splitlines())) <= 100


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 15), (200, 60)])
def test_it_fits_the_screen(width: int, height: int) -> None:
    found = drawn(draw_run(a_view(64), width, height), width, height).splitlines()
    assert len(found) <= max(24, height) and max(map(len, found)) <= width
    assert any("more" in line for line in found)


def test_what_is_new_goes_behind_what_is_known() -> None:
    first = {"fine": {"from": 0, "width_s": 1, "loss": [3, 2, 1]}, "about": "x", "tick": 1}
    later = {"fine": {"from": 2, "width_s": 1, "loss": [0.5, 0.2]}, "tick": 2}
    merged = merge(first, later)
    assert merged["fine"]["loss"] == [3, 2, 0.5, 0.2]
    assert merged["about"] == "x" and merged["tick"] == 2


def test_a_curve_as_high_as_a_line() -> None:
    assert spark([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert spark([None, 5.0, 5.0], 8) == "▁▁" and spark([None], 8) == spark([], 8) == ""
    assert len(spark(list(range(1000)), 48)) <= 48


def test_several_runs_on_a_screen(tmp_path: Path) -> None:
    row = {"status": "running", "gradients": 1200, "gradients_per_s": 30.5, "left_s": 100}
    row["score"] = {"values": [["accuracy", 0.75]]}
    view = {"path": "runs", "runs": {"one": row, "two": {"status": "starting"}}, "grid": None}
    found = drawn(draw_runs(view, 100, 20))
    assert "one" in found and "1,200" in found and "accuracy 0.75" in found and "2 min" in found


# -- without a terminal ----------------------------------------------------------------------------


def test_lines_for_what_happened(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = begin(run_dir)
    write(folder, "engine", phase("start", 1.0), phase("end", 9.0, status="finished", reason=None))
    write(folder, "all", *a_run(2, 50))
    assert main(["watch", "--text", str(run_dir)]) == 0
    out, _ = capfd.readouterr()
    assert out.splitlines()[0].endswith("s: the run is finished")
    assert out.splitlines()[-1].startswith("gradients 100, ") and "\x1b" not in out


class Scripted(Source):
    """Views as they are given."""

    def __init__(self, *views: dict[str, Any]) -> None:
        self.views = views

    def setup(self) -> dict[str, Any]:
        return {"single": None}

    def stream(self, name: str | None, is_over: Callable[[], bool]) -> Iterator[str]:
        yield from map(json.dumps, self.views)

    def lines_of(self, name: str, role: str) -> list[str]:
        return []

    def order(self, name: str, order: Order) -> None: ...

    def close(self) -> None: ...


def test_lines_of_several_runs_when_they_change(capfd: pytest.CaptureFixture[str]) -> None:
    rows = [{"one": {"status": status}} for status in ("starting", "running", "running", "failed")]
    show(Scripted(*({"path": "runs", "grid": None, "runs": row} for row in rows)))
    out, _ = capfd.readouterr()
    assert out.splitlines() == ["one: starting, -", "one: running, -", "one: failed, -"]


def test_the_screen_is_left_when_the_run_is_over(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_run(run_dir, workers=2, gradients=50)
    hub = Hub(run_dir)
    try:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(
            text,
            "Console",
            lambda **more: Console(force_terminal=True, width=90, height=30, **more),
        )
        show(hub)
    finally:
        hub.close()
    out, _ = capfd.readouterr()
    assert "\x1b[?1049h" in out and "\x1b[?1049l" in out, "a screen of its own"
    after = out.rpartition("\x1b[?1049l")[2]
    assert "finished" in after and "worker 1" in after, "what it came to stays"


def test_a_run_is_over_when_all_of_it_is_read() -> None:
    assert not is_over({}) and not is_over({"status": {"status": "running"}})
    assert is_over({"status": {"status": "killed"}, "read": 1})
    assert not is_over({"status": {"status": "finished"}, "read": 0.4})
