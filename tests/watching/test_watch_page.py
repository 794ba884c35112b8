"""The page of `offbeat watch` as a person sees it: in a real browser, while a run goes on."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, a_browser, find_chromium
from test_following import begin, write
from test_gathering import a_run, phase, step
from test_serving import TOKEN, port_of, serve

from offbeat.bench.report import write_run
from offbeat.report.document import short
from offbeat.report.svg import ticks
from offbeat.run.checkpoint import list_checkpoints
from offbeat.run.events import read_events
from offbeat.watching.access import Access
from offbeat.watching.hub import Hub
from offbeat.watching.serving import PageServer, listen

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_chromium() is None, reason="there is no Chromium here (Debian's package: chromium)"
    ),
]

ARTIFACTS = Path(__file__).parents[2] / "artifacts"
START_S = 60.0
"""On a busy machine."""
DEATH_S = 2.0
FIGURE = """(title => {
    const figure = [...document.querySelectorAll('figure')].find(
        each => each.querySelector('figcaption span').textContent === title);
    figure.scrollIntoView();
    return figure;
})"""
PLOTS = """[...document.querySelectorAll('figure:not([hidden])')].map(figure => {
    figure.scrollIntoView();
    const svg = figure.querySelector('.plot > svg'), all = svg.getBoundingClientRect();
    return {
        title: figure.querySelector('figcaption span').textContent,
        width: all.width,
        shapes: [...svg.querySelectorAll('path:not(.grid):not(.axis)')].filter(
            shape => (shape.getAttribute('d') || '').length > 10).length,
        text: Math.min(...[...svg.querySelectorAll('text')].map(
            text => text.getBoundingClientRect().height)),
        outside: [...svg.querySelectorAll('text')].filter(text => {
            const own = text.getBoundingClientRect();
            return own.left < all.left - 2 || own.right > all.right + 2;
        }).length,
    };
})"""
ALL_DRAWN = """[...document.querySelectorAll('figure:not([hidden])')].every(figure =>
    figure.querySelector('.plot > svg').childElementCount > 3)"""
COLORS = """(() => {
    const color = (what, of) => getComputedStyle(document.querySelector(what))[of];
    return [color('body', 'backgroundColor'), color('h1', 'color')];
})()"""
TILE = """(name => [...document.querySelectorAll('.tiles dt')].find(
    each => each.textContent === name).nextSibling.textContent)"""
STATE = """(rank => [...document.querySelectorAll('#work tbody tr')].find(
    row => row.firstChild.textContent === `worker ${rank}`).children[1].textContent)"""
LINE = "document.getElementById('link').textContent"
LEAD = "document.getElementById('lead').textContent"
IS_LIVE = f"{LINE} === 'live'"


@contextlib.contextmanager
def training(run_dir: Path, *flags: str) -> Iterator[str]:
    """`offbeat train --watch`: the page's address, once there is something to show."""
    command = [sys.executable, "-m", "offbeat", "train", "--watch-at", "127.0.0.1:0"]
    command += ["--run-dir", str(run_dir), "--recipe", "toy:recipe", "--steps", "1000000"]
    command += ["--eval-every", "0", "--checkpoint-every", "1000000", *flags]
    support = str(Path(__file__).parents[1] / "support")
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": support},
        start_new_session=True,
    )
    assert process.stderr is not None
    try:
        found = re.search(r"watch it at (\S+)", process.stderr.readline())
        assert found is not None
        deadline_s = time.monotonic() + START_S
        while not list(run_dir.glob("events/worker-1.jsonl")):
            assert process.poll() is None and time.monotonic() < deadline_s
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=START_S)


def brightness(color: str) -> float:
    red, green, blue = (float(part) for part in color[color.index("(") + 1 : -1].split(",")[:3])
    return 0.3 * red + 0.6 * green + 0.1 * blue


def is_clean(browser: Browser, url: str) -> None:
    assert browser.complaints() == []
    assert browser.requests() and all(asked.startswith(url) for asked in browser.requests())


def number(text: str) -> float:
    return float(text.replace(",", ""))


def pid_of(run_dir: Path, role: str, index: int) -> int:
    events = read_events(run_dir / "events", "engine*")
    found = [e["pid"] for e in events if (e.get("role"), e.get("index")) == (role, index)]
    return int(found[-1])


# -- while a run goes on ---------------------------------------------------------------------------


def test_a_run_is_watched_and_told_what_to_do(run_dir: Path, tmp_path: Path) -> None:
    with training(run_dir, "--workers", "3", "--servers", "2") as url, a_browser(tmp_path) as page:
        page.show(1200, 900)
        page.visit(url)
        page.until(IS_LIVE, START_S)
        check_that_it_moves(page)
        check_a_death(page, run_dir)
        check_orders(page, run_dir)
        ARTIFACTS.mkdir(exist_ok=True)
        page.screenshot(ARTIFACTS / "watch-live.png")
        is_clean(page, url)


