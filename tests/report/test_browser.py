"""The report as a person sees it: in a real browser, in light and dark, on a screen and a phone."""

from pathlib import Path
from typing import Any

import pytest
from browser import Browser, a_browser, find_chromium
from test_report import write_grid

from offbeat.bench.report import write_run
from offbeat.report.write import write_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_chromium() is None, reason="there is no Chromium here (Debian's package: chromium)"
    ),
]

ARTIFACTS = Path(__file__).parents[2] / "artifacts"
PLOTS = """[...document.querySelectorAll('figure > svg')].map(svg => ({
    width: svg.getBoundingClientRect().width,
    height: svg.getBoundingClientRect().height,
    shapes: [...svg.querySelectorAll('path:not(.grid):not(.axis), rect')].filter(
        shape => shape.getBoundingClientRect().width + shape.getBoundingClientRect().height > 1
    ).length,
    text: Math.min(...[...svg.querySelectorAll('text')].map(
        text => text.getBoundingClientRect().height
    )),
    outside: [...svg.querySelectorAll('text, path, rect')].filter(shape => {
        const own = shape.getBoundingClientRect(), all = svg.getBoundingClientRect();
        return own.left < all.left - 2 || own.right > all.right + 2;
    }).length,
}))"""
CUT_OFF = """[...document.querySelectorAll('section > .wide')].filter(
    box => box.scrollWidth > box.clientWidth
).length"""
COLORS = """(() => {
    const color = (what, of) => getComputedStyle(document.querySelector(what))[of];
    return [color('body', 'backgroundColor'), color('h1', 'color')];
})()"""


@pytest.fixture(scope="module", params=["many", "one"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    if request.param == "many":
        write_grid(folder, slow={1: 3.0})
    else:
        write_run(folder, workers=3, servers=2, gradients=600, slow={1: 3.0})
    return write_report([folder])[0]


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (400, False)])
def test_a_report_in_a_browser(report: Path, width: int, dark: bool, tmp_path: Path) -> None:
    with a_browser(tmp_path) as browser:
        browser.show(width, 900, dark=dark)
        browser.open(report)
        plots = browser.evaluate(PLOTS)
        look_at(browser, plots, width)
        background, ink = (brightness(color) for color in browser.evaluate(COLORS))
        assert (background < ink) == dark and abs(background - ink) > 150
        ARTIFACTS.mkdir(exist_ok=True)
        kind = "many" if len(plots) > 9 else "one"
        browser.screenshot(ARTIFACTS / f"report-{kind}-{width}{'-dark' if dark else ''}.png")
        assert browser.complaints() == []
        assert browser.requests() == [report.as_uri()]


def look_at(browser: Browser, plots: list[dict[str, Any]], width: int) -> None:
    assert len(plots) >= 7
    for plot in plots:
        assert plot["shapes"] >= 1, "it is drawn"
        assert plot["width"] > 280 and plot["height"] > 40
        assert plot["text"] >= 9, "it can be read"
        assert plot["outside"] == 0, "nothing is cut off"
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    if width > 1000:
        assert browser.evaluate(CUT_OFF) == 0, "the tables fit as well"
    assert browser.evaluate("document.querySelectorAll('details[open]').length") == 0
    assert browser.evaluate("document.querySelectorAll('details table').length") >= len(plots)


def brightness(color: str) -> float:
    """Of rgb(r, g, b)."""
    red, green, blue = (float(part) for part in color[color.index("(") + 1 : -1].split(",")[:3])
    return 0.3 * red + 0.6 * green + 0.1 * blue


def test_the_looks_are_checked(tmp_path: Path) -> None:
    """A page that complains, asks the network and draws nothing is found out."""
    page = tmp_path / "page.html"
    page.write_text(
        "<h1>x</h1><img src='http://127.0.0.1:9/x.png'><script>console.error('no')</script>"
        "<figure><svg viewBox='0 0 360 230'><text>x</text></svg></figure>"
    )
    with a_browser(tmp_path / "profile") as browser:
        browser.show(400, 900)
        browser.open(page)
        assert browser.evaluate(PLOTS)[0]["shapes"] == 0
        assert browser.complaints()
        assert any("127.0.0.1:9" in url for url in browser.requests())
