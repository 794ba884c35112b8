"""Runs in a terminal: the essentials of the page, drawn with rich, for those on ssh.

    show(Hub(path))     # until the run is over, or Ctrl-C

Where the output is no terminal there is a line now and then instead, when something happened.
"""

import json
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from offbeat.report.document import short
from offbeat.run.progress import minutes, say
from offbeat.watching.source import Source

BLOCKS = "▁▂▃▄▅▆▇█"
GOING_ON = ("running", "starting")
COLORS = {"running": "green", "finished": "blue", "interrupted": "yellow"}
MOMENT_COLORS = {"bad": "red", "good": "green"}
NUM_MOMENTS = 5
LINES_BESIDE = 18
"""Of the screen, that are no worker's."""
SPARK_WIDTH = 48
View = dict[str, Any]


def show(source: Source) -> None:
    name = source.setup()["single"]
    is_shown = sys.stdout is not None and sys.stdout.isatty()
    if not is_shown:
        _tell(source, name)
        return
    console = Console(highlight=False)
    draw = draw_runs if name is None else draw_run
    known: View = {}
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for known in _views(source, name):
            live.update(draw(known, console.width, console.height), refresh=True)
            if name is not None and is_over(known):
                break
    if known:
        console.print(draw(known, console.width, 1000))


def _views(source: Source, name: str | None) -> Iterable[View]:
    known: View = {}
    for text in source.stream(name, threading.Event().is_set):
        if text:
            known = merge(known, json.loads(text))
            yield known


def merge(known: View, found: View) -> View:
    """What was known, and what is new; arrays over time go on where the new begins."""
    merged = {**known, **found}
    if "fine" in found:
        merged["fine"] = _grown(known.get("fine", {}), found["fine"])
    return merged


