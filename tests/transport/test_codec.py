"""Gradients that travel as something else than float32, through live servers and whole runs."""

import dataclasses
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from coding import Halves, Largest
from helpers import toy_job, toy_recipe
from rig import TIMEOUT_S, TRANSPORTS, knock, rig, wait_until
from torch import Tensor

import offbeat
from offbeat import api
from offbeat.accounts import APPLIED, REJECTED
from offbeat.errors import ConnectionClosedError
from offbeat.plugins import Choice
from offbeat.run.making import make_job
from offbeat.transport.codec import Codec, encoding
from offbeat.transport.wire import Connection

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def choice(kind: type[Codec], **values: float) -> Choice[Codec]:
    chosen = Choice.default(kind)
    return dataclasses.replace(chosen, values={**chosen.values, **values})


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_applies_what_it_decodes(transport: str, tmp_path: Path) -> None:
    """And every bit of what rounding took away arrives in the end."""
    with rig(tmp_path, "reply-apply", 1, transport=transport, make_codec=Halves) as made:
        hand = made.join(0)
        for _ in range(300):
            hand.exchange(1 / 3)
        hand.link.close()
        assert made.drain()
        rounded = float(torch.tensor(1 / 3).bfloat16())
        assert abs(300 * rounded - 100) > 0.1, "the rounding can be seen"
        torch.testing.assert_close(made.shard.params, torch.full((4,), -100.0), atol=2e-3, rtol=0)


@pytest.mark.parametrize(("count", "num_bytes"), [(0, 0), (2, 16), (4, 24)])
def test_over_tcp_no_more_travels_than_was_filled(
    count: int, num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[list[int]] = []
    send = Connection.send

    def watched(self: Connection, head: bytes, *body: Any, **more: Any) -> None:
        bodies.append([len(part) for part in body])
        send(self, head, *body, **more)

    def three() -> Codec:
        return Largest(most=3)

    with rig(tmp_path, "apply-reply", 1, transport="tcp", make_codec=three) as made:
        hand = made.join(0)
        values = torch.tensor([3.0, 1.0, 4.0, 2.0]) * (torch.arange(4) < count)
        monkeypatch.setattr(Connection, "send", watched)
        assert hand.exchange(values).status == APPLIED
        pushed, replied = bodies
        assert sum(pushed) == num_bytes + 1, "and the mask"
        assert sum(replied) == 4 * 4 + 1, "parameters are float32"
        kept = values.where(values != 1.0, 0.0) if count == 4 else values
        assert torch.equal(hand.params, -kept)
        hand.link.close()


class Noise(Halves):
    """Fills the wire with something that is none of it."""

    def __init__(self, num_bytes: int, byte: int = 0x7E) -> None:
        super().__init__()
        self.num_bytes, self.byte = num_bytes, byte

    def encode(self, values: Tensor, wire: Tensor) -> int:
        wire.fill_(self.byte)
        return self.num_bytes


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("kind", "num_bytes"), [(Halves, 0), (Halves, 3), (Halves, 7), (Largest, 9), (Largest, 16)]
)
def test_bytes_that_make_no_sense_refuse_the_gradient_and_nothing_else(
    transport: str,
    kind: type[Codec],
    num_bytes: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where the decoder says so by an error of torch's: a place that there is not."""
    with rig(tmp_path, "sync", 2, transport=transport, make_codec=kind) as made:
        made.log.addHandler(caplog.handler)
        good, bad = made.join(0), made.join(1)
        bad.link._codec = Noise(num_bytes)  # type: ignore[attr-defined]
        for step in (1, 2):
            good.push(2.0)
            assert bad.exchange(1.0).status == REJECTED
            assert good.reply().status == APPLIED
            assert torch.equal(good.params, torch.full((4,), -2.0 * step))
        assert made.server.failure is None
        assert "cannot decode the gradient of worker 1 (batch 1): " in caplog.text
        made.log.removeHandler(caplog.handler)
        for hand in (good, bad):
            hand.link.close()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_header_that_claims_more_than_there_is_room_for_does_no_harm(
    transport: str, tmp_path: Path
) -> None:
    with rig(tmp_path, "apply-reply", 2, transport=transport, make_codec=Halves) as made:
        good, bad = made.join(0), made.join(1)
        bad.link._codec = Noise(2**63, byte=0)  # type: ignore[attr-defined]
        bad.exchange(1.0)  # whatever becomes of it
        assert good.exchange(2.0).status == APPLIED
        assert torch.equal(good.params, torch.full((4,), -2.0))
        for hand in (good, bad):
            hand.link.close()


def test_a_gradient_is_decoded_while_others_are_applied(tmp_path: Path) -> None:
    decoding, go_on = threading.Event(), threading.Event()

    class Slow(Halves):
        def decode(self, wire: Tensor, values: Tensor) -> None:
            super().decode(wire, values)
            if values[0] == 1:
                decoding.set()
                assert go_on.wait(TIMEOUT_S)

    with rig(tmp_path, "apply-reply", 2, make_codec=Slow) as made:
        slow, quick = made.join_all(2)
        slow.push(1.0)
        assert decoding.wait(TIMEOUT_S)
        assert quick.exchange(2.0).version == 1
        go_on.set()
        assert slow.reply().version == 2


def test_without_a_codec_nothing_is_wrapped(tmp_path: Path) -> None:
    with rig(tmp_path, "apply-reply", 1) as made:
        link = knock(
            made.listener, {"worker": 0, "incarnation": 0, "fingerprint": "same"}, made.layout
        )
        assert encoding(link, None) is link
        wait_until(lambda: made.server.ledger.members.keys() == {0}, "the worker is in")
        link.close()
    job = toy_job()
    assert list(job.agreement) == ["protocol", "num_shards", "optimizer", "model", "fingerprint"]
    assert job.fingerprint == job.manifest.fingerprint(repr(job.optimizer))
    assert job.layout(0).gradient is not None and job.layout(0).coded_bytes is None


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        (None, choice(Halves), "the codec is None there, Halves here"),
        (choice(Halves), None, "the codec is Halves there, None here"),
        (choice(Largest, most=3), choice(Largest, most=4), "Largest:3 there, Largest:4 here"),
    ],
)
def test_sides_that_mean_other_codecs_are_told_so(
    ours: Choice[Codec] | None, theirs: Choice[Codec] | None, reason: str, tmp_path: Path
) -> None:
    servers, workers = (dataclasses.replace(toy_job(), codec=codec) for codec in (ours, theirs))
    agreed = {"agreement": servers.agreement}
    with rig(tmp_path, "apply-reply", 1, server_options=agreed) as made:
        hello = {"worker": 0, "incarnation": 0, **workers.agreement}
        with pytest.raises(ConnectionClosedError, match=f"server 0 has another run: .*{reason}"):
            knock(made.listener, hello, made.layout)


