"""A TCP line to a server that can be cut: what pulling the cable looks like to both ends."""

import asyncio
from types import TracebackType
from typing import Self


class CutLine:
    """Forwards bytes both ways until `cut`; new connections go through again."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._host, self._port = host, int(port)
        self._open: set[asyncio.StreamWriter] = set()
        self.connections = 0
        self.address = ""

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self.cut()
        await asyncio.sleep(0)

    def cut(self) -> None:
        """Break every connection at once, without a goodbye."""
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._open |= {writer, far_writer}
        await asyncio.gather(_forward(reader, far_writer), _forward(far_reader, writer))


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # the line was cut
    finally:
        writer.close()
