"""What a chat appends, checked against rendering the whole chat at once."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kakeya.errors import InvalidArgument
from kakeya.models.checkpoint import open_checkpoint
from kakeya.text import Tokenizer
from kakeya.text.transcript import Transcript
from kakeya.types import TokenizerFiles

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BOS, EOS, START, END = range(4)

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As ChatML, but what the assistant said loses its blanks.
TRIMMING = CHATML.replace("m['content']", "(m['content'] | trim)")
# The system message goes into the last user message, so earlier turns change with every new one.
MOVING = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{% set ns.system = m['content'] + '. ' %}"
    "{% elif m['role'] == 'user' %}"
    "{{ '[INST]' + (ns.system if loop.last else '') + m['content'] + '[/INST]' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
# Nothing special closes an answer.
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def byte_tokenizer(template: str) -> Tokenizer:
    """One token per byte after four special ones: every boundary is where the text has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index + len(SPECIAL) for index, token in enumerate(alphabet)}
    vocabulary |= {token: index for index, token in enumerate(SPECIAL)}
    encoder = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return Tokenizer(TokenizerFiles(encoder.to_str().encode(), template, bos_token="<s>", eos_token="</s>"))


def converse(
    transcript: Transcript, tokenizer: Tokenizer, turns: list[tuple[str, str]], end: int | None
) -> list[int]:
    """The history a session would hold after these turns, each answer closed by `end` when there is one."""
    history: list[int] = []
    for text, answer in turns:
        turn = transcript.next_turn(text)
        history = turn.token_ids if turn.restarts else history + turn.token_ids
        history = history + tokenizer.encode(answer) + ([] if end is None else [end])
        transcript.add(text, answer, closed=end is not None)
    return history


TURNS = [("Hello there", "Hi."), ("And now?", "Now you."), ("Bye", "Goodbye")]


def messages_of(turns: list[tuple[str, str]], system: str | None) -> list[dict[str, str]]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for text, answer in turns:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return messages


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("template, end", [(CHATML, END), (MOVING, EOS), (PLAIN, None)])
def test_appended_turns_are_the_whole_conversation(
    template: str, end: int | None, system: str | None
) -> None:
    tokenizer = byte_tokenizer(template)
    transcript = Transcript(tokenizer, [EOS], system)
    history = converse(transcript, tokenizer, TURNS, end)
    whole = tokenizer.chat_ids(messages_of(TURNS, system), add_generation_prompt=False)
    # The template may write more after the last answer; the history stops at the answer's end.
    assert len(whole) - len(history) <= 1
    if template is MOVING and system is not None:
        assert transcript.next_turn("More").restarts
    else:
        assert whole[: len(history)] == history
        assert not transcript.next_turn("More").restarts


@pytest.mark.parametrize("end", [END, None])
def test_an_answer_is_closed_once_whether_or_not_the_model_did(end: int | None) -> None:
    tokenizer = byte_tokenizer(CHATML)
    transcript = Transcript(tokenizer, [EOS])
    converse(transcript, tokenizer, TURNS[:1], end)
    added = transcript.next_turn("Next").token_ids
    text = "\n<|im_start|>user\nNext<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(added, special=True) == ("" if end is not None else "<|im_end|>") + text


def test_an_answer_closed_by_another_end_token_is_not_closed_twice() -> None:
    tokenizer = byte_tokenizer(CHATML)
    transcript = Transcript(tokenizer, [EOS])
    converse(transcript, tokenizer, TURNS[:1], EOS)
    assert transcript.next_turn("Next").token_ids[0] not in (END, EOS)


def test_what_was_said_stays_as_it_was_said() -> None:
    tokenizer = byte_tokenizer(TRIMMING)
    transcript = Transcript(tokenizer, [END])
    history = converse(transcript, tokenizer, [("Hello", "  with blanks  "), ("More", "x")], END)
    assert not transcript.next_turn("More").restarts
    assert "assistant\n  with blanks  <|im_end|>\n" in tokenizer.decode(history, special=True)


