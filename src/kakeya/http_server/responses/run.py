"""One response being made: from the plan to the answer that is kept."""

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any, Self

from kakeya.http_server.errors import ApiError, as_api_error
from kakeya.http_server.generation import Answer
from kakeya.http_server.responses.items import Item, listed, new_id
from kakeya.http_server.responses.output import Event, EventWriter, OutputWriter, ended, failed, new_body
from kakeya.http_server.responses.plan import Plan
from kakeya.http_server.responses.service import Responses
from kakeya.http_server.responses.store import Record, Tree
from kakeya.http_server.text_sessions import TextSession
from kakeya.http_server.tools import answer_grammar
from kakeya.text.prompting import written_tools


class Run:
    """Makes one response: `open`, then read the `events` or take the `whole`.

    Nothing is stored before the answer is whole, and what it continues can be continued again whatever
    happens: whoever leaves before the end leaves nothing behind.
    """

    def __init__(self, responses: Responses, owner: str, plan: Plan) -> None:
        self._responses = responses
        self._sessions = responses.sessions
        self._state = responses.sessions.state
        self._owner = owner
        self._plan = plan
        self._place = self._state.admission.admit(owner)
        self._has_claimed = False
        self._is_closed = False
        self._session: TextSession | None = None
        self._answer: Answer | None = None
        self._input_items: list[Item] = listed(plan.request.input)
        self._output = OutputWriter(
            reads_calls=bool(plan.choice.names),
            with_logprobs=plan.request.wants_logprobs,
            tells_events=bool(plan.request.stream),
        )
        model = self._sessions.runtime.describe().model
        self._body = new_body(plan, new_id("resp"), int(time.time()), model)

    async def open(self, stack: AsyncExitStack) -> Self:
        """Claim the conversation, if there is one, write the input into a session and start to generate.
        `stack`, which the caller closes, closes the run.

        Raises ApiError or KakeyaError when that cannot be, SessionBusy when somebody else has claimed the
        conversation since the response was planned.
        """
        stack.push_async_callback(self.aclose)
        self._claim()
        plan = self._plan
        grammar = await self._state.workers.call(
            answer_grammar, self._sessions, plan.session_tools(), plan.choice, plan.request.json_format
        )
        await self._place.take()
        most = await self._most_tokens()
        self._session = await self._open_session()
        constraint = None if grammar is None else grammar.start()
        self._answer = Answer(self._sessions, self._session, most, plan.sampling, constraint=constraint)
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
        writer = EventWriter()
        try:
            async with aclosing(self._groups()) as groups:
                async for events in groups:
                    yield writer.write(events)
        except Exception as error:
            told = as_api_error(error)
            body = failed(self._body, self._output.output, told.message, told.status)
            yield writer.write([{"type": "response.failed", "response": body}])

    async def aclose(self) -> None:
        """End what runs and give back what was taken. Does nothing the second time."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._answer is not None:
            await self._answer.aclose()
        session, self._session = self._session, None
        if session is not None:
            self._sessions.close_soon(session)
        self._place.release()
        if self._has_claimed and self._plan.conversation is not None:
            self._plan.conversation.is_busy = False

    def _claim(self) -> None:
        conversation = self._plan.conversation
        if conversation is not None:
            conversation.check_rests()
            conversation.is_busy = self._has_claimed = True

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
        self._keep(answer)
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
        session = plan.base.session if plan.base is not None and plan.fits_session else None
        if session is not None:
            added = prompter.after_answer(session.messages, plan.added, session.tools, closed=session.closed)
            if added is not None:
                return session.history_length + len(added)
        return len(prompter.whole(plan.whole(), written_tools(plan.session_tools())))

    async def _open_session(self) -> TextSession:
        """A session that ends with the input: the base's, or a new one."""
        plan = self._plan
        if plan.base is not None and plan.fits_session:
            moving = int(plan.conversation is not None)
            session = await self._responses.branches.continue_from(
                plan.base, plan.added, keep=plan.request.is_kept, moving=moving
            )
            if session is not None:
                return session
        label = self._body["id"] if plan.conversation is None else plan.conversation.id
        return await self._sessions.start(self._owner, plan.whole(), plan.session_tools(), label)

    def _keep(self, answer: Answer) -> None:
        """Store the response, if it is to be, with the session to continue it in."""
        plan, session, store = self._plan, self._session, self._responses.store
        assert session is not None
        if not plan.request.is_kept:
            return
        message = self._output.message()
        session.record(message, answer)
        count = len(self._input_items) + len(self._body["output"])
        record = Record(
            id=self._body["id"],
            owner=self._owner,
            tree=self._tree(),
            parent=plan.base,
            conversation_id=None if plan.conversation is None else plan.conversation.id,
            instructions=plan.instructions,
            tools=plan.tools,
            messages=(*plan.added, message),
            input_items=self._input_items,
            body=self._body,
            session=session,
            item_count=count + (plan.base.item_count if plan.base is not None else 0),
        )
        self._session = None
        store.add(record)
        if plan.conversation is not None:
            store.move(plan.conversation, record)
        self._responses.branches.trim()

    def _tree(self) -> Tree:
        if self._plan.base is not None:
            return self._plan.base.tree
        conversation = self._plan.conversation
        return self._responses.store.new_tree() if conversation is None else conversation.tree
