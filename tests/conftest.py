"""Fixtures for all tests; among them one that fails a test which leaves something running."""

import gc
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import toy_recipe

from offbeat import Recipe
from offbeat.engines import threads
from offbeat.roles import acceptor, evaluator, master, rounds, run, server, sessions

FRAMEWORK_THREADS = ("pytest_timeout", "pydevd", "tqdm_monitor")

# What a shell runs in its background ignores Ctrl-C, and so would every process that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Runs in this process are over in no time: whoever looks up now and then does so more often here.
for module, name in (
    (evaluator, "POLL_S"),
    (threads, "REFRESH_S"),
    (master, "POLL_S"),
    (run, "REPORT_EVERY_S"),
    (server, "POLL_S"),
    (sessions, "POLL_S"),
    (rounds, "POLL_S"),
    (acceptor, "POLL_S"),
):
    setattr(module, name, getattr(module, name) / 10)


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are the same with and without a GPU, but for those that are about one."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A test must end every thread and close every file that it opened."""
    threads = set(threading.enumerate())
    descriptors = _open_files()
    yield
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (set(threading.enumerate()) - threads):
        for thread in set(threading.enumerate()) - threads:
            thread.join(0.1)
    left = {t for t in set(threading.enumerate()) - threads if t.name not in FRAMEWORK_THREADS}
    assert not left, f"threads left running: {[t.name for t in left]}"
    if _open_files().items() - descriptors.items():
        gc.collect()  # an exception that a test caught may hold on to what it was raised in
    leaked = {d: p for d, p in _open_files().items() if descriptors.get(d) != p}
    assert not leaked, f"files left open: {leaked}"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def recipe() -> Recipe:
    return toy_recipe()


def _open_files() -> dict[str, str]:
    found = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue  # the one that iterdir itself had open
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
            found[descriptor.name] = target
    return found
