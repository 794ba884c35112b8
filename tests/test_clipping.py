"""Clipped gradients: the bits of torch's own functions in a plain loop, whoever clips them."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import batches_of, cross_entropy, make_plain_optimizer, toy_data, toy_job, toy_recipe
from recording import Pretender
from torch import nn

import offbeat
from offbeat import SGD, Adam
from offbeat.clipping import Arriving, ClipNorm, ClipValue
from offbeat.errors import RecipeError
from offbeat.flat import FlatModel
from offbeat.report.document import percent
from offbeat.report.write import write_report
from offbeat.roles.norms import Meeting
from offbeat.run.events import read_events
from offbeat.run.job import Job
from offbeat.towers import CPU, Towers

MOMENTUM = SGD(lr=0.1, momentum=0.9)
CLIPS: list[tuple[dict[str, float], Callable[[list[nn.Parameter]], Any]]] = [
    ({"clip_norm": 0.15}, lambda params: nn.utils.clip_grad_norm_(params, 0.15)),
    ({"clip_norm": 1e6}, lambda params: nn.utils.clip_grad_norm_(params, 1e6)),
    ({"clip_value": 0.02}, lambda params: nn.utils.clip_grad_value_(params, 0.02)),
]


class Net(nn.Module):
    """A convolution that lies otherwise in memory, a part that gets no gradient, and many odd
    sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 2).to(memory_format=torch.channels_last)
        self.unused = nn.Linear(3, 3)
        self.layers = nn.Sequential(*(nn.Linear(10, 10) for _ in range(9)))
        self.head = nn.Linear(10, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(self.conv(x.view(-1, 1, 2, 3)).flatten(1)))
        return found


def train(recipe: offbeat.Recipe, run_dir: Path, **options: Any) -> offbeat.Result:
    return offbeat.train(
        recipe, run_dir=run_dir, engine="inproc", quiet=True, threads=1, device="cpu", **options
    )


def plain(job: Job, clip: Callable[[list[nn.Parameter]], Any], *, amp: bool = False) -> nn.Module:
    """A plain loop over the batches of all workers, each step on the mean of their gradients."""
    torch.set_num_threads(1)
    module = job.make_model().module.train()
    params = [p for p in module.parameters() if p.requires_grad]
    optimizer = make_plain_optimizer(job.optimizer, module)
    ranks = range(job.config.workers)
    for batches in zip(*(batches_of(job, rank) for rank in ranks), strict=True):
        found: list[list[torch.Tensor | None]] = []
        for batch in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
                loss = job.recipe.loss(module, batch)
            loss.backward()
            found.append([p.grad for p in params])
        for param, gradients in zip(params, zip(*found, strict=True), strict=True):
            there = [gradient for gradient in gradients if gradient is not None]
            param.grad = sum(there[1:], there[0]) / len(there) if there else None
        clip(params)
        optimizer.step()
    return module


def assert_same(result: offbeat.Result, module: nn.Module) -> None:
    for name, value in module.state_dict().items():
        assert torch.equal(result.state_dict()[name], value), name


@pytest.mark.parametrize("discipline", ["apply-reply", "sync"])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(("options", "clip"), CLIPS)
def test_one_worker_gives_the_bits_of_a_plain_loop(
    run_dir: Path, options: Any, clip: Any, servers: int, discipline: str
) -> None:
    recipe = toy_recipe(Net, SGD(lr=0.1))
    shape = {"workers": 1, "steps": 20}
    result = train(recipe, run_dir, servers=servers, discipline=discipline, **shape, **options)
    assert_same(result, plain(toy_job(recipe, **shape), clip))


@pytest.mark.parametrize(("options", "clip"), CLIPS)
def test_so_does_a_shorter_number_format(run_dir: Path, options: Any, clip: Any) -> None:
    recipe = toy_recipe(Net, Adam(lr=0.01))
    shape = {"workers": 1, "steps": 10}
    result = train(recipe, run_dir, amp="bf16", **shape, **options)
    assert_same(result, plain(toy_job(recipe, **shape), clip, amp=True))


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(("options", "clip"), CLIPS)
def test_in_sync_the_mean_of_a_round_is_clipped(
    run_dir: Path, options: Any, clip: Any, servers: int
) -> None:
    recipe = toy_recipe(Net, MOMENTUM)
    shape = {"workers": 2, "steps": 12}
    more = {"discipline": "sync", "servers": servers, "partition": "tensors"}
    result = train(recipe, run_dir, **more, **shape, **options)
    assert_same(result, plain(toy_job(recipe, **shape), clip))


