"""Sessions that tests over HTTP leave behind on a server they share: held conversations, stored responses."""

import asyncio

from kakeya.client import AsyncClient


def close_sessions(address: str) -> None:
    """Close every session of a server without keys, by its gRPC address."""

    async def closed() -> None:
        async with AsyncClient(address) as client:
            for info in await client.list_sessions():
                await client.session(info.session_id).close()

    asyncio.run(closed())
