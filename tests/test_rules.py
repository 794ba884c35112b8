"""Rules: each one's equation on small numbers, what it remembers, and what it does in a run."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import toy_recipe
from torch import Tensor, nn

import offbeat
from offbeat.config import RULES, RULES_OF_SEVERAL, RULES_OF_SUMS, make_config
from offbeat.errors import ConfigError
from offbeat.flat import FlatModel
from offbeat.optim import SGD
from offbeat.rules import (
    BUILT_IN,
    AdaptiveDelayCompensated,
    Dana,
    DelayAdaptive,
    DelayedNesterov,
    GapAware,
    Gradient,
    Rule,
    Sum,
    make_rule,
)
from offbeat.run.checkpoint import Checkpoint, newest_checkpoint
from offbeat.shard import Shard, ShardState, partition, segments_of

OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("apply-reply", "bounded:2")]
REMEMBERING = [name for name, kind in BUILT_IN.items() if kind.remembers]


def applied(
    rule: Rule,
    *gradients: Sequence[float],
    staleness: Sequence[int] = (0,),
    params: Sequence[float] = (0.0, 0.0),
    base: Sequence[float] | None = None,
    workers: Sequence[int] = (0,),
    version: int = 0,
) -> list[float]:
    """What it makes of these, in a shard whose parameters they are."""
    given = [
        Gradient(
            torch.tensor(values, dtype=torch.float32),
            worker=workers[index % len(workers)],
            base_version=version - staleness[index % len(staleness)],
            base=None if base is None else torch.tensor(base, dtype=torch.float32),
        )
        for index, values in enumerate(gradients)
    ]
    kept = [gradient.values.clone() for gradient in given]
    ages = [staleness[index % len(staleness)] for index in range(len(given))]
    here = torch.tensor(params, dtype=torch.float32)
    out = torch.full_like(here, math.nan)
    made = rule(given, ages, here.clone(), out)
    assert made is out or any(made is gradient.values for gradient in given)
    for gradient, values in zip(given, kept, strict=True):
        assert torch.equal(gradient.values, values), "they are the workers'"
    return [round(value, 5) for value in made.tolist()]


def test_the_names_in_the_configuration_are_those_of_the_classes() -> None:
    assert tuple(BUILT_IN) == RULES
    assert {n for n, kind in BUILT_IN.items() if issubclass(kind, Sum)} == set(RULES_OF_SUMS)
    assert {n for n, kind in BUILT_IN.items() if kind.of_several} == set(RULES_OF_SEVERAL)


# -- equations -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mean", [3.2, 2.0]),
        ("sum", [16.0, 10.0]),
        ("trimmed-mean", [2.0, 2.0]),
        ("trimmed-mean:2", [2.0, 2.0]),
        ("trimmed-mean:9", [2.0, 2.0]),
        ("median", [2.0, 2.0]),
    ],
)
def test_one_gradient_out_of_several(text: str, expected: list[float]) -> None:
    several = ([1, 2], [2, 2], [3, 2], [100, -94], [-90, 98])
    assert applied(make_rule(text), *several) == expected
    assert applied(make_rule(text), [5, -7]) == [5, -7], "of one it is that one"


def test_of_an_even_number_the_two_in_the_middle_are_left() -> None:
    several = ([1, 0], [2, 0], [4, 0], [100, 0])
    assert applied(make_rule("median"), *several) == [3, 0]
    assert applied(make_rule("trimmed-mean:5"), *several) == [3, 0]


@pytest.mark.parametrize(
    ("text", "staleness", "weight"),
    [
        ("staleness-aware", 0, 1),
        ("staleness-aware", 1, 1),
        ("staleness-aware", 4, 0.25),
        ("delay-adaptive:2", 2, 1),
        ("delay-adaptive:2", 8, 0.25),
        ("delay-adaptive", 4, 1),
        ("delay-adaptive", 8, 0.5),
        ("exponential:0.5", 4, math.exp(-2)),
        ("exponential", 4, math.exp(-0.4)),
    ],
)
def test_a_smaller_step_for_what_is_stale(text: str, staleness: int, weight: float) -> None:
    rule = make_rule(text, updates_per_pass=4)
    expected = [round(weight * 2, 5), round(weight * -4, 5)]
    assert applied(rule, [2, -4], staleness=[staleness]) == expected
    both = applied(rule, [2, -4], [1, 1], staleness=[staleness, 0])
    assert both == pytest.approx([weight + 0.5, 0.5 - 2 * weight], abs=1e-5), "the mean of each"


def test_delay_compensation() -> None:
    """g + s g g (x - x')"""
    options: dict[str, Any] = {"params": [3, 1], "base": [1, 2]}
    rule = make_rule("dc-asgd:0.5")
    assert applied(rule, [2, -4], **options) == [2 + 0.5 * 4 * 2, -4 - 0.5 * 16]
    adaptive = AdaptiveDelayCompensated(strength=0.5, decay=0.75)
    roots = [math.sqrt(0.25 * 4), math.sqrt(0.25 * 16)]
    expected = [2 + 0.5 / roots[0] * 4 * 2, -4 - 0.5 / roots[1] * 16]
    assert applied(adaptive, [2, -4], **options) == expected
    roots = [math.sqrt(0.75 * 1 + 0.25 * 1), math.sqrt(0.75 * 4 + 0.25 * 4)]
    expected = [1 + 0.5 / roots[0] * 2, -2 - 0.5 / roots[1] * 4]
    assert applied(adaptive, [1, -2], **options) == [round(each, 5) for each in expected]


def test_the_gap_counts_in_usual_steps() -> None:
    rule = GapAware(decay=0.75)
    assert applied(rule, [8, 8], params=[0, 0], base=[0, 0]) == [8, 8]
    # one step moved it by (2, 1): a gap of (4, 1) is of 2 steps and of 1
    assert applied(rule, [9, 8], params=[2, 1], base=[-2, 0]) == [3, 4]
    root = math.sqrt(0.75 * 4 + 0.25 * 36)  # the next one by (6, 1)
    expected = [round(8 / (6 / root + 1), 5), 8]
    assert applied(rule, [8, 8], params=[8, 2], base=[2, 2]) == expected


def test_each_worker_has_a_momentum_of_its_own() -> None:
    rule = Dana(momentum=0.5)
    assert applied(rule, [2, 0], workers=[0]) == [3, 0]
    assert applied(rule, [4, 2], workers=[1]) == [6, 3]
    assert applied(rule, [2, 0], workers=[0]) == [2 + 0.5 * 3, 0]
    assert sorted(rule.state()) == ["worker-0", "worker-1"]


def test_momentum_is_renewed_once_a_pass() -> None:
    rule = DelayedNesterov(momentum=0.5)
    rule.updates_per_pass = 2
    assert applied(rule, [4, 0], version=0) == [2, 0]
    # v = (4 + 8) / 2
    assert applied(rule, [8, 0], version=1) == [4 + 0.5 * 6, 0]
    assert applied(rule, [4, 0], version=2) == [2, 0]
    # v = 0.5 * 6 + (4 + 0) / 2
    assert applied(rule, [0, 0], version=3, staleness=[3]) == [0.5 * 5, 0]


def test_momentum_can_be_spread_over_a_pass() -> None:
    rule = DelayedNesterov(momentum=0.5, spread=0.25)
    rule.updates_per_pass = 2
    assert applied(rule, [4, 0], version=0) == [2, 0]
    assert applied(rule, [8, 0], version=1) == [4 + 0.75 * 0.5 * 6, 0]
    assert applied(rule, [4, 0], version=2) == [2 + 0.25 * 0.5 * 6, 0]
    rule.spread = 1  # more than there is
    assert applied(rule, [0, 0], version=3) == [0.5 * 0.5 * 5, 0]


# -- in a shard ------------------------------------------------------------------------------------


def make_shard(
    rule: str,
    lo: int = 0,
    hi: int | None = None,
    *,
    state: ShardState | None = None,
    **options: Any,
) -> Shard:
    torch.manual_seed(3)
    flat = FlatModel(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)))
    hi = flat.manifest.num_elements if hi is None else hi
    optimizer = options.pop("optimizer", SGD(lr=0.1))
    shard = Shard(
        flat.params[lo:hi].clone(),
        segments_of(flat.manifest, optimizer, lo, hi),
        optimizer,
        rule=make_rule(rule, updates_per_pass=2),
        **options,
    )
    if state is not None:
        shard.load(state)
    shard.make_updater()
    return shard


