"""What is written for TensorBoard, read back with TensorBoard's own reader."""

import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cross_entropy, toy_data, toy_job, toy_recipe
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional as F

import offbeat
from offbeat.api import resume
from offbeat.errors import ConfigError, RoleError
from offbeat.run.rundir import RunFolder
from offbeat.run.tensorboard import EventFile, StepSummaries, Summaries

PARAMETERS = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
LEAVES = ["0", "1", "2", "3"]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))


def train(recipe: offbeat.Recipe, run_dir: Path, **options: Any) -> offbeat.Result:
    given = {"run_dir": run_dir, "quiet": True, "threads": 1, "engine": "inproc", **options}
    return offbeat.train(recipe, **given)


def read(run_dir: Path) -> EventAccumulator:
    everything = {"scalars": 0, "histograms": 0}
    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance=everything)
    return found.Reload()


def points(found: EventAccumulator, tag: str) -> dict[int, float]:
    return {point.step: point.value for point in found.Scalars(tag)}


def make_file(run_dir: Path) -> tuple[EventFile, logging.Logger]:
    folder = RunFolder(run_dir)
    folder.logs.mkdir(parents=True)
    log = folder.open_log("master")
    return EventFile(folder, log), log


def log_of(run_dir: Path) -> str:
    return (run_dir / "logs" / "master.log").read_text()


# -- a run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("discipline", ["sync", "lock-free"])
def test_everything_is_there(run_dir: Path, discipline: str) -> None:
    recipe = toy_recipe(model, schedule=offbeat.cosine(warmup=5, final=0.1))
    options = {"discipline": discipline, "workers": 2, "servers": 2, "steps": 60}
    train(recipe, run_dir, tensorboard=True, eval_every=20, **options)
    found = read(run_dir)
    tags = found.Tags()
    shown = [f"parameters/{name}" for name in PARAMETERS]
    shown += [f"gradients/{name}" for name in PARAMETERS]
    shown += [f"activations/{name}" for name in LEAVES]
    assert set(tags["histograms"]) == {"staleness", *shown}
    scalars = {"loss", "learning_rate", "gradients_per_s", "test/accuracy", "test/loss"}
    assert set(tags["scalars"]) == scalars | {f"sparsity/{tag}" for tag in shown}

    total = 60 if discipline == "sync" else 120
    loss = points(found, "loss")
    assert len(loss) >= 6, "at least every ten steps"
    assert min(loss) < 20 and all(version < total for version in loss)
    assert all(0 < value < 10 for value in loss.values())
    rates = points(found, "learning_rate")
    assert 0 in rates and total in rates
    for version, rate in rates.items():
        expected = 0.1 * recipe.schedule(min(version, total - 1), total)
        assert rate == pytest.approx(expected), version
    assert all(0 < rate < math.inf for rate in points(found, "gradients_per_s").values())
    accuracy = points(found, "test/accuracy")
    assert total in accuracy and 0.5 < accuracy[total] <= 1

    staleness = found.Histograms("staleness")[-1]
    assert staleness.step == total
    assert 0 < staleness.histogram_value.num <= 2 * 256
    assert (staleness.histogram_value.max == 0) == (discipline == "sync")
    weights = found.Histograms("parameters/0.weight")
    assert len(weights) >= 3, "at every multiple of eval_every that was passed"
    assert all(point.histogram_value.num == 42 for point in weights)
    sparsity = points(found, "sparsity/activations/2").values()
    assert all(0 < value < 1 for value in sparsity), "a ReLU"
    assert set(points(found, "sparsity/parameters/0.weight").values()) == {0.0}
    assert "Linear" in str(found.Graph())
    assert "without" not in log_of(run_dir)


def test_nothing_is_written_unless_asked_for(run_dir: Path) -> None:
    train(toy_recipe(), run_dir, workers=1, steps=3)
    assert not (run_dir / "tensorboard").exists()


