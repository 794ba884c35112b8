"""The command `offbeat`: flags.py says what it takes, commands.py what it does."""

from offbeat.cli.commands import main

__all__ = ["main"]
