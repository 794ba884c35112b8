"""What TensorBoard shows of a run: RUN/tensorboard, where --tensorboard asks for it.

    by rank 0         loss; the graph; histograms of parameters/, gradients/ and activations/ NAME,
                      and sparsity/ of each, the fraction of zeros
    by the master     learning_rate, gradients_per_s; a histogram of the staleness
    by the evaluator  test/ and each metric's name

The x axis is always shard 0's version. Summaries only look on: they change no bit of the training,
and one that cannot be made costs a line in the log, not the run. Each process that has something to
show writes a file of its own.
"""

import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from offbeat.errors import ConfigError, RecipeError, in_a_line
from offbeat.flat import FlatModel, plain_name
from offbeat.run.job import Job
from offbeat.run.rundir import RunFolder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

DEFAULT_EVERY = 100
"""What stands in for `eval_every` in a run that is scored at its end only."""
LOSS_EVERY = 10
"""Steps of rank 0."""
MIN_PAUSE_S = 1.0
"""Between two of the master's looks at the servers that are shown."""
FLUSH_EVERY_S = 5
MAX_QUEUE = 1000
"""Events that may wait for the disk before training does."""


def check_installed() -> None:
    """A ConfigError where there is nothing to write summaries with."""
    try:
        importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise ConfigError(
            f"--tensorboard needs a package that cannot be imported ({error}): "
            f"pip install 'offbeat[tensorboard]'"
        ) from error


