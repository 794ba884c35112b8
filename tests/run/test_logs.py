"""A role's log stays small, whatever is said in it again and again."""

from pathlib import Path

import pytest

from offbeat.run.rundir import ALWAYS, RunFolder, close_log


@pytest.fixture
def log_lines(tmp_path: Path) -> list[str]:
    """The lines of a log in which one thing is said 20,000 times, and another one three times."""
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    log = folder.open_log("ps-0")
    for number in range(20_000):
        log.warning("refused the gradient of worker %d (batch %d)", number % 3, number)
        if number % 9_000 == 0:
            log.info("committed %s", number)
    close_log(log)
    return (folder.logs / "ps-0.log").read_text().splitlines()


def test_what_is_said_too_often_is_left_out_and_counted(log_lines: list[str]) -> None:
    refused = [line for line in log_lines if "refused" in line]
    assert len(refused) == ALWAYS + 4  # 2,000, 4,000, 8,000, 16,000
    assert refused[ALWAYS - 1].endswith(f"(batch {ALWAYS - 1})")
    assert refused[-1].endswith("(batch 15999) (said 16,000 times; most are left out)")


def test_something_else_is_said_all_the_same(log_lines: list[str]) -> None:
    assert [line.split()[-1] for line in log_lines if "committed" in line] == ["0", "9000", "18000"]


def test_texts_that_are_all_different_are_counted_together(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    log = folder.open_log("worker-1")
    for number in range(5_000):
        log.warning(f"something about {number}")
    log.error("%s", ValueError("and this"))
    close_log(log)
    lines = (folder.logs / "worker-1.log").read_text().splitlines()
    assert len(lines) == ALWAYS + 2 + 1
    assert lines[-1].endswith("and this")
