"""A shard: one server's slice of the parameter vector, with optimizer state, EMA and version.

The server decides when; the shard does the arithmetic. Everything is torch's own optimizers, run on
Parameters that are views ("aliases") of the slice. Called by roles/sessions.py; nothing here locks:

    shard = Shard(params, segments, SGD(lr=0.1))
    updater = shard.make_updater()           # one for all sessions, or one per session in lock-free
    version = updater.apply([Gradient(values=g)])
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.accounts import Accounts
from offbeat.aliases import PREFIX, Alias, Beginning, Segment, differ, pack, unpack
from offbeat.clipping import Arriving, Clip, ClipNorm
from offbeat.errors import ConfigError
from offbeat.flat import Manifest
from offbeat.optim import NO_GROUP, Optimizer, Schedule, constant, is_plain_sgd, with_numbers
from offbeat.rows import Changes, Ids, Known, Rows, joined, trust_rows
from offbeat.rules import Gradient, Mean, Rule
from offbeat.schedules import Rates
from offbeat.streams import make_mark

RULE = "rule"
"""What the names of a rule's vectors begin with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardState:
    """All that a shard consists of at one version, in memory of its own.

    `tensors`: params; where there are any ema, floats, ints; what the optimizer keeps, under
    names that aliases.py gives it; and what the rule remembers, as rule.NAME-OF-IT.NAME.
    """

    version: int
    tensors: dict[str, Tensor]
    accounts: Accounts
    """What became of each worker's gradients up to here."""
    falls: tuple[int, ...] = ()
    """The versions from which on the learning rate is lower, where it goes by scores."""
    entry: int = 0
    """The last one of its server's journal that is in it; 0: none is, or there is no journal."""


@dataclass(frozen=True, slots=True)
class Begun:
    """An update of which it is known what goes in, and that has not gone in."""

    version: int
    """The one that it will make."""
    gradients: Sequence[Gradient]
    values: Tensor
    """What the rule made of them; its updater's, or one of theirs."""
    mask: Sequence[bool] | None
    """For each tensor of the manifest, whether it has a gradient; None: all have."""
    ids: Ids | None = None
    """Which rows of sparse tensors it has; None: the shard has no such tensor."""
    memory: Mapping[str, Tensor] | None = None
    """What the rule remembered before, where the update may be cancelled."""


