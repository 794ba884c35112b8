"""A report as Markdown: its text, and the numbers of its plots as tables."""

from collections.abc import Iterator
from html import escape

from offbeat.report.document import Document, Table


def write_markdown(document: Document) -> str:
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Document) -> Iterator[str]:
    yield from (f"# {_plain(document.title)}", "", _plain(document.lead), "")
    for section in document.sections:
        yield from (f"## {section.title}", "")
        if section.text:
            yield from (section.text, "")
        of_plots = (plot.table() for plot in section.plots)
        for table in (*section.tables, *section.folded, *of_plots):
            yield from _table(table)


def _table(table: Table) -> Iterator[str]:
    if table.title:
        yield from (f"**{_plain(table.title)}**", "")
    yield _row(table.header)
    yield "|" + "---|" * len(table.header)
    yield from map(_row, table.rows)
    yield ""


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(_plain(cell) for cell in cells)} |"


def _plain(text: str) -> str:
    """In one line, and with nothing in it that would be taken for a table's edge or for HTML."""
    return escape(" ".join(text.split()), quote=False).replace("|", chr(92) + "|")
