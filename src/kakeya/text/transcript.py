"""A conversation as a session takes it: the first turn whole, every later turn only what is new.

A session's history is append-only, so each turn appends the ids that the chat template writes after the last
answer: what closes the answer, the new message, and what opens the next answer. They are found by rendering
the last exchange with a stand-in for the answer, so what the model really said is never written a second time
(and stays as it was said, also where a template would drop part of it, such as its thinking).

The rule for a template that writes the earlier part differently once a message follows (one that moves the
system message, say): nothing can be appended then, so the turn is the whole conversation, and says so with
`restarts`. Its ids belong into a fresh session.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kakeya.errors import InvalidArgument
from kakeya.text.tokenizer import Tokenizer

Message = dict[str, str]

_STAND_IN = "A"
_PROBES = ("Hello", "1")


@dataclass(frozen=True)
class Turn:
    """Token ids to append. With `restarts` they are the whole conversation, for a fresh session."""

    token_ids: list[int]
    restarts: bool


class Transcript:
    """The messages so far, and the ids that the next one adds.

    `eos_token_ids` are those the model ends an answer with; the token with which the template itself closes
    an answer is added to them as `end_token_ids`. Raises InvalidArgument when the template refuses.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Iterable[int], system: str | None = None) -> None:
        self._tokenizer = tokenizer
        self.system = system
        self._opening: list[Message] = [] if system is None else [_message("system", system)]
        self.messages: list[Message] = list(self._opening)
        self.answer_is_closed = False
        self.end_token_ids = frozenset(eos_token_ids) | self._closing_token()

    @classmethod
    def resume(
        cls, tokenizer: Tokenizer, eos_token_ids: Iterable[int], messages: Sequence[Message], closed: bool
    ) -> "Transcript":
        """The transcript that had these messages. Raises InvalidArgument when they are no conversation."""
        has_system = bool(messages) and messages[0].get("role") == "system"
        transcript = cls(tokenizer, eos_token_ids, messages[0].get("content") if has_system else None)
        turns = list(messages[has_system:])
        roles = [message.get("role") for message in turns]
        if roles != ["user", "assistant"] * (len(turns) // 2):
            raise InvalidArgument(f"messages must go user, assistant, user, assistant…, got {roles}")
        transcript.messages += turns
        transcript.answer_is_closed = closed
        return transcript

    def next_turn(self, text: str) -> Turn:
        """What the user's next message adds. Changes nothing."""
        message = _message("user", text)
        if len(self.messages) == len(self._opening):
            return Turn(self._tokenizer.chat_ids([*self._opening, message]), restarts=False)
        added = self._ids_after_answer(self.messages[-2], message)
        if added is None:
            return Turn(self._tokenizer.chat_ids([*self.messages, message]), restarts=True)
        if self.answer_is_closed and added[0] in self.end_token_ids:
            added = added[1:]
        return Turn(added, restarts=False)

    def add(self, text: str, answer: str, *, closed: bool) -> None:
        """Record an exchange. `closed` says whether an end token is in the session's history."""
        self.messages += [_message("user", text), _message("assistant", answer)]
        self.answer_is_closed = closed

    def opening_tokens(self) -> int:
        """How many ids come before the first word of the first user message: the system message,
        written or implied by the template, and what the template puts around it."""
        one, other = (
            self._tokenizer.chat_ids([*self._opening, _message("user", probe)]) for probe in _PROBES
        )
        return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)

    def _ids_after_answer(self, asked: Message, message: Message) -> list[int] | None:
        """The ids that follow the answer to `asked`, or None when the template rewrites what came before."""
        render = self._tokenizer.render_chat
        before = render([*self._opening, asked]) + _STAND_IN
        after = render([*self._opening, asked, _message("assistant", _STAND_IN), message])
        head, ids = self._tokenizer.encode(before), self._tokenizer.encode(after)
        return ids[len(head) :] if ids[: len(head)] == head and len(ids) > len(head) else None

    def _closing_token(self) -> frozenset[int]:
        added = self._ids_after_answer(_message("user", _PROBES[0]), _message("user", _PROBES[1]))
        return frozenset(token for token in (added or [])[:1] if self._tokenizer.is_special(token))


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}
