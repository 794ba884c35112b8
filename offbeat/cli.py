"""The command `offbeat`: flags and printing, nothing else.

    offbeat train --discipline lock-free --workers 4

Exit codes: 0 done; 1 the run failed; 2 something was wrong with what was asked for; 130 stopped by
Ctrl-C, SIGTERM or SIGHUP.
"""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from offbeat.config import (
    DISCIPLINE_OPTIONS,
    TrainConfig,
    make_config,
    options,
    read_config_file,
    yes_or_no,
)
from offbeat.errors import ConfigError, OffbeatError, nearest
from offbeat.version import __version__

INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Answers a wrong command line with one line that names the remedy."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        config = _read_flags(arguments)
        with _signals_as_ctrl_c():
            return _train(config)
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


def _read_flags(arguments: list[str]) -> TrainConfig:
    parser = _make_parser()
    known, unknown = parser.parse_known_args(arguments)
    if known.command is None:
        parser.print_help()
        raise SystemExit(2)
    if unknown:
        flag = unknown[0].partition("=")[0]
        flags = [_flag(name) for name in (*options(), "config", "help")]
        raise ConfigError(f"unknown argument {flag!r}; {_hint(flag, flags)}")
    given = {k: v for k, v in vars(known).items() if k not in ("command", "config")}
    from_file = read_config_file(known.config) if known.config else {}
    outranked = _outranked(from_file, given)
    return make_config({k: v for k, v in from_file.items() if k not in outranked}, given)


def _outranked(from_file: Mapping[str, Any], given: Mapping[str, Any]) -> set[str]:
    """Options of the file that a flag overrules although it has another name."""
    outranked = set()
    if "steps" in given or "epochs" in given:
        outranked |= {"steps", "epochs"}
    name, colon, _ = given.get("discipline", "").partition(":")
    if name and name != str(from_file.get("discipline", "")).partition(":")[0]:
        outranked |= set(DISCIPLINE_OPTIONS)
    if colon:
        outranked.add("staleness")
    return outranked


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="offbeat",
        description="Train PyTorch models with parameter servers; the update discipline is a flag.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"offbeat {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    train = commands.add_parser(
        "train",
        help="train a recipe",
        description="Train a recipe. Without any flag: a small convnet on the built-in data.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    train.add_argument(
        "--config", metavar="FILE", default=None, help="options from a TOML or JSON file"
    )
    for name, option in options().items():
        _add_option(train, name, option.default, option.metadata)
    return parser


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


def _hint(flag: str, flags: Sequence[str]) -> str:
    hint = nearest(flag, flags)
    return hint if hint.startswith("did") else "see offbeat train --help"


def _train(config: TrainConfig) -> int:
    from offbeat.api import train_config
    from offbeat.progress import say

    result = train_config(config)
    for line in _result_lines(result.summary):
        say(line)
    if result.interrupted:
        print(f"offbeat: interrupted; what was learned is in {result.run_dir}", file=sys.stderr)
        return INTERRUPTED
    return 0


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
