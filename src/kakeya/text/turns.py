"""What a chat template writes, as the ids that an append-only session takes.

A session's history is append-only. So after an answer only the ids that the template writes behind it are
appended: what closes the answer, the new messages, and what opens the next answer. They are found by
rendering the last exchange with a stand-in for the answer. What the model really said is never rendered, and
stays in the history even where a template would drop part of it, such as its thinking.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any

from kakeya.errors import InvalidArgument
from kakeya.text.tokenizer import Tokenizer

TemplateMessage = Mapping[str, Any]
TemplateTools = Sequence[Mapping[str, Any]]
Variables = Mapping[str, Any] | None
"""Further names that a template may look at."""

_STAND_IN = {"role": "assistant", "content": "A"}
_CUT = "\u2060\u2702\u2060"
"""Stands where a message that is to go on ends; no conversation holds it."""
_PROBES = ({"role": "user", "content": "Hello"}, {"role": "user", "content": "1"})


class End(Enum):
    """Where a written conversation ends."""

    ANSWER = auto()
    """Where the next answer begins."""
    MESSAGE = auto()
    """Behind the last message; the template does not open an answer."""
    WITHIN = auto()
    """In the last message, which is the answer's beginning."""


def opening_of(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The messages before the conversation itself: system or developer messages at its head."""
    count = next(
        (at for at, each in enumerate(messages) if each.get("role") not in ("system", "developer")),
        len(messages),
    )
    return list(messages[:count])


def pinned_tokens(opening_tokens: int, sink: int, window: int) -> int:
    """How many first tokens a session keeps for ever: the opening, up to half of what the session remembers,
    and never less than its sink."""
    return max(sink, min(opening_tokens, (sink + window) // 2))


def message_start(tokenizer: Tokenizer) -> int | None:
    """The special token that the template begins a message with; None where there is none, or no template."""
    try:
        asked, follows = _PROBES
        one, both = (tokenizer.chat_ids(each) for each in ([asked], [asked, _STAND_IN, follows]))
    except InvalidArgument:
        return None
    # It comes once more with each message. What closes a message does as well, but only behind the first.
    counts = {token: (one.count(token), both.count(token)) for token in both if tokenizer.is_special(token)}
    return next((token for token, (few, many) in counts.items() if 0 < few < many), None)


class Turns:
    """Ids for a first turn and for every later one. It does not change once built, so threads may share it.

    `eos_token_ids` are those the model ends an answer with; the token with which the template itself closes
    an answer is added to them as `end_token_ids`. Raises InvalidArgument when the template refuses.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: Iterable[int],
        opening: Sequence[TemplateMessage] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self.end_token_ids = frozenset(eos_token_ids) | self._closing_token(opening)

    def whole(
        self,
        messages: Sequence[TemplateMessage],
        tools: TemplateTools = (),
        variables: Variables = None,
        end: End = End.ANSWER,
    ) -> list[int]:
        """The whole conversation, up to its `end`."""
        if end is not End.WITHIN:
            opens = end is End.ANSWER
            return self._tokenizer.chat_ids(
                messages, add_generation_prompt=opens, tools=tools, variables=variables
            )
        *before, last = messages
        marked = [*before, {**last, "content": last["content"] + _CUT}]
        text = self._tokenizer.render_chat(
            marked, add_generation_prompt=False, tools=tools, variables=variables
        )
        kept, cut, _ = text.rpartition(_CUT)
        if not cut:
            raise InvalidArgument(
                "the chat template does not write the last message as it is: it cannot go on"
            )
        return self._tokenizer.encode(kept)

    def after_answer(
        self,
        messages: Sequence[TemplateMessage],
        new: Sequence[TemplateMessage],
        tools: TemplateTools = (),
        variables: Variables = None,
        *,
        closed: bool,
    ) -> list[int] | None:
        """What `new` adds behind the answer to `messages`, which is in the history already.

        `closed`: so is the token that ended it. None when the template writes what came before differently
        once something follows: then nothing can be appended, and the whole conversation must be written anew.
        """
        added = self._ids_after_answer(_last_exchange(messages), new, tools, variables)
        if added and closed and added[0] in self.end_token_ids:
            return added[1:]
        return added

    def opening_tokens(
        self, opening: Sequence[TemplateMessage], tools: TemplateTools = (), variables: Variables = None
    ) -> int:
        """How many ids come before the first word of the first user message: the system message,
        written or implied by the template, the tools, and what the template puts around them."""
        chat_ids = partial(self._tokenizer.chat_ids, tools=tools, variables=variables)
        one, other = (chat_ids([*opening, probe]) for probe in _PROBES)
        return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)

    def _ids_after_answer(
        self,
        asked: Sequence[TemplateMessage],
        new: Sequence[TemplateMessage],
        tools: TemplateTools = (),
        variables: Variables = None,
    ) -> list[int] | None:
        render = partial(self._tokenizer.render_chat, tools=tools, variables=variables)
        try:
            before = render(asked) + _STAND_IN["content"]
            after = render([*asked, _STAND_IN, *new])
        except InvalidArgument:
            # Part of a conversation may be refused where the whole is not; the whole will tell.
            return None
        head, ids = self._tokenizer.encode(before), self._tokenizer.encode(after)
        return ids[len(head) :] if ids[: len(head)] == head and len(ids) > len(head) else None

    def _closing_token(self, opening: Sequence[TemplateMessage]) -> frozenset[int]:
        asked, follows = _PROBES
        self._tokenizer.render_chat([*opening, asked])  # a template that refuses this much is of no use
        added = self._ids_after_answer([*opening, asked], [follows])
        return frozenset(token for token in (added or [])[:1] if self._tokenizer.is_special(token))


def _last_exchange(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The opening, and everything from the last user message on: all that a template looks back to, and short
    however long the conversation is."""
    opening = opening_of(messages)
    rest = messages[len(opening) :]
    starts = [at for at, message in enumerate(rest) if message.get("role") == "user"]
    return [*opening, *rest[starts[-1] if starts else 0 :]]
