"""The relay: late, in order, and gone when it is cut."""

import asyncio
import time
from contextlib import suppress

import pytest

from kakeya.bench.relay import relay_to


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(100):
            writer.write(data)
    writer.close()


def test_what_passes_is_late_and_in_order() -> None:
    async def scenario() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with relay_to(f"127.0.0.1:{port}") as relay:
            host, _, where = relay.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(where))
            for delay in (0.0, 0.03):
                relay.delay_s, began = delay, time.perf_counter()
                writer.write(b"ping")
                assert await reader.readexactly(4) == b"ping"
                assert time.perf_counter() - began >= 2 * delay
            writer.write(b"slow")
            await asyncio.sleep(0.005)
            relay.delay_s = 0.0
            writer.write(b"fast")
            assert await reader.readexactly(8) == b"slowfast"
            writer.write_eof()
            assert await reader.read() == b"", "an end goes through as well"
            second, other = await asyncio.open_connection(host, int(where))
            other.write(b"x")
            await second.readexactly(1)
            await relay.cut()
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await second.readexactly(1)
            for each in (writer, other):
                each.close()
        await asyncio.sleep(0.01)
        server.close()
        await server.wait_closed()

    asyncio.run(scenario())
