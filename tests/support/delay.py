"""A proxy that passes bytes on late: python delay.py HOST PORT TO_PORT SECONDS."""

import asyncio
import sys


async def pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float
) -> None:
    """Every chunk leaves `delay_s` after it came; many may be on their way."""
    loop = asyncio.get_running_loop()
    due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def send() -> None:
        while True:
            at_s, chunk = await due.get()
            await asyncio.sleep(max(0.0, at_s - loop.time()))
            if not chunk:
                writer.close()
                return
            writer.write(chunk)
            await writer.drain()

    sending = asyncio.create_task(send())
    try:
        while chunk := await reader.read(1 << 16):
            due.put_nowait((loop.time() + delay_s, chunk))
    except OSError:
        chunk = b""
    due.put_nowait((loop.time() + delay_s, b""))
    try:
        await sending
    except OSError:
        writer.close()


async def main(host: str, port: int, to_port: int, delay_s: float) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(host, to_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            pass_on(reader, there_writer, delay_s), pass_on(there_reader, writer, delay_s)
        )

    server = await asyncio.start_server(serve, host, port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
