"""The engine `inproc`: servers, workers, master and evaluator as threads of this process.

Called by the api. Workers finish, the master commits the last checkpoint, servers leave, the
evaluator scores it.
"""

import functools
from collections.abc import Callable, Collection, Sequence

from offbeat.engines.base import status_of
from offbeat.engines.threads import ThreadEngine
from offbeat.flat import FlatModel
from offbeat.roles.context import Context
from offbeat.run.job import Job
from offbeat.run.progress import Display, Status
from offbeat.run.rundir import RunFolder
from offbeat.transport.inproc import InprocListener, InprocNetwork


class InprocEngine(ThreadEngine):
    """`replicas`: one model for each worker, and one for the evaluator."""

    def __init__(
        self,
        job: Job,
        replicas: Sequence[FlatModel],
        folder: RunFolder,
        display: Display,
        clock: Callable[[], float],
        *,
        incarnation: int = 0,
    ) -> None:
        """`incarnation` is new to the run's checkpoints, where there are any."""
        super().__init__(job, folder, display, clock)
        try:
            self._make_roles(replicas, incarnation)
        except BaseException:  # there may be no memory for them
            self._close()
            raise

    def _make_roles(self, replicas: Sequence[FlatModel], incarnation: int) -> None:
        job = self.job
        on_gpu = job.server_device.type != "cpu"
        listeners = [InprocListener(attended=on_gpu) for _ in job.slices]
        make_context = functools.partial(
            Context,
            job=job,
            records=self._records,
            clock=self.clock,
            network=InprocNetwork(listeners),
            folder=self.folder,
            states=self.folder.states,
            journal=self.folder.journal,
            owns_process=False,
            summaries=self._summaries,
            orders=self._orders,
        )
        self._servers = [
            self._make(make_context(stop=self._over, listener=listener), "ps", index)
            for index, listener in enumerate(listeners)
        ]
        rank_0, *others, of_evaluator = replicas
        of_master = make_context(
            stop=self._stop, say=self.display.notice, model=rank_0, generation=incarnation
        )
        self._master = self._make(of_master, "master")
        self._workers = [
            self._make(
                make_context(stop=self._over, model=model, generation=incarnation), "worker", rank
            )
            for rank, model in enumerate(others, start=1)
        ]
        self._evaluators = []
        if job.test is not None:
            looking_on = make_context(
                stop=self._give_up, say=self.display.notice, model=of_evaluator
            )
            self._evaluators.append(self._make(looking_on, "evaluator"))

    def _go(self) -> None:
        master = self._master
        for thread in [*self._servers, *self._evaluators, master]:
            thread.start()
        self._watch(lambda: master.is_alive() and not self._is_opened())
        started = self._workers if self._is_opened() else []
        for thread in started:
            thread.start()
        self._watch(master.is_alive)
        self._let_go()
        others = [*self._servers, *started, *self._evaluators]
        self._watch(lambda: any(thread.is_alive() for thread in others))

    def _ranks_here(self) -> Collection[int]:
        return range(self.job.config.workers)

    def _is_opened(self) -> bool:
        return bool(self._master.progress()["opened"])

    def status(self) -> Status:
        waits_for = "the first gradient" if self._is_opened() else "the servers"
        return status_of(self.job, self.clock(), self._progress, waits_for)
