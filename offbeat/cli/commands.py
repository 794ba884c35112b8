"""The command `offbeat`: what its commands do, and what they print. Their flags are in flags.py.

    offbeat train --discipline lock-free --workers 4
    offbeat train --resume RUN
    offbeat compare --disciplines sync,lock-free --workers 1,2 --out DIR
    offbeat compare --disciplines sync,lock-free --out DIR -- train.py --its --flags
    offbeat watch RUN_OR_DIR
    offbeat report RUN_OR_DIR
    offbeat eval RUN --follow
    offbeat simulate RUN --workers 4,64,1024 --disciplines all
    offbeat export RUN model.safetensors
    offbeat role worker --index 1 --cluster cluster.toml
    offbeat launch --workers 4 train.py
    offbeat data get cifar10
    offbeat bench exchange

Exit codes: 0 done; 1 the run failed; 2 something was wrong with what was asked for; 130 stopped by
Ctrl-C, SIGTERM or SIGHUP.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import secrets
import shlex
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.cli.flags import flag, make_parser, unknown
from offbeat.cli.signals import Echoes
from offbeat.cli.watched import callbacks_of, look_on, page_beside
from offbeat.cluster.hosts import Hosts, Task, find_hosts
from offbeat.cluster.scheduled import find_scheduled
from offbeat.comparison import grid
from offbeat.config import (
    AUTO,
    LOCAL_OPTIONS,
    ROLES,
    make_config,
    not_overruled,
    options,
    read_config_file,
)
from offbeat.data.catalog import DATASETS, find_dataset
from offbeat.engines.forkserver import FORK_SERVER, fork_server
from offbeat.errors import ConfigError, OffbeatError
from offbeat.recipes.metrics import HIGHER_IS_BETTER
from offbeat.roles.control import CONTROL_VARIABLE, Control
from offbeat.scripts import check_options, describe_script
from offbeat.transport.terms import OPEN, Terms, load_terms

INTERRUPTED = 130
OF_SERVERS = ("bind", "journal_dir")
"""Flags of a role that mean nothing to others."""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        parser, commands = make_parser()
        known, others = parser.parse_known_args(arguments)
        if known.command is None:
            parser.print_help()
            raise SystemExit(2)
        if others:
            within = getattr(known, "benchmark", None) or getattr(known, "action", None)
            name = " ".join(filter(None, (known.command, within)))
            raise ConfigError(unknown(others[0], commands[name], name))
        return _COMMANDS[known.command](known)
    except OffbeatError as error:
        what = "error: " if error.exit_code else ""
        _say_aside(f"offbeat: {what}{error}")
        return error.exit_code
    except KeyboardInterrupt:
        _say_aside("offbeat: interrupted")
        return INTERRUPTED


@contextlib.contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """SIGTERM (a batch system's) and SIGHUP (a closed terminal's) end a run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    echoes = Echoes()

    def interrupt(number: int, frame: object) -> None:
        if not echoes.is_one(number):
            raise KeyboardInterrupt

    before = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read_config(known: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options out of a configuration file, and those given as flags, which beat them."""
    given = {k: v for k, v in vars(known).items() if k in options()}
    from_file = read_config_file(known.config) if known.config else {}
    return not_overruled(from_file, given), given


def _train(known: argparse.Namespace) -> int:
    _check_resume(known)
    from_file, given = _read_config(known)
    config = make_config(from_file, given)  # what is wrong with the flags shows before torch loads
    with (
        signals_as_ctrl_c(),
        fork_server(config.engine) as forks,  # it imports while we do
        page_beside(known, _terms_of_page(known), _say_aside) as beside,
    ):
        from offbeat.api import resume_config, train_config
        from offbeat.run.progress import say

        told = callbacks_of(beside)
        if known.resume is not None:
            result = resume_config(Path(known.resume), given, forks=forks, callbacks=told)
        else:
            result = train_config(config, forks=forks, callbacks=told)
    for line in _result_lines(result.summary):
        say(line)
    return _tell_interrupted(result.run_dir, "train") if result.interrupted else 0


def _check_resume(known: argparse.Namespace) -> None:
    if known.resume is not None and known.config is not None:
        raise ConfigError("--resume takes the configuration of the run; give flags, not --config")
    if known.resume is not None and "run_dir" in vars(known):
        raise ConfigError("--resume goes on in the run's own folder; leave --run-dir out")


def _tell_interrupted(run_dir: Path, command: str) -> int:
    """And by which command to go on."""
    from offbeat.run.checkpoint import list_checkpoints
    from offbeat.run.rundir import RunFolder

    how = f"; go on with: offbeat {command} --resume {run_dir}"
    if not list_checkpoints(RunFolder(run_dir).checkpoints):
        how = " before the first checkpoint: there is nothing to go on from"
    _say_aside(f"offbeat: interrupted{how}")
    return INTERRUPTED


def _launch(known: argparse.Namespace) -> int:
    _check_resume(known)
    from_file, given = _read_config(known)
    given = {**from_file, **given}
    check_options(list(given))
    if (found := _find_hosts(known)) is not None:
        return _launch_by_hand(known, given, *found)
    of_page = () if _is_watched(known) else ("token_file", "tls_cert", "tls_key", "tls_ca")
    for name in ("role", "index", "bind", "journal_dir", *of_page):
        if getattr(known, name, None) is not None:
            raise ConfigError(
                f"{flag(name)} belongs to a cluster: name it with --cluster cluster.toml, or --ps "
                f"and --worker"
            )
    _check_script(known)
    config = make_config(given)
    with (
        signals_as_ctrl_c(),
        fork_server("local") as forks,
        page_beside(known, _terms_of_page(known), _say_aside) as beside,
    ):
        from offbeat.launching import launch, relaunch

        show = _say_nothing if config.quiet else _say_aside
        if known.resume is not None:
            begin = functools.partial(relaunch, Path(known.resume), given)
        else:
            begin = functools.partial(launch, known.script, known.arguments, given)
        result = begin(say=show, forks=forks, callbacks=callbacks_of(beside))
    show(launch_line(result.summary, result.run_dir))
    return _tell_interrupted(result.run_dir, "launch") if result.interrupted else 0


def _check_script(known: argparse.Namespace) -> None:
    if (known.script is None) == (known.resume is None):
        raise ConfigError(
            "launch takes a script, as offbeat launch --workers 4 train.py, or --resume RUN"
        )


def _launch_by_hand(
    known: argparse.Namespace, given: Mapping[str, Any], hosts: Hosts, task: Task | None
) -> int:
    """Be one role of a cluster."""
    role, index = _which_role(known, task)
    if role == "evaluator":
        raise ConfigError("a launched run has no evaluator: its script scores itself")
    rank = None if role == "ps" else hosts.rank_of(role, index)
    _check_role_flags(known, role, rank == 0, list(given))
    script = None if known.script is None else describe_script(known.script, known.arguments)
    if rank is None:
        return _serve_script(known, hosts, index, script)
    _check_script(known)
    if rank == 0:
        return _launch_master(known, given, hosts, script)
    from offbeat.cli import launched

    assert script is not None
    return INTERRUPTED if launched.work(_endpoint(known, hosts), rank, script, given) else 0


def _serve_script(
    known: argparse.Namespace, hosts: Hosts, index: int, script: Mapping[str, Any] | None
) -> int:
    """Any run's server; one that has the script finds an optimizer that lies beside it."""
    hosts.where("ps", index)
    from offbeat.cli import launched, roles

    if script is not None:
        launched.find_modules(script)
    file = None if script is None else str(script["file"])
    stopped = roles.serve(_endpoint(known, hosts), index, **_of_server(known), script=file)
    return INTERRUPTED if stopped else 0


def _launch_master(
    known: argparse.Namespace,
    given: Mapping[str, Any],
    hosts: Hosts,
    script: Mapping[str, Any] | None,
) -> int:
    config = make_config(given)  # what is wrong with the flags shows before torch loads
    from offbeat.cli import launched

    show = _say_nothing if config.quiet else _say_aside
    with page_beside(known, _terms_of_page(known), _say_aside) as beside:
        told = callbacks_of(beside)
        result = launched.master(_endpoint(known, hosts), given, script, known.resume, show, told)
    show(launch_line(result.summary, result.run_dir))
    where = f" --cluster {shlex.quote(known.file)}" if known.file else ""
    again = f"launch{where} --role master"
    return _tell_interrupted(result.run_dir, again) if result.interrupted else 0


def _say_nothing(line: object) -> None:
    pass


def _say_aside(line: str) -> None:
    """Where the output is a script's own, or it is an error."""
    from offbeat.run.progress import say

    say(line, aside=True)


def _compare(known: argparse.Namespace) -> int:
    from_file, given = _read_config(known)
    given = {**from_file, **{k: v for k, v in given.items() if k not in grid.AXES}}
    axes = {name: getattr(known, name) for name in grid.AXES if name in vars(known)}
    script = None if known.script is None else describe_script(known.script, known.arguments)
    resumed = Path(known.out) if known.out and known.resume else None
    asked = grid.make_grid(given, axes, resumed, script)
    if known.resume and known.out is None:
        raise ConfigError("--resume goes on with a comparison: say in which folder it is (--out)")
    grid.check_grid(asked, Path(known.out or "."))  # shows what is wrong before torch loads
    with (
        signals_as_ctrl_c(),
        fork_server(asked.engine) as forks,
        page_beside(known, _terms_of_page(known), _say_aside) as beside,
    ):
        from offbeat.comparison.runs import run_grid
        from offbeat.run.progress import say

        out = Path(known.out) if known.out else None
        begun = _say_nothing if beside is None else beside.start
        done = run_grid(asked, out, known.target, resume=known.resume, forks=forks, begun=begun)
    for name, reason in done.failed.items():
        _say_aside(f"offbeat: {name} failed: {reason}")
    say(f"wrote {done.report}")
    if done.interrupted:
        where = shlex.quote(str(done.out))
        _say_aside(f"offbeat: interrupted; go on with: offbeat compare --resume --out {where}")
        return INTERRUPTED
    return 1 if done.failed else 0


def _watch(known: argparse.Namespace) -> int:
    with signals_as_ctrl_c():
        return look_on(known, _terms(known))


def _is_watched(known: argparse.Namespace) -> bool:
    return bool(known.watch or known.watch_at)


def _terms_of_page(known: argparse.Namespace) -> Terms:
    """Where there is to be one."""
    return _terms(known) if _is_watched(known) else OPEN


def _report(known: argparse.Namespace) -> int:
    from offbeat.report.write import write_report
    from offbeat.run.progress import say

    out = Path(known.out) if known.out else None
    for path in write_report([Path(run) for run in known.runs], out, target=known.target):
        say(f"wrote {path}")
    return 0


def _export(known: argparse.Namespace) -> int:
    from offbeat.api import export

    export(known.run, known.file, ema=known.ema, best=known.best)
    print(f"wrote {known.file}")
    return 0


def _eval(known: argparse.Namespace) -> int:
    with signals_as_ctrl_c():
        from offbeat.api import evaluate
        from offbeat.run.progress import say

        own = {name: getattr(known, name) for name in ("recipe", "data_dir", "device")}
        evaluate(known.run, follow=known.follow, best=known.best, say=say, **own)
    return 0


def _replay(known: argparse.Namespace) -> int:
    with signals_as_ctrl_c():
        from offbeat.replaying.again import replay
        from offbeat.run.progress import say

        names = ("to", "until_nan", "without_worker", "recipe", "data_dir", "out")
        found = replay(known.run, say=say, **{name: getattr(known, name) for name in names})
        for line in found.lines():
            say(line)
    return 0 if found.is_same else 1


def _simulate(known: argparse.Namespace) -> int:
    names = ("workers", "servers", "disciplines", "rates", "delays", "slow_worker", "cores")
    asked = {name: getattr(known, name) for name in (*names, "steps", "seed")}
    with signals_as_ctrl_c():
        from offbeat.simulation import telling
        from offbeat.simulation.prediction import simulate

        rows = itertools.count()

        def say(prediction: Any) -> None:
            if next(rows) == 0:
                print(telling.line_of(telling.HEADER))
            print(telling.line_of(telling.row_of(prediction)), flush=True)

        found = simulate(known.run, **asked, say=say)
    print(telling.lead(found, known.run))
    for cell, why in found.left_out.items():
        _say_aside(f"offbeat: left out {cell}: {why}")
    if known.out is not None:
        for path in telling.write_simulation(found, known.run, Path(known.out)):
            print(f"wrote {path}")
    return 0


def _role(known: argparse.Namespace) -> int:
    if CONTROL_VARIABLE in os.environ:
        return _fork_server() if known.role == FORK_SERVER else _role_of_engine(known)
    if known.role == AUTO:
        return _role_of_scheduler(known)
    if known.port is not None:
        raise ConfigError("--port is for role auto: else the cluster says where servers listen")
    found = _find_hosts(known)
    if found is None:
        return _role_of_engine(known)
    hosts, task = found
    return _role_by_hand(known, hosts, *_which_role(known, task))


def _role_of_scheduler(known: argparse.Namespace) -> int:
    """Be whatever srun or a pod's manifest has started this process as, all by the same command:
    what only the master takes is not for the others to look at."""
    found = _find_hosts(known)
    if "index" in vars(known) or known.join or (found is not None and found[1] is None):
        raise ConfigError(
            "role auto finds out by itself who it is and where the others are: leave --index, "
            "--join, --cluster, --ps, --worker and --master out"
        )
    from_file, given = _read_config(known)
    servers = make_config(from_file, {k: v for k, v in given.items() if k == "servers"}).servers
    hosts, task = found or find_scheduled(os.environ, servers=servers, port=known.port)
    assert task is not None
    rank = hosts.rank_of(task.role, task.index) if task.role in ("master", "worker") else None
    if rank != 0:
        mine = () if task.role == "ps" else LOCAL_OPTIONS
        for name in set(options()) - set(mine):
            vars(known).pop(name, None)
        known.resume = known.config = known.watch_at = None
        known.watch = False
    if task.role != "ps":
        for name in OF_SERVERS:
            vars(known).pop(name, None)
    return _role_by_hand(known, hosts, task.role, task.index)


def _which_role(known: argparse.Namespace, task: Task | None) -> tuple[str, int]:
    role, index = known.role, getattr(known, "index", None)
    if role is None and task is not None:
        role, index = task.role, task.index
    if role not in ROLES:
        what = "which role?" if role is None else f"unknown role {role!r};"
        raise ConfigError(f"{what} {', '.join(ROLES)}")
    return role, index or 0


def _endpoint(known: argparse.Namespace, hosts: Hosts) -> Any:
    from offbeat.cluster.endpoint import Endpoint

    return Endpoint(hosts=hosts, terms=_terms(known), start_timeout_s=known.start_timeout)


def _role_by_hand(known: argparse.Namespace, hosts: Hosts, role: str, index: int) -> int:
    from_file, given = _read_config(known)
    rank = None
    if role == "master" or (role == "worker" and not known.join):
        rank = hosts.rank_of(role, index)
    is_master = rank == 0
    _check_role_flags(known, role, is_master, [*given, *from_file])
    if role == "ps":
        hosts.where(role, index)
    if is_master:
        make_config(from_file, given)  # what is wrong with the flags shows before torch loads
    from offbeat.cli import roles
    from offbeat.run.progress import say

    endpoint = _endpoint(known, hosts)
    if is_master:
        resume = known.resume
        if resume is None and known.role == AUTO:
            resume = roles.find_former(given, from_file)
        with signals_as_ctrl_c(), page_beside(known, endpoint.terms, _say_aside) as beside:
            result = roles.master(endpoint, given, from_file, resume, callbacks_of(beside))
        for line in _result_lines(result.summary):
            say(line)
        return INTERRUPTED if result.interrupted else 0
    if role == "ps":
        stopped = roles.serve(endpoint, index, **_of_server(known))
    elif role == "worker":
        done, stopped = roles.work(endpoint, rank, given, scores=known.score)
        for line in _lines(done.metric_name, done.scores, done.time_s, done.loss):
            say(line)
        if known.role == AUTO and not done.is_over:
            return INTERRUPTED  # a Job starts it again, and the run may go on
    else:
        stopped = roles.score(endpoint, given)
    return INTERRUPTED if stopped else 0


def _of_server(known: argparse.Namespace) -> dict[str, str | None]:
    """What a server that is started by hand is told here."""
    return {"bind": getattr(known, "bind", None), "journal": getattr(known, "journal_dir", None)}


def _check_role_flags(
    known: argparse.Namespace, role: str, is_master: bool, names: Sequence[str]
) -> None:
    """`names`: of all options of train that were given."""
    joins = getattr(known, "join", False)
    if joins and role != "worker":
        raise ConfigError(f"only a worker can join, not a {role}")
    if joins and "index" in vars(known):
        raise ConfigError("--join comes as one more than the cluster lists: leave --index out")
    if "bind" in vars(known) and role != "ps":
        raise ConfigError(f"--bind is for servers: a {role} listens nowhere")
    if "journal_dir" in vars(known) and role != "ps":
        raise ConfigError(f"--journal-dir is for servers: a {role} keeps no journal")
    allowed = options() if is_master else () if role == "ps" else LOCAL_OPTIONS
    for name in names:
        if name not in allowed:
            raise ConfigError(f"{flag(name)} is for the master, who tells the others")
    if _is_watched(known) and not is_master:
        raise ConfigError("--watch is for the master, who keeps the run's folder")
    if known.resume is not None and not is_master:
        raise ConfigError("--resume is for the master, who keeps the run's folder")


def _find_hosts(known: argparse.Namespace) -> tuple[Hosts, Task | None] | None:
    return find_hosts(
        os.environ,
        file=known.file,
        ps=known.ps_at,
        worker=known.worker_at,
        master=known.master_at,
    )


def _terms(known: argparse.Namespace) -> Terms:
    files = ("token_file", "tls_cert", "tls_key", "tls_ca")
    if known.token_file is not None:
        path = Path(known.token_file).expanduser()
        if path.is_file() and path.stat().st_mode & stat.S_IROTH:
            _say_aside(f"offbeat: everybody here can read {path}: chmod 600 {path}")
    return load_terms(os.environ, **{name: getattr(known, name) for name in files})


def _cluster(known: argparse.Namespace) -> int:
    found = _find_hosts(known)
    if found is None:
        raise ConfigError("which cluster? offbeat cluster check cluster.toml")
    from offbeat.cli import roles

    return 0 if roles.check(found[0], _terms(known)) else 1


def _token(known: argparse.Namespace) -> int:
    print(secrets.token_urlsafe(32))
    return 0


def _role_of_engine(known: argparse.Namespace) -> int:
    """A process that an engine started: no line goes to the console, all stands in its log."""
    if "run_dir" not in vars(known):
        raise ConfigError(
            "a role belongs to a cluster: name it with --cluster cluster.toml, or --ps and --worker"
        )
    control = Control.from_environment()
    control.start()
    is_shown = False
    try:
        from offbeat.loops import process as of_script
        from offbeat.roles.process import run_process
        from offbeat.run.rundir import RunFolder

        config, described = RunFolder(Path(known.run_dir)).read_config()
        role, index, script = known.role, getattr(known, "index", 0), described.get("script")
        is_shown = script is not None and role == "master"  # what went wrong the engine says
        if script is None:
            run_process(config, role, index, control)
        else:
            of_script.run_process(config, role, index, script, control)
    except BaseException as error:  # also a KeyboardInterrupt, which here is the recipe's own
        control.fail(error)
        if isinstance(error, OffbeatError) and not is_shown:
            raise
        return 1
    finally:
        control.close()
    return 0


def _fork_server() -> int:
    """Another process of an engine's: its children leave it here, and are roles from then on."""
    from offbeat.engines import forking

    command = forking.serve()
    forking.at_exit.code = 0 if command is None else main(command)
    return forking.at_exit.code


def _data(known: argparse.Namespace) -> int:
    data_dir = Path(known.data_dir).expanduser()
    if known.action == "list":
        for dataset in DATASETS.values():
            folder = data_dir / dataset.folder
            found = [
                (folder / file.name).exists() or (folder / f"{file.name}.gz").exists()
                for file in dataset.files
            ]
            state = "there" if all(found) else "in part" if any(found) else "-"
            megabytes = sum(file.size for file in dataset.files) / 1e6
            print(f"{dataset.name:14} {state:8} {megabytes:4.0f} MB  {dataset.about}")
        return 0
    from offbeat.data import fetch
    from offbeat.run.progress import make_meter, say

    if known.action == "verify":
        dataset = find_dataset(known.name)
        states = {f.name: fetch.state_of(data_dir / dataset.folder, f) for f in dataset.files}
        for name, state in states.items():
            print(f"{name}  {state}")
        return 0 if set(states.values()) == {fetch.THERE} else 1
    source = Path(known.source).expanduser() if known.source else None
    with signals_as_ctrl_c(), make_meter() as meter:
        fetch.get(known.name, data_dir, source=source, say=say, meter=meter)
    return 0


def _bench_links(known: argparse.Namespace) -> int:
    given = {k: v for k, v in vars(known).items() if k not in ("command", "benchmark", "into")}
    with signals_as_ctrl_c():
        from offbeat.bench import link_tables, links

        if known.into is not None:
            link_tables.around(Path(known.into))  # what is wrong with it shows before anything runs
        lines = links.links(**given)
        print(*lines, sep="\n")
        if known.into is not None:
            link_tables.put_into(Path(known.into), lines)
    return 0


def _bench(known: argparse.Namespace) -> int:
    if known.benchmark == "links":
        return _bench_links(known)
    given = {k: v for k, v in vars(known).items() if k not in ("command", "benchmark", "json")}
    for discipline in given.get("disciplines", ()):
        make_config({"discipline": discipline})  # what is wrong with it shows before torch loads
    for file in (known.json, given.get("plot")):
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ConfigError(f"cannot write {file}: there is no such folder")
    with signals_as_ctrl_c():
        from offbeat.bench import (
            durable,
            engines,
            exchange,
            gpu,
            launch,
            long,
            network,
            norm,
            peers,
            report,
            simulate,
            start,
            tables,
            train,
            watch,
        )

        kinds: dict[str, Callable[..., Any]]
        kinds = {"exchange": exchange.exchange, "train": train.train, "norm": norm.norm}
        kinds |= {"network": network.network, "report": report.report}
        kinds |= {
            "durable": durable.durable,
            "engines": engines.engines,
            "start": start.start,
            "long": long.long,
            "gpu": gpu.gpu,
            "launch": launch.bench_launch,
            "peers": peers.peers,
            "simulate": simulate.bench_simulate,
            "watch": watch.watch,
        }
        rows = kinds[known.benchmark](**given)
    given = {k: v for k, v in given.items() if v is not None}
    print(tables.machine())
    print(*tables.table(rows), sep="\n")
    print(f"median (min..max), n = {known.rounds} rounds")
    if known.json is not None:
        found = {"benchmark": known.benchmark, "options": given, "machine": tables.machine()}
        found["rows"] = tables.figures(rows)
        Path(known.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


_COMMANDS = {
    "train": _train,
    "compare": _compare,
    "launch": _launch,
    "watch": _watch,
    "report": _report,
    "eval": _eval,
    "replay": _replay,
    "simulate": _simulate,
    "export": _export,
    "role": _role,
    "cluster": _cluster,
    "token": _token,
    "data": _data,
    "bench": _bench,
}


def _result_lines(summary: Mapping[str, Any]) -> list[str]:
    """The last lines on the console."""
    name, found = summary["metric"], dict(summary.get("test_scores", {}))
    if summary["metric_is_nan"] or summary["test_metric"] is not None:
        found[name] = summary["test_metric"]
    scores = {key: math.nan if value is None else value for key, value in found.items()}
    lines = _lines(name, scores, summary["total_time_s"], summary["final_cost"])
    best = summary.get("best")
    if summary.get("keeps_best") and best is not None:
        lines.append(f"Best: {best['metric']:.4f} at version {best['version']}")
    return lines


def launch_line(summary: Mapping[str, Any], run_dir: Path) -> str:
    """How a launched run went, when its script has had its own say."""
    stale = summary["staleness"]["mean"]
    staleness = "" if stale is None else f", staleness {stale:.2f}"
    known = {name: value for name, value in summary["test_scores"].items() if value is not None}
    scores = "".join(f", test {name} {value:.4f}" for name, value in known.items())
    count, refused = summary["gradients"], summary["rejected"]
    gradients = f"{count} gradients" if count else "no gradient: the script made no step"
    if refused:
        gradients += f" ({refused} of them refused, as not finite)"
    return (
        f"offbeat: {summary['status']}: {gradients} in "
        f"{summary['total_time_s']:.1f} s{staleness}{scores} -> {run_dir}"
    )


def _lines(name: str, scores: Mapping[str, float], time_s: float, cost: float | None) -> list[str]:
    """The last three are those that the distributed MNIST seed ends with; `name` is the metric that
    they tell."""
    lines = [_score_line(other, scores[other]) for other in scores if other != name]
    lines += [_score_line(name, scores[name])] if name in scores else []
    lines.append(f"Total Time: {time_s:.2f}s")
    if cost is not None and math.isfinite(cost):
        lines.append(f"Final Cost: {cost:.4f}")
    return lines


def _score_line(name: str, value: float) -> str:
    if name in HIGHER_IS_BETTER:
        return f"Test-{name.capitalize()}: {value:.4f}"
    return f"Test-Metric: {value:.4f} ({name})"