def test_tensors_that_are_cut_change_the_norm_by_rounding_alone(run_dir: Path) -> None:
    recipe = toy_recipe(Net, MOMENTUM)
    shape = {"workers": 3, "steps": 12}
    result = train(recipe, run_dir, discipline="sync", servers=3, clip_norm=0.15, **shape)
    expected = plain(toy_job(recipe, **shape), CLIPS[0][1]).state_dict()
    for name, value in result.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)
    norms: dict[int, set[float]] = {}
    for event in read_events(result.run_dir / "events"):
        if event["kind"] == "push":
            norms.setdefault(event["version"], set()).add(event["norm"])
    assert len(norms) == 12 and all(len(found) == 1 for found in norms.values())
    assert 0 < (result.summary["clipped"] or 0) < 1


def test_a_gradient_that_was_clipped_is_the_workers_own_still() -> None:
    gradient = torch.tensor([3.0, 4.0])
    out = torch.empty(2)
    norm = ClipNorm(1.0, [1, 1])(gradient, out)
    assert norm is not None and Arriving(norm).value() == 5.0
    torch.testing.assert_close(out, torch.tensor([0.6, 0.8]))
    assert gradient.tolist() == [3.0, 4.0]
    assert ClipValue(3.5)(gradient, out) is None and out.tolist() == [3.0, 3.5]


def gradients(towers: Towers, num_steps: int) -> list[tuple[torch.Tensor, float | None]]:
    """What towers hand over for the same batches, with the norm that it had."""
    found = []
    inputs, labels = toy_data(180)
    for step in range(num_steps):
        batch = (inputs[step * 20 : step * 20 + 20], labels[step * 20 : step * 20 + 20])
        towers.compute(cross_entropy, towers.deal(batch))
        slots = [torch.zeros(30), torch.zeros(towers.landing.numel() - 30)]
        towers.take_gradient(slots)
        loss, is_usable = towers.wait()
        assert is_usable and loss > 0
        found.append((torch.cat(slots), towers.norm))
    return found


@pytest.mark.parametrize("count", [1, 3])
def test_it_makes_no_difference_whether_a_step_is_replayed(count: int) -> None:
    job = toy_job(toy_recipe(Net))
    clip = ClipNorm(0.1, [spec.numel for spec in job.manifest.tensors])
    pretenders = [Pretender() for _ in range(count)]
    recorders = iter(pretenders)
    eager = Towers(job.make_replicas(count), [CPU] * count, clip=clip)
    replayed = Towers(
        job.make_replicas(count), [CPU] * count, make_recorder=lambda d: next(recorders), clip=clip
    )
    unclipped = Towers(job.make_replicas(count), [CPU] * count)
    found = [gradients(towers, 6) for towers in (eager, replayed, unclipped)]
    assert all(pretender.num_replayed for pretender in pretenders)
    for (clipped, norm), (same, same_norm), (whole, _) in zip(*found, strict=True):
        assert torch.equal(clipped, same) and norm == same_norm
        torch.testing.assert_close(norm, whole.norm().item())
        torch.testing.assert_close(clipped.norm().item(), min(0.1, norm or 0.0), rtol=1e-4, atol=0)


def norms_of(result: offbeat.Result, kind: str) -> list[float]:
    events = read_events(result.run_dir / "events")
    return [event["norm"] for event in events if event["kind"] == kind and "norm" in event]


def test_norms_are_written_down_and_the_clipped_ones_counted(tmp_path: Path) -> None:
    recipe = toy_recipe(Net)
    alone = train(recipe, tmp_path / "alone", workers=1, servers=2, steps=20, clip_norm=0.25)
    norms = norms_of(alone, "step")
    share = sum(norm > 0.25 for norm in norms) / 20
    assert len(norms) == 20 and not norms_of(alone, "push") and 0 < share < 1
    assert alone.summary["clipped"] == share
    report = write_report([alone.run_dir], tmp_path)[1].read_text()
    assert f"| gradients with a norm above 0.25, clipped | {percent(share)} |" in report
    rounds = train(recipe, tmp_path / "r", workers=2, steps=9, clip_norm=0.25, discipline="sync")
    norms = norms_of(rounds, "push")
    assert len(norms) == 18 and len(set(norms)) == 9 and not norms_of(rounds, "step")
    assert rounds.summary["clipped"] == sum(norm > 0.25 for norm in norms) / 18


