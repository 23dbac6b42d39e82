"""What the HTTP server keeps for its clients, written to the state directory. Without one it does nothing.

Whoever changes something notes it. All that was noted is stored at once: before a client is told, by `flush`,
or soon after.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kakeya.errors import KakeyaError
from kakeya.text.prompting import Message, ToolCall
from kakeya.types import Document

if TYPE_CHECKING:  # torch takes a second to import, and the server listens before that
    from kakeya.runtime import Runtime

log = logging.getLogger(__name__)
# What could not be stored is tried again after so long.
_RETRY_S = 5.0
# Gives the document, with its contents if the argument says so; None when it is to be deleted.
Make = Callable[[bool], Document | None]


class Archive:
    """Used from one event loop."""

    def __init__(self, runtime: "Runtime | None" = None, retry_s: float = _RETRY_S) -> None:
        self._runtime = runtime if runtime is not None and runtime.has_documents else None
        self._retry_s = retry_s
        self._noted: dict[tuple[str, str], tuple[Make, bool]] = {}
        self._soon: asyncio.TimerHandle | None = None
        self._writes: set[asyncio.Task[None]] = set()
        self._quiet: set[asyncio.Task[None]] = set()

    def documents(self, kind: str) -> list[Document]:
        """What earlier servers stored of a kind, least recently used first. Waits for the disk."""
        return [] if self._runtime is None else self._runtime.documents(kind)

    def note(self, kind: str, name: str, make: Make, *, whole: bool = False) -> None:
        """A document has changed; with `whole` not its state alone. It is made when it is stored."""
        if self._runtime is None:
            return
        before = self._noted.get((kind, name))
        self._noted[kind, name] = (make, whole or (before is not None and before[1]))
        self._flush_after(0.0)

    async def flush(self) -> None:
        """Everything that was noted is stored. Raises StorageFailed, and then it is tried again later."""
        if self._runtime is not None and self._noted:
            noted, self._noted = self._noted, {}
            _start(self._write(self._runtime, noted), self._writes)
        for write in tuple(self._writes):  # another's may have taken what was noted here
            await asyncio.shield(write)

    async def settle(self) -> None:
        """The server ends: store what was noted, and nothing after that. What fails is only told."""
        await self._flush_quietly()
        self._runtime = None
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None

    async def _write(self, runtime: "Runtime", noted: dict[tuple[str, str], tuple[Make, bool]]) -> None:
        put: list[Document] = []
        delete: list[tuple[str, str]] = []
        for key, (make, whole) in noted.items():
            document = make(whole)
            if document is None:
                delete.append(key)
            else:
                put.append(document)
        try:
            await asyncio.wrap_future(runtime.change_documents(put, delete))
        except KakeyaError:
            for key, (make, whole) in noted.items():
                newer = self._noted.get(key, (make, False))
                self._noted[key] = (newer[0], whole or newer[1])
            self._flush_after(self._retry_s)
            raise

    def _flush_after(self, seconds: float) -> None:
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(seconds, self._flush_now)

    def _flush_now(self) -> None:
        self._soon = None
        _start(self._flush_quietly(), self._quiet)

    async def _flush_quietly(self) -> None:
        try:
            await self.flush()
        except KakeyaError as error:
            log.error("what clients were told could not be stored: %s", error)


def _start(work: Coroutine[Any, Any, None], tasks: "set[asyncio.Task[None]]") -> None:
    """A task of its own, which `tasks` has for as long as it runs."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def message_fields(message: Message) -> dict[str, Any]:
    """A message as it is stored."""
    return asdict(message)


def read_message(fields: dict[str, Any]) -> Message:
    """The message, from what is stored."""
    return Message(**fields | {"tool_calls": tuple(ToolCall(**call) for call in fields["tool_calls"])})
