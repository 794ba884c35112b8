"""A network link that is slower than loopback: bytes pass on at a rate, and arrive late.

    python -m offbeat.bench.link 127.0.0.1:7000 --count 4 --mbit 100 --delay-ms 20

listens at as many ports as there are workers, writes them as a line of JSON, and passes on what
comes there to the server, and what the server answers. The rate is that of the server's own link:
all of them share it, each way by itself; the delay is that of one way. It ends with its input, and
then writes how many bytes went there and back, as a second line. `offbeat bench links` uses it
(linked.py); it takes no rights, unlike the kernel's own means.
"""

import argparse
import asyncio
import contextlib
import json
import math
import sys
from dataclasses import dataclass

CHUNK = 1 << 14
BUFFER = 1 << 18
"""So many bytes may wait for a slow link, beside those that are on their way."""


@dataclass
class Wire:
    """One way of a link."""

    bytes_per_s: float = math.inf
    delay_s: float = 0.0
    free_s: float = 0.0
    """When all that was sent so far will have left."""
    num_bytes: int = 0
    """Sent so far."""

    def send(self, num_bytes: int, now_s: float) -> float:
        """When the last of so many bytes arrives, which are sent now."""
        self.num_bytes += num_bytes
        self.free_s = max(self.free_s, now_s) + num_bytes / self.bytes_per_s
        return self.free_s + self.delay_s

    @property
    def most_chunks(self) -> int:
        """That one connection may have under way."""
        if math.isinf(self.bytes_per_s):
            return 0  # as many as there are
        return math.ceil((self.bytes_per_s * self.delay_s + BUFFER) / CHUNK)


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: Wire) -> None:
    """Until there is no more to read, or nobody who reads."""
    loop = asyncio.get_running_loop()
    due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(wire.most_chunks)

    async def leave() -> None:
        chunk = b"-"
        while chunk:
            try:
                chunk = await reader.read(CHUNK)
            except ConnectionError:
                chunk = b""
            await due.put((wire.send(len(chunk), loop.time()), chunk))

    async def arrive() -> None:
        while True:
            at_s, chunk = await due.get()
            await asyncio.sleep(at_s - loop.time())
            if not chunk:
                return
            writer.write(chunk)
            await writer.drain()

    leaving = asyncio.create_task(leave())
    try:
        await arrive()
    except ConnectionError:
        pass  # who reads is gone, which whoever writes finds out by this end's closing
    finally:
        leaving.cancel()
        writer.close()


async def link(host: str, port: int, there: Wire, back: Wire, count: int, at: int = 0) -> None:
    """From so many ports here to a server, until the input ends; `at`: the first of these ports,
    if it matters."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except ConnectionError:
            writer.close()
            return
        with contextlib.suppress(
            asyncio.CancelledError
        ):  # the end, which asyncio would complain of
            await asyncio.gather(
                pass_on(reader, far_writer, there), pass_on(far_reader, writer, back)
            )

    servers = [
        await asyncio.start_server(serve, host, at + index if at else 0) for index in range(count)
    ]
    print(json.dumps([each.sockets[0].getsockname()[1] for each in servers]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("to", help="HOST:PORT of the server; also where this listens")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--at", type=int, default=0, help="the first port; default: any")
    parser.add_argument("--mbit", type=float, default=math.inf, help="a second, each way")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="each way")
    known = parser.parse_args()
    host, _, port = known.to.rpartition(":")
    there, back = (Wire(known.mbit * 125_000, known.delay_ms / 1000) for _ in range(2))
    asyncio.run(link(host, int(port), there, back, known.count, known.at))
    print(json.dumps([there.num_bytes, back.num_bytes]), flush=True)


if __name__ == "__main__":
    main()
