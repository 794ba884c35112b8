"""The command `offbeat`: flags and printing, nothing else.

    offbeat train --discipline lock-free --workers 4
    offbeat train --resume RUN
    offbeat compare --disciplines sync,lock-free --workers 1,2 --out DIR
    offbeat report RUN_OR_DIR
    offbeat eval RUN --follow
    offbeat export RUN model.safetensors
    offbeat role worker --index 1 --cluster cluster.toml
    offbeat data get cifar10
    offbeat bench exchange

Exit codes: 0 done; 1 the run failed; 2 something was wrong with what was asked for; 130 stopped by
Ctrl-C, SIGTERM or SIGHUP.
"""

import argparse
import contextlib
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
from typing import Any, NoReturn

from offbeat import grid
from offbeat.config import (
    LOCAL_OPTIONS,
    ROLES,
    make_config,
    not_overruled,
    options,
    read_config_file,
    yes_or_no,
)
from offbeat.control import CONTROL_VARIABLE, Control
from offbeat.data.catalog import DATASETS, find_dataset
from offbeat.errors import ConfigError, OffbeatError, nearest
from offbeat.hosts import Hosts, Task, find_hosts
from offbeat.version import __version__

INTERRUPTED = 130
TRANSPORTS = ("unix", "tcp", "inproc")
WAYS = ("tcp", "gloo", "pyzmq", "tls")
BENCH_RECIPES = ("mnist-sigmoid", "convnet")
BENCH_DISCIPLINES = ("sync", "apply-reply", "reply-apply", "lock-free", "bounded:1")


class _Parser(argparse.ArgumentParser):
    """Answers a wrong command line with one line that names the remedy."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        parser, commands = _make_parser()
        known, unknown = parser.parse_known_args(arguments)
        if known.command is None:
            parser.print_help()
            raise SystemExit(2)
        if unknown:
            within = getattr(known, "benchmark", None) or getattr(known, "action", None)
            name = " ".join(filter(None, (known.command, within)))
            raise ConfigError(_unknown(unknown[0], commands[name], name))
        return _COMMANDS[known.command](known)
    except OffbeatError as error:
        print(f"offbeat: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("offbeat: interrupted", file=sys.stderr)
        return INTERRUPTED


@contextlib.contextmanager
def _signals_as_ctrl_c() -> Iterator[None]:
    """SIGTERM (a batch system's) and SIGHUP (a closed terminal's) end a run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _unknown(argument: str, command: argparse.ArgumentParser, name: str) -> str:
    flag = argument.partition("=")[0]
    flags = [f for action in command._actions for f in action.option_strings]
    hint = nearest(flag, flags)
    hint = hint if hint.startswith("did") else f"see offbeat {name} --help"
    return f"unknown argument {flag!r}; {hint}"