def test_a_recipe_suggests_a_norm_and_a_flag_says_otherwise(tmp_path: Path) -> None:
    recipe = toy_recipe(clip_norm=0.5)
    assert toy_job(recipe).config.clip_norm == 0.5
    assert toy_job(recipe, clip_norm=2).config.clip_norm == 2
    assert toy_job(recipe, clip_value=2).config.clip_norm is None
    result = train(recipe, tmp_path / "r", discipline="sync", servers=2, steps=3, clip_norm="inf")
    assert result.summary["clipped"] is None and not norms_of(result, "push")
    with pytest.raises(RecipeError, match="clip_norm must be above 0 and finite, not 0"):
        toy_recipe(clip_norm=0)


def test_a_run_that_goes_on_may_clip_in_another_way(tmp_path: Path) -> None:
    recipe = toy_recipe()
    train(recipe, tmp_path / "r", workers=1, steps=3, clip_norm=0.5)
    result = offbeat.resume(tmp_path / "r", recipe, steps=6, clip_value=0.1)
    assert len(norms_of(result, "step")) == 3
    result = offbeat.resume(tmp_path / "r", recipe, steps=9, clip_norm="inf")
    assert result.summary["clipped"] == 0 and report_of(result)


def report_of(result: offbeat.Result) -> str:
    return write_report([result.run_dir], result.run_dir)[1].read_text()


def test_without_it_nobody_asks_for_a_norm(run_dir: Path) -> None:
    result = train(toy_recipe(), run_dir, steps=5, clip_value=1.0)
    assert result.summary["clipped"] is None
    assert not norms_of(result, "step") and not norms_of(result, "push")


@pytest.mark.parametrize("options", [{"clip_norm": 1.0}, {"clip_value": 1.0}])
def test_what_is_no_usable_gradient_is_refused_as_ever(
    run_dir: Path, options: dict[str, float]
) -> None:
    """Clipped, one that is too large would be zero, or all ones."""
    calls = itertools.count()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        found = cross_entropy(model, batch)
        return found + (model[0].weight.sum() * 1e20 if next(calls) == 3 else 0.0)  # type: ignore

    result = train(toy_recipe(loss=loss), run_dir, workers=1, steps=8, **options)
    assert result.summary["rejected"] == 1 and result.summary["kept"][0]["applied"] == 7


def test_an_embedding_with_sparse_gradients_is_clipped_as_a_dense_one() -> None:
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = FlatModel(nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 3)))
        clip = ClipNorm(0.1, [spec.numel for spec in model.manifest.tensors])
        towers = Towers([model], [CPU], clip=clip)
        batch = (torch.tensor([1, 1, 5]), torch.tensor([0, 1, 2]))
        towers.compute(cross_entropy, towers.deal(batch))
        slot = torch.zeros_like(towers.landing)
        towers.take_gradient([slot])
        towers.wait()
        found.append(slot)
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"backup_workers": 1}, {"round_timeout": 0.05}])
def test_servers_stay_in_step_when_a_worker_comes_back(run_dir: Path, options: Any) -> None:
    given = {"discipline": "sync", "workers": 3, "servers": 2, "steps": 200, "clip_norm": 0.1}
    result = offbeat.train(
        "toy:recipe",
        run_dir=run_dir,
        engine="local",
        quiet=True,
        device="cpu",
        kill_worker="1@30",
        **given,
        **options,
    )
    norms: dict[int, dict[int, set[float]]] = {}
    for event in read_events(result.run_dir / "events"):
        if event["kind"] == "push" and event["version"] is not None:
            of_version = norms.setdefault(event["version"], {})
            of_version.setdefault(event["shard"], set()).add(event["norm"])
    assert all(len(found) == 2 for found in norms.values())
    assert all(len(set().union(*found.values())) == 1 for found in norms.values())
    assert result.summary["total_time_s"] < 25, "nobody waits for --worker-timeout"


def test_a_run_whose_norms_cannot_be_joined_ends_with_what_failed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no norm today")

    monkeypatch.setattr(Meeting, "look", fail)
    with pytest.raises(offbeat.OffbeatError, match="no norm today"):
        train(toy_recipe(), run_dir, discipline="sync", workers=2, servers=2, clip_norm=0.1)


@pytest.mark.parametrize("discipline", ["rennala:3", "buffer:3"])
def test_where_gradients_are_gathered_each_is_clipped_by_its_worker(
    run_dir: Path, discipline: str
) -> None:
    """Two servers do not have the same ones in an update, so that no norm is that of the whole."""
    shape: dict[str, Any] = {"discipline": discipline, "workers": 2, "servers": 2}
    job = toy_job(clip_norm=0.1, **shape)
    shard = job.make_shard(0)
    assert (shard.clip, shard.joint_clip, job.joins_norms) == (None, None, False)
    result = train(toy_recipe(), run_dir, clip_norm=0.1, **shape)
    assert 0 < (result.summary["clipped"] or 0) <= 1
