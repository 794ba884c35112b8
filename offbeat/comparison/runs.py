"""`compare(...)`: many disciplines, numbers of workers and servers, parameters of a recipe, and
seeds; one report.

    offbeat.compare("fashion-cnn", disciplines=["sync", "lock-free"], workers=[1, 2], seeds=3)

The cells of the grid run one after the other, seed by seed, so that a machine that slows down in
between does so for all of them. With the same seed they begin with the same weights and see the
data in the same order. OUT/compare.json says what is compared; each cell is a run in a folder of
its own under OUT, and the report is made from these folders alone.
"""

import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.api import Result, find_again, named, refuse_recursion
from offbeat.cluster.fitting import most_at_once
from offbeat.cluster.rays import find_ray, joined
from offbeat.comparison.grid import Cell, Grid, check_grid, grid_file, make_grid
from offbeat.comparison.subjects import OfRecipe, OfScript, Subject
from offbeat.config import TrainConfig
from offbeat.engines.actors import asks_of
from offbeat.engines.base import Engine
from offbeat.engines.books import Books
from offbeat.engines.forkserver import ForkServer, fork_server
from offbeat.errors import CheckpointError, ConfigError, OffbeatError, RunDirError
from offbeat.recipes.base import Recipe, RecipeFile, RecipeFunction
from offbeat.report.groups import Target
from offbeat.report.summary import summarise
from offbeat.report.write import write_report
from offbeat.run.checkpoint import prune_checkpoints
from offbeat.run.progress import Overview, make_overview, minutes
from offbeat.run.rundir import RunFolder, create_run_folder

POLL_S = 0.5


@dataclass(frozen=True)
class Comparison:
    """What came of it."""

    out: Path
    report: Path
    summaries: Mapping[str, Mapping[str, Any]]
    """Each finished run's summary, by its folder's name within `out`."""
    failed: Mapping[str, str]
    """Why the others failed."""
    interrupted: bool


def compare(
    recipe: str | Recipe | RecipeFunction = "fashion-cnn",
    *,
    disciplines: Sequence[str] | None = None,
    workers: Sequence[int] | None = None,
    servers: Sequence[int] | None = None,
    set: Mapping[str, Any] | None = None,
    vary: Mapping[str, Any] | None = None,
    seeds: int | None = None,
    out: str | Path | None = None,
    target: Target | None = None,
    resume: bool = False,
    **options: Any,
) -> Comparison:
    """Train `recipe` in every cell of the grid, and write OUT/report.html and OUT/report.md.

    `set`: values of the recipe's parameters, as {"width": [64, 128]}; `vary`: of train's options,
    as {"rule": ["mean", "dana"]}. `seeds` is how many;
    `options` are train's other flags by name; what is not given is as in the command. `target`:
    what is good enough, as 0.9, or ("top5", 0.9) by another metric. `resume`:
    keep what has finished in `out`. A cell that fails is told in the result, and does not stop the
    others.
    """
    refuse_recursion()
    if resume and out is None:
        raise ConfigError("resume goes on with a comparison: say in which folder it is (out)")
    name, options = named(recipe, options)
    axes: dict[str, Any] = {"disciplines": disciplines, "workers": workers, "servers": servers}
    axes |= {"set": set, "vary": vary, "seeds": seeds}
    grid = make_grid(
        {**options, "recipe": name},
        {axis: value for axis, value in axes.items() if value is not None},
        Path(out) if resume and out is not None else None,
    )
    made = None if isinstance(recipe, str) else recipe
    return run_grid(grid, None if out is None else Path(out), target, made, resume=resume)


def run_grid(
    grid: Grid,
    out: Path | None,
    target: Target | None = None,
    recipe: Recipe | RecipeFunction | None = None,
    *,
    resume: bool = False,
    forks: ForkServer | None = None,
    begun: Callable[[Path], None] = lambda out: None,
) -> Comparison:
    """`forks` starts the processes, of all cells; `begun` is told the folder when it is there."""
    if grid.engine == "ray":
        find_ray()
    out = out or _new_folder(grid.recipe)
    configs, left_out = check_grid(grid, out)
    grid, subject = _find_subject(grid, recipe)
    for config in configs.values():
        subject.check(config, _judged_by(target))  # what is wrong shows before anything runs
    _claim(out, resume=resume)
    folder = RunFolder(out)
    with folder.locked(), fork_server(grid.engine, forks) as forks:
        folder.write_json(grid_file(out), dataclasses.asdict(grid))
        begun(out)
        return _Comparing(grid, out, configs, subject, forks).run(left_out, target)


