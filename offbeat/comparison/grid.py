"""What a comparison compares: disciplines, numbers of workers and servers, parameters of the
recipe, options of train, and seeds.

Used by runs.py and by the command line, which tells what is wrong before torch is loaded.

    >>> [cell.name for cell in Grid("fashion-cnn", ("sync",), (1, 2), (1,), 1).cells()]
    ['sync-1w-1s/seed-0', 'sync-2w-1s/seed-0']
"""

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.config import (
    FAULT_OPTIONS,
    RULES_OF_SEVERAL,
    TrainConfig,
    convert,
    discipline_options,
    make_config,
    options,
    rule_of,
    settings,
)
from offbeat.disciplines import ApplyReply, Bounded, LockFree, ReplyApply, Sync
from offbeat.errors import ConfigError, RunDirError, nearest
from offbeat.family import BUILT_IN
from offbeat.plugins import Choice
from offbeat.scripts import check_options

DISCIPLINES = tuple(
    Choice.default(kind).label for kind in (Sync, ApplyReply, ReplyApply, LockFree, Bounded)
)
"""What is compared where nobody says what."""
WORKERS = (1, 2)
SERVERS = (1,)
SEEDS = 3
AXES = ("disciplines", "workers", "servers", "set", "vary", "seeds")
NAMED = ("set", "vary")
"""Axes of several names, each with values of its own: the recipe's parameters, train's options."""
LEFT_OUT = "default"
"""As the value of an option that is varied: as if it were not given."""
NOT_FOR_A_GRID = (
    *("discipline", *(kind.options[0].flag for kind in BUILT_IN.values() if kind.options)),
    *("workers", "servers", "set", "run_dir"),
)
NOT_VARIED = (*NOT_FOR_A_GRID, "recipe", "seed", "keep", "engine", *FAULT_OPTIONS)
"""Options of train that the axes stand in for: NAME:VALUE gives a discipline's first one."""
KEEP_ALL = 1_000_000
"""Checkpoints."""
MANY_WORKERS = 1_000_000
"""So many that there may be any number of backups."""
MAY_DIFFER = ("quiet", "data_dir")
"""Options that may be others when a comparison goes on."""


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    discipline: str
    workers: int
    servers: int
    seed: int
    set: tuple[tuple[str, Any], ...] = ()
    vary: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        discipline = re.sub(r"[^\w.-]+", "-", self.discipline.rpartition("/")[2])
        parts = [discipline, f"{self.workers}w", f"{self.servers}s"]
        parts += [
            re.sub(r"[^\w.=-]+", "-", f"{name}={str(value).rpartition('/')[2]}")
            for name, value in (*self.set, *self.vary)
        ]
        return f"{'-'.join(parts)}/seed-{self.seed}"

    @property
    def words(self) -> str:
        parameters = "".join(f", {name} {value}" for name, value in self.set)
        parameters += "".join(f", {name.replace('_', ' ')} {value}" for name, value in self.vary)
        workers = f"{self.workers} worker{'s' * (self.workers > 1)}"
        servers = f"{self.servers} server{'s' * (self.servers > 1)}"
        return f"{self.discipline}, {workers}, {servers}{parameters}, seed {self.seed}"

    def like(self, other: "Cell") -> bool:
        """Whether they differ in the seed only."""
        return dataclasses.replace(self, seed=0) == dataclasses.replace(other, seed=0)


