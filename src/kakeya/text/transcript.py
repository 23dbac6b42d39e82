"""A conversation as a session takes it: the first turn whole, every later turn only what is new.

Some templates write the earlier part differently once a message follows; one may move the system message.
Then nothing can be appended: the turn is the whole conversation, marked `restarts`, for a fresh session.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

from kakeya.errors import InvalidArgument
from kakeya.text.tokenizer import Tokenizer
from kakeya.text.turns import Turns

Message = dict[str, str]


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
        self.system = system
        self._opening: list[Message] = [] if system is None else [_message("system", system)]
        self.messages: list[Message] = list(self._opening)
        self.answer_is_closed = False
        self._turns = Turns(tokenizer, eos_token_ids, self._opening)
        self.end_token_ids = self._turns.end_token_ids

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

    def fork(self) -> "Transcript":
        """The same conversation so far, independent from here on."""
        twin = copy(self)
        twin.messages = list(self.messages)
        return twin

    def next_turn(self, text: str) -> Turn:
        """What the user's next message adds. Changes nothing."""
        message = _message("user", text)
        if len(self.messages) == len(self._opening):
            return Turn(self._turns.whole([*self._opening, message]), restarts=False)
        added = self._turns.after_answer(self.messages[:-1], [message], closed=self.answer_is_closed)
        if added is None:
            return Turn(self._turns.whole([*self.messages, message]), restarts=True)
        return Turn(added, restarts=False)

    def add(self, text: str, answer: str, *, closed: bool) -> None:
        """Record an exchange. `closed` says whether an end token is in the session's history."""
        self.messages += [_message("user", text), _message("assistant", answer)]
        self.answer_is_closed = closed

    def opening_tokens(self) -> int:
        """How many ids come before the first word of the first user message: the system message,
        written or implied by the template, and what the template puts around it."""
        return self._turns.opening_tokens(self._opening)


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}
