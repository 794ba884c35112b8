"""The examples run, and the README's first one is the file that runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.cli import main

ROOT = Path(__file__).parent.parent


def run_recipe(name: str, run_dir: Path, *flags: str) -> dict:
    recipe = f"{ROOT / 'examples' / name}:recipe"
    command = ["train", "--engine", "inproc", "--recipe", recipe, "--run-dir", str(run_dir)]
    assert main([*command, "--quiet", *flags]) == 0
    return json.loads((run_dir / "summary.json").read_text())


def test_own_model_from_the_shell(run_dir: Path) -> None:
    summary = run_recipe("own_model.py", run_dir, "--discipline", "lock-free", "--workers", "4")
    assert summary["test_accuracy"] > 0.9


def test_own_model_as_a_script(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "own_model.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    accuracy, staleness = done.stdout.splitlines()[-1].split()
    assert float(accuracy) > 0.9
    assert 0 < float(staleness) < 10
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.endswith("-own_model-recipe-lock-free")


def test_the_language_model_learns_and_reports_its_own_metric(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = run_recipe("char_lm.py", run_dir, "--steps", "60")
    assert summary["test_accuracy"] is None
    assert summary["metric"] == "bits_per_character"
    assert 1 < summary["test_metric"] < 5.5
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"Test-Metric: \d\.\d+ \(bits_per_character\)", lines[-3])


def test_the_readme_shows_the_example_that_runs() -> None:
    source = (ROOT / "examples" / "own_model.py").read_text()
    body = source[source.index("import torch") :].strip()
    assert body in (ROOT / "README.md").read_text()
