"""The command `offbeat`: flags and printing, nothing else.

    offbeat train --discipline lock-free --workers 4
    offbeat train --resume RUN
    offbeat export RUN model.safetensors
    offbeat data get cifar10
    offbeat bench exchange

Exit codes: 0 done; 1 the run failed; 2 something was wrong with what was asked for; 130 stopped by
Ctrl-C, SIGTERM or SIGHUP.
"""

import argparse
import contextlib
import json
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from offbeat.config import (
    ROLES,
    make_config,
    not_overruled,
    options,
    read_config_file,
    yes_or_no,
)
from offbeat.control import Control
from offbeat.data.catalog import DATASETS, find_dataset
from offbeat.errors import ConfigError, OffbeatError, nearest
from offbeat.version import __version__

INTERRUPTED = 130
TRANSPORTS = ("unix", "tcp", "inproc")
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

    export = command(
        "export", "write a run's weights to a file", "Write a run's newest weights as safetensors."
    )
    export.add_argument("run", metavar="RUN", help="a run's folder")
    export.add_argument("file", metavar="FILE", help="where to write, as model.safetensors")
    export.add_argument("--ema", action="store_true", help="the moving average of the weights")

    role = command(
        "role",
        "be one process of a run",
        "Be one process of the run in RUN; what engines start. It ends with the run.",
    )
    role.add_argument("role", metavar="ROLE", help=", ".join(ROLES), choices=ROLES)
    role.add_argument("--index", type=int, default=0, help="which server or worker (default: 0)")
    role.add_argument("--run-dir", metavar="RUN", required=True, help="the run's folder")

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
    return parser, {**commands.choices, **nested}


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
    for parser in (exchange, train, norm):
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


def _export(known: argparse.Namespace) -> int:
    from offbeat.api import export

    export(known.run, known.file, ema=known.ema)
    print(f"wrote {known.file}")
    return 0


def _role(known: argparse.Namespace) -> int:
    """No line goes to the console: what a role has to say stands in its log."""
    control = Control.from_environment()
    control.start()
    try:
        from offbeat.roles.run import run_role
        from offbeat.rundir import RunFolder

        config, _ = RunFolder(Path(known.run_dir)).read_config()
        run_role(config, known.role, known.index, control)
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
        from offbeat import bench

        kinds: dict[str, Callable[..., Any]]
        kinds = {"exchange": bench.exchange, "train": bench.train, "norm": bench.norm}
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


_COMMANDS = {"train": _train, "export": _export, "role": _role, "data": _data, "bench": _bench}


def _result_lines(summary: Mapping[str, Any]) -> list[str]:
    """The last lines on the console, as the distributed MNIST seed ends."""
    lines = []
    if summary["test_accuracy"] is not None:
        lines.append(f"Test-Accuracy: {summary['test_accuracy']:.4f}")
    elif summary["test_metric"] is not None:
        lines.append(f"Test-Metric: {summary['test_metric']:.4f} ({summary['metric']})")
    lines.append(f"Total Time: {summary['total_time_s']:.2f}s")
    if summary["final_cost"] is not None:
        lines.append(f"Final Cost: {summary['final_cost']:.4f}")
    return lines
