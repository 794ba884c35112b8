"""`write_report(paths)`: report.html and report.md, a pure function of the runs' event files."""

from collections.abc import Sequence
from pathlib import Path

from offbeat.errors import RunDirError
from offbeat.report.groups import Target, shortened, time_to
from offbeat.report.many_runs import describe_runs
from offbeat.report.markdown import write_markdown
from offbeat.report.one_run import describe_run
from offbeat.report.page import write_page
from offbeat.report.record import find_runs, read_run


def write_report(
    paths: Sequence[Path], out: Path | None = None, *, target: Target | None = None
) -> tuple[Path, Path]:
    """Report the runs at or below `paths`: one on its own, or several side by side. Written into
    `out`; where none is given, into the only path, or the current folder. Returns both files."""
    found: dict[Path, tuple[Path, str]] = {}
    for path in paths:
        if not path.is_dir():
            raise RunDirError(f"{path} is no folder: give a run's, or one that holds runs")
        before = len(found)
        for run in find_runs(path):
            inside = run.relative_to(path) if len(paths) == 1 else run
            name = str(inside) if inside.parts else run.resolve().name
            found.setdefault(run.resolve(), (run, name))
        if len(found) == before and not any(find_runs(path)):
            raise RunDirError(f"there is no run in {path}: none of its folders has a config.json")
    runs = list(found.values())
    if len(runs) == 1:
        record = read_run(*runs[0])
        document = describe_run(record, time_to(target, record) if target is not None else None)
    else:
        document = describe_runs([shortened(read_run(*run)) for run in runs], target)
    folder = out or (paths[0] if len(paths) == 1 else Path())
    written = folder / "report.html", folder / "report.md"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written[0].write_text(write_page(document), encoding="utf-8")
        written[1].write_text(write_markdown(document), encoding="utf-8")
    except OSError as error:
        raise RunDirError(f"cannot write the report into {folder}: {error.strerror}") from error
    return written