class Noisy(nn.Module):
    """Draws from torch's own generator, also when it is evaluated, and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs) + self.relu(F.dropout(self.net[0](inputs), training=True))[:, :3]


@pytest.mark.parametrize(("make", "workers"), [(model, 2), (Noisy, 1)])
def test_training_is_the_same_to_the_bit(tmp_path: Path, make: Any, workers: int) -> None:
    data = (toy_data(), None)  # an evaluator would draw from the same generator
    recipe = toy_recipe(make, optimizer=offbeat.SGD(lr=0.1, momentum=0.9), data=lambda _: data)
    states = []
    for tensorboard in (False, True):
        torch.manual_seed(1)
        result = train(
            recipe,
            tmp_path / str(tensorboard),
            discipline="sync",
            workers=workers,
            steps=30,
            eval_every=10,
            tensorboard=tensorboard,
        )
        states.append(result.state_dict())
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_a_missing_package_is_said_before_anything_is_begun(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(toy_recipe(), run_dir, workers=1, steps=3)
    before = (run_dir / "config.json").read_text()
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    other = run_dir.with_name("other")
    with pytest.raises(ConfigError, match=r"pip install 'offbeat\[tensorboard\]'") as caught:
        train(toy_recipe(), other, tensorboard=True)
    assert "\n" not in str(caught.value)
    assert not other.exists()
    with pytest.raises(ConfigError, match="pip install"):
        resume(run_dir, tensorboard=True, steps=6)
    assert (run_dir / "config.json").read_text() == before


class Scores:
    def __init__(self, values: Tensor) -> None:
        self.values = values


class Untraceable(nn.Module):
    """Traced functions can return tensors only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Scores:
        return Scores(self.layer(inputs))


