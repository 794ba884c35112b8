"""`offbeat bench peers`: every discipline beside what else there is (contenders/).

The same model, data, batch, optimizer, workers and threads for all, in rounds that go through all
of them, on models of three kinds: a small one, where the way to the server shows (mnist-sigmoid),
one that computes (alexnet), and one of 100 MB (wide).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offbeat.bench.bars import Bars, draw
from offbeat.bench.contenders import CEILING
from offbeat.bench.rig import rates_of
from offbeat.bench.tables import Row
from offbeat.cluster.rays import find_ray


def peers(
    *,
    recipes: Sequence[str],
    disciplines: Sequence[str],
    others: Sequence[str],
    plot: str | None,
    **options: Any,
) -> list[Row]:
    """Gradients per second of the ceiling, of each discipline and of the others; `options` are
    those of `rates_of`."""
    if any(name.startswith("ray") for name in others):
        find_ray()  # before anything is timed
    rows: list[Row] = []
    for recipe in recipes:
        rates = rates_of((CEILING, *disciplines, *others), recipe=recipe, **options)
        for name, found in rates.items():
            row: Row = {"recipe": recipe, "": name, "gradients/s": found}
            row["of the ceiling"] = [a / b for a, b in zip(found, rates[CEILING], strict=True)]
            rows.append(row)
    if plot is not None:
        Path(plot).write_text(draw(_bars(rows)), encoding="utf-8")
    return rows


def _bars(rows: Sequence[Row]) -> list[Bars]:
    """A panel for each recipe."""
    shares: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        recipe, name, found = str(row["recipe"]), str(row[""]), row["of the ceiling"]
        assert isinstance(found, list)
        if name != CEILING:
            shares.setdefault(recipe, {})[name] = found
    return [Bars(f"{name}: gradients/s, of the ceiling", v) for name, v in shares.items()]
