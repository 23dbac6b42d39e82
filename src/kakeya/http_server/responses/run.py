"""One response being made: from the plan to the answer that is kept."""

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from itertools import count
from typing import Any, Self

from kakeya.errors import KakeyaError
from kakeya.http_server.errors import ApiError, as_api_error
from kakeya.http_server.generation import Answer, check_least
from kakeya.http_server.responses.items import listed
from kakeya.http_server.responses.output import Event, OutputWriter, ended, failed, new_body, write_events
from kakeya.http_server.responses.plan import Plan
from kakeya.http_server.responses.records import Record
from kakeya.http_server.responses.service import Responses
from kakeya.http_server.text_sessions import TextSession
from kakeya.http_server.tools import answer_grammar
from kakeya.text.prompting import written_tools


class Run:
    """Makes one response: `open`, then read the `events` or take the `whole`.

    Nothing is stored before the answer is whole. Whatever happens, what it continues can be continued again,
    and a client that leaves before the end leaves nothing behind.
    """

    def __init__(self, responses: Responses, owner: str, plan: Plan) -> None:
        self._responses = responses
        self._sessions = responses.sessions
        self._state = responses.sessions.state
        self._owner = owner
        self._plan = plan
        self._session: TextSession | None = None
        self._answer: Answer | None = None
        self._input_items = listed(plan.request.input)
        self._output = OutputWriter(
            reads_calls=bool(plan.choice.names), tells_events=bool(plan.request.stream)
        )
        model = self._sessions.runtime.describe().model
        self._body = new_body(plan, responses.new_id("resp"), int(time.time()), model)

    async def open(self, stack: AsyncExitStack) -> Self:
        """Claim the conversation, if there is one, write the input into a session and start to generate.
        What is taken for it is released by `stack`, which the caller closes.

        Raises ApiError or KakeyaError when that cannot be, SessionBusy when somebody else has claimed the
        conversation since the response was planned.
        """
        plan = self._plan
        if plan.conversation is not None:
            stack.enter_context(plan.conversation.claim())
        grammar = await self._state.workers.call(
            answer_grammar, self._sessions, plan.session_tools(), plan.choice, plan.request.json_format
        )
        await stack.enter_async_context(self._state.admission.admit(self._owner))
        most = await self._most_tokens()
        check_least(plan.sampling, most)
        stack.callback(self._close_session)
        self._session = await self._open_session()
        reading = plan.request.reading
        self._answer = Answer(self._sessions, self._session, most, plan.sampling, reading, grammar)
        stack.push_async_callback(self._answer.aclose)
        await self._answer.begin()
        return self

    async def whole(self) -> dict[str, Any]:
        """The response, when all of it is there."""
        async with aclosing(self._groups()) as events:
            async for _ in events:
                pass  # the output remembers
        return self._body

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. An error is the last of them."""
        numbers = count()
        try:
            async with aclosing(self._groups()) as groups:
                async for events in groups:
                    yield write_events(events, numbers)
        except Exception as error:
            body = failed(self._body, self._output.output, as_api_error(error))
            yield write_events([{"type": "response.failed", "response": body}], numbers)

    def _close_session(self) -> None:
        """Close the session, unless the response was stored with it."""
        if self._session is not None:
            self._sessions.close_soon(self._session)

    async def _groups(self) -> AsyncGenerator[list[Event], None]:
        """What happens, together what happens at once."""
        answer = self._answer
        assert answer is not None, "open comes first"
        yield [{"type": f"response.{what}", "response": self._body} for what in ("created", "in_progress")]
        async with aclosing(answer.__aiter__()) as pieces:
            async for piece in pieces:
                if events := self._output.feed(piece):
                    yield events
        is_cut = answer.finish_reason == "length"
        events = self._output.finish(is_complete=not is_cut)
        self._body = ended(self._body, self._output.output, answer.usage, is_cut=is_cut, now=int(time.time()))
        if self._plan.request.is_kept:
            await self._keep(answer)
        yield [*events, {"type": f"response.{self._body['status']}", "response": self._body}]

    async def _most_tokens(self) -> int:
        """How long the answer may be. Raises ApiError when the history would lose tokens and must not."""
        request = self._plan.request
        most = request.max_output_tokens or self._state.config.default_max_tokens
        if request.truncation != "disabled":
            return most
        length = await self._state.workers.call(self._prompt_length)
        left = self._sessions.runtime.config.cache.capacity - length
        needed = request.max_output_tokens or 1
        if needed > left:
            raise ApiError(
                400,
                f"the history with this input has {length} tokens, and {needed} more may follow: more than "
                f"the {length + left} that are remembered. Shorten it, or let the oldest go with "
                "truncation: auto",
                param="input",
                code="context_length_exceeded",
            )
        return min(most, left)

    def _prompt_length(self) -> int:
        """How long the history will be when the answer begins. Runs on a worker; changes nothing."""
        plan, prompter = self._plan, self._sessions.prompter
        session = plan.fitting_base.session if plan.fitting_base is not None else None
        if session is not None:
            added = prompter.after_answer(
                session.messages, plan.added, session.tools, session.variables, closed=session.closed
            )
            if added is not None:
                return session.history_length + len(added)
        tools = written_tools(plan.session_tools())
        return len(prompter.whole(plan.whole(), tools, plan.variables))

    async def _open_session(self) -> TextSession:
        """A session that ends with the input: the base's, or a new one."""
        plan = self._plan
        if plan.fitting_base is not None:
            moving = int(plan.conversation is not None)
            session = await self._responses.branches.continue_from(
                plan.fitting_base, plan.added, keep=plan.request.is_kept, moving=moving
            )
            if session is not None:
                return session
        label = self._body["id"] if plan.conversation is None else plan.conversation.id
        tools = plan.session_tools()
        return await self._sessions.start(self._owner, plan.whole(), tools, label, plan.variables)

    async def _keep(self, answer: Answer) -> None:
        """Store the response with the session to continue it in. Raises StorageFailed: it is forgotten."""
        plan, session, store = self._plan, self._session, self._responses.store
        assert session is not None
        message = self._output.message()
        session.record(message, answer)
        record = Record(
            id=self._body["id"],
            owner=self._owner,
            tree=plan.tree,
            parent=plan.base,
            conversation_id=None if plan.conversation is None else plan.conversation.id,
            instructions=plan.instructions,
            tools=plan.tools,
            messages=(*plan.added, message),
            input_items=self._input_items,
            body=self._body,
            session=session,
            variables=plan.variables,
        )
        self._session = None
        store.add(record)
        if plan.conversation is not None:
            store.move(plan.conversation, record)
            store.use(plan.conversation)
        self._responses.branches.trim()
        try:
            await store.archive.flush()
        except KakeyaError:
            if plan.conversation is not None:
                store.move(plan.conversation, plan.base)
            store.remove(record)
            raise
