"""Rows of sparse tensors: packed, told of, and exchanged."""

import functools
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import Hand, Rig, in_threads, rig
from sparse import Looking
from torch import Tensor, nn

from offbeat.errors import ConfigError
from offbeat.flat import Manifest, Part, RowPart, describe
from offbeat.rows import Changes, Known, joined, rows_of
from offbeat.rules import Rule
from offbeat.shard import partition_rows
from offbeat.transport.base import PushHeader
from offbeat.transport.wire import Connection


@pytest.fixture
def manifest() -> Manifest:
    return describe(Looking())


def some(generator: torch.Generator, num_rows: int, at_most: int = 6) -> Tensor:
    count = int(torch.randint(0, at_most, (), generator=generator))
    return torch.randperm(num_rows, generator=generator)[:count].sort().values


def make_parts(manifest: Manifest, seed: int) -> list[Part]:
    generator = torch.Generator().manual_seed(seed)
    parts: list[Part] = []
    for spec in manifest.tensors:
        if spec.sparse:
            ids = some(generator, spec.shape[0])
            parts.append(RowPart(ids, torch.randn(len(ids), spec.width, generator=generator)))
        else:
            parts.append(torch.randn(spec.numel, generator=generator))
    return parts


def dense(manifest: Manifest, parts: list[Part]) -> Tensor:
    flat = torch.zeros(manifest.num_elements)
    for spec, part in zip(manifest.tensors, parts, strict=True):
        if isinstance(part, RowPart):
            spec.view(flat)[part.ids] = part.values
        elif part is not None:
            spec.view(flat).copy_(part.view(spec.shape))
    return flat


def test_what_is_sparse_is_found(manifest: Manifest) -> None:
    assert [spec.name for spec in manifest.tensors if spec.sparse] == ["words.weight", "bag.weight"]
    tied = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 4))
    tied[1].weight = tied[0].weight
    assert not describe(tied).is_sparse, "its gradient is dense, since another layer has it too"
    assert Manifest.from_json(manifest.to_json()).is_sparse
    assert describe(nn.Embedding(4, 2)) == describe(nn.Embedding(4, 2, sparse=True))


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
def test_no_row_is_cut(manifest: Manifest, servers: int) -> None:
    slices = partition_rows(manifest, servers)
    assert slices[0][0] == 0 and slices[-1][1] == manifest.num_elements
    for (_, hi), (lo, _) in itertools.pairwise(slices):
        assert lo == hi
        for spec in manifest.tensors:
            if spec.sparse and spec.offset < lo < spec.offset + spec.numel:
                assert (lo - spec.offset) % spec.width == 0


def test_a_server_without_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 servers for so few rows.*lower servers"):
        partition_rows(describe(nn.Embedding(2, 30, sparse=True)), 3)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_packed_comes_out_again(manifest: Manifest, servers: int, seed: int) -> None:
    parts = make_parts(manifest, seed)
    whole = dense(manifest, parts)
    for lo, hi in partition_rows(manifest, servers):
        rows = rows_of(manifest, lo, hi)
        assert rows is not None
        raw = torch.zeros(rows.capacity, dtype=torch.int64)
        packed = rows.fill(parts, torch.zeros(hi - lo), raw)
        num_values, num_rows = rows.extent(raw)
        assert num_values == packed.numel()
        ids = rows.read(raw[:num_rows], num_values)
        assert torch.equal(rows.pack(whole[lo:hi], ids), packed)
        flat = torch.zeros(hi - lo)
        rows.unpack(packed, ids, flat)
        assert torch.equal(flat, whole[lo:hi])
        copied = torch.zeros(hi - lo)
        rows.copy(whole[lo:hi], copied, ids)
        assert torch.equal(copied, flat)


