"""A TCP relay on loopback that holds back what passes for a while: the distance between two processes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_Late = asyncio.Queue[tuple[float, bytes]]


class Relay:
    """Forwards bytes both ways, each way `delay_s` late, in order. The delay may be changed at any time."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._host, self._port = host, int(port)
        self._connections: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0
        self.address = ""

    def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection."""
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def cut(self) -> None:
        """End every connection."""
        open_ones = list(self._connections)
        for task in open_ones:
            task.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)
        await asyncio.sleep(0)  # sockets are closed a turn after they were given up

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        try:
            await asyncio.gather(self._forward(reader, far_writer), self._forward(far_reader, writer))
        finally:
            for each in (writer, far_writer):
                each.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Everything up to the end, and the end too."""
        late: _Late = asyncio.Queue()
        with suppress(OSError):  # one side is gone
            await asyncio.gather(self._take(reader, late), _deliver(late, writer))

    async def _take(self, reader: asyncio.StreamReader, late: _Late) -> None:
        now, data = asyncio.get_running_loop().time, b"-"
        while data:
            data = await reader.read(2**16)
            late.put_nowait((now() + self.delay_s, data))


async def _deliver(late: _Late, writer: asyncio.StreamWriter) -> None:
    now = asyncio.get_running_loop().time
    while True:
        due, data = await late.get()
        if (pause := due - now()) > 0:
            await asyncio.sleep(pause)
        if not data:
            writer.write_eof()
            return
        writer.write(data)


@asynccontextmanager
async def relay_to(target: str) -> AsyncIterator[Relay]:
    """A relay in front of an address, on this event loop."""
    relay = Relay(target)
    server = await asyncio.start_server(relay.connect, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    relay.address = f"{host}:{port}"
    try:
        yield relay
    finally:
        server.close()
        await relay.cut()
        await server.wait_closed()