def _judged_by(target: Target | None) -> str | None:
    """The metric that a target names."""
    match target:
        case None | int() | float():
            return None
        case (str(name), int() | float()):
            return name
    raise ConfigError(f"target must be a number, or a metric's name and a number, not {target!r}")


def _find_subject(grid: Grid, recipe: Recipe | RecipeFunction | None) -> tuple[Grid, Subject]:
    """What is compared, and the grid that knows where it was found."""
    if grid.script is not None:
        return grid, OfScript(grid.script)
    kept = RecipeFile.kept(dataclasses.asdict(grid))
    found = find_again(grid.recipe, kept, recipe, is_given=False)
    return dataclasses.replace(grid, recipe_file=found.kept), OfRecipe(found)


def _new_folder(recipe: str) -> Path:
    name = Path(recipe).name.replace(".py:", "-").replace(":", "-")
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-compare"


def _claim(out: Path, *, resume: bool) -> None:
    if out.exists() and not out.is_dir():
        raise RunDirError(f"{out} is a file; choose another --out")
    if not resume and out.is_dir() and any(out.iterdir()):
        hint = "go on with --resume, or " if grid_file(out).exists() else ""
        raise RunDirError(f"{out} is not empty; {hint}choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirError(f"cannot make {out}: {error.strerror}; choose another --out") from error


class _Comparing:
    """The course of a comparison."""

    def __init__(
        self,
        grid: Grid,
        out: Path,
        configs: dict[Cell, TrainConfig],
        subject: Subject,
        forks: ForkServer | None,
    ) -> None:
        self.grid = grid
        self.out = out
        self.configs = configs
        self.subject = subject
        self.forks = forks
        self.advice: str | None = None
        self.took_s: dict[Cell, float] = {}
        self.summaries: dict[str, Mapping[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self.interrupted = False
        self._engines: list[Engine] = []

    def run(self, left_out: Mapping[Cell, str], target: Target | None) -> Comparison:
        quiet = bool(self.grid.options.get("quiet"))
        overview = make_overview(
            f"{self.grid.recipe} -> {self.out}",
            len(self.configs),
            quiet=quiet,
            in_lines=self.grid.engine == "ray",
        )
        try:
            if (change := self.subject.change) is not None:
                overview.notice(change)
            for reason, cells in _by_reason(left_out).items():
                overview.notice(f"left out: {'; '.join(cells)}: {reason}")
            for cell in self.configs:
                self._look_for(cell)
            if self.grid.engine == "ray":
                self._train_on_ray(overview)
            else:
                self._train_in_turn(overview)
        finally:
            overview.close()
        page, _ = write_report([self.out], target=target)
        return Comparison(self.out, page, self.summaries, self.failed, self.interrupted)

    def _train_in_turn(self, overview: Overview) -> None:
        for number, cell in enumerate(self.configs, start=1):
            if cell.name not in self.summaries:
                overview.begin(number, cell.words, self._left_s(cell))
                overview.end(self._train(cell, overview))
            if self.interrupted:
                break

    def _train_on_ray(self, overview: Overview) -> None:
        """As many cells side by side as the cluster has room for, each in a thread."""
        todo = [cell for cell in self.configs if cell.name not in self.summaries]
        if not todo:
            return
        asked = [asks_of(self.configs[cell]) for cell in todo]
        with joined(self.configs[todo[0]].ray_address, max(asked, key=len)) as cluster:
            nodes, seeing = cluster.nodes(), cluster.who_see(grid_file(self.out))
            homes = [index for index, node in enumerate(nodes) if node in seeing]
            most = most_at_once(asked, list(nodes.values()), homes)
            if most > 1:
                overview.notice(f"up to {most} runs side by side: times are not comparable then")
            pool = ThreadPoolExecutor(max_workers=max(1, most), thread_name_prefix="cell")
            try:
                waits = [pool.submit(self._train_one, cell, overview) for cell in todo]
                self._await(waits)
            finally:
                pool.shutdown(cancel_futures=True)

    def _await(self, waits: Sequence["Future[None]"]) -> None:
        """The first Ctrl-C ends all runs in order, the second gives up."""
        while any(not future.done() for future in waits):
            try:
                wait(waits, timeout=POLL_S)
            except KeyboardInterrupt:
                if self.interrupted:
                    raise
                self.interrupted = True
                for future in waits:
                    future.cancel()
                for engine in list(self._engines):
                    engine.stop()
        for future in waits:
            if not future.cancelled():
                future.result()

    def _train_one(self, cell: Cell, overview: Overview) -> None:
        overview.notice(f"{cell.words}: begins")
        overview.notice(self._train(cell, overview))

    def _begun(self, engine: Engine) -> None:
        self._engines.append(engine)
        if self.interrupted:
            engine.stop()

    def _look_for(self, cell: Cell) -> None:
        """A cell that finished is kept; what is left of one that did not makes place for another
        try, since a run that was broken off would say nothing about time."""
        folder = self.out / cell.name
        if not folder.exists():
            return
        try:
            summary = summarise(folder)
        except RunDirError:  # there is not even a description
            summary = {"status": "broken off"}
        if summary["status"] == "finished":
            self.summaries[cell.name] = summary
            self.took_s[cell] = summary["total_time_s"]
        elif folder.is_symlink():
            folder.unlink()
        else:
            with RunFolder(folder).locked():  # nobody who is left of it writes into it
                shutil.rmtree(folder)

    def _train(self, cell: Cell, overview: Overview) -> str:
        began_s = time.monotonic()
        config = self.configs[cell]
        try:
            result = self.subject.run(config, overview.display, self.forks, self._begun)
        except OffbeatError as error:
            self.failed[cell.name] = str(error)
            _leave_word(config, self.subject, error)
            return f"{cell.words}: failed: {error}"
        except KeyboardInterrupt:  # before the run had begun, or for the second time
            self.interrupted = True
            return f"{cell.words}: interrupted"
        self.took_s[cell] = time.monotonic() - began_s
        self._prune(RunFolder(result.run_dir), overview)
        if result.interrupted:
            self.interrupted = True
            return f"{cell.words}: interrupted"
        self.summaries[cell.name] = result.summary
        self._advise(result.summary, overview)
        return f"{cell.words}: {_in_brief(result)}"

    def _prune(self, folder: RunFolder, overview: Overview) -> None:
        try:
            prune_checkpoints(folder.checkpoints, self.grid.keep)
        except CheckpointError as error:  # it takes room, and the run is what it is
            overview.notice(str(error))

    def _advise(self, summary: Mapping[str, Any], overview: Overview) -> None:
        """Once, not for every cell."""
        if self.advice is None and (advice := self.subject.advice(summary)) is not None:
            self.advice = advice
            overview.notice(advice)

    def _left_s(self, current: Cell) -> float | None:
        """How long the cells that are to come will take, `current` among them, to judge by those
        that are done: best by the same one with another seed."""
        if not self.took_s:
            return None
        todo = [
            cell
            for cell in self.configs
            if cell == current or (cell not in self.took_s and cell.name not in self.failed)
        ]
        return math.fsum(expected_s(cell, self.took_s) for cell in todo)


def expected_s(cell: Cell, took_s: Mapping[Cell, float]) -> float:
    alike = [s for other, s in took_s.items() if cell.like(other)]
    known = alike or list(took_s.values())
    return math.fsum(known) / len(known)


def _by_reason(left_out: Mapping[Cell, str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for cell, reason in left_out.items():
        words = cell.words.rpartition(", ")[0]
        if words not in reasons.setdefault(reason, []):
            reasons[reason].append(words)
    return reasons


def _leave_word(config: TrainConfig, subject: Subject, error: OffbeatError) -> None:
    """A run that did not even begin has no folder; the report is to know of it all the same."""
    path = Path(config.run_dir or "")
    if (path / "events").is_dir() and any((path / "events").iterdir()):
        return
    shutil.rmtree(path, ignore_errors=True)
    folder = create_run_folder(config)
    folder.write_json(folder.config, subject.describe(config))
    Books(folder, lambda: 0.0).close("failed", [error])


def _in_brief(result: Result) -> str:
    summary = result.summary
    parts = [f"{summary['gradients_per_s']:.1f} gradients/s"] if summary["gradients_per_s"] else []
    if result.test_metric is not None:
        parts.insert(0, f"test {summary['metric']} {result.test_metric:.4f}")
    return ", ".join([*parts, minutes(summary["total_time_s"])])
