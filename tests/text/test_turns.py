"""What several messages and tools add to a session, checked against rendering the whole at once."""

from typing import Any

import pytest

from kakeya.errors import InvalidArgument
from kakeya.text import Tokenizer
from kakeya.text.turns import End, Turns, message_start, opening_of, pinned_tokens
from kakeya.types import TokenizerFiles
from support.tiny import byte_level_files

END = 0
CHATML = (
    "{% for m in messages %}<|user|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant:{% endif %}"
)
# As Qwen's: tools in the system message, calls in tags, results of tools as one message of the user's.
WITH_TOOLS = (
    "{% if tools %}<|user|>system:{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|user|>user:{% endif %}"
    "[{{ m.content }}]"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|end|>{% endif %}"
    "{% elif not (tools and m.role == 'system') %}<|user|>{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|user|>assistant:{% endif %}"
)
# Tools stand before the newest question, as Mistral's do.
MOVING = (
    "{% for m in messages %}{% if loop.last and tools %}{{ tools | tojson }}{% endif %}"
    "<|user|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}<|user|>assistant:"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result without a call') }}{% endif %}"
    "<|user|>{{ m.content }}<|end|>{% endfor %}<|user|>"
)
TOOLS = [{"type": "function", "function": {"name": "clock"}}]


def turns_of(template: str) -> tuple[Turns, Tokenizer]:
    tokenizer = Tokenizer(TokenizerFiles(byte_level_files().tokenizer_json, chat_template=template))
    return Turns(tokenizer, [END]), tokenizer


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": {}}}
SYSTEM = said("system", "Be brief.")
NEW = [
    [said("user", "And?")],
    [said("user", "And?"), said("assistant", "Yes."), said("user", "So?")],
    [said("tool", "12:00"), said("tool", "13:00")],
    [said("tool", "12:00"), said("user", "Thanks")],
    [said("system", "Be longer."), said("user", "And?")],
]


@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS])
@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize("new", NEW)
@pytest.mark.parametrize("opening", [[], [SYSTEM]])
@pytest.mark.parametrize("closed", [False, True])
def test_what_is_added_completes_the_whole(
    template: str, tools: list[Any], new: list[Any], opening: list[Any], closed: bool
) -> None:
    turns, tokenizer = turns_of(template)
    before = [*opening, said("user", "One"), said("assistant", "Two"), said("user", "Three")]
    history = turns.whole(before, tools) + tokenizer.encode("Four") + [END] * closed
    added = turns.after_answer(before, new, tools, closed=closed)
    assert added is not None
    assert history + added == turns.whole([*before, said("assistant", "Four"), *new], tools)


def test_a_loop_of_calls_goes_on() -> None:
    turns, tokenizer = turns_of(WITH_TOOLS)
    calling = said("assistant", "", tool_calls=[CALL])
    before = [said("user", "When?"), calling, said("tool", "12:00")]
    answer = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    new = [said("tool", "12:01")]
    history = turns.whole(before, TOOLS) + tokenizer.encode(answer) + [END]
    added = turns.after_answer(before, new, TOOLS, closed=True)
    assert added is not None
    assert history + added == turns.whole([*before, calling, *new], TOOLS)


def test_an_answer_to_no_user_goes_on() -> None:
    turns, tokenizer = turns_of(CHATML)
    history = turns.whole([SYSTEM]) + tokenizer.encode("Hi") + [END]
    added = turns.after_answer([SYSTEM], [said("user", "Hello")], closed=True)
    assert added is not None
    assert history + added == turns.whole([SYSTEM, said("assistant", "Hi"), said("user", "Hello")])


def test_a_template_that_moves_its_tools_cannot_be_appended_to() -> None:
    turns, _ = turns_of(MOVING)
    before, new = [said("user", "One")], [said("user", "Two")]
    assert turns.after_answer(before, new, TOOLS, closed=True) is None
    assert turns.after_answer(before, new, closed=True) is not None


def test_a_part_that_the_template_refuses_is_left_to_the_whole() -> None:
    turns, _ = turns_of(STRICT)
    assert turns.after_answer([said("user", "One")], [said("tool", "Two")], closed=True) is None


def test_tools_belong_to_the_opening() -> None:
    turns, tokenizer = turns_of(WITH_TOOLS)
    text = '<|user|>system:Be brief.{"type": "function", "function": {"name": "clock"}}<|end|><|user|>user:'
    assert turns.opening_tokens([SYSTEM], TOOLS) == len(tokenizer.encode(text))
    assert tokenizer.template_knows_tools
    assert not turns_of(CHATML)[1].template_knows_tools
    assert not turns_of(MOVING)[1].template_knows_tools, "it writes calls in a way that we do not read"


def test_the_opening_is_what_comes_before_the_conversation() -> None:
    developer = said("developer", "Be kind.")
    assert opening_of([SYSTEM, developer, said("user", "x"), SYSTEM]) == [SYSTEM, developer]
    assert opening_of([said("user", "x")]) == []
    assert opening_of([SYSTEM]) == [SYSTEM]


def test_a_template_that_refuses_everything_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="not today"):
        turns_of("{{ raise_exception('not today') }}")


def test_the_opening_is_pinned_up_to_half_of_what_is_remembered() -> None:
    assert [pinned_tokens(opening, 4, 60) for opening in (0, 4, 20, 32, 33, 1000)] == [4, 4, 20, 32, 32, 32]
    assert pinned_tokens(0, 50, 14) == 50


def templated(template: str) -> Tokenizer:
    return Tokenizer(TokenizerFiles(byte_level_files().tokenizer_json, chat_template=template))


def test_a_message_that_goes_on_is_cut_where_it_ends() -> None:
    tokenizer = templated(CHATML)
    asked, begun = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}
    ids = Turns(tokenizer, [END]).whole([asked, begun], end=End.WITHIN)
    assert ids == tokenizer.encode(tokenizer.render_chat([asked]) + "Well, ")


def test_a_template_that_hides_the_last_message_cannot_go_on() -> None:
    hiding = "{% for m in messages %}<|user|>{{ m.role }}<|end|>{% endfor %}{{ messages[0].content }}<|user|>"
    turns = Turns(templated(hiding), [END])
    asked, begun = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}
    with pytest.raises(InvalidArgument, match="cannot go on"):
        turns.whole([asked, begun], end=End.WITHIN)


def test_variables_reach_the_template_wherever_it_is_rendered() -> None:
    template = "{{ mood }}" + CHATML
    turns, asked = Turns(templated(template), [END]), {"role": "user", "content": "Hi"}
    plain, calm = (turns.whole([asked], variables=each) for each in (None, {"mood": "calm"}))
    added = len(calm) - len(plain)
    assert added > 0
    assert turns.opening_tokens([], variables={"mood": "calm"}) == turns.opening_tokens([]) + added
    own = turns.whole([asked], variables={"messages": [], "add_generation_prompt": False})
    assert own == plain, "what the template is given anyway stays"


def test_what_begins_a_message() -> None:
    one = "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    _, tokenizer = turns_of(one)
    start = message_start(tokenizer)
    assert start is not None
    assert tokenizer.token_text(start) == "<|user|>"
    _, plain = turns_of("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert message_start(plain) is None
    assert message_start(Tokenizer(TokenizerFiles(byte_level_files().tokenizer_json))) is None
