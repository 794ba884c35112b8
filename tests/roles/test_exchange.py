"""A worker's exchange with servers that a test scripts: what it does when one of them goes away."""

import contextlib
import dataclasses
import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from coding import Halves
from helpers import toy_job
from sparse import sparse_recipe
from torch import Tensor

from offbeat.accounts import APPLIED, DROPPED, LOST
from offbeat.errors import ConnectionClosedError
from offbeat.plugins import Choice
from offbeat.roles.calls import AskRound, RoundPart, is_a
from offbeat.roles.exchange import Exchange
from offbeat.run.events import EventLog, read_events
from offbeat.run.job import Job
from offbeat.transport.base import (
    CallEnd,
    Layout,
    Message,
    Network,
    PushHeader,
    ReplyHeader,
    Slot,
    WelcomeHeader,
    WorkerEnd,
)
from offbeat.transport.codec import Codec

BROKEN = ConnectionClosedError("the connection broke")
OVER = ConnectionClosedError("the run is finished", over=True)
T = 10.0

Script = Sequence[ReplyHeader | ConnectionClosedError | None]


class ScriptedLink(WorkerEnd):
    """A server that answers, in turn, what the script says, with parameters that are all
    `value`."""

    def __init__(self, value: float, welcome: WelcomeHeader, *script: Any) -> None:
        self.value = value
        self.welcome = welcome
        self.script = list(script)
        self.pushed: list[tuple[PushHeader, list[Any]]] = []
        """Headers, and what lay in the slot."""
        self.finished: list[int] = []
        self.heard = threading.Event()
        self.is_closed = False

    def open(self, layout: Layout) -> None:
        self.num_coded = layout.num_coded
        self._slots = [Slot.allocate(layout.gradient) for _ in range(2)]
        self.reply_slot = Slot.allocate(layout.reply)
        self.reply_slot.values.fill_(self.value)

    @property
    def gradient_slot(self) -> Slot:
        return self._slots[len(self.pushed) % 2]

    @property
    def pushed_slot(self) -> Slot:
        return self._slots[(len(self.pushed) - 1) % 2]

    def push(self, header: PushHeader) -> None:
        slot = self.gradient_slot
        payload = (slot.values, slot.mask, slot.floats, slot.ints)
        self.pushed.append((header, [part.tolist() for part in payload]))

    def wait_reply(self, timeout_s: float) -> ReplyHeader | None:
        said = self.script.pop(0)
        if isinstance(said, ConnectionClosedError):
            raise said.again()
        return said

    def beat(self) -> None:
        self.heard.set()

    def finish(self, sequence: int) -> None:
        self.finished.append(sequence)

    def close(self) -> None:
        self.is_closed = True


class ScriptedCalls(CallEnd):
    def __init__(self, part: RoundPart) -> None:
        self._part = part

    def call(self, message: Message, *_: Any) -> tuple[Message, dict[str, Tensor]]:
        assert is_a(AskRound, message)
        return self._part.message(), dict(self._part.tensors())

    def close(self) -> None:
        pass


class ScriptedLinks(Network):
    """For each shard its links, in the order in which they are asked for."""

    def __init__(self, *links: list[ScriptedLink]) -> None:
        self._links = [list(of_shard) for of_shard in links]
        self.hellos: list[Message] = []
        self.last_round: RoundPart | None = None
        """Of the first server; None: nobody is to ask for it."""
        self.rounds: dict[int, RoundPart] = {}
        """What servers tell of theirs whenever they are asked."""

    def connect(
        self, shard: int, hello: Any, layout: Layout, timeout_s: float, params: Tensor
    ) -> WorkerEnd:
        self.hellos.append(hello)
        link = self._links[shard].pop(0)
        link.open(layout)
        return link

    def connect_for_calls(self, shard: int, *args: Any) -> CallEnd:
        if shard in self.rounds:
            return ScriptedCalls(self.rounds[shard])
        assert shard == 0 and self.last_round is not None and len(self.hellos) == 1
        return ScriptedCalls(self.last_round)


