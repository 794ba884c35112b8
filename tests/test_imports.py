"""The package's shape: layers that import downward only, a pure core, and an instant command."""

import ast
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import offbeat
from offbeat.family import BUILT_IN

PACKAGE = Path(offbeat.__file__).parent
LAYERS = [
    ["cli", "__main__"],
    ["bench", "comparison", "launching", "replaying", "watching"],
    ["api", "simulation"],
    ["engines"],
    ["cluster"],
    ["loops"],
    ["roles", "report"],
    ["run"],
    ["capture", "compiling", "data", "local_steps", "recipes", "towers", "transport"],
    [
        *("accumulation", "aliases", "clipping", "decline", "flat", "layers", "memory", "optim"),
        *("probing", "randomness", "reading", "rows", "rules", "schedules", "shard", "streams"),
    ],
    [
        *("accounts", "config", "disciplines", "errors", "family", "importing", "ledger", "pace"),
        *("place", "plugins", "pushes", "scripts", "version"),
    ],
]
HEIGHT = {name: -depth for depth, names in enumerate(LAYERS) for name in names}
"""Of the folders and modules right below the package."""


def name_of(path: Path) -> str:
    parts = ("offbeat", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
"""The package itself is the first."""


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it, by their full names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in inner}
    return found


@pytest.mark.parametrize("name", list(MODULES)[1:])
def test_imports_point_downward(name: str) -> None:
    home = name.split(".")[1]
    for other in imports_of(MODULES[name]) & MODULES.keys():
        assert HEIGHT[other.split(".")[1]] <= HEIGHT[home], f"{name} imports {other}"


Graph = Mapping[str, set[str]]


def reached(graph: Graph, start: str) -> set[str]:
    """All that `start` imports, and what that imports, and so on."""
    found: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += graph[name]
    return found


def cycles(graph: Graph) -> set[frozenset[str]]:
    """Which names lead back to themselves, each with those that it shares this fate with."""
    below = {name: reached(graph, name) for name in graph}
    return {
        frozenset(other for other in below[name] if name in below[other])
        for name in graph
        if name in below[name]
    }


IMPORTS = {name: imports_of(path) & MODULES.keys() for name, path in MODULES.items()}


def test_nobody_imports_itself_in_a_roundabout_way() -> None:
    assert cycles(IMPORTS) == set()
    folders: dict[str, set[str]] = {name: set() for name in HEIGHT}
    for name in IMPORTS.keys() - {"offbeat"}:
        home = name.split(".")[1]
        folders[home] |= {other.split(".")[1] for other in IMPORTS[name]} - {home}
    assert cycles(folders) == set(), "also where no module does, folders can"
    bad = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"e"}}
    assert cycles(bad) == {frozenset("abc"), frozenset("e")}, "the check itself works"


@pytest.mark.parametrize("folder", [*LAYERS[-1], "report", "simulation"])
def test_the_lowest_layer_and_reports_know_no_torch(folder: str) -> None:
    inside = [name for name in MODULES if f"{name}.".startswith(f"offbeat.{folder}.")]
    assert inside
    for name in {*inside}.union(*(reached(IMPORTS, name) for name in inside)):
        outside = {found.split(".")[0] for found in imports_of(MODULES[name])}
        assert not outside & {"torch", "numpy"}, f"{name}, which {folder} needs"


@pytest.mark.parametrize("name", ["disciplines", "family"])
def test_the_disciplines_are_pure(name: str) -> None:
    allowed = {"math", "abc", "collections.abc", "dataclasses", "typing", "offbeat.plugins"}
    if name == "family":
        allowed.add("offbeat.disciplines")
    assert imports_of(PACKAGE / f"{name}.py") <= allowed
    assert len((PACKAGE / f"{name}.py").read_text().splitlines()) < 300


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
    assert not HEIGHT.keys() & set(offbeat.__all__), "what is imported would take its place"


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
