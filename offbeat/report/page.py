"""A report as one HTML file that needs nothing else: no script, no font, no network."""

import re
from collections.abc import Iterator
from html import escape
from importlib import resources

from offbeat.report.document import (
    PARTS,
    Document,
    Plot,
    Section,
    Shares,
    Table,
    Timeline,
)
from offbeat.report.svg import NUM_COLORS, draw

UNBROKEN = re.compile(r"(\([^()]{1,32}\)|\S+ ± \S+|\S*-\S*|\d+ (?:work|serv)ers?)")
"""What is not broken where a cell of a table is too long for a line: a number's spread, a name."""


def write_page(document: Document) -> str:
    return "\n".join(_page(document)) + "\n"


def _page(document: Document) -> Iterator[str]:
    title = escape(document.title)
    style = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<meta name="color-scheme" content="light dark">'
    yield '<link rel="icon" href="data:,">'
    yield f"<title>{title}</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n<main>"
    yield f"<h1>{title}</h1>\n<p class=lead>{escape(document.lead)}</p>"
    for section in document.sections:
        yield from _section(section)
    yield "</main>\n</body>\n</html>"


def _section(section: Section) -> Iterator[str]:
    yield f"<section>\n<h2>{escape(section.title)}</h2>"
    if section.text:
        yield f"<p>{escape(section.text)}</p>"
    for table in section.tables:
        yield _table(table)
    if section.plots:
        shared = _legend(section.plots)
        yield shared
        yield "<div class=plots>"
        for plot in section.plots:
            caption = f"<figcaption>{escape(plot.title)}</figcaption>"
            legend = "" if shared else _legend((plot,))
            yield f"<figure>\n{caption}{legend}\n{draw(plot)}\n</figure>"
        yield "</div>"
    folded = (*section.folded, *(plot.table() for plot in section.plots))
    if folded:
        yield "<details>\n<summary>The numbers</summary>"
        yield from map(_table, folded)
        yield "</details>"
    yield "</section>"


def _legend(plots: tuple[Plot, ...]) -> str:
    """What the colors of these plots stand for; nothing where one stands for several things."""
    meaning: dict[str, str] = {}
    for plot in plots:
        for name, color in plot.legend():
            kind = PARTS[color] if isinstance(plot, Shares | Timeline) else f"f{color % NUM_COLORS}"
            if meaning.setdefault(kind, name) != name:
                return ""
    if len(meaning) < 2:
        return ""
    swatch = '<svg viewBox="0 0 10 10"><rect class="{}" width="10" height="10" rx="2"/></svg>'
    items = [f"<li>{swatch.format(kind)}{escape(name)}</li>" for kind, name in meaning.items()]
    return f"<ul class=legend>{''.join(items)}</ul>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.header)
    rows = "".join(
        f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>\n" for row in table.rows
    )
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    return (
        f"<div class=wide><table>{caption}<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{rows}</tbody></table></div>"
    )


def _cell(text: str) -> str:
    parts = [escape(part) for part in UNBROKEN.split(text)]
    parts[1::2] = [f"<span>{part}</span>" for part in parts[1::2]]
    return "".join(parts)
