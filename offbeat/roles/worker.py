"""A worker: it computes gradients of its share of the data, and exchanges each for new parameters.

    welcome -> [ loss, gradient -> push to every shard -> prepare the next batch -> await every
    reply ]*

Started by an engine, one thread each. Rank 0 is the master's worker, and does nothing else than the
others here.
"""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offbeat.data.batches import Batch, batch_length
from offbeat.errors import NonFiniteLossError, RecipeError
from offbeat.events import EventLog
from offbeat.flat import FlatModel
from offbeat.job import Job
from offbeat.shard import usable
from offbeat.transport.base import DROPPED, REJECTED, Header, WorkerEnd

POLL_S = 0.2
"""How often a worker that waits for a reply looks whether the run is being stopped."""
IDENTITY_CHECK_EVERY = 100


@dataclass(slots=True)
class WorkerStats:
    """How far a worker is; written by it alone, read by whoever shows progress."""

    num_steps: int = 0
    num_examples: int = 0
    loss: float = math.nan


class Worker:
    """Owns its model replica and its connections; `run` returns when its steps are done."""

    def __init__(
        self,
        job: Job,
        rank: int,
        model: FlatModel,
        connect: Callable[[int, FlatModel], Sequence[WorkerEnd]],
        *,
        events: EventLog,
        log: logging.Logger,
        clock: Callable[[], float],
        stop: threading.Event,
    ) -> None:
        self.job = job
        self.rank = rank
        self.model = model
        self.log = log
        self.step = 1
        """The step that is being prepared or computed, counted from 1."""
        self.stats = WorkerStats()
        self._connect = connect
        self._events = events
        self._clock = clock
        self._stop = stop

    def run(self) -> None:
        torch.set_num_threads(self.job.config.threads or 1)
        links = self._connect(self.rank, self.model)
        try:
            self._train(links)
        finally:
            for link in links:
                link.close()
        self.log.info("finished after %d steps", self.stats.num_steps)

    def _train(self, links: Sequence[WorkerEnd]) -> None:
        self.model.module.train()
        batches = self.job.batches(self.rank)
        versions = self._take_in(links, [link.welcome for link in links])
        upcoming = next(batches, None)
        while upcoming is not None and not self._stop.is_set():
            epoch, batch = upcoming
            start_s = self._clock()
            loss = self._compute(batch)
            computed_s = self._clock()
            self._push(links, versions)
            self.step += 1
            upcoming = next(batches, None)  # prepared while the exchange is under way
            prepared_s = self._clock()
            replies = [self._await(link) for link in links]
            if None in replies:
                return  # stopped
            answered = [reply for reply in replies if reply is not None]
            versions = self._take_in(links, answered)
            self._account(batch, loss)
            self._events.record(
                "step",
                worker=self.rank,
                step=self.stats.num_steps,
                epoch=epoch,
                loss=loss,
                examples=batch_length(batch),
                outcome=_pooled(answered),
                start_s=start_s,
                compute_s=computed_s - start_s,
                prepare_s=prepared_s - computed_s,
                exchange_s=self._clock() - prepared_s,
            )

    def _compute(self, batch: Batch) -> float:
        """Loss and gradient of one batch; the gradient stays in the parameters."""
        if self.step % IDENTITY_CHECK_EVERY == 1:
            self.model.check_identity()
        loss = self.job.recipe.loss(self.model.module, batch)
        _check_loss(loss)
        value = loss.item()
        if not math.isfinite(value):
            raise NonFiniteLossError(value, self.rank, self.step)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(value)

    def _push(self, links: Sequence[WorkerEnd], versions: Sequence[int]) -> None:
        """Send every shard its slice. An unusable gradient goes to none of them, or a shard without
        the bad element would take half of it."""
        slots = [link.gradient_slot for link in links]
        mask = torch.tensor(
            self.model.take_gradient([slot.values for slot in slots]), dtype=torch.uint8
        )
        self.model.write_buffers(slots[0].floats, slots[0].ints)
        for slot in slots:
            slot.mask.copy_(mask)
        void = not all(usable(slot.values) for slot in slots)
        for link, version in zip(links, versions, strict=True):
            link.push(Header(self.rank, 0, self.step, version, batch=self.step - 1, void=void))

    def _await(self, link: WorkerEnd) -> Header | None:
        while (reply := link.wait_reply(POLL_S)) is None:
            if self._stop.is_set():
                return None
        return reply

    def _take_in(self, links: Sequence[WorkerEnd], replies: Sequence[Header]) -> list[int]:
        """Let the model show what the servers sent; returns the shards' versions."""
        moved = self.model.loaded()
        if moved:
            self.log.warning("put back into place: %s", ", ".join(moved))
        slot = links[0].reply_slot
        self.model.read_buffers(slot.floats, slot.ints)
        return [reply.reply_version for reply in replies]

    def _account(self, batch: Batch, loss: float) -> None:
        self.stats.num_steps += 1
        self.stats.num_examples += batch_length(batch)
        self.stats.loss = loss


def _check_loss(loss: object) -> None:
    if not isinstance(loss, torch.Tensor):
        found = f"a {type(loss).__name__}"
    elif loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}"
    elif not loss.requires_grad:
        found = "one that depends on no parameter"
    else:
        return
    raise RecipeError(f"the recipe's loss must return a tensor of one number, not {found}")


def _pooled(replies: Sequence[Header]) -> str:
    """What became of a gradient as a whole: a slice that is not in makes it dropped or rejected."""
    statuses = {reply.status for reply in replies}
    for bad in (REJECTED, DROPPED):
        if bad in statuses:
            return bad
    return "applied"
