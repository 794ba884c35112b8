"""Every row of the matrix of faults a few times, and what guards against them switched off.

`python scripts/faults.py` does it at full count (docs/reliability.md).
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from matrix import files, wire
from matrix.rows import ROWS
from matrix.tally import BEGIN, END, Tally, quantile, upper_bound, write_into
from matrix.trying import Amount, caught_after, try_row

SCRIPT = Path(__file__).parents[1] / "scripts" / "faults.py"
DEAR = {
    6: "tests/run/test_checkpoint.py::test_a_disk_that_is_full_for_a_while_is_told_and_tried_again",
    9: "tests/roles/test_server.py::test_a_silent_worker_is_declared_gone_and_a_beating_one_is_not",
    10: "tests/test_disciplines.py"
    "::test_a_deadline_closes_the_round_counted_from_the_first_gradient_seen",
    11: "tests/simulation/test_faults.py::test_whatever_dies_nothing_is_lost_and_everything_ends",
    24: "tests/engines/test_local.py"
    "::test_a_run_that_is_stopped_before_its_first_step_says_what_is_true",
    25: "tests/engines/test_chaos.py"
    "::test_a_server_that_dies_when_all_steps_are_done_gets_them_again",
}
"""Rows whose trials take many seconds, and the ordinary test that looks at the same."""
CHEAP = {5, 12, 23}
"""Rows that take no whole run to notice what is missing."""


HERE = set(ROWS) - {row.number for row in (*wire.ROWS, *files.ROWS)}
"""tests/transport/test_fuzz.py has the others."""


def rows(numbers: set[int]) -> list[object]:
    """The others are among the long tests."""
    return [
        pytest.param(n, marks=() if n in numbers else pytest.mark.slow, id=f"row {n}")
        for n in sorted(HERE)
    ]


@pytest.mark.parametrize("number", rows(HERE - set(DEAR)))
def test_what_must_happen_happens(number: int) -> None:
    row = ROWS[number]
    if (why_not := row.why_not()) is not None:
        pytest.skip(why_not)
    found = try_row(row, Amount(row.quick), 1)
    assert found.trials >= row.quick and not found.violations, found.violations


@pytest.mark.parametrize("number", rows(CHEAP))
def test_without_what_guards_against_it_a_row_fails(number: int) -> None:
    row = ROWS[number]
    if (why_not := row.why_not()) is not None:
        pytest.skip(why_not)
    for name in row.protections:
        after, _ = caught_after(number, name)
        assert after, f"{name} is not missed"


def test_dear_rows_have_a_cheap_test_too() -> None:
    for number, where in DEAR.items():
        path, _, name = where.partition("::")
        assert number in ROWS
        assert f"def {name}" in (SCRIPT.parents[1] / path).read_text(), where


# -- how trials are counted ------------------------------------------------------------------------


def test_the_bound_is_three_over_n_where_nothing_failed_and_exact_elsewhere() -> None:
    assert upper_bound(0, 1000) == pytest.approx(0.003)
    assert upper_bound(0, 1) == upper_bound(0, 0) == 1.0
    assert upper_bound(1, 10) == pytest.approx(0.3942, abs=1e-4)  # of a table of the binomial
    assert upper_bound(5, 100) == pytest.approx(0.1023, abs=1e-4)
    assert upper_bound(10, 10) == 1.0
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0 and quantile([5.0], 0.99) == 5.0


def test_tallies_add_up_and_no_seed_counts_twice() -> None:
    one = Tally("f", "m", 9, [(0, 5)], 10, [(3, "lost")], [0.5])
    one.add(Tally("f", "m", 9, [(5, 5), (20, 2)], 14, [], [0.7]))
    assert (one.seeds, one.trials, one.next_seed) == ([(0, 10), (20, 2)], 24, 22)
    assert one.violations == [(3, "lost")] and one.recoveries_s == [0.5, 0.7]
    with pytest.raises(ValueError, match="seeds 20 to 21 were tried before"):
        one.add(Tally("f", "m", 9, [(21, 4)], 4))
    assert Tally.from_json(json.loads(json.dumps(vars(one)))) == one


@pytest.fixture
def main() -> Callable[[], int]:
    """Of the script."""
    specification = importlib.util.spec_from_file_location("faults", SCRIPT)
    assert specification is not None and specification.loader is not None
    command = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(command)
    return command.main


def test_the_script_goes_on_where_it_was_and_writes_its_table(
    tmp_path: Path,
    main: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page, file, other = (tmp_path / name for name in ("page.md", "found.json", "other.json"))
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")

    def faults(*flags: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["faults.py", "--rows", "5", "--jobs", "1", *flags])
        return int(main()), capsys.readouterr().out

    code, shown = faults("--trials", "1", "--json", str(file))
    assert code == 0 and "1 trials, 0 violations" in shown
    faults("--trials", "1", "--json", str(file))
    faults("--trials", "1", "--json", str(other), "--first", "2")
    with pytest.raises(SystemExit, match="seeds up to 1 were tried before"):
        faults("--trials", "1", "--json", str(file), "--first", "1")
    faults("--trials", "0", "--json", str(file), "--add", str(other), "--into", str(page))
    found = json.loads(file.read_text())["5"]
    assert found["seeds"] == [[0, 3]] and found["trials"] > 300
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert f"| {found['trials']:,} | 0 |" in text
    assert "counts 1" in faults("--seed", "7")[1]
    assert "2 of 2 caught" in faults("--off")[1]
    with ROWS[5].protections["digests"]():
        code, shown = faults("--trials", "1")
    assert code == 1 and "python scripts/faults.py --row 5 --seed 0" in shown


@pytest.mark.slow
def test_the_same_seeds_are_the_same_trials_on_any_number_of_processes() -> None:
    one, two = (try_row(ROWS[5], Amount(1000), num_jobs) for num_jobs in (1, 2))
    assert one == two and len(one.seeds) == 1 and one.trials >= 1000


def test_a_page_without_a_place_for_the_table_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match="has no place for the table"):
        write_into(page, {})
    assert page.read_text() == "nothing\n"
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]
