"""The grid of slow networks, what is shown of it, and that it goes on where it was. How much a slow
network costs, no test asks."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from offbeat.bench import cells, link_tables, links
from offbeat.bench.cells import BESIDE, Cell, Network, chosen, make_cells, offered
from offbeat.bench.curves import COLORS, Curve, Panel, draw
from offbeat.bench.link_tables import Found, Goal
from offbeat.bench.linked import Trip
from offbeat.bench.report import write_run
from offbeat.cli import main
from offbeat.config import make_config
from offbeat.errors import ConfigError, RunError
from offbeat.report.record import read_run

SLOW = Network(mbit=10, delay_ms=20)
ALL = [Network(mbit=mbit, delay_ms=ms) for mbit in cells.RATES for ms in cells.DELAYS]
GOAL = Goal(target=0.8, limit_s=60)
PLAN = links.Plan(model="fashion-cnn", workers=4, limit=60.0, eval_every=100, data_dir="data")


def cell(network: Network = SLOW, setting: str = "plain", seed: int = 0) -> Cell:
    return Cell(network=network, setting=setting, seed=seed)


def found(at: Cell, *scores: tuple[float, float], **more: Any) -> Found:
    """A cell with such scores, each with the seconds after which there was one."""
    curve = [(at_s, 100, score) for at_s, score in scores]
    figures = {"curve": curve, "higher_is_better": True, "train_s": 61.0, "batches": 1000}
    figures |= {"up_bytes": 862_000_000, "down_bytes": 866_000_000, "batches_per_s": 1234.5}
    return Found(at, {**figures, "waited": 0.994, "final": 0.8765, **more})


# -- the grid --------------------------------------------------------------------------------------


def test_cells_go_seed_by_seed_and_their_names_say_all() -> None:
    made = make_cells([BESIDE, Network(mbit=1000, delay_ms=0.5)], ["plain", "local-8"], 2)
    assert [each.name for each in made[:5]] == [
        "loopback-0ms-plain-0",
        "loopback-0ms-local-8-0",
        "1gbit-0.5ms-plain-0",
        "1gbit-0.5ms-local-8-0",
        "loopback-0ms-plain-1",
    ]


def test_settings_of_options_that_a_build_lacks_are_not_offered() -> None:
    assert offered({"overlap": None}) == ["plain", "overlap"]
    known = {"overlap", "compress", "discipline", "local_steps", "outer_optimizer"}
    lacks = {"int8+bf16", "topk+delta", "overlap+int8+bf16", "local-8+int8+bf16"}
    assert set(offered(dict.fromkeys(known))) == cells.SETTINGS.keys() - lacks
    assert set(offered(dict.fromkeys(known | {"compress_replies"}))) == set(cells.SETTINGS)


@pytest.mark.parametrize("setting", offered())
def test_every_setting_that_is_offered_can_be_run(setting: str) -> None:
    config = PLAN.config(cell(setting=setting), Path("run"))
    assert {name: getattr(config, name) for name in cells.SETTINGS[setting]} == (
        cells.SETTINGS[setting]
    )


def test_cells_are_chosen_by_patterns() -> None:
    made = make_cells([BESIDE, SLOW], ["plain", "overlap"], 2)
    names = [each.name for each in chosen(made, ["loopback-*-1", "*-overlap-0"])]
    assert names == [
        *("loopback-0ms-overlap-0", "10mbit-20ms-overlap-0"),
        *("loopback-0ms-plain-1", "loopback-0ms-overlap-1"),
    ]
    assert chosen(made, []) == made
    with pytest.raises(ConfigError, match="no cell is like '100mbit-"):
        chosen(made, ["loopback-*", "100mbit-*"])


@pytest.mark.parametrize(
    ("setting", "every"), [("plain", 100), ("local-8", 12), ("local-64", 8), ("diloco-64", 2)]
)
def test_scores_are_as_many_batches_apart_whatever_a_push_stands_for(
    setting: str, every: int
) -> None:
    """But for the 8 pushes that there are at least; a round has one of each worker."""
    assert PLAN.config(cell(setting=setting), Path("run")).eval_every == every


# -- one cell's figures ----------------------------------------------------------------------------


def test_a_push_of_local_steps_counts_as_so_many_batches(tmp_path: Path) -> None:
    write_run(tmp_path / "run", gradients=200, workers=4, seed=1)
    trip = Trip(record=read_run(tmp_path / "run"), up=10, down=20)
    plain, local = (links.figures(cell(setting=name), trip) for name in ("plain", "local-8"))
    assert (plain["gradients"], plain["batches"], local["batches"]) == (200, 200, 1600)
    assert local["batches_per_s"] == pytest.approx(8 * 200 / trip.record.train_time_s)
    assert [8 * count for _, count, _ in plain["curve"]] == [
        count for _, count, _ in local["curve"]
    ]
    assert plain["waited"] == pytest.approx(0.1, abs=0.01), "a tenth of a step is its exchange"
    assert (plain["up_bytes"], plain["down_bytes"]) == (10, 20)
    assert plain["final"] == plain["curve"][-1][2]


def test_the_time_to_a_target_is_that_of_the_first_score_as_good() -> None:
    assert GOAL.time_s(found(cell(), (1.0, 0.5), (2.0, 0.8), (3.0, 0.9))) == 2.0
    assert GOAL.time_s(found(cell(), (1.0, 0.5))) is None
    assert GOAL.time_s(found(cell(), (1.0, 0.9), (4.0, 0.8), higher_is_better=False)) == 4.0


def test_what_is_kept_is_beside_loopbacks_plain_run_of_the_same_seed() -> None:
    base = [found(cell(BESIDE, seed=s), (4.0 + s, 0.8)) for s in range(2)]
    base += [found(cell(BESIDE, "overlap"), (1.0, 0.8)), found(cell(BESIDE, seed=2), (9.0, 0.7))]
    beside = link_tables.beside_of(base, GOAL)
    assert beside == {0: 4.0, 1: 5.0}
    runs = [found(cell(seed=s), (20.0, 0.8)) for s in range(3)]
    assert [link_tables.kept(run, GOAL, beside) for run in runs] == [0.2, 0.25, None]
    assert link_tables.kept(found(cell(), (20.0, 0.7)), GOAL, beside) is None


# -- what is shown ---------------------------------------------------------------------------------


def test_tables_are_one_for_each_network_and_fit_a_console() -> None:
    runs = [
        found(cell(network, name, seed), (10.0 * seed + 12.34, 0.8))
        for network in ALL
        for name in cells.SETTINGS
        for seed in range(3)
    ]
    lines = link_tables.tables(runs, GOAL, link_tables.beside_of(runs, GOAL))
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if "there and back" in line] == [each.words for each in ALL]
    (line,) = {line for line in lines if line.startswith("local-8+overlap")}
    assert line.split() == [
        *("local-8+overlap", "1234", "22.3", "(12.3..32.3)", "1.00", "0.876", "862", "866", "99%")
    ]


def test_a_target_that_was_not_reached_is_a_result() -> None:
    def told(*runs: Found) -> str:
        return link_tables.tables(runs, GOAL, {})[3]

    assert "not in 61 s" in told(found(cell(), (60.0, 0.7)))
    assert "1 of 2 did" in told(found(cell(), (9.0, 0.8)), found(cell(seed=1), (60.0, 0.7)))
    assert told(found(cell(), (9.0, 0.9), diverged=True)).split() == [
        *("plain", "1234", "diverged", "-", "-", "862", "866", "99%")
    ]
    assert "1 of 2 did" in told(
        found(cell(), (9.0, 0.8)), found(cell(seed=1), (9.0, 0.9), diverged=True)
    )


def test_figures_are_written_for_programs_too(tmp_path: Path) -> None:
    runs = [found(cell(), (20.0, 0.8)), found(cell(setting="overlap"), diverged=True)]
    described = {"options": PLAN.kept(), "machine": "a machine"}
    others = [found(cell(BESIDE), (4.0, 0.8))]
    link_tables.write_all(tmp_path, runs, others, GOAL, described)
    written = json.loads((tmp_path / "links.json").read_text())
    first, second = written["cells"]
    assert (first["s_to_target"], first["kept"], second["diverged"]) == (20.0, 0.2, True)
    head, *rows = (tmp_path / "links.csv").read_text().splitlines()
    assert (len(rows), head.split(",")) == (2, list(first))
    root = ElementTree.fromstring((tmp_path / "links.svg").read_text())
    shown = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"10 Mbit/s", "plain", "overlap", "s to 0.8, 20 ms there and back"} < shown


def test_every_setting_has_a_colour_of_its_own() -> None:
    assert len(set(COLORS)) >= len(cells.SETTINGS)


def test_curves_are_medians_and_rings_where_nobody_came() -> None:
    panel = Panel("a < b", ["slow", "fast"], [Curve("one", [[], [1.0, 10.0, 100.0]])])
    root = ElementTree.fromstring(draw([panel]))
    ring, dot = sorted(root.findall(".//{*}circle"), key=lambda at: float(at.attrib["cy"]))
    assert (ring.attrib["fill"], dot.attrib["fill"] == "none") == ("none", False)
    marks = {
        t.text: float(t.attrib["y"]) - 4 for t in root.findall(".//{*}text") if "y" in t.attrib
    }
    assert float(dot.attrib["cy"]) == pytest.approx(marks["10"], abs=0.2)
    assert draw([Panel("empty", ["slow"], [Curve("one", [None])])]).count("<circle") == 0


def test_a_page_says_what_the_command_says(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"above\n{link_tables.BEGIN}\nold\n{link_tables.END}\nbelow\n")
    link_tables.put_into(page, ["head", "", "row"])
    assert page.read_text() == (
        f"above\n{link_tables.BEGIN}\n\n    head\n\n    row\n\n{link_tables.END}\nbelow\n"
    )
    page.write_text("nothing")
    with pytest.raises(ConfigError, match="has no lines <!-- bench links: begin -->"):
        link_tables.put_into(page, ["row"])


def test_the_documentation_has_a_place_for_tables() -> None:
    text = (Path(__file__).parents[2] / "docs" / "slow-links.md").read_text()
    assert text.index(f"{link_tables.BEGIN}\n") < text.index(f"{link_tables.END}\n")


# -- its course ------------------------------------------------------------------------------------


class Runs:
    """Stands in for runs over a link: what was asked for, and a run that is made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.diverges: set[str] = set()
        monkeypatch.setattr(links, "train_over", self.train_over)
        monkeypatch.setattr(links, "fork_server", lambda engine: contextlib.nullcontext())

    def train_over(self, network: Network, config: Any, forks: None, *, limit_s: float) -> Trip:
        run_dir = Path(config.run_dir)
        assert not run_dir.exists()
        self.asked.append(run_dir.name)
        write_run(run_dir, gradients=60, workers=config.workers, seed=config.seed)
        if run_dir.name in self.fails:
            raise self.fails[run_dir.name]
        diverged = run_dir.name in self.diverges
        return Trip(record=read_run(run_dir), up=1, down=2, diverged=diverged)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


