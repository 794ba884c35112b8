"""The devices that one worker computes on: a model replica (a tower) on each, one gradient of all.

Parameters come from the servers and gradients go to them through slots, which lie in the CPU's
memory, or on the GPU that all workers share. One tower on the device of the slots is the plain
case: there the model's parameters lie where the replies arrive, and nothing is copied. Any other
tower has its parameters on its own device: a staging (transport/staging.py) takes them there, and
gradients back.

    towers = Towers([model], [torch.device("cuda:0")], amp=False)
    parts = towers.deal(batch)              # each tower's part of it, on its device
    towers.compute(recipe.loss, parts)
    towers.take_gradient([slot.values])     # the mean over all examples
    loss, is_usable = towers.wait()         # up to here devices were only told what to do
    towers.refresh()                         # the servers' replies have arrived in `landing`
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.accumulation import Accumulation
from offbeat.capture import RECORDINGS, Captured, Recorder, torch_draws
from offbeat.clipping import Clip
from offbeat.compiling import Compiled, Loss
from offbeat.data.batches import Batch, batch_length, cut_batch, map_tensors
from offbeat.errors import ConfigError, RecipeError
from offbeat.flat import FlatModel, Part, RowPart
from offbeat.reading import Reading
from offbeat.rows import Rows
from offbeat.shard import usable
from offbeat.streams import Scope, make_streams
from offbeat.transport.base import Slot
from offbeat.transport.staging import Staging, make_staging

CPU = torch.device("cpu")
_SAME: Scope = contextlib.nullcontext()
Result = tuple[Tensor, list[bool]]
"""A loss, on its device, and which tensors got a gradient."""
Parts = list[tuple[float, Batch]]
"""For each tower its share of the examples, and what of the batch it computes on."""


def find_devices(names: str | None, rank: int) -> list[torch.device]:
    """The devices that `names` lists with commas between; without any, the GPU that falls to this
    worker, or the CPU where there is none."""
    if names is None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [torch.device("cuda", rank % count) if count else CPU]
    return [_find_device(name.strip()) for name in names.split(",")]


def _find_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"{name!r} is no device; known: cpu, cuda, cuda:0, cuda:1, ..."
        ) from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(f"there is no device {name} here: torch sees {count} GPUs")
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise ConfigError(f"cannot train on {name!r}; known: cpu, cuda, cuda:0, cuda:1, ...")
    return CPU


class Towers:
    """One thread uses it. `models` are alike; each is moved to the device of the same number."""

    def __init__(
        self,
        models: Sequence[FlatModel],
        devices: Sequence[torch.device],
        *,
        amp: bool = False,
        staging: Staging | None = None,
        make_recorder: Callable[[torch.device], Recorder | None] = lambda device: None,
        tell: Callable[[str], None] = lambda line: None,
        compiled: Compiled | None = None,
        slot_device: torch.device = CPU,
        clip: Clip | None = None,
        accumulates: bool = False,
        apart: bool = False,
    ) -> None:
        """`slot_device`: where slots lie. `staging`: None: the one for these devices.
        `make_recorder`: what captures the steps of the tower on a device, if anything; `tell` says
        where that cannot be. `compiled`: what has losses compiled, if anything. `clip`: what makes
        too large a gradient smaller, if anything. `accumulates`: steps are of several batches.
        `apart`: parameters are to have memory of their own, wherever they arrive."""
        self.models = list(models)
        self.devices = list(devices)
        self.model = self.models[0]
        """The first tower's, for whoever wants to look at one."""
        self._gpus = [d for d in dict.fromkeys(self.devices) if d.type == "cuda"]
        self._amp = amp
        self._is_plain = self.devices == [slot_device] and not apart
        """Parameters arrive in the model's own."""
        self._clip = clip
        self._accumulation = Accumulation()
        self.norm: float | None = None
        """That of the last step's gradient before it was clipped, after `wait`; None: nobody had to
        know."""
        is_in_slots = self._is_plain and slot_device == CPU
        self._gathers = not is_in_slots or clip is not None or accumulates
        """Gradients are gathered in memory that is the same every time."""
        self._gate = RECORDINGS.make_gate()
        self._generators = {device: torch.Generator(device) for device in self._gpus}
        """What captured steps draw from."""
        self._losses: list[Tensor] = []
        """Of the towers that had examples, each times its share of them."""
        self._weights: list[float] = []
        self._make_recorder = make_recorder
        self._tell = tell
        self._compiled = compiled
        self._captured: list[Captured[Result] | None] | None = None
        """Each tower's; None before the first step."""
        self._taken: list[list[bool] | None] = [None for _ in self.models]
        """Which tensors got a gradient that a captured step has taken from them already."""
        self.gradient: Tensor | None = None
        """That of the last step, where slots are; None: it is elsewhere, or in the slots."""
        self._is_sparse = self.model.manifest.is_sparse
        self._touched: dict[int, list[Tensor]] = {}
        """Of each sparse tensor the rows that have a gradient so far, where that is gathered."""
        self._slices: Sequence[Tensor] = ()
        """Where the last gradient was written."""
        self._reading = Reading(self.devices[0]) if self._gathers else None
        self._staging = staging or make_staging(self.devices, slot_device)
        self.landing = self.model.params
        """Where the servers' parameters arrive."""
        if not is_in_slots:
            self._move(slot_device)
        self._gradients: list[Tensor] = []
        if self._gathers:
            self._gradients = [torch.empty_like(model.params) for model in self.models]
        if self._is_plain and not is_in_slots:
            self.gradient = self._gradients[0]

    def _move(self, slot_device: torch.device) -> None:
        """Every model to its device."""
        landing = self.model.params.to(slot_device, copy=True)
        for model, device in zip(self.models, self.devices, strict=True):
            model.move(device)
        self.landing = self.model.params if self._is_plain else landing

    @property
    def first_device(self) -> torch.device:
        return self.devices[0]

    @property
    def is_told(self) -> bool:
        """Whether devices compute while this thread goes on, until it waits for them."""
        return bool(self._gpus)

    def in_stream(self) -> Scope:
        """For the thread that uses the towers: so that several workers on one GPU get on at the
        same time. Several towers go by each device's own; what the first one has is where marks
        are set."""
        if len(self.models) == 1:
            return make_streams(self.first_device).new()()
        return torch.cuda.device(self.first_device) if self.first_device != CPU else _SAME

    def train(self) -> None:
        for model in self.models:
            model.module.train()

    def check_identity(self) -> None:
        for model in self.models:
            model.check_identity()

    def seed(self, seed: int, *, captured_only: bool = False) -> None:
        """Make what the forward passes draw depend on nothing but `seed`. `captured_only`: those
        that are replayed; others draw from torch's own generators, which all threads share."""
        for device, generator in self._generators.items():
            generator.manual_seed(seed + self._gpus.index(device))
        if captured_only:
            return
        torch.default_generator.manual_seed(seed)
        for number, device in enumerate(self._gpus):
            assert device.index is not None
            torch.cuda.default_generators[device.index].manual_seed(seed + number)

    def _mark_random(self) -> Callable[[], None]:
        """Returns what has the next forward pass draw what the next one now would."""
        on_cpu = torch.get_rng_state()
        states = [(generator, generator.get_state()) for generator in self._generators.values()]

        def rewind() -> None:
            torch.set_rng_state(on_cpu)
            for generator, state in states:
                generator.set_state(state)

        return rewind

    def begin(self, version: int) -> None:
        """A step begins, with the parameters of this version of the first shard."""

    # -- what a worker has for itself ----------------------------------------------------------

    @property
    def keeps(self) -> bool:
        """Whether anything here outlives a step that no server has."""
        return False

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What that is now, by names, in memory of its own; and numbers beside it."""
        return {}, {}

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> bool:
        """Go on with what `state` gave in another life, before the first step of this one; False:
        it is none of this model and optimizer, and nothing is changed."""
        return not (tensors or numbers)

    def skip(self, num_batches: int) -> None:
        """So many were gone through in another life."""

    # -- parameters ----------------------------------------------------------------------------

    def adopt(self, landing: Tensor) -> None:
        """From now on the servers' parameters arrive there."""
        self.landing = landing
        if self._is_plain:
            self.model.adopt(landing)

    def refresh(self) -> list[str]:
        """Make every model show what has arrived; returns the names of parameters that had been
        given other memory, and were put back."""
        if self._is_plain:
            # where a step was replayed no code of the user's has run that could have moved them
            return [] if self._taken[0] and self.model.is_a_view else self.model.refresh()
        for model in self.models:
            self._staging.upload(self.landing, model.params)
        self._staging.ready()
        return [name for model in self.models for name in model.refresh()]

    def read_buffers(self, floats: Tensor, ints: Tensor) -> None:
        for model in self.models:
            model.read_buffers(floats, ints)

    def write_buffers(self, floats: Tensor, ints: Tensor) -> None:
        """Of several towers the mean of the float ones, and the largest of the integer ones."""
        self.model.write_buffers(floats, ints)
        if len(self.models) == 1 or not (floats.numel() or ints.numel()):
            return
        more_floats, more_ints = torch.empty_like(floats), torch.empty_like(ints)
        for number, model in enumerate(self.models[1:], start=2):
            model.write_buffers(more_floats, more_ints)
            floats.lerp_(more_floats, 1 / number)
            torch.maximum(ints, more_ints, out=ints)

    # -- a step --------------------------------------------------------------------------------

    def deal(self, batch: Batch) -> Parts:
        """Cut a batch, which is on the first device, into as many parts as there are towers; where
        examples are too few the last towers get none."""
        if len(self.models) == 1:
            return [(1.0, batch)]
        count = batch_length(batch)
        cuts = [count * k // len(self.models) for k in range(len(self.models) + 1)]
        return [
            ((hi - lo) / count, _part(batch, lo, hi, count, device))
            for lo, hi, device in zip(cuts[:-1], cuts[1:], self.devices, strict=True)
        ]

    def compute(self, loss: Loss, parts: Parts, *, eagerly: bool = False) -> None:
        """Loss and gradient of each part; the next to be called is `take_gradient`. `eagerly`: no
        captured step is replayed, and the gradients can be looked at in the parameters."""
        if self._captured is None:
            self._captured = [self._capture(number, loss) for number in range(len(self.models))]
        self._weights = [weight for weight, _ in parts]
        self._losses = []
        for number, (weight, part) in enumerate(parts):
            self._taken[number] = None
            if not weight:
                continue
            captured = self._captured[number]
            if captured and not eagerly and (replayed := captured.replay(part)) is not None:
                value, self._taken[number] = replayed
            else:
                with captured.in_place() if captured else self._gate.lock:
                    model = self.models[number]
                    value = self._compute_one(model, loss, part, plainly=eagerly)
            self._losses.append(value if weight == 1.0 else value * weight)

    def computed(self) -> None:
        """The gradient of one tower is in its parameters, by whomever; nobody asks for its loss."""
        self._weights = [1.0]
        self._taken = [None]
        self._losses = [self._no_loss]

    @functools.cached_property
    def _no_loss(self) -> Tensor:
        return torch.zeros((), device=self.first_device)

    def loss(self) -> float:
        """The mean over all parts. This waits for it."""
        return float(sum(value.item() for value in self._losses))

    def _compute_one(
        self, model: FlatModel, loss: Loss, part: Batch, *, plainly: bool = False
    ) -> Tensor:
        """Its loss; the gradient stays in the parameters. `plainly`: nothing is compiled."""
        if self._compiled is None or plainly:
            return self._differentiate(model, loss, part)
        return self._compiled.compute(
            lambda loss: self._differentiate(model, loss, part), loss, part, model.drop_gradient
        )

    def _differentiate(self, model: FlatModel, loss: Loss, part: Batch) -> Tensor:
        with self._precision(model):
            value = loss(model.module, part)
        _check_loss(value)
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    def _capture(self, number: int, loss: Loss) -> Captured[Result] | None:
        recorder = self._make_recorder(self.devices[number]) if self._gathers else None
        if recorder is None:
            return None
        model, gradient = self.models[number], self._gradients[number]
        cpu_draws = torch_draws if self.devices[number] != CPU else dict
        reading = self._reading if len(self.models) == 1 else None

        def compute(part: Batch) -> Result:
            try:
                value = self._compute_one(model, loss, part)
                present = model.take_gradient([gradient])
                if reading is not None:
                    reading.take(value, gradient)
                return value, present
            except BaseException:  # or the next backward pass would add to what is there
                model.drop_gradient()
                raise

        return Captured(
            "the step",
            compute,
            recorder,
            parts=lambda result: ([result[0], gradient], result[1]),
            buffers=lambda: list(model.module.buffers()),
            state=lambda: {**plain_attributes(model.module), **places(model.module), **cpu_draws()},
            mark_random=self._mark_random,
            tell=self._tell,
            gate=self._gate,
            instead=self._generators.get(self.devices[number]),
        )

    def accumulate(self, count: int) -> None:
        """Keep what was computed last, on `count` examples, as a part of a step; the next to be
        called is `compute`, for another batch of it."""
        present, total = self._gather(), self._mean_of_towers()
        self._accumulation.add(total, self._mean_loss(), present, count)

    def take_gradient(self, slices: Sequence[Tensor], count: int = 1) -> list[bool]:
        """Write the mean gradient into `slices`, which together make up the flat vector, and let go
        of it. Returns, for each tensor, whether it got one. The next to be called is `wait`.
        `count`: examples of the last batch, where there were others before it."""
        self._slices = slices
        if self._reading is None:
            return self.model.take_gradient(slices)
        present, total = self._take_whole(self._reading, count)
        if slices[0].data_ptr() != total.data_ptr():  # which was lent to the slots
            self._download(total, slices)
        self._reading.sent()
        return present

    def _download(self, total: Tensor, slices: Sequence[Tensor]) -> None:
        lo = 0
        for piece in slices:
            self._staging.download(total[lo : lo + piece.numel()], piece)
            lo += piece.numel()

    def take_rows(
        self, slots: Sequence[Slot], rows: Sequence[Rows | None], count: int = 1
    ) -> list[bool]:
        """The same for a model with sparse tensors, of which `rows` says where they lie in each
        slice: what goes into a slot is packed."""
        if self._reading is None:
            parts = self.model.take_parts()
            present = [part is not None for part in parts]
        else:
            present, total = self._take_whole(self._reading, count)
            parts = self._parts_of(total, present)
            self._reading.sent()
        self._slices = [
            where.fill(parts, slot.values, slot.rows)
            for slot, where in zip(slots, rows, strict=True)
            if where is not None
        ]
        return present

    def _parts_of(self, total: Tensor, present: Sequence[bool]) -> list[Part]:
        """Of a gradient that is gathered: of sparse tensors the rows that any batch has touched."""
        parts: list[Part] = []
        for index, spec in enumerate(self.model.manifest.tensors):
            mine = total[spec.offset : spec.offset + spec.numel]
            if not present[index]:
                parts.append(None)
            elif spec.sparse:
                ids = torch.unique(torch.cat(self._touched[index]))
                parts.append(RowPart(ids, mine.view(spec.shape).index_select(0, ids)))
            else:
                parts.append(mine)
        self._touched.clear()
        return parts

    def _take_whole(self, reading: Reading, count: int) -> tuple[list[bool], Tensor]:
        """Gathered, with those of the batches before, and clipped."""
        present, total = self._gather(), self._mean_of_towers()
        if self._accumulation.is_begun:
            loss, present = self._accumulation.close(total, self._mean_loss(), present, count)
            reading.take(loss, total)
        elif len(self.models) > 1 or self._taken[0] is None:
            reading.take(self._mean_loss(), total)
        if self._clip is not None and (norm := self._clip(total, total, present)) is not None:
            reading.take_norm(norm)
        return present, total

    def _gather(self) -> list[bool]:
        """Every tower's gradient into its place; which tensors have one in any of them."""
        if self._is_sparse:
            for model in self.models:
                for index, ids in model.touched().items():
                    self._touched.setdefault(index, []).append(ids.to(self.first_device))
        present = [
            model.take_gradient([gradient]) if taken is None else taken
            for model, gradient, taken in zip(
                self.models, self._gradients, self._taken, strict=True
            )
        ]
        return present[0] if len(present) == 1 else [any(c) for c in zip(*present, strict=True)]

    def _mean_loss(self) -> Tensor:
        return torch.stack([value.to(self.first_device) for value in self._losses]).sum()

    def _mean_of_towers(self) -> Tensor:
        """The gradients of all parts as one, in the place of the first."""
        total = self._gradients[0]
        if len(self.models) > 1:
            total.mul_(self._weights[0])
            for weight, gradient in zip(self._weights[1:], self._gradients[1:], strict=True):
                if weight:
                    # to the CPU only what has arrived can be added
                    arrived = gradient.to(total.device, non_blocking=total.is_cuda)
                    total.add_(arrived, alpha=weight)
        return total

    def wait(self) -> tuple[float, bool]:
        """Until the gradient is in its slices. The mean loss over all parts, and whether an
        optimizer can work with the gradient."""
        if self._reading is None:
            return self.loss(), all(map(usable, self._slices))
        self._staging.done()
        found = self._reading.wait()
        self.norm = self._reading.norm if self._clip and self._clip.measures else None
        return found

    def _precision(self, model: FlatModel) -> contextlib.AbstractContextManager[Any]:
        if not self._amp:
            return contextlib.nullcontext()
        return torch.autocast(model.params.device.type, dtype=torch.bfloat16)

    def forget(self) -> None:
        """Before the memory that was used so far goes away."""
        self._staging.forget()

    def close(self) -> None:
        """Nothing is computed any more. What was recorded goes now, with its memory, and not
        whenever Python looks for garbage: in the midst of the next run, if the process goes on."""
        self._captured = None


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What the parts of a model keep beside tensors: counts, rates, flags."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, int | float | str | None)
    }


def places(module: nn.Module) -> dict[str, int]:
    """Where the tensors lie that the parts of a model keep beside parameters: one that is assigned
    anew would be missed by whoever goes on in the memory of the old one."""
    return {
        f"where {name}.{key} lies".replace("where .", "where "): value.data_ptr()
        for name, part in module.named_modules()
        for key, value in [*part._buffers.items(), *vars(part).items()]
        if isinstance(value, Tensor)
    }


def _part(batch: Batch, lo: int, hi: int, count: int, device: torch.device) -> Batch:
    mine = cut_batch(batch, lo, hi, count)
    # on the CPU whoever reads it does not wait for a stream: what comes there has to have arrived
    return map_tensors(mine, lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"))


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor):
        found = f"a {type(loss).__name__}"
    elif loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}"
    elif not loss.requires_grad:
        found = "one that depends on no parameter"
    else:
        return
    raise RecipeError(f"the recipe's loss must return a tensor of one number, not {found}")
