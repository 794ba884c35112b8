"""The codecs that flags name: what arrives, what is left out, and what is made of any bytes."""

import dataclasses
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import toy_job, toy_recipe
from rig import rig, wait_until
from sparse import sparse_recipe
from torch import Tensor

from offbeat.accounts import APPLIED, REJECTED
from offbeat.config import CODECS, NONE, REPLY_CODECS, make_config
from offbeat.errors import ConfigError, ConnectionClosedError
from offbeat.transport.base import HEADER_BYTES, Layout, PushHeader
from offbeat.transport.codec import Codec, ErrorFeedback
from offbeat.transport.codecs import (
    ALL,
    BITMAP,
    BLOCK,
    GRADIENTS,
    PAGE,
    PLACES,
    REPLIES,
    SAMPLE_EVERY,
    Bf16,
    Delta,
    Int8,
    TopK,
    gradient_codec,
    largest,
    reply_codec,
)
from offbeat.transport.traffic import Traffic

MAKERS: dict[str, Callable[[], Codec]] = {
    "bf16": Bf16,
    "int8": Int8,
    "topk": lambda: TopK(share=0.05),
    "delta": Delta,
}
SIZES = (1, 7, BLOCK - 1, BLOCK, 3 * BLOCK + 5, 5000, PAGE, 2 * PAGE + 3)


def drawn(size: int, seed: int) -> Tensor:
    """Of very different sizes, with zeros and equals among them."""
    generator = torch.Generator().manual_seed(1000 * seed + size)
    values = torch.randn(size, generator=generator)
    values *= 10 ** torch.randint(-9, 9, (size,), generator=generator)
    values[torch.rand(size, generator=generator) < 0.2] = 0.0
    values[torch.rand(size, generator=generator) < 0.1] = -0.25
    return values


def sent(codec: Codec, values: Tensor) -> Tensor:
    """The bytes that travel."""
    wire = torch.full((codec.capacity(values.numel()),), 0x5A, dtype=torch.uint8)
    return wire[: codec.encode(values.clone(), wire)]


def arrived(codec: Codec, wire: Tensor, size: int) -> Tensor:
    values = torch.full((size,), 7.0)
    codec.decode(wire, values)
    return values


CASES = [(size, seed) for size in SIZES for seed in range(3)]


@pytest.mark.parametrize(("size", "seed"), CASES)
def test_bf16_keeps_eight_bits_of_each_value(size: int, seed: int) -> None:
    values = drawn(size, seed)
    found = arrived(Bf16(), sent(Bf16(), values), size)
    assert torch.equal(found, values.bfloat16().float()), "to the nearest, and to the even"
    assert bool(((found - values).abs() <= values.abs() / 2**8).all())


@pytest.mark.parametrize(("size", "seed"), CASES)
def test_int8_is_off_by_half_a_step_of_its_block_at_most(size: int, seed: int) -> None:
    values = drawn(size, seed)
    wire = sent(Int8(), values)
    assert wire.numel() == size + 4 * -(-size // BLOCK)
    for found, block in zip(
        arrived(Int8(), wire, size).split(BLOCK), values.split(BLOCK), strict=True
    ):
        step = float(block.abs().max()) / 127
        assert float((found - block).abs().max()) <= step / 2 * 1.0001


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-45, 1e-36, 1.8e19, 1e37])
def test_int8_makes_no_odd_numbers_of_the_smallest_and_the_largest(value: float) -> None:
    values = torch.linspace(-value, value, 2 * BLOCK + 1)
    found = arrived(Int8(), sent(Int8(), values), len(values))
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found, values, atol=max(value / 254 * 1.001, 1e-35), rtol=0)
    assert bool(found.any()) == (value > 1e-35), "what is too small for a scale counts as zero"


