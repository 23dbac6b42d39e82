"""What grammars are asked for, JSON Schemas and tools, and what they then allow."""

import random
from typing import Any

from hypothesis import strategies as st

from kakeya.text import Detokenizer, Tokenizer
from kakeya.text.grammar import Grammar, GrammarState, ToolSpec
from kakeya.text.tool_calls import ArgumentsPiece, CallBegin, CallEnd, ToolCallParser

EOS = 0
WEATHER = ToolSpec(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/place"}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"place": {"type": "string", "maxLength": 6}},
    },
    "The weather // of a # place",
)
CLOCK = ToolSpec("get_clock")
TOOLS = [WEATHER, CLOCK]

_names = st.sampled_from(["a", "b", "name", "größe", "x y", 'q"', "\\", "</s>", "<|end|>"])
_constants = st.sampled_from(
    [None, True, 0, -1.5, 1e3, "", "hello", 'a "b" \\ \n', "日本語", [1, "x"], {"a": {}}]
)


def _bounds(low: str, high: str, least: int, span: int) -> st.SearchStrategy[dict[str, int]]:
    return st.builds(
        lambda start, width: {low: start, high: start + width}, st.integers(least, 5), st.integers(0, span)
    )


_leaves = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    _bounds("minimum", "maximum", -20, 40).map(lambda bounds: {"type": "integer", **bounds}),
    _bounds("minLength", "maxLength", 0, 5).map(lambda bounds: {"type": "string", **bounds}),
    st.sampled_from(["^[a-c]{2,4}$", "^(ja|nein)$", "^\\d{3}-\\w$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(["date", "uuid", "ipv4"]).map(lambda kind: {"type": "string", "format": kind}),
    st.lists(_constants, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    _constants.map(lambda value: {"const": value}),
)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    properties = draw(st.dictionaries(_names, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    first = draw(st.lists(inner, max_size=2))
    least = draw(st.integers(0, 2))
    most = least + draw(st.integers(0, 2))
    return {"type": "array", "prefixItems": first, "items": draw(inner), "minItems": least, "maxItems": most}


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Random schemas of every kind, three or four deep. Their instances are small: a random model ends."""
    return st.recursive(
        _leaves,
        lambda inner: st.one_of(
            _objects(inner),
            _arrays(inner),
            st.lists(inner, min_size=1, max_size=2).map(lambda choices: {"anyOf": choices}),
        ),
        max_leaves=6,
    )


def parse_tool_calls(text: str) -> list[tuple[str, str]]:
    """The name and the arguments (JSON as it was written) of each whole call in a text."""
    whole: list[tuple[str, str]] = []
    name = arguments = ""
    for event in ToolCallParser().feed(text):
        if isinstance(event, CallBegin):
            name, arguments = event.name, ""
        elif isinstance(event, ArgumentsPiece):
            arguments += event.text
        elif isinstance(event, CallEnd):
            whole.append((name, arguments))
    return whole


def allowed(mask: bytes) -> list[int]:
    """The tokens of a mask."""
    return [token_id for token_id in range(len(mask) * 8) if mask[token_id // 8] >> token_id % 8 & 1]


def write_random(tokenizer: Tokenizer, state: GrammarState, seed: int, limit: int = 2000) -> str:
    """An answer made of random allowed tokens, as the detokenizer shows it."""
    choose = random.Random(seed)
    detokenizer, text = Detokenizer(tokenizer), ""
    for _ in range(limit):
        token_id = choose.choice(allowed(state.masks(())[0]))
        state.advance([token_id])
        if token_id == EOS:
            return text + detokenizer.finish()
        text += detokenizer.feed(token_id)
    raise AssertionError(f"no end after {limit} tokens: {text[:200]}")


def accepts(tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether single-byte tokens may spell the whole text and end there."""
    by_byte = {
        tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)
    }
    matcher = grammar.start()._matcher
    return (
        all(matcher.consume_token(by_byte[bytes([byte])]) for byte in text.encode())
        and matcher.is_accepting()
    )
