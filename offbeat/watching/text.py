"""A run in a terminal: the same essentials as the page, drawn with rich. For those on ssh.

show(Hub(path))     # until the run is over, or Ctrl-C
"""

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from offbeat.report.document import short
from offbeat.run.progress import minutes, say
from offbeat.watching.source import Source


def show(source: Source) -> int:
    return 0