@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize(("size", "seed"), CASES)
def test_topk_sends_the_largest_values_to_the_bit(size: int, seed: int, share: float) -> None:
    values = drawn(size, seed)
    count = min(size, max(1, round(share * size)))
    codec = TopK(share=share)
    wire = sent(codec, values)
    found = arrived(codec, wire, size)
    taken = found != 0
    assert torch.equal(found[taken], values[taken])
    wanted = values.abs().topk(count).values
    assert int(taken.sum()) == int((wanted > 0).sum())
    assert torch.equal(found[taken].abs().sort().values, wanted[wanted > 0].sort().values)
    assert wire.numel() == 4 * -(-size // PAGE) + 6 * int(taken.sum())


def test_a_sample_that_misleads_costs_time_only() -> None:
    """All large values are where it looks, and they are too few."""
    values = torch.linspace(0.1, 0.2, 20_000)
    values[::SAMPLE_EVERY] = 5.0
    found = largest(values, 1000)
    assert found.tolist() == sorted(values.topk(1000).indices.tolist())


def test_of_equals_the_first_ones_are_taken() -> None:
    values = torch.tensor([1.0, -2.0, 2.0, 2.0, 0.5])
    assert largest(values, 2).tolist() == [1, 2]
    assert largest(torch.zeros(10), 3).tolist() == []
    many = torch.ones(20_000)
    assert largest(many, 150).tolist() == list(range(150))


@pytest.mark.parametrize("name", GRADIENTS)
def test_whatever_is_left_out_goes_with_a_later_gradient(name: str) -> None:
    """What has arrived and what is kept are together what there was: of whole numbers to the last
    bit, where the steps are not fractions themselves."""
    codec, size = ErrorFeedback(MAKERS[name]()), 3 * BLOCK + 5
    generator = torch.Generator().manual_seed(3)
    given, came = torch.zeros(size), torch.zeros(size)
    for _ in range(40):
        gradient = torch.randint(-1000, 1000, (size,), generator=generator).float()
        given += gradient
        came += arrived(codec, sent(codec, gradient), size)
    assert codec.residual is not None
    together = came + codec.residual
    if name == "int8":
        torch.testing.assert_close(together, given, atol=0.05, rtol=0)
    else:
        assert torch.equal(together, given)
    assert float((came - given).abs().max()) > 0, "something is kept"


def test_a_codec_of_ones_own_may_use_up_what_it_is_given() -> None:
    class Wasteful(Bf16):
        def encode(self, values: Tensor, wire: Tensor) -> int:
            count = super().encode(values, wire)
            values.fill_(float("nan"))
            return count

    codec = ErrorFeedback(Wasteful())
    values = torch.tensor([1 / 3, 1e-3])
    found = sum(arrived(codec, sent(codec, values), 2) for _ in range(300))
    torch.testing.assert_close(torch.as_tensor(found), 300 * values, rtol=1e-4, atol=0)


# -- replies ---------------------------------------------------------------------------------------


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("share", "mode"), [(0.0, PLACES), (0.001, PLACES), (0.3, BITMAP), (1.0, ALL)]
)
def test_a_delta_is_lossless_to_the_bit_and_as_short_as_it_can_be(
    size: int, share: float, mode: int
) -> None:
    here, there = Delta(), Delta()
    values = drawn(size, 0)
    assert torch.equal(bits(arrived(there, sent(here, values), size)), bits(values))
    generator = torch.Generator().manual_seed(4)
    for _ in range(5):
        before = values.clone()
        changes = torch.rand(size, generator=generator) < share
        noise = torch.randint(-(2**31), 2**31 - 1, (size,), generator=generator)
        bits(values)[changes] = noise[changes].int()  # NaNs of all kinds among them
        wire = sent(here, values)
        assert torch.equal(bits(arrived(there, wire, size)), bits(values))
        count = int((bits(before) != bits(values)).sum())
        lengths = (4 * size, 4 * -(-size // PAGE) + 6 * count, 4 * -(-size // 32) + 4 * count)
        assert wire.numel() == 8 + min(lengths)
        if size > 4 * BLOCK:
            assert int(wire[0]) == mode


def test_a_delta_tells_zeros_apart() -> None:
    here, there = Delta(), Delta()
    arrived(there, sent(here, torch.zeros(9)), 9)
    values = torch.zeros(9)
    values[4] = -0.0
    assert bool(arrived(there, sent(here, values), 9).signbit()[4])


def test_what_a_worker_does_to_its_parameters_is_put_right_by_a_delta() -> None:
    here, there, mine = Delta(), Delta(), torch.zeros(5)
    there.decode(sent(here, torch.arange(5.0)), mine)
    mine.fill_(9.0)
    there.decode(sent(here, torch.tensor([0.0, 1.0, 2.5, 3.0, 4.0])), mine)
    assert mine.tolist() == [0.0, 1.0, 2.5, 3.0, 4.0]


# -- bytes that anybody may have made --------------------------------------------------------------


def mutations(wire: Tensor, seed: int) -> Iterator[Tensor]:
    """Cut off, longer, and with bytes that are others."""
    draw = random.Random(seed)
    for _ in range(150):
        other = wire[: draw.randrange(len(wire) + 1)].clone() if draw.random() < 0.3 else wire + 0
        if draw.random() < 0.2:
            other = torch.cat([other, torch.zeros(draw.randrange(20), dtype=torch.uint8)])
        for _ in range(draw.randrange(4)):
            if len(other):
                reach = min(len(other), draw.choice((8, 24, 10**6)))
                other[draw.randrange(reach)] = draw.choice((0, 1, 2, 127, 128, 255))
        yield other


@pytest.mark.parametrize("size", [1, 40, 1000, PAGE + 9])
@pytest.mark.parametrize("name", MAKERS)
def test_any_bytes_are_values_or_refused(name: str, size: int) -> None:
    for seed in range(3):
        here, there = MAKERS[name](), MAKERS[name]()
        values = drawn(size, seed)
        wires = [sent(here, values)]
        there.decode(wires[0].clone(), values.clone())
        values[: 1 + size // 50] += 1.5
        wires.append(sent(here, values))
        for wire in wires:
            for other in mutations(wire, seed):
                found = torch.zeros(size)
                try:
                    there.decode(other, found)
                except ValueError:
                    continue
                assert len(other) <= there.capacity(size)


def words(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32).view(torch.uint8)


def halves(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int16).view(torch.uint8)


@pytest.mark.parametrize(
    ("codec", "wire"),
    [
        (Bf16(), torch.zeros(19, dtype=torch.uint8)),
        (Bf16(), torch.zeros(22, dtype=torch.uint8)),
        (Int8(), torch.zeros(13, dtype=torch.uint8)),
        (Int8(), torch.zeros(15, dtype=torch.uint8)),
        (TopK(share=0.2), torch.zeros(3, dtype=torch.uint8)),
        (TopK(share=0.2), words(0, 0)),
        (TopK(share=0.2), words(-1)),
        (TopK(share=0.2), words(2**31 - 1)),
        (TopK(share=0.2), torch.cat([words(1, 0), halves(10)])),
        (TopK(share=0.2), torch.cat([words(2, 0, 0), halves(3, 3)])),
        (TopK(share=0.2), torch.cat([words(2, 0, 0), halves(4, 3)])),
        (TopK(share=0.2), torch.cat([words(3, 0, 0, 0), halves(1, 2, 3)])),
        (Delta(), words(1)),
        (Delta(), words(1, 0, 0)),
        (Delta(), words(3, 0)),
        (Delta(), words(256, 10, *[0] * 10)),
        (Delta(), words(0, 10, *[0] * 9)),
        (Delta(), words(0, 10, *[0] * 11)),
    ],
)
def test_bytes_that_make_no_sense_are_refused(codec: Codec, wire: Tensor) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        codec.decode(wire, torch.zeros(10))


def test_a_page_has_no_fewer_values_than_none() -> None:
    with pytest.raises(ValueError, match="1 of 65545 values"):
        TopK().decode(torch.cat([words(-1, 2, 0), halves(3)]), torch.zeros(PAGE + 9))


@pytest.mark.parametrize(
    "wire",
    [
        torch.cat([words(1, 1, 1, 0), halves(10)]),
        words(1, -1, 0),
        words(1, 2**31 - 1, 2**31 - 1),
        words(2, 1, 0, 0),
        torch.cat([words(2, 1), torch.tensor([0, 1, 0, 0], dtype=torch.uint8), words(0)]),
    ],
)
def test_a_difference_that_makes_no_sense_is_refused(wire: Tensor) -> None:
    there = Delta()
    there.decode(sent(Delta(), torch.zeros(10)), torch.zeros(10))
    with pytest.raises(ValueError, match=r"\w"):
        there.decode(wire, torch.zeros(10))


class Nonsense(Delta):
    """From the second time on."""

    def encode(self, values: Tensor, wire: Tensor) -> int:
        if self._known is None:
            return super().encode(values, wire)
        wire.fill_(0x7E)
        return 12


@pytest.mark.parametrize("transport", ["inproc", "unix", "tcp", "tls"])
def test_a_reply_that_makes_no_sense_ends_the_connection(transport: str, tmp_path: Path) -> None:
    with rig(tmp_path, "apply-reply", 2, transport=transport, make_reply_codec=Nonsense) as made:
        bad, other = made.join_all(2)
        bad.push(1.0)
        with pytest.raises(
            ConnectionClosedError, match=r"parameters that make no sense: .*a difference"
        ):
            bad.reply()
        wait_until(lambda: 0 not in made.server.ledger.members, "the server knows")
        again = made.join(0, incarnation=1)
        assert again.params.tolist() == [-1.0] * 4, "the next one begins with everything"
        assert made.server.failure is None
        for hand in (bad, other, again):
            hand.link.close()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_server_refuses_a_gradient_of_any_other_bytes(
    name: str, transport: str, tmp_path: Path
) -> None:
    """And is there for the others."""

    def make() -> Codec:
        return MAKERS[name]()

    with rig(tmp_path, "apply-reply", 2, transport=transport, make_codec=make) as made:
        bad, good = made.join_all(2)
        draw = random.Random(5)
        for _ in range(30):
            size = draw.randrange(bad.link._inner.gradient_slot.values.numel() + 1)  # type: ignore[attr-defined]
            bad.sequence += 1
            slot = bad.link._inner.gradient_slot.values  # type: ignore[attr-defined]
            slot.copy_(torch.tensor([draw.randrange(256) for _ in range(len(slot))]))
            header = PushHeader(0, 0, bad.sequence, 0, bad.sequence, num_bytes=size)
            bad.link._inner.push(header)  # type: ignore[attr-defined]
            assert bad.reply().status in (APPLIED, REJECTED)
        before = good.params.clone()
        assert good.exchange(0.0).status == APPLIED
        assert good.params.shape == before.shape and made.server.failure is None
        for hand in (bad, good):
            hand.link.close()


# -- where anything is coded -----------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["inproc", "unix", "tcp"])
@pytest.mark.parametrize("always", [False, True])
def test_only_what_goes_over_a_network_is_coded_unless_all_is(
    transport: str, always: bool, tmp_path: Path
) -> None:
    with rig(
        tmp_path, "apply-reply", 1, transport=transport, make_codec=Int8, make_reply_codec=Bf16
    ) as made:
        made.layout = layout = dataclasses.replace(made.layout, codes_always=always)
        made.listener.layout = layout  # type: ignore[attr-defined]
        hand = made.join(0)
        hand.exchange(1 / 3)
        coded = always or transport == "tcp"
        assert (hand.link.num_coded > 0) == coded
        exact = float(torch.tensor(-1 / 3))
        assert (float(hand.params[0]) == exact) != coded
        hand.link.close()


def test_traffic_counts_what_travels() -> None:
    """As the sockets have it: test_codec.py looks at those."""
    size = 1000
    codec = TopK(share=0.01)
    layout = Layout(size, 3, num_floats=2, num_ints=1, coded_bytes=codec.capacity(size))
    with_all = HEADER_BYTES + 4 * size + 3 + 8 + 8
    for coded, up in ((True, HEADER_BYTES + 4 + 30 + 3 + 8 + 8), (False, with_all)):
        traffic = Traffic()
        link = Carrier(layout.carried(over_network=coded))
        traffic.joined(link)  # type: ignore[arg-type]
        assert (traffic.up, traffic.down) == (0, with_all)
        header = PushHeader(0, 0, 1, 0, 0, num_bytes=34 if coded else 0)
        traffic.pushed(link, header)  # type: ignore[arg-type]
        assert (traffic.up, traffic.whole) == (up, with_all)
        assert traffic.words() == f', "up": {up}, "down": {with_all}, "whole": {with_all}'
        traffic.pushed(link, header)  # type: ignore[arg-type]
        assert traffic.words() == f', "up": {up}, "down": 0, "whole": {with_all}'
        traffic.pushed(link, header)  # type: ignore[arg-type]
        assert traffic.words() == "", "as before"


class Carrier:
    """A link, as far as its size is looked at."""

    coding_s = 0.0

    def __init__(self, layout: Layout) -> None:
        from offbeat.transport.base import Slot, WelcomeHeader

        self.num_coded = layout.num_coded
        self.pushed_slot = Slot.allocate(layout.gradient)
        self.replied_slot = Slot.allocate(layout.reply)
        self.welcome = WelcomeHeader(0)


# -- what is asked for -----------------------------------------------------------------------------


def test_names_lead_to_codecs() -> None:
    assert (NONE, *GRADIENTS) == CODECS and (NONE, *REPLIES) == REPLY_CODECS
    choice = gradient_codec("topk:0.05")
    assert choice is not None and choice.values == {"share": 0.05} and choice.label == "topk:0.05"
    assert (found := gradient_codec("topk")) is not None and found.label == "topk:0.01"
    assert (found := reply_codec("delta")) is not None and found.kind is Delta
    assert gradient_codec(None) is None and reply_codec(None) is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compress": "topk:0"}, "share must be above 0, not 0"),
        ({"compress": "topk:1.5"}, "share must be at most 1"),
        ({"compress": "topk:many"}, "share must be a whole number|share must be a number"),
        ({"compress": "int8:4"}, "int8 takes no number behind its name"),
        ({"compress": "int9"}, "unknown compress 'int9'; did you mean 'int8'"),
        ({"compress": "delta"}, "unknown compress 'delta'"),
        ({"compress_replies": "int8"}, "unknown compress_replies 'int8'"),
        ({"compress": "no/such.py:Codec"}, "no/such.py"),
        ({"compress_always": True}, "nothing says what"),
        ({"compress": "int8", "discipline": "allreduce"}, "adds gradients up as they are"),
        ({"compress_replies": "bf16", "discipline": "allreduce"}, "has no replies"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_begins(
    options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        toy_job(**options)


@pytest.mark.parametrize("options", [{"compress": "int8"}, {"compress_replies": "delta"}])
def test_no_codec_carries_rows(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no codec can carry sparse gradients"):
        toy_job(sparse_recipe(), **options)


def test_none_is_no_codec() -> None:
    config = make_config({"compress": "int8", "compress_replies": "bf16"}, {"compress": NONE})
    assert config.compress is None and config.variant == "apply-reply, bf16 replies"
    assert toy_job(compress=NONE).agreement == toy_job().agreement


def test_both_sides_agree_on_codecs_wherever_they_are_used() -> None:
    plain, coded = toy_job(), toy_job(compress="int8", compress_replies="delta")
    assert plain.fingerprint != coded.fingerprint
    assert coded.agreement["codec"] == "int8" and coded.agreement["reply_codec"] == "delta"
    forced = toy_job(compress="int8", compress_replies="delta", compress_always=True)
    assert forced.fingerprint != coded.fingerprint, "shared memory has other slots"


OWN = """
import torch
from offbeat.transport.codec import Codec


class Signs(Codec):
    feeds_back = True

    def capacity(self, num_elements):
        return 4 + num_elements

    def encode(self, values, wire):
        wire[:4].view(torch.float32).copy_(values.abs().mean())
        wire[4:].view(torch.int8).copy_(values.sign())
        return wire.numel()

    def decode(self, wire, values):
        if wire.numel() != 4 + values.numel():
            raise ValueError("not one byte for each value")
        torch.mul(wire[4:].view(torch.int8), wire[:4].view(torch.float32), out=values)
"""


def test_a_codec_of_ones_own_is_named_by_its_file(tmp_path: Path) -> None:
    """And is given error feedback where it asks for it."""
    (tmp_path / "own.py").write_text(OWN)
    job = toy_job(toy_recipe(), compress=f"{tmp_path}/own.py:Signs")
    assert re.fullmatch(r"apply-reply, own\.py:Signs", job.config.variant)
    codec = job.make_codec()
    assert isinstance(codec, ErrorFeedback) and codec.may_keep
    values = torch.tensor([1.0, -0.1, 0.0, 2.0])
    came = sum(arrived(codec, sent(codec, values), 4) for _ in range(100))
    torch.testing.assert_close(torch.as_tensor(came) / 100, values, atol=0.1, rtol=0)
