"""Responses and conversations of one server: what is stored, and what can be done with it."""

import asyncio
from collections.abc import Sequence

from kakeya.errors import KakeyaError
from kakeya.http_server.archive import Archive
from kakeya.http_server.errors import ApiError
from kakeya.http_server.responses.branches import Branches
from kakeya.http_server.responses.documents import CONVERSATION, RESPONSE, Found, Reader
from kakeya.http_server.responses.items import listed, messages_of, new_id
from kakeya.http_server.responses.plan import Plan, plan
from kakeya.http_server.responses.records import Conversation, Record
from kakeya.http_server.responses.schema import InputItem, ResponseRequest
from kakeya.http_server.responses.store import ResponseStore
from kakeya.http_server.text_sessions import TextSessions

# How often what nobody used for too long is looked for: so many times within that time, but not too seldom.
_SWEEPS = 16
_LONGEST_PERIOD_S = 600.0


class Responses:
    """Keeps and forgets responses and conversations, per owner. Used from one event loop.

    What is told of them is stored first, where there is a state directory: such calls raise StorageFailed.
    """

    def __init__(self, sessions: TextSessions, archive: Archive | None = None) -> None:
        self.sessions = sessions
        most, self._ttl = sessions.state.config.stored_responses, sessions.runtime.retention_s
        self.store = ResponseStore(
            most, self._ttl, lambda record: self.branches.forget(record), archive=archive
        )
        self.branches = Branches(sessions, self.store)
        self._next_sweep: asyncio.TimerHandle | None = None

    async def recover(self, found: Found) -> set[str]:
        """Have again what is stored. `found` are the sessions that are there; those that are used again.

        Then, what nobody uses for too long is forgotten from time to time.
        """
        call, runtime = self.sessions.state.workers.call, self.sessions.runtime
        stored = self.store.archive.documents
        responses, conversations = [await call(stored, kind) for kind in (RESPONSE, CONVERSATION)]
        reader = Reader(found, lambda: self.sessions.prompter.end_token_ids)
        idle = {each.name: runtime.idle_since(each.used_at) for each in (*responses, *conversations)}
        records = await call(reader.records, responses)
        for record in records:
            self.store.restore(record, idle[record.id])
        for conversation in filter(None, map(reader.conversation, conversations)):
            self.store.restore(conversation, idle[conversation.id])
        self._sweep_later(asyncio.get_running_loop())
        return {record.session.session_id for record in records if record.session is not None}

    def _sweep_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._ttl is not None:
            period = min(self._ttl / _SWEEPS, _LONGEST_PERIOD_S)
            self._next_sweep = loop.call_later(period, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self.store.sweep()
        self._sweep_later(loop)

    def close(self) -> None:
        """The server ends, and forgets nothing any more."""
        if self._next_sweep is not None:
            self._next_sweep.cancel()

    def new_id(self, prefix: str) -> str:
        """An id that nobody can guess, and that names this home in a cluster."""
        return new_id(prefix, self.sessions.runtime.settings.session_prefix)

    def plan(self, owner: str, request: ResponseRequest) -> Plan:
        """What is to be answered. What it continues counts as used.

        Raises ApiError for what is unknown or does not fit together, SessionBusy for a conversation that is
        being answered, Unavailable when the server takes no new work.
        """
        runtime = self.sessions.runtime
        self.sessions.state.check_takes_work(runtime)
        conversation = None
        base = None
        if request.conversation is not None:
            conversation = self.conversation(owner, request.conversation.id, param="conversation")
            conversation.check_rests()
            base = conversation.head
        elif request.previous_response_id is not None:
            base = self.response(owner, request.previous_response_id, param="previous_response_id")
        planned = plan(request, base, conversation, runtime)
        for used in (base, conversation):
            if used is not None:
                self.store.use(used)
        return planned

    def response(self, owner: str, response_id: str, *, param: str = "response_id") -> Record:
        """A stored response. Raises ApiError when it is unknown, forgotten or somebody else's."""
        record = self.store.record(owner, response_id)
        if record is None:
            code = "previous_response_not_found" if param == "previous_response_id" else "response_not_found"
            raise ApiError(404, f"there is no response {response_id!r}", param=param, code=code)
        return record

    async def delete_response(self, owner: str, response_id: str) -> None:
        """Forget a response and free its session, unless a conversation stands there."""
        self.store.remove(self.response(owner, response_id))
        await self.store.archive.flush()
        await self.sessions.settle()

    def conversation(
        self, owner: str, conversation_id: str, *, param: str = "conversation_id"
    ) -> Conversation:
        """A conversation. Raises ApiError when it is unknown, forgotten or somebody else's."""
        found = self.store.conversation(owner, conversation_id)
        if found is None:
            message = f"there is no conversation {conversation_id!r}"
            raise ApiError(404, message, param=param, code="conversation_not_found")
        return found

    async def new_conversation(
        self, owner: str, items: Sequence[InputItem], metadata: dict[str, str]
    ) -> Conversation:
        """A conversation that begins with these items. It takes no session before its first response."""
        messages = messages_of(items, param="items")
        named = self.new_id("conv")
        return await self._added(Conversation(owner, metadata, listed(items), messages, id=named))

    async def change_metadata(self, conversation: Conversation, metadata: dict[str, str]) -> None:
        """Replace what a client notes with a conversation."""
        before, conversation.metadata = conversation.metadata, metadata
        self.store.changed(conversation)
        try:
            await self.store.archive.flush()
        except KakeyaError:
            conversation.metadata = before
            raise

    async def fork(
        self, conversation: Conversation, response_id: str | None, metadata: dict[str, str] | None
    ) -> Conversation:
        """A new conversation that stands where this one does, or stood after an earlier response.

        It takes no session before its first response. Raises ApiError when the response is not in it.
        """
        at = conversation.head
        if response_id is not None:
            chain = [] if at is None else at.chain()
            at = next((record for record in chain if record.id == response_id), None)
            if at is None:
                message = f"there is no response {response_id!r} in this conversation"
                raise ApiError(404, message, param="response_id", code="response_not_found")
        kept = dict(conversation.metadata) if metadata is None else metadata
        forked = Conversation(
            conversation.owner,
            kept,
            conversation.items,
            conversation.messages,
            conversation.tree,
            self.new_id("conv"),
        )
        forked.move_to(at)
        return await self._added(forked)

    async def delete_conversation(self, conversation: Conversation) -> None:
        """Forget a conversation, the responses made in it, and their sessions. Raises SessionBusy."""
        conversation.check_rests()
        self.store.remove_conversation(conversation)
        await self.store.archive.flush()
        await self.sessions.settle()

    async def _added(self, conversation: Conversation) -> Conversation:
        self.store.add_conversation(conversation)
        try:
            await self.store.archive.flush()
        except KakeyaError:
            self.store.remove_conversation(conversation)
            raise
        return conversation