def command(out: Path, *more: str) -> list[str]:
    grid = ["--rates", "loopback,10", "--delays", "20", "--settings", "plain,overlap"]
    return ["bench", "links", *grid, "--out", str(out), *more]


def test_what_has_finished_is_not_run_again(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.fails = {"10mbit-20ms-plain-0": RunError("no network")}
    assert main(command(tmp_path)) == 0
    assert len(runs.asked) == 4, "a cell that fails does not stop the others"
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "failed, and to be run again: 10mbit-20ms-plain-0: no network"
    runs.asked, runs.fails = [], {}
    assert main(command(tmp_path, "--cells", "*-plain-*,*-overlap-1", "--seeds", "2")) == 0
    assert runs.asked == [
        *("10mbit-20ms-plain-0", "loopback-20ms-plain-1", "loopback-20ms-overlap-1"),
        *("10mbit-20ms-plain-1", "10mbit-20ms-overlap-1"),
    ]
    assert not any((tmp_path / "runs").iterdir()), "what is known of them lies in cells"


def test_a_loss_that_is_no_number_is_what_came_of_a_cell(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "10mbit-20ms-overlap-0"
    runs.diverges = {name}
    assert main(command(tmp_path, "--cells", name)) == 0
    assert "diverged" in capsys.readouterr().out
    assert main(command(tmp_path, "--cells", name)) == 0
    assert runs.asked == [name]


def test_nothing_is_run_to_show_what_is_there(
    tmp_path: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, "--show")) == 2, "there is a folder"
    assert "has none of these cells" in capsys.readouterr().err
    main(command(tmp_path, "--cells", "10mbit-*"))
    runs.asked = []
    capsys.readouterr()
    page = tmp_path / "page.md"
    page.write_text(f"{link_tables.BEGIN}\n{link_tables.END}\n")
    assert main(command(tmp_path, "--show", "--into", str(page))) == 0
    assert not runs.asked
    printed = capsys.readouterr().out.splitlines()
    shown = page.read_text().splitlines()[2:-2]
    assert [line.removeprefix("    ") for line in shown] == printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "30"], "the cells in {out} have limit 60.0, not 30.0"),
        (["--model", "alexnet"], "have model fashion-cnn, not alexnet"),
    ],
)
def test_cells_of_other_options_are_not_mixed(
    tmp_path: Path,
    runs: Runs,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(tmp_path, "--cells", "10mbit-*-plain-0")) == 0
    assert main(command(tmp_path, "--target", "0.7", "--show")) == 0, "that is no option of runs"
    assert main(command(tmp_path, *arguments)) == 2
    assert message.format(out=tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates", "fast"], "'fast' is no number above 0"),
        (["--delays", "-1"], "'-1' is no number of milliseconds"),
        (["--settings", "overlpa"], "did you mean 'overlap'?"),
        (["--settings", "odd"], "'odd' takes options that this build does not have"),
        (["--cells", "2mbit-*"], "no cell is like '2mbit-*'"),
        (["--show"], "there is no such folder"),
        (["--into", "no-such-page.md"], "cannot read no-such-page.md"),
    ],
)
def test_what_is_wrong_with_the_flags_is_said_in_a_line(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(cells.SETTINGS, "odd", {"no_such_option": True})
    assert main(["bench", "links", "--out", str(tmp_path / "out"), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.slow
def test_runs_go_over_the_link_and_end_when_their_time_is_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "toy:recipe", "--workers", "2", "--limit", "4", "--eval-every", "16"]
    arguments += ["--rates", "loopback,0.1", "--delays", "0", "--settings", "plain"]
    assert main(["bench", "links", *arguments, "--out", str(tmp_path)]) == 0
    assert "loopback, 0 ms there and back" in capfd.readouterr().out
    fast, slow = json.loads((tmp_path / "links.json").read_text())["cells"]
    for row in (fast, slow):
        size = 4 * 4 * row["gradients"]
        assert min(row["up_bytes"], row["down_bytes"]) > size > 0
        assert math.isfinite(row["final"])
    assert slow["waited"] > 0.9 > slow["waited"] * slow["gradients"] / fast["gradients"]
    assert slow["up_bytes"] / slow["train_s"] < 4 * 0.1e6 / 8, "the rate, and what was under way"


def test_a_run_that_is_asked_for_has_the_options_of_all() -> None:
    config = PLAN.config(cell(setting="overlap", seed=3), Path("somewhere"))
    plain = make_config({"recipe": "fashion-cnn", "workers": 4, "seed": 3, "overlap": True})
    for name in ("recipe", "workers", "servers", "discipline", "seed", "overlap", "lr", "epochs"):
        assert getattr(config, name) == getattr(plain, name)


@pytest.mark.slow
def test_a_run_that_diverges_has_figures_too(tmp_path: Path) -> None:
    arguments = ["--model", "toy:diverging", "--workers", "2", "--rates", "loopback"]
    arguments += ["--delays", "0", "--settings", "plain", "--out", str(tmp_path)]
    assert main(["bench", "links", *arguments]) == 0
    (row,) = json.loads((tmp_path / "links.json").read_text())["cells"]
    assert row["diverged"] and row["gradients"] > 0 and row["s_to_target"] is None
