"""The course of a replay: what can be computed by now, and what is made of it.

    course = Course(job, recorded, to=None, without=None, say=print)
    replayed = course.run()

A shard goes on as long as the gradients of its next update can be had: each is computed on versions
of all shards, which the others may have to make first. It was so in the run, too, and so this comes
to its end, unless events are missing.
"""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.replaying.parts import Kept, Made, Revival, Seat, codes
from offbeat.replaying.reach import Reach
from offbeat.replaying.recorded import Committed, Computed, Point, Recorded
from offbeat.roles.evaluator import load_state
from offbeat.roles.scoring import Scoring, score_line
from offbeat.rules import Gradient
from offbeat.run.job import Job
from offbeat.shard import ShardState

SAY_EVERY_S = 5.0


@dataclass(frozen=True)
class Replayed:
    """What came of it."""

    version: int
    """Of the first shard, at which it ended."""
    num_gradients: int
    num_updates: int
    num_checked: int
    """Steps whose losses were compared."""
    num_others: int
    """Those of them that were others."""
    checkpoints: Sequence[tuple[int, bool]]
    """The version of each that was reached, and whether it is the same to the bit."""
    difference: str | None
    """The first one that was seen, in words."""
    stopped: str | None
    """Why it could not go on to the end, in words."""
    took_s: float
    state: dict[str, Tensor]
    found: Sequence[str]
    """What was seen where something was no number."""
    scores: Mapping[str, float]
    """On the test data, if there is any; of the moving average, where there is one."""

    @property
    def is_same(self) -> bool:
        return self.difference is None and self.stopped is None

    def lines(self) -> list[str]:
        """What the command says of it."""
        count = f"{self.num_gradients:,} gradients computed, {self.num_updates:,} updates made"
        found = [f"{count} in {self.took_s:.1f} s: up to version {self.version}"]
        if self.scores:
            found.append(score_line(self.scores))
        if self.num_checked or self.checkpoints:
            same = sum(is_same for _, is_same in self.checkpoints)
            found.append(
                f"to the bit as it was: {self.num_checked - self.num_others:,} of "
                f"{self.num_checked:,} losses, {same} of {len(self.checkpoints)} checkpoints"
            )
        found += self.found
        if self.difference is not None:
            found.append(f"the first difference: {self.difference}")
        if self.stopped is not None:
            found.append(f"it ends there: {self.stopped}")
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """What `module.load_state_dict` takes, as it was at the last version."""
        return dict(self.state)