def partition(num_elements: int, num_slices: int) -> list[tuple[int, int]]:
    """Cut 0..num_elements into contiguous slices whose sizes differ by one element at most."""
    cuts = [num_elements * k // num_slices for k in range(num_slices + 1)]
    return list(itertools.pairwise(cuts))


def partition_rows(manifest: Manifest, num_slices: int) -> list[tuple[int, int]]:
    """The same for a flat vector with sparse tensors, none of whose rows is cut."""
    cuts = [lo for lo, _ in partition(manifest.num_elements, num_slices)]
    for spec in manifest.tensors:
        for index, cut in enumerate(cuts):
            if spec.sparse and spec.offset < cut < spec.offset + spec.numel:
                cuts[index] = cut - (cut - spec.offset) % spec.width
    slices = list(itertools.pairwise([*cuts, manifest.num_elements]))
    if any(lo == hi for lo, hi in slices):
        raise ConfigError(
            f"{num_slices} servers for so few rows: no row of a sparse tensor is cut, and a server "
            f"would have nothing; lower servers"
        )
    return slices


def partition_tensors(manifest: Manifest, num_slices: int) -> list[tuple[int, int]]:
    """Cut the flat vector between tensors, so that the largest slice is as small as can be."""
    ends = [spec.offset + spec.numel for spec in manifest.tensors if spec.numel]
    if num_slices > len(ends):
        raise ConfigError(
            f"{num_slices} servers for {len(ends)} tensors: each server needs at least one whole "
            f"tensor; lower servers"
        )
    least, most = 0, ends[-1]  # of the largest slice: `least` is not enough, `most` is
    while most - least > 1:
        size = (least + most) // 2
        least, most = (size, most) if _cuts(ends, num_slices, size) is None else (least, size)
    return list(itertools.pairwise(_cuts(ends, num_slices, most) or []))


def _cuts(ends: Sequence[int], num_slices: int, size: int) -> list[int] | None:
    """Where to cut so that no slice is larger than `size` and none is empty; None: nowhere."""
    cuts = [0]
    for index, end in enumerate(ends):
        before = 0 if index == 0 else ends[index - 1]
        if end - before > size:
            return None
        tensors_left, slices_left = len(ends) - index, num_slices - len(cuts)
        if before > cuts[-1] and (end - cuts[-1] > size or tensors_left == slices_left):
            cuts.append(before)
    return [*cuts, ends[-1]] if len(cuts) == num_slices else None


def segments_of(
    manifest: Manifest, optimizer: Optimizer, lo: int, hi: int, *, whole: bool = False
) -> list[Segment]:
    """The parts of tensors that the slice lo..hi of the flat vector consists of; `whole`: all of
    them are whole tensors, which the optimizer sees as such."""
    segments = []
    for index in tensors_in(manifest, lo, hi):
        spec = manifest.tensors[index]
        start, end = max(lo, spec.offset), min(hi, spec.offset + spec.numel)
        group, shown = optimizer.group_of(spec.name), spec if whole else None
        segments.append(Segment(index, group, start - lo, end - lo, shown, spec.width))
    return segments


def tensors_in(manifest: Manifest, lo: int, hi: int) -> list[int]:
    """The indices of the tensors that the slice lo..hi has a part of: one per segment."""
    return [
        index
        for index, spec in enumerate(manifest.tensors)
        if max(lo, spec.offset) < min(hi, spec.offset + spec.numel)
    ]


def usable(values: Tensor) -> bool:
    """Whether an optimizer can work with this gradient: its squared norm must be a float32.

    NaN, infinities and elements beyond 1.8e19 all show in it, and it is the quickest to compute.
    """
    return math.isfinite(torch.dot(values, values).item())


class Shard:
    """Parameters, EMA, buffers and version of a slice. Updaters change them.

    A version is the number of updates that are in. Each updater counts its own, which only its own
    thread writes; so the sum needs no lock, and never runs backwards.
    """

    def __init__(
        self,
        params: Tensor,
        segments: Sequence[Segment],
        optimizer: Optimizer,
        *,
        schedule: Schedule | None = None,
        total_updates: int | None = None,
        ema_decay: float | None = None,
        rule: Rule | None = None,
        fused: bool = False,
        floats: Tensor | None = None,
        ints: Tensor | None = None,
        clip: Clip | None = None,
        joint_clip: ClipNorm | None = None,
        rows: Rows | None = None,
    ) -> None:
        """`clip`: what makes the gradient of an update smaller where it is too large; None: its
        worker has seen to that, or nobody has to. `joint_clip`: the same where the norm is that of
        all servers' slices together, which `Updater.end` is told. `rows`: where sparse tensors lie,
        if any do."""
        self.params = params
        self.segments = list(segments)
        self.optimizer = optimizer
        self.schedule = schedule or constant()
        self.total_updates = total_updates
        self.ema_decay = ema_decay
        self.ema = params.clone() if ema_decay is not None else None
        self.rule = rule or Mean()
        self.fused = fused
        self.clip = clip
        self.joint_clip = joint_clip
        self.rows = rows
        if rows is not None:
            trust_rows()
        self.changes = None if rows is None else Changes(rows)
        """Which rows a reply has to bring."""
        self.floats = floats if floats is not None else torch.empty(0)
        self.ints = ints if ints is not None else torch.empty(0, dtype=torch.int64)
        self.falls: list[int] = []
        """The versions from which on a learning rate that goes by scores is lower by one step;
        updaters look at it."""
        self.lr: float | None = None
        """What the last update was made with, where no parameter group says otherwise."""
        self.updaters: list[Updater] = []
        self._first_version = 0
        self._optimizer_state: dict[str, Tensor] = {}
        self.tickets = itertools.count(1)
        """The numbers of updates as they begin; its __next__ is atomic in CPython, without a
        lock."""

    def load(self, state: ShardState) -> None:
        """Go on from `state`, which is the shard's from now on. Before there is any updater."""
        assert not self.updaters, "a shard is loaded before it is used"
        tensors = state.tensors
        self.params.copy_(tensors["params"])
        if self.ema is not None:
            self.ema.copy_(tensors.get("ema", tensors["params"]))
        for name, buffer in (("floats", self.floats), ("ints", self.ints)):
            if name in tensors:
                buffer.copy_(tensors[name])
        self._optimizer_state = {k: v for k, v in tensors.items() if k.startswith(PREFIX)}
        mine = f"{RULE}.{self.rule.name}."
        kept = {k.removeprefix(mine): v for k, v in tensors.items() if k.startswith(mine)}
        self.rule.load({name: vector.to(self.params.device) for name, vector in kept.items()})
        self._first_version = state.version
        self.falls[:] = state.falls
        self.tickets = itertools.count(state.version + 1)

    @property
    def version(self) -> int:
        """How many updates are in, all of them whole."""
        version = self._first_version
        for updater in self.updaters:
            version += updater.num_finished
        return version

    @property
    def version_begun(self) -> int:
        """How many updates are in or half-way in; the same as `version` where a lock is held."""
        version = self._first_version
        for updater in self.updaters:
            version += updater.num_begun
        return version

    def make_updater(self, *, shared: bool = False) -> "Updater":
        """An optimizer over this shard. `shared`: one of several, on one state, in different
        threads."""
        updater = Updater(self, shared=shared, state=self._optimizer_state)
        self._optimizer_state = {}  # the first updater has it now
        self.updaters.append(updater)
        return updater

    def read(
        self,
        params: Tensor,
        floats: Tensor,
        ints: Tensor,
        own: "Updater | None" = None,
        known: Known | None = None,
    ) -> tuple[int, bool]:
        """Copy the parameters and buffers out; returns their version, and whether they mix
        versions. `known`: which rows `params` has already, as they are; None: none.

        Mixed is what a lock-free read may be: an update was under way while it was taken; on a
        device, when it was told to take it. There what the reader's `own` updater was told is in,
        since its stream keeps the order, and of the others' what the device has done.
        """
        version = self.version if own is None else self._version_before(own)
        if self.rows is None or known is None or (news := self._show(known)) is None:
            params.copy_(self.params)
        else:
            self.rows.copy(self.params, params, news)
        if self.floats.numel():
            floats.copy_(self.floats)
        if self.ints.numel():
            ints.copy_(self.ints)
        return version, self.version_begun > version

    def _show(self, known: Known) -> Ids | None:
        return None if self.changes is None else self.changes.show(known)

    def _version_before(self, own: "Updater") -> int:
        version = self._first_version + own.num_finished
        for updater in self.updaters:
            if updater is not own:
                version += updater.num_done
        return version

    def state(self, accounts: Accounts) -> ShardState:
        """A copy of everything, beside the accounts of what is in it; taken while no update is
        under way."""
        version = self.version
        state = {"params": _copy(self.params)}
        if self.ema is not None:
            state["ema"] = _copy(self.ema)
        if self.floats.numel():
            state["floats"] = _copy(self.floats)
        if self.ints.numel():
            state["ints"] = _copy(self.ints)
        if self.updaters:
            state.update(self.updaters[0].optimizer_state())
        else:
            state.update({k: v.clone() for k, v in self._optimizer_state.items()})
        for name, vector in self.rule.state().items():
            state[f"{RULE}.{self.rule.name}.{name}"] = _copy(vector)
        return ShardState(
            version=version, tensors=state, accounts=accounts, falls=tuple(self.falls)
        )


class Updater:
    """One torch optimizer over a shard's storage; used by one thread at a time.

    To begin with there is one alias for each run of segments in the same parameter group. The first
    gradient that lacks a tensor splits them into one alias per tensor, since torch counts steps and
    keeps state per Parameter, and skips the ones without a gradient. Where the optimizer has to see
    whole tensors there is one alias per tensor from the beginning.

    Plain SGD is one addition and keeps nothing, so it is made here: the same bits as torch's, at a
    third of the time for a small model.
    """

    def __init__(self, shard: Shard, *, shared: bool, state: dict[str, Tensor]) -> None:
        self.shard = shard
        self.num_begun = 0
        self.num_finished = 0
        self._rates = Rates(shard.optimizer, shard.schedule, shard.total_updates, shard.falls)
        is_plain = shard.optimizer.is_plain_sgd and self._rates.only_lr
        self.stateless = is_plain and not shard.fused
        # splitting later would give lock-free sessions different step counts
        is_whole = any(segment.spec is not None for segment in shard.segments)
        self.split = is_whole or (shared and not self.stateless) or differ(state)
        runs = [[s] for s in shard.segments] if self.split else _runs(shard.segments)
        self.aliases = [Alias(shard.params, run) for run in runs]
        self.optimizer = self._build(self.aliases)
        stepped = {s.group for s in shard.segments if s.group != NO_GROUP}
        self._group_indices = sorted(stepped) or [0]  # as Optimizer.build has them
        self._tables = [member.options for member in shard.optimizer.members]
        self._numbers: list[float] = []
        self._wanted: list[dict[str, Any]] = []
        self.mark = make_mark(shard.params.device)
        """After its last update."""
        self._out = torch.empty_like(shard.params)
        """Where the rule may write; untouched it takes no memory."""
        self.lr: float | None = None
        """What the last update was made with, where no parameter group says otherwise."""
        self.norm: Arriving | None = None
        """That of the last update's gradient before it was clipped, where that had to be known."""
        if shared and not self.stateless:
            self._share_state()
        if state:
            self._restore(state)

    def apply(self, gradients: Sequence[Gradient]) -> int:
        """One update out of these gradients; returns the version that it makes."""
        return self.end(self.begin(gradients))

    def begin(self, gradients: Sequence[Gradient]) -> "Begun":
        """The first half of an update: what its gradient is. Nothing changes before `end`."""
        shard = self.shard
        version = next(shard.tickets)
        self.num_begun += 1
        staleness = [version - 1 - gradient.base_version for gradient in gradients]
        ids = memory = None
        if shard.joint_clip is not None and shard.rule.remembers:
            memory = {name: vector.clone() for name, vector in shard.rule.state().items()}
        if shard.rows is None:
            values = shard.rule(gradients, staleness, shard.params, self._out)
        else:
            values, ids = self._join_rows(shard.rows, gradients, staleness)
        return Begun(version, gradients, values, _joint_mask(gradients), ids, memory)

    def measure(self, begun: "Begun") -> tuple[list[int], Arriving]:
        """The tensors that an update has a gradient of, and the norm of each one's part here."""
        shard = self.shard
        assert shard.joint_clip is not None, "only where other servers have to know"
        present = [begun.mask is None or begun.mask[s.tensor] for s in shard.segments]
        sizes = None
        if shard.rows is not None and begun.ids is not None:
            of_tensors = shard.rows.sizes(begun.ids)
            sizes = [of_tensors[segment.tensor] for segment in shard.segments]
        norms = Arriving(shard.joint_clip.measure(begun.values, present, sizes))
        found = zip(shard.segments, present, strict=True)
        return [segment.tensor for segment, has_one in found if has_one], norms

    def cancel(self, begun: "Begun") -> None:
        """It does not go in: the next one to begin makes its version."""
        self.shard.tickets = itertools.count(begun.version)
        self.num_begun -= 1
        if begun.memory is not None:
            self.shard.rule.load(begun.memory)

    def end(self, begun: "Begun", norm: float | None = None) -> int:
        """The second half; `norm` is that of all servers' slices, where the shard needs it.
        Returns the version that it makes."""
        shard, version, mask = self.shard, begun.version, begun.mask
        values = self._clipped(begun, norm)
        self._step(values, mask, version, begun.gradients[0].rates, begun.ids)
        if shard.ema is not None and shard.ema_decay is not None:
            decay = min(shard.ema_decay, (1 + version) / (10 + version))
            shard.ema.lerp_(shard.params, 1 - decay)
        self._merge_buffers(begun.gradients)
        if shard.changes is not None and begun.ids is not None:
            shard.changes.add(begun.ids)
        self.mark.set()
        self.num_finished += 1
        return version

    def _join_rows(
        self, rows: Rows, gradients: Sequence[Gradient], staleness: Sequence[int]
    ) -> tuple[Tensor, Ids]:
        """What the rule makes of gradients that have different rows: it is shown each of them, and
        the parameters, with the rows that any has."""
        each = [gradient.ids for gradient in gradients]
        ids = joined(each, len(rows.sparse))
        if len(gradients) > 1:
            gradients = [
                dataclasses.replace(gradient, values=rows.spread(gradient.values, mine, ids))
                for gradient, mine in zip(gradients, each, strict=True)
            ]
        params, rule = self.shard.params, self.shard.rule
        if rule.sees_params:
            params = rows.pack(params, ids)
            gradients = [
                gradient
                if gradient.base is None
                else dataclasses.replace(gradient, base=rows.pack(gradient.base, ids))
                for gradient in gradients
            ]
        return rule(gradients, staleness, params, self._out[: rows.num_values(ids)]), ids

    def _clipped(self, begun: "Begun", norm: float | None) -> Tensor:
        """Not in place: `values` may be a worker's."""
        shard, values = self.shard, begun.values
        if shard.clip is None and shard.joint_clip is None:
            return values
        out = self._out[: values.numel()]  # of sparse tensors there are rows only
        if shard.joint_clip is not None and norm is not None:
            shard.joint_clip.scale(values, torch.tensor(norm), out)
            return out
        assert shard.clip is not None, "the norm of all slices is known"
        sizes = None
        if shard.rows is not None and begun.ids is not None:
            sizes = shard.rows.sizes(begun.ids)
        found = shard.clip(values, out, begun.mask, sizes)
        self.norm = None if found is None else Arriving(found)
        return out

    @property
    def num_done(self) -> int:
        """Of the finished ones those that the device has done: only the last may be under way,
        since its worker waits for the device before it pushes again."""
        return self.num_finished - (not self.mark.is_reached())

    def optimizer_state(self) -> dict[str, Tensor]:
        """What torch keeps per Parameter, by the names that aliases.py gives it."""
        return pack(self.aliases, self.optimizer.state, self.shard.params.numel())

    def first_state(self) -> dict[str, Tensor]:
        """The same as it would be after a first step on zeros: which names there are, how long, and
        of what."""
        begun = self._begin(torch.zeros_like(self.shard.params), first=False)
        kept = {alias.param: state for alias, state in zip(self.aliases, begun, strict=True)}
        return pack(self.aliases, kept, self.shard.params.numel())

    def _step(
        self,
        values: Tensor,
        mask: Sequence[bool] | None,
        version: int,
        wanted: Tensor | None = None,
        ids: Ids | None = None,
    ) -> None:
        """`wanted`: the numbers of the options, as a script's own optimizer has them. `ids`: which
        rows of sparse tensors `values` has."""
        if mask is not None and not self.split:
            self._split()
        if wanted is None:
            rates, is_plain = self._rates.at(version - 1), self.stateless
        else:
            rates = self._options(wanted.tolist())
            is_plain = self.stateless and is_plain_sgd(rates)
        self.lr = self.shard.lr = float(rates[0]["lr"])
        # the most common case
        if is_plain and mask is None and ids is None and len(self.aliases) == 1:
            self.shard.params.add_(values, alpha=-rates[self._group_indices[0]]["lr"])
            return
        present = [a for a in self.aliases if mask is None or mask[a.segments[0].tensor]]
        if is_plain:
            for alias in present:
                lr = rates[alias.segments[0].group]["lr"]
                alias.view.add_(self._gradient_of(alias, values, ids), alpha=-lr)
            return
        self._tell(self.optimizer, rates)
        for alias in self.aliases:
            alias.param.grad = None
        for alias in present:
            alias.param.grad = self._gradient_of(alias, values, ids)
        self.optimizer.step()

    def _gradient_of(self, alias: Alias, values: Tensor, ids: Ids | None) -> Tensor:
        if self.shard.rows is None or ids is None:
            return alias.of(values)
        found = self.shard.rows.gradient(values, ids, alias.lo, alias.hi)
        return found if found.is_sparse else alias.shaped(found)

    def _options(self, numbers: list[float]) -> list[dict[str, Any]]:
        """Of each group, as `numbers_of` made numbers of them."""
        if numbers != self._numbers:  # which most steps leave as they are
            given = iter(numbers)
            self._wanted = [with_numbers(options, given) for options in self._tables]
            self._numbers = numbers
        return self._wanted

    def _tell(self, optimizer: torch.optim.Optimizer, rates: Sequence[dict[str, Any]]) -> None:
        for group, index in zip(optimizer.param_groups, self._group_indices, strict=True):
            group.update(rates[index])

    def _merge_buffers(self, gradients: Sequence[Gradient]) -> None:
        """Float buffers become the mean of what came, integer ones the largest seen."""
        if not (self.shard.floats.numel() or self.shard.ints.numel()):
            return
        floats = [g.floats for g in gradients if g.floats is not None]
        if floats and self.shard.floats.numel():
            self.shard.floats.copy_(
                floats[0] if len(floats) == 1 else torch.stack(floats).mean(dim=0)
            )
        for gradient in gradients:
            if gradient.ints is not None and self.shard.ints.numel():
                torch.maximum(self.shard.ints, gradient.ints, out=self.shard.ints)

    def _build(self, aliases: Sequence[Alias]) -> torch.optim.Optimizer:
        params = [alias.param for alias in aliases]
        groups = [alias.segments[0].group for alias in aliases]
        return self.shard.optimizer.build(params, groups, fused=self.shard.fused)

    def _split(self) -> None:
        """From one alias per run to one per tensor, each with its part of the state so far."""
        coarse, old = self.aliases, self.optimizer
        self.aliases = [Alias(self.shard.params, [s]) for s in self.shard.segments]
        self.optimizer = self._build(self.aliases)
        self.split = True
        fine = iter(self.aliases)
        for whole in coarse:
            state = old.state.get(whole.param, {})
            for part in itertools.islice(fine, len(whole.segments)):
                for key, value in state.items():
                    self.optimizer.state[part.param][key] = part.cut(value, whole)

    def _restore(self, state: dict[str, Tensor]) -> None:
        """Put back what `optimizer_state` gave. What was not stepped yet torch is to begin by
        itself: not all of its state begins with zeros."""
        places = {segment: index for index, segment in enumerate(self.shard.segments)}
        cpu = torch.device("cpu")  # where torch keeps scalars, but for its fused kernels
        for alias in self.aliases:
            scalars_on = alias.view.device if self.shard.fused else cpu
            found = unpack(state, alias, places[alias.segments[0]], scalars_on)
            if found:
                self.optimizer.state[alias.param] = found

    def _share_state(self) -> None:
        """Use the state of the shard's first updater; the first one makes it, as torch would.

        torch makes state in the first step. Several threads must not each make their own, so a step
        is taken with zero gradients, and of the state it leaves what each part was when it was
        made. That is on zeros, since weight decay makes a gradient of parameters; but what begins
        as a copy of the parameters does so here too. What is made by a gradient, as SGD's momentum,
        begins with zeros: its first step is then dampened as all others are.
        """
        if self.shard.updaters:
            first = self.shard.updaters[0]
            for mine, theirs in zip(self.aliases, first.aliases, strict=True):
                self.optimizer.state[mine.param] = first.optimizer.state[theirs.param]
            return
        on_zeros = self._begin(torch.zeros_like(self.shard.params))
        on_params = self._begin(self.shard.params.clone())
        for alias, made, there in zip(self.aliases, on_zeros, on_params, strict=True):
            for key, value in there.items():
                if _is_copy(value, alias.view):
                    made[key] = value
            self.optimizer.state[alias.param] = made

    def _begin(self, params: Tensor, *, first: bool = True) -> list[dict[str, Any]]:
        """For each alias, its state when it is made, were `params` the parameters; or (not `first`)
        after the step that made it."""
        aliases = [Alias(params, alias.segments) for alias in self.aliases]
        dry = self._build(aliases)
        self._tell(dry, self._rates.at(0))
        begun = [Beginning(dry.state.get(alias.param, {})) for alias in aliases]
        for alias, state in zip(aliases, begun, strict=True):
            alias.param.grad = self._no_gradient(alias)
            dry.state[alias.param] = state
        dry.step()
        return [state.first if first else state for state in begun]

    def _no_gradient(self, alias: Alias) -> Tensor:
        """Zeros, as the optimizer takes them for this alias."""
        if self.shard.optimizer.members[alias.segments[0].group].rows_only:
            return torch.zeros_like(alias.view).to_sparse(1)
        return torch.zeros_like(alias.param)


def _runs(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Neighbours that an optimizer treats alike; each sparse tensor alone."""
    alike = itertools.groupby(segments, key=lambda s: (s.group, s.tensor if s.width else None))
    return [list(run) for _, run in alike]


def _is_copy(value: Any, view: Tensor) -> bool:
    alike = isinstance(value, Tensor) and (value.shape, value.dtype) == (view.shape, view.dtype)
    return alike and torch.equal(value, view)


def _copy(tensor: Tensor) -> Tensor:
    """In the CPU's memory, wherever it is."""
    return tensor.to("cpu", copy=True)


def _joint_mask(gradients: Sequence[Gradient]) -> list[bool] | None:
    """Which tensors got a gradient from somebody; None: all of them did."""
    masks = []
    for gradient in gradients:
        if gradient.mask is None:
            return None
        masks.append(gradient.mask)
    joint = [any(column) for column in zip(*masks, strict=True)]
    return None if all(joint) else joint