class Place:
    """Where parameters land."""

    def __init__(self, job: Job, network: ScriptedLinks) -> None:
        self.landing = torch.zeros(job.slices[-1][1])
        self.gradient: Tensor | None = None
        self.open_when_forgotten: list[bool] = []
        self._links = [link for of_shard in network._links for link in of_shard]

    def adopt(self, landing: Tensor) -> None:
        self.landing = landing

    def forget(self) -> None:
        self.open_when_forgotten.append(not self._links[0].is_closed)


class Rigged:
    """An exchange of rank 1 with scripted links, as many as `links` has lists."""

    def __init__(
        self,
        folder: Path,
        *links: list[ScriptedLink],
        codec: type[Codec] | None = None,
        **options: Any,
    ) -> None:
        self.folder = folder
        self.job = toy_job(servers=len(links), workers=2, **options)
        if codec is not None:
            self.job = dataclasses.replace(self.job, codec=Choice.default(codec))
        self.network = ScriptedLinks(*links)
        self.place = Place(self.job, self.network)
        self.events = EventLog(folder / "worker-1.jsonl")
        self.stop = threading.Event()
        self.exchange = Exchange(
            self.job,
            1,
            self.place,
            self.network,
            events=self.events,
            log=logging.Logger("test"),
            clock=lambda: 1.5,
            stop=self.stop,
            incarnation=3,
        )

    def push(
        self,
        step: int,
        value: float = 0.5,
        present: Sequence[bool] = (True,) * 4,
        *,
        void: bool = False,
    ) -> None:
        for slot in self.exchange.gradient_slots:
            slot.values.fill_(value)
        self.exchange.push(step, present, self.exchange.versions, void=void)

    def rejoins(self) -> list[tuple[int, ...]]:
        """Shard, epochs, and versions."""
        self.events.flush()
        names = ("shard", "former_epoch", "epoch", "seen_version", "version")
        return [
            tuple(event[name] for name in names)
            for event in read_events(self.folder)
            if event["kind"] == "rejoin"
        ]

    def landed(self) -> list[set[float]]:
        """What parameters each shard's slice has."""
        return [set(self.place.landing[lo:hi].tolist()) for lo, hi in self.job.slices]


@pytest.fixture
def rigged(tmp_path: Path) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def make(*links: list[ScriptedLink], **options: Any) -> Rigged:
            made = Rigged(tmp_path, *links, **options)
            stack.callback(made.events.close)
            stack.enter_context(made.exchange)
            return made

        yield make


def welcome(version: int, settled: int = 0, epoch: int = 0) -> WelcomeHeader:
    return WelcomeHeader(version, settled, epoch)


def reply(sequence: int, version: int, status: str = APPLIED, **more: Any) -> ReplyHeader:
    return ReplyHeader(sequence, version, status, **more)


def test_a_gradient_goes_to_every_shard_and_parameters_come_from_each(rigged: Any) -> None:
    links = [ScriptedLink(4.0 + k, welcome(10 + k), None, reply(1, 20 + k)) for k in range(2)]
    rig = rigged([links[0]], [links[1]])
    assert not rig.exchange.has_joined
    assert rig.exchange.join() == 0 and rig.exchange.has_joined
    assert (rig.exchange.versions, rig.landed()) == ([10, 11], [{4.0}, {5.0}])
    rig.push(1)
    for link in links:
        link.reply_slot.values.add_(10)
    assert rig.exchange.await_all() == "applied"
    assert (rig.exchange.versions, rig.landed()) == ([20, 21], [{14.0}, {15.0}])
    headers = [link.pushed[0][0] for link in links]
    assert headers == [PushHeader(1, 3, 1, 10 + k, batch=0, shard=k) for k in range(2)]


def test_the_only_servers_replies_land_without_a_copy(rigged: Any) -> None:
    link = ScriptedLink(4.0, welcome(0))
    rig = rigged([link])
    rig.exchange.join()
    assert rig.place.landing is link.reply_slot.values


def test_a_worker_goes_on_after_the_last_step_that_any_shard_knows_of(rigged: Any) -> None:
    links = [[ScriptedLink(0.0, welcome(30, settled))] for settled in (6, 7)]
    assert rigged(*links).exchange.join() == 7


