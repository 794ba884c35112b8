"""The shard's arithmetic: torch's own, on slices, to the bit."""

import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from helpers import make_plain_optimizer, toy_job, toy_recipe
from own_optimizers import (
    Counting,
    Failing,
    Listing,
    Noisy,
    Rateless,
    Signs,
    Stepping,
    Together,
    Trusting,
)
from torch import nn

from offbeat import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    RMSprop,
    config,
    cosine,
    optimizer,
    schedule,
    step_decay,
)
from offbeat.accounts import Account
from offbeat.errors import ConfigError
from offbeat.flat import FlatModel
from offbeat.optim import (
    BY_NAME,
    KINDS,
    REFUSED,
    SPARSE,
    WHOLE,
    Length,
    Optimizer,
    constant,
    named_optimizer,
)
from offbeat.probing import Reach, _try_out, reach_of
from offbeat.rules import BUILT_IN as RULES
from offbeat.rules import Gradient
from offbeat.schedules import Rates, in_run
from offbeat.shard import Shard, Updater, partition, partition_tensors, segments_of, usable

OPTIMIZERS = {
    "sgd": SGD(lr=0.1),
    "weight decay": SGD(lr=0.1, weight_decay=0.01),
    "momentum": SGD(lr=0.1, momentum=0.9),
    "nesterov": SGD(lr=0.1, momentum=0.9, nesterov=True),
    "adam": Adam(lr=0.01),
    "amsgrad": Adam(lr=0.01, amsgrad=True),
    "adamw": AdamW(lr=0.01, weight_decay=0.1),
    "adagrad": Adagrad(lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": RMSprop(lr=0.01),
    "centered rmsprop": RMSprop(lr=0.01, centered=True, momentum=0.5),
    "maximize": SGD(lr=0.1, maximize=True),
    "dampening": SGD(lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    "adadelta": Optimizer(kind="Adadelta", options={"lr": 1.0}),
    "adamax": Optimizer(kind="Adamax", options={"lr": 0.01}),
    "asgd": Optimizer(kind="ASGD", options={"lr": 0.05, "t0": 2}),
    "nadam": Optimizer(kind="NAdam", options={"lr": 0.01}),
    "radam": Optimizer(kind="RAdam", options={"lr": 0.01}),
    "rprop": Optimizer(kind="Rprop", options={"lr": 0.01}),
    "one's own": optimizer(Signs),
}


def make_shards(
    flat: FlatModel, optimizer: Optimizer, num_shards: int, **options: Any
) -> list[Shard]:
    return [
        Shard(
            flat.params[lo:hi].clone(),
            segments_of(flat.manifest, optimizer, lo, hi),
            optimizer,
            **options,
        )
        for lo, hi in partition(flat.manifest.num_elements, num_shards)
    ]


def odd_model() -> nn.Module:
    """Tensors of sizes that fit no vector register, large enough for several kernel threads."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(331, 199), nn.Tanh(), nn.Linear(199, 7))


def gradients(flat: FlatModel, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    size = flat.manifest.num_elements
    return [torch.randn(size, generator=generator) * 10.0**-k for k in range(count)]


def step_plainly(module: nn.Module, optimizer: torch.optim.Optimizer, values: torch.Tensor) -> None:
    offset = 0
    for parameter in module.parameters():
        part = values[offset : offset + parameter.numel()]
        parameter.grad = part.view_as(parameter).clone()
        offset += parameter.numel()
    optimizer.step()


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slices_give_the_bits_of_plain_torch(name: str, num_shards: int) -> None:
    spec = OPTIMIZERS[name]
    flat = FlatModel(odd_model())
    shards = make_shards(flat, spec, num_shards)
    updaters = [shard.make_updater() for shard in shards]
    plain = odd_model()
    optimizer = make_plain_optimizer(spec, plain)
    for values in gradients(flat, 6):
        for (lo, hi), updater in zip(partition(len(values), num_shards), updaters, strict=True):
            updater.apply([Gradient(values[lo:hi])])
        step_plainly(plain, optimizer, values)
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    assert torch.equal(torch.cat([shard.params for shard in shards]), expected)


@pytest.mark.parametrize("name", ["momentum", "adam", "adamw", "adagrad"])
def test_fused_kernels_come_close(name: str) -> None:
    spec = OPTIMIZERS[name]
    flat = FlatModel(odd_model())
    (fused,) = make_shards(flat, spec, 1, fused=True)
    (default,) = make_shards(flat, spec, 1)
    for shard in (fused, default):
        updater = shard.make_updater()
        for values in gradients(flat, 6):
            updater.apply([Gradient(values.clone())])
    assert any(g.get("fused") for g in fused.updaters[0].optimizer.param_groups)
    torch.testing.assert_close(fused.params, default.params, rtol=1e-4, atol=1e-6)


def test_an_optimizer_without_a_fused_form_says_so() -> None:
    with pytest.raises(ConfigError, match="--fused"):
        RMSprop().check(fused=True)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_tensor_without_a_gradient_is_skipped_as_torch_does(
    name: str, shared: bool, num_shards: int
) -> None:
    """Momentum must not go on moving it, and its step count must not grow."""
    if shared and name == "dampening":
        pytest.skip("shared state begins with zeros, so that the first step is dampened too")
    spec = OPTIMIZERS[name]
    flat = FlatModel(odd_model())
    shards = make_shards(flat, spec, num_shards)
    updaters = [shard.make_updater(shared=shared) for shard in shards]
    plain = odd_model()
    optimizer = make_plain_optimizer(spec, plain)
    masks = [None, None, [True, False, True, False], [False] * 4, None, [False, True, True, True]]
    for values, mask in zip(gradients(flat, 6), masks, strict=True):
        for (lo, hi), updater in zip(partition(len(values), num_shards), updaters, strict=True):
            updater.apply([Gradient(values[lo:hi], mask)])
        offset = 0
        for parameter, present in zip(plain.parameters(), mask or [True] * 4, strict=True):
            part = values[offset : offset + parameter.numel()].view_as(parameter)
            parameter.grad = part.clone() if present else None
            offset += parameter.numel()
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    assert torch.equal(torch.cat([shard.params for shard in shards]), expected)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_parameter_groups_are_segments(num_shards: int) -> None:
    spec = SGD(lr=0.1, momentum=0.9, groups={"*.bias": {"lr": 0.01}, "2.*": {"weight_decay": 0.5}})
    flat = FlatModel(odd_model())
    shards = make_shards(flat, spec, num_shards)
    plain = odd_model()
    by_name = dict(plain.named_parameters())
    optimizer = torch.optim.SGD(
        [
            {"params": [by_name["0.weight"]]},
            {"params": [by_name["0.bias"], by_name["2.bias"]], "lr": 0.01},
            {"params": [by_name["2.weight"]], "weight_decay": 0.5},
        ],
        lr=0.1,
        momentum=0.9,
    )
    updaters = [shard.make_updater() for shard in shards]
    for values in gradients(flat, 3):
        for (lo, hi), updater in zip(partition(len(values), num_shards), updaters, strict=True):
            updater.apply([Gradient(values[lo:hi])])
        step_plainly(plain, optimizer, values)
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    assert torch.equal(torch.cat([shard.params for shard in shards]), expected)


def toy_shard(**options: Any) -> tuple[Shard, Updater]:
    flat = FlatModel(nn.Linear(3, 1))
    flat.params.zero_()
    (shard,) = make_shards(flat, options.pop("optimizer", SGD(lr=1.0)), 1, **options)
    return shard, shard.make_updater()


def test_a_round_is_averaged_or_summed_into_one_update() -> None:
    for name, expected in (("mean", -2.0), ("sum", -6.0)):
        shard, updater = toy_shard(rule=RULES[name]())
        version = updater.apply([Gradient(torch.full((4,), float(g))) for g in (1, 2, 3)])
        assert version == shard.version == 1
        assert shard.params.tolist() == [expected] * 4


def test_an_update_that_is_cancelled_leaves_nothing() -> None:
    shard, updater = toy_shard()
    updater.cancel(updater.begin([Gradient(torch.ones(4))]))
    assert (shard.version, shard.version_begun, shard.params.tolist()) == (0, 0, [0.0] * 4)
    assert updater.apply([Gradient(torch.ones(4))]) == 1


def test_in_a_round_a_missing_gradient_counts_as_zero_unless_all_miss_it() -> None:
    shard, updater = toy_shard()
    updater.apply(
        [
            Gradient(torch.tensor([2.0, 2, 2, 2]), [True, True]),
            Gradient(torch.tensor([2.0, 2, 2, 0]), [True, False]),
        ]
    )
    assert shard.params.tolist() == [-2, -2, -2, -1]
    updater.apply([Gradient(torch.zeros(4), [False, False])])
    assert shard.params.tolist() == [-2, -2, -2, -1]


def test_the_schedule_is_a_function_of_the_version() -> None:
    shard, updater = toy_shard(schedule=step_decay(every=2, factor=0.5))
    seen = []
    for _ in range(5):
        before = shard.params[0].item()
        updater.apply([Gradient(torch.ones(4))])
        seen.append(before - shard.params[0].item())
    assert seen == [1, 1, 0.5, 0.5, 0.25]


def test_a_schedule_can_be_said_in_epochs() -> None:
    decay = in_run(step_decay(every_epochs=1.5, factor=0.5), Length(60, 10))
    assert [decay(v, None) for v in (0, 14, 15, 29, 30, 59)] == [1, 1, 0.5, 0.5, 0.25, 0.125]
    by_epochs = in_run(cosine(warmup_epochs=2), Length(60, 10))
    by_updates = cosine(warmup=20)
    assert [by_epochs(v, None) for v in range(60)] == [by_updates(v, 60) for v in range(60)]
    shifted = in_run(cosine(warmup_epochs=2), Length(60, 10, shift=10))
    assert shifted(10, None) == 1.0 and shifted(9, None) < 1.0
    for wrong in ({}, {"every": 1, "every_epochs": 1}):
        with pytest.raises(ConfigError, match="give one of the two"):
            step_decay(**wrong, factor=0.1)
    with pytest.raises(ConfigError, match="give one of the two"):
        cosine(warmup=3, warmup_epochs=1)


def test_torchs_schedules_may_be_made_of_others() -> None:
    parts = [schedule("LinearLR", total_iters=5), schedule("ExponentialLR", gamma=0.9)]
    made = schedule("SequentialLR", schedulers=parts, milestones=[5])
    assert str(made) == (
        "SequentialLR(schedulers=[LinearLR(), ExponentialLR(gamma=0.9)], milestones=[5])"
    )
    real = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    expected = torch.optim.lr_scheduler.SequentialLR(
        real,
        [
            torch.optim.lr_scheduler.LinearLR(real, total_iters=5),
            torch.optim.lr_scheduler.ExponentialLR(real, gamma=0.9),
        ],
        milestones=[5],
    )
    rates = Rates(SGD(lr=1.0), made, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in range(12):
            assert rates.at(version)[0]["lr"] == real.param_groups[0]["lr"]
            assert made(version, None) == real.param_groups[0]["lr"]
            real.step()
            expected.step()
    again = rates.at(3)[0]["lr"]
    assert again == made(3, None), "an earlier version may be asked for too"


@pytest.mark.parametrize(
    ("kind", "options", "own"),
    [
        ("OneCycleLR", {"max_lr": 0.1}, "max_lr"),
        ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.1}, "base_lr and max_lr"),
    ],
)
def test_a_rate_that_the_schedule_overrules_is_refused(
    kind: str, options: dict[str, Any], own: str
) -> None:
    recipe = toy_recipe(optimizer=SGD(lr=0.1, momentum=0.9), schedule=schedule(kind, **options))
    toy_job(recipe, steps=50)
    with pytest.raises(ConfigError, match=f"--lr 0.5 would change nothing: {kind}.*another {own}$"):
        toy_job(recipe, steps=50, lr=0.5)
    with pytest.raises(ConfigError, match="--lr-scale linear would change nothing"):
        toy_job(recipe, steps=50, lr_scale="linear")


def test_a_rate_that_the_schedule_scales_is_taken() -> None:
    for kind, options in (("StepLR", {"step_size": 3}), ("ReduceLROnPlateau", {})):
        recipe = toy_recipe(schedule=schedule(kind, **options))
        assert toy_job(recipe, steps=50, lr=0.5).optimizer.options["lr"] == 0.5


class OwnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    pass


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (OwnPlateau, {}, "OwnPlateau cannot be used: it goes by a score.*ReduceLROnPlateau itself"),
        ("ReduceLROnPlateau", {"patienc": 3}, "no option 'patienc'; did you mean 'patience'"),
        ("ReduceLROnPlateau", {"per": "epoch"}, "goes by scores: leave per out"),
        ("ReduceLROnPlateau", {"factor": 1.5}, "factor of a plateau must be between 0 and 1"),
        ("ReduceLROnPlateau", {"min_lr": [0.1]}, "min_lr of a plateau must be a number"),
        ("ReduceLROnPlateau", {"mode": "most"}, "mode of a plateau must be min or max"),
        ("LRScheduler", {}, "LRScheduler is abstract"),
        (nn.Linear, {}, "Linear is no scheduler"),
        ("StepLr", {"step_size": 3}, "unknown scheduler 'StepLr'; did you mean 'StepLR'"),
        ("CosineAnnealingLR", {}, "CosineAnnealingLR needs T_max"),
        ("StepLR", {"stepsize": 3}, "StepLR has no option 'stepsize'; did you mean 'step_size'"),
        ("StepLR", {"step_size": 3, "last_epoch": 7}, "StepLR has no option 'last_epoch'"),
        ("StepLR", {"step_size": 3, "per": "batch"}, "per update or per epoch, not per 'batch'"),
    ],
)
def test_what_is_no_schedule_is_refused_in_a_line(
    kind: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule(kind, **options)


def test_cosine_warms_up_and_ends_at_its_final_value() -> None:
    schedule = cosine(warmup=4, final=0.1)
    assert [schedule(v, 100) for v in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert schedule(4, 100) == 1.0
    by_fraction = cosine(warmup=0.04, final=0.1)
    assert [by_fraction(v, 100) for v in range(101)] == [schedule(v, 100) for v in range(101)]
    assert schedule(52, 100) == pytest.approx(0.55)
    assert schedule(100, 100) == schedule(200, 100) == pytest.approx(0.1)
    assert constant()(17, None) == 1.0
    with pytest.raises(ConfigError, match="--steps"):
        schedule(0, None)


def test_the_moving_average_follows_tensorflows_formula() -> None:
    shard, updater = toy_shard(ema_decay=0.3)
    shadow, value = 0.0, 0.0
    for t in range(1, 8):
        updater.apply([Gradient(torch.ones(4))])
        value -= 1.0
        decay = min(0.3, (1 + t) / (10 + t))
        shadow -= (1 - decay) * (shadow - value)
        assert shard.ema is not None
        assert shard.ema.tolist() == pytest.approx([shadow] * 4, rel=1e-6)
    assert (1 + 1) / (10 + 1) < 0.3 < (1 + 7) / (10 + 7), "both branches were taken"


def test_buffers_take_the_mean_of_a_round_the_latest_alone_and_the_largest_integer() -> None:
    shard, updater = toy_shard(floats=torch.zeros(2), ints=torch.zeros(1, dtype=torch.int64))

    def gradient(value: float, count: int) -> Gradient:
        return Gradient(torch.zeros(4), None, torch.full((2,), float(value)), torch.tensor([count]))

    updater.apply([gradient(1, 5), gradient(3, 4)])
    assert (shard.floats.tolist(), shard.ints.tolist()) == ([2, 2], [5])
    updater.apply([gradient(7, 2)])
    assert (shard.floats.tolist(), shard.ints.tolist()) == ([7, 7], [5])


def test_partition_is_disjoint_complete_and_balanced() -> None:
    for size in (1, 7, 100, 1_068_298):
        for count in (1, 2, 3, 7):
            slices = partition(size, count)
            assert slices[0][0] == 0 and slices[-1][1] == size
            assert all(a[1] == b[0] for a, b in itertools.pairwise(slices))
            lengths = [hi - lo for lo, hi in slices]
            assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e38, -1e38])
def test_one_bad_element_makes_a_gradient_unusable(bad: float) -> None:
    values = torch.randn(10_001)
    assert usable(values)
    for place in (0, 4321, 10_000):
        spoilt = values.clone()
        spoilt[place] = bad
        assert not usable(spoilt)
    assert usable(torch.empty(0))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_a_shard_is_flat_and_complete(name: str) -> None:
    """Splitting an updater must not change what a checkpoint holds, but for step counts."""
    flat = FlatModel(odd_model())
    (shard,) = make_shards(flat, OPTIMIZERS[name], 1)
    updater = shard.make_updater()
    for values in gradients(flat, 3):
        updater.apply([Gradient(values)])
    whole = shard.state({}).tensors
    updater.apply([Gradient(values, [False] * 4)])
    split = shard.state({}).tensors
    assert set(whole) == set(split)
    for key, value in whole.items():
        assert torch.equal(value, split[key]), key
    if "optimizer.scalar.step" in whole:
        assert whole["optimizer.scalar.step"].tolist() == [3, 3, 3, 3]


def test_every_kind_is_tested_here() -> None:
    assert {spec.kind for spec in OPTIMIZERS.values()} >= set(KINDS)
    others = {name for name in torch.optim.__all__ if name[0].isupper()} - {"Optimizer"}
    known = {*KINDS, *WHOLE, *SPARSE, *REFUSED}
    assert others == known, "one that is new in torch needs a decision"
    assert known - set(REFUSED) == {name for name in config.OPTIMIZERS if name[0].isupper()}


def test_plain_sgd_is_told_from_other_kinds() -> None:
    assert SGD(lr=0.1, groups={"*.bias": {"lr": 0.2, "dampening": 0.0}}).is_plain_sgd
    for options in ({"momentum": 0.5}, {"maximize": True}, {"weight_decay": 0.1}):
        assert not SGD(**options).is_plain_sgd
        assert not SGD(groups={"*.bias": options}).is_plain_sgd


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("LBFGS", "several times in a step.*these work: SGD, Adam"),
        ("Adan", "unknown optimizer 'Adan'; did you mean 'Adam'"),
        ("lr_scheduler", "unknown optimizer"),
    ],
)
def test_an_optimizer_that_cannot_work_on_slices_is_refused(kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Optimizer(kind=kind, options={"lr": 0.1})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (torch.optim.LBFGS, {}, "LBFGS cannot be used: .*several times in a step"),
        (torch.optim.Optimizer, {}, "Optimizer is abstract"),
        (nn.Linear, {}, "Linear is no optimizer: .*derived from torch.optim.Optimizer"),
        (7, {}, "7 is no optimizer"),
        (Signs, {"bta": 1}, "Signs has no option 'bta'; did you mean 'beta'"),
        (Signs, {"beta": torch.ones(1)}, "beta of Signs must be made of numbers and text"),
        (Rateless, {}, "Rateless has no option lr"),
        ("own_optimizers:Sings", {}, "no optimizer 'Sings'; did you mean 'Signs'"),
        ("no_such_module:Signs", {}, "importing no_such_module failed"),
        ("Adan", {}, "unknown optimizer 'Adan'; did you mean 'Adam'"),
    ],
)
def test_what_is_no_optimizer_is_refused_in_a_line(
    kind: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        optimizer(kind, **options)
    assert "\n" not in str(caught.value)


def test_an_optimizer_is_named_by_its_class_or_where_it_is() -> None:
    given = optimizer(torch.optim.Adadelta, rho=0.8)
    assert given == optimizer("Adadelta", rho=0.8)
    assert given.options == {"lr": 1.0, "rho": 0.8}, "the learning rate is torch's own"
    assert str(given) == "Adadelta(lr=1.0, rho=0.8)"
    own = optimizer("own_optimizers:Signs", lr=0.5)
    assert own.maker is Signs
    assert str(own) == str(optimizer(Signs, lr=0.5)) == "Signs(lr=0.5)"
    both = SGD(lr=0.1, groups={"*.bias": own})
    assert str(both) == "SGD(lr=0.1, groups={'*.bias': Signs(lr=0.5)})"


def test_the_flag_names_optimizers_with_their_options() -> None:
    assert named_optimizer("momentum") == SGD(lr=0.05, momentum=0.9)
    found = named_optimizer("Adam:betas=[0.8,0.9]:amsgrad=true")
    assert found.options == {"lr": 1e-3, "betas": [0.8, 0.9], "amsgrad": True}
    assert named_optimizer("own_optimizers:Signs:beta=0.5").options["beta"] == 0.5
    with pytest.raises(ConfigError, match=r"Adam takes options as Adam:lr=0.1:NAME=VALUE.*'0\.5'"):
        named_optimizer("Adam:0.5")


@pytest.mark.parametrize("kind", [*KINDS, *WHOLE])
def test_trying_out_finds_what_is_known_of_torchs_optimizers(kind: str) -> None:
    expected = Reach.TENSOR if kind in WHOLE else Reach.ELEMENT
    assert reach_of(optimizer(kind)) == _try_out(optimizer(kind)) == expected


def test_trying_out_finds_how_much_an_optimizer_has_to_see() -> None:
    before = torch.get_rng_state()
    assert reach_of(optimizer(Signs)) == reach_of(optimizer(Noisy)) == Reach.ELEMENT
    assert reach_of(optimizer(Signs, whole_tensors=True)) == Reach.TENSOR
    assert reach_of(optimizer(Trusting)) == Reach.TENSOR
    assert reach_of(optimizer(Together)) == Reach.MODEL
    assert reach_of(SGD(groups={"*.bias": optimizer(Trusting)})) == Reach.TENSOR
    assert torch.equal(torch.get_rng_state(), before), "the caller's own generator"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Counting, "Counting counts in its count, which no checkpoint has"),
        (Listing, "keeps a list as 'history', which no checkpoint can hold"),
        (Failing, "Failing failed when it was tried out: NotImplementedError"),
    ],
)
def test_trying_out_finds_what_cannot_be_kept(kind: type[Stepping], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reach_of(optimizer(kind))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_group_may_have_an_optimizer_of_its_own(num_shards: int, whole: bool) -> None:
    spec = SGD(lr=0.1, momentum=0.9, groups={"0.*": optimizer(Signs, lr=0.02)})
    flat = FlatModel(odd_model())
    size = flat.manifest.num_elements
    cut = partition_tensors(flat.manifest, num_shards) if whole else partition(size, num_shards)
    shards = [
        Shard(
            flat.params[lo:hi].clone(), segments_of(flat.manifest, spec, lo, hi, whole=whole), spec
        )
        for lo, hi in cut
    ]
    plain = odd_model()
    first = Signs(plain[0].parameters(), lr=0.02)
    second = torch.optim.SGD(plain[2].parameters(), lr=0.1, momentum=0.9)
    updaters = [shard.make_updater() for shard in shards]
    for values in gradients(flat, 4):
        for (lo, hi), updater in zip(cut, updaters, strict=True):
            updater.apply([Gradient(values[lo:hi])])
        step_plainly(plain, first, values)
        second.step()
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    assert torch.equal(torch.cat([shard.params for shard in shards]), expected)


def test_what_begins_as_the_parameters_does_so_where_state_is_shared() -> None:
    """Also where weight decay makes a gradient out of them."""
    flat = FlatModel(odd_model())
    (shard,) = make_shards(flat, optimizer(Signs), 1)
    updater = shard.make_updater(shared=True)
    for alias in updater.aliases:
        kept = updater.optimizer.state[alias.param]
        assert torch.equal(kept["anchor"], alias.view) and kept["step"] == 0
        assert not kept["mean"].any()
    (shard,) = make_shards(flat, SGD(momentum=0.9, weight_decay=0.1), 1)
    updater = shard.make_updater(shared=True)
    assert not updater.optimizer_state()["optimizer.element.momentum_buffer"].any()


def test_tensors_are_shared_out_whole_and_evenly() -> None:
    manifest = FlatModel(
        nn.Sequential(nn.Linear(9, 10), nn.Linear(10, 1), nn.Linear(1, 50), nn.Linear(50, 1))
    ).manifest
    inner = [spec.offset for spec in manifest.tensors[1:]]
    for count in range(1, 9):
        slices = partition_tensors(manifest, count)
        assert slices[0][0] == 0 and slices[-1][1] == manifest.num_elements
        assert all(a[1] == b[0] and a[0] < a[1] for a, b in itertools.pairwise(slices))
        assert {lo for lo, _ in slices[1:]} <= set(inner)
        best = min(
            max(b - a for a, b in itertools.pairwise((0, *cuts, manifest.num_elements)))
            for cuts in itertools.combinations(inner, count - 1)
        )
        assert max(hi - lo for lo, hi in slices) == best
    with pytest.raises(ConfigError, match=r"9 servers for 8 tensors.*lower servers"):
        partition_tensors(manifest, 9)


def test_options_that_torch_would_pass_over_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"no option 'weight_decy' in the .* group '\*\.bias'"):
        SGD(groups={"*.bias": {"weight_decy": 0}})
    with pytest.raises(ConfigError, match="did you mean 'weight_decay'"):
        Adam(weight_decy=0.1)
    with pytest.raises(ConfigError, match="known: lr, momentum"):
        SGD(groups={"*.bias": {"wd": 0}})
    for name in ("foreach", "fused", "capturable", "differentiable"):
        with pytest.raises(ConfigError, match=r"the servers choose.*--fused"):
            Adam(**{name: True})


def test_every_named_optimizer_can_be_built() -> None:
    for make in BY_NAME.values():
        make().check(fused=False)
    with pytest.raises(ConfigError, match="SGD"):
        SGD(lr=0.1, nesterov=True).check(fused=False)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mask", [None, [True, False, True, True]])
def test_a_shard_that_is_loaded_goes_on_with_the_same_bits(
    name: str, shared: bool, mask: list[bool] | None
) -> None:
    flat = FlatModel(odd_model())
    options = {"schedule": cosine(warmup=2), "total_updates": 8, "ema_decay": 0.9}
    (whole,) = make_shards(flat, OPTIMIZERS[name], 1, **options)
    (first,) = make_shards(flat, OPTIMIZERS[name], 1, **options)
    (second,) = make_shards(flat, OPTIMIZERS[name], 1, **options)
    before, after = gradients(flat, 6)[:4], gradients(flat, 8)[4:]
    updater = whole.make_updater(shared=shared)
    for index, values in enumerate([*before, *after]):
        updater.apply([Gradient(values, mask if index == 1 else None)])
    updater = first.make_updater(shared=shared)
    for index, values in enumerate(before):
        updater.apply([Gradient(values, mask if index == 1 else None)])
    accounts = {3: Account(1, 1, applied=1)}
    second.load(first.state({}))
    assert second.version == 4
    again = second.state(accounts)
    assert again.version == 4 and again.accounts == accounts
    assert_states_equal(again.tensors, first.state({}).tensors)
    updater = second.make_updater(shared=shared)
    for values in after:
        updater.apply([Gradient(values)])
    assert second.version == whole.version == 8
    assert_states_equal(second.state({}).tensors, whole.state({}).tensors)


def assert_states_equal(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert state.keys() == other.keys()
    for key, value in state.items():
        assert torch.equal(value, other[key]), key