def gradients(shard: Shard, count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(len(shard.params), generator=generator) for _ in range(count)]


def feed(shard: Shard, given: Sequence[Tensor], lo: int = 0, hi: int | None = None) -> None:
    """Two workers in turn, each by so much behind as the other pushes meanwhile."""
    bases = [shard.params.clone(), shard.params.clone()]
    for number, values in enumerate(given):
        worker = number % 2
        shard.updaters[0].apply(
            [
                Gradient(
                    values[lo:hi],
                    worker=worker,
                    base_version=max(0, shard.version - 1),
                    base=bases[worker] if shard.rule.needs_base else None,
                )
            ]
        )
        bases[worker].copy_(shard.params)


@pytest.mark.parametrize("name", [n for n in RULES if not BUILT_IN[n].has_momentum and n != "sum"])
def test_where_nothing_is_stale_all_is_as_without_to_the_bit(name: str) -> None:
    plain, ruled = make_shard("mean"), make_shard(name)
    for values in gradients(plain, 5):
        for shard in (plain, ruled):
            base = shard.params.clone() if shard.rule.needs_base else None
            given = Gradient(values, base_version=shard.version, base=base)
            shard.updaters[0].apply([given])
    assert torch.equal(plain.params, ruled.params)


@pytest.mark.parametrize("name", ["dana", "delayed-nesterov"])
def test_the_momentum_of_one_worker_is_nesterovs(name: str) -> None:
    nesterov = make_shard("mean", optimizer=SGD(lr=0.1, momentum=0.9, nesterov=True))
    ruled = make_shard(name)
    ruled.rule.updates_per_pass = 1
    for values in gradients(ruled, 5):
        for shard in (nesterov, ruled):
            shard.updaters[0].apply([Gradient(values, base_version=shard.version)])
    assert torch.allclose(ruled.params, nesterov.params, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_shard_goes_on_with_what_its_rule_remembers(name: str) -> None:
    whole = make_shard(name)
    all_of_them = gradients(whole, 9)
    feed(whole, all_of_them[:5])
    state = whole.state({})
    assert any(key.startswith(f"rule.{name}.") for key in state.tensors)
    forgetful = make_shard(name, state=whole.state({}))
    forgetful.rule.load({})
    again = make_shard(name, state=state)
    for shard in (whole, again, forgetful):
        feed(shard, all_of_them[5:])
    assert torch.equal(whole.params, again.params)
    assert not torch.equal(whole.params, forgetful.params)


@pytest.mark.parametrize("name", REMEMBERING)
def test_what_a_rule_remembers_is_cut_with_the_parameters(name: str) -> None:
    whole = make_shard(name)
    size = len(whole.params)
    two = [make_shard(name, lo, hi) for lo, hi in partition(size, 2)]
    all_of_them = gradients(whole, 9)
    feed(whole, all_of_them[:5])
    for shard, (lo, hi) in zip(two, partition(size, 2), strict=True):
        feed(shard, all_of_them[:5], lo, hi)
    flat = FlatModel(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)))
    states = tuple(shard.state({}) for shard in two)
    kept = Checkpoint(version=5, manifest=flat.manifest, shards=states, frozen={})
    cuts = partition(size, 3)
    three = [
        make_shard(name, lo, hi, state=state)
        for (lo, hi), state in zip(cuts, kept.recut(cuts), strict=True)
    ]
    feed(whole, all_of_them[5:])
    for shard, (lo, hi) in zip(three, partition(size, 3), strict=True):
        feed(shard, all_of_them[5:], lo, hi)
    assert torch.equal(torch.cat([shard.params for shard in three]), whole.params)


