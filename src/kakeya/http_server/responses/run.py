"""One response being made: from the request to the answer that is kept."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from kakeya.http_server.checks import blames
from kakeya.http_server.errors import ApiError, as_api_error
from kakeya.http_server.generation import Answer
from kakeya.http_server.prompting import written_tools
from kakeya.http_server.responses.body import ended, failed, new_body
from kakeya.http_server.responses.branches import Branches
from kakeya.http_server.responses.events import EventWriter
from kakeya.http_server.responses.items import Item, listed, new_id
from kakeya.http_server.responses.output import Event, OutputWriter
from kakeya.http_server.responses.plan import Plan
from kakeya.http_server.responses.schema import JsonObject, JsonSchema
from kakeya.http_server.responses.store import Record, ResponseStore, Tree
from kakeya.http_server.state import HttpState
from kakeya.http_server.threads import Thread
from kakeya.http_server.tools import specs_of

if TYPE_CHECKING:
    from kakeya.text.grammar import Grammar


class Run:
    """Makes one response: `prepare`, then read `stream` or take the `whole`. Call `aclose` on every path.

    Nothing is stored before the answer is whole, and what it continues can be continued again whatever
    happens: whoever leaves before the end leaves nothing behind.
    """

    def __init__(
        self, state: HttpState, store: ResponseStore, branches: Branches, owner: str, plan: Plan
    ) -> None:
        """Claims the conversation, if there is one."""
        self._state = state
        self._store = store
        self._branches = branches
        self._owner = owner
        self._plan = plan
        self._runtime = state.ready_runtime()
        self._place = state.admission.admit(owner)
        self._is_closed = False
        self._thread: Thread | None = None
        self._answer: Answer | None = None
        self._input_items: list[Item] = listed(plan.request.input)
        self._output = OutputWriter(
            reads_calls=bool(plan.choice.names), with_logprobs=plan.request.wants_logprobs
        )
        model = self._runtime.describe().model
        self._body = new_body(plan, new_id("resp"), int(time.time()), model)
        if plan.conversation is not None:
            plan.conversation.is_busy = True

    async def prepare(self) -> None:
        """Write the input into a session and start to generate.

        Raises ApiError or KakeyaError when that cannot be.
        """
        grammar = await self._state.workers.call(self._grammar)
        await self._place.take()
        most = await self._most_tokens()
        self._thread = await self._opened()
        constraint = None if grammar is None else grammar.start()
        self._answer = Answer(self._state, self._thread, most, self._plan.sampling, constraint=constraint)
        await self._answer.begin()

    async def whole(self) -> dict[str, Any]:
        """The response, when all of it is there."""
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass  # the output remembers
        return self._body

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. An error is the last of them."""
        writer = EventWriter()
        try:
            async with aclosing(self._events()) as groups:
                async for events in groups:
                    yield writer.written(events)
        except Exception as error:
            told = as_api_error(error)
            body = failed(self._body, self._output.output, told.message, told.status)
            yield writer.written([{"type": "response.failed", "response": body}])

    async def aclose(self) -> None:
        """End what runs and give back what was taken. Does nothing the second time."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._answer is not None:
            await self._answer.aclose()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._branches.close_soon(thread)
        self._place.release()
        conversation = self._plan.conversation
        if conversation is not None:
            conversation.is_busy = False

    async def _events(self) -> AsyncGenerator[list[Event], None]:
        """What happens, together what happens at once."""
        answer = self._answer
        assert answer is not None, "prepare comes first"
        yield [{"type": f"response.{what}", "response": self._body} for what in ("created", "in_progress")]
        async with aclosing(answer.__aiter__()) as pieces:
            async for piece in pieces:
                if events := list(self._output.feed(piece)):
                    yield events
        is_cut = answer.finish_reason == "length"
        events = list(self._output.finish(is_complete=not is_cut))
        self._body = ended(self._body, self._output.output, answer.usage, is_cut=is_cut, now=int(time.time()))
        self._keep(answer)
        yield [*events, {"type": f"response.{self._body['status']}", "response": self._body}]

    def _grammar(self) -> "Grammar | None":
        """What the answer is held to, if anything. Runs on a worker: compiling takes a while."""
        plan = self._plan
        if plan.choice.names:
            specs = specs_of(plan.thread_tools(), plan.choice)
            compiler = self._state.threads.compiler(self._runtime)
            with blames("tools"):
                return compiler.tool_calls(
                    specs, required=plan.choice.required, parallel=plan.choice.parallel
                )
        wanted = None if plan.request.text is None else plan.request.text.format
        if isinstance(wanted, JsonObject):
            return self._state.threads.compiler(self._runtime).json_object()
        if isinstance(wanted, JsonSchema):
            with blames("text.format"):
                return self._state.threads.compiler(self._runtime).json_schema(wanted.schema_)
        return None

    async def _most_tokens(self) -> int:
        """How long the answer may be. Raises ApiError when the history would lose tokens and must not."""
        request = self._plan.request
        most = request.max_output_tokens or self._state.config.default_max_tokens
        if request.truncation != "disabled":
            return most
        length = await self._state.workers.call(self._prompt_length)
        room = self._runtime.config.cache.capacity - length
        needed = request.max_output_tokens or 1
        if needed > room:
            raise ApiError(
                400,
                f"the history with this input has {length} tokens, and {needed} more may follow: more than "
                f"the {length + room} that are remembered. Shorten it, or let the oldest go with "
                "truncation: auto",
                param="input",
                code="context_length_exceeded",
            )
        return min(most, room)

    def _prompt_length(self) -> int:
        """How long the history will be when the answer begins. Runs on a worker; changes nothing."""
        plan, prompter = self._plan, self._state.threads.prompter(self._runtime)
        thread = plan.base.thread if plan.base is not None and plan.fits_thread else None
        if thread is not None:
            added = prompter.after_answer(thread.messages, plan.added, thread.tools, closed=thread.closed)
            if added is not None:
                return thread.history_length + len(added)
        return len(prompter.whole(plan.whole(), written_tools(plan.thread_tools())))

    async def _opened(self) -> Thread:
        """A thread that ends with the input: the base's, or a new one."""
        plan = self._plan
        if plan.base is not None and plan.fits_thread:
            moving = int(plan.conversation is not None)
            thread = await self._branches.gone_on(
                plan.base, plan.added, keep=plan.request.is_kept, moving=moving
            )
            if thread is not None:
                return thread
        label = self._body["id"] if plan.conversation is None else plan.conversation.id
        return await self._state.threads.start(self._owner, plan.whole(), plan.thread_tools(), label)

    def _keep(self, answer: Answer) -> None:
        """Store the response, if it is to be, with the thread to continue it in."""
        plan, thread = self._plan, self._thread
        assert thread is not None
        if not plan.request.is_kept:
            return
        message = self._output.message()
        thread.record(message, answer)
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
            thread=thread,
            item_count=count + (plan.base.item_count if plan.base is not None else 0),
        )
        self._thread = None
        self._store.add(record)
        if plan.conversation is not None:
            self._store.move(plan.conversation, record)
        self._branches.trim()

    def _tree(self) -> Tree:
        if self._plan.base is not None:
            return self._plan.base.tree
        conversation = self._plan.conversation
        return self._store.new_tree() if conversation is None else conversation.tree