@dataclass(frozen=True)
class Grid:
    """What is compared: compare.json."""

    recipe: str
    disciplines: tuple[str, ...] = DISCIPLINES
    workers: tuple[int, ...] = WORKERS
    servers: tuple[int, ...] = SERVERS
    seeds: int = SEEDS
    options: Mapping[str, Any] = field(default_factory=dict)
    """train's other ones, as they were given."""
    set: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values of the recipe's parameters, each in turn."""
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values of train's options, each in turn."""
    recipe_file: Mapping[str, Any] | None = None
    """Where the recipe was found, in a comparison that has begun."""
    script: Mapping[str, Any] | None = None
    """Of the user's own, which is launched instead of a recipe; `recipe` is its name then."""

    @property
    def keep(self) -> int:
        """How many checkpoints of a run are kept for good."""
        return int(self.options.get("keep", 1))

    @property
    def engine(self) -> str:
        asked = str(self.options.get("engine", TrainConfig.engine))
        return "local" if self.script and asked != "ray" else asked

    def cells(self) -> list[Cell]:
        first = int(self.options.get("seed", 0))
        return [
            Cell(discipline, workers, servers, seed, parameters, varied)
            for seed in range(first, first + self.seeds)
            for parameters in _combined(self.set)
            for varied in _combined(self.vary)
            for servers in self.servers
            for workers in self.workers
            for discipline in self.disciplines
        ]

    def config(self, cell: Cell, out: Path) -> TrainConfig:
        """The configuration of a cell; a ConfigError where there can be no such run."""
        told = {"eval_skipped": self.script is None, **self.options, "recipe": self.recipe}
        told |= {**dataclasses.asdict(cell), "set": dict(cell.set)}
        varied = {k: v for k, v in told.pop("vary") if v != LEFT_OUT}
        if told["eval_skipped"]:
            told["keep"] = KEEP_ALL  # until they are scored
        kind = make_config({"discipline": cell.discipline, "workers": MANY_WORKERS}).chosen.kind
        foreign = discipline_options() - {option.flag for option in kind.options}
        if not kind.merges and rule_of(told) in RULES_OF_SEVERAL:
            foreign.add("rule")
        told = {k: v for k, v in told.items() if k not in foreign}
        for name in FAULT_OPTIONS:
            if told.get(name):
                told[name] = _of_these(told[name], cell.workers)
        return make_config(told, varied, {"run_dir": str(out / cell.name)})

    @classmethod
    def load(cls, out: Path) -> "Grid":
        try:
            found = json.loads(grid_file(out).read_text(encoding="utf-8"))
            axes = {name: tuple(found[name]) for name in ("disciplines", "workers", "servers")}
            return cls(
                found["recipe"],
                **axes,
                seeds=found["seeds"],
                options=found["options"],
                set=found.get("set", {}),
                vary=found.get("vary", {}),
                recipe_file=found.get("recipe_file"),
                script=found.get("script"),
            )
        except OSError as error:
            raise RunDirError(
                f"there is no comparison in {out} to go on with: {error.strerror}"
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise RunDirError(f"{grid_file(out)} describes no comparison: {error!r}") from error


def _combined(values: Mapping[str, Sequence[Any]]) -> list[tuple[tuple[str, Any], ...]]:
    """Every choice of a value for each name."""
    return [
        tuple(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    ]


def grid_file(out: Path) -> Path:
    return out / "compare.json"


def _of_these(value: str, num_workers: int) -> str | None:
    """What is said of workers that a cell has: one worker alone is nobody's straggler."""
    kept = [
        part
        for part in value.split(",")
        if not (found := re.match(r"\s*(\d+)", part)) or int(found[1]) < num_workers
    ]
    return ",".join(kept) or None


def make_grid(
    given_options: Mapping[str, Any],
    axes: Mapping[str, Any],
    resumed: Path | None = None,
    script: Mapping[str, Any] | None = None,
) -> Grid:
    """A grid out of train's options and of the axes that are given; `resumed`: the folder of the
    comparison that goes on, which knows what is not said again; `script`: what is launched in each
    cell, where it is no recipe that is compared."""
    plain = {
        k: str(v) if isinstance(v, Path) or v == math.inf else v for k, v in given_options.items()
    }
    if script is not None:
        check_options([*plain, *(["set"] if axes.get("set") else [])])
    recipe = plain.pop("recipe", None) if script is None else Path(script["file"]).name
    given: dict[str, Any] = {
        name: v if name == "seeds" else tuple(v) for name, v in axes.items() if name not in NAMED
    }
    for axis in NAMED:
        if of_each := {**in_turn(axis, plain.pop(axis, {})), **in_turn(axis, axes.get(axis, {}))}:
            given[axis] = of_each
    if resumed is None:
        return Grid(recipe or TrainConfig().recipe, **given, options=plain, script=script)
    before = Grid.load(resumed)
    if before.script is not None:
        check_options([*plain, *given.get("set", ())])
    kept = {axis: getattr(before, axis) for axis in AXES}
    now = Grid(recipe or before.recipe, **{**kept, **given}, options=plain, script=script)
    return merge(before, now)


BETWEEN = re.compile(r",(?![^\[(]*[\])])")
"""A comma, but none within brackets."""


def in_turn(axis: str, given: Any) -> dict[str, tuple[Any, ...]]:
    """The values of each name: one or several, of a flag as NAME=VALUE,VALUE."""
    try:
        found = settings(given)
    except (TypeError, ValueError):
        raise ConfigError(f"{axis} must be of the form NAME=VALUE,VALUE, not {given!r}") from None
    if not isinstance(given, Mapping):
        found = {
            name: [part.strip() for part in BETWEEN.split(text)] for name, text in found.items()
        }
    if axis == "vary":
        found = {name.replace("-", "_"): values for name, values in found.items()}
    return {
        name: tuple(values) if isinstance(values, list | tuple) else (values,)
        for name, values in found.items()
    }


def _more_values(axis: str, before: Grid, given: Grid) -> dict[str, tuple[Any, ...]]:
    """Of the same names; a cell of before must still be one."""
    was, now = getattr(before, axis), getattr(given, axis)
    for name in now:
        if name not in was:
            participle = "set" if axis == "set" else "varied"
            raise ConfigError(
                f"{name} was not {participle} when the comparison began: begin another one, to "
                f"compare it"
            )
    return {
        name: tuple({str(v): v for v in (*now.get(name, ()), *values)}.values())
        for name, values in was.items()
    }


def merge(before: Grid, given: Grid) -> Grid:
    """The grid to go on with: it may have become larger; all else must be as it was."""
    file = before.recipe_file
    _check_script(before, given)
    if given.recipe != before.recipe and (file := _same_file(before, given.recipe)) is None:
        raise ConfigError(f"the comparison is of {before.recipe}, not of {given.recipe}")
    for name, now in given.options.items():
        was = before.options.get(name, options()[name].default)
        if convert(name, was) != convert(name, now) and name not in MAY_DIFFER:
            raise ConfigError(
                f"{name} was {was} when the comparison began, and is {now} now: what is compared "
                f"must not differ in it"
            )
    axes: dict[str, Any] = {
        axis: tuple(dict.fromkeys((*getattr(before, axis), *getattr(given, axis))))
        for axis in ("disciplines", "workers", "servers")
    }
    changed = {k: v for k, v in given.options.items() if k in MAY_DIFFER}
    seeds = max(before.seeds, given.seeds)
    merged = {**before.options, **changed}
    axes |= {axis: _more_values(axis, before, given) for axis in NAMED}
    return dataclasses.replace(before, **axes, seeds=seeds, options=merged, recipe_file=file)


def _check_script(before: Grid, given: Grid) -> None:
    """One that is named again is the same, and is told the same."""
    if given.script is None:
        return
    told = [
        " ".join([found["file"], *found["arguments"]]) if (found := each.script) else each.recipe
        for each in (before, given)
    ]
    if told[0] != told[1]:
        raise ConfigError(f"the comparison is of {told[0]}, not of {told[1]}")


def _same_file(before: Grid, recipe: str) -> Mapping[str, Any] | None:
    """Where the comparison's recipe is, if `recipe` is another name of its file, or of one with
    the same content; None: it is another recipe."""
    source, _, attribute = recipe.rpartition(":")
    kept, path = before.recipe_file, Path(source)
    if kept is None or attribute != before.recipe.rpartition(":")[2] or not path.is_file():
        return None
    if path.resolve() == Path(kept["path"]).resolve():
        return kept
    is_same = hashlib.sha256(path.read_bytes()).hexdigest() == kept["sha256"]
    return {**kept, "path": str(path.absolute())} if is_same else None


def check_grid(grid: Grid, out: Path) -> tuple[dict[Cell, TrainConfig], dict[Cell, str]]:
    """The cells that can be run, and why the others cannot, such as one worker with a backup."""
    configs: dict[Cell, TrainConfig] = {}
    left_out: dict[Cell, str] = {}
    for name in grid.options:
        if name in NOT_FOR_A_GRID:
            raise ConfigError(
                f"{name} is not an option of a comparison, whose own are {', '.join(AXES)}"
            )
    _check_varied(grid)
    if grid.seeds < 1:
        raise ConfigError(f"seeds must be at least 1, not {grid.seeds}")
    known: dict[tuple[Any, ...], str] = {}
    for discipline in grid.disciplines:
        config = make_config({"discipline": discipline, "workers": MANY_WORKERS})
        chosen = config.chosen
        key = (chosen.source, *chosen.values.values())
        if key in known:
            raise ConfigError(f"{known[key]} and {discipline} are the same: name one of them")
        known[key] = discipline
    make_config({k: v for k, v in grid.options.items() if k in ("seed", "keep")})
    injected = {name: grid.options.get(name) for name in (*FAULT_OPTIONS, "engine")}
    most = max(grid.workers, default=1)
    make_config({k: v for k, v in injected.items() if v is not None}, {"workers": most})
    cells = grid.cells()
    if len({cell.name for cell in cells}) < len(cells):
        raise ConfigError("two values of a name are written alike: give one of them")
    for cell in cells:
        try:
            configs[cell] = grid.config(cell, out)
        except ConfigError as error:
            left_out[cell] = str(error)
    if not configs:
        raise ConfigError(next(iter(left_out.values()), "there is nothing to compare"))
    return configs, left_out


def _check_varied(grid: Grid) -> None:
    for name, values in grid.vary.items():
        if name in grid.options:
            raise ConfigError(f"{name} is varied, and {grid.options[name]} besides: say it once")
        if name in NOT_VARIED:
            raise ConfigError(f"{name} is none of the options that can be varied")
        if name not in options():
            raise ConfigError(f"unknown option {name!r} to vary; {nearest(name, options())}")
        if grid.script is not None:
            check_options([name])
        for value in values:
            if value != LEFT_OUT:
                convert(name, value)
