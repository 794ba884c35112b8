"""The Dockerfile, whose steps are carried out in a small Debian: what it copies is there, its
commands do what they should, and the image trains."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from images import Image, is_ignored, make_debian, read_steps

from offbeat.version import __version__

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"


def test_the_image_is_of_little_and_nobodys_in_particular() -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line]
    names = ("tests", ".venv", ".git", "runs", "offbeat", "constraints.txt", "docs")
    left = [name for name in names if not is_ignored(Path(name), patterns)]
    assert left == ["offbeat", "constraints.txt"]
    assert is_ignored(Path("offbeat/cli/__pycache__/x.pyc"), patterns)
    steps = read_steps(DOCKERFILE.read_text())
    assert [rest for name, rest in steps if name == "USER"] == ["1000"]
    assert [rest for name, rest in steps if name == "ENTRYPOINT"] == ['["offbeat"]']
    defaults = [rest for name, rest in steps if name == "ARG"]
    assert defaults == ["PYTHON=3.11", 'TORCH_INDEX=""', 'EXTRAS=""', 'PACKAGES=""']
    assert "://" not in DOCKERFILE.read_text(), "where packages come from is the builder's affair"


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("a Debian of its own takes root, and Debian's package debootstrap")
    try:
        return make_debian(tmp_path_factory.mktemp("base"))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no Debian can be made here: {error.stdout.decode()[-300:]}")


@pytest.mark.slow
def test_the_image_trains(debian: Path, tmp_path: Path) -> None:
    image = Image(DOCKERFILE, tmp_path, debian)
    assert image.run("--version").strip() == f"offbeat {__version__}"
    assert "usage: offbeat" in image.run()
    assert image.stage.enter("id", "-u").strip() == "1000"
    said = image.run("train", "--steps", "20", "--run-dir", "/runs/first", "--device", "cpu")
    assert "Test-Accuracy" in said, said
    run = image.stage.layer / "upper" / "runs" / "first"
    assert (run / "summary.json").exists() and run.stat().st_uid == 1000
    tools = image.stage.enter("sh", "-c", "ls /opt/offbeat/bin; ls /src 2>&1 || true")
    assert "pip" not in tools.split("\n") and "cannot access" in tools, "the build left something"
