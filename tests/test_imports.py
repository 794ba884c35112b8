"""The package's shape: layers that import downward only, a pure core, and an instant command."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import offbeat
from offbeat.disciplines import BUILT_IN

PACKAGE = Path(offbeat.__file__).parent
LAYERS = [
    ["cli", "__main__"],
    ["flags"],
    ["bench", "netbench", "reportbench", "startbench"],
    ["byhand", "comparing"],
    ["api"],
    ["engines"],
    ["roles", "summaries"],
    ["cluster", "rundir", "progress", "job"],
    ["checkpoint"],
    ["shard", "towers"],
    ["transport", "recipes", "data"],
    ["flat", "layers", "optim", "randomness", "memory", "rules"],
    ["control"],
    ["report"],
    ["hosts", "grid"],
    ["config"],
    ["ledger"],
    ["disciplines"],
    ["plugins"],
    ["importing"],
    ["errors", "events", "accounts", "version"],
]
HEIGHT = {name: -depth for depth, names in enumerate(LAYERS) for name in names}


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports when it is imported, by their full names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.name)
def test_imports_point_downward(path: Path) -> None:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts == ("__init__",):
        return
    for name in imports_of(path):
        package, _, inner = name.partition(".")
        if package == "offbeat" and inner:
            other = inner.split(".")[0]
            same = other == parts[0]
            assert same or HEIGHT[other] <= HEIGHT[parts[0]], f"{path.name} imports {name}"


def test_the_disciplines_are_pure() -> None:
    allowed = {"math", "abc", "collections.abc", "dataclasses", "typing", "offbeat.plugins"}
    assert imports_of(PACKAGE / "disciplines.py") <= allowed
    assert len((PACKAGE / "disciplines.py").read_text().splitlines()) < 300


NAMES = {*BUILT_IN, *(f"{name}:" for name in BUILT_IN)}


def comparisons(source: str) -> list[str]:
    """Where a program asks for a discipline by its name, instead of asking the discipline."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            asked = [node.value]
        else:
            continue
        for part in asked:
            for constant in ast.walk(part):
                if isinstance(constant, ast.Constant) and constant.value in NAMES:
                    found.append(ast.unparse(node))
    return found


def test_nobody_asks_for_a_discipline_by_its_name() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert comparisons(path.read_text()) == [], path
    asked = ["if d == 'sync': pass", "x = d in ('a', 'bounded')", "match d:\n case 'sync': pass"]
    assert all(comparisons(line) for line in asked), "the check itself works"


def suspicious(source: str) -> list[str]:
    """Calls and imports that can run what somebody else wrote, or that hide a missing condition."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
            found += [
                name for name in names if name.split(".")[0] in ("pickle", "marshal", "shelve")
            ]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("eval", "exec", "torch.load", "time.sleep", "os.system"):
                found.append(called)
            if called.endswith(".extractall") or any(k.arg == "shell" for k in node.keywords):
                found.append(called)
    return found


def test_nothing_dangerous_is_called_anywhere() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert suspicious(path.read_text()) == [], path
    bad = [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "torch.load(f)",
        "t.extractall()",
    ]
    bad += ["subprocess.run('x', shell=True)", "time.sleep(1)"]
    assert all(suspicious(line) for line in bad), "the check itself works"


def test_everything_that_is_offered_exists() -> None:
    for name in offbeat.__all__:
        assert getattr(offbeat, name) is not None
    assert set(dir(offbeat)) == set(offbeat.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="trian"):
        offbeat.trian  # noqa: B018


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["train", "--help"], ["bench", "train", "--help"]]
)
def test_help_imports_no_torch(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from offbeat.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = {'torch', 'numpy', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "offbeat" in done.stdout
