"""`offbeat watch` and --watch on the command line: what is refused, and the page beside a run."""

import json
import re
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat import Recipe
from offbeat.bench.report import write_run
from offbeat.cli import main
from offbeat.recipes.callbacks import Callback, End, Steps
from offbeat.run import callbacks
from offbeat.watching.beside import Beside, Watch


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["watch", "no/such/run"], "there is no folder no/such/run"),
        (["watch", "{run}", "--at", "0.0.0.0:0"], "without a token"),
        (["watch", "{run}", "--at", "127.0.0.1:x"], "is no address"),
        (["watch", "{run}", "--tls-cert", "a.pem"], "belong together"),
        (["watch", "--text", "127.0.0.1:9"], "cannot look at"),
        (["train", "--watch-at", "0.0.0.0:0"], "without a token"),
        (["compare", "--watch-at", "0.0.0.0:0"], "without a token"),
        (["launch", "--watch-at", "0.0.0.0:0", "{script}"], "without a token"),
        (["train", "--watch", "--token-file", "no.txt"], "cannot read a token from no.txt"),
        (["launch", "--token-file", "no.txt", "{script}"], "belongs to a cluster"),
        (
            ["role", "ps", "--watch", "--ps", "127.0.0.1:1", "--worker", "127.0.0.1:2"],
            "--watch is for the master",
        ),
    ],
)
def test_what_is_wrong_is_told_in_a_line(
    arguments: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", workers=1, gradients=5)
    (tmp_path / "train.py").write_text("")
    places = {"run": str(tmp_path / "run"), "script": str(tmp_path / "train.py")}
    assert main([argument.format(**places) for argument in arguments]) == 2
    _, err = capsys.readouterr()
    assert why in err and err.count("\n") == 1 and err.startswith("offbeat: error: ")


class Looks(Callback):
    """Reads the page beside its run."""

    def __init__(self, beside: Beside, run_dir: Path) -> None:
        self.beside = beside
        self.run_dir = run_dir
        self.view: dict[str, Any] = {}
        self.page = ""
        self.done = threading.Event()

    def on_step(self, steps: Steps) -> None:
        if not self.view:
            self.page = self.read("").decode()
            with urllib.request.urlopen(f"{self.beside.url}events?run=run", timeout=20) as answer:
                for line in answer:
                    if line.startswith(b"data: "):
                        self.view = json.loads(line[6:])
                        if "status" in self.view:
                            break
            self.done.set()

    def read(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.beside.url}{path}", timeout=20) as answer:
            found: bytes = answer.read()
            return found

    def on_end(self, end: End) -> None:
        self.done.set()


def test_a_page_beside_a_run(
    run_dir: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a process of its own, is there while the run goes on, and gone behind it."""
    monkeypatch.setattr(callbacks, "TELL_EVERY_S", 0.05)
    with Beside("127.0.0.1:0", []) as beside:
        looks = Looks(beside, run_dir)
        offbeat.train(
            recipe,
            engine="inproc",
            run_dir=str(run_dir),
            quiet=True,
            eval_every=0,
            steps=30,
            slow_worker="1:100x",
            callbacks=[Watch(beside), looks],
        )
        assert looks.page.startswith("<!doctype html>")
        assert looks.view["about"]["name"] == "run"
        assert beside._process is None
        with pytest.raises(OSError, match="refused"):
            looks.read("")


@pytest.mark.slow
def test_the_command_has_a_page_beside_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--recipe", "toy:recipe", "--steps", "20", "--quiet", "--run-dir"]
    assert main(["train", "--watch", *arguments, str(tmp_path / "run")]) == 0
    assert re.search(r"watch it at http://127\.0\.0\.1:\d+/", capfd.readouterr().err)
    grid = ["--disciplines", "sync", "--workers", "1", "--seeds", "1", "--recipe", "toy:recipe"]
    out = ["--out", str(tmp_path / "grid"), "--quiet", "--steps", "10"]
    assert main(["compare", "--watch", *grid, *out]) == 0
    assert re.search(r"watch it at http://127\.0\.0\.1:\d+/", capfd.readouterr().err)