def test_the_first_server_is_told_a_speed_and_says_the_fastest_ones(rigged: Any) -> None:
    """Of one that has just come back nothing is known, and what was said before holds."""
    links = [
        ScriptedLink(0.0, WelcomeHeader(10, 2, batches=40), reply(3, 11, fastest=50.0), BROKEN),
        ScriptedLink(
            0.0, WelcomeHeader(10, 2, batches=30), reply(3, 11, fastest=70.0), reply(4, 12)
        ),
    ]
    rig = rigged([links[0], ScriptedLink(0.0, welcome(12, 4))], [links[1]])
    assert rig.exchange.join() == 2
    assert rig.exchange.batches == 40, "of the shard that heard of the most"
    present = [True] * len(rig.job.manifest.tensors)
    rig.exchange.push(3, present, rig.exchange.versions, batch=57, speed=20.0)
    rig.exchange.await_all()
    assert [link.pushed[0][0].speed for link in links] == [20.0, 0.0]
    assert [link.pushed[0][0].batch for link in links] == [57, 57]
    assert rig.exchange.fastest == 50.0
    rig.exchange.push(4, present, rig.exchange.versions, batch=70, speed=20.0)
    rig.exchange.await_all()
    assert rig.exchange.fastest == 50.0


def test_tensors_without_a_gradient_are_masked_everywhere(rigged: Any) -> None:
    links = [ScriptedLink(0.0, welcome(0)) for _ in range(2)]
    rig = rigged([links[0]], [links[1]])
    rig.exchange.join()
    rig.push(1, present=(True, False, True, True))
    for link in links:
        header, (_, mask, _, _) = link.pushed[0]
        assert header.masked and not header.void and mask == [1, 0, 1, 1]


def test_an_unusable_gradient_is_void_for_shards_without_the_bad_element_too(rigged: Any) -> None:
    links = [ScriptedLink(0.0, welcome(0)) for _ in range(2)]
    rig = rigged([links[0]], [links[1]])
    rig.exchange.join()
    rig.exchange.push(1, [True] * 4, rig.exchange.versions, void=True)
    assert [link.pushed[0][0].void for link in links] == [True, True]


@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        ((APPLIED, "accepted"), "applied"),
        ((APPLIED, "dropped"), "dropped"),
        (("rejected", "dropped"), "rejected"),
    ],
)
def test_a_slice_that_is_not_in_decides_for_the_whole(
    rigged: Any, statuses: tuple[str, str], outcome: str
) -> None:
    links = [[ScriptedLink(0.0, welcome(0), reply(1, 1, status))] for status in statuses]
    rig = rigged(*links)
    rig.exchange.join()
    rig.push(1)
    assert rig.exchange.await_all() == outcome


@pytest.mark.parametrize(("settled", "outcome"), [(0, "lost"), (1, "applied")])
def test_a_reply_of_another_epoch_makes_a_worker_join_again(
    rigged: Any, settled: int, outcome: str
) -> None:
    """And go on, whether the server that is there now has the gradient or not."""
    former = ScriptedLink(1.0, welcome(5), reply(1, 9, epoch=1))
    newer = ScriptedLink(2.0, welcome(3, settled, epoch=1))
    other = ScriptedLink(3.0, welcome(5), reply(1, 6))
    rig = rigged([former, newer], [other])
    rig.exchange.join()
    rig.push(1)
    assert rig.exchange.await_all() == outcome
    assert rig.rejoins() == [(0, 0, 1, 5, 3)]
    assert former.is_closed and not newer.is_closed
    assert rig.place.open_when_forgotten == [True], "forgotten before the memory goes"
    assert (rig.exchange.versions, rig.landed()) == ([3, 6], [{2.0}, {3.0}])
    assert newer.pushed == [], "what was computed for another server is not for this one"
    rig.push(2)
    assert newer.pushed[0][0].epoch == 1 and newer.pushed[0][0].base_version == 3