def test_a_restart_writes_the_whole_conversation() -> None:
    tokenizer = byte_tokenizer(MOVING)
    transcript = Transcript(tokenizer, [EOS], "Be brief")
    converse(transcript, tokenizer, TURNS[:2], EOS)
    turn = transcript.next_turn("Last")
    assert turn.restarts
    assert tokenizer.decode(turn.token_ids, special=True) == (
        "<s>[INST]Hello there[/INST]Hi.</s>[INST]And now?[/INST]Now you.</s>[INST]Be brief. Last[/INST]"
    )


@pytest.mark.parametrize(
    "template, model_ends, ends",
    [(CHATML, [EOS], {EOS, END}), (CHATML, [END], {END}), (MOVING, [], {EOS}), (PLAIN, [EOS], {EOS})],
)
def test_the_templates_own_end_token_ends_an_answer_too(
    template: str, model_ends: list[int], ends: set[int]
) -> None:
    assert Transcript(byte_tokenizer(template), model_ends).end_token_ids == ends


def test_next_turn_changes_nothing() -> None:
    tokenizer = byte_tokenizer(CHATML)
    transcript = Transcript(tokenizer, [END])
    converse(transcript, tokenizer, TURNS, END)
    assert transcript.next_turn("Same") == transcript.next_turn("Same")
    assert len(transcript.messages) == 2 * len(TURNS)


@pytest.mark.parametrize(
    "template, system, opening",
    [
        (CHATML, None, "<|im_start|>user\n"),
        (CHATML, "Be brief.", "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"),
        (MOVING, "Be brief", "<s>[INST]Be brief. "),
        ("{{ messages[0]['content'] }}", None, ""),
        ("always the same", None, ""),
    ],
)
def test_the_opening_is_what_comes_before_the_users_words(
    template: str, system: str | None, opening: str
) -> None:
    tokenizer = byte_tokenizer(template)
    assert Transcript(tokenizer, [EOS], system).opening_tokens() == len(tokenizer.encode(opening))


def test_a_forked_transcript_goes_its_own_way() -> None:
    transcript = Transcript(byte_tokenizer(CHATML), [EOS], "Be brief.")
    transcript.add("Hello", "Hi", closed=True)
    twin = transcript.fork()
    assert twin.next_turn("More") == transcript.next_turn("More")
    twin.add("More", "No", closed=False)
    assert (len(twin.messages), len(transcript.messages)) == (5, 3)
    assert (twin.answer_is_closed, transcript.answer_is_closed) == (False, True)


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_resumed_transcript_goes_on_alike(system: str | None) -> None:
    tokenizer = byte_tokenizer(CHATML)
    transcript = Transcript(tokenizer, [EOS], system)
    converse(transcript, tokenizer, TURNS, END)
    resumed = Transcript.resume(tokenizer, [EOS], transcript.messages, closed=True)
    assert resumed.system == system
    assert resumed.messages == transcript.messages
    assert resumed.next_turn("More") == transcript.next_turn("More")
    assert Transcript.resume(tokenizer, [EOS], [], closed=False).messages == []


@pytest.mark.parametrize("roles", [["user"], ["assistant", "user"], ["user", "system"], ["user", "user"]])
def test_messages_out_of_order_are_refused(roles: list[str]) -> None:
    messages = [{"role": role, "content": "x"} for role in roles]
    with pytest.raises(InvalidArgument, match="user, assistant"):
        Transcript.resume(byte_tokenizer(CHATML), [EOS], messages, closed=True)


def test_a_model_without_a_template_is_refused() -> None:
    files = byte_tokenizer(CHATML).files
    with pytest.raises(InvalidArgument, match="no chat template"):
        Transcript(Tokenizer(TokenizerFiles(files.tokenizer_json)), [EOS])


@pytest.fixture(scope="module")
def real_tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer(open_checkpoint(default_model).tokenizer_files())


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|>"), min_size=1, max_size=12)


@settings(max_examples=40)
@given(turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), system=st.none() | WORDS)
def test_the_default_model_reads_what_its_template_writes(
    real_tokenizer: Tokenizer, turns: list[tuple[str, str]], system: str | None
) -> None:
    end = real_tokenizer.eos_id
    assert end is not None
    transcript = Transcript(real_tokenizer, [end], system)
    history = converse(transcript, real_tokenizer, turns, end)
    added = transcript.next_turn("And?").token_ids
    messages = [*messages_of(turns, system), {"role": "user", "content": "And?"}]
    assert history + added == real_tokenizer.chat_ids(messages)