def test_gradients_are_spread_over_the_rows_of_all(manifest: Manifest) -> None:
    rows = rows_of(manifest, 0, manifest.num_elements)
    assert rows is not None
    every = [make_parts(manifest, seed) for seed in range(3)]
    wholes = [dense(manifest, parts) for parts in every]
    each = [[part.ids for part in parts if isinstance(part, RowPart)] for parts in every]
    ids = joined(each, 2)
    for whole, mine in zip(wholes, each, strict=True):
        spread = rows.spread(rows.pack(whole, mine), mine, ids)
        assert torch.equal(spread, rows.pack(whole, ids))


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw[:1],
        lambda raw: raw[:-1],
        lambda raw: torch.cat([torch.tensor([-1, 4]), raw[2:]]),
        lambda raw: torch.cat([torch.tensor([1, 2]), raw[2:]]),
        lambda raw: torch.cat([raw[:2], torch.tensor([3, 1, 5])]),
        lambda raw: torch.cat([raw[:2], torch.tensor([3, 3, 5])]),
        lambda raw: torch.cat([raw[:2], torch.tensor([-1, 3, 5])]),
        lambda raw: torch.cat([raw[:2], torch.tensor([1, 3, 11])]),
        lambda raw: torch.cat([raw[:2], torch.tensor([1, 1 << 40, 5])]),
    ],
    ids=[
        *("no count", "too few", "negative", "other counts", "unsorted", "twice"),
        *("below", "above", "far above"),
    ],
)
def test_rows_that_make_no_sense_are_refused(
    manifest: Manifest, change: Callable[[Tensor], Tensor]
) -> None:
    rows = rows_of(manifest, 0, manifest.num_elements)
    assert rows is not None
    ids = [torch.tensor([1, 3]), torch.tensor([5])]
    raw = torch.zeros(rows.capacity, dtype=torch.int64)
    said = raw[: rows.write(ids, raw)]
    num_values = rows.num_values(ids)
    assert [part.tolist() for part in rows.read(said, num_values)] == [[1, 3], [5]]
    with pytest.raises(ValueError, match="a gradient"):
        rows.read(change(said), num_values)


def test_a_worker_is_shown_what_has_changed_since_and_everything_when_that_is_too_much(
    manifest: Manifest,
) -> None:
    rows = rows_of(manifest, 0, manifest.num_elements)
    assert rows is not None
    changes, early, late = Changes(rows), Known(), Known()
    assert changes.show(early) is None, "it has nothing yet"
    assert [ids.tolist() for ids in changes.show(early) or ()] == [[], []]
    changes.add([torch.tensor([1, 3]), torch.tensor([0])])
    assert changes.show(late) is None
    changes.add([torch.tensor([3, 4]), torch.tensor([], dtype=torch.int64)])
    assert [ids.tolist() for ids in changes.show(early) or ()] == [[1, 3, 4], [0]]
    assert [ids.tolist() for ids in changes.show(late) or ()] == [[3, 4], []]
    for _ in range(rows.capacity):
        changes.add([torch.tensor([7]), torch.tensor([7])])
    assert changes.show(early) is None
    assert [ids.tolist() for ids in changes.show(early) or ()] == [[], []]


# -- over every transport --------------------------------------------------------------------------


class RowHand:
    """Moves a worker of a rig's with rows."""

    def __init__(self, made: Rig, hand: Hand) -> None:
        assert made.rows is not None
        self.rows, self.hand, self.manifest = made.rows, hand, made.manifest

    def push(self, parts: list[Part], **header: Any) -> None:
        hand, slot = self.hand, self.hand.link.gradient_slot
        hand.sequence += 1
        self.rows.fill(parts, slot.values, slot.rows)
        num_values, num_rows = self.rows.extent(slot.rows)
        said = {"num_bytes": 4 * num_values, "num_rows": num_rows, **header}
        version = hand.version
        hand.link.push(
            PushHeader(hand.worker, hand.incarnation, hand.sequence, version, hand.sequence, **said)
        )

    @property
    def params(self) -> Tensor:
        return self.hand.params


