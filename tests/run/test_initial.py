"""--init: what a run begins from instead of its recipe's own weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import toy_data, toy_model, toy_recipe
from safetensors.torch import save_file
from torch import Tensor, nn

import offbeat
from offbeat.cli import main
from offbeat.config import make_config
from offbeat.errors import ConfigError
from offbeat.run.checkpoint import load_checkpoint
from offbeat.run.initial import read_initial
from offbeat.run.making import make_job, rejoin_job


def rich_model() -> nn.Module:
    """Running statistics, and a parameter that does not train."""
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    module[2].bias.requires_grad_(False)
    return module


def weights_of(model: Any = rich_model, *, seed: int = 77) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    module: nn.Module = model()
    module(toy_data()[0])  # statistics of its own
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def train(recipe: offbeat.Recipe, run_dir: Path, **options: Any) -> offbeat.Result:
    return offbeat.train(
        recipe, run_dir=run_dir, engine="inproc", quiet=True, threads=1, keep=9, **options
    )


def began_with(run_dir: Path) -> dict[str, Tensor]:
    return load_checkpoint(run_dir / "checkpoints" / "00000000").state_dict()


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]) and value.dtype == other[name].dtype, name


@pytest.mark.parametrize("servers", [1, 3])
def test_training_begins_with_what_is_in_the_file(tmp_path: Path, servers: int) -> None:
    weights = weights_of()
    save_file(weights, tmp_path / "w.safetensors")
    result = train(
        toy_recipe(rich_model),
        tmp_path / "r",
        servers=servers,
        steps=3,
        init=tmp_path / "w.safetensors",
    )
    assert_same(began_with(tmp_path / "r"), weights)
    assert not torch.equal(result.state_dict()["0.weight"], weights["0.weight"])
    assert torch.equal(result.state_dict()["2.bias"], weights["2.bias"]), "it does not train"
    config = json.loads((tmp_path / "r" / "config.json").read_text())["config"]
    assert config["init"] == str(tmp_path / "w.safetensors")


def test_a_frozen_part_that_workers_compute_with_is_the_files(tmp_path: Path) -> None:
    """Servers know nothing of it: every replica has to have it."""
    save_file(weights_of(), tmp_path / "w.safetensors")
    seen = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(model[2].bias.clone())  # type: ignore[index]
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    recipe = toy_recipe(rich_model, loss=loss)
    train(recipe, tmp_path / "r", workers=2, steps=2, init=tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").unlink()
    offbeat.resume(tmp_path / "r", recipe, steps=4)
    assert len(seen) >= 8, "steps, and the test loss"
    assert all(torch.equal(bias, weights_of()["2.bias"]) for bias in seen)


def test_a_run_can_be_begun_with_another_ones_newest_weights(tmp_path: Path) -> None:
    recipe = toy_recipe(rich_model, ema=0.9)
    first = train(recipe, tmp_path / "a", steps=9)
    train(recipe, tmp_path / "b", steps=2, servers=2, init=tmp_path / "a")
    assert_same(began_with(tmp_path / "b"), first.state_dict())
    offbeat.export(tmp_path / "a", tmp_path / "average.safetensors", ema=True)
    train(recipe, tmp_path / "c", steps=2, init=tmp_path / "average.safetensors")
    assert_same(began_with(tmp_path / "c"), first.state_dict(ema=True))


def test_other_processes_read_what_the_run_has_kept(tmp_path: Path) -> None:
    weights = weights_of()
    save_file(weights, tmp_path / "w.safetensors")
    recipe = toy_recipe(rich_model)
    job = make_job(make_config({"init": tmp_path / "w.safetensors"}), recipe)
    there = rejoin_job(job.config, recipe, job.facts, None, tmp_path / "w.safetensors")
    assert_same(there.make_model().module.state_dict(), weights)
    elsewhere = rejoin_job(job.config, recipe, job.facts, None)
    assert not torch.equal(elsewhere.make_model().params, there.make_model().params)


def test_a_run_that_goes_on_has_weights_of_its_own(tmp_path: Path) -> None:
    recipe = toy_recipe()
    train(recipe, tmp_path / "r", steps=3)
    with pytest.raises(ConfigError, match="a run that goes on has weights of its own"):
        offbeat.resume(tmp_path / "r", recipe, init=tmp_path / "r", steps=6)


def test_what_differs_is_listed_in_one_line(tmp_path: Path) -> None:
    weights = weights_of(toy_model)
    weights["2.weight"] = torch.zeros(4, 7)
    weights["2.bias"] = torch.zeros(3, dtype=torch.int64)
    weights["head.weight"] = weights.pop("0.weight")
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(ConfigError) as caught:
        read_initial(tmp_path / "w.safetensors", toy_model())
    assert str(caught.value) == (
        f"the weights in {tmp_path / 'w.safetensors'} are not this model's: 0.weight is missing, "
        f"head.weight is not in the model, 2.weight is [4, 7] there, [3, 7] here, 2.bias is int64 "
        f"there, float32 here"
    )


def test_of_many_differences_some_are_named(tmp_path: Path) -> None:
    save_file({f"layer{n}": torch.zeros(1) for n in range(20)}, tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match=r"0.weight is missing, .* and 18 more$"):
        read_initial(tmp_path / "w.safetensors", toy_model())


def test_other_dtypes_are_converted_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = weights_of()
    for name in ("0.weight", "1.running_mean"):
        weights[name] = weights[name].half()
    weights["1.num_batches_tracked"] = weights["1.num_batches_tracked"].int()
    save_file(weights, tmp_path / "w.safetensors")
    initial = read_initial(tmp_path / "w.safetensors", rich_model())
    assert initial.notices == (
        "converted from float16 to float32: 0.weight, 1.running_mean",
        "converted from int32 to int64: 1.num_batches_tracked",
    )
    assert initial.state["0.weight"].dtype == torch.float32
    offbeat.train(
        toy_recipe(rich_model),
        run_dir=tmp_path / "r",
        engine="inproc",
        steps=1,
        init=tmp_path / "w.safetensors",
    )
    assert "converted from float16 to float32: 0.weight" in "".join(capsys.readouterr())


def test_tied_weights_may_be_there_once(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module[1].weight = module[0].weight
        return module

    torch.manual_seed(3)
    weights = tied().state_dict()
    del weights["0.weight"]
    save_file(weights, tmp_path / "w.safetensors")
    state = read_initial(tmp_path / "w.safetensors", tied()).state
    assert torch.equal(state["0.weight"], weights["1.weight"])
    save_file(weights | {"1.weight": torch.zeros(2, 4)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=r"model's: 1.weight is \[2, 4\] there, \[4, 4\] here$"):
        read_initial(tmp_path / "other.safetensors", tied())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no file or run"),
        (lambda path: path.mkdir(), "no valid checkpoint in"),
        (lambda path: path.write_text("x"), "is no safetensors file"),
        (lambda path: torch.save(weights_of(), path), "which may hold programs, none is read"),
        (
            lambda path: save_file(weights_of() | {"0.bias": torch.full((5,), float("nan"))}, path),
            "are not finite in 0.bias",
        ),
    ],
)
def test_what_cannot_be_begun_with_is_named(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "w")
    with pytest.raises(ConfigError, match=message):
        train(toy_recipe(rich_model), tmp_path / "r", init=tmp_path / "w")
    assert not (tmp_path / "r").exists()


def test_frozen_parameters_do_not_reach_other_machines(tmp_path: Path) -> None:
    save_file(weights_of(), tmp_path / "w.safetensors")
    config = make_config({"init": tmp_path / "w.safetensors", "engine": "cluster"})
    with pytest.raises(ConfigError, match="have the recipe's model"):
        make_job(config, toy_recipe(rich_model))


def test_a_name_in_the_wrong_place_is_one_line_at_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--init", "nowhere.safetensors"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
