"""Who calls callbacks: a thread beside the engine, in the process that started the run.

The api makes one for each run. What there is to tell comes from two places, and neither waits for a
callback: the status that the display is shown several times a second, of which the newest one is
kept, and the scores in the run's event files, which are followed so that none is missed. The
process is the engine's, not the master's: it is there from the start to the end, knows how a run
ended, and trains nobody where workers are processes.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from offbeat.errors import ConfigError, OffbeatError, RecipeError, in_a_line
from offbeat.recipes.base import Recipe
from offbeat.recipes.callbacks import Callback, End, Evaluation, Start, Steps
from offbeat.run.events import Followed
from offbeat.run.progress import Display, Status
from offbeat.run.rundir import RunFolder, close_log

TELL_EVERY_S = 0.5
END_TIMEOUT_S = 60.0
"""How long callbacks may take for what is left to tell, when a run is over."""


Given = Iterable[Callback] | Callable[[], Iterable[Callback]]
"""Callbacks, or as in a recipe a function that makes them."""


def make_callbacks(recipe: Recipe, given: Given) -> list[Callback]:
    """The recipe's, made for this run, and those that were given."""
    given = _listed(given)
    try:
        made = [] if recipe.callbacks is None else list(recipe.callbacks())
    except OffbeatError:
        raise
    except Exception as error:
        raise RecipeError(f"the recipe's callbacks function failed: {in_a_line(error)}") from error
    for found, kind in ((made, RecipeError), (given, ConfigError)):
        for callback in found:
            if not isinstance(callback, Callback):
                raise kind(f"a callback must be an offbeat.Callback, not {callback!r}")
    return [*made, *given]


def _listed(given: Given) -> list[Callback]:
    found = given() if callable(given) else given
    if isinstance(found, Callback):
        raise ConfigError(f"callbacks must be a list of them: callbacks=[{found!r}]")
    if not isinstance(found, Iterable):
        raise ConfigError(f"callbacks must be a list of them, not {found!r}")
    return list(found)


class Caller:
    """Of one run: a context in which its engine runs. `display` is what the engine is to show its
    progress on."""

    def __init__(
        self, callbacks: Sequence[Callback], folder: RunFolder, display: Display, start: Start
    ) -> None:
        self.display = _Watched(display, self._update) if callbacks else display
        self._callbacks = callbacks
        self._folder = folder
        self._start = start
        self._scores = Followed(folder.events, "evaluator*.jsonl")
        self._scored: set[tuple[Any, ...]] = set()
        self._newest: Status | None = None
        self._told: Status | None = None
        """What the last rates were up to."""
        self._end = End(status="failed", reason=None, summary={})
        self._over = threading.Event()
        self._log: logging.Logger | None = None
        self._thread = threading.Thread(target=self._run, name="callbacks", daemon=True)

    def __enter__(self) -> Self:
        if self._callbacks:
            self._log = self._folder.open_log("callbacks")
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._log is None:
            return
        self._over.set()
        try:
            self._thread.join(END_TIMEOUT_S)
        finally:  # Ctrl-C: it is not waited for
            close_log(self._log)
        if self._thread.is_alive():
            self.display.notice(
                f"callbacks did not end within {END_TIMEOUT_S:g} s: not waiting any longer"
            )

    def ended(self, summary: Mapping[str, Any], failures: Sequence[OffbeatError]) -> None:
        """The run is over; what it came to."""
        reason = str(failures[0]) if failures else None
        self._end = End(status=summary["status"], reason=reason, summary=summary)

    def _update(self, status: Status) -> None:
        self._newest = status
        if not status.num_gradients:
            self._told = status  # rates are of the time since the first step

    # -- in the thread of its own --------------------------------------------------------------

    def _run(self) -> None:
        begun = [c for c in self._callbacks if self._call(c, c.on_start, self._start)]
        active = begun
        while not self._over.wait(TELL_EVERY_S):
            active = self._tell(active)
        self._tell(active)
        for callback in begun:
            self._call(callback, callback.on_end, self._end)

    def _tell(self, active: list[Callback]) -> list[Callback]:
        """What is new; returns those that did not fail at it."""
        for evaluation in self._evaluations():
            active = [c for c in active if self._call(c, c.on_evaluation, evaluation)]
        steps = self._steps()
        if steps is None:
            return active
        return [c for c in active if self._call(c, c.on_step, steps)]

    def _evaluations(self) -> list[Evaluation]:
        """Each version once, though several may have scored it; again where a script has told more
        of it."""
        found = []
        for event in self._scores.read():
            if event["kind"] != "score":
                continue
            what = (event["version"], *event["scores"])
            if what not in self._scored:
                self._scored.add(what)
                found.append(_evaluation(event))
        return found

    def _steps(self) -> Steps | None:
        now, before = self._newest, self._told
        if now is None or _progress(now) in (_progress(before), (0, 0)):
            return None
        self._told = now
        rates = None if before is None else _rates(before, now)
        return Steps(
            version=now.version,
            at_s=now.at_s,
            gradients=now.num_gradients,
            examples=now.num_examples,
            loss=now.loss,
            staleness=now.staleness,
            lr=now.lr,
            gradients_per_s=rates and rates[0],
            examples_per_s=rates and rates[1],
        )

    def _call(self, callback: Callback, hook: Callable[[Any], None], argument: Any) -> bool:
        """Whether it went well."""
        try:
            hook(argument)
        except BaseException as error:  # a user's sys.exit() ends this thread for nobody else
            assert self._log is not None
            name = f"{type(callback).__name__}.{hook.__name__}"
            self._log.error("%s failed", name, exc_info=error)
            self.display.notice(
                f"the callback {name} failed: {in_a_line(error)}; the run goes on without it; "
                f"see {self._folder.logs / 'callbacks.log'}"
            )
            return False
        return True


class _Watched(Display):
    """A display, and somebody who looks on."""

    def __init__(self, display: Display, look: Callable[[Status], None]) -> None:
        self._display = display
        self._look = look

    def update(self, status: Status) -> None:
        self._look(status)
        self._display.update(status)

    def notice(self, text: str) -> None:
        self._display.notice(text)

    def close(self) -> None:
        self._display.close()


def _evaluation(event: Mapping[str, Any]) -> Evaluation:
    scores = {k: math.nan if v is None else v for k, v in event["scores"].items()}
    return Evaluation(version=event["version"], at_s=event["at_s"], scores=scores)


def _progress(status: Status | None) -> tuple[int, int]:
    """Steps, and updates, which can be behind them."""
    return (status.num_gradients, status.version) if status else (0, 0)


def _rates(before: Status, now: Status) -> tuple[float, float] | None:
    """Gradients and examples per second, if there were any."""
    time_s = now.at_s - before.at_s
    if not time_s or now.num_gradients == before.num_gradients:
        return None
    return (
        (now.num_gradients - before.num_gradients) / time_s,
        (now.num_examples - before.num_examples) / time_s,
    )
