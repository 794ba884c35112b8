"""What scripts call, outside of any run."""

import json
import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader

import offbeat
from offbeat.config import make_config
from offbeat.errors import ConfigError
from offbeat.loops import seat
from offbeat.loops.description import Description, describe_loop, options_of
from offbeat.loops.job import make_loop_job, resolved
from offbeat.loops.running import execute
from offbeat.loops.sampler import Sampler
from offbeat.loops.scores import Told, read_values
from offbeat.loops.summaries import LoopSummaries
from offbeat.optim import numbers_of, with_numbers
from offbeat.recipes.metrics import direction_by_name
from offbeat.run.events import EventLog
from offbeat.run.rundir import RunFolder


def test_outside_of_a_run_the_optimizer_is_what_it_was() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    assert offbeat.distribute(model, optimizer) is optimizer
    assert type(optimizer) is torch.optim.Adam
    assert (offbeat.rank(), offbeat.world_size(), offbeat.is_master()) == (0, 1, True)
    assert offbeat.seed() == 0
    offbeat.log(loss=torch.ones(1, requires_grad=True), accuracy=torch.tensor(1.0))
    for value in ("much", None, torch.ones(2)):
        with pytest.raises(ConfigError, match="takes numbers: accuracy is a"):
            offbeat.log(accuracy=value)
    with pytest.raises(ConfigError, match="a score's name must be made of letters"):
        offbeat.log(**{"a\nb": 1.0})


def test_outside_of_a_run_a_state_is_its_values() -> None:
    state = offbeat.State(epoch=0, best=None)
    state.keep(epoch=3)
    assert (state.epoch, state.best) == (3, None)
    with pytest.raises(AttributeError, match="has no 'worst'"):
        _ = state.worst
    with pytest.raises(ConfigError, match="name it where State is made"):
        state.keep(worst=1)


OPTIMIZERS = [
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.NAdam,
]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_description_comes_back_from_its_file(kind: type, tmp_path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    groups = [{"params": [model[0].weight]}, {"params": [model[0].bias], "lr": 0.5}]
    made = describe_loop(model, kind(groups, lr=torch.tensor(0.25)))
    folder = RunFolder(tmp_path)
    made.write(folder)
    found = Description.read(folder)
    assert found == made
    assert [member.options["lr"] for member in found.optimizer.members] == [0.25, 0.5]
    names = [spec.name for spec in found.manifest.tensors]
    assert [found.optimizer.by_name.get(name) for name in names] == [0, 1, None, None]


def test_numbers_travel_and_the_rest_stays() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.9), amsgrad=True)
    options = options_of(optimizer, optimizer.param_groups[0])
    numbers = numbers_of(options)
    changed = with_numbers(options, [number / 2 for number in numbers])
    assert changed["lr"] == 0.05 and changed["betas"] == (0.4, 0.45) and changed["amsgrad"] is True
    assert "foreach" not in options and "params" not in options


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, count: int) -> None:
    monkeypatch.setattr("offbeat.loops.sampler.rank", lambda: rank)
    monkeypatch.setattr("offbeat.loops.sampler.world_size", lambda: count)


@pytest.mark.parametrize("shuffle", [True, False])
def test_shares_are_disjoint_and_cover_everything(
    shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = list(range(23))
    seen: list[int] = []
    for rank in range(3):
        as_rank(monkeypatch, rank, 3)
        sampler = Sampler(data, shuffle=shuffle)
        first, second = (torch.cat(list(DataLoader(data, 4, sampler=sampler))) for _ in range(2))
        assert len(sampler) == len(first)
        assert sorted(first.tolist()) == sorted(second.tolist())
        assert torch.equal(first, second) != shuffle
        sampler.set_epoch(0)
        assert list(sampler) == first.tolist()
        seen += first.tolist()
    assert sorted(seen) == data


def test_a_script_is_in_no_group_of_somebody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries look at these variables, and would wait for others."""
    monkeypatch.setattr(sys, "argv", [])
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "script.py"
    file.write_text(
        "import os, sys, pathlib\n"
        "pathlib.Path(sys.argv[1]).write_text(os.environ.get('RANK', 'none'))\n"
    )
    execute({"file": str(file), "arguments": [str(tmp_path / "seen")]})
    assert (tmp_path / "seen").read_text() == "none"


def test_nobody_is_in_a_run_here() -> None:
    assert seat.taken is None


class Lines:
    """A sink of events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, text: str) -> None:
        self.events += [json.loads(line) for line in text.splitlines()]

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_scores_that_are_told_of_one_version_belong_together() -> None:
    sink = Lines()
    events = EventLog(sink)
    shown: list[tuple[int, Mapping[str, float]]] = []
    told = Told(events, lambda: 1.5, lambda version, scores: shown.append((version, scores)))
    told.tell(3, {"top5": 0.9}, None)
    told.tell(3, {"bits": 2.0}, False)
    told.tell(7, {"bits": 1.0, "top5": math.nan}, False)
    events.flush()
    assert [(e["version"], e["scores"]) for e in sink.events] == [
        (3, {"top5": 0.9}),
        (3, {"top5": 0.9, "bits": 2.0}),
        (7, {"top5": None, "bits": 1.0}),
    ]
    ways = [e["higher_is_better"] for e in sink.events]
    assert ways == [{"top5": None}, {"bits": False}, {"bits": False, "top5": False}]
    assert told.latest is not None and list(told.latest[1]) == ["top5", "bits"]
    assert shown[1] == (3, {"bits": 2.0})


def test_the_loss_on_the_test_data_is_not_that_of_the_next_step() -> None:
    assert read_values({"loss": 1, "test_loss": 2, "accuracy": 0.5}) == (
        1.0,
        {"loss": 2.0, "accuracy": 0.5},
    )
    assert read_values({"test_accuracy": 0.5}) == (None, {"accuracy": 0.5})


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *(("accuracy", True), ("val_accuracy", True), ("top-5 Accuracy", True)),
        *(("loss", False), ("val_loss", False), ("error", False), ("top1.error", False)),
        *(("bits", None), ("glossary", None), ("accuracy loss", None)),
    ],
)
def test_a_name_may_say_what_is_better(name: str, most: bool | None) -> None:
    assert direction_by_name(name) is most


def test_tensorboard_shows_the_rate_that_the_script_has_come_to(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    job = make_loop_job(
        resolved(make_config({"tensorboard": True})), describe_loop(model, optimizer)
    )
    log = logging.getLogger("test")
    groups = optimizer.param_groups
    summaries = LoopSummaries(job, RunFolder(tmp_path), log, lambda: 0.0, groups)
    groups[0]["lr"] = 3
    summaries.watch(7, [0])
    summaries.close()
    (point,) = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("learning_rate")
    assert (point.step, point.value) == (7, 3)