# -- whole runs ------------------------------------------------------------------------------------


def train(codec: Choice[Codec] | None, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    def make(*args: Any, **more: Any) -> Any:
        job = make_job(*args, **more)
        config = dataclasses.replace(job.config, compress_always=True)
        return dataclasses.replace(job, config=config, codec=codec)

    monkeypatch.setattr(api, "make_job", make)
    recipe = options.pop("recipe", None) or toy_recipe()
    return offbeat.train(recipe, engine="inproc", quiet=True, threads=1, **options)


@pytest.mark.parametrize("servers", [1, 3])
def test_a_codec_that_loses_nothing_changes_nothing(
    servers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"workers": 1, "servers": servers, "epochs": 2}
    plain = train(None, monkeypatch, **options, run_dir=tmp_path / "plain")
    codec = choice(Largest, most=1000)
    coded = train(codec, monkeypatch, **options, run_dir=tmp_path / "coded")
    for name, tensor in offbeat.load(plain.run_dir).items():
        assert torch.equal(offbeat.load(coded.run_dir)[name], tensor)


@pytest.mark.parametrize("discipline", ["sync", "reply-apply", "lock-free"])
@pytest.mark.parametrize("kind", [Halves, Largest])
def test_runs_learn_through_a_codec(
    discipline: str, kind: type[Codec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "discipline": discipline,
        "workers": 2,
        "servers": 2,
        "recipe": toy_recipe(epochs=15),
    }
    result = train(choice(kind), monkeypatch, **options, run_dir=tmp_path / "r")
    assert (result.test_accuracy or 0) > 0.85
    assert result.summary["gradients"] == 2 * 15 * 12


def test_the_codec_in_the_page_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = PAGE.read_text().partition("## A codec")[2].partition("\n## ")[0]
    (sketch,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {}
    exec(sketch, names)
    kind = next(v for v in names.values() if isinstance(v, type) and v.__module__ == "builtins")
    with rig(tmp_path, "apply-reply", 1, make_codec=kind) as made:
        hand = made.join(0)
        for _ in range(200):
            hand.exchange(torch.tensor([1.0, -0.3, 1e-3, 0.0]))
        expected = -200 * torch.tensor([1.0, -0.3, 1e-3, 0.0])
        torch.testing.assert_close(hand.params, expected, atol=0.02, rtol=0)
    result = train(choice(kind), monkeypatch, recipe=toy_recipe(epochs=15), run_dir=tmp_path / "r")
    assert (result.test_accuracy or 0) > 0.85
