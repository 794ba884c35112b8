"""The master's side of a launched run whose other roles were started by hand, on machines of their
own: `offbeat launch --cluster cluster.toml --role master train.py`.

The script is rank 0's, and has this process's main thread; the books have one of their own, as
everywhere (loops/loop.py), and so has whoever looks at how far it is.
"""

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from offbeat.cluster.endpoint import Endpoint
from offbeat.engines.base import REFRESH_S, STOPPING, Engine
from offbeat.engines.books import Books
from offbeat.engines.cluster import MasterNetwork, status_of_master
from offbeat.engines.ordered import OrderTaker
from offbeat.engines.succession import Succession
from offbeat.errors import ModelError, ScriptEndedError, ScriptRefusedError, StepError, in_a_line
from offbeat.loops.description import Description
from offbeat.loops.running import run_script
from offbeat.loops.seat import Seat
from offbeat.roles.context import FolderRecords, Progress
from offbeat.roles.master import Patience
from offbeat.run.job import Job
from offbeat.run.orders import STOP, Order, Standing
from offbeat.run.progress import Display, Status
from offbeat.run.rundir import RunFolder, num_cores
from offbeat.transport.base import Network
from offbeat.transport.wire import MAX_JSON_BYTES


class ScriptedEngine(Engine):
    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        script: Mapping[str, Any],
        display: Display,
        clock: Callable[[], float],
        *,
        endpoint: Endpoint,
        stop: threading.Event,
        incarnation: int = 0,
    ) -> None:
        """`job`: of which nobody knows yet what is trained. `stop` is set by Ctrl-C, which is not
        the script's affair."""
        super().__init__(job)
        self.folder = folder
        self.display = display
        self.clock = clock
        self._script = script
        self._endpoint = endpoint
        self._stop = stop
        self._succession = Succession.begin(folder, len(endpoint.hosts.addresses), incarnation)
        self._progress: Callable[[], Progress] = dict
        self._records = FolderRecords(folder)
        self._over = threading.Event()
        self._orders = Standing()

    def run(self) -> None:
        books = Books(self.folder, self.clock)
        taker = OrderTaker(
            self.job,
            self.folder,
            record=books.record,
            carry_out=self._carry_out,
            ranks=lambda: (0,),  # the others are somebody else's processes
        )
        looking = threading.Thread(target=self._look, args=(taker,), name="looking", daemon=True)
        looking.start()
        try:
            self._run_script()
        finally:
            self._over.set()
            looking.join()
            self._end(books)
        if self.failures:
            raise self.failures[0]

    def stop(self) -> None:
        self._stop.set()

    def _carry_out(self, order: Order) -> None:
        self.display.notice(f"asked for: {order.words}")
        if order.what == STOP:
            self.stop()
        else:
            self._orders.tell({"order": order.to_json()})

    def _run_script(self) -> None:
        config = self.job.config
        try:
            run_script(self._make_seat(), self._script, config.threads or num_cores())
        except Exception as error:
            step = error.step if isinstance(error, StepError) else None
            cause = error.__cause__ if isinstance(error, StepError) and error.__cause__ else error
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            self._records.log("master").error("failed", exc_info=cause)
            if isinstance(cause, ScriptEndedError | ScriptRefusedError):
                self.failures.append(cause)
            else:
                self.failures.append(self.folder.failure("master", in_a_line(cause), step))

    def _end(self, books: Books) -> None:
        self.interrupted = self._stop.is_set() and not self._has_finished()
        self.display.update(self.status())
        self.display.close()
        self._records.close()
        books.close(self.outcome(), self.failures)

    def _has_finished(self) -> bool:
        state = self.folder.state
        return state.exists() and bool(self.folder.read_json(state)["outcome"] == "finished")

    def _make_seat(self) -> Seat:
        config, start_s = self.job.config, self._endpoint.start_timeout_s
        return Seat(
            config=config,
            rank=0,
            incarnation=self._succession.incarnation,
            clock=self.clock,
            stop=self._stop,
            records=self._records,
            log=self._records.log("master"),
            states=self.folder.states,
            network=self._make_network,
            agree=self._agree,
            reports=self._report,
            folder=self.folder,
            connect_timeout_s=start_s,
            orders=self._orders,
            patience=Patience(
                config.workers,
                start_s=start_s,
                absent_s=config.worker_timeout,
                say=self.display.notice,
                now=self.clock,
            ),
        )

    def _agree(self, mine: Description) -> Description:
        if not self.folder.model.exists():
            mine.write(self.folder)
        return mine.agreed(Description.read(self.folder))

    def _make_network(self, job: Job, description: Description) -> Network:
        """With what the servers have to know of the script's model and optimizer."""
        loop = description.to_json()
        if len(json.dumps(loop)) > MAX_JSON_BYTES // 2:
            raise ModelError(
                f"a model of {len(job.manifest.tensors)} tensors is too many for the servers of a "
                f"cluster to be told of"
            )
        return MasterNetwork(
            self._endpoint,
            job,
            self.folder,
            self._succession,
            self.clock,
            self.display.notice,
            job.config.threads,
            loop=loop,
        )

    def _report(self, progress: Callable[[], Progress]) -> None:
        self._progress = progress

    def _look(self, taker: OrderTaker) -> None:
        """Beside the script: show how far it is, have what happened written down, and what was
        asked for done."""
        has_said = False
        while not self._over.wait(REFRESH_S):
            if self._stop.is_set() and not has_said:
                has_said = True
                self.display.notice(STOPPING)
            self.display.update(self.status())
            self._records.flush()
            taker.look()

    def status(self) -> Status:
        found = {"version": 0, "loss": None, "staleness": None, "opened": False}
        found |= self._progress()
        return status_of_master(self.job, self.clock(), found, found)