def test_an_answer_that_comes_again_is_not_taken_for_the_next_ones(rigged: Any) -> None:
    """Something on the way doubles what it carries."""
    rig = rigged([ScriptedLink(1.0, welcome(0), reply(1, 1), reply(1, 1), None, reply(2, 2))])
    rig.exchange.join()
    for step in (1, 2):
        rig.push(step)
        assert rig.exchange.await_all() == "applied"
        assert rig.exchange.versions == [step]


def test_of_versions_that_a_server_does_not_have_any_more_nobody_speaks(rigged: Any) -> None:
    """With --overlap a gradient was computed before the server came back that it goes to."""
    former = ScriptedLink(1.0, welcome(5), reply(1, 9, epoch=1))
    newer = ScriptedLink(2.0, welcome(3, epoch=1), reply(2, 4, epoch=1), reply(3, 7, epoch=1))
    rig = rigged([former, newer])
    rig.exchange.join()
    rig.push(1)
    before = rig.exchange.versions
    rig.exchange.await_all()
    rig.exchange.push(2, (True,) * 4, before)
    rig.exchange.await_all()
    rig.exchange.push(3, (True,) * 4, [3])
    assert [header.base_version for header, _ in newer.pushed] == [3, 3]


def test_a_gradient_that_is_in_is_not_pushed_again(rigged: Any) -> None:
    former = ScriptedLink(1.0, welcome(5), BROKEN)
    newer = ScriptedLink(2.0, welcome(6, settled=1))
    rig = rigged([former, newer])
    rig.exchange.join()
    rig.push(1)
    assert rig.exchange.await_all() == "applied"
    assert newer.pushed == []
    assert rig.rejoins() == [(0, 0, 0, 5, 6)]
    assert rig.place.landing is newer.reply_slot.values


@pytest.mark.parametrize(("discipline", "version"), [("apply-reply", 8), ("sync", 5)])
def test_a_gradient_that_is_not_in_is_pushed_again_as_it_was(
    rigged: Any, discipline: str, version: int
) -> None:
    """As often as the connection breaks, and with the version that it was computed on."""
    links = [
        ScriptedLink(1.0, welcome(5), BROKEN),
        ScriptedLink(2.0, welcome(version), None, BROKEN),
        ScriptedLink(3.0, welcome(version), reply(1, version + 1)),
    ]
    rig = rigged(links, discipline=discipline)
    rig.exchange.join()
    rig.push(1, value=0.25, present=(True, True, False, True))
    assert rig.exchange.await_all() == "applied"
    for link in links:
        assert link.pushed == links[0].pushed
    header, (values, mask, _, _) = links[2].pushed[0]
    assert (header.base_version, set(values), mask) == (5, {0.25}, [1, 1, 0, 1])
    assert rig.rejoins() == [(0, 0, 0, 5, version)] * 2
    assert rig.exchange.versions == [version + 1]


def test_who_waits_for_long_looks_at_the_other_servers(rigged: Any) -> None:
    """Somebody may wait for it there, and it here for that one: what a server lacks that was
    started anew is pushed to it once more."""
    away = ScriptedLink(1.0, welcome(5), BROKEN)
    back = ScriptedLink(2.0, welcome(3, epoch=1), reply(1, 4, epoch=1))
    slow = ScriptedLink(3.0, welcome(5), None, None, None, reply(1, 6))
    gone = ScriptedLink(4.0, welcome(5), BROKEN)
    there = ScriptedLink(5.0, welcome(2, epoch=1), reply(1, 3, epoch=1))
    rig = rigged([away, back], [slow], [gone, there], worker_timeout=1.0)
    rig.exchange._clock = itertools.count().__next__
    rig.exchange.join()
    rig.push(1, value=0.25)
    assert rig.exchange.await_all() == "applied"
    for link, version in ((back, 3), (there, 2)):
        ((header, slot),) = link.pushed
        assert (header.sequence, header.epoch, header.base_version) == (1, 1, version)
        assert set(slot[0]) == {0.25}
    assert len(slow.pushed) == 1 and rig.exchange.versions == [4, 6, 3]