def test_a_rule_that_is_another_one_now_begins_anew() -> None:
    before = make_shard("dana")
    feed(before, gradients(before, 3))
    after = make_shard("delayed-nesterov", state=before.state({}))
    assert after.rule.state() == {}


# -- in a run --------------------------------------------------------------------------------------


def train(run_dir: Path, **options: Any) -> offbeat.Result:
    options = {"engine": "inproc", "workers": 2, "steps": 20, "quiet": True, **options}
    return offbeat.train(toy_recipe(), run_dir=run_dir, **options)


@pytest.mark.parametrize("discipline", ["sync", "lock-free", *OTHERS])
@pytest.mark.parametrize("name", RULES)
def test_any_rule_goes_with_any_discipline(name: str, discipline: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"rule": name, "discipline": discipline, "servers": 2, "steps": 8}
    if name in RULES_OF_SEVERAL and discipline != "sync":
        with pytest.raises(ConfigError, match=f"the rule {name} is for updates of several"):
            train(tmp_path / "r", **options)
        return
    summary = train(tmp_path / "r", **options).summary
    assert summary["status"] == "finished" and summary["gradients"] == 16
    assert summary["rejected"] == summary["dropped"] == 0


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_resumed_run_is_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    def params(run_dir: Path) -> Tensor:
        state = newest_checkpoint(run_dir / "checkpoints").shards
        return torch.cat([shard.tensors["params"] for shard in state])

    options = {"rule": name, "discipline": "sync", "servers": 2}
    whole = train(tmp_path / "whole", **options)
    train(tmp_path / "parts", **options, checkpoint_every=4, steps=8)
    parts = offbeat.resume(tmp_path / "parts", toy_recipe(), steps=20)
    assert torch.equal(params(whole.run_dir), params(parts.run_dir))