class EventFile:
    """Where summaries go, from any thread. Opened by the first of them; what comes after `close` is
    left out."""

    def __init__(self, folder: RunFolder, log: logging.Logger) -> None:
        self._folder = folder
        self._log = log
        self._lock = threading.Lock()
        self._writer: SummaryWriter | None = None
        self._closed = False
        self._left_out: set[str] = set()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """The run goes on without what fails in here; the log says so the first time."""
        try:
            yield
        except Exception as error:
            if what not in self._left_out:
                self._left_out.add(what)
                self._log.warning("tensorboard goes without %s: %s", what, in_a_line(error))

    def scalar(self, tag: str, value: float, version: int) -> None:
        with self.attempt(tag):
            self._write(lambda writer: writer.add_scalar(tag, value, version))

    def histogram(self, tag: str, values: Tensor, version: int) -> None:
        """Of the finite elements, if there are any."""
        with self.attempt(tag):
            finite = values[values.isfinite()]
            if finite.numel():
                self._write(lambda writer: writer.add_histogram(tag, finite, version))

    def tensor(self, tag: str, values: Tensor, version: int) -> None:
        """A histogram, and which fraction is zero."""
        with self.attempt(tag):
            values = values.detach()
            values = (values.to_dense() if values.is_sparse else values).float()
            if values.numel():
                zeros = 1.0 - values.count_nonzero().item() / values.numel()
                self.scalar(f"sparsity/{tag}", zeros, version)
                self.histogram(tag, values, version)

    def graph(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Traces `module`, which must be nobody else's."""
        module.eval()
        with torch.random.fork_rng(devices=[]):
            # add_graph prints what tracing fails with; so let it fail here
            torch.jit.trace(  # type: ignore[no-untyped-call]
                module, arguments, strict=False, check_trace=False
            )
            self._write(lambda writer: writer.add_graph(module, arguments, use_strict_trace=False))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            writer, self._writer = self._writer, None
        if writer is not None:
            with self.attempt("its last summaries"):
                writer.close()

    def _write(self, add: "Callable[[SummaryWriter], None]") -> None:
        """Under the lock, since a writer that is used after its end opens another file."""
        with self._lock:
            if self._closed:
                return
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(
                    str(self._folder.tensorboard), max_queue=MAX_QUEUE, flush_secs=FLUSH_EVERY_S
                )
            add(self._writer)


class StepSummaries:
    """Rank 0's: the loss every few steps; all tensors whenever a multiple of `eval_every` was
    passed; and, once, the graph. Used by one thread."""

    def __init__(self, job: Job, file: EventFile) -> None:
        self._file = file
        self._every = job.config.summary_every or job.config.eval_every or DEFAULT_EVERY
        self._num_steps = 0
        self._looked_at: int | None = None
        # Tracing runs a model, so it gets one of its own. It is made now, since that seeds torch's
        # generator for a moment, which other threads may be drawing from later on. What is imported
        # for all this takes seconds, and a gradient that waited for it would be stale.
        self._to_trace: nn.Module | None = job.make_model().module
        check_installed()
        with file.attempt("a warm start"):
            torch.jit.trace(nn.Identity(), torch.zeros(1))  # type: ignore[no-untyped-call]
        self._arguments: tuple[Any, ...] | None = None

    @contextmanager
    def watching(self, module: nn.Module, version: int) -> Iterator[bool]:
        """Around a pass through the model of `version`: looks at the activations, where it is time
        for that; whether it is. The hooks are there for this one step only."""
        due = self._is_due(version)
        handles = self._hook(module, version) if due else []
        try:
            yield due
        finally:
            for handle in handles:
                handle.remove()

    def computed(self, model: FlatModel, version: int, loss: Callable[[], float]) -> None:
        """After the backward pass, before the gradients are let go of; `loss` waits for it."""
        due = self._is_due(version)
        if due or self._num_steps % LOSS_EVERY == 0:
            self._file.scalar("loss", loss(), version)
        self._num_steps += 1
        if due:
            self._looked_at = version
            for spec, parameter in zip(model.manifest.tensors, model.parameters, strict=True):
                self._file.tensor(f"parameters/{spec.name}", parameter, version)
                if parameter.grad is not None:
                    self._file.tensor(f"gradients/{spec.name}", parameter.grad, version)
        if self._to_trace is not None:
            with self._file.attempt("the graph"):
                if self._arguments is None:
                    raise RecipeError("the loss calls the model with keywords, or not at all")
                self._file.graph(self._to_trace, self._arguments)
            self._to_trace = self._arguments = None

    def _is_due(self, version: int) -> bool:
        """Versions also go back, when a server is started anew."""
        last = self._looked_at
        return last is None or version // self._every != last // self._every

    def _hook(self, module: nn.Module, version: int) -> list[RemovableHandle]:
        """Look at the first output of every module without children, on the spot: what comes next
        may change it in place."""
        seen: set[nn.Module] = set()
        names = {
            part: plain_name(name) or type(part).__name__
            for name, part in module.named_modules()
            if next(part.children(), None) is None
        }

        def look(part: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output  # an RNN's
            if isinstance(first, Tensor) and part not in seen:
                seen.add(part)
                self._file.tensor(f"activations/{names[part]}", first, version)

        def keep_arguments(part: nn.Module, args: Any, kwargs: Any) -> None:
            if self._arguments is None and not kwargs:
                self._arguments = tuple(
                    a.detach().cpu() if isinstance(a, Tensor) else a for a in args
                )

        handles = [part.register_forward_hook(look) for part in names]
        if self._to_trace is not None:
            handles.append(module.register_forward_pre_hook(keep_arguments, with_kwargs=True))
        return handles


class Summaries:
    """What one process shows; nothing, unless the run's configuration asks for it. `watch` is for
    the master, `scored` for the evaluator, what `of_steps` returns for rank 0."""

    def __init__(
        self, job: Job, folder: RunFolder, log: logging.Logger, clock: Callable[[], float]
    ) -> None:
        self.job = job
        self._is_on = job.config.tensorboard
        self._every = job.config.summary_every or job.config.eval_every or DEFAULT_EVERY
        self._file = EventFile(folder, log)
        self._clock = clock
        self._num_per_update = job.make_discipline().gradients_per_update
        self._newest: tuple[float, int, list[int]] | None = None
        """When the servers were looked at last, their version, and the staleness they saw."""
        self._shown: tuple[float, int] | None = None
        self._falls: list[int] = []
        self._rates = job.make_rates(self._falls)

    def of_steps(self) -> StepSummaries | None:
        return StepSummaries(self.job, self._file) if self._is_on else None

    def scored(self, version: int, scores: Mapping[str, float]) -> None:
        if self._is_on:
            for name, value in scores.items():
                self._file.scalar(f"test/{name}", value, version)

    def watch(self, version: int, staleness: list[int], falls: Sequence[int] = ()) -> None:
        """Called several times a second; shows what it sees at the beginning and whenever a
        multiple of `eval_every` was passed, but once a second at most. `falls`: the versions from
        which on a rate that goes by scores is lower."""
        if not self._is_on:
            return
        self._falls[:] = falls
        at_s = self._clock()
        self._newest = (at_s, version, staleness)
        if self._shown is not None:
            shown_s, shown = self._shown
            if at_s - shown_s < MIN_PAUSE_S or version // self._every == shown // self._every:
                return
        self._show(*self._newest)

    def close(self) -> None:
        """Show where the run ended, and let go of the file."""
        if self._newest and self._shown and self._newest[1] != self._shown[1]:
            self._show(*self._newest)
        self._file.close()

    def _show(self, at_s: float, version: int, staleness: list[int]) -> None:
        with self._file.attempt("learning_rate"):
            self._file.scalar("learning_rate", self._learning_rate(version), version)
        if self._shown is not None:
            since_s, since = self._shown
            if version > since and at_s > since_s:
                rate = (version - since) * self._num_per_update / (at_s - since_s)
                self._file.scalar("gradients_per_s", rate, version)
        self._file.histogram("staleness", torch.tensor(staleness), version)
        self._shown = (at_s, version)

    def _learning_rate(self, version: int) -> float:
        """What the next update is made with, where no parameter group says otherwise. After the
        last update it is that one's: a schedule need not have an answer beyond."""
        total = self.job.facts.total_updates
        version = version if total is None else max(0, min(version, total - 1))
        return float(self._rates.at(version)[0]["lr"])
