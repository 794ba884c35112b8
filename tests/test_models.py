"""Models that people bring: each trains as it would in a plain loop, or is refused in a line."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_plain_optimizer, plain_loop, toy_recipe
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import offbeat
from offbeat import Recipe
from offbeat.config import make_config
from offbeat.errors import ModelError
from offbeat.run.job import make_job


class Tied(nn.Module):
    """A small language model, whose output weights are its embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(tokens))
        logits: Tensor = self.head(states)
        return logits


class Attending(nn.Module):
    """A transformer's block, with an embedding of positions that is a plain Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(5, 8) / 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(self.embedding(tokens) + self.positions))
        return logits


def tokens(config: Any) -> tuple[Any, None]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 11, (64, 6), generator=generator), None


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    model[0].requires_grad_(False)
    return model


def normed() -> nn.Module:
    first = parametrizations.weight_norm(nn.Linear(6, 16))
    return nn.Sequential(first, nn.Tanh(), parametrizations.orthogonal(nn.Linear(16, 3)))


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 16)), nn.Linear(16, 3))


def once_lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.Linear(16, 3))
    model(torch.zeros(2, 6))
    return model


def in_halves() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3).bfloat16())


def mixed_loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model[1](torch.tanh(model[0](batch[0])).bfloat16()).float(), batch[1])


LANGUAGE = {"data": tokens, "loss": next_token}
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "tied embeddings and a GRU": (Tied, LANGUAGE),
    "a transformer's block": (Attending, LANGUAGE),
    "partly frozen, with BatchNorm": (partly_frozen, {}),
    "weight_norm and orthogonal": (normed, {}),
    "spectral_norm": (spectral, {}),
    "once lazy": (once_lazy, {}),
    "partly bf16": (in_halves, {"loss": mixed_loss}),
}


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_one_worker_comes_to_what_a_plain_loop_does(
    name: str, servers: int, tmp_path: Path
) -> None:
    model, parts = MODELS[name]
    recipe = toy_recipe(model=model, **parts)
    shared = {"workers": 1, "steps": 12, "threads": 1, "servers": servers}
    job = make_job(make_config(shared), recipe)
    module = job.make_model().module.train()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    plain_loop(job, make_plain_optimizer(job.optimizer, module), module)
    torch.set_num_threads(threads)
    result = offbeat.train(recipe, engine="inproc", quiet=True, run_dir=tmp_path / "r", **shared)
    expected, found = module.state_dict(), result.state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        if name == "partly bf16":  # the servers keep what a plain loop rounds off
            torch.testing.assert_close(found[key], tensor, rtol=0.02, atol=0.02)
        else:
            assert torch.equal(found[key], tensor), key
    fresh = copy.deepcopy(module)
    fresh.load_state_dict(found)


def with_complex() -> nn.Module:
    return nn.ParameterList([torch.zeros(3, dtype=torch.complex64)])


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (with_complex, "parameter 0 is complex; only real ones can be trained"),
        (lambda: nn.LazyLinear(3), "has no shape yet: run a batch through the model first"),
        (lambda: nn.Linear(2, 2, device="meta"), "is on meta"),
    ],
    ids=["complex", "lazy", "meta"],
)
def test_what_cannot_be_trained_is_refused(model: Callable[[], nn.Module], says: str) -> None:
    recipe: Recipe = toy_recipe(model=model)
    with pytest.raises(ModelError, match=says):
        make_job(make_config({}), recipe)
