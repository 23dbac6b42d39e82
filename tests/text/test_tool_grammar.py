"""Tool calls that a grammar allows: as asked, with the right arguments, and nothing else."""

import json
from collections.abc import Sequence
from typing import Any

import jsonschema  # comes with schemathesis
import pytest

from kakeya.errors import InvalidArgument
from kakeya.text import Tokenizer, grammar as grammar_module
from kakeya.text.grammar import GrammarCompiler, ToolSpec
from kakeya.text.tool_calls import write_tool_call
from support.grammars import CLOCK, TOOLS, WEATHER, accepts, allowed, parse_tool_calls, write_random
from support.tiny import byte_level_files


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_are_allowed_as_asked(
    tokenizer: Tokenizer, compiler: GrammarCompiler, required: bool, parallel: bool
) -> None:
    grammar = compiler.tool_calls(TOOLS, required=required, parallel=parallel)
    paris, clock = write_tool_call("get_weather", '{"city": "Paris"}'), write_tool_call("get_clock", "{}")
    assert accepts(tokenizer, grammar, paris)
    assert accepts(tokenizer, grammar, clock)
    assert accepts(tokenizer, grammar, f"{paris}\n{clock}\n{paris}") == parallel
    for text in ("", "Just text, with a < and a <tool_cal", "日本語\n\n"):
        assert accepts(tokenizer, grammar, text) != required
    assert accepts(tokenizer, grammar, f"Let me see.\n{paris}") != required
    for wrong in (
        "<tool_call>",
        "Hm <tool_call> what",
        f"{paris} and more",
        write_tool_call("get_weather", "{}"),
        write_tool_call("get_weather", '{"city": "Constantinople"}'),
        write_tool_call("get_weather", '{"city": "Paris", "days": 10}'),
        write_tool_call("get_clock", '{"city": "Paris"}'),
        write_tool_call("get_time", "{}"),
    ):
        assert not accepts(tokenizer, grammar, wrong)


@pytest.mark.parametrize("seed", range(12))
def test_random_required_calls_are_right(tokenizer: Tokenizer, compiler: GrammarCompiler, seed: int) -> None:
    grammar = compiler.tool_calls(TOOLS, required=True, parallel=seed % 2 == 0)
    calls = parse_tool_calls(write_random(tokenizer, grammar.start(), seed))
    assert calls
    for name, arguments in calls:
        schema = WEATHER.parameters if name == "get_weather" else {"type": "object", "maxProperties": 0}
        jsonschema.Draft202012Validator(schema).validate(json.loads(arguments))


def test_a_tags_own_token_opens_a_call(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    [first] = allowed(compiler.tool_calls([CLOCK], required=True, parallel=False).start().masks(())[0])
    has_token = tokenizer.token_bytes(tokenizer.encode("<tool_call>")[-1]) == b"<tool_call>"
    assert tokenizer.token_bytes(first) == (b"<tool_call>" if has_token else b"<")
    free = compiler.tool_calls([CLOCK], required=False, parallel=False).start()
    assert first in allowed(free.masks(())[0])
    assert tokenizer.decode(tokenizer.encode("a<tool_call>")) == "a<tool_call>"


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ([], "tools must not be empty"),
        ([CLOCK, WEATHER, ToolSpec("get_clock", {})], "'get_clock' is there twice"),
        ([ToolSpec("f", {"type": "string"})], "parameters of tool 'f' must be of type object, got 'string'"),
        ([ToolSpec("f", {"type": ["null"]})], "must be of type object"),
        (
            [CLOCK, ToolSpec("f", {"properties": {"a": {"type": "array", "uniqueItems": True}}})],
            r"parameters of tool 'f' cannot be compiled at #/properties/a: .*uniqueItems",
        ),
        ([ToolSpec("f", {"x-guidance": {}})], "parameters of tool 'f': x-guidance"),
    ],
)
def test_tools_that_cannot_be_honoured_are_refused(
    plain: GrammarCompiler, tools: Sequence[ToolSpec], problem: str
) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        plain.tool_calls(tools, required=True, parallel=True)


def test_tools_that_do_not_fit_into_one_grammar_are_refused(
    plain: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "tool_call_lark", lambda *args, **options: "start: missing")
    with pytest.raises(InvalidArgument, match="tools cannot be compiled together: .*missing"):
        plain.tool_calls([ToolSpec("alone")], required=True, parallel=False)


@pytest.mark.parametrize("kind", [{}, {"type": "object"}, {"type": ["object", "null"]}], ids=str)
def test_arguments_are_always_an_object(plain: GrammarCompiler, kind: dict[str, Any]) -> None:
    tokenizer = Tokenizer(byte_level_files())
    grammar = plain.tool_calls([ToolSpec("f", kind)], required=True, parallel=False)
    assert accepts(tokenizer, grammar, write_tool_call("f", '{"a": 1}'))
    assert not accepts(tokenizer, grammar, write_tool_call("f", "null"))