def _read_config(known: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options out of a configuration file, and those given as flags, which beat them."""
    given = {k: v for k, v in vars(known).items() if k in options()}
    from_file = read_config_file(known.config) if known.config else {}
    return not_overruled(from_file, given), given


def _make_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = _Parser(
        prog="offbeat",
        description="Train PyTorch models with parameter servers; the update discipline is a flag.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"offbeat {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    def command(name: str, help: str, description: str, **more: Any) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=help, description=description, allow_abbrev=False, **more
        )

    train = command(
        "train",
        "train a recipe",
        "Train a recipe. Without any flag: a small convnet on the built-in data.",
        argument_default=argparse.SUPPRESS,
    )
    train.add_argument(
        "--config", metavar="FILE", default=None, help="options from a TOML or JSON file"
    )
    train.add_argument(
        "--resume",
        metavar="RUN",
        default=None,
        help="go on with the run in this folder, from its newest checkpoint",
    )
    for name, option in options().items():
        _add_option(train, name, option.default, option.metadata)

    _add_compare(
        command(
            "compare",
            "train in several ways, and report which does best",
            "Train a recipe in every combination of disciplines, workers, servers and seeds, one "
            "run after the other, and write a report.",
            argument_default=argparse.SUPPRESS,
        )
    )
    report = command(
        "report",
        "write report.html and report.md about runs",
        "Write report.html and report.md: about one run, or about several side by side.",
    )
    report.add_argument(
        "runs", metavar="RUN_OR_DIR", nargs="+", help="a run's folder, or one that holds runs"
    )
    report.add_argument(
        "--out", metavar="DIR", help="where to write (default: the only folder given, or here)"
    )
    _add_target(report)

    export = command(
        "export", "write a run's weights to a file", "Write a run's newest weights as safetensors."
    )
    export.add_argument("run", metavar="RUN", help="a run's folder")
    export.add_argument("file", metavar="FILE", help="where to write, as model.safetensors")
    export.add_argument("--ema", action="store_true", help="the moving average of the weights")

    scoring = command(
        "eval",
        "score a run's newest checkpoint",
        "Score the newest checkpoint of a run on its test data; never trains.",
    )
    scoring.add_argument("run", metavar="RUN", help="a run's folder")
    how = scoring.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="the newest one, and no more (default)")
    how.add_argument("--follow", action="store_true", help="each newest one until the run is over")
    for name in ("data_dir", "device"):
        option = options()[name]
        _add_option(scoring, name, None, option.metadata)

    _add_role(
        command(
            "role",
            "be one process of a run",
            "Be one process of a run that spans machines: start a server (ps), the master, a "
            "worker or an evaluator on each. Only the master takes the options of train; the "
            "others learn them from it. In any order: whoever comes early waits.",
            argument_default=argparse.SUPPRESS,
        )
    )
    cluster = command("cluster", "look at a cluster", "Look at a cluster.")
    of_cluster = cluster.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=_Parser
    )
    checking = of_cluster.add_parser(
        "check",
        help="who is reachable, with which version and fingerprint",
        description="Say who is reachable, with which version and fingerprint.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    checking.add_argument("file", nargs="?", metavar="FILE", default=None, help="cluster.toml")
    _add_place(checking, with_file=False)
    command("token", "make a token for a cluster", "Print a token that nobody can guess.")

    data = command(
        "data",
        "fetch datasets, and check them",
        "Fetch the datasets that recipes train on, and check what is there.",
    )
    of_data = data.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=_Parser
    )
    _add_data_actions(of_data.add_parser)

    bench = command(
        "bench",
        "measure exchanges or training on this machine",
        "Measure exchanges or training on this machine, beside something that is measured with it.",
    )
    kinds = bench.add_subparsers(
        dest="benchmark", metavar="WHAT", required=True, parser_class=_Parser
    )
    _add_benchmarks(kinds.add_parser)
    nested = {f"bench {k}": v for k, v in kinds.choices.items()}
    nested |= {f"data {k}": v for k, v in of_data.choices.items()}
    nested |= {f"cluster {k}": v for k, v in of_cluster.choices.items()}
    return parser, {**commands.choices, **nested}


def _add_compare(parser: argparse.ArgumentParser) -> None:
    several_counts = _several(_count)
    axes: list[tuple[str, Callable[[str], Any], Sequence[object], str]] = [
        ("disciplines", _several(str), grid.DISCIPLINES, "sync:B has B backup workers"),
        ("workers", several_counts, grid.WORKERS, "how many workers, each number in turn"),
        ("servers", several_counts, grid.SERVERS, "how many servers, each number in turn"),
    ]
    for name, kind, default, text in axes:
        shown = ",".join(map(str, default))
        parser.add_argument(
            f"--{name}", metavar="LIST", type=kind, help=f"{text} (default: {shown})"
        )
    parser.add_argument(
        "--seeds",
        metavar="N",
        type=_count,
        help=f"how many, from --seed on (default: {grid.SEEDS})",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        default=None,
        help="where the runs and the report go (default: runs/<time>-<recipe>-compare)",
    )
    _add_target(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        default=False,
        help="go on with the comparison in --out; what has finished is kept",
    )
    parser.add_argument(
        "--config", metavar="FILE", default=None, help="options from a TOML or JSON file"
    )
    for name, option in options().items():
        if name not in grid.NOT_FOR_A_GRID:
            _add_option(parser, name, option.default, option.metadata)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        metavar="X",
        type=_number,
        default=None,
        help="how good is good enough: report the time to it (default: the highest whole percent "
        "of accuracy that every run reached)",
    )


def _add_role(role: argparse.ArgumentParser) -> None:
    known = ", ".join(ROLES)
    role.add_argument(
        "role",
        nargs="?",
        metavar="ROLE",
        default=None,
        help=f"{known} (default: what TF_CONFIG says)",
    )
    role.add_argument(
        "--index", type=_index, metavar="I", help="which server or worker (default: 0)"
    )
    _add_place(role)
    role.add_argument("--bind", metavar="HOST", help="ps: listen there instead of at its address")
    role.add_argument(
        "--join",
        action="store_true",
        default=False,
        help="worker: come as one more than the cluster lists (asynchronous, --split shared)",
    )
    role.add_argument(
        "--score",
        action="store_true",
        default=False,
        help="worker: find out in the end how well the parameters do that it has",
    )
    role.add_argument(
        "--resume", metavar="RUN", default=None, help="master: go on with the run in this folder"
    )
    role.add_argument(
        "--start-timeout",
        metavar="S",
        type=_size,
        default=600.0,
        help="how many seconds to wait for the others (default: 600)",
    )
    role.add_argument(
        "--config", metavar="FILE", default=None, help="master: options from a TOML or JSON file"
    )
    for name, option in options().items():
        if name != "engine":
            _add_option(role, name, option.default, option.metadata)


def _add_place(parser: argparse.ArgumentParser, *, with_file: bool = True) -> None:
    """Where the others are, and how to meet them."""
    if with_file:
        parser.add_argument(
            "--cluster", dest="file", metavar="FILE", default=None, help="cluster.toml"
        )
    addresses = _several(str)
    for flag, text in (
        ("ps", "the servers' addresses, as host:port,host:port, instead of a file"),
        ("worker", "the workers'"),
    ):
        parser.add_argument(
            f"--{flag}", dest=f"{flag}_at", metavar="LIST", type=addresses, default=[], help=text
        )
    parser.add_argument(
        "--master", dest="master_at", metavar="ADDRESS", default=None, help="the master's"
    )
    for flag, text in (
        ("token-file", "holds the token that all of them know (or: OFFBEAT_TOKEN)"),
        ("tls-cert", "this machine's certificate"),
        ("tls-key", "and its key"),
        ("tls-ca", "whom to believe"),
    ):
        parser.add_argument(f"--{flag}", metavar="FILE", default=None, help=text)


def _index(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no index: 0, 1, 2, ...")
    return int(text)


def _add_data_actions(add: Callable[..., argparse.ArgumentParser]) -> None:
    known = ", ".join(DATASETS)
    described = {
        "list": "what can be fetched, and what is there",
        "get": "fetch a dataset, or take it from files at hand",
        "verify": "compare a dataset's files with their pinned SHA-256",
    }
    parsers = {
        name: add(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        for name, text in described.items()
    }
    for name in ("get", "verify"):
        parsers[name].add_argument("name", metavar="NAME", help=known)
    parsers["get"].add_argument(
        "--from",
        dest="source",
        metavar="PATH",
        help="a folder with the files, or an archive (tar or zip) of them",
    )
    for parser in parsers.values():
        where = options()["data_dir"].default
        text = f"where datasets lie (default: {where})"
        parser.add_argument("--data-dir", metavar="DIR", default=where, help=text)


def _add_benchmarks(add: Callable[..., argparse.ArgumentParser]) -> None:
    exchange = add(
        "exchange",
        help="one worker and one server, beside two plain copies of the same size",
        description="What an exchange costs: a gradient up, an update, parameters back.",
        allow_abbrev=False,
    )
    sizes = "MB each way, one size or several (default: 4.3,16)"
    exchange.add_argument(
        "--sizes", metavar="MB", type=_several(_size), default="4.3,16", help=sizes
    )
    exchange.add_argument("--rounds", metavar="N", type=_count, default=15, help="default: 15")
    exchange.add_argument(
        "--transports",
        metavar="LIST",
        type=_several(_one_of(TRANSPORTS)),
        default=",".join(TRANSPORTS),
        help=f"default: {','.join(TRANSPORTS)}",
    )
    train = add(
        "train",
        help="gradients per second, beside workers that exchange nothing and torch's DDP",
        description="Gradients per second of each discipline, on made-up data.",
        allow_abbrev=False,
    )
    known = f"{' or '.join(BENCH_RECIPES)} (default: {BENCH_RECIPES[0]})"
    train.add_argument("--recipe", choices=BENCH_RECIPES, default=BENCH_RECIPES[0], help=known)
    train.add_argument("--workers", metavar="N", type=_count, default=2, help="default: 2")
    train.add_argument("--servers", metavar="N", type=_count, default=1, help="default: 1")
    train.add_argument("--batch-size", metavar="N", type=_count, help="default: the recipe's")
    seconds = "how long each one trains in a round (default: 6)"
    train.add_argument("--seconds", metavar="S", type=_size, default=6.0, help=seconds)
    train.add_argument("--rounds", metavar="N", type=_count, default=3, help="default: 3")
    train.add_argument(
        "--disciplines",
        metavar="LIST",
        type=_several(str),
        default=",".join(BENCH_DISCIPLINES),
        help=f"default: {','.join(BENCH_DISCIPLINES)}",
    )
    norm = add(
        "norm",
        help="a CIFAR step with the fast local response normalisation, beside torch's",
        description="What the fast local response normalisation gains on the CPU, one thread.",
        allow_abbrev=False,
    )
    norm.add_argument("--batch-size", metavar="N", type=_count, default=128, help="default: 128")
    norm.add_argument("--rounds", metavar="N", type=_count, default=7, help="default: 7")
    network = add(
        "network",
        help="payloads between two processes over TCP, beside gloo and pyzmq",
        description="Payloads there and back between two processes, over TCP on loopback.",
        allow_abbrev=False,
    )
    sizes = "MB each way, one size or several (default: 4.3,16,100)"
    network.add_argument(
        "--sizes", metavar="MB", type=_several(_size), default="4.3,16,100", help=sizes
    )
    network.add_argument("--rounds", metavar="N", type=_count, default=7, help="default: 7")
    network.add_argument(
        "--ways",
        metavar="LIST",
        type=_several(_one_of(WAYS)),
        default=",".join(WAYS),
        help=f"default: {','.join(WAYS)}",
    )
    report = add(
        "report",
        help="time and memory of a report, beside parsing its files",
        description="How long a report about many made-up runs takes, and how much memory.",
        allow_abbrev=False,
    )
    report.add_argument("--runs", metavar="N", type=_count, default=30, help="default: 30")
    of_each = "of each run (default: 10000)"
    report.add_argument("--gradients", metavar="N", type=_count, default=10_000, help=of_each)
    report.add_argument("--rounds", metavar="N", type=_count, default=3, help="default: 3")
    for parser in (exchange, train, norm, network, report):
        parser.add_argument("--json", metavar="FILE", help="write every round's figures here too")


def _several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part.strip()) for part in text.split(",")]


def _one_of(known: Sequence[str]) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"unknown {text!r}; {nearest(text, known)}")
        return text

    return check


def _size(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")


def _number(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(float(text)):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _add_option(
    parser: argparse.ArgumentParser, name: str, default: Any, metadata: Mapping[str, Any]
) -> None:
    help_text = metadata["help"]
    if metadata["kind"] is yes_or_no:
        parser.add_argument(_flag(name), action=argparse.BooleanOptionalAction, help=help_text)
        return
    if metadata["choices"]:
        help_text += f": {', '.join(metadata['choices'])}"
    if default is not None:
        help_text += f" (default: {default})"
    parser.add_argument(_flag(name), metavar=name.rpartition("_")[2].upper(), help=help_text)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _train(known: argparse.Namespace) -> int:
    if known.resume is not None and known.config is not None:
        raise ConfigError("--resume takes the configuration of the run; give flags, not --config")
    if known.resume is not None and "run_dir" in vars(known):
        raise ConfigError("--resume goes on in the run's own folder; leave --run-dir out")
    from_file, given = _read_config(known)
    config = make_config(from_file, given)  # what is wrong with the flags shows before torch loads
    with _signals_as_ctrl_c():
        from offbeat.api import resume_config, train_config
        from offbeat.progress import say

        if known.resume is not None:
            result = resume_config(Path(known.resume), given)
        else:
            result = train_config(config)
    for line in _result_lines(result.summary):
        say(line)
    if result.interrupted:
        print(
            f"offbeat: interrupted; go on with: offbeat train --resume {result.run_dir}",
            file=sys.stderr,
        )
        return INTERRUPTED
    return 0


def _compare(known: argparse.Namespace) -> int:
    from_file, given = _read_config(known)
    given = {**from_file, **{k: v for k, v in given.items() if k not in grid.AXES}}
    axes = {name: getattr(known, name) for name in grid.AXES if name in vars(known)}
    asked = grid.make_grid(given, axes, Path(known.out) if known.out and known.resume else None)
    if known.resume and known.out is None:
        raise ConfigError("--resume goes on with a comparison: say in which folder it is (--out)")
    grid.check_grid(asked, Path(known.out or "."))  # shows what is wrong before torch loads
    with _signals_as_ctrl_c():
        from offbeat.comparing import run_grid
        from offbeat.progress import say

        out = Path(known.out) if known.out else None
        done = run_grid(asked, out, known.target, resume=known.resume)
    for name, reason in done.failed.items():
        print(f"offbeat: {name} failed: {reason}", file=sys.stderr)
    say(f"wrote {done.report}")
    if done.interrupted:
        print(
            f"offbeat: interrupted; go on with: offbeat compare --resume --out "
            f"{shlex.quote(str(done.out))}",
            file=sys.stderr,
        )
        return INTERRUPTED
    return 1 if done.failed else 0


def _report(known: argparse.Namespace) -> int:
    from offbeat.progress import say
    from offbeat.report.write import write_report

    out = Path(known.out) if known.out else None
    for path in write_report([Path(run) for run in known.runs], out, target=known.target):
        say(f"wrote {path}")
    return 0


def _export(known: argparse.Namespace) -> int:
    from offbeat.api import export

    export(known.run, known.file, ema=known.ema)
    print(f"wrote {known.file}")
    return 0


def _eval(known: argparse.Namespace) -> int:
    with _signals_as_ctrl_c():
        from offbeat.api import evaluate
        from offbeat.progress import say

        evaluate(
            known.run, follow=known.follow, say=say, data_dir=known.data_dir, device=known.device
        )
    return 0


def _role(known: argparse.Namespace) -> int:
    if CONTROL_VARIABLE in os.environ:
        return _role_of_engine(known)
    found = _find_hosts(known)
    if found is None:
        return _role_of_engine(known)
    hosts, task = found
    role, index = known.role, getattr(known, "index", None)
    if role is None and task is not None:
        role, index = task.role, task.index
    if role not in ROLES:
        what = "which role?" if role is None else f"unknown role {role!r};"
        raise ConfigError(f"{what} {', '.join(ROLES)}")
    return _role_by_hand(known, hosts, role, index or 0)


def _role_by_hand(known: argparse.Namespace, hosts: Hosts, role: str, index: int) -> int:
    from_file, given = _read_config(known)
    is_master = role == "master"
    rank: int | None = None
    if role == "worker" and not known.join:
        rank = hosts.rank_of(role, index)
        is_master = rank == 0
    elif is_master:
        hosts.rank_of(role, index)
    if known.join and role != "worker":
        raise ConfigError(f"only a worker can join, not a {role}")
    if known.join and "index" in vars(known):
        raise ConfigError("--join comes as one more than the cluster lists: leave --index out")
    if "bind" in vars(known) and role != "ps":
        raise ConfigError(f"--bind is for servers: a {role} listens nowhere")
    if role == "ps":
        hosts.where(role, index)
    allowed = options() if is_master else () if role == "ps" else LOCAL_OPTIONS
    for name in [*given, *from_file]:
        if name not in allowed:
            raise ConfigError(f"{_flag(name)} is for the master, who tells the others")
    if known.resume is not None and not is_master:
        raise ConfigError("--resume is for the master, who keeps the run's folder")
    if is_master:
        make_config(from_file, given)  # what is wrong with the flags shows before torch loads
    from offbeat import byhand
    from offbeat.engines.cluster import Reach
    from offbeat.progress import say

    reach = Reach(hosts=hosts, terms=_terms(known), start_timeout_s=known.start_timeout)
    if is_master:
        with _signals_as_ctrl_c():
            result = byhand.master(reach, given, from_file, known.resume)
        for line in _result_lines(result.summary):
            say(line)
        return INTERRUPTED if result.interrupted else 0
    if role == "ps":
        stopped = byhand.serve(reach, index, getattr(known, "bind", None))
    elif role == "worker":
        done, stopped = byhand.work(reach, rank, given, scores=known.score)
        for line in _lines(done.metric_name, done.metric, done.time_s, done.loss):
            say(line)
    else:
        stopped = byhand.score(reach, given)
    return INTERRUPTED if stopped else 0


def _find_hosts(known: argparse.Namespace) -> tuple[Hosts, Task | None] | None:
    return find_hosts(
        os.environ,
        file=known.file,
        ps=known.ps_at,
        worker=known.worker_at,
        master=known.master_at,
    )


def _terms(known: argparse.Namespace) -> Any:
    from offbeat.transport.terms import load_terms

    files = ("token_file", "tls_cert", "tls_key", "tls_ca")
    if known.token_file is not None:
        path = Path(known.token_file).expanduser()
        if path.is_file() and path.stat().st_mode & stat.S_IROTH:
            print(f"offbeat: everybody here can read {path}: chmod 600 {path}", file=sys.stderr)
    return load_terms(os.environ, **{name: getattr(known, name) for name in files})


def _cluster(known: argparse.Namespace) -> int:
    found = _find_hosts(known)
    if found is None:
        raise ConfigError("which cluster? offbeat cluster check cluster.toml")
    from offbeat import byhand

    return 0 if byhand.check(found[0], _terms(known)) else 1


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
    try:
        from offbeat.roles.run import run_role
        from offbeat.rundir import RunFolder

        config, _ = RunFolder(Path(known.run_dir)).read_config()
        run_role(config, known.role, getattr(known, "index", 0), control)
    except (Exception, SystemExit) as error:
        control.fail(error)
        if isinstance(error, OffbeatError):
            raise
        return 1
    finally:
        control.close()
    return 0


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
    from offbeat.progress import make_meter, say

    if known.action == "verify":
        dataset = find_dataset(known.name)
        states = {f.name: fetch.state_of(data_dir / dataset.folder, f) for f in dataset.files}
        for name, state in states.items():
            print(f"{name}  {state}")
        return 0 if set(states.values()) == {fetch.THERE} else 1
    source = Path(known.source).expanduser() if known.source else None
    with _signals_as_ctrl_c(), make_meter() as meter:
        fetch.get(known.name, data_dir, source=source, say=say, meter=meter)
    return 0


def _bench(known: argparse.Namespace) -> int:
    given = {k: v for k, v in vars(known).items() if k not in ("command", "benchmark", "json")}
    for discipline in given.get("disciplines", ()):
        make_config({"discipline": discipline})  # what is wrong with it shows before torch loads
    if known.json is not None and not Path(known.json).absolute().parent.is_dir():
        raise ConfigError(f"cannot write {known.json}: there is no such folder")
    with _signals_as_ctrl_c():
        from offbeat import bench, netbench, reportbench

        kinds: dict[str, Callable[..., Any]]
        kinds = {"exchange": bench.exchange, "train": bench.train, "norm": bench.norm}
        kinds |= {"network": netbench.network, "report": reportbench.report}
        rows = kinds[known.benchmark](**given)
    given = {k: v for k, v in given.items() if v is not None}
    print(bench.machine())
    print(*bench.table(rows), sep="\n")
    print(f"median (min..max), n = {known.rounds} rounds")
    if known.json is not None:
        found = {"benchmark": known.benchmark, "options": given, "machine": bench.machine()}
        found["rows"] = bench.figures(rows)
        Path(known.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


_COMMANDS = {
    "train": _train,
    "compare": _compare,
    "report": _report,
    "eval": _eval,
    "export": _export,
    "role": _role,
    "cluster": _cluster,
    "token": _token,
    "data": _data,
    "bench": _bench,
}


def _result_lines(summary: Mapping[str, Any]) -> list[str]:
    """The last lines on the console, as the distributed MNIST seed ends."""
    name = "accuracy" if summary["test_accuracy"] is not None else summary["metric"]
    return _lines(name, summary["test_metric"], summary["total_time_s"], summary["final_cost"])


def _lines(name: str, metric: float | None, time_s: float, cost: float | None) -> list[str]:
    lines = []
    if metric is not None and name == "accuracy":
        lines.append(f"Test-Accuracy: {metric:.4f}")
    elif metric is not None:
        lines.append(f"Test-Metric: {metric:.4f} ({name})")
    lines.append(f"Total Time: {time_s:.2f}s")
    if cost is not None and math.isfinite(cost):
        lines.append(f"Final Cost: {cost:.4f}")
    return lines
