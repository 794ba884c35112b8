"""Models that people bring: each trains as it would in a plain loop, or is refused in a line."""

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_plain_optimizer, plain_loop, toy_recipe
from own_optimizers import Decaying
from sparse import NUM_ROWS, OPTIMIZERS, Looking, Tables, plain_sparse_loop, sparse_recipe
from sparse import tokens as sparse_tokens
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import offbeat
from offbeat import SGD, Recipe
from offbeat.config import make_config
from offbeat.errors import ConfigError, ModelError
from offbeat.optim import Optimizer
from offbeat.run.making import make_job


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As a worker has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


WITH_MUON = offbeat.SGD(
    lr=0.1,
    groups={
        "*ead.weight": offbeat.optimizer("Muon", lr=0.02),
        "words.*": offbeat.optimizer("SparseAdam", lr=0.02),
    },
)
"""Which needs whole tensors."""


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


def of_float64() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def double_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0].double()), batch[1])


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
    "float64": (of_float64, {"loss": double_loss}),
}
ROUNDED = {"partly bf16": 0.02, "float64": 1e-5}
"""Servers keep float32, of which a plain loop rounds off some, or less."""


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
        if (most := ROUNDED.get(name)) is not None:
            torch.testing.assert_close(found[key], tensor, rtol=most, atol=most)
        else:
            assert torch.equal(found[key], tensor), key
    fresh = copy.deepcopy(module)
    fresh.load_state_dict(found)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("discipline", ["apply-reply", "sync"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sparse_gradients_come_to_what_a_plain_loop_does(
    name: str, discipline: str, servers: int, tmp_path: Path, one_thread: None
) -> None:
    """Also after a resume, with another number of servers."""
    recipe = sparse_recipe(name)
    shared = {"workers": 1, "threads": 1, "discipline": discipline}
    job = make_job(make_config({**shared, "steps": 24}), recipe)
    expected = plain_sparse_loop(job)
    options = {"engine": "inproc", "quiet": True, "run_dir": tmp_path / "r", **shared}
    first = offbeat.train(recipe, steps=13, servers=servers, **options)
    assert first.summary["kept"][0]["applied"] == 13
    found = offbeat.resume(tmp_path / "r", recipe, steps=24, servers=2).state_dict()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), WITH_MUON], ids=["asked for", "needed"])
def test_sparse_tensors_may_be_whole(
    optimizer: Optimizer, tmp_path: Path, one_thread: None
) -> None:
    recipe = sparse_recipe(optimizer=optimizer)
    shared = {"workers": 1, "threads": 1, "steps": 12, "servers": 3}
    asked = {"partition": "tensors"} if optimizer is not WITH_MUON else {}
    expected = plain_sparse_loop(make_job(make_config(shared), recipe))
    options = {"engine": "inproc", "quiet": True, "run_dir": tmp_path / "r", **shared, **asked}
    found = offbeat.train(recipe, **options).state_dict()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("discipline", ["sync", "apply-reply", "reply-apply", "lock-free"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_several_workers_train_on_sparse_gradients(
    name: str, discipline: str, tmp_path: Path
) -> None:
    result = offbeat.train(
        sparse_recipe(name),
        workers=3,
        servers=2,
        steps=15,
        discipline=discipline,
        engine="inproc",
        quiet=True,
        run_dir=tmp_path / "r",
    )
    updates = 15 if discipline == "sync" else 45
    assert [kept["version"] for kept in result.summary["kept"]] == [updates] * 2
    assert all(kept["applied"] == 45 for kept in result.summary["kept"])


@pytest.mark.parametrize("discipline", ["sync", "apply-reply"])
@pytest.mark.parametrize(
    "options",
    [{"clip_norm": 0.5}, {"clip_value": 0.01}, {"accumulate": 3}, {"devices": "cpu,cpu"}],
    ids=str,
)
def test_steps_of_many_parts_are_what_dense_ones_are(
    options: dict[str, Any], discipline: str, tmp_path: Path, one_thread: None
) -> None:
    """With SGD, which makes the same of a row without a gradient as of one of zeros."""
    found = []
    for sparse in (True, False):
        recipe = sparse_recipe(model=lambda sparse=sparse: like_dense(sparse))
        shared = {"workers": 2 if discipline == "sync" else 1, "steps": 8, "threads": 1}
        run_dir = tmp_path / str(sparse)
        given = {**shared, **options, "discipline": discipline, "run_dir": run_dir}
        found.append(offbeat.train(recipe, engine="inproc", quiet=True, **given).state_dict())
    for key, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][key], rtol=1e-4, atol=1e-6)