def check_that_it_moves(page: Browser) -> None:
    page.until(f"Number({TILE}('gradients').replaceAll(',', '')) > 50", START_S)
    line = f"{FIGURE}('training loss').querySelector('.line').getAttribute('d')"
    before, drawn = number(page.evaluate(f"{TILE}('gradients')")), page.evaluate(line)
    page.until(f"{line} !== {json.dumps(drawn)}")
    page.until(f"Number({TILE}('gradients').replaceAll(',', '')) > {before}")
    page.until("document.querySelector('#processes tbody').textContent.includes('MB')")


def check_a_death(page: Browser, run_dir: Path) -> None:
    assert page.evaluate(f"{STATE}(2)") == "at work"
    os.kill(pid_of(run_dir, "worker", 2), signal.SIGKILL)
    page.until("document.querySelector('.moments').textContent.includes('SIGKILL')", DEATH_S)
    page.until(f"{TILE}('restarts') === '1'", DEATH_S)
    page.until(f"{STATE}(2) === 'at work'", START_S)


def check_orders(page: Browser, run_dir: Path) -> None:
    before = len(list_checkpoints(run_dir / "checkpoints"))
    page.press(".orders button")
    page.until("document.querySelector('.said').textContent.includes('a checkpoint now')")
    page.until("document.querySelector('#checkpoints tbody tr td').textContent !== '0'", 20)
    assert len(list_checkpoints(run_dir / "checkpoints")) == before + 1
    page.evaluate("""(select => {
        select.value = '3';
        select.dispatchEvent(new Event('change'));
    })(document.querySelector('#work tr:nth-child(2) select'))""")
    page.until(f"{STATE}(1) === 'at work, 3x as slow'")
    stop = "#work tr:nth-child(3) button"
    page.press(stop)
    assert page.evaluate(f"document.querySelector('{stop}').textContent") == "really?"
    page.press(stop)
    page.until(f"{STATE}(2) === 'stopped'")
    page.press(".orders button:nth-child(2)")
    page.press(".orders button:nth-child(2)")
    page.until(f"{LEAD}.startsWith('Interrupted')", START_S)
    assert page.evaluate("document.querySelector('.orders').hidden")
    page.until(f"{LINE} !== 'live'")


def test_what_is_over_looks_as_it_did_at_its_end(run_dir: Path, tmp_path: Path) -> None:
    """Also where its process was killed, which says so."""
    folder = begin(run_dir)
    write(folder, "engine", phase("start", 1.0))
    write(folder, "all", *a_run(2, 40))
    with serve(run_dir) as server, a_browser(tmp_path) as page:
        page.show(1200, 900)
        with folder.locked():
            page.visit(server.url)
            page.until(f"{LEAD}.startsWith('Running')")
            before = page.evaluate(f"{TILE}('gradients')")
        page.until(f"{LEAD}.startsWith('Killed')", 20)
        assert page.evaluate(f"{TILE}('gradients')") == before == "80"
        assert page.until(f"{LINE} === 'the run is killed'")
        is_clean(page, server.url)


def test_it_goes_on_when_its_server_is_back(run_dir: Path, tmp_path: Path) -> None:
    folder = begin(run_dir)
    write(folder, "engine", phase("start", 1.0))
    write(folder, "all", *a_run(2, 40))
    with folder.locked(), a_browser(tmp_path) as page:
        with serve(run_dir) as server:
            port = port_of(server)
            page.visit(server.url)
            page.until(IS_LIVE)
        page.until(f"{LINE}.includes('trying again')")
        write(folder, "all", *(step(0, 40 + n, 6 + n / 10) for n in range(1, 11)))
        with PageServer(Hub(run_dir), listen(f"127.0.0.1:{port}"), Access(None)):
            page.until(IS_LIVE)
            page.until(f"{TILE}('gradients') === '90'")


def test_the_token_is_typed_once(run_dir: Path, tmp_path: Path) -> None:
    write_run(run_dir, workers=2, gradients=50)
    with serve(run_dir, TOKEN) as server, a_browser(tmp_path) as page:
        page.visit(server.url)
        for typed, answer in (("a wrong one, of course", "not the token"), (TOKEN.decode(), None)):
            page.evaluate("document.getElementById('token').value = ''")
            page.evaluate("document.getElementById('token').focus()")
            page.type(typed)
            page.press("form button")
            if answer is not None:
                page.until(f"document.getElementById('said').textContent.includes('{answer}')")
        page.until("document.querySelector('.tiles') !== null")
        assert page.evaluate("document.cookie") == "", "no script sees it"
        page.visit(server.url)
        page.until("document.querySelector('.tiles') !== null")
        assert not any(TOKEN.decode() in json.dumps(event) for event in page.heard)


# -- how it looks, and can be used -----------------------------------------------------------------


def write_many(folder: Path) -> None:
    """A run with something of everything."""
    write_run(folder, workers=4, servers=2, gradients=2000, slow={1: 3.0})
    engine = folder / "events" / "engine.jsonl"
    restart = phase("restart", 4.0, role="worker", index=1, reason="was killed by SIGKILL")
    lines = [phase("start", 0.5), restart, phase("checkpoint", 5.0, version=900, shards=[])]
    engine.write_text("".join(f"{json.dumps(e)}\n" for e in lines) + engine.read_text())
    (folder / "logs").mkdir()
    (folder / "logs" / "worker-1.log").write_text("2026-01-01 INFO what happened last\n")


