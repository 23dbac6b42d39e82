"""Chats on the real model, in a memory of 128 tokens."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya.cli.conversation import Conversation
from kakeya.errors import InvalidArgument, KakeyaError, StateMismatch, StepFailed
from kakeya.runtime import Runtime
from kakeya.text import Tokenizer
from kakeya.text.transcript import Transcript, Turn
from kakeya.types import DoneEvent, FailedEvent, SamplingParams, StopReason, TokenizerFiles

GREEDY = SamplingParams()


@pytest.fixture
def empty_runtime(runtime: Runtime) -> Iterator[Runtime]:
    """The shared runtime, whose sessions are closed after the test."""
    with runtime:
        yield runtime


@pytest.fixture
def conversation(empty_runtime: Runtime) -> Conversation:
    return Conversation.begin(empty_runtime, GREEDY, max_tokens=32)


def say(conversation: Conversation, text: str) -> str:
    return "".join(conversation.ask(text))


def other(runtime: Runtime, system: str | None = None, max_tokens: int = 32) -> Conversation:
    return Conversation.begin(runtime, GREEDY, max_tokens, system)


def test_an_answer_streams_and_is_reported(conversation: Conversation) -> None:
    pieces = list(conversation.ask("What is 2+2?"))
    report = conversation.last_report
    assert report is not None
    assert len(pieces) > 3
    assert "".join(pieces) == report.text
    assert "4" in report.text
    assert report.stop_reason is StopReason.EOS
    assert report.time_to_first_token_seconds is not None
    assert 0 < report.time_to_first_token_seconds < report.total_seconds
    assert report.tokens_per_second is not None
    assert report.tokens_per_second > 0
    assert conversation.info().history_length == report.prompt_tokens + report.completion_tokens


def test_later_turns_append_only_what_is_new(runtime: Runtime, conversation: Conversation) -> None:
    say(conversation, "What is the largest planet?")
    before = conversation.info().history_length
    say(conversation, "And the smallest?")
    report = conversation.last_report
    assert report is not None
    assert report.prompt_tokens < 16
    assert report.cached_tokens >= before - 1
    assert not conversation.last_turn_restarted


@pytest.mark.parametrize("max_tokens", [3, 32])
def test_the_history_is_what_the_template_writes(empty_runtime: Runtime, max_tokens: int) -> None:
    """Whether the model ended its answers itself, or was cut and had to be closed."""
    conversation = other(empty_runtime, max_tokens=max_tokens)
    texts = ["What is 2+2?", "And 3+3?"]
    answers = [say(conversation, text) for text in texts]
    messages = [
        {"role": role, "content": content}
        for pair in zip(texts, answers, strict=True)
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]
    written = empty_runtime.tokenizer.chat_ids(messages, add_generation_prompt=False)
    tokens = list(empty_runtime._store.get(conversation.info().session_id, "local").sequence.tokens)
    # The last answer may have been cut before its end token, and the template ends with a newline.
    assert written[: len(tokens)] == tokens
    assert len(written) - len(tokens) <= 2


def test_the_opening_is_pinned_up_to_half_the_memory(runtime: Runtime, conversation: Conversation) -> None:
    assert conversation.info().sink == conversation.opening_tokens == conversation.pinned_tokens > 4
    with runtime:
        long = other(runtime, system="Be brief. " * 100)
        assert long.opening_tokens > 128
        assert long.info().sink == 64
        assert say(long, "Hello")
        assert long.info().dropped_token_count > 0


def test_cancel_keeps_what_was_said_and_the_next_turn_works(empty_runtime: Runtime) -> None:
    long = other(empty_runtime, max_tokens=100)
    long.cancel()  # nothing runs yet: nothing happens
    pieces = []
    for piece in long.ask("Count from one to one hundred in words."):
        pieces.append(piece)
        if len(pieces) == 5:
            threading.Thread(target=long.cancel).start()
    report = long.last_report
    assert report is not None
    assert report.stop_reason is StopReason.CANCELLED
    assert 5 <= report.completion_tokens < 100
    assert report.text == "".join(pieces)
    before = long.info().history_length
    assert before == report.prompt_tokens + report.completion_tokens
    assert say(long, "What is the largest planet?")
    # The unfinished answer had to be closed: one token more than after a finished one.
    assert long.last_report is not None
    assert long.last_report.cached_tokens >= before - 1


def test_a_reader_who_leaves_cancels(empty_runtime: Runtime) -> None:
    long = other(empty_runtime, max_tokens=100)
    pieces = long.ask("Count from one to one hundred in words.")
    first = next(pieces)
    pieces.close()
    assert long.last_report is not None
    assert long.last_report.stop_reason is StopReason.CANCELLED
    assert long.last_report.text.startswith(first)
    assert long.info().state == "idle"
    assert say(long, "Hello")


def test_reset_begins_again(conversation: Conversation) -> None:
    first = say(conversation, "Hello, who are you?")
    say(conversation, "Tell me more.")
    conversation.reset()
    assert conversation.info().history_length == 0
    assert conversation.last_report is None
    assert say(conversation, "Hello, who are you?") == first


def test_a_saved_chat_goes_on_as_if_nothing_had_happened(
    runtime: Runtime, conversation: Conversation, tmp_path: Path
) -> None:
    path = tmp_path / "chat.safetensors"
    say(conversation, "My favourite colour is green.")
    conversation.save(path)
    saved_length = conversation.info().history_length
    expected = say(conversation, "What is my favourite colour?")
    conversation.reset()
    say(conversation, "Something else.")
    conversation.load(path)
    assert conversation.info().history_length == saved_length
    assert conversation.last_report is None
    assert say(conversation, "What is my favourite colour?") == expected


def test_a_loaded_chat_brings_its_system_message(empty_runtime: Runtime, tmp_path: Path) -> None:
    with empty_runtime:
        strict = other(empty_runtime, system="Answer in one word.")
        say(strict, "Which is the largest planet?")
        strict.save(tmp_path / "strict")
    chat = other(empty_runtime)
    chat.save(tmp_path / "plain")
    chat.load(tmp_path / "strict")
    pinned = chat.info().sink
    chat.reset()
    assert chat.info().sink == pinned == chat.opening_tokens
    chat.load(tmp_path / "plain")
    assert chat.opening_tokens != pinned


def test_a_cut_answer_is_closed_after_loading_too(empty_runtime: Runtime, tmp_path: Path) -> None:
    cut = other(empty_runtime, max_tokens=3)
    say(cut, "Count from one to ten.")
    cut.save(tmp_path / "cut")
    direct = say(cut, "And now?")
    cut.load(tmp_path / "cut")
    assert say(cut, "And now?") == direct


@pytest.mark.parametrize(
    "note",
    [
        "",
        "not json",
        "[]",
        "{}",
        json.dumps({"kind": "other", "version": 1, "messages": [], "closed": True}),
        json.dumps({"kind": "kakeya-chat", "version": 99, "messages": [], "closed": True}),
        json.dumps({"kind": "kakeya-chat", "version": 1, "messages": [{"role": "user"}], "closed": True}),
        json.dumps({"kind": "kakeya-chat", "version": 1, "messages": [1], "closed": True}),
    ],
)
def test_a_session_that_is_no_chat_is_refused(
    runtime: Runtime, conversation: Conversation, tmp_path: Path, note: str
) -> None:
    say(conversation, "Hello")
    before = conversation.info()
    runtime.export_session(before.session_id, tmp_path / "state", notes=note)
    with pytest.raises(StateMismatch, match="no chat saved by"):
        conversation.load(tmp_path / "state")
    assert conversation.info().session_id == before.session_id
    assert conversation.info().history_length == before.history_length
    conversation.reset()  # possible only if the refused session gave its slab back


@pytest.mark.parametrize("content", [None, b"", b"something else entirely"])
def test_a_foreign_file_is_refused(conversation: Conversation, tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "foreign").write_bytes(content)
    say(conversation, "Hello")
    before = conversation.info()
    with pytest.raises(StateMismatch, match="foreign"):
        conversation.load(tmp_path / "foreign")
    assert conversation.info().session_id == before.session_id
    assert say(conversation, "Still here?")


def test_saving_where_nothing_can_be_saved(conversation: Conversation, tmp_path: Path) -> None:
    with pytest.raises(KakeyaError, match="cannot write"):
        conversation.save(tmp_path / "no" / "such" / "folder")


def test_a_template_that_rewrites_restarts_the_session(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(conversation, "Hello")
    first = conversation.info()
    usual = Transcript.next_turn

    def rewriting(transcript: Transcript, text: str) -> Turn:
        return Turn(usual(transcript, text).token_ids, restarts=True)

    monkeypatch.setattr(Transcript, "next_turn", rewriting)
    say(conversation, "Again")
    assert conversation.last_turn_restarted
    assert conversation.info().session_id != first.session_id
    report = conversation.last_report
    assert report is not None
    assert conversation.info().history_length == report.prompt_tokens + report.completion_tokens


def test_a_failed_answer_is_raised_and_the_chat_goes_on(
    runtime: Runtime, conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> Iterator[DoneEvent]:
        raise FailedEvent(StepFailed("on purpose")).error
        yield

    usual = runtime.generate
    monkeypatch.setattr(runtime, "generate", failing)
    with pytest.raises(StepFailed, match="on purpose"):
        say(conversation, "Hello")
    assert conversation.last_report is None
    monkeypatch.setattr(runtime, "generate", usual)
    assert say(conversation, "Hello again")


def test_a_model_without_a_template_is_refused(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Tokenizer(TokenizerFiles(runtime.tokenizer.files.tokenizer_json))
    monkeypatch.setattr(runtime, "tokenizer", bare)
    with pytest.raises(InvalidArgument, match=r"generate --raw"):
        Conversation.begin(runtime, GREEDY, 8)
