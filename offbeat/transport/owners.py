"""Whose process is at the other end of a connection within this machine, as far as the system
tells; Linux does. Used where no token is asked for: by servers (sockets.py) and by the page of
`offbeat watch`."""

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import Any


def same_user_here(sock: socket.socket) -> bool:
    """Whether the process at the other end of a TCP connection within this machine belongs to this
    user, or to root; True where the system does not tell."""
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    ours, theirs = _in_table(sock.getsockname()), _in_table(sock.getpeername())
    owners: dict[tuple[str, str], int] = {}
    for table in tables:
        with contextlib.suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] != "0":  # that has no owner any more
                    owners[fields[1], fields[2]] = int(fields[7])
    if (ours, theirs) not in owners:
        return True
    return owners.get((theirs, ours)) in (os.getuid(), 0)


def _in_table(address: tuple[Any, ...]) -> str:
    """An address as /proc/net/tcp has it: words of four bytes in the machine's order, then the
    port."""
    host, port = str(address[0]).partition("%")[0], int(address[1])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    raw = socket.inet_pton(family, host)
    words = [raw[i : i + 4] for i in range(0, len(raw), 4)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    return f"{b''.join(words).hex().upper()}:{port:04X}"