@pytest.mark.parametrize(
    ("width", "dark"), [(1200, False), (1200, True), (400, False), (400, True)]
)
def test_the_page_in_a_browser(width: int, dark: bool, run_dir: Path, tmp_path: Path) -> None:
    write_many(run_dir)
    with serve(run_dir) as server, a_browser(tmp_path) as page:
        page.show(width, 6000, dark=dark)  # all of it is seen, and drawn
        page.visit(server.url)
        page.until(f"{LEAD}.startsWith('Finished')")
        page.until(ALL_DRAWN)
        plots: list[dict[str, Any]] = page.evaluate(PLOTS)
        assert len(plots) >= 9
        for plot in plots:
            assert plot["shapes"] >= 1 and plot["text"] >= 9 and plot["outside"] == 0, plot
            assert plot["width"] > 280
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        background, ink = (brightness(color) for color in page.evaluate(COLORS))
        assert (background < ink) == dark and abs(background - ink) > 150
        ARTIFACTS.mkdir(exist_ok=True)
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(ARTIFACTS / f"watch-{width}{'-dark' if dark else ''}.png")
        is_clean(page, server.url)


def test_plots_are_used_with_mouse_and_keyboard(run_dir: Path, tmp_path: Path) -> None:
    write_many(run_dir)
    with serve(run_dir) as server, a_browser(tmp_path) as page:
        page.show(1200, 900)
        page.visit(server.url)
        page.until(f"{LEAD}.startsWith('Finished')")
        loss = f"{FIGURE}('training loss')"
        page.until(f"{loss}.querySelectorAll('.line').length === 5")
        page.evaluate(f"{loss}.querySelector('.legend button').click()")
        assert page.evaluate(f"{loss}.querySelectorAll('.line').length") == 4, "a line is hidden"
        page.evaluate(f"{loss}.querySelector('.plot').focus()")
        page.key("ArrowRight")
        tip = f"{loss}.querySelector('.tip').innerText"
        first = page.evaluate(tip)
        assert "worker 1: " in first and " s" in first.splitlines()[0]
        page.key("ArrowRight")
        assert page.evaluate(tip) != first
        page.key("l")
        pressed = f"{loss}.querySelector('figcaption button').getAttribute('aria-pressed')"
        assert page.evaluate(pressed) == "true"
        drawn = page.evaluate(f"{loss}.querySelector('.line').getAttribute('d')")
        page.key("+")
        assert page.evaluate(f"{loss}.querySelector('.line').getAttribute('d')") != drawn, "zoomed"
        assert not page.evaluate(f"{loss}.querySelector('figcaption button:nth-child(2)').hidden")
        page.key("0")
        assert page.evaluate(f"{loss}.querySelector('figcaption button:nth-child(2)').hidden")
        page.evaluate("document.querySelectorAll('#learning h2 button')[1].click()")
        names = f"[...{loss}.querySelectorAll('text.name')].map(each => each.textContent)"
        assert "gradients" in page.evaluate(names)
        page.evaluate("document.querySelector('#learning details').open = true")
        page.until("document.querySelectorAll('#learning details table').length >= 3")
        cells = "document.querySelector('#learning details tbody tr').innerText"
        assert len(page.evaluate(cells).split()) == 6
        page.press("#processes button")
        page.until("document.querySelector('#processes pre').textContent.includes('what happened')")
        is_clean(page, server.url)


def test_numbers_and_ticks_are_those_of_reports(run_dir: Path, tmp_path: Path) -> None:
    write_run(run_dir, workers=1, gradients=5)
    values = [0, 1, -1, 0.5, 1 / 3, 12.345, 999.96, 1234.6, 9999.9, 12345.6, 1e6, 0.00123, 1e-5]
    values += [1.5e12, 2e-7, 100, 0.1 + 0.2, 65536, 3e14]
    spans = [(0, 1), (0, 0.97), (2.1, 2.4), (0, 123456), (-1, 1), (5, 5), (0.0012, 0.0019), (0, 7)]
    with serve(run_dir) as server, a_browser(tmp_path) as page:
        page.visit(server.url)
        assert page.evaluate(f"{json.dumps(values)}.map(short)") == [short(v) for v in values]
        found = page.evaluate(f"{json.dumps(spans)}.map(([low, high]) => ticks(low, high))")
        assert found == [ticks(*span) for span in spans]


def test_a_folder_and_a_run_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    for discipline in ("sync", "lock-free"):
        write_run(folder / discipline, workers=2, gradients=100, discipline=discipline)
    with serve(folder) as server, a_browser(tmp_path / "profile") as page:
        page.show(400, 900)
        page.visit(server.url)
        page.until("document.querySelectorAll('#runs tbody a').length === 2")
        page.until("document.querySelector('#runs tbody').textContent.includes('finished')")
        page.press("#runs tbody a")
        page.until("document.getElementById('title').textContent.includes('lock-free')")
        page.press("#back")
        page.until("document.querySelectorAll('#runs tbody a').length === 2")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        is_clean(page, server.url)
