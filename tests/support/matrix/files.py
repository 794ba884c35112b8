"""The rows of what is read from files, and of programs among data."""

from .archives import FILES
from .payloads import PAYLOADS

ROWS = (PAYLOADS, FILES)