def _grown(known: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    start = found["from"]
    return {
        name: [*known.get(name, ())[:start], *value] if isinstance(value, list) else value
        for name, value in found.items()
    }


def is_over(view: View) -> bool:
    """And all of it is read."""
    status = view.get("status")
    return status is not None and status["status"] not in GOING_ON and view.get("read", 1) == 1


# -- a run -----------------------------------------------------------------------------------------


def draw_run(view: View, width: int, height: int) -> RenderableType:
    if "status" not in view:
        return Text(str(view.get("hint", "waiting for the run")))
    status, about = view["status"], view["about"]
    parts: list[RenderableType] = [_title(about), _lead(status, view.get("read", 1))]
    if status["progress"] is not None:
        done = round(status["progress"] * (width - 1))
        parts.append(Text.assemble(("━" * done, "blue"), ("─" * (width - 1 - done), "dim")))
    parts += [_figures(status), *_sparks(view, min(SPARK_WIDTH, width - 26)), Text("")]
    parts += _workers(view["workers"], max(2, height - LINES_BESIDE))
    parts += _servers(view["servers"], status["version"])
    parts += _moments(view.get("moments", ()), width)
    return Group(*parts)


def _title(about: Mapping[str, Any]) -> Text:
    servers = f"{about['servers']} server{'s' * (about['servers'] != 1)}"
    workers = f"{about['workers']} worker{'s' * (about['workers'] != 1)}"
    words = f"{about['recipe']}: {about['variant']}, {workers}, {servers}"
    return Text(f"{words}  {about['path']}", style="bold", no_wrap=True, overflow="ellipsis")


def _lead(status: Mapping[str, Any], read: float) -> Text:
    text = Text(status["status"], style=COLORS.get(status["status"], "red"))
    if read < 1:
        text.append(f", reading what happened so far: {100 * read:.0f}%", style="default")
    if status["reason"]:
        text.append(f": {status['reason']}", style="default")
    if status["left_s"] is not None:
        text.append(f", about {minutes(status['left_s'])} left", style="default")
    return text


def figures_of(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What there is to say in short, with what each number is."""
    found = [
        ("gradients", f"{status['gradients']:,}"),
        ("gradients/s", short(status["gradients_per_s"])),
        ("examples/s", short(status["examples_per_s"])),
        ("loss", short(status["loss"])),
    ]
    score = status["score"]
    found += [(f"test {name}", short(v)) for name, v in (score["values"] if score else ())]
    found += [("staleness", short(status["staleness"])), ("version", f"{status['version']:,}")]
    names = ("dropped", "rejected", "lost", "restarts")
    return found + [(name, f"{status[name]:,}") for name in names if status[name]]


def _figures(status: Mapping[str, Any]) -> Text:
    text = Text()
    for name, value in figures_of(status):
        text.append(f"{name} ", style="dim").append(f"{value}   ", style="bold")
    return text


def _sparks(view: View, width: int) -> list[RenderableType]:
    fine = view["fine"]
    rates = [count / fine["width_s"] for count in fine["gradients"][:-1]]
    scores = view.get("scores", {"points": (), "metric": ""})
    metric = scores["metric"]
    points = [point[3].get(metric) for point in scores["points"]]
    rows = [("loss", fine["loss"]), (f"test {metric}", points)]
    rows += [("gradients/s", rates), ("staleness", fine["staleness"])]
    return [
        Text.assemble((f"{name:>14} ", "dim"), (line, "cyan"), (f" {last}", "bold"))
        for name, values in rows
        if (line := spark(values, width))
        for last in [short(next(v for v in reversed(values) if v is not None))]
    ]


def spark(values: Sequence[float | None], width: int) -> str:
    """A curve as high as a line; nothing, where there is nothing."""
    known = [value for value in values if value is not None]
    if not known or width < 1:
        return ""
    step = max(1, -(-len(known) // width))
    chosen = [known[i : i + step] for i in range(0, len(known), step)]
    means = [sum(part) / len(part) for part in chosen]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] for value in means)


def _workers(rows: Sequence[Sequence[Any]], most: int) -> list[RenderableType]:
    names = ("", "", "steps", "/s", "loss", "stale", "dropped", "restarts")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < 2 else "right", no_wrap=True)
    for row in rows[:most]:
        rank, state, steps, expected, rate, loss, stale, dropped, _, restarts, _, _, slowdown = row
        slow = f", {slowdown:g}x as slow" if slowdown != 1 else ""
        done = f"{steps:,}" + (f" of {expected:,}" if expected else "")
        numbers = (done, short(rate), short(loss), short(stale), str(dropped), str(restarts))
        color = "" if state in ("at work", "left", "through") else "yellow"
        table.add_row(f"worker {rank}", Text(state + slow, style=color), *numbers)
    more = [Text(f"and {len(rows) - most} more", style="dim")] if len(rows) > most else []
    return [table, *more]


def _servers(rows: Sequence[Sequence[Any]], furthest: int) -> list[RenderableType]:
    if len(rows) < 2:
        return []
    words = ", ".join(
        f"{index} at {version:,}{f' (started again {n}x)' if n else ''}"
        for index, version, n in rows
    )
    apart = furthest - min(version for _, version, _ in rows)
    return [Text(f"servers: {words}; {apart:,} apart", style="dim")]


def _moments(moments: Sequence[Sequence[Any]], width: int) -> list[RenderableType]:
    return [
        Text.assemble(
            (f"{short(at_s):>9} s  ", "dim"), (text[: width - 13], MOMENT_COLORS.get(kind, ""))
        )
        for at_s, kind, text in moments[-NUM_MOMENTS:]
    ]


# -- several runs ----------------------------------------------------------------------------------


def draw_runs(view: View, width: int, height: int) -> RenderableType:
    rows, grid = view["runs"], view["grid"]
    done = f", {grid['done']} of {grid['cells']} cells are done" if grid else ""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, name in enumerate(("run", "", "gradients", "a second", "test", "left")):
        table.add_column(name, justify="left" if index < 2 else "right", no_wrap=True)
    for name, row in list(rows.items())[-max(1, height - 4) :]:
        left_s = row.get("left_s")
        state = Text(row["status"], style=COLORS.get(row["status"], "red"))
        gradients = row.get("gradients")
        table.add_row(
            name,
            state,
            "-" if gradients is None else f"{gradients:,}",
            short(row.get("gradients_per_s")),
            _score(row),
            "-" if left_s is None else minutes(left_s),
        )
    return Group(Text(f"{view['path']}: {len(rows)} runs{done}", style="bold"), table)


def _score(row: Mapping[str, Any]) -> str:
    score = row.get("score")
    return ", ".join(f"{n} {short(v)}" for n, v in score["values"]) if score else "-"


# -- without a terminal ----------------------------------------------------------------------------


def _tell(source: Source, name: str | None) -> None:
    """What happened, a line each; of several runs, when one is in another state."""
    told: set[tuple[Any, ...]] = set()
    states: dict[str, str] = {}
    for view in _views(source, name):
        if name is None:
            for line in _new_states(view["runs"], states):
                say(line)
            continue
        new = [each for each in map(tuple, view.get("moments", ())) if each not in told]
        for at_s, _, text in new if view.get("read", 1) == 1 else ():
            say(f"{at_s:8.1f} s: {text}")
            told.update(new)
        if is_over(view):
            say(", ".join(f"{what} {value}" for what, value in figures_of(view["status"])))
            return


def _new_states(rows: Mapping[str, Mapping[str, Any]], states: dict[str, str]) -> list[str]:
    found = []
    for name, row in rows.items():
        if states.get(name) != row["status"]:
            states[name] = row["status"]
            found.append(f"{name}: {row['status']}, {_score(row)}")
    return found