def like_dense(sparse: bool) -> nn.Module:
    model = Looking()
    model.words.sparse = model.bag.sparse = sparse
    return model


class Reused(nn.Module):
    """A table whose weights are used elsewhere, which no layer tells; and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0))
        self.words = nn.Embedding(NUM_ROWS, 3, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        looked_up = self.words(tokens).mean(1)
        logits: Tensor = looked_up + self.words.weight.sum(0) + self.nothing.sum()
        return logits


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 1e9, "discipline": "sync", "servers": 1}])
def test_a_sparse_tensor_with_a_dense_gradient_has_every_row(
    options: dict[str, Any], servers: int, tmp_path: Path, one_thread: None
) -> None:
    recipe = sparse_recipe(model=Reused)
    shared = {"workers": 1, "threads": 1, "steps": 10, "servers": servers, **options}
    expected = plain_sparse_loop(make_job(make_config(shared), recipe))
    result = offbeat.train(recipe, engine="inproc", quiet=True, run_dir=tmp_path / "r", **shared)
    assert torch.equal(result.state_dict()["words.weight"], expected["words.weight"])


def test_rows_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    calls = itertools.count()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = F.cross_entropy(model(batch[0]), batch[1])
        rows = model.words(torch.tensor([2]))  # type: ignore[operator]
        return found + (rows.sum() * 1e20 if next(calls) == 3 else 0.0)

    result = offbeat.train(
        sparse_recipe(loss=loss),
        workers=1,
        steps=8,
        servers=3,
        engine="inproc",
        quiet=True,
        run_dir=tmp_path / "r",
    )
    assert [kept["rejected"] for kept in result.summary["kept"]] == [1, 1, 1]
    assert all(bool(tensor.isfinite().all()) for tensor in result.state_dict().values())


@pytest.mark.parametrize(
    ("optimizer", "model", "says"),
    [
        (
            offbeat.Adam(),
            Tables,
            "Adam.* for words.weight, .*these can: SGD .*, Adagrad, SparseAdam",
        ),
        (offbeat.SGD(momentum=0.9), Tables, "momentum=0.9.*no checkpoint can hold"),
        (offbeat.SGD(weight_decay=0.1), Looking, "weight_decay=0.1.* words.weight"),
        (offbeat.Adagrad(weight_decay=0.1), Looking, "weight_decay.*not compatible"),
        (offbeat.SGD(groups={"bag.*": {"momentum": 0.9}}), Looking, "for bag.weight"),
        (offbeat.optimizer(Decaying, lr=0.1), Tables, "changes rows that have no gradient"),
        (offbeat.optimizer("SparseAdam"), Looking, "sparse gradients only, and that of scale is"),
    ],
    ids=["Adam", "momentum", "decay", "Adagrad", "a group", "your own", "dense"],
)
def test_optimizers_that_take_no_rows_are_refused_in_a_line(
    optimizer: Optimizer, model: type[nn.Module], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        make_job(make_config({}), toy_recipe(model=model, data=sparse_tokens, optimizer=optimizer))
    assert "\n" not in str(caught.value)


def with_complex() -> nn.Module:
    return nn.ParameterList([torch.zeros(3, dtype=torch.complex64)])


def with_a_buffer_on_meta() -> nn.Module:
    norm = nn.BatchNorm1d(2, affine=False, device="meta")
    return nn.Sequential(nn.Linear(2, 2), norm)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (with_complex, "parameter 0 is complex; only real ones can be trained"),
        (lambda: nn.LazyLinear(3), "has no shape yet: run a batch through the model first"),
        (lambda: nn.Linear(2, 2, device="meta"), r"weight is on meta.*to_empty\(device='cpu'\)"),
        (with_a_buffer_on_meta, r"buffer 1.running_mean is on meta.*to_empty\(device='cpu'\)"),
    ],
    ids=["complex", "lazy", "meta", "a buffer on meta"],
)
def test_what_cannot_be_trained_is_refused(model: Callable[[], nn.Module], says: str) -> None:
    recipe: Recipe = toy_recipe(model=model)
    with pytest.raises(ModelError, match=says):
        make_job(make_config({}), recipe)
