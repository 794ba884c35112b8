"""The flags of the command `offbeat`: a parser for each of its commands. What they do
is in commands.py.

Everything here shows in `--help`, and nothing here needs torch.
"""

import argparse
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from offbeat.bench import cells
from offbeat.comparison import grid
from offbeat.config import (
    CHECKPOINT_EVERY,
    LAUNCH_OPTIONS,
    ROLES,
    options,
    settings,
    texts,
    yes_or_no,
)
from offbeat.data.catalog import DATASETS
from offbeat.errors import ConfigError, nearest
from offbeat.version import __version__

TRANSPORTS = ("unix", "tcp", "inproc")
WAYS = ("tcp", "gloo", "pyzmq", "tls")
BENCH_RECIPES = ("mnist-sigmoid", "convnet")
PEER_RECIPES = ("mnist-sigmoid", "alexnet", "wide")
HELP_OF_SCRIPTS = {
    "checkpoint_every": f"commit a checkpoint every so many updates (default: {CHECKPOINT_EVERY})"
}
"""Where a flag means something else than in train."""
OWN_FLAGS = "the script's own flags go behind its name"
SIMULATED = ("fashion-cnn", "mnist-sigmoid", "apart")
PEERS = ("ddp", "hogwild", "rpc", "rpc-async", "ray", "ray-async")

Parsers = Mapping[str, argparse.ArgumentParser]


