"""A Dockerfile carried out without Docker: its steps run in a small Debian, each stage in a layer
of its own above it, and what it starts in the end is started.

Needs root, debootstrap, overlay mounts, and the network that pip and debootstrap need. DEBIAN_ROOT
may name a folder in which such a Debian is kept from one time to the next.
"""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

BASE_TIMEOUT_S = 1200.0
STEP_TIMEOUT_S = 1200.0
ROOT_VARIABLE = "DEBIAN_ROOT"
HANDED_IN = ("/etc/resolv.conf", "/etc/ssl/certs", "/etc/pip.conf")
"""Of this machine, so that pip gets as far in there as here."""
ENTER = """
set -e
mount -t overlay overlay -o "lowerdir=$BASE,upperdir=$UPPER,workdir=$WORK" "$ROOT"
mount --rbind /dev "$ROOT/dev"
mount --rbind /proc "$ROOT/proc"
for path in $HANDED_IN; do
    if [ -d "$path" ]; then
        mkdir -p "$ROOT$path"
    else
        mkdir -p "$(dirname "$ROOT$path")"
        touch "$ROOT$path"
    fi
    mount --bind "$path" "$ROOT$path"
done
if [ -n "$SOURCE" ]; then
    mkdir -p "$ROOT$TARGET"
    cp -a "$SOURCE" "$ROOT$TARGET"
    exit
fi
mkdir -p "$ROOT$FOLDER"
exec chroot --userspec="$USER" "$ROOT" "$@"
"""


def make_debian(folder: Path) -> Path:
    """What the image python:3-slim is made of, as near as Debian has it."""
    kept = os.environ.get(ROOT_VARIABLE)
    root = Path(kept) if kept else folder / "debian"
    if not (root / "usr" / "local" / "bin" / "pip").exists():
        release = dict(
            line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if line
        )
        packages = "python3,python3-venv,python3-pip,ca-certificates"
        kind = ["--variant=minbase", f"--include={packages}"]
        subprocess.run(
            ["debootstrap", *kind, release["VERSION_CODENAME"], str(root)],
            check=True,
            capture_output=True,
            timeout=BASE_TIMEOUT_S,
        )
        for name in ("python", "pip"):
            (root / "usr" / "local" / "bin" / name).symlink_to(f"/usr/bin/{name}3")
    return root


