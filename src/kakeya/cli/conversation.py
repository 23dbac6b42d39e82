"""A chat on one runtime session: messages in, pieces of answers out. Knows nothing of terminals."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kakeya.cli.answer import Answer, AnswerReport
from kakeya.errors import InvalidArgument, StateMismatch
from kakeya.text.transcript import Transcript
from kakeya.text.turns import pinned_tokens
from kakeya.types import SamplingParams, SessionInfo, TokenRange

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

# Sessions that live at once: a reset or a load makes the new one before it lets the old one go.
SESSIONS_NEEDED = 2
_NOTE_KIND = "kakeya-chat"
_NOTE_VERSION = 1


class Conversation:
    """Holds one session and its transcript, and keeps the two in step.

    The opening of the chat (the system message, written or implied by the model's template) is pinned up to
    half of what the session remembers.
    """

    def __init__(
        self, runtime: "Runtime", sampling: SamplingParams, max_tokens: int, transcript: Transcript
    ) -> None:
        """It has no session yet: `begin` makes a conversation that has one."""
        self._runtime = runtime
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._transcript = transcript
        self._session_id = ""
        self._answer: Answer | None = None
        self.last_report: AnswerReport | None = None
        self.last_turn_restarted = False

    @classmethod
    def begin(
        cls, runtime: "Runtime", sampling: SamplingParams, max_tokens: int, system: str | None = None
    ) -> "Conversation":
        """A new chat on a session of its own. Raises InvalidArgument for a model without a chat template."""
        if not runtime.tokenizer.has_chat_template:
            raise InvalidArgument(
                "this model has no chat template; use `kakeya generate --raw` to continue plain text"
            )
        transcript = Transcript(runtime.tokenizer, runtime.model_config.eos_token_ids, system)
        conversation = cls(runtime, sampling, max_tokens, transcript)
        conversation._session_id = conversation._new_session()
        return conversation

    @property
    def opening_tokens(self) -> int:
        """How many tokens come before the first user message."""
        return self._transcript.opening_tokens()

    @property
    def pinned_tokens(self) -> int:
        """How many first tokens are kept for ever: the opening, up to half the capacity, or the sink."""
        cache = self._runtime.config.cache
        return pinned_tokens(self.opening_tokens, cache.sink, cache.window)

    def ask(self, text: str) -> Generator[str, None, None]:
        """Answer a message, piece by piece. `last_report` then says how it went.

        The exchange becomes part of the transcript however the answer ends: by itself, by `cancel`, by a
        reader who leaves, or by an error, which is raised.
        """
        turn = self._transcript.next_turn(text)
        if turn.restarts:
            self._replace_session(self._new_session())
        self.last_turn_restarted = turn.restarts
        answer = Answer(
            self._runtime,
            self._session_id,
            turn.token_ids,
            self._max_tokens,
            self._sampling,
            self._transcript.end_token_ids,
        )
        answer.start()
        self._answer, self.last_report = answer, None
        try:
            yield from answer
        finally:
            self._answer = None
            self.last_report = answer.report
            self._transcript.add(text, answer.text, closed=answer.closed)

    def cancel(self) -> None:
        """Stop the running answer, if there is one; what was said stays. Callable from any thread."""
        answer = self._answer
        if answer is not None:
            answer.cancel()

    def info(self) -> SessionInfo:
        return self._runtime.info(self._session_id)

    def recalled(self) -> dict[TokenRange, str]:
        """What the last answer saw again of what had left the window, as text."""
        return self._runtime.recalled(self._session_id)

    def reset(self) -> None:
        """Begin again with the same system message."""
        runtime, system = self._runtime, self._transcript.system
        transcript = Transcript(runtime.tokenizer, runtime.model_config.eos_token_ids, system)
        self._replace_session(self._new_session())
        self._transcript = transcript
        self.last_report = None

    def save(self, path: Path) -> None:
        """Write the whole chat, the session's memory included, to one file."""
        note = {
            "kind": _NOTE_KIND,
            "version": _NOTE_VERSION,
            "messages": self._transcript.messages,
            "closed": self._transcript.answer_is_closed,
        }
        self._runtime.export_session(self._session_id, path.expanduser(), notes=json.dumps(note))

    def load(self, path: Path) -> None:
        """Go on with a saved chat. Raises StateMismatch for any other file; this chat is then unchanged."""
        session_id, note = self._runtime.import_session(path.expanduser())
        try:
            transcript = self._transcript_from(path, note)
        except StateMismatch:
            self._runtime.close_session(session_id)
            raise
        self._replace_session(session_id)
        self._transcript = transcript
        self.last_report = None

    def _transcript_from(self, path: Path, note: str) -> Transcript:
        runtime = self._runtime
        try:
            saved: Any = json.loads(note)
            if saved["kind"] != _NOTE_KIND or saved["version"] != _NOTE_VERSION:
                raise ValueError(f"kind {saved['kind']!r}, version {saved['version']!r}")
            return Transcript.resume(
                runtime.tokenizer,
                runtime.model_config.eos_token_ids,
                saved["messages"],
                bool(saved["closed"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, InvalidArgument) as error:
            raise StateMismatch(
                f"{path} holds a session, but no chat saved by `kakeya chat`: {error!r}"
            ) from error

    def _new_session(self) -> str:
        return self._runtime.create_session(
            client_label="chat",
            eos_token_ids=sorted(self._transcript.end_token_ids),
            pinned_prefix_tokens=self.pinned_tokens,
            recall_tokens=self._runtime.config.cache.recall,
        )

    def _replace_session(self, session_id: str) -> None:
        old, self._session_id = self._session_id, session_id
        self._runtime.close_session(old)
