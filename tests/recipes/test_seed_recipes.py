"""The seeds' recipes: their size, first loss and data, and that they are plain PyTorch inside."""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEFAULT_CONFIG, make_plain_optimizer, plain_loop
from torch import Tensor, nn

import offbeat
from offbeat.config import make_config
from offbeat.data.catalog import find_dataset
from offbeat.data.fetch import THERE, state_of
from offbeat.data.images import standardise
from offbeat.layers import LocalResponseNorm
from offbeat.recipes import alexnet, mnist_convnet, simplecnn
from offbeat.recipes.base import Recipe, load_recipe
from offbeat.run.making import make_job

DATA_DIR = Path(os.environ.get("OFFBEAT_DATA_DIR", Path(__file__).parents[2] / "data"))


def images(count: int, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
    return pixels, torch.randint(0, 10, (count,), generator=generator)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Noise instead of datasets; returns the names that were asked for."""
    asked: list[str] = []

    def load(name: str, data_dir: str) -> Any:
        asked.append(name)
        shape = (1, 28, 28) if "mnist" in name else (3, 32, 32)
        return images(640, *shape), images(40, *shape, seed=1)

    for module in (alexnet, simplecnn, mnist_convnet):
        monkeypatch.setattr(module, "load_dataset", load)
    return asked


def num_parameters(recipe: Recipe) -> int:
    return sum(p.numel() for p in recipe.model().parameters())


@pytest.mark.parametrize(
    ("name", "count", "batch_size"),
    [
        ("alexnet", 1_068_298, 128),
        ("alexnet-fast", 1_068_298, 128),
        ("simplecnn", 2_210_112, 64),
        ("simplecnn-100", 2_256_192, 64),
        ("mnist-convnet", 3_463_114, 64),
        ("mnist-sigmoid", 79_510, 100),
    ],
)
def test_parameters_and_batch_sizes_are_the_seeds(name: str, count: int, batch_size: int) -> None:
    recipe = load_recipe(name)
    assert num_parameters(recipe) == count
    assert recipe.batch_size == batch_size


def first_loss(recipe: Recipe, seed: int) -> float:
    torch.manual_seed(seed)
    model = recipe.model()
    (x, y), _ = recipe.data(DEFAULT_CONFIG)
    batch: Any = (x[:128], y[:128])
    if recipe.augment is not None:
        batch = recipe.augment(batch, torch.Generator().manual_seed(seed))
    return recipe.loss(model, batch).item()


@pytest.mark.parametrize("seed", range(3))
def test_alexnets_first_loss_is_that_of_the_seed(seed: int, made_up: list[str]) -> None:
    """ln 10, and .004 times half the squares of two layers' weights."""
    assert first_loss(alexnet.recipe, seed) == pytest.approx(4.68, abs=0.02)
    assert made_up == ["cifar10"]


def test_the_others_first_losses_are_near_that_of_guessing(made_up: list[str]) -> None:
    assert first_loss(mnist_convnet.recipe, 0) == pytest.approx(2.303, abs=0.1)
    assert 2 < first_loss(simplecnn.recipe, 0) < 10, "its last layer begins with large weights"


def test_alexnet_trains_on_distorted_crops_and_is_scored_on_the_centre(made_up: list[str]) -> None:
    recipe = alexnet.recipe
    (x, y), (test_x, _) = recipe.data(DEFAULT_CONFIG)
    assert x.dtype == torch.uint8 and test_x.shape == (40, 3, 24, 24)
    assert test_x.mean((1, 2, 3)).abs().max() < 1e-4
    assert recipe.augment is not None
    changed, labels = recipe.augment((x, y), torch.Generator().manual_seed(0))
    assert changed.shape == (640, 3, 24, 24) and torch.equal(labels, y)
    assert (changed.std((1, 2, 3), correction=0) - 1).abs().max() < 1e-3
    again, _ = recipe.augment((x, y), torch.Generator().manual_seed(0))
    assert torch.equal(changed, again)


def test_alexnets_rate_falls_every_350_epochs() -> None:
    schedule = alexnet.recipe.schedule
    assert [schedule(v, None) for v in (0, 136_717, 136_718)] == [1, 1, pytest.approx(0.1)]
    assert alexnet.recipe.optimizer.options["lr"] == 0.1
    assert alexnet.recipe.ema == 0.9999


def test_alexnet_decays_the_weights_of_two_layers_only(made_up: list[str]) -> None:
    model = alexnet.AlexNet()
    batch = (torch.zeros(4, 3, 24, 24), torch.zeros(4, dtype=torch.long))
    with_decay = torch.autograd.grad(alexnet.loss(model, batch), list(model.parameters()))
    entropy = nn.functional.cross_entropy(model(batch[0]), batch[1])
    without = torch.autograd.grad(entropy, list(model.parameters()))
    for (name, parameter), more, less in zip(
        model.named_parameters(), with_decay, without, strict=True
    ):
        expected = 0.004 * parameter if name in ("local3.weight", "local4.weight") else 0.0
        torch.testing.assert_close(more - less, expected + torch.zeros_like(more))


def test_alexnets_layers_are_in_the_seeds_order() -> None:
    """Pool before the first normalisation, after the second; 24 -> 12 -> 6."""
    model, seen = alexnet.AlexNet(), []
    for name in ("conv1", "pool", "norm1", "conv2", "norm2", "local3", "local4", "softmax_linear"):
        module = getattr(model, name)
        module.register_forward_hook(
            lambda module, args, out, name=name: seen.append((name, tuple(out.shape[1:])))
        )
    model(torch.zeros(1, 3, 24, 24))
    assert seen == [
        ("conv1", (64, 24, 24)),
        ("pool", (64, 12, 12)),
        ("norm1", (64, 12, 12)),
        ("conv2", (64, 12, 12)),
        ("norm2", (64, 12, 12)),
        ("pool", (64, 6, 6)),
        ("local3", (384,)),
        ("local4", (192,)),
        ("softmax_linear", (10,)),
    ]
    assert isinstance(model.norm1, LocalResponseNorm)
    assert (model.norm1.size, model.norm1.alpha, model.norm1.beta, model.norm1.k) == (
        9,
        1e-3,
        0.75,
        1.0,
    )


def coloured(config: Any) -> Any:
    """Images of two classes, of which one is bright where the other is dark."""
    pixels, labels = images(128, 3, 32, 32)
    labels %= 2
    pixels //= 2
    pixels[labels == 0, :, :16] += 127
    pixels[labels == 1, :, 16:] += 127
    return (pixels, labels), None


def test_alexnet_fast_learns_what_can_be_learnt_on_a_cpu_too(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    def loss(model: Any, batch: Any) -> Tensor:
        seen.append(model(batch[0]).dtype)
        return alexnet.loss(model, batch)

    recipe = dataclasses.replace(alexnet.fast, data=coloured, loss=loss)
    options = {"workers": 1, "steps": 30, "batch_size": 32, "threads": 2}
    result = offbeat.train(recipe, engine="inproc", quiet=True, run_dir=tmp_path / "r", **options)
    lines = (tmp_path / "r" / "events" / "worker-0.jsonl").read_text().splitlines()
    losses = [event["loss"] for event in map(json.loads, lines) if event["kind"] == "step"]
    # of the first, 0.69 can be learnt away: the rest is wide layers' weights
    assert max(losses[-3:]) < losses[0] - 0.6
    assert set(seen) == {torch.bfloat16}
    raw, averaged = result.state_dict(), result.state_dict(ema=True)
    initial = make_job(make_config({}), recipe).make_model().module.state_dict()
    for name, start in initial.items():  # a moving average is on its way
        assert torch.dist(averaged[name], start) > 0, name
        assert torch.dist(averaged[name], raw[name]) > 0, name


def test_alexnet_fasts_rate_rises_for_a_tenth_and_falls_to_nothing(made_up: list[str]) -> None:
    job = make_job(make_config({"workers": 1}), alexnet.fast)
    total = job.facts.total_updates
    assert total == 375, "75 epochs of 640 images"
    rates = [job.recipe.schedule(version, total) for version in range(total + 1)]
    top = rates.index(max(rates))
    assert abs(top - total / 10) < 1 and max(rates) > 0.99
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == 0 < rates[0] < 0.05


def test_alexnet_fast_trains_on_crops_that_keep_their_colours(made_up: list[str]) -> None:
    (x, y), _ = alexnet.fast.data(DEFAULT_CONFIG)
    assert alexnet.fast.augment is not None
    grey = torch.full_like(x, 100)
    grey[:, 0] = 160  # the same wherever a window lies, and changed by any other contrast
    changed, labels = alexnet.fast.augment((grey, y), torch.Generator().manual_seed(0))
    assert changed.shape == (640, 3, 24, 24) and torch.equal(labels, y)
    torch.testing.assert_close(changed, standardise(grey[:, :, :24, :24].float()))


def test_alexnet_fast_scores_by_the_mean_of_ten_crops() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 2, (40,), generator=generator)
    seen: list[Tensor] = []

    def model(x: Tensor) -> Tensor:
        seen.append(x)
        return x[:, :2, 0, 0]

    right, count = alexnet.accuracy(model, (images, labels))
    x = images.float()
    crops = [x[:, :, t : t + 24, c : c + 24] for t, c in [(0, 0), (0, 8), (8, 0), (8, 8), (4, 4)]]
    expected = [standardise(c) for crop in crops for c in (crop, crop.flip(3))]
    assert len(seen) == 10
    for found, wanted in zip(seen, expected, strict=True):
        torch.testing.assert_close(found, wanted)
    votes = sum(model(x).softmax(1) for x in expected)
    assert (right, count) == (int((votes.argmax(1) == labels).sum()), 40)
    by_centre = (model(expected[8]).argmax(1) == labels).sum()
    assert right != by_centre, "or this would not tell one from the other"


def test_alexnet_fast_is_scored_by_the_centres_too() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.arange(6)
    model = alexnet.AlexNet()
    centres = standardise(images[:, :, 4:28, 4:28].float())
    with torch.no_grad():
        total, count = alexnet.fast.metrics["loss"](model, (images, labels))
        expected = alexnet.loss(model, (centres, labels)).item()
        right, _ = alexnet.fast.metrics["centre accuracy"](model, (images, labels))
        said = model(centres).argmax(1)
    assert (total / count, count) == (pytest.approx(expected), 6)
    assert right == (said == labels).sum()


def test_simplecnn_has_100_classes_where_asked_to(made_up: list[str]) -> None:
    recipe = load_recipe("simplecnn-100")
    assert recipe.model()(torch.zeros(2, 3, 32, 32)).shape == (2, 100)
    (x, y), (test_x, _) = recipe.data(DEFAULT_CONFIG)
    assert made_up == ["cifar100"]
    assert recipe.augment is not None
    flipped, _ = recipe.augment((x, y), torch.Generator().manual_seed(0))
    for pixels in (flipped, test_x):
        assert pixels.min() == 0 and pixels.max() == 1
    first = recipe.model().get_parameter("0.weight")
    assert abs(first.std().item() - (2 / (25 * 33.5)) ** 0.5) < 2e-3


def test_mnist_convnets_two_input_ways(made_up: list[str]) -> None:
    recipe = mnist_convnet.recipe
    (x, _), _ = recipe.data(DEFAULT_CONFIG)
    assert x.min() == -0.5 and x.max() == 0.5
    jobs = {
        feed: make_job(make_config({"feed": feed} if feed else {}), recipe)
        for feed in (None, "batching", "direct")
    }
    assert jobs[None].optimizer == jobs["batching"].optimizer
    batching, direct = jobs["batching"].optimizer, jobs["direct"].optimizer
    assert (batching.kind, batching.options["nesterov"], batching.options["lr"]) == ("SGD", 1, 0.1)
    assert (direct.kind, direct.options["lr"]) == ("Adam", 1e-4)


def without_dropout() -> nn.Module:
    model = mnist_convnet.MnistConvnet()
    model.dropout.p = 0.0
    return model


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (alexnet.recipe, {}),
        pytest.param(alexnet.fast, {"amp": "off"}, marks=pytest.mark.slow),
        (simplecnn.recipe, {}),
        (dataclasses.replace(mnist_convnet.recipe, model=without_dropout), {}),
        pytest.param(
            dataclasses.replace(mnist_convnet.recipe, model=without_dropout),
            {"feed": "direct"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["alexnet", "alexnet-fast", "simplecnn", "mnist-convnet", "mnist-convnet-direct"],
)
def test_twenty_steps_are_those_of_a_plain_loop(
    recipe: Recipe, options: dict[str, Any], made_up: list[str], tmp_path: Path
) -> None:
    shared = {"workers": 1, "steps": 20, "batch_size": 8, "threads": 1, "eval_every": 0, **options}
    job = make_job(make_config(shared), recipe)
    module = job.make_model().module.train()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    plain_loop(job, make_plain_optimizer(job.optimizer, module), module)
    torch.set_num_threads(threads)
    result = offbeat.train(recipe, engine="inproc", quiet=True, run_dir=tmp_path / "r", **shared)
    assert result.test_loss is not None, "the loss fits the test data too"
    trained = offbeat.load(result.run_dir)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-6, atol=1e-7)


# -- lines on the console --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["alexnet", "mnist-sigmoid"])
def test_the_seeds_console_lines(
    name: str, made_up: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(name)
    x, y = images(40, 3, 32, 32)
    if name == "mnist-sigmoid":
        x = torch.rand(40, 784)
    recipe = dataclasses.replace(recipe, data=lambda config: ((x, y), None))
    options = {"workers": 2, "batch_size": 5, "epochs": 2, "engine": "inproc"}
    offbeat.train(recipe, log_every=3, run_dir=tmp_path / "r", **options)
    out = capsys.readouterr().out
    if name == "alexnet":
        pattern = (
            r"^\S+ \S+: step 3, loss = \d\.\d\d \(\d+\.\d examples/sec; \d\.\d{3} sec/batch\)$"
        )
    else:
        pattern = r"^Step: \d+, Epoch: 2, Batch: 2 of 4, Cost: \d+\.\d{4}, AvgTime: \d+\.\d\dms$"
    assert len(re.findall(pattern, out, re.MULTILINE)) == 1, out
    lines = [line for line in out.splitlines() if line.startswith("Step:") or ": step " in line]
    assert len(lines) == 2, "3 and 6 of 8"


# -- real data -------------------------------------------------------------------------------------


def real(name: str) -> Path:
    """Where a dataset lies, or else a skip that says how to get it."""
    dataset = find_dataset(name)
    folder = DATA_DIR / dataset.folder
    if {state_of(folder, file) for file in dataset.files} != {THERE}:
        pytest.skip(f"{name} is not in {DATA_DIR}: offbeat data get {name}")
    return DATA_DIR


@pytest.mark.slow
def test_the_real_cifar10_has_the_sizes_it_should_have() -> None:
    config = make_config({"data_dir": real("cifar10")})
    (x, y), (test_x, test_y) = alexnet.recipe.data(config)
    assert x.shape == (50_000, 3, 32, 32) and test_x.shape == (10_000, 3, 24, 24)
    assert y.bincount().tolist() == [5_000] * 10 and test_y.bincount().tolist() == [1_000] * 10


@pytest.mark.slow
def test_alexnet_learns_the_real_cifar10(tmp_path: Path) -> None:
    result = offbeat.train(
        "alexnet",
        data_dir=real("cifar10"),
        run_dir=tmp_path / "r",
        steps=100,
        workers=2,
        quiet=True,
        eval_every=0,
    )
    assert result.summary["final_cost"] < 4.4, "from 4.68"


@pytest.mark.slow
def test_mnist_sigmoid_learns_the_real_mnist(tmp_path: Path) -> None:
    result = offbeat.train(
        "mnist-sigmoid",
        data_dir=real("mnist"),
        run_dir=tmp_path / "r",
        workers=3,
        epochs=2,
        lr=0.5,  # its own is made for longer runs
        quiet=True,
        eval_every=0,
    )
    assert result.summary["gradients"] == 2 * 3 * 184, "55,000 in three shares"
    assert result.test_accuracy is not None and result.test_accuracy > 0.7