@pytest.mark.parametrize("transport", ["inproc", "unix", "tcp"])
@pytest.mark.parametrize("discipline", ["apply-reply", "bounded"])
def test_a_worker_has_what_the_server_has_after_every_reply(
    tmp_path: Path, manifest: Manifest, transport: str, discipline: str
) -> None:
    options = {"staleness": 100} if discipline == "bounded" else {}
    rng = random.Random(1)
    with rig(
        tmp_path,
        discipline,
        2,
        manifest=manifest,
        transport=transport,
        discipline_options=options,
    ) as made:
        hands = [RowHand(made, hand) for hand in made.join_all(2)]
        expected = torch.zeros(manifest.num_elements)
        for step in range(60):
            moved = hands[0] if rng.random() < 0.9 else hands[1]  # which falls far behind
            parts = make_parts(manifest, step)
            moved.push(parts)
            assert moved.hand.reply().status == "applied"
            expected -= dense(manifest, parts)
            assert torch.equal(moved.params, expected), step
        again = RowHand(made, made.join(0, incarnation=1))
        assert torch.equal(again.params, expected)
        again.hand.sequence = again.hand.link.welcome.settled_sequence
        again.push(parts := make_parts(manifest, 99))
        again.hand.reply()
        assert torch.equal(again.params, expected - dense(manifest, parts))


@pytest.mark.parametrize("transport", ["inproc", "unix", "tcp"])
def test_a_round_is_the_mean_over_the_rows_of_all(
    tmp_path: Path, manifest: Manifest, transport: str
) -> None:
    with rig(tmp_path, "sync", 2, manifest=manifest, transport=transport) as made:
        hands = [RowHand(made, hand) for hand in made.join_all(2)]
        expected = torch.zeros(manifest.num_elements)
        for step in range(10):
            each = [make_parts(manifest, 2 * step + rank) for rank in range(2)]
            for hand, parts in zip(hands, each, strict=True):
                hand.push(parts)
            one, other = (dense(manifest, parts) for parts in each)
            expected -= (one + other) / 2
            for hand in hands:
                hand.hand.reply()
                torch.testing.assert_close(hand.params, expected)
            assert torch.equal(hands[0].params, made.shard.params)


@pytest.mark.parametrize("transport", ["inproc", "unix", "tcp"])
def test_lock_free_leaves_out_no_row_that_changes_meanwhile(
    tmp_path: Path, manifest: Manifest, transport: str
) -> None:
    def train(hand: RowHand) -> None:
        for step in range(40):
            hand.push(make_parts(manifest, 40 * hand.hand.worker + step))
            hand.hand.reply()

    with rig(tmp_path, "lock-free", 2, manifest=manifest, transport=transport) as made:
        hands = [RowHand(made, hand) for hand in made.join_all(2)]
        in_threads(*(functools.partial(train, hand) for hand in hands))
        nothing: list[Part] = [None for _ in manifest.tensors]
        mask = torch.zeros(len(manifest.tensors), dtype=torch.uint8)
        for _ in range(2):  # everybody's last one is in once, and then in everybody's reply
            for hand in hands:
                hand.hand.link.gradient_slot.mask.copy_(mask)
                hand.push(nothing, masked=True)
                hand.hand.reply()
        for hand in hands:
            torch.testing.assert_close(hand.params, made.shard.params)