class Named(nn.Linear):
    def forward(self, *, inputs: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(inputs)


@pytest.mark.parametrize(
    ("make", "loss", "reason"),
    [
        (Untraceable, lambda m, b: F.cross_entropy(m(b[0]).values, b[1]), "RuntimeError"),
        (lambda: Named(6, 3), lambda m, b: F.cross_entropy(m(inputs=b[0]), b[1]), "keywords"),
    ],
)
def test_a_model_that_cannot_be_traced_trains_without_a_graph(
    run_dir: Path, capsys: pytest.CaptureFixture[str], make: Any, loss: Any, reason: str
) -> None:
    recipe = toy_recipe(make, loss=loss, metric=lambda m, b: (1.0, 2.0))
    train(recipe, run_dir, workers=1, steps=5, tensorboard=True)
    found = read(run_dir)
    assert not found.Tags()["graph"]
    assert points(found, "test/metric") == {5: 0.5}
    assert list(points(found, "test/loss")) == [5]
    lines = [line for line in log_of(run_dir).splitlines() if "without the graph" in line]
    assert len(lines) == 1 and "WARNING" in lines[0] and reason in lines[0]
    assert capsys.readouterr().out == ""


def test_the_file_of_a_run_that_fails_is_whole(run_dir: Path) -> None:
    def loss(module: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) > 15:
            raise ValueError("enough")
        return cross_entropy(module, batch)

    calls: list[int] = []
    with pytest.raises(RoleError, match="enough"):
        train(toy_recipe(model, loss=loss), run_dir, workers=1, steps=50, tensorboard=True)
    assert sorted(points(read(run_dir), "loss")) == [0, 10]


# -- the parts -------------------------------------------------------------------------------------


def test_the_masters_looks_are_shown_once_a_second_and_at_the_end(run_dir: Path) -> None:
    job = toy_job(discipline="sync", workers=3, steps=100, eval_every=10, tensorboard=True)
    _, log = make_file(run_dir)
    now_s = [5.0]
    summaries = Summaries(job, RunFolder(run_dir), log, lambda: now_s[0])
    for at_s, version in [(5, 0), (5.5, 20), (7, 20), (8.5, 21), (9, 28), (10, 31), (11, 33)]:
        now_s[0] = at_s
        summaries.watch(version, [1, 2, 5])
    summaries.close()
    summaries.scored(33, {"accuracy": 0.5})  # too late: the file must stay closed
    log.handlers[0].close()
    found = read(run_dir)
    assert points(found, "learning_rate").keys() == {0, 20, 31, 33}
    assert points(found, "gradients_per_s") == pytest.approx({20: 30.0, 31: 11.0, 33: 6.0})
    assert found.Histograms("staleness")[0].histogram_value.num == 3
    assert found.Histograms("staleness")[0].histogram_value.max == 5
    assert "test/accuracy" not in found.Tags()["scalars"]


def test_an_rnn_a_shared_module_and_one_without_gradient(run_dir: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recur = nn.GRU(3, 4, batch_first=True)
            self.out = nn.Linear(4, 3)
            self.act = nn.ReLU(inplace=True)
            self.unused = nn.Linear(2, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.act(self.recur(inputs.view(-1, 2, 3))[0][:, -1])
            return self.act(self.out(hidden))

    job = toy_job(toy_recipe(Odd), tensorboard=True, eval_every=7)
    file, log = make_file(run_dir)
    summaries, flat = StepSummaries(job, file), job.make_model()
    _, batch = next(job.batches(0))
    for version in (3, 4, 8, 2):  # back to 2: a server was started anew
        with summaries.watching(flat.module, version):
            cross_entropy(flat.module, batch).backward()
        summaries.computed(flat, version, lambda: 1.0)
        assert not any(part._forward_hooks for part in flat.module.modules())
    file.close()
    log.handlers[0].close()
    found = read(run_dir)
    histograms = {tag for tag in found.Tags()["histograms"] if tag.startswith("activations")}
    assert histograms == {"activations/recur", "activations/out", "activations/act"}
    assert [h.step for h in found.Histograms("activations/act")] == [3, 8, 2]
    out = found.Histograms("activations/out")[0].histogram_value
    assert out.min < 0, "as it was before the next module changed it in place"
    assert "gradients/out.weight" in found.Tags()["histograms"]
    assert "gradients/unused.weight" not in found.Tags()["histograms"]
    assert points(found, "sparsity/activations/recur")[3] == 0


def test_tensors_of_all_kinds(run_dir: Path) -> None:
    file, log = make_file(run_dir)
    file.tensor("half", torch.tensor([0.0, 1.0, 2.0, 0.0], dtype=torch.bfloat16), 1)
    file.tensor("bad", torch.tensor([math.nan, math.inf, 3.0, 0.0]), 1)
    file.tensor("worse", torch.tensor([math.nan]), 1)
    file.tensor("empty", torch.zeros(0), 1)
    file.tensor("sparse", torch.eye(3).to_sparse(), 1)
    file.close()
    log.handlers[0].close()
    found = read(run_dir)
    assert set(found.Tags()["histograms"]) == {"half", "bad", "sparse"}
    assert found.Histograms("bad")[0].histogram_value.num == 2
    assert points(found, "sparsity/half") == {1: 0.5}
    assert points(found, "sparsity/bad") == {1: 0.25}
    assert points(found, "sparsity/sparse") == pytest.approx({1: 2 / 3})
    assert "without" not in log_of(run_dir)


@pytest.mark.slow
def test_the_processes_of_a_run_write_the_same(run_dir: Path) -> None:
    options = {"engine": "local", "workers": 2, "steps": 30, "eval_every": 20}
    offbeat.train("fashion-cnn", run_dir=run_dir, quiet=True, tensorboard=True, **options)
    found = read(run_dir)
    scalars = {"loss", "learning_rate", "gradients_per_s", "test/accuracy", "test/loss"}
    assert scalars <= set(found.Tags()["scalars"])
    assert {"staleness"} < set(found.Tags()["histograms"])
    assert found.Tags()["graph"]
    assert len(list((run_dir / "tensorboard").iterdir())) == 2, "the master's and the evaluator's"
