"""`offbeat replay RUN`: every gradient of a recorded run is computed again, in one process, and
applied in the recorded order.

    found = offbeat.replay("runs/...")
    found.is_same, found.difference, found.state_dict()

An asynchronous run comes out different each time; but what happened in one is a function of what
its events say: the order of updates, and which versions and which batch every gradient was computed
on. So the same arithmetic (towers.py, shard.py) gives the same bits, and a run that cannot be
repeated can be looked at again. As it goes, what comes out is held against what the run wrote down:
the loss of every step, and the digest of every checkpoint.
"""

import contextlib
import dataclasses
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from offbeat.api import recipe_of
from offbeat.config import TrainConfig
from offbeat.data.batches import StepBatch, batch_length
from offbeat.errors import ConfigError, RunDirError, RunError
from offbeat.place import at
from offbeat.randomness import make_seed
from offbeat.recipes.base import Recipe, RecipeFunction
from offbeat.replaying.recorded import Committed, Computed, Life, Point, Recorded
from offbeat.roles.evaluator import load_state
from offbeat.roles.faults import make_faults
from offbeat.roles.scoring import Scoring, score_line
from offbeat.rules import Gradient
from offbeat.run.checkpoint import digest_of, write_weights
from offbeat.run.job import Facts, Job
from offbeat.run.making import rejoin_job
from offbeat.run.rundir import RunFolder
from offbeat.shard import ShardState
from offbeat.towers import CPU

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
        if self.difference is not None:
            found.append(f"the first difference: {self.difference}")
        if self.stopped is not None:
            found.append(f"it ends there: {self.stopped}")
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """What `module.load_state_dict` takes, as it was at the last version."""
        return dict(self.state)


def replay(
    run_dir: str | Path,
    *,
    to: int | None = None,
    without_worker: int | None = None,
    recipe: str | Recipe | RecipeFunction | None = None,
    data_dir: str | None = None,
    out: str | Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Replayed:
    """Do a recorded run again; nothing is written into its folder. `to`: the version of every shard
    to stop at. `without_worker`: leave out what this one has brought: what the run would have come
    to, had the others done the same, which is no question of bits. `recipe`: the same one, where it
    is not to be found where it was. `out`: where to write the weights that come out."""
    folder = RunFolder(Path(run_dir))
    job = _job_of(folder, recipe, data_dir, say)
    recorded = Recorded.read(folder.events, len(job.slices))
    if not any(recorded.lives):
        raise RunDirError(f"{run_dir} has no events of servers: there is nothing to replay")
    if without_worker is not None and without_worker not in range(job.config.workers):
        raise ConfigError(f"there is no worker {without_worker} of {job.config.workers}")
    if to is not None and any(to > max(life.ends for life in lives) for lives in recorded.lives):
        raise ConfigError(f"the run has no version {to} of every shard")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)  # as servers have it
    try:
        with torch.random.fork_rng(devices=[]):
            found = _Again(job, recorded, to, without_worker, say).run()
    finally:
        torch.set_num_threads(threads_before)
    if out is not None:
        write_weights(Path(out), found.state)
    return found


def _job_of(
    folder: RunFolder,
    recipe: str | Recipe | RecipeFunction | None,
    data_dir: str | None,
    say: Callable[[str], None],
) -> Job:
    config, described = folder.read_config()
    if "script" in described:
        raise ConfigError(
            f"{folder.path} was launched: a script's own loop cannot be done again from events"
        )
    if data_dir is not None:
        config = dataclasses.replace(config, data_dir=data_dir)
    facts = Facts(**described["job"])
    _check(config, facts)
    made = recipe_of(config, described, recipe, say)
    job = rejoin_job(config, made, facts, {}, folder.initial, needs=["train", "test"])
    _check_job(job)
    return job


def _check(config: TrainConfig, facts: Facts) -> None:
    """Refuse what events do not say enough of."""
    kind = config.chosen.kind
    if not kind.locked:
        raise ConfigError(
            f"{kind.name} applies gradients with no lock, so that no order of additions is "
            f"recorded: there is nothing to replay to the bit"
        )
    if not kind.served:
        raise ConfigError(f"{kind.name} has no servers, whose events a replay goes by")
    if facts.elastic:
        raise ConfigError("workers came and went in this run: it cannot be replayed so far")


def _check_job(job: Job) -> None:
    devices = {device for rank in range(job.config.workers) for device in job.devices(rank)}
    if devices != {CPU}:
        raise ConfigError(
            "the run was computed on a GPU, whose sums are not the same every time: only what was "
            "computed on the CPU can be replayed to the bit"
        )
    if job.is_coded and job.idle_codecs is None:
        raise ConfigError(
            "what codecs leave out of a gradient goes with its worker's next one: such a run "
            "cannot be replayed so far"
        )
    if job.manifest.is_sparse:
        raise ConfigError("sparse gradients cannot be replayed so far")


