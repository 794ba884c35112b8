"""Flat views of modules of every kind."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from offbeat.errors import ModelError
from offbeat.flat import FlatModel, Manifest, describe
from offbeat.roles.evaluator import load_state
from offbeat.shard import partition


class Tied(nn.Module):
    """A language model's usual shape: input and output embeddings are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(x))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    )


def pieces(model: FlatModel, num_slices: int) -> list[torch.Tensor]:
    return [torch.full((hi - lo,), 9.0) for lo, hi in partition(len(model.params), num_slices)]


def test_parameters_are_views_in_the_order_of_named_parameters() -> None:
    module = nn.Linear(3, 2)
    before = torch.cat([p.detach().flatten() for p in module.parameters()])
    flat = FlatModel(module)
    assert torch.equal(flat.params, before)
    flat.params.fill_(7)
    assert all(bool((p == 7).all()) for p in module.parameters())


@pytest.mark.parametrize("num_slices", [1, 2, 3, 7])
def test_the_gradient_is_cut_where_the_slices_are(num_slices: int) -> None:
    torch.manual_seed(0)
    module = conv_net()
    flat = FlatModel(module)
    module(torch.randn(2, 3, 4, 4)).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    slices = pieces(flat, num_slices)
    assert flat.take_gradient(slices) == [True] * len(flat.manifest.tensors)
    assert torch.equal(torch.cat(slices), expected)
    assert all(p.grad is None for p in module.parameters()), "the gradient was let go of"


def test_tied_weights_are_stored_once_and_loadable_under_both_names() -> None:
    module = Tied()
    flat = FlatModel(module)
    assert [t.name for t in flat.manifest.tensors] == ["embed.weight"]
    assert flat.manifest.aliases == {"out.weight": "embed.weight"}
    F.cross_entropy(module(torch.tensor([1, 2])), torch.tensor([2, 3])).backward()
    both_uses = module.embed.weight.grad.clone()
    (gradient,) = pieces(flat, 1)
    flat.take_gradient([gradient])
    assert torch.equal(gradient.view(5, 4), both_uses)
    state = flat.manifest.state_dict(flat.params, torch.empty(0), torch.empty(0), {})
    assert set(state) == set(module.state_dict())
    Tied().load_state_dict(state)


def test_frozen_parameters_are_kept_and_never_pushed() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    module[0].weight.requires_grad_(False)
    flat = FlatModel(module)
    assert flat.manifest.frozen == ("0.weight",)
    assert "0.weight" not in [t.name for t in flat.manifest.tensors]
    state = flat.manifest.state_dict(flat.params, torch.empty(0), torch.empty(0), flat.frozen())
    fresh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    fresh.load_state_dict(state)
    assert torch.equal(fresh[0].weight, module[0].weight)


def test_a_parameter_without_a_gradient_is_said_to_have_none() -> None:
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    flat = FlatModel(module)
    module[1](torch.ones(1, 2)).sum().backward()
    (gradient,) = pieces(flat, 1)
    assert flat.take_gradient([gradient]) == [False, False, True, True]
    assert bool((gradient[:6] == 0).all()), "no leftovers where there is no gradient"


def test_a_sparse_gradient_is_made_dense() -> None:
    module = nn.Embedding(4, 2, sparse=True)
    flat = FlatModel(module)
    module(torch.tensor([1, 1])).sum().backward()
    (gradient,) = pieces(flat, 1)
    flat.take_gradient([gradient])
    assert gradient.tolist() == [0, 0, 2, 2, 0, 0, 0, 0]


