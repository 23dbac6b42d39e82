"""Lets a verifier write conversations with itself, many at once.

From the bare template, and a few first words, the model writes what a user might ask (a model that was tuned
on conversations knows how they go on), then it answers. Words are drawn at temperature 1, answers at the
conversation's own.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from kakeya.engine.stream import EventStream
from kakeya.errors import KakeyaError
from kakeya.runtime import Runtime
from kakeya.training.conversations import Conversation, opening_of, seed_of, temperature_of
from kakeya.training.settings import DataSettings
from kakeya.training.template import TemplatePieces
from kakeya.types import DoneEvent, FailedEvent, SamplingParams, TokenEvent

_POLL_S = 0.003
_CALLERS = 64
# Those whose stream has ended go on together: a step with prompts in it is slower, and a device does not run
# ahead of it.
_GATHER_S = 0.1
_MOST_TURNS = 3
_WORDS_TOP_P = 0.95

# A conversation as it is written: yields the stream that it waits for, is sent what the stream gave.
Writing = Generator[EventStream, list[int], Conversation]


class ConversationWriter:
    """Writes conversations on the sessions of a runtime, as many at once as it has room for.

    A conversation depends on its number and the settings alone, as far as the runtime's numerics allow.
    """

    def __init__(self, runtime: Runtime, pieces: TemplatePieces, settings: DataSettings) -> None:
        self._runtime, self._pieces, self._settings = runtime, pieces, settings
        self._words_limit = max(8, settings.tokens // 4)

    def write(self, numbers: Sequence[int]) -> Generator[Conversation, None, None]:
        """The conversations of these numbers, as they are finished. Raises what a generate raises."""
        waiting = iter(numbers)
        reading: list[_Reading] = []
        # A call waits until the engine has finished its step: together they wait no longer than one does.
        with ThreadPoolExecutor(_CALLERS) as callers:
            calls: set[Future[_Reading | Conversation]] = set()
            went_on = time.monotonic()
            try:
                while True:
                    for number in self._room(waiting, len(reading) + len(calls)):
                        calls.add(callers.submit(_advance, self._conversation(number), None))
                    if not reading and not calls:
                        return
                    for call in [call for call in calls if call.done()]:
                        calls.remove(call)
                        outcome = call.result()
                        if isinstance(outcome, Conversation):
                            yield outcome
                        else:
                            reading.append(outcome)
                    finished = [each for each in reading if each.take()]
                    if time.monotonic() - went_on > _GATHER_S or len(finished) == len(reading):
                        calls |= {callers.submit(_advance, each.writing, each.tokens) for each in finished}
                        reading = [each for each in reading if not each.is_done]
                        went_on = time.monotonic()
                    time.sleep(_POLL_S)
            finally:
                self._abandon(reading, calls)

    def _room(self, waiting: Iterator[int], busy: int) -> list[int]:
        room = self._runtime.config.capacity - busy
        return [number for _, number in zip(range(room), waiting, strict=False)]

    def _abandon(self, reading: "Sequence[_Reading]", calls: "set[Future[_Reading | Conversation]]") -> None:
        """Close the sessions of what will not be finished."""
        outcomes = [call.result() for call in calls if call.exception() is None]
        for each in (*reading, *outcomes):
            if isinstance(each, _Reading):
                with suppress(KakeyaError):  # an engine that died has no sessions to close
                    each.writing.close()

    def _conversation(self, number: int) -> Writing:
        """Words and answers in turn until the conversation is full."""
        pieces, length = self._pieces, self._settings.tokens
        session = self._runtime.create_session(client_label="training", eos_token_ids=sorted(pieces.ends))
        seed = seed_of(self._settings, number)
        words_sampling = SamplingParams(temperature=1.0, top_p=_WORDS_TOP_P, seed=seed)
        answer_sampling = SamplingParams(temperature=temperature_of(number), seed=seed)
        new: Sequence[int] = [*pieces.opening, *self._first_words(number)]
        tokens, answers = list(new), [False] * len(new)
        try:
            for _ in range(_MOST_TURNS):
                words = yield self._generate(session, new, self._words_limit, words_sampling)
                to_answer = self._after_words(words)
                room = length - len(tokens) - len(words) - len(to_answer)
                if not to_answer or room < 2:
                    break
                tokens += [*words, *to_answer]
                answer = yield self._generate(session, to_answer, room, answer_sampling)
                answers += [False] * (len(tokens) - len(answers)) + [True] * len(answer)
                tokens += answer
                new = pieces.to_question if answer and answer[-1] in pieces.ends else ()
                if not new or length - len(tokens) - len(new) < 2 * self._words_limit:
                    break
                tokens += new
            end = min(len(answers), length)
            written, marks = np.array(tokens[:end], dtype=np.int32), np.array(answers[:end], dtype=np.bool_)
            return Conversation(number, written, marks)
        finally:
            self._runtime.close_session(session)

    def _first_words(self, number: int) -> list[int]:
        return self._runtime.tokenizer.encode(opening_of(self._settings, number))[: self._words_limit]

    def _after_words(self, words: Sequence[int]) -> Sequence[int]:
        """What leads from a user's words to the answer; nothing where the words are none or ended oddly."""
        to_answer = self._pieces.to_answer
        if not words or words[-1] not in self._pieces.ends:
            return to_answer if words else ()
        return to_answer[1:] if words[-1] == to_answer[0] and len(words) > 1 else ()

    def _generate(
        self, session: str, new: Sequence[int], limit: int, sampling: SamplingParams
    ) -> EventStream:
        self._runtime.append(session, new)
        return self._runtime.generate(session, limit, sampling)


@dataclass
class _Reading:
    """A conversation that waits for its stream, and what it has read of it."""

    writing: Writing
    stream: EventStream
    tokens: list[int] = field(default_factory=list)
    is_done: bool = False

    def take(self) -> bool:
        """Read what waits; whether that was the end. Raises the stream's error."""
        for event in self.stream.poll_all():
            if isinstance(event, TokenEvent):
                self.tokens.append(event.token_id)
            elif isinstance(event, FailedEvent):
                raise event.error
            else:
                self.is_done = self.is_done or isinstance(event, DoneEvent)
        return self.is_done


def _advance(writing: Writing, tokens: list[int] | None) -> "_Reading | Conversation":
    """Let a conversation go on with what it waited for, to the next thing that it waits for."""
    try:
        stream = next(writing) if tokens is None else writing.send(tokens)
    except StopIteration as finished:
        conversation: Conversation = finished.value
        return conversation
    return _Reading(writing, stream)