@dataclass(frozen=True, slots=True)
class _Kept:
    """A version that gradients are still to be computed on."""

    params: Tensor
    floats: Tensor
    ints: Tensor


@dataclass(frozen=True, slots=True)
class _Made:
    """A gradient, as its worker pushed it."""

    values: Sequence[Tensor]
    """A slice for each shard."""
    present: Sequence[bool]
    floats: Tensor
    ints: Tensor


class _Server:
    """A shard in one of its lives, as far as that is done again."""

    def __init__(
        self, job: Job, life: Life, to: int, wanted: Counter[int], states: set[int], told: set[int]
    ) -> None:
        """`wanted`: how many gradients are to be computed on each version; `states`: the versions
        that another life began with; `told`: those whose digests are known."""
        self.life = life
        self.at = life.begins
        """The recorded version that it is at."""
        self.to = to
        self.shard = job.make_shard(life.shard)
        self.states: dict[int, ShardState] = {}
        self.digests: dict[int, set[str]] = defaultdict(set)
        """Of versions that were told; of the first one also that of what it was given, which has
        no moving average yet when training begins."""
        self._wanted = wanted
        self._wanted_states = states
        self._wanted_digests = told
        self._kept: dict[int, _Kept] = {}
        self._is_begun = False

    @property
    def is_begun(self) -> bool:
        return self._is_begun

    @property
    def is_done(self) -> bool:
        return self._is_begun and self.at >= self.to

    def begin(self, state: ShardState) -> None:
        self.shard.load(state)
        self.shard.falls[:] = [*state.falls, *(v for v in self.life.falls if v not in state.falls)]
        self._updater = self.shard.make_updater()
        self._is_begun = True
        if self.at in self._wanted_digests:
            self.digests[self.at].add(digest_of(state))
        self._keep()

    def has(self, version: int) -> bool:
        return version in self._kept

    def kept(self, version: int) -> _Kept:
        return self._kept[version]

    def used(self, version: int) -> None:
        """A gradient was computed on it."""
        self._wanted[version] -= 1
        if not self._wanted[version]:
            del self._kept[version]

    def next(self) -> list[Computed]:
        return self.life.updates[self.at + 1]

    def apply(self, gradients: Sequence[Gradient]) -> float | None:
        """The next update; returns the learning rate. With no gradients: nothing is changed."""
        lr = None
        if gradients:
            begun = self._updater.begin(gradients)
            self._updater.end(begun, self.life.norms.get(self.at + 1))
            lr = self._updater.lr
        self.at += 1
        self._keep()
        return lr

    def _keep(self) -> None:
        shard = self.shard
        if self._wanted[self.at]:
            copies = (t.clone() for t in (shard.params, shard.floats, shard.ints))
            self._kept[self.at] = _Kept(*copies)
        if self.at in self._wanted_states | self._wanted_digests:
            state = shard.state({})
            if self.at in self._wanted_digests:
                self.digests[self.at].add(digest_of(state))
            if self.at in self._wanted_states:
                self.states[self.at] = state


