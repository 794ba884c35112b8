"""The page: one HTML file with style and scripts in it, and the policy that lets nothing else in.

Used by serving.py. It has the report's style sheet, and draws plots of the report's measures.
"""

import base64
import functools
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from offbeat.report import svg
from offbeat.report.document import METRIC_LIMITS, PARTS

SCRIPTS = ("chart.js", "tables.js", "run.js", "page.js")
POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; "
    "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
MEASURES = {
    "width": svg.WIDTH,
    "height": svg.HEIGHT,
    "left": svg.LEFT,
    "right": svg.RIGHT,
    "top": svg.TOP,
    "bottom": svg.BOTTOM,
    "row": svg.ROW,
    "colors": svg.NUM_COLORS,
    "parts": PARTS,
    "limits": METRIC_LIMITS,
}
"""What a report's plots are drawn by."""


def write_page(setup: Mapping[str, Any]) -> tuple[bytes, str]:
    """The page, and its Content-Security-Policy."""
    script = "\n".join(map(_read, SCRIPTS))
    return _fill("page.html", script, {**setup, "measures": MEASURES})


def write_login(setup: Mapping[str, Any]) -> tuple[bytes, str]:
    """The page that asks for the token."""
    return _fill("login.html", _read("login.js"), setup)


def _fill(name: str, script: str, setup: Mapping[str, Any]) -> tuple[bytes, str]:
    style = _report_style() + _read("page.css")
    data = json.dumps(setup).replace("<", "\\u003c")  # no text in it can end the element
    text = _read(name)
    for mark, content in (("{{style}}", style), ("{{setup}}", data), ("{{script}}", script)):
        text = text.replace(mark, content)
    policy = POLICY.format(scripts=_digest(script), styles=_digest(style))
    return text.encode(), policy


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _read(name: str) -> str:
    return resources.files(__package__).joinpath("page", name).read_text(encoding="utf-8")


@functools.cache
def _report_style() -> str:
    return resources.files("offbeat.report").joinpath("style.css").read_text(encoding="utf-8")