class Course:
    """The course of a replay."""

    def __init__(
        self,
        job: Job,
        recorded: Recorded,
        to: int | None,
        without: int | None,
        say: Callable[[str], None],
        target: Computed | None = None,
    ) -> None:
        """`target`: go as far as it takes to look at this gradient."""
        self._job = job
        self._recorded = recorded
        self._without = without
        self._say = say
        self._seats: dict[int, Seat] = {}
        self._made: dict[Computed, Made] = {}
        self._computed: set[Computed] = set()
        self._is_stateful = job.inner is not None or codes(job)
        """What a worker computes depends on what it has computed before."""
        self._uses: Counter[Computed] = Counter()
        self._num_gradients = self._num_updates = self._num_checked = self._num_others = 0
        self._difference: str | None = None
        self._target = target
        self._reach = Reach(recorded, to, target, without, is_stateful=self._is_stateful)
        self._revivals = self._make_revivals()
        self._said_s = time.monotonic()

    def _make_revivals(self) -> dict[tuple[int, int], Revival]:
        lives = [life for of_shard in self._recorded.lives for life in of_shard]
        wanted: dict[tuple[int, int], Counter[int]] = {
            (life.shard, life.number): Counter() for life in lives
        }
        for gradient in self._recorded.gradients:
            is_wanted = gradient.num_uses or self._is_stateful or gradient is self._target
            if gradient.worker == self._without or not is_wanted:
                continue
            for base in gradient.bases:
                if base is not None:
                    wanted[base.shard, base.life][base.version] += 1
        states: dict[tuple[int, int], set[int]] = {key: set() for key in wanted}
        for life in lives:
            if life.source is not None:
                states[life.shard, life.source.life].add(life.source.version)
        for goal in self._reach.goals.values():
            if self._reach.is_beyond(goal):
                states[goal.shard, goal.life].add(goal.version)
        told = [
            {checkpoint.shards[shard][0] for checkpoint in self._recorded.checkpoints}
            for shard in range(len(self._job.slices))
        ]
        ends = self._reach.ends
        return {
            key: Revival(self._job, life, ends[key], wanted[key], states[key], told[life.shard])
            for life in lives
            if (key := (life.shard, life.number)) in ends
        }

    def run(self) -> Replayed:
        began_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            # all of them each time, not up to the first that moves: what is kept stays little
            while sum(self._go_on(server) for server in self._revivals.values()):
                self._tell()
            found = self._look()
        last = [self._last_of(shard) for shard in range(len(self._job.slices))]
        checkpoints = [
            (checkpoint.version, self._is_same(checkpoint))
            for checkpoint in self._recorded.checkpoints
            if self._was_reached(checkpoint)
        ]
        self._look_at(checkpoints)
        return Replayed(
            version=last[0].version,
            num_gradients=self._num_gradients,
            num_updates=self._num_updates,
            num_checked=self._num_checked,
            num_others=self._num_others,
            checkpoints=checkpoints,
            difference=self._difference,
            stopped=self._why_not(),
            found=found,
            took_s=time.monotonic() - began_s,
            state=self._state_dict(last, [shard.tensors["params"] for shard in last]),
            scores=self._score(last),
        )

    def _look(self) -> list[str]:
        """At the target, if there is one."""
        target = self._target
        if target is None or not self._can_have(target):
            return []
        for before in self._lacking(target)[:-1]:
            self._compute(before)
        on = " and ".join(map(str, target.bases))
        told = f"{target} (batch {target.batch}), on {on}:"
        return [
            told,
            *(f"  {line}" for line in self._seat(target).look(target, self._kept(target))),
        ]

    def _state_dict(self, last: Sequence[ShardState], each: Sequence[Tensor]) -> dict[str, Tensor]:
        """`each`: the parameters, or their averages, of every shard."""
        model, none = self._job.make_model(), torch.empty(0)
        floats, ints = (last[0].tensors.get(kind, none) for kind in ("floats", "ints"))
        return self._job.manifest.state_dict(torch.cat(list(each)), floats, ints, model.frozen())

    def _score(self, last: Sequence[ShardState]) -> Mapping[str, float]:
        if self._job.test is None:
            return {}
        means = [shard.tensors.get("ema", shard.tensors["params"]) for shard in last]
        module = self._job.make_model().module
        load_state(module, self._state_dict(last, means))
        return Scoring(self._job.recipe, self._job.test, warn=self._say).score(module).values

    def _close(self) -> None:
        for seat in self._seats.values():
            seat.close()

    def _last_of(self, shard: int) -> ShardState:
        """As the replay ends: at the goal, or as far as the last life of it that has begun came."""
        goal = self._reach.goals.get(shard)
        if goal is not None:
            kept = self._revivals[shard, goal.life].states.get(goal.version)
            if kept is not None:
                return dataclasses.replace(kept, version=goal.version)
        begun = [server for server in self._lives_of(shard) if server.is_begun]
        last = max(begun, key=lambda server: server.life.number)
        return dataclasses.replace(last.shard.state({}), version=last.at)

    def _go_on(self, server: Revival) -> bool:
        """Make all updates of it that can be made by now; whether there was any, or it has begun,
        which others may have waited for."""
        moved = not server.is_begun
        if moved and not self._begin(server):
            return False
        while not server.is_done and all(self._can_have(g) for g in self._of(server)):
            self._update(server)
            moved = True
        return moved

    def _of(self, server: Revival) -> list[Computed]:
        """The gradients of its next update, in the order in which they are added up."""
        found = [gradient for gradient in server.next() if gradient.worker != self._without]
        if self._job.facts.in_rounds:
            found.sort(key=lambda gradient: gradient.worker)
        return found

    def _begin(self, server: Revival) -> bool:
        life = server.life
        if life.source is None:
            server.begin(self._job.initial_state(life.shard, self._job.make_model()))
            return True
        before = self._revivals[life.shard, life.source.life]
        state = before.states.get(life.source.version)
        if state is not None:
            server.begin(state)
        return state is not None

    def _can_have(self, gradient: Computed) -> bool:
        return gradient in self._made or all(
            all(map(self._has, each.bases)) for each in self._lacking(gradient)
        )

    def _lacking(self, gradient: Computed) -> list[Computed]:
        """What has to be computed for it, in this order: itself last, and, where a worker keeps
        something from one to the next, those before."""
        found = [gradient]
        while self._is_stateful and (before := found[-1].before) is not None:
            if before in self._computed:
                break
            found.append(before)
        return found[::-1]

    def _has(self, base: Point | None) -> bool:
        server = None if base is None else self._revivals.get((base.shard, base.life))
        return base is not None and server is not None and server.has(base.version)

    def _update(self, server: Revival) -> None:
        shard, found = server.life.shard, []
        for gradient in self._of(server):
            base = gradient.bases[shard]
            assert base is not None, "its own server wrote it down"
            made = self._make(gradient)
            found.append(
                Gradient(
                    made.values[shard],
                    None if all(made.present) else made.present,
                    made.floats if shard == 0 else None,
                    made.ints if shard == 0 else None,
                    worker=gradient.worker,
                    # of a former life there may have been more than this one has
                    base_version=min(base.version, server.at),
                    base=made.bases[shard] if server.shard.rule.needs_base else None,
                )
            )
        lr = server.apply(found)
        self._num_updates += 1
        recorded = server.life.rates.get(server.at)
        if found and self._without is None and recorded is not None and lr != recorded:
            self._note(
                f"version {server.at} of shard {shard} was made with the learning rate {recorded}, "
                f"and would be made with {lr} now: the options were others"
            )
        for gradient in self._of_version(server, server.at):
            self._uses[gradient] += 1
            if self._uses[gradient] == gradient.num_uses:
                del self._made[gradient], self._uses[gradient]

    def _of_version(self, server: Revival, version: int) -> list[Computed]:
        return [g for g in server.life.updates[version] if g.worker != self._without]

    def _make(self, gradient: Computed) -> Made:
        """Compute it, unless another shard has had it already."""
        if gradient not in self._made:
            for each in self._lacking(gradient):
                made = self._compute(each)
            self._made[gradient] = made
        return self._made[gradient]

    def _compute(self, gradient: Computed) -> Made:
        made, loss = self._seat(gradient).compute(gradient, self._kept(gradient))
        for base in gradient.bases:
            assert base is not None, "it could be had"
            self._revivals[base.shard, base.life].used(base.version)
        if self._is_stateful:
            self._computed.add(gradient)
        self._num_gradients += 1
        self._check_loss(gradient, loss)
        return made

    def _seat(self, gradient: Computed) -> Seat:
        """Its worker's."""
        if gradient.worker not in self._seats:
            self._seats[gradient.worker] = Seat(self._job, gradient.worker)
        return self._seats[gradient.worker]

    def _kept(self, gradient: Computed) -> list[Kept]:
        """What it was computed on."""
        bases = [base for base in gradient.bases if base is not None]
        return [self._revivals[base.shard, base.life].kept(base.version) for base in bases]

    def _check_loss(self, gradient: Computed, loss: float) -> None:
        """What its worker has written down, if it lived to do so."""
        told = self._recorded.losses.get((gradient.worker, gradient.sequence))
        if told is None or self._without is not None:
            return
        self._num_checked += 1
        if loss not in told:
            self._num_others += 1
            on = " and ".join(map(str, gradient.bases))
            was = " or ".join(map(repr, sorted(told)))
            self._note(f"{gradient}, on {on}: its loss was {was}, and is {loss!r} now")

    def _note(self, difference: str) -> None:
        if self._difference is None:
            self._difference = difference

    def _was_reached(self, checkpoint: Committed) -> bool:
        return self._without is None and all(
            any(version in server.digests for server in self._lives_of(shard))
            for shard, (version, _) in enumerate(checkpoint.shards)
        )

    def _lives_of(self, shard: int) -> list[Revival]:
        return [server for server in self._revivals.values() if server.life.shard == shard]

    def _is_same(self, checkpoint: Committed) -> bool:
        """Whether some life of every shard has come to its digest."""
        return all(
            any(digest in server.digests.get(version, ()) for server in self._lives_of(shard))
            for shard, (version, digest) in enumerate(checkpoint.shards)
        )

    def _look_at(self, checkpoints: Sequence[tuple[int, bool]]) -> None:
        other = next((version for version, is_same in checkpoints if not is_same), None)
        if other is not None:
            self._note(f"the checkpoint of version {other} is the first that is not the same")

    def _why_not(self) -> str | None:
        """Why it does not go on to the end; None: it has come there."""
        for server in self._revivals.values():
            if not server.is_done:
                return self._what_lacks(server)
            life = server.life
            if server.to == life.ends and life.updates and max(life.updates) > life.ends:
                return f"version {life.ends + 1} of shard {life.shard} is in no event"
        return None

    def _what_lacks(self, server: Revival) -> str:
        while not server.is_begun and (source := server.life.source) is not None:
            server = self._revivals[source.shard, source.life]
        where = f"version {server.at + 1} of shard {server.life.shard} cannot be made again"
        for gradient in (each for g in self._of(server) for each in self._lacking(g)):
            for shard, base in enumerate(gradient.bases):
                if base is None:
                    return (
                        f"{where}: no event says which version of shard {shard} {gradient} was "
                        f"computed on, since its worker died as it sent it, or a server before it "
                        f"had written it down"
                    )
                if gradient not in self._made and not self._has(base):
                    return (
                        f"{where}: {gradient} was computed on {base}, of which events are missing"
                    )
        return where

    def _tell(self) -> None:
        if time.monotonic() < self._said_s + SAY_EVERY_S:
            return
        self._said_s = time.monotonic()
        done = sum(server.at - server.life.begins for server in self._revivals.values())
        todo = sum(server.to - server.life.begins for server in self._revivals.values())
        self._say(f"update {done:,}/{todo:,}")