@pytest.mark.parametrize(
    ("epoch", "version", "is_open"), [(0, 5, True), (0, 6, False), (1, 5, None)]
)
@pytest.mark.parametrize("shard", [0, 1])
def test_in_rounds_a_server_that_was_started_anew_has_those_of_another_one(
    rigged: Any, shard: int, epoch: int, version: int, is_open: bool | None
) -> None:
    """What is under way goes to it unless its round is over there. None: nobody knows."""
    whole = ScriptedLink(1.0, welcome(5), reply(1, 6))
    broken = ScriptedLink(1.0, welcome(5), BROKEN)
    again = ScriptedLink(5.0, welcome(3, epoch=1), reply(1, 4, epoch=1))
    links = [[broken, again], [whole]] if shard == 0 else [[whole], [broken, again]]
    made = rigged(*links, discipline="sync")
    pushes = frozenset([(0, 1), (1, 1)])
    of_other = RoundPart(epoch, frozenset(), version=version, pushes=pushes)
    made.network.rounds = {shard: RoundPart(1, frozenset()), 1 - shard: of_other}
    made.exchange.join()
    made.push(1, value=0.25)
    outcome = made.exchange.await_all()
    told = made.network.hellos[2].get("last_round")
    assert told == (None if is_open is None else [[0, 1], [1, 1]])
    if is_open:
        ((header, slot),) = again.pushed
        assert (header.epoch, header.base_version, set(slot[0])) == (1, 3, {0.25})
    assert (outcome, bool(again.pushed)) == (APPLIED if is_open else LOST, bool(is_open))


def test_what_went_to_a_server_that_was_started_anew_is_pushed_again_where_its_link_breaks(
    rigged: Any,
) -> None:
    whole = ScriptedLink(1.0, welcome(5), reply(1, 6))
    links = [
        ScriptedLink(1.0, welcome(5), BROKEN),
        ScriptedLink(1.0, welcome(3, epoch=1), BROKEN),
        ScriptedLink(5.0, welcome(3, epoch=1), reply(1, 4, epoch=1)),
    ]
    made = rigged(links, [whole], discipline="sync")
    pushes = frozenset([(0, 1), (1, 1)])
    made.network.rounds = {
        0: RoundPart(1, frozenset()),
        1: RoundPart(0, frozenset(), version=5, pushes=pushes),
    }
    made.exchange.join()
    made.push(1, value=0.25)
    assert made.exchange.await_all() == APPLIED
    for link in links[1:]:
        ((header, slot),) = link.pushed
        assert (header.epoch, header.base_version, set(slot[0])) == (1, 3, {0.25})


def test_servers_that_promise_are_told_of_no_round(rigged: Any) -> None:
    """What the next one lacks everybody pushes again."""
    whole = ScriptedLink(1.0, welcome(5), reply(1, 6))
    broken = ScriptedLink(1.0, welcome(5), BROKEN)
    again = ScriptedLink(5.0, welcome(5, epoch=1), reply(1, 6, epoch=1))
    made = rigged([whole], [broken, again], discipline="sync", ack="durable")
    made.exchange.join()
    made.push(1)
    assert made.exchange.await_all() == APPLIED
    assert "last_round" not in made.network.hellos[2] and len(again.pushed) == 1


def test_an_answer_that_came_while_another_server_was_waited_for_counts(rigged: Any) -> None:
    slow = ScriptedLink(1.0, welcome(0), None, None, None, None, reply(1, 1))
    quick = ScriptedLink(2.0, welcome(0), reply(1, 7), BROKEN)
    rig = rigged([slow], [quick], worker_timeout=2.0)
    rig.exchange._clock = itertools.count().__next__
    rig.exchange.join()
    rig.push(1)
    assert rig.exchange.await_all() == "applied"
    assert rig.exchange.versions == [1, 7]


