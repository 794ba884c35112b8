"""What the cells of a comparison run: a recipe, or a script of the user's own.

Made by runs.py; each cell is a run of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.api import Found, Result, train_config
from offbeat.config import TrainConfig
from offbeat.engines.base import Engine
from offbeat.engines.forkserver import ForkServer
from offbeat.errors import ConfigError, nearest
from offbeat.launching import describe_launched, launch_config
from offbeat.recipes.base import Recipe, make_recipe, metric_name
from offbeat.run.progress import MakeDisplay
from offbeat.run.rundir import describe_run
from offbeat.scripts import change_of


class Subject(ABC):
    @property
    @abstractmethod
    def change(self) -> str | None:
        """What is to be said of it, where it is not what it was when the comparison began."""

    @abstractmethod
    def check(self, config: TrainConfig, target: str | None = None) -> None:
        """An OffbeatError where a cell cannot be run, or nothing is scored by what `target` goes
        by, as far as that is known before."""

    @abstractmethod
    def run(
        self,
        config: TrainConfig,
        display: MakeDisplay,
        forks: ForkServer | None,
        begun: Callable[[Engine], None],
    ) -> Result:
        """`begun` is given the engine, so that another thread can stop it."""

    @abstractmethod
    def describe(self, config: TrainConfig) -> dict[str, Any]:
        """What config.json says of a cell."""

    def advice(self, summary: Mapping[str, Any]) -> str | None:
        """What is missing in what a cell came to."""
        return None


@dataclass(frozen=True)
class OfRecipe(Subject):
    found: Found

    @property
    def change(self) -> str | None:
        return self.found.change

    def check(self, config: TrainConfig, target: str | None = None) -> None:
        known = self._made(config).fed(config.feed).judged(by_loss=False).metrics  # at most
        stops_by, _ = config.stops_at or (None, None)
        for option, name in (("target", target), ("stop_at", stops_by)):
            if name is not None and name not in known:
                raise ConfigError(
                    f"{option} goes by {name!r}, which nothing is scored by; {nearest(name, known)}"
                )

    def run(
        self,
        config: TrainConfig,
        display: MakeDisplay,
        forks: ForkServer | None,
        begun: Callable[[Engine], None],
    ) -> Result:
        recipe, file = self.found.recipe, self.found.file
        return train_config(config, recipe, display=display, forks=forks, file=file, begun=begun)

    def describe(self, config: TrainConfig) -> dict[str, Any]:
        metric = metric_name(self._made(config))
        return describe_run(config, recipe_file=self.found.kept, metric=metric)

    def _made(self, config: TrainConfig) -> Recipe:
        return make_recipe(self.found.recipe, config.recipe, config.set)[0]


@dataclass(frozen=True)
class OfScript(Subject):
    """Its output goes into each run's logs."""

    script: Mapping[str, Any]

    @property
    def change(self) -> str | None:
        return change_of(self.script)

    def check(self, config: TrainConfig, target: str | None = None) -> None:
        return

    def run(
        self,
        config: TrainConfig,
        display: MakeDisplay,
        forks: ForkServer | None,
        begun: Callable[[Engine], None],
    ) -> Result:
        shown = display(config.recipe, None)
        return launch_config(
            config, self.script, shown, forks=forks, shows_rank_0=False, begun=begun
        )

    def describe(self, config: TrainConfig) -> dict[str, Any]:
        return describe_launched(config, self.script)

    def advice(self, summary: Mapping[str, Any]) -> str | None:
        if summary["test_scores"]:
            return None
        return (
            f"{Path(self.script['file']).name} told no score, so that there is none to compare: "
            f"offbeat.log(accuracy=...), after offbeat.distribute, tells one"
        )