@pytest.mark.parametrize("transport", ["inproc", "unix", "tcp"])
def test_rows_that_make_no_sense_harm_nobody(
    tmp_path: Path, manifest: Manifest, transport: str
) -> None:
    def spoilt(made: RowHand, **header: Any) -> str:
        slot = made.hand.link.gradient_slot
        parts = make_parts(manifest, 5)
        parts[1] = RowPart(torch.tensor([3, 2]), torch.ones(2, 4))  # out of order
        assert slot.rows.numel()
        made.push(parts, **header)
        return made.hand.reply().status

    with rig(tmp_path, "apply-reply", 1, manifest=manifest, transport=transport) as made:
        hand = RowHand(made, made.join(0))
        assert spoilt(hand) == "rejected"
        parts = make_parts(manifest, 1)
        parts[1] = RowPart(torch.tensor([3]), torch.full((1, 4), torch.nan))
        hand.push(parts)
        assert hand.hand.reply().status == "rejected", "one row is not finite"
        hand.push(parts := make_parts(manifest, 2))
        assert hand.hand.reply().status == "applied"
        assert torch.equal(hand.params, -dense(manifest, parts))


class Towards(Rule):
    """Looks at all that a rule is shown."""

    needs_base = True

    def __call__(self, gradients: Any, staleness: Any, params: Tensor, out: Tensor) -> Tensor:
        total = sum(gradient.values + (params - gradient.base) for gradient in gradients)
        return out.copy_(total)


def test_a_rule_sees_parameters_with_the_rows_of_the_gradient(
    tmp_path: Path, manifest: Manifest
) -> None:
    with rig(tmp_path, "apply-reply", 2, manifest=manifest, rule=Towards()) as made:
        hands = [RowHand(made, hand) for hand in made.join_all(2)]
        expected = torch.zeros(manifest.num_elements)
        bases = [expected.clone(), expected.clone()]
        for step in range(12):
            rank = (step // 3) % 2
            hands[rank].push(parts := make_parts(manifest, step))
            hands[rank].hand.reply()
            gradient, touched = dense(manifest, parts), dense(manifest, ones_like(parts)) != 0
            expected -= gradient + (expected - bases[rank]) * touched
            bases[rank] = expected.clone()
            torch.testing.assert_close(hands[rank].params, expected)


def ones_like(parts: list[Part]) -> list[Part]:
    return [
        RowPart(part.ids, torch.ones_like(part.values))
        if isinstance(part, RowPart)
        else None
        if part is None
        else torch.ones_like(part)
        for part in parts
    ]


# -- bytes -----------------------------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each frame had that went over a socket, beats and greetings among them."""
    sizes: list[int] = []
    real = Connection.send

    def counting(self: Connection, head: bytes, *body: Any, **more: Any) -> None:
        sizes.append(len(head) + sum(len(part) for part in body))
        real(self, head, *body, **more)

    monkeypatch.setattr(Connection, "send", counting)
    return sizes


@pytest.mark.parametrize("touched", [1, 10, 100])
def test_bytes_go_by_the_rows_that_are_touched(
    tmp_path: Path, sent: list[int], touched: int
) -> None:
    num_rows, width, steps = 10_000, 16, 5
    manifest = describe(nn.Sequential(nn.Embedding(num_rows, width, sparse=True), nn.Linear(16, 2)))
    dense_bytes = 4 * (16 * 2 + 2)
    with rig(tmp_path, "apply-reply", 1, manifest=manifest, transport="tcp") as made:
        hand = RowHand(made, made.join(0))
        sent.clear()
        for step in range(steps):
            ids = torch.arange(touched) * 7 + step
            table = RowPart(ids, torch.ones(touched, width))
            hand.push([table, torch.ones(32), torch.ones(2)])
            hand.hand.reply()
    header, counts, mask = 84, 8, 3
    expected = header + counts + mask + dense_bytes + touched * (4 * width + 8)
    assert [size for size in sent if size > 100] == [expected] * (2 * steps), "up and down"


def test_gradient_without_a_sparse_tensor_is_as_it_was(tmp_path: Path, sent: list[int]) -> None:
    with rig(tmp_path, "apply-reply", 1, sizes=(50,), transport="tcp") as made:
        hand = made.join(0)
        sent.clear()
        hand.exchange(1.0)
        assert made.shard.changes is None
    assert [size for size in sent if size > 100] == [84 + 4 * 50 + 1] * 2