class Parser(argparse.ArgumentParser):
    """Answers a wrong command line with one line that names the remedy."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def make_parser() -> tuple[argparse.ArgumentParser, Parsers]:
    """The parser, and those of the commands by their names, as `train` and `bench network`."""
    parser = Parser(
        prog="offbeat",
        description="Train PyTorch models with parameter servers; the update discipline is a flag.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"offbeat {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    found: dict[str, argparse.ArgumentParser] = {}
    for name, (help_text, description, add) in COMMANDS.items():
        made = commands.add_parser(
            name, help=help_text, description=description, allow_abbrev=False
        )
        found[name] = made
        found |= {f"{name} {inner}": parser for inner, parser in (add(made) or {}).items()}
    return parser, found


def unknown(argument: str, command: argparse.ArgumentParser, name: str) -> str:
    """What to say to an argument that `command` does not know."""
    asked = argument.partition("=")[0]
    flags = [f for action in command._actions for f in action.option_strings]
    hint = nearest(asked, flags)
    hint = hint if hint.startswith("did") else f"see offbeat {name} --help"
    if name == "launch":
        return f"unknown argument {asked!r}; {_for_a_script(asked) or hint}; {OWN_FLAGS}"
    return f"unknown argument {asked!r}; {hint}"


def _for_a_script(asked: str) -> str:
    """Why a script that is launched is not given this; nothing: nobody is."""
    if asked == "-m":
        return "give the module's file"
    of_recipes = [flag(name) for name in options() if name not in LAUNCH_OPTIONS]
    is_one = asked.replace("--no-", "--") in of_recipes
    return "recipes take it, and a script does that itself" if is_one else ""


# -- commands --------------------------------------------------------------------------------------


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_beginning(parser)
    _add_watched(parser)
    _add_terms(parser)
    for name, option in options().items():
        _add_option(parser, name, option.default, option.metadata)


def _add_beginning(parser: argparse.ArgumentParser) -> None:
    """What a single run begins with."""
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument(
        "--config", metavar="FILE", default=None, help="options from a TOML or JSON file"
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        default=None,
        help="go on with the run in this folder, from its newest checkpoint",
    )


def _add_launch(parser: argparse.ArgumentParser) -> None:
    _add_beginning(parser)
    parser.add_argument(
        "--role",
        metavar="ROLE",
        default=None,
        help="in a cluster: be its ps, master or worker (default: what TF_CONFIG says)",
    )
    _add_index(parser)
    _add_place(parser)
    _add_meeting(parser)
    _add_watched(parser)
    for name, option in options().items():
        if name in LAUNCH_OPTIONS:
            about = {**option.metadata, "help": HELP_OF_SCRIPTS.get(name, option.metadata["help"])}
            _add_option(parser, name, option.default, about)
    _add_script(parser, "a Python file")


def _add_script(parser: argparse.ArgumentParser, help_text: str) -> None:
    parser.add_argument("script", metavar="SCRIPT", nargs="?", default=None, help=help_text)
    parser.add_argument(
        "arguments",
        metavar="...",
        nargs=argparse.REMAINDER,
        default=[],
        help="what the script is given",
    )


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.argument_default = argparse.SUPPRESS
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
        "--set",
        action="append",
        metavar="NAME=LIST",
        help="parameters of a recipe that is a function, each value in turn, as width=64,128",
    )
    parser.add_argument(
        "--vary",
        action="append",
        metavar="NAME=LIST",
        help="any of the options below, each value in turn, as rule=mean,dana:0.9 or "
        "local_steps=default,8; default: as if it were not given",
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
    _add_watched(parser)
    _add_terms(parser)
    parser.add_argument(
        "--config", metavar="FILE", default=None, help="options from a TOML or JSON file"
    )
    for name, option in options().items():
        if name not in grid.NOT_FOR_A_GRID:
            _add_option(parser, name, option.default, option.metadata)
    _add_script(parser, "behind --: a Python file, which is launched in each run, not a recipe")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="RUN_OR_DIR", nargs="+", help="a run's folder, or one that holds runs"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="where to write (default: the only folder given, or here)"
    )
    _add_target(parser)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        metavar="X",
        type=_target,
        default=None,
        help="how good is good enough: report the time to it; NAME=X judges by that metric "
        "(default: the highest whole percent of accuracy that every run reached)",
    )


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's folder")
    parser.add_argument(
        "file", metavar="FILE", help="where to write the safetensors, as model.safetensors"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--ema", action="store_true", help="the moving average of the weights")
    which.add_argument("--best", action="store_true", help="what was scored best (--keep-best)")


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's folder")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="the newest one, and no more (default)")
    how.add_argument("--follow", action="store_true", help="each newest one until the run is over")
    how.add_argument("--best", action="store_true", help="what was scored best (--keep-best)")
    for name in ("recipe", "data_dir", "device"):
        _add_option(parser, name, None, options()[name].metadata)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's folder")
    part = parser.add_mutually_exclusive_group()
    part.add_argument(
        "--to", metavar="VERSION", type=_index, help="stop there (default: where the run ended)"
    )
    part.add_argument(
        "--until-nan",
        action="store_true",
        help="stop at the first loss or gradient that is not finite, and say where that began",
    )
    part.add_argument(
        "--without-worker",
        metavar="RANK",
        type=_index,
        help="leave out what this one has brought; the others do what they did",
    )
    parser.add_argument("--out", metavar="FILE", help="write the weights there, as safetensors")
    for name in ("recipe", "data_dir"):
        _add_option(parser, name, None, options()[name].metadata)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's folder, from which times are drawn")
    on_top = "each in turn, on top of what the run's times have in them (default: none)"
    axes: list[tuple[str, Callable[[str], Any], str]] = [
        ("workers", _count, "how many workers, each number in turn (default: the run's)"),
        ("servers", _count, "how many servers, each number in turn (default: the run's)"),
        ("disciplines", str, "as in train, each in turn; all: Offbeat's own (default: the run's)"),
        ("rates", _link_rate, f"Mbit/s of each server's link, each way, or inf, {on_top}"),
        ("delays", _delay, f"ms, there and back, {on_top}"),
    ]
    for name, kind, text in axes:
        parser.add_argument(f"--{name}", metavar="LIST", type=_several(kind), help=text)
    parser.add_argument(
        "--slow-worker",
        metavar="WORKER",
        help="1:3x has worker 1 take three times as long for each step, 1:1x as long as it takes "
        "(default: the run's)",
    )
    parser.add_argument(
        "--cores",
        metavar="N",
        type=_cores,
        help="all workers and servers share so many, each computing on as many at a time as it has "
        "threads; inf: each has its own, as on machines of their own (default: what the run had, "
        "where all of it was on one machine's; else inf)",
    )
    parser.add_argument(
        "--steps",
        metavar="N",
        type=_count,
        help="gradients per worker that figures are made of (default: 20, or 20000 in all)",
    )
    parser.add_argument("--seed", metavar="N", type=_index, default=0, help="default: 0")
    out = "write simulation.html, .md and .json there"
    parser.add_argument("--out", metavar="DIR", help=out)


def _add_role(parser: argparse.ArgumentParser) -> None:
    parser.argument_default = argparse.SUPPRESS
    known = ", ".join(ROLES)
    parser.add_argument(
        "role",
        nargs="?",
        metavar="ROLE",
        default=None,
        help=f"{known}; auto: what Slurm or a pod's manifest says (default: what TF_CONFIG says)",
    )
    _add_index(parser)
    _add_place(parser)
    parser.add_argument(
        "--port",
        metavar="N",
        type=_index,
        default=None,
        help="auto, in Slurm: where the first server listens (default: by the step's number)",
    )
    parser.add_argument(
        "--join",
        action="store_true",
        default=False,
        help="worker: come as one more than the cluster lists (asynchronous, --split shared)",
    )
    parser.add_argument(
        "--score",
        action="store_true",
        default=False,
        help="worker: find out in the end how well the parameters do that it has",
    )
    parser.add_argument(
        "--resume", metavar="RUN", default=None, help="master: go on with the run in this folder"
    )
    _add_meeting(parser)
    _add_watched(parser)
    parser.add_argument(
        "--config", metavar="FILE", default=None, help="master: options from a TOML or JSON file"
    )
    for name, option in options().items():
        if name != "engine":
            _add_option(parser, name, option.default, option.metadata)


def _add_cluster(parser: argparse.ArgumentParser) -> Parsers:
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=Parser
    )
    check = actions.add_parser(
        "check",
        help="who is reachable, with which version and fingerprint",
        description="Say who is reachable, with which version and fingerprint.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    check.add_argument("file", nargs="?", metavar="FILE", default=None, help="cluster.toml")
    _add_place(check, with_file=False)
    return {"check": check}


def _add_index(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--index", type=_index, metavar="I", help="which server or worker (default: 0)"
    )


def _add_meeting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bind", metavar="HOST", help="ps: listen there instead of at its address")
    parser.add_argument(
        "--journal-dir",
        metavar="DIR",
        help="ps: where to keep the journal of a run with --ack durable, on a disk of this machine",
    )
    parser.add_argument(
        "--start-timeout",
        metavar="S",
        type=_size,
        default=600.0,
        help="how many seconds to wait for the others (default: 600)",
    )


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
    _add_terms(parser, "holds the token that all of them know (or: OFFBEAT_TOKEN)")


def _add_terms(
    parser: argparse.ArgumentParser,
    token: str = "of the page: holds the token that is asked for (or: OFFBEAT_TOKEN)",
) -> None:
    """By what those at the other end of a connection are known."""
    for flag, text in (
        ("token-file", token),
        ("tls-cert", "this machine's certificate"),
        ("tls-key", "and its key"),
        ("tls-ca", "whom to believe"),
    ):
        parser.add_argument(f"--{flag}", metavar="FILE", default=None, help=text)


def _add_watched(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--watch",
        action="store_true",
        default=False,
        help="serve a page meanwhile that shows what happens (offbeat watch)",
    )
    parser.add_argument(
        "--watch-at",
        metavar="HOST:PORT",
        default=None,
        help="and where; elsewhere than on loopback it asks for the token "
        "(default: 127.0.0.1, the first free port from 6810 on)",
    )


def _add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="RUN|DIR|ADDRESS",
        help="a run's folder, one that holds runs or a comparison, or where such a page is served: "
        "https://HOST:PORT",
    )
    parser.add_argument("--text", action="store_true", help="show it in this terminal")
    parser.add_argument(
        "--at",
        metavar="HOST:PORT",
        default=None,
        help="serve the page there; elsewhere than on loopback it asks for the token "
        "(default: 127.0.0.1, the first free port from 6810 on)",
    )
    _add_terms(parser)


def _add_data(parser: argparse.ArgumentParser) -> Parsers:
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=Parser
    )
    known = ", ".join(DATASETS)
    described = {
        "list": "what can be fetched, and what is there",
        "get": "fetch a dataset, or take it from files at hand",
        "verify": "compare a dataset's files with their pinned SHA-256",
    }
    parsers = {
        name: actions.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
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
    return parsers


def _add_bench(parser: argparse.ArgumentParser) -> Parsers:
    kinds = parser.add_subparsers(
        dest="benchmark", metavar="WHAT", required=True, parser_class=Parser
    )
    for name, (help_text, description, rounds, add) in BENCHMARKS.items():
        made = kinds.add_parser(name, help=help_text, description=description, allow_abbrev=False)
        add(made)
        if rounds is None:
            continue
        made.add_argument(
            "--rounds", metavar="N", type=_count, default=rounds, help=f"default: {rounds}"
        )
        made.add_argument("--json", metavar="FILE", help="write every round's figures here too")
    return dict(kinds.choices)


def _add_bench_exchange(parser: argparse.ArgumentParser) -> None:
    _add_sizes(parser, "4.3,16")
    _add_list(parser, "transports", _one_of(TRANSPORTS), TRANSPORTS)


def _add_bench_job(parser: argparse.ArgumentParser) -> None:
    known = f"{' or '.join(BENCH_RECIPES)} (default: {BENCH_RECIPES[0]})"
    parser.add_argument("--recipe", choices=BENCH_RECIPES, default=BENCH_RECIPES[0], help=known)
    _add_counts(parser)


def _add_counts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", metavar="N", type=_count, default=2, help="default: 2")
    parser.add_argument("--servers", metavar="N", type=_count, default=1, help="default: 1")


def _add_bench_train(parser: argparse.ArgumentParser) -> None:
    _add_bench_job(parser)
    parser.add_argument("--batch-size", metavar="N", type=_count, help="default: the recipe's")
    seconds = "how long each one trains in a round (default: 6)"
    parser.add_argument("--seconds", metavar="S", type=_size, default=6.0, help=seconds)
    _add_list(parser, "disciplines", str, grid.DISCIPLINES)


def _add_bench_peers(parser: argparse.ArgumentParser) -> None:
    _add_list(parser, "recipes", _one_of(PEER_RECIPES), PEER_RECIPES)
    _add_counts(parser)
    seconds = "how long each one trains in a round (default: 4)"
    parser.add_argument("--seconds", metavar="S", type=_size, default=4.0, help=seconds)
    _add_list(parser, "disciplines", str, (*grid.DISCIPLINES, "allreduce"))
    _add_list(parser, "others", _one_of(PEERS), PEERS)
    parser.add_argument("--plot", metavar="FILE.svg", help="draw it, too")


def _add_bench_launch(parser: argparse.ArgumentParser) -> None:
    _add_bench_job(parser)
    seconds = "how long each one trains in a round (default: 4)"
    parser.add_argument("--seconds", metavar="S", type=_size, default=4.0, help=seconds)
    _add_list(parser, "disciplines", str, ("apply-reply", "lock-free"))


def _add_bench_durable(parser: argparse.ArgumentParser) -> None:
    _add_bench_job(parser)
    seconds = "how long each one trains in a round (default: 4)"
    parser.add_argument("--seconds", metavar="S", type=_size, default=4.0, help=seconds)
    _add_list(parser, "disciplines", str, ("apply-reply", "reply-apply", "sync", "buffer"))


def _add_bench_gpu(parser: argparse.ArgumentParser) -> None:
    _add_list(parser, "workers", _count, ("1", "4", "8"))
    _add_list(parser, "disciplines", str, ("apply-reply", "lock-free"))
    seconds = "how long each one trains in a round (default: 3)"
    parser.add_argument("--seconds", metavar="S", type=_size, default=3.0, help=seconds)


def _add_bench_norm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", metavar="N", type=_count, default=128, help="default: 128")


def _add_bench_network(parser: argparse.ArgumentParser) -> None:
    _add_sizes(parser, "4.3,16,100")
    _add_list(parser, "ways", _one_of(WAYS), WAYS)


def _add_bench_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", metavar="N", type=_count, default=30, help="default: 30")
    of_each = "of each run (default: 10000)"
    parser.add_argument("--gradients", metavar="N", type=_count, default=10_000, help=of_each)
    parser.add_argument("--servers", metavar="K", type=_count, default=2, help="default: 2")


def _add_bench_long(parser: argparse.ArgumentParser) -> None:
    of_run = "of a run, by two workers together (default: 1000000)"
    parser.add_argument("--updates", metavar="N", type=_count, default=1_000_000, help=of_run)


def _add_bench_watch(parser: argparse.ArgumentParser) -> None:
    _add_bench_job(parser)
    _add_list(parser, "disciplines", str, ("apply-reply",))
    looking = "how many look on (default: 3)"
    parser.add_argument("--watchers", metavar="N", type=_count, default=3, help=looking)
    seconds = "how long each one trains in a round (default: 6)"
    parser.add_argument("--seconds", metavar="S", type=_size, default=6.0, help=seconds)


def _add_bench_start(parser: argparse.ArgumentParser) -> None:
    _add_list(parser, "workers", _count, ("2", "8"))


def _add_bench_simulate(parser: argparse.ArgumentParser) -> None:
    _add_list(parser, "recipes", _one_of(SIMULATED), ("fashion-cnn", "apart"))
    _add_list(parser, "cells", str, ("all",))
    seconds = "how long each run trains (default: 4)"
    parser.add_argument("--seconds", metavar="S", type=_size, default=4.0, help=seconds)


def _add_bench_links(parser: argparse.ArgumentParser) -> None:
    recipe = "what to train, as train's --recipe (default: fashion-cnn)"
    parser.add_argument("--model", metavar="RECIPE", default="fashion-cnn", help=recipe)
    for name, kind, default, text in (
        ("rates", _rate, "loopback,1000,100,10", "Mbit/s of the server's link, each way"),
        ("delays", _delay, "0,20,100", "ms, there and back"),
        ("settings", _setting, ",".join(cells.offered()), "what is done about it"),
        ("cells", str, "", "only those like these, as '10mbit-*' or '*-overlap-0'"),
    ):
        told = f"{text} (default: {default or 'all of them'})"
        of: str | list[str] = default or []  # a text is read as one that is given
        parser.add_argument(f"--{name}", metavar="LIST", type=_several(kind), default=of, help=told)
    for name, metavar, counted, number, text in (
        ("workers", "N", _count, 4, "beside one server"),
        ("seeds", "N", _count, 1, "runs of each cell"),
        ("eval-every", "N", _count, 100, "batches between two scores, but 8 pushes at least"),
        ("limit", "S", _size, 60.0, "seconds of training that a cell may take"),
        ("target", "X", _number, 0.8, "the score that is good enough"),
    ):
        told = f"{text} (default: {number:g})"
        parser.add_argument(f"--{name}", metavar=metavar, type=counted, default=number, help=told)
    out = "where cells lie; what has finished there is not run again (default: runs/links)"
    parser.add_argument("--out", metavar="DIR", default="runs/links", help=out)
    parser.add_argument("--show", action="store_true", help="run nothing; show what is there")
    parser.add_argument("--into", metavar="FILE.md", help="put the tables into this page, too")
    where = options()["data_dir"].default
    text = f"where datasets lie (default: {where})"
    parser.add_argument("--data-dir", metavar="DIR", default=where, help=text)


def _add_sizes(parser: argparse.ArgumentParser, default: str) -> None:
    text = f"MB each way, one size or several (default: {default})"
    parser.add_argument("--sizes", metavar="MB", type=_several(_size), default=default, help=text)


def _add_list(
    parser: argparse.ArgumentParser, name: str, kind: Callable[[str], Any], default: Sequence[str]
) -> None:
    shown = ",".join(default)
    parser.add_argument(
        f"--{name}", metavar="LIST", type=_several(kind), default=shown, help=f"default: {shown}"
    )


BENCHMARKS: dict[str, tuple[str, str, int | None, Callable[[argparse.ArgumentParser], None]]] = {
    "exchange": (
        "one worker and one server, beside two plain copies of the same size",
        "What an exchange costs: a gradient up, an update, parameters back.",
        15,
        _add_bench_exchange,
    ),
    "train": (
        "gradients per second, beside workers that exchange nothing and torch's DDP",
        "Gradients per second of each discipline, on made-up data.",
        3,
        _add_bench_train,
    ),
    "peers": (
        "gradients per second, beside DDP, Hogwild, torch's RPC and Ray's actors",
        "Gradients per second of every discipline and of what else there is, on made-up data.",
        5,
        _add_bench_peers,
    ),
    "launch": (
        "gradients per second of a script of one's own, beside the same as a recipe",
        "What a training loop of one's own costs, on made-up data.",
        5,
        _add_bench_launch,
    ),
    "durable": (
        "gradients per second with --ack durable, beside --ack applied",
        "What it costs that a server answers when its disk has it (that of TMPDIR), on made-up "
        "data.",
        7,
        _add_bench_durable,
    ),
    "engines": (
        "gradients per second of roles that Ray starts, beside those that the command starts",
        "What the engine ray costs while a run goes on, on made-up data; needs Ray.",
        5,
        _add_bench_launch,
    ),
    "gpu": (
        "gradients per second on one GPU, beside bare loops, eager and captured",
        "Gradients per second of workers that share one GPU, on made-up images.",
        5,
        _add_bench_gpu,
    ),
    "norm": (
        "a CIFAR step with the fast local response normalisation, beside torch's",
        "What the fast local response normalisation gains on the CPU, one thread.",
        7,
        _add_bench_norm,
    ),
    "network": (
        "payloads between two processes over TCP, beside gloo and pyzmq",
        "Payloads there and back between two processes, over TCP on loopback.",
        7,
        _add_bench_network,
    ),
    "report": (
        "time and memory of a report, beside parsing its files",
        "How long a report about many made-up runs takes, and how much memory.",
        3,
        _add_bench_report,
    ),
    "long": (
        "very many tiny updates: does anything grow, or become slower?",
        "Rate and memory of one long run, at its beginning and at its end.",
        1,
        _add_bench_long,
    ),
    "start": (
        "from the command to everybody's first gradient, forked and started anew",
        "How long a run takes to start, and a worker that died to be replaced.",
        5,
        _add_bench_start,
    ),
    "simulate": (
        "what offbeat simulate predicts, beside what is measured",
        "What offbeat simulate predicts from one run, beside runs that it was not calibrated on, "
        "in turn: fashion-cnn and mnist-sigmoid, whose workers share this machine's cores, and "
        "apart, whose workers wait instead of computing, as if each had a machine of its own.",
        5,
        _add_bench_simulate,
    ),
    "watch": (
        "gradients per second of a run that people look at, beside the same run alone",
        "What it costs a run that people look at the page of offbeat watch, on made-up data.",
        10,
        _add_bench_watch,
    ),
    "links": (
        "training over slow networks, and what helps, beside training over loopback",
        "What a slow network does to a run, and what helps: a grid of rates, delays and settings, "
        "run part by part.",
        None,
        _add_bench_links,
    ),
}
"""For each: what it is beside, its description, how many rounds (None: it has seeds), and what adds
its own flags."""

COMMANDS: dict[str, tuple[str, str, Callable[[argparse.ArgumentParser], Parsers | None]]] = {
    "train": (
        "train a recipe",
        "Train a recipe. Without any flag: a small convnet on the built-in data.",
        _add_train,
    ),
    "launch": (
        "run a script of your own as the workers of a run",
        "Run a script that calls offbeat.distribute(model, optimizer) as every worker of a run, "
        "with servers beside them. Rank 0's output is shown, the others' is in RUN/logs. In a "
        "cluster: as one of its roles, the same command on each machine, but for --role and "
        "--index.",
        _add_launch,
    ),
    "compare": (
        "train in several ways, and report which does best",
        "Train a recipe, or launch a script, in every combination of disciplines, workers, "
        "servers, parameters and seeds, one run after the other, and write a report.",
        _add_compare,
    ),
    "watch": (
        "look at a run while it goes on, in a browser or in the terminal",
        "Serve a page that shows a run, or all runs below a folder, as they happen, and that can "
        "ask for a checkpoint or for the end; with --text in this terminal instead.",
        _add_watch,
    ),
    "report": (
        "write report.html and report.md about runs",
        "Write report.html and report.md: about one run, or about several side by side.",
        _add_report,
    ),
    "export": (
        "write a run's weights to a file",
        "Write a run's newest weights as safetensors.",
        _add_export,
    ),
    "eval": (
        "score a run's newest checkpoint",
        "Score the newest checkpoint of a run on its test data; never trains.",
        _add_eval,
    ),
    "replay": (
        "do a recorded run again, gradient by gradient",
        "Compute every gradient of a recorded run again, in one process, apply them in the "
        "recorded order, and compare losses and checkpoints to the bit. Nothing is written into "
        "the run's folder.",
        _add_replay,
    ),
    "simulate": (
        "predict what a recorded run would be with other workers, servers or disciplines",
        "Predict gradients per second, staleness and waiting for other numbers of workers and "
        "servers, other disciplines, slower links or a straggler, on a virtual clock: times are "
        "drawn from a recorded run's events, decisions are the real servers'. Nothing is trained, "
        "and the same command prints the same.",
        _add_simulate,
    ),
    "role": (
        "be one process of a run",
        "Be one process of a run that spans machines: start a server (ps), the master, a worker or "
        "an evaluator on each. Only the master takes the options of train; the others learn them "
        "from it. In any order: whoever comes early waits.",
        _add_role,
    ),
    "cluster": ("look at a cluster", "Look at a cluster.", _add_cluster),
    "token": (
        "make a token for a cluster",
        "Print a token that nobody can guess.",
        lambda parser: None,
    ),
    "data": (
        "fetch datasets, and check them",
        "Fetch the datasets that recipes train on, and check what is there.",
        _add_data,
    ),
    "bench": (
        "measure exchanges or training on this machine",
        "Measure exchanges or training on this machine, beside something that is measured with it.",
        _add_bench,
    ),
}
"""For each: what it is for, its description, and what adds its flags and returns parsers in it."""


# -- kinds of values -------------------------------------------------------------------------------


def _index(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no index: 0, 1, 2, ...")
    return int(text)


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


def _rate(text: str) -> float:
    return math.inf if text == "loopback" else _size(text)


def _link_rate(text: str) -> float:
    return math.inf if text == "inf" else _size(text)


def _cores(text: str) -> float:
    return math.inf if text == "inf" else _count(text)


def _delay(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of milliseconds")


def _setting(text: str) -> str:
    if text in cells.SETTINGS and text not in cells.offered():
        raise argparse.ArgumentTypeError(f"{text!r} takes options that this build does not have")
    return _one_of(cells.offered())(text)


def _number(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(float(text)):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number")


def _target(text: str) -> float | tuple[str, float]:
    name, equals, value = text.rpartition("=")
    if equals and not name:
        raise argparse.ArgumentTypeError(f"{text!r} names no metric, as top5=0.9 does")
    return (name, _number(value)) if equals else _number(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _add_option(
    parser: argparse.ArgumentParser, name: str, default: Any, metadata: Mapping[str, Any]
) -> None:
    help_text = metadata["help"]
    if metadata["kind"] is yes_or_no:
        parser.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=help_text)
        return
    if metadata["kind"] is settings:
        parser.add_argument(flag(name), action="append", metavar="NAME=VALUE", help=help_text)
        return
    if metadata["choices"]:
        help_text += f": {', '.join(metadata['choices'])}"
    if default not in (None, ()):
        help_text += f" (default: {default})"
    action = "append" if metadata["kind"] is texts else "store"
    metavar = name.rpartition("_")[2].upper()
    parser.add_argument(flag(name), action=action, metavar=metavar, help=help_text)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
