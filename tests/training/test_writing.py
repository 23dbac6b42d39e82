"""A model writes conversations with itself: the same ones for the same seed, whoever else writes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from kakeya.errors import StepFailed
from kakeya.loading import LoadedModel, load_model
from kakeya.runtime import Runtime
from kakeya.training.conversations import Conversation, Conversations, answers_in, seed_of, temperature_of
from kakeya.training.settings import DataSettings
from kakeya.training.template import TemplatePieces, template_pieces
from kakeya.training.writing import ConversationWriter
from kakeya.types import SamplingParams, TokenEvent
from support.trainings import DATA, config_of

END = 0


@pytest.fixture
def runtime(model: LoadedModel) -> Iterator[Runtime]:
    with Runtime(model).start() as runtime:
        yield runtime


def pieces_of(model: LoadedModel | Runtime) -> TemplatePieces:
    return template_pieces(model.tokenizer, model.model_config.eos_token_ids)


def written(runtime: Runtime, settings: DataSettings, numbers: Sequence[int]) -> list[Conversation]:
    writer = ConversationWriter(runtime, pieces_of(runtime), settings)
    return sorted(writer.write(numbers), key=lambda each: each.number)


def test_a_seed_writes_the_same_conversations_however_many_at_once(
    chat_model: Path, conversations: Conversations
) -> None:
    few = load_model(str(chat_model), config_of(capacity=2))
    with Runtime(few).start() as runtime:
        again = written(runtime, DATA, range(0, 12, 3))
        others = written(runtime, replace(DATA, seed=4), range(3))
        assert runtime.free_slabs == 2
    for mine, its in zip(again, conversations.items[::3], strict=True):
        np.testing.assert_array_equal(mine.tokens, its.tokens)
        np.testing.assert_array_equal(mine.answers, its.answers)
    assert all(mine.tokens.tolist() != its.tokens.tolist() for mine, its in zip(others, again, strict=False))


def test_answers_are_what_the_model_answers(runtime: Runtime, conversations: Conversations) -> None:
    """At the conversation's temperature, with its seed, after the same words."""
    for conversation in conversations.items[:4]:
        answer = next(answers_in(conversation))
        session = runtime.create_session(eos_token_ids=sorted(conversations.ends))
        runtime.append(session, conversation.tokens[: answer.start].tolist())
        sampling = SamplingParams(
            temperature=temperature_of(conversation.number), seed=seed_of(DATA, conversation.number)
        )
        events = runtime.generate(session, answer.end - answer.start, sampling)
        said = [event.token_id for event in events if isinstance(event, TokenEvent)]
        assert said == conversation.tokens[answer.start : answer.end].tolist()
        runtime.close_session(session)


def test_conversations_are_full_unless_they_ended(conversations: Conversations) -> None:
    for conversation in conversations.items:
        assert conversation.tokens[0] == 1
        assert len(conversation.tokens) == DATA.tokens or conversation.tokens[-1] == END
        assert not conversation.answers[0]
        assert conversation.answers[-1]


def scripted(runtime: Runtime, replies: Sequence[Sequence[int]], tokens: int = 200) -> Conversation:
    """The conversation if the model said this, words and answers in turn."""
    writer = ConversationWriter(runtime, pieces_of(runtime), DataSettings(tokens=tokens))
    writing = writer._conversation(0)
    stream = next(writing)
    for reply in replies:
        stream.cancel()
        try:
            stream = writing.send(list(reply))
        except StopIteration as finished:
            conversation: Conversation = finished.value
            return conversation
    writing.close()
    raise AssertionError("it would go on")


def test_after_an_answer_that_ends_comes_the_next_question(runtime: Runtime) -> None:
    newline = runtime.tokenizer.encode("\n")
    spoken = scripted(runtime, [[9, 8, END], [20, 21, END], [7, END], [30, 31, 32]])
    expected = [1, 9, 8, END, *newline, 2, 20, 21, END, *newline, 1, 7, END, *newline, 2, 30, 31, 32]
    assert spoken.tokens.tolist() == expected
    marked = np.flatnonzero(spoken.answers).tolist()
    assert spoken.tokens[marked].tolist() == [20, 21, END, 30, 31, 32]


def test_what_a_user_begins_with_is_no_answer(runtime: Runtime) -> None:
    settings = DataSettings(tokens=200, openings=("What is",))
    writing = ConversationWriter(runtime, pieces_of(runtime), settings)._conversation(10)
    next(writing).cancel()
    writing.send([9, END]).cancel()
    with pytest.raises(StopIteration) as finished:
        writing.send([20])
    spoken = finished.value.value
    opening = runtime.tokenizer.encode("What is")
    assert spoken.tokens.tolist() == [1, *opening, 9, END, *runtime.tokenizer.encode("\n"), 2, 20]
    assert np.flatnonzero(spoken.answers).tolist() == [len(spoken.tokens) - 1]


def test_a_long_opening_leaves_room_for_an_answer(runtime: Runtime) -> None:
    settings = DataSettings(tokens=40, openings=("What is it " * 50,))
    (written,) = ConversationWriter(runtime, pieces_of(runtime), settings).write([10])
    assert len(written.tokens) == len(written.answers) <= settings.tokens
    assert written.answers.any()


def test_words_that_do_not_end_are_closed(runtime: Runtime) -> None:
    spoken = scripted(runtime, [[9, 8], [20]])
    assert spoken.tokens.tolist() == [1, 9, 8, END, *runtime.tokenizer.encode("\n"), 2, 20]


@pytest.mark.parametrize("words", [[], [END]])
def test_without_words_there_is_no_answer(runtime: Runtime, words: list[int]) -> None:
    assert not scripted(runtime, [words]).answers.any()


def test_a_conversation_ends_where_a_second_question_finds_no_room(runtime: Runtime) -> None:
    spoken = scripted(runtime, [[9, END], [20] * 9 + [END]], tokens=32)
    assert spoken.tokens[-1] == END
    assert spoken.answers.sum() == 10
    # The words leave no room for an answer.
    assert not scripted(runtime, [[9] * 31 + [END]], tokens=32).answers.any()


def test_at_most_three_questions(runtime: Runtime) -> None:
    spoken = scripted(runtime, [[9, END], [20, END]] * 3)
    assert spoken.answers.sum() == 6


def test_sessions_are_closed_when_the_reader_stops(runtime: Runtime) -> None:
    conversations = ConversationWriter(runtime, pieces_of(runtime), DATA).write(range(12))
    next(conversations)
    conversations.close()  # type: ignore[attr-defined]
    assert runtime.free_slabs == runtime.config.capacity


def test_a_failed_stream_is_raised_and_nothing_stays_open(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, steps = runtime.backend.launch, count()

    def failing(*planned: object) -> object:
        if next(steps) >= 12:
            raise RuntimeError("broken")
        return launch(*planned)  # type: ignore[arg-type]

    monkeypatch.setattr(runtime.backend, "launch", failing)
    with pytest.raises(StepFailed, match="broken"):
        list(ConversationWriter(runtime, pieces_of(runtime), DATA).write(range(8)))
    assert runtime.free_slabs == runtime.config.capacity
