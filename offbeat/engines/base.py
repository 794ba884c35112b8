"""What an engine is: it starts the roles of one job, looks after them, and ends them.

The api makes one for each run: `local` (processes of this machine), `inproc` (threads of this
process) or `cluster` (the master's side of a run whose other roles are elsewhere).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from offbeat.errors import OffbeatError
from offbeat.recipes.base import metric_name
from offbeat.roles.context import Progress
from offbeat.roles.run import mean
from offbeat.run.job import Job
from offbeat.run.progress import Status

REFRESH_S = 0.1
"""How often a person is shown how far a run is."""
STOPPING = "stopping: keeping what was learned; Ctrl-C again to give up"


class Engine(ABC):
    """One job, used once: made, `run`, and thrown away."""

    interrupted = False
    """Whether the user stopped the run."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.failures: list[OffbeatError] = []
        """What went wrong; the first is what the run failed with."""

    @abstractmethod
    def run(self) -> None:
        """Returns when the run is over, one way or another: all of its steps are done, or it was
        stopped. Raises the first of `failures`, after everything has been ended and kept.

        Then the last checkpoint is committed and named in state.json, as far as there is anything
        to keep; the evaluator has scored it, unless the run was interrupted; `events/engine.jsonl`
        says how it ended; and nothing that this engine started is left: no process, no thread of
        its own, no socket, no open file, no name in the file system outside of the run's folder.

        The first Ctrl-C is a `stop`; the second gives up what is not kept by then, and is raised
        as KeyboardInterrupt.
        """

    @abstractmethod
    def stop(self) -> None:
        """Have the run end in order: each worker after the step that it is at, then the last
        checkpoint. Returns at once; any thread may call it, also twice. What does not end by itself
        is not waited for longer than the engine says."""

    @abstractmethod
    def status(self) -> Status:
        """How far the run is, for a person to see; from the thread that is in `run`."""

    def outcome(self) -> str:
        """What the run came to, in the words of summary.json."""
        if self.failures:
            return "failed"
        return "interrupted" if self.interrupted else "finished"


def score_of(evaluator: Progress) -> tuple[int, float] | None:
    """Which version was scored last, and what it scored."""
    score = evaluator.get("score")
    return (score[0], score[1]) if score else None


def status_of(
    job: Job, at_s: float, progress: Callable[..., list[Progress]], waits_for: str
) -> Status:
    """What a person is shown of a run all of whose roles tell how far they are; `progress` is given
    the names of roles."""
    workers = progress("master", "worker")
    servers = progress("ps") or progress("master")  # who knows as much, where there are none
    scored = next((p for p in progress("evaluator", "master") if p.get("score")), {})
    scores = scored.get("scores", {})
    return Status(
        num_gradients=sum(worker.get("steps", 0) for worker in workers),
        num_examples=sum(worker.get("examples", 0) for worker in workers),
        at_s=at_s,
        loss=mean(worker.get("loss") for worker in workers),
        staleness=mean(server.get("staleness") for server in servers),
        lr=next((server.get("lr") for server in servers), None),
        metric_name=next(iter(scores), metric_name(job.recipe)),
        score=score_of(scored),
        scores=scores,
        version=max((worker.get("version", 0) for worker in workers), default=0),
        waits_for=waits_for,
    )