@dataclass(kw_only=True)
class Stage:
    """What one FROM begins."""

    layer: Path
    base: Path
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = "0"
    folder: str = "/"

    def enter(self, *command: str, source: str = "", target: str = "") -> str:
        """Run a command in there, or copy something into it; returns what it prints."""
        for name in ("upper", "work", "root"):
            (self.layer / name).mkdir(parents=True, exist_ok=True)
        handed_in = [path for path in (*HANDED_IN, *_pips_own()) if Path(path).exists()]
        known = {"BASE": str(self.base), "FOLDER": self.folder, "USER": f"{self.user}:{self.user}"}
        known |= {n.upper(): str(self.layer / n) for n in ("upper", "work", "root")}
        known |= {"SOURCE": source, "TARGET": target, "HANDED_IN": " ".join(handed_in)}
        inside = self.environment | self.arguments
        inside |= {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
        words = [f"{name}={value}" for name, value in inside.items()]
        inside_of = ["unshare", "--mount", "sh", "-c", ENTER, "sh"]
        found = subprocess.run(
            [*inside_of, "env", "-i", f"--chdir={self.folder}", *words, *command],
            env={"PATH": os.environ["PATH"], **known},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STEP_TIMEOUT_S,
            check=False,
        )
        assert found.returncode == 0, f"{' '.join(command)}\n{found.stdout[-4000:]}"
        return found.stdout


def _pips_own() -> list[str]:
    """Folders of this machine that pip is told to look into."""
    told = subprocess.run(
        ["pip", "config", "list"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    words = re.findall(r"(?:file://)?(/[\w./-]+)", told)
    return sorted({word for word in words if Path(word).is_dir()})


def read_steps(text: str) -> list[tuple[str, str]]:
    """Each instruction with what follows it."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


class Image:
    """What comes of a Dockerfile, built in `folder`."""

    def __init__(self, dockerfile: Path, folder: Path, base: Path, **given: str) -> None:
        """`given`: its build arguments."""
        self._context = folder / "context"
        self._folder = folder
        self._base = base
        self._given = given
        self._stages: dict[str, Stage] = {}
        self.stage: Stage
        self.entrypoint: list[str] = []
        self.command: list[str] = []
        _copy_context(dockerfile.parent, self._context)
        for instruction, rest in read_steps(dockerfile.read_text()):
            getattr(self, f"_{instruction.lower()}")(rest)

    def run(self, *command: str) -> str:
        """As `docker run IMAGE COMMAND`."""
        return self.stage.enter(*self.entrypoint, *(command or self.command))

    def _from(self, rest: str) -> None:
        assert re.fullmatch(r"python:\$\{PYTHON\}-slim( AS \w+)?", rest), rest
        name = rest.partition(" AS ")[2] or "last"
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        layer = self._folder / name
        self.stage = Stage(layer=layer, base=self._base, environment={"PATH": path})
        self._stages[name] = self.stage

    def _arg(self, rest: str) -> None:
        name, _, default = rest.partition("=")
        if self._stages:
            self.stage.arguments[name] = self._given.get(name, default.strip('"'))

    def _workdir(self, rest: str) -> None:
        self.stage.folder = rest

    def _user(self, rest: str) -> None:
        self.stage.user = rest

    def _env(self, rest: str) -> None:
        for word in shlex.split(rest):
            name, _, value = word.partition("=")
            self.stage.environment[name] = value.replace("$PATH", self.stage.environment["PATH"])

    def _run(self, rest: str) -> None:
        self.stage.enter("sh", "-c", rest)

    def _copy(self, rest: str) -> None:
        words = rest.split()
        root = self._context
        if words[0].startswith("--from="):
            root = self._stages[words.pop(0).removeprefix("--from=")].layer / "upper"
        *sources, target = words
        into = str(Path(self.stage.folder, target))
        for source in sources:
            found = root / source.lstrip("/")
            assert found.exists(), f"COPY {rest}: there is no {source}"
            if found.is_dir():  # what is in it is copied
                self.stage.enter(source=f"{found}/.", target=into)
            else:
                self.stage.enter(source=str(found), target=into)

    def _entrypoint(self, rest: str) -> None:
        self.entrypoint = json.loads(rest)

    def _cmd(self, rest: str) -> None:
        self.command = json.loads(rest)


def _copy_context(root: Path, context: Path) -> None:
    """What .dockerignore leaves of a folder."""
    patterns = [
        line
        for line in (root / ".dockerignore").read_text().split("\n")
        if line and not line.startswith("#")
    ]
    context.mkdir()
    for path in root.iterdir():
        if not is_ignored(path.relative_to(root), patterns):
            _copy(root, path, context, patterns)


def _copy(root: Path, path: Path, context: Path, patterns: list[str]) -> None:
    relative = path.relative_to(root)
    if path.is_dir():
        for inner in path.iterdir():
            if not is_ignored(inner.relative_to(root), patterns):
                _copy(root, inner, context, patterns)
    else:
        (context / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, context / relative)


def is_ignored(path: Path, patterns: list[str]) -> bool:
    """By the last pattern that fits it, or a folder that it is in."""
    ignored = False
    for pattern in patterns:
        wanted = pattern.lstrip("!")
        names = [path, *path.parents[:-1]]
        if any(_fits(name, wanted) for name in names):
            ignored = not pattern.startswith("!")
    return ignored


def _fits(path: Path, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return fnmatch.fnmatch(path.name, pattern[3:])
    return len(path.parts) == len(Path(pattern).parts) and fnmatch.fnmatch(str(path), pattern)