class _Seat:
    """A worker, who computes what it is told to."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job = job
        self._rank = rank
        self._place = job.share(rank).place()
        self._towers = job.make_towers(rank, job.make_model())
        self._towers.train()
        never = threading.Event()
        self._faults = make_faults(job.config, rank, 1, clock=time.monotonic, stop=never)
        self._batches: Generator[StepBatch, None, None] | None = None
        self._next = 0
        """With which step, or batch, they go on."""

    def compute(self, gradient: Computed, bases: Sequence[_Kept]) -> tuple[_Made, float]:
        """The gradient, and its loss."""
        towers, job = self._towers, self._job
        for (lo, hi), base in zip(job.slices, bases, strict=True):
            towers.landing[lo:hi].copy_(base.params)
        towers.refresh()
        towers.read_buffers(bases[0].floats, bases[0].ints)
        first = gradient.bases[0]
        towers.begin(0 if first is None else first.version)
        whole = torch.empty(job.manifest.num_elements)
        slices = [whole[lo:hi] for lo, hi in job.slices]
        floats, ints = torch.empty_like(bases[0].floats), torch.empty_like(bases[0].ints)
        with at(self._place), _threads(job.config.threads or 1):
            count = self._compute_batches(gradient)
            towers.write_buffers(floats, ints)
            present = towers.take_gradient(slices, count)
            loss, _ = towers.wait()
        self._faults.pushing(slices)
        return _Made(slices, present, floats, ints), loss

    def _compute_batches(self, gradient: Computed) -> int:
        """All batches of the step; returns how many examples the last one has."""
        batch, paces = None, self._job.config.paces
        for batch in self._batches_of(gradient):
            seed = make_seed(self._job.config.seed, "forward", self._rank, batch.number + 1)
            self._towers.seed(seed)
            self._towers.compute(self._job.recipe.loss, self._towers.deal(batch.batch))
            count = batch_length(batch.batch)
            if batch.number == gradient.batch or (batch.ends_step and not paces):
                break
            self._towers.accumulate(count)
        if batch is None or batch.number != gradient.batch:
            raise RunError(
                f"{gradient} ended with batch {gradient.batch} in the run, and does not now: "
                f"shares or batches were cut in another way then"
            )
        return count

    def _batches_of(self, gradient: Computed) -> Iterator[StepBatch]:
        """From its first one on. Steps of one length are known by their number; where they are
        not, each begins where the one before it ended."""
        start = gradient.sequence - 1
        if self._job.config.paces:
            start = 0 if gradient.before is None else gradient.before.batch + 1
        if self._batches is None or start != self._next:
            self.close()
            self._batches = self._job.step_batches(self._rank, start)
        self._next = gradient.batch + 1 if self._job.config.paces else start + 1
        return self._batches

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()


class _Again:
    """The course of a replay."""

    def __init__(
        self,
        job: Job,
        recorded: Recorded,
        to: int | None,
        without: int | None,
        say: Callable[[str], None],
    ) -> None:
        self._job = job
        self._recorded = recorded
        self._without = without
        self._say = say
        self._seats: dict[int, _Seat] = {}
        self._made: dict[Computed, _Made] = {}
        self._computed: set[Computed] = set()
        self._is_stateful = job.inner is not None
        """What a worker computes depends on what it has computed before."""
        self._uses: Counter[Computed] = Counter()
        self._num_gradients = self._num_updates = self._num_checked = self._num_others = 0
        self._difference: str | None = None
        self._servers = self._make_servers(to)
        self._said_s = time.monotonic()

    def _make_servers(self, to: int | None) -> dict[tuple[int, int], _Server]:
        lives = [life for of_shard in self._recorded.lives for life in of_shard]
        wanted: dict[tuple[int, int], Counter[int]] = {
            (life.shard, life.number): Counter() for life in lives
        }
        for gradient in self._recorded.gradients:
            if gradient.worker == self._without or not (gradient.num_uses or self._is_stateful):
                continue
            for base in gradient.bases:
                if base is not None:
                    wanted[base.shard, base.life][base.version] += 1
        states: dict[tuple[int, int], set[int]] = {key: set() for key in wanted}
        for life in lives:
            if life.source is not None:
                states[life.shard, life.source.life].add(life.source.version)
        told = [
            {checkpoint.shards[shard][0] for checkpoint in self._recorded.checkpoints}
            for shard in range(len(self._job.slices))
        ]
        ends = self._ends(to)
        return {
            key: _Server(self._job, life, ends[key], wanted[key], states[key], told[life.shard])
            for life in lives
            if (key := (life.shard, life.number)) in ends
        }

    def _ends(self, to: int | None) -> dict[tuple[int, int], int]:
        """How far each life is done again: those that led to where the run ended as far as that,
        or as far as `to`; what was lost in between, too, since others may have computed on it."""
        ends = {
            (life.shard, life.number): life.ends
            for of_shard in self._recorded.lives
            for life in of_shard
        }
        if to is None:
            return ends
        for of_shard in self._recorded.lives:
            life = of_shard[-1]
            while not life.has(to):
                assert life.source is not None, "some life has it"
                ends.pop((life.shard, life.number))
                life = of_shard[life.source.life]
            ends[life.shard, life.number] = to
        return ends

    def run(self) -> Replayed:
        began_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            while sum(self._go_on(server) for server in self._servers.values()):
                self._tell()
        last = self._last_servers()
        lacking = next((s for s in self._servers.values() if not s.is_done), None)
        checkpoints = [
            (checkpoint.version, self._is_same(checkpoint))
            for checkpoint in self._recorded.checkpoints
            if self._was_reached(checkpoint)
        ]
        self._look_at(checkpoints)
        return Replayed(
            version=last[0].at,
            num_gradients=self._num_gradients,
            num_updates=self._num_updates,
            num_checked=self._num_checked,
            num_others=self._num_others,
            checkpoints=checkpoints,
            difference=self._difference,
            stopped=None if lacking is None else self._why_not(lacking),
            took_s=time.monotonic() - began_s,
            state=self._state_dict([server.shard.params for server in last]),
            scores=self._score(last),
        )

    def _state_dict(self, params: Sequence[Tensor]) -> dict[str, Tensor]:
        first, model = self._last_servers()[0].shard, self._job.make_model()
        whole = torch.cat(list(params))
        return self._job.manifest.state_dict(whole, first.floats, first.ints, model.frozen())

    def _score(self, last: Sequence[_Server]) -> Mapping[str, float]:
        if self._job.test is None:
            return {}
        shards = [server.shard for server in last]
        means = [shard.params if shard.ema is None else shard.ema for shard in shards]
        module = self._job.make_model().module
        load_state(module, self._state_dict(means))
        return Scoring(self._job.recipe, self._job.test, warn=self._say).score(module).values

    def _close(self) -> None:
        for seat in self._seats.values():
            seat.close()

    def _last_servers(self) -> list[_Server]:
        """Of each shard the last one that has begun: that in which the replay ends."""
        return [
            max((s for s in lives if s.is_begun), key=lambda server: server.life.number)
            for lives in map(self._lives_of, range(len(self._job.slices)))
        ]

    def _go_on(self, server: _Server) -> bool:
        """Make all updates of it that can be made by now; whether there was any."""
        if not server.is_begun and not self._begin(server):
            return False
        moved = False
        while not server.is_done and all(self._can_have(g) for g in self._of(server)):
            self._update(server)
            moved = True
        return moved

    def _of(self, server: _Server) -> list[Computed]:
        """The gradients of its next update, in the order in which they are added up."""
        found = [gradient for gradient in server.next() if gradient.worker != self._without]
        if self._job.facts.in_rounds:
            found.sort(key=lambda gradient: gradient.worker)
        return found

    def _begin(self, server: _Server) -> bool:
        life = server.life
        if life.source is None:
            server.begin(self._job.initial_state(life.shard, self._job.make_model()))
            return True
        before = self._servers[life.shard, life.source.life]
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
        server = None if base is None else self._servers.get((base.shard, base.life))
        return base is not None and server is not None and server.has(base.version)

    def _update(self, server: _Server) -> None:
        shard, needs_base = server.life.shard, server.shard.rule.needs_base
        found = []
        for gradient in self._of(server):
            base = gradient.bases[shard]
            assert base is not None, "its own server wrote it down"
            params = None
            if needs_base:
                params = self._servers[shard, base.life].kept(base.version).params
            made = self._make(gradient)
            found.append(
                Gradient(
                    made.values[shard],
                    None if all(made.present) else made.present,
                    made.floats if shard == 0 else None,
                    made.ints if shard == 0 else None,
                    worker=gradient.worker,
                    base_version=base.version,
                    base=params,
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

    def _of_version(self, server: _Server, version: int) -> list[Computed]:
        return [g for g in server.life.updates[version] if g.worker != self._without]

    def _make(self, gradient: Computed) -> _Made:
        """Compute it, unless another shard has had it already."""
        if gradient not in self._made:
            for each in self._lacking(gradient):
                made = self._compute(each)
            self._made[gradient] = made
        return self._made[gradient]

    def _compute(self, gradient: Computed) -> _Made:
        if gradient.worker not in self._seats:
            self._seats[gradient.worker] = _Seat(self._job, gradient.worker)
        points = [base for base in gradient.bases if base is not None]
        servers = [self._servers[point.shard, point.life] for point in points]
        kept = [s.kept(p.version) for s, p in zip(servers, points, strict=True)]
        made, loss = self._seats[gradient.worker].compute(gradient, kept)
        for server, point in zip(servers, points, strict=True):
            server.used(point.version)
        if self._is_stateful:
            self._computed.add(gradient)
        self._num_gradients += 1
        self._check_loss(gradient, loss)
        return made

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

    def _lives_of(self, shard: int) -> list[_Server]:
        return [server for server in self._servers.values() if server.life.shard == shard]

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

    def _why_not(self, server: _Server) -> str:
        """It cannot go on."""
        while not server.is_begun and (source := server.life.source) is not None:
            server = self._servers[source.shard, source.life]
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
        done = sum(server.at - server.life.begins for server in self._servers.values())
        todo = sum(server.to - server.life.begins for server in self._servers.values())
        self._say(f"update {done:,}/{todo:,}")


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """As a worker has them."""
    if count > 1:
        torch.set_num_threads(count)
    yield
    if count > 1:
        torch.set_num_threads(1)