def test_bf16_parameters_are_cast_from_float32_and_their_gradients_to_it() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).bfloat16())
    flat = FlatModel(module)
    assert flat.params.dtype == torch.float32
    flat.params.fill_(1 / 3)
    assert flat.refresh() == []
    assert module[0].weight[0, 0].item() == pytest.approx(1 / 3, abs=1e-7)
    assert module[1].weight.dtype == torch.bfloat16
    assert module[1].weight[0, 0] == torch.tensor(1 / 3).bfloat16()
    module[1](torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    (gradient,) = pieces(flat, 1)
    flat.take_gradient([gradient])
    assert gradient[6:].tolist() == [1, 1, 1]
    state = flat.manifest.state_dict(flat.params, torch.empty(0), torch.empty(0), {})
    assert state["1.weight"].dtype == torch.bfloat16


def test_channels_last_keeps_its_memory_format() -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    plain = nn.Conv2d(3, 4, 3)
    plain.load_state_dict(module.state_dict())
    flat = FlatModel(module)
    assert module.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(module.weight, plain.weight)
    x = torch.randn(2, 3, 5, 5)
    module(x.to(memory_format=torch.channels_last)).square().sum().backward()
    plain(x).square().sum().backward()
    slices = pieces(flat, 3)
    flat.take_gradient(slices)
    by_name = flat.manifest.state_dict(torch.cat(slices), torch.empty(0), torch.empty(0), {})
    torch.testing.assert_close(by_name["weight"], plain.weight.grad)


def test_a_parameter_with_gaps_in_memory_is_laid_out_without_them() -> None:
    module = nn.Linear(3, 2)
    module.weight = nn.Parameter(torch.randn(2, 6)[:, ::2])
    expected = module.weight.detach().clone()
    FlatModel(module)
    assert torch.equal(module.weight, expected)


def test_buffers_travel_by_kind_and_temporary_ones_do_not() -> None:
    module = conv_net()
    module.register_buffer("mask", torch.ones(3), persistent=False)
    flat = FlatModel(module)
    assert [s.name for s in flat.manifest.floats] == ["1.running_mean", "1.running_var"]
    assert [s.name for s in flat.manifest.ints] == ["1.num_batches_tracked"]
    module(torch.randn(2, 3, 4, 4))
    floats, ints = torch.empty(8), torch.empty(1, dtype=torch.int64)
    flat.write_buffers(floats, ints)
    assert torch.equal(floats[:4], module[1].running_mean)
    assert ints.tolist() == [1]
    flat.read_buffers(floats * 2, ints + 5)
    assert torch.equal(module[1].running_mean, floats[:4] * 2)
    assert module[1].num_batches_tracked.item() == 6


@pytest.mark.parametrize("disturb", ["to", "assign", "data"])
def test_views_that_were_broken_are_put_back_and_named(disturb: str) -> None:
    module = nn.Linear(2, 2)
    flat = FlatModel(module)
    if disturb == "to":
        module.to(torch.float64)
    elif disturb == "assign":
        module.weight.data = torch.zeros(2, 2)
    else:
        module.bias.data = module.bias.data.clone()
    moved = flat.refresh()
    assert moved and set(moved) <= {"weight", "bias"}
    flat.params.fill_(3)
    assert bool((module.weight == 3).all()) and module.weight.dtype == torch.float32
    assert flat.refresh() == []


def test_zero_grad_of_either_kind_does_no_harm() -> None:
    module = nn.Linear(2, 1)
    flat = FlatModel(module)
    for set_to_none in (True, False):
        module.zero_grad(set_to_none=set_to_none)
        module(torch.ones(1, 2)).sum().backward()
        (gradient,) = pieces(flat, 1)
        flat.take_gradient([gradient])
        assert gradient.tolist() == [1, 1, 1]


def test_a_replaced_parameter_is_named() -> None:
    module = nn.Linear(2, 1)
    flat = FlatModel(module)
    flat.check_identity()
    module.load_state_dict(nn.Linear(2, 1).state_dict(), assign=True)
    with pytest.raises(ModelError, match="weight was replaced"):
        flat.check_identity()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.ReLU(), "no trainable parameter"),
        (nn.Linear(2, 2).requires_grad_(False), "no trainable parameter"),
        (nn.ParameterList([torch.empty(0)]), "empty"),
        (nn.LazyLinear(3), "no shape yet"),
        (nn.Linear(2, 2, dtype=torch.complex64), "complex"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        describe(module)


def test_a_manifest_survives_json_and_its_fingerprint_tells_models_apart() -> None:
    manifest = describe(conv_net())
    again = Manifest.from_json(json.loads(json.dumps(manifest.to_json())))
    assert again == manifest
    assert again.fingerprint("sgd") == manifest.fingerprint("sgd")
    assert manifest.fingerprint("sgd") != manifest.fingerprint("adam")
    assert manifest.fingerprint("sgd") != describe(nn.Linear(2, 2)).fingerprint("sgd")


@pytest.mark.parametrize("shape", [(5, 0), (0, 5), (3, 4, 0), (3, 0, 4), (0,)])
def test_a_manifest_with_tensors_of_no_elements_survives_json(shape: tuple[int, ...]) -> None:
    module = nn.Linear(2, 2)
    module.register_parameter("none", nn.Parameter(torch.empty(shape)))
    module.register_buffer("none_either", torch.empty(shape))
    module.register_buffer("nor_here", torch.empty(shape, dtype=torch.int64))
    manifest = describe(module)
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


def test_a_buffer_that_the_module_assigns_anew_is_followed() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return self.linear(x - self.mean)

    module = Centred()
    flat = FlatModel(module)
    module(torch.ones(1, 2))
    floats, ints = torch.zeros(2), torch.zeros(0, dtype=torch.int64)
    flat.write_buffers(floats, ints)
    assert floats.tolist() == pytest.approx([0.1, 0.1])
    flat.read_buffers(torch.tensor([5.0, 6.0]), ints)
    assert module.mean.tolist() == [5, 6]


def test_a_step_without_any_gradient_is_no_error() -> None:
    flat = FlatModel(nn.Linear(2, 1))
    (gradient,) = pieces(flat, 1)
    assert flat.take_gradient([gradient]) == [False, False]
    assert gradient.tolist() == [0, 0, 0]


class Halves(nn.Module):
    """One half compiled, with buffers, a frozen parameter and a tied one."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        half = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
        half[0].bias.requires_grad_(False)
        self.first = torch.compile(half, backend="eager") if compiled else half
        self.second = nn.Linear(2, 2)
        self.second.weight = half[2].weight


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_model_has_the_names_of_the_plain_one(whole: bool) -> None:
    plain = Halves(compiled=False)
    module: nn.Module = Halves(compiled=True)
    if whole:
        module = torch.compile(module, backend="eager")
    flat = FlatModel(module)
    assert flat.manifest == describe(plain)
    assert flat.frozen().keys() == {"first.0.bias"}
    floats, ints = torch.zeros(4), torch.zeros(1, dtype=torch.int64)
    flat.read_buffers(torch.full((4,), 3.0), torch.tensor([7]))
    flat.write_buffers(floats, ints)
    flat.check_identity()
    state = flat.manifest.state_dict(flat.params, floats, ints, flat.frozen())
    plain.load_state_dict(state)
    assert plain.first[1].running_var.tolist() == [3, 3]
    load_state(module, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    assert not flat.params.any()
