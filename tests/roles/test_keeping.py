"""What a worker keeps of its own: on the disk, and what becomes of a file that was damaged."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from offbeat.roles import keeping
from offbeat.roles.keeping import Keeper


class Lines(logging.Handler):
    """A log that a test can read."""

    def __init__(self) -> None:
        super().__init__()
        self.log = logging.Logger("worker-1")
        self.log.addHandler(self)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture
def lines() -> Lines:
    return Lines()


def tensors(step: int, size: int = 5) -> dict[str, Tensor]:
    whole = torch.arange(2 * size, dtype=torch.float32) + step
    return {
        "part": whole[: size + 1],
        "rest": whole[size:],
        "number": torch.tensor(float(step)),
        "halves": torch.full((2, 3), step, dtype=torch.bfloat16),
        "none": torch.empty(0, dtype=torch.int64),
    }


def assert_is(found: Any, step: int) -> None:
    assert found is not None
    kept, numbers = found
    assert numbers == {"position": 10 * step, "rate": 0.1 * step}
    expected = tensors(step)
    assert kept.keys() == expected.keys()
    for name, tensor in expected.items():
        assert kept[name].dtype == tensor.dtype
        assert torch.equal(kept[name], tensor), name


def save(keeper: Keeper, step: int) -> None:
    keeper.save(step, tensors(step), {"position": 10 * step, "rate": 0.1 * step})


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_another_life_finds_every_step_as_it_was(tmp_path: Path, lines: Lines) -> None:
    folder = tmp_path / "states" / "worker-1"
    first = Keeper(folder, False, lines.log)
    assert first.load(0) is None
    assert not folder.exists(), "nothing is made for a worker that keeps nothing"
    for step in (1, 2, 3):
        save(first, step)
    assert files(folder) == [f"kept-{step:08d}.safetensors" for step in (1, 2, 3)]
    second = Keeper(folder, False, lines.log)
    for step in (3, 1, 2):
        assert_is(second.load(step), step)
    assert lines.said == []
    assert second.load(4) is None
    assert lines.said == [
        "what this worker keeps begins anew after step 4: nothing was kept of it here"
    ]


def test_what_is_given_may_change_afterwards(tmp_path: Path, lines: Lines) -> None:
    keeper, given = Keeper(tmp_path, False, lines.log), tensors(1)
    keeper.save(1, given, {"position": 10, "rate": 0.1})
    for tensor in given.values():
        tensor.zero_()
    assert_is(keeper.load(1), 1)


def test_the_newest_stay_as_long_as_there_is_room(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Keeper(tmp_path, False, lines.log)
    save(one, 1)
    size = (tmp_path / files(tmp_path)[0]).stat().st_size
    monkeypatch.setattr(keeping, "MOST_BYTES", 4 * size + 100)
    for step in range(2, 8):
        save(one, step)
    assert len(files(tmp_path)) == 4
    save(Keeper(tmp_path, False, lines.log), 8)
    assert [one.load(step) is not None for step in (4, 5)] == [False, True], "also of another life"
    monkeypatch.setattr(keeping, "MOST_BYTES", 0)
    save(one, 9)
    assert files(tmp_path)[-2:] == ["kept-00000008.safetensors", "kept-00000009.safetensors"]
    monkeypatch.setattr(keeping, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(keeping, "MOST_KEPT", 3)
    for step in range(10, 20):
        save(one, step)
    assert [one.load(step) is not None for step in (16, 17)] == [False, True]


def test_who_goes_back_has_no_future(tmp_path: Path, lines: Lines) -> None:
    """A run that goes on from an older checkpoint pushes other gradients from there on."""
    for step in range(1, 9):
        save(Keeper(tmp_path, False, lines.log), step)
    again = Keeper(tmp_path, False, lines.log)
    assert_is(again.load(5), 5)
    save(again, 6)
    assert files(tmp_path)[-1] == "kept-00000006.safetensors"
    assert len(files(tmp_path)) == 6


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "empty": lambda path: path.write_bytes(b""),
    "another byte": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x55"),
    "of another step": lambda path: path.write_bytes(
        path.with_name("kept-00000001.safetensors").read_bytes()
    ),
    "of somebody else": lambda path: save_file({"a": torch.ones(3)}, path),
    "a large length": lambda path: path.write_bytes(b"\xff" * 64),
    "numbers that are none": lambda path: save_file(
        {"a": torch.ones(3)},
        path,
        {
            "step": "2",
            "crc32": str(keeping._checksum({"a": torch.ones(3)})),
            "numbers": '{"position": "rm"}',
        },
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_or_foreign_file_is_passed_over(tmp_path: Path, lines: Lines, name: str) -> None:
    for step in (1, 2, 3):
        save(Keeper(tmp_path, False, lines.log), step)
    DAMAGES[name](tmp_path / "kept-00000002.safetensors")
    keeper = Keeper(tmp_path, False, lines.log)
    assert keeper.load(2) is None
    (line,) = lines.said
    assert "begins anew after step 2: what was kept is damaged, or no file of this run" in line
    assert_is(keeper.load(3), 3)
    save(keeper, 4)


def test_what_lies_beside_it_is_let_alone(tmp_path: Path, lines: Lines) -> None:
    """A launched script's own state, and what was being written when a worker was killed."""
    names = ["00000001.json", "00000001.safetensors", ".kept-00000002.safetensors", "kept-x"]
    for name in names:
        (tmp_path / name).write_text("somebody's")
    keeper = Keeper(tmp_path, False, lines.log)
    assert keeper.load(1) is None
    save(keeper, 1)
    save(keeper, 2)
    Keeper(tmp_path, True, lines.log)
    left = [name for name in names if not name.startswith(".")]
    assert files(tmp_path) == sorted(left)


def test_fresh_means_anew_for_every_life_to_come(tmp_path: Path, lines: Lines) -> None:
    save(Keeper(tmp_path, False, lines.log), 1)
    fresh = Keeper(tmp_path, True, lines.log)
    save(fresh, 2)
    assert fresh.load(1) is None
    assert lines.said == ["what this worker keeps begins anew after step 1: --fresh-worker-state"]
    assert files(tmp_path) == []
    assert Keeper(tmp_path, False, lines.log).load(1) is None


def test_without_a_folder_nothing_is_kept(lines: Lines) -> None:
    keeper = Keeper(None, False, lines.log)
    save(keeper, 1)
    assert keeper.load(1) is None
    assert len(lines.said) == 1


def test_a_disk_that_takes_nothing_is_told_once(tmp_path: Path, lines: Lines) -> None:
    """Training goes on, and what was there of this step is not taken for it."""
    folder = tmp_path / "states"
    folder.write_text("a file")
    keeper = Keeper(folder, False, lines.log)
    save(keeper, 1)
    save(keeper, 2)
    (line,) = lines.said
    assert line.startswith("cannot keep the state of step 1: ")
    assert keeper.load(1) is None
