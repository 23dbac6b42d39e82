"""How messages and tools reach a template: natively where it knows them, described where it does not."""

import json

import pytest

from kakeya.text import Tokenizer
from kakeya.text.prompting import Message, Prompter, ToolCall, written_tools
from kakeya.types import TokenizerFiles
from support.tiny import byte_level_files

CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tells the time.",
        "parameters": {"type": "object"},
        "strict": True,
    },
}
PLAIN = {"type": "function", "function": {"name": "plain"}}
TOOLS = written_tools([CLOCK, PLAIN])
CALL = ToolCall("call_1", "clock", '{"zone": "UTC"}')
TEMPLATE = "{% for m in messages %}<|user|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}<|user|>assistant:"
NATIVE = (
    "{# <tool_call> #}{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}<|assistant|>"
)


def prompter_of(template: str) -> tuple[Prompter, Tokenizer]:
    tokenizer = Tokenizer(TokenizerFiles(byte_level_files().tokenizer_json, chat_template=template))
    return Prompter(tokenizer, [0]), tokenizer


def written(template: str, messages: list[Message], tools: str = "") -> str:
    prompter, tokenizer = prompter_of(template)
    return tokenizer.decode(prompter.whole(messages, tools), special=True)


def test_tools_are_described_where_the_template_does_not_know_them() -> None:
    for opening, before in (([], ""), ([Message("system", "Be brief.")], "Be brief.\n\n")):
        text = written(TEMPLATE, [*opening, Message("user", "When?")], TOOLS)
        assert text.startswith(f"<|user|>system:{before}# Tools\n")
        assert f"<tools>\n{json.dumps(CLOCK)}\n{json.dumps(PLAIN)}\n</tools>" in text
        assert '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' in text
        assert text.endswith("<|end|><|user|>user:When?<|end|><|user|>assistant:")
        assert text.count("system:") == 1


def test_calls_and_results_are_written_out_where_the_template_does_not_know_them() -> None:
    messages = [
        Message("user", "When?"),
        Message("assistant", "", (CALL, CALL)),
        Message("tool", "12:00", tool_call_id="call_1"),
        Message("tool", "13:00", tool_call_id="call_1"),
        Message("assistant", "Noon.", (CALL,)),
        Message("tool", "14:00", tool_call_id="call_1"),
    ]
    call = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
    assert written(TEMPLATE, messages) == (
        "<|user|>user:When?<|end|>"
        f"<|user|>assistant:{call}\n{call}<|end|>"
        "<|user|>user:<tool_response>\n12:00\n</tool_response>\n<tool_response>\n13:00\n</tool_response><|end|>"
        f"<|user|>assistant:Noon.\n{call}<|end|>"
        "<|user|>user:<tool_response>\n14:00\n</tool_response><|end|><|user|>assistant:"
    )


def test_a_template_that_knows_tools_gets_everything() -> None:
    messages = [
        Message("assistant", "", (CALL, ToolCall("x", "plain", "not JSON"))),
        Message("tool", "12:00", tool_call_id="call_1", name="clock"),
    ]
    made = [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "clock", "arguments": {"zone": "UTC"}},
        },
        {"id": "x", "type": "function", "function": {"name": "plain", "arguments": "not JSON"}},
    ]
    expected = [
        {"role": "assistant", "content": "", "tool_calls": made},
        {"role": "tool", "content": "12:00", "tool_call_id": "call_1", "name": "clock"},
    ]
    assert written(NATIVE, messages, TOOLS) == (
        json.dumps([CLOCK, PLAIN]) + "".join(map(json.dumps, expected)) + "<|assistant|>"
    )


@pytest.mark.parametrize("tools", ["", TOOLS])
@pytest.mark.parametrize("closed", [False, True])
def test_what_is_new_completes_the_whole(tools: str, closed: bool) -> None:
    prompter, tokenizer = prompter_of(TEMPLATE)
    before = [Message("system", "Be brief."), Message("user", "When?")]
    call = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
    new = [Message("tool", "12:00", tool_call_id="call_1")]
    history = prompter.whole(before, tools) + tokenizer.encode(call) + [0] * closed
    answered = [*before, Message("assistant", "", (CALL,))]
    added = prompter.after_answer(answered, new, tools, closed=closed)
    assert added is not None
    assert history + added == prompter.whole([*answered, *new], tools)


def test_the_description_is_part_of_the_opening() -> None:
    prompter, tokenizer = prompter_of(TEMPLATE)
    messages = [Message("system", "Be brief."), Message("user", "When?")]
    whole = written(TEMPLATE, messages, TOOLS)
    opening = tokenizer.encode(whole[: whole.index("When?")])
    assert prompter.opening_tokens(messages, TOOLS) == len(opening)
    assert prompter.opening_tokens(messages, "") < len(opening)


def test_the_blanks_of_arguments_do_not_count() -> None:
    spaced = Message("assistant", "", (ToolCall("call_1", "clock", '{ "zone":"UTC" }'),))
    assert spaced.identity() == Message("assistant", "", (CALL,)).identity()
    others = [
        Message("assistant", "", (ToolCall("call_2", "clock", CALL.arguments),)),
        Message("assistant", "", (ToolCall("call_1", "clock", "{}"),)),
        Message("assistant", "", (ToolCall("call_1", "clock", "not JSON"),)),
        Message("assistant"),
        Message("user"),
        Message("tool", tool_call_id="call_1"),
    ]
    assert len({message.identity() for message in [spaced, *others]}) == 7