def test_buffers_are_pushed_again_too(rigged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    links = [ScriptedLink(1.0, welcome(5), BROKEN), ScriptedLink(1.0, welcome(5), reply(1, 6))]
    rig = rigged(links)
    layout = Layout(rig.job.slices[0][1], 4, num_floats=2, num_ints=1)
    monkeypatch.setattr(Job, "layout", lambda self, shard: layout)
    rig.exchange.join()
    (slot,) = rig.exchange.gradient_slots
    slot.floats.fill_(1.5)
    slot.ints.fill_(7)
    rig.push(1)
    rig.exchange.await_all()
    assert links[1].pushed[0][1][2:] == [[1.5, 1.5], [7]]
    links[1].reply_slot.ints.fill_(8)
    floats, ints = rig.exchange.buffers
    assert (floats.tolist(), ints.tolist()) == ([0, 0], [8])


@pytest.mark.parametrize("settled", [0, 1])
def test_what_a_codec_keeps_outlives_a_connection_and_counts_once(
    rigged: Any, settled: int
) -> None:
    """Whether the gradient had arrived before the connection broke or has to be sent again."""
    links = [
        ScriptedLink(1.0, welcome(5), BROKEN),
        ScriptedLink(1.0, welcome(5 + settled, settled), *[reply(1, 6)] * (1 - settled)),
    ]
    links[1].script.append(reply(2, 7))
    rig = rigged(links, codec=Halves)
    rig.exchange.join()
    for step, value in ((1, 1 / 3), (2, 1e-3)):
        rig.push(step, value=value)
        assert rig.exchange.await_all() == "applied"
    sent = [payload[0] for link in links for _, payload in link.pushed]
    without_break = Halves()
    expected = [encoded(without_break, value, rig.job.slices[0][1]) for value in (1 / 3, 1e-3)]
    assert expected[1] != encoded(Halves(), 1e-3, rig.job.slices[0][1]), "nothing was kept"
    assert sent == [expected[0], *[expected[0]] * (1 - settled), expected[1]]


def encoded(codec: Codec, value: float, num_elements: int) -> list[int]:
    wire = torch.zeros(codec.capacity(num_elements), dtype=torch.uint8)
    return wire[: codec.encode(torch.full((num_elements,), value), wire)].tolist()


def test_an_unusable_gradient_does_not_stay_in_what_a_codec_keeps(rigged: Any) -> None:
    link = ScriptedLink(0.0, welcome(0), reply(1, 0, "rejected"), reply(2, 1))
    rig = rigged([link], codec=Halves)
    rig.exchange.join()
    rig.push(1, value=float("nan"), void=True)
    assert rig.exchange.await_all() == "rejected"
    rig.push(2, value=1 / 3)
    (void, _), (header, (values, *_)) = link.pushed
    assert (void.void, void.num_bytes) == (True, 0)
    assert not header.void and values == encoded(Halves(), 1 / 3, rig.job.slices[0][1])


def test_in_sync_a_gradient_is_late_once_its_round_has_closed(rigged: Any) -> None:
    former = ScriptedLink(1.0, welcome(5), BROKEN)
    newer = ScriptedLink(2.0, welcome(6))
    rig = rigged([former, newer], discipline="sync")
    rig.exchange.join()
    rig.push(1)
    assert rig.exchange.await_all() == "lost"
    assert newer.pushed == [] and rig.exchange.versions == [6]


def test_what_a_server_dropped_stays_dropped_when_another_one_comes_back(rigged: Any) -> None:
    other = ScriptedLink(0.0, welcome(0), reply(1, 1, DROPPED))
    links = [ScriptedLink(1.0, welcome(0), BROKEN), ScriptedLink(1.0, welcome(1, settled=1))]
    rig = rigged(links, [other])
    rig.exchange.join()
    rig.push(1)
    assert rig.exchange.await_all() == "dropped"


def test_nobody_looks_for_a_server_when_the_run_is_over_or_stopped(rigged: Any) -> None:
    rig = rigged([ScriptedLink(0.0, welcome(0), OVER, None, BROKEN)])
    rig.exchange.join()
    rig.push(1)
    with pytest.raises(ConnectionClosedError, match="is finished"):
        rig.exchange.await_all()
    rig.stop.set()
    with pytest.raises(ConnectionClosedError, match="told to stop") as caught:
        rig.exchange.await_all()
    assert caught.value.over
    with pytest.raises(ConnectionClosedError, match="broke"):
        rig.exchange.await_all()
    assert rig.rejoins() == []


def test_a_server_says_which_step_was_the_last(rigged: Any) -> None:
    links = [[ScriptedLink(0.0, welcome(0), reply(1, 1, last=last))] for last in (False, True)]
    rig = rigged(*links)
    rig.exchange.join()
    assert not rig.exchange.is_last
    rig.push(1)
    rig.exchange.await_all()
    assert rig.exchange.is_last


def through(rig: Rigged, num_steps: int = 3) -> Exchange:
    """Its exchange, after all steps."""
    rig.exchange.join()
    for step in range(1, num_steps + 1):
        rig.push(step)
        rig.exchange.await_all()
    return rig.exchange


def replies(num_steps: int = 3) -> Script:
    return [reply(step, step) for step in range(1, num_steps + 1)]


@pytest.mark.parametrize("settled", [0, 2])
def test_when_all_is_done_a_worker_goes_back_for_a_server_that_lacks_steps(
    rigged: Any, settled: int
) -> None:
    steady = ScriptedLink(1.0, welcome(0), *replies(), None, None)
    dead = ScriptedLink(2.0, welcome(0), *replies(), None, BROKEN)
    newer = ScriptedLink(3.0, welcome(settled, settled, epoch=1))
    rig = rigged([steady], [dead, newer])
    assert through(rig).finish(3) == settled
    assert (steady.finished, dead.finished, newer.finished) == ([3, 3], [3], [])
    assert rig.rejoins() == [(1, 0, 1, 3, settled)]
    assert rig.exchange.versions == [3, settled]
    assert rig.landed() == [{1.0}, {3.0}], "the steps are done again on what it has"


def test_a_server_that_comes_back_with_everything_is_told_too(rigged: Any) -> None:
    links = [
        ScriptedLink(1.0, welcome(0), *replies(), BROKEN),
        ScriptedLink(1.0, welcome(3, settled=3), None, BROKEN),
        ScriptedLink(1.0, welcome(3, settled=3, epoch=1), OVER),
    ]
    rig = rigged(links)
    exchange = through(rig)
    with pytest.raises(ConnectionClosedError, match="is finished"):
        exchange.finish(3)
    assert [link.finished for link in links] == [[3], [3], [3]]
    assert len(rig.rejoins()) == 2


def test_servers_that_died_together_are_all_found_before_a_worker_goes_back(rigged: Any) -> None:
    links = [
        [
            ScriptedLink(1.0, welcome(0), *replies(), BROKEN),
            ScriptedLink(2.0, welcome(1, settled=1, epoch=1)),
        ]
        for _ in range(2)
    ]
    rig = rigged(*links)
    assert through(rig).finish(3) == 1
    assert [shard for shard, *_ in rig.rejoins()] == [0, 1]


def test_a_worker_that_had_nothing_left_to_do_goes_back_as_well(rigged: Any) -> None:
    """It took the place of one that died when all was done, and has pushed nothing itself."""
    links = [ScriptedLink(1.0, welcome(3, settled=3), BROKEN), ScriptedLink(2.0, welcome(0, 0, 1))]
    rig = rigged(links)
    assert rig.exchange.join() == 3
    assert rig.exchange.finish(3) == 0


def test_who_waits_for_the_end_hears_that_it_is_to_stop(rigged: Any) -> None:
    rig = rigged([ScriptedLink(1.0, welcome(0), *replies(), None)])
    exchange = through(rig)
    rig.stop.set()
    with pytest.raises(ConnectionClosedError, match="told to stop"):
        exchange.finish(3)


def test_servers_hear_that_the_worker_is_alive(rigged: Any) -> None:
    links = [ScriptedLink(1.0, welcome(0)) for _ in range(2)]
    rig = rigged([links[0]], [links[1]], worker_timeout=0.1)
    rig.exchange.join()
    assert all(link.heard.wait(T) for link in links)


# -- rows of sparse tensors ------------------------------------------------------------------------


def without_rows(job: Job, shard: int) -> ReplyHeader:
    """A reply with all that is dense, and no row; as a slot of zeros says, too."""
    rows = job.layout(shard).rows
    assert rows is not None
    none = [torch.empty(0, dtype=torch.int64) for _ in rows.sparse]
    num_bytes = 4 * rows.num_values(none)
    return reply(1, 1, num_bytes=num_bytes, num_rows=len(none))


def test_rows_that_a_reply_leaves_out_stay_as_they_were(rigged: Any) -> None:
    job = toy_job(sparse_recipe(), servers=2, workers=2)
    links = [ScriptedLink(float(n), welcome(0), without_rows(job, n)) for n in (0, 1)]
    made = rigged([links[0]], [links[1]], recipe=sparse_recipe())
    made.exchange.join()
    assert made.landed() == [{0.0}, {1.0}]
    made.push(1)
    header, _ = links[1].pushed[0]
    rows = job.layout(1).rows
    assert (header.num_rows, header.num_bytes) == (len(rows.sparse), without_rows(job, 1).num_bytes)
    links[1].reply_slot.values.fill_(7.0)
    made.exchange.await_all()
    lo, hi = job.slices[1]
    for piece in rows.pieces:
        landed = made.place.landing[lo:hi][piece.lo : piece.hi]
        assert set(landed.tolist()) == ({1.0} if piece.width else {7.0})


def test_a_new_connection_brings_every_row(rigged: Any) -> None:
    """Before the replies on it, which leave some out."""
    job = toy_job(sparse_recipe(), servers=2, workers=2)
    broken = ScriptedLink(1.0, welcome(0), BROKEN)
    again = ScriptedLink(5.0, welcome(0), without_rows(job, 0))
    other = ScriptedLink(2.0, welcome(0), without_rows(job, 1))
    made = rigged([broken, again], [other], recipe=sparse_recipe())
    made.exchange.join()
    made.push(1)
    assert made.exchange.await_all() == APPLIED
    assert made.landed() == [{5.0}, {2.0}]
    (header, payload), (header_again, payload_again) = broken.pushed[0], again.pushed[0]
    assert (header.num_rows, payload) == (header_again.num_rows, payload_again)


@pytest.mark.parametrize(
    ("epoch", "number", "told"), [(0, 4, [[0, 7]]), (1, 4, [[0, 7]]), (0, 0, []), (1, 0, None)]
)
def test_where_norms_are_joined_later_servers_are_told_the_last_round_of_the_first(
    rigged: Any, epoch: int, number: int, told: list[list[int]] | None
) -> None:
    links = [[ScriptedLink(1.0, welcome(3))] for _ in range(3)]
    made = rigged(*links, discipline="sync", clip_norm=1.0)
    pushes = frozenset([(0, 7)]) if number else frozenset()
    made.network.last_round = RoundPart(epoch, frozenset(), number=number, pushes=pushes)
    made.exchange.join()
    assert [hello.get("last_round") for hello in made.network.hellos] == [None, told, told]


@pytest.mark.parametrize(("shard", "epoch"), [(0, 1), (1, 1), (1, 0)])
def test_where_norms_are_joined_a_server_that_was_started_anew_is_told_of_another_ones_round(
    rigged: Any, shard: int, epoch: int
) -> None:
    """A connection that broke is nothing new to a server."""
    whole = ScriptedLink(1.0, welcome(3), reply(1, 4))
    broken = ScriptedLink(1.0, welcome(3), BROKEN)
    again = ScriptedLink(5.0, welcome(3, epoch=epoch), reply(1, 4, epoch=epoch))
    links = [[broken, again], [whole]] if shard == 0 else [[whole], [broken, again]]
    made = rigged(*links, discipline="sync", clip_norm=1.0)
    of_other = RoundPart(0, frozenset(), number=5, pushes=frozenset([(0, 7)]))
    of_it = RoundPart(epoch, frozenset(), number=0)
    made.network.rounds = {shard: of_it, 1 - shard: of_other}
    made.exchange.join()
    made.push(1)
    made.exchange.await_all()
    assert made.network.hellos[2].get("last_round") == ([[0, 7]] if epoch else None)
