"""Steps of several batches: as of one that is so many times as large, whoever computes them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DROPPING, Spiced, cross_entropy, toy_data, toy_job, toy_recipe
from recording import Pretender
from torch import Tensor, nn

import offbeat
from offbeat import SGD
from offbeat.config import DISCIPLINES
from offbeat.data.batches import grouped
from offbeat.errors import NonFiniteLossError
from offbeat.run.events import read_events
from offbeat.towers import CPU, Towers


def train(run_dir: Path, recipe: offbeat.Recipe | None = None, **options: Any) -> offbeat.Result:
    shape = {"workers": 1, "device": "cpu", **options}
    if "devices" in shape:
        del shape["device"]
    return offbeat.train(
        recipe or toy_recipe(), run_dir=run_dir, engine="inproc", quiet=True, threads=1, **shape
    )


def assert_close(one: offbeat.Result, other: offbeat.Result) -> None:
    found = other.state_dict()
    for name, value in one.state_dict().items():
        torch.testing.assert_close(found[name], value)


def of_kind(result: offbeat.Result, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(result.run_dir / "events") if event["kind"] == kind]


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("discipline", ["apply-reply", "sync"])
def test_four_batches_of_eight_are_one_of_thirty_two(
    tmp_path: Path, discipline: str, servers: int
) -> None:
    """240 examples: seven steps of 32 and one of 16 an epoch."""
    recipe = toy_recipe(optimizer=SGD(lr=0.1, momentum=0.9), epochs=3)
    shape = {"discipline": discipline, "servers": servers}
    four = train(tmp_path / "4", recipe, batch_size=8, accumulate=4, **shape)
    one = train(tmp_path / "1", recipe, batch_size=32, **shape)
    assert_close(four, one)
    assert four.summary["gradients"] == one.summary["gradients"] == 24
    losses = [[event["loss"] for event in of_kind(result, "step")] for result in (four, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_an_odd_last_batch_counts_by_its_examples(tmp_path: Path) -> None:
    """240 examples: a step of 210 in three batches, and one of 30; or one of 140 and one of 100,
    whose last batch is of 30."""
    for size, count in ((70, 3), (70, 2)):
        many = train(tmp_path / f"{count}", batch_size=size, accumulate=count, epochs=4)
        one = train(tmp_path / f"{count}-one", batch_size=size * count, epochs=4)
        assert_close(many, one)
        steps = of_kind(many, "step")
        assert [event["examples"] for event in steps[:2]] == [size * count, 240 - size * count]
        assert many.summary["workers"][0]["examples"] == 4 * 240


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_it_goes_with_every_discipline_and_counts_right(tmp_path: Path, discipline: str) -> None:
    job = toy_job(workers=2, accumulate=3, discipline=discipline, epochs=2)
    assert job.num_steps(0) == 8, "twelve batches an epoch"
    result = train(
        tmp_path / "r", workers=2, servers=2, accumulate=3, epochs=2, discipline=discipline
    )
    assert result.summary["gradients"] == 16
    if discipline not in DROPPING:
        assert result.summary["updates"] == job.facts.total_updates
    assert [worker["examples"] for worker in result.summary["workers"]] == [240, 240]


def test_towers_and_clipping_go_with_it(tmp_path: Path) -> None:
    many = train(tmp_path / "m", batch_size=5, devices="cpu,cpu", accumulate=2, clip_norm=0.3)
    one = train(tmp_path / "1", batch_size=20, clip_norm=0.3)
    assert_close(many, one)
    assert many.summary["clipped"] == one.summary["clipped"]
    assert (many.summary["clipped"] or 0) > 0


def test_a_stream_is_cut_into_the_same_steps(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return zip(*toy_data(), strict=True)

    recipe = toy_recipe(data=lambda config: (Stream(), None))
    many = train(tmp_path / "m", recipe, batch_size=16, accumulate=4, epochs=2)
    one = train(tmp_path / "1", recipe, batch_size=64, epochs=2)
    assert many.summary["gradients"] == 8, "three steps of four batches and one of three, twice"
    assert_close(many, one)


@pytest.mark.parametrize("stop", [5, 8, 11])
def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, stop: int) -> None:
    """With an augmentation and BatchNorm, which draw and count for every batch. 24 batches are
    five steps an epoch."""
    recipe = toy_recipe(
        lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)),
        augment=lambda batch, generator: (
            batch[0] + torch.randn(batch[0].shape, generator=generator),
            batch[1],
        ),
    )
    whole = train(tmp_path / "whole", recipe, accumulate=5, steps=13)
    train(tmp_path / "cut", recipe, accumulate=5, steps=stop)
    cut = offbeat.resume(tmp_path / "cut", recipe, steps=13)
    for name, value in whole.state_dict().items():
        assert torch.equal(cut.state_dict()[name], value), name
    assert whole.state_dict()["1.num_batches_tracked"] == 24 * 2 + 15


def step_on(towers: Towers, sizes: list[int]) -> tuple[Tensor, float]:
    """One step on batches of these sizes; its gradient and loss."""
    inputs, labels = toy_data()
    lo = 0
    for index, size in enumerate(sizes):
        towers.seed(index)
        batch = (inputs[lo : lo + size], labels[lo : lo + size])
        towers.compute(cross_entropy, towers.deal(batch))
        lo += size
        if index < len(sizes) - 1:
            towers.accumulate(size)
    slots = [torch.zeros(50), torch.zeros(towers.landing.numel() - 50)]
    towers.take_gradient(slots, sizes[-1])
    loss, is_usable = towers.wait()
    assert is_usable
    return torch.cat(slots), loss


@pytest.mark.parametrize("count", [1, 2])
def test_it_makes_no_difference_whether_batches_are_replayed(count: int) -> None:
    job = toy_job(toy_recipe(Spiced))
    pretenders = [Pretender() for _ in range(count)]
    recorders = iter(pretenders)
    eager = Towers(job.make_replicas(count), [CPU] * count, accumulates=True)
    replayed = Towers(
        job.make_replicas(count),
        [CPU] * count,
        accumulates=True,
        make_recorder=lambda device: next(recorders),
    )
    for sizes in ([20, 20, 20, 8], [20, 20, 8], [8], [20, 20, 20, 20]):
        (gradient, loss), (same, same_loss) = step_on(eager, sizes), step_on(replayed, sizes)
        assert torch.equal(gradient, same) and loss == same_loss
    assert all(pretender.num_replayed > 3 for pretender in pretenders)


def test_a_tensor_that_one_batch_alone_uses_has_a_gradient() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large, self.never = (nn.Linear(6, 3) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = (self.small if len(x) < 20 else self.large)(x)
            return found

    job = toy_job(toy_recipe(Either))
    towers = Towers(job.make_replicas(1), [CPU], accumulates=True)
    inputs, labels = toy_data()
    towers.compute(cross_entropy, towers.deal((inputs[:10], labels[:10])))
    towers.accumulate(10)
    towers.compute(cross_entropy, towers.deal((inputs[:30], labels[:30])))
    slot = torch.zeros_like(towers.landing)
    assert towers.take_gradient([slot], 30) == [True, True, True, True, False, False]
    module = job.make_model().module
    (cross_entropy(module, (inputs[:10], labels[:10])) * 0.25).backward()
    assert isinstance(module, Either) and module.small.weight.grad is not None
    torch.testing.assert_close(slot[:18].view(3, 6), module.small.weight.grad)


def test_data_that_spoils_any_batch_of_a_step_is_blamed(tmp_path: Path) -> None:
    x, y = toy_data()
    x[7, 2] = math.nan
    recipe = toy_recipe(data=lambda config: ((x, y), None))
    with pytest.raises(NonFiniteLossError, match="1 of the 1,440 numbers in its batch"):
        train(tmp_path / "r", recipe, batch_size=60, accumulate=4)


def test_groups_end_where_they_are_full_and_at_the_end() -> None:
    assert [ends for _, ends in grouped(range(7), 3)] == [False, False, True] * 2 + [True]
    assert [ends for _, ends in grouped(range(6), 3)] == [False, False, True] * 2
    assert list(grouped([None], 2)) == [(None, True)] and list(grouped([], 2)) == []
    asked = []
    for item, _ in grouped(iter(lambda: asked.append(1) or 1, 2), 1):  # type: ignore
        assert len(asked) == item
        break