@pytest.mark.parametrize("rule", ["trimmed-mean", "median"])
def test_one_of_five_that_lies_does_no_harm(rule: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"workers": 5, "discipline": "sync", "lying_worker": "2:-100x"}
    clean = train(tmp_path / "clean", workers=5, discipline="sync").summary["test_accuracy"]
    ruled = train(tmp_path / "ruled", rule=rule, **options).summary["test_accuracy"]
    harmed = train(tmp_path / "harmed", **options).summary["test_accuracy"]
    assert ruled > clean - 0.02 and harmed < clean - 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "man"}, "unknown rule 'man'; did you mean 'mean'"),
        ({"rule": "exponential:x"}, "beta"),
        ({"rule": "trimmed-mean:0"}, "liars must be at least 1"),
        ({"rule": "mean:3"}, "mean"),
        ({"rule": "dana", "optimizer": "sgd:momentum=0.9"}, "has a momentum of its own"),
        ({"rule": "delayed-nesterov", "local_steps": 2, "outer_optimizer": "nesterov"}, "momentum"),
    ],
)
def test_what_a_rule_cannot_be_told(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tmp_path / "r", **{"discipline": "sync", **options})


def test_a_rules_options_are_part_of_a_runs_name() -> None:
    assert make_config({"rule": "dana:0.5"}).variant == "apply-reply, dana:0.5"


def test_what_is_not_stale_is_whole_where_an_update_takes_more_than_everybodys_push() -> None:
    rule = make_rule("delay-adaptive", updates_per_pass=0.5)
    assert isinstance(rule, DelayAdaptive)
    assert [rule.weight(staleness) for staleness in (0, 1, 2)] == [1, 1, 0.5]
