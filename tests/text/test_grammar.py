"""Grammars over small vocabularies of both kinds: what they allow, remember and refuse."""

import json
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema  # comes with schemathesis
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken

from kakeya.errors import InvalidArgument, StepFailed
from kakeya.text import Detokenizer, Tokenizer, grammar as grammar_module
from kakeya.text.grammar import Grammar, GrammarCompiler, GrammarState, ToolSpec
from kakeya.text.grammar_vocabulary import _Vocabulary
from kakeya.text.tool_calls import write_tool_call
from kakeya.types import TokenizerFiles
from support.json_schemas import schemas
from support.tool_calls import parse_tool_calls
from support.vocabularies import byte_level_files, sentencepiece_files

EOS = 0
PADDING = 13
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


def with_tags(files: TokenizerFiles, *, special: bool) -> TokenizerFiles:
    encoder = tokenizers.Tokenizer.from_buffer(files.tokenizer_json)
    tags = [AddedToken(tag, special=special, normalized=False) for tag in ("<tool_call>", "</tool_call>")]
    (encoder.add_special_tokens if special else encoder.add_tokens)(tags)
    return TokenizerFiles(encoder.to_str().encode(), eos_token=files.eos_token)


VOCABULARIES: dict[str, Callable[[], TokenizerFiles]] = {
    "byte-level": byte_level_files,
    "sentencepiece": sentencepiece_files,
    "tags added": lambda: with_tags(byte_level_files(), special=False),
    "tags special": lambda: with_tags(sentencepiece_files(), special=True),
}


@pytest.fixture(scope="module", params=list(VOCABULARIES))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(VOCABULARIES[request.param]())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, [EOS], tokenizer.vocab_size + PADDING)


@pytest.fixture(scope="module")
def plain() -> GrammarCompiler:
    tokenizer = Tokenizer(byte_level_files())
    return GrammarCompiler(tokenizer, [EOS], tokenizer.vocab_size)


def allowed(mask: bytes) -> list[int]:
    return [token_id for token_id in range(len(mask) * 8) if mask[token_id // 8] >> token_id % 8 & 1]


def write(tokenizer: Tokenizer, state: GrammarState, seed: int, limit: int = 2000) -> str:
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


# JSON.


@settings(max_examples=60)
@given(schemas(), st.integers(0, 2**32))
def test_a_random_answer_obeys_its_schema(
    tokenizer: Tokenizer, compiler: GrammarCompiler, schema: Any, seed: int
) -> None:
    text = write(tokenizer, compiler.json_schema(schema).start(), seed)
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_a_json_object_is_any_object_and_nothing_else(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    grammar = compiler.json_object()
    for good in ("{}", '{"a": [1, -2.5e3, {"b": null}], "ü\\n": "x"}', '{\n  "a": true\n}'):
        assert accepts(tokenizer, grammar, good)
    for bad in ("", "[]", "{}{}", '{"a"}', " {}", '{"a":  1}', "{'a': 1}", '{"a": 1,}'):
        assert not accepts(tokenizer, grammar, bad)


def test_white_space_is_bounded(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    grammar = compiler.json_object()
    assert accepts(tokenizer, grammar, "{\n" + " " * 32 + '"a": 1}')
    assert not accepts(tokenizer, grammar, "{\n" + " " * 33 + '"a": 1}')


@pytest.mark.parametrize(("schema", "good", "bad"), [(True, '"x"', "x"), ({}, "[1]", "[1")])
def test_a_schema_may_allow_everything(plain: GrammarCompiler, schema: Any, good: str, bad: str) -> None:
    tokenizer = Tokenizer(byte_level_files())
    assert accepts(tokenizer, plain.json_schema(schema), good)
    assert not accepts(tokenizer, plain.json_schema(schema), bad)


def test_what_is_forced_comes_in_its_usual_tokens(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    state = compiler.json_schema({"const": "hello world"}).start()
    usual = []
    while not state.is_complete:
        [token_id] = allowed(state.masks(())[0])
        state.advance([token_id])
        usual.append(token_id)
    assert b"".join(map(tokenizer.token_bytes, usual)) == b'"hello world"'
    assert len(usual) < len('"hello world"')


def with_merges(files: TokenizerFiles) -> TokenizerFiles:
    """A vocabulary in which the longest tokens from left to right are not the usual ones."""
    data = json.loads(files.tokenizer_json)
    for left, right in (("x", "f"), ("q", "x")):  # the first is merged first
        data["model"]["vocab"][left + right] = max(data["model"]["vocab"].values()) + 1
        data["model"]["merges"].append([left, right])
    data["added_tokens"] = [token for token in data["added_tokens"] if token["special"]]
    return TokenizerFiles(json.dumps(data).encode(), eos_token=files.eos_token)


@pytest.mark.parametrize("files", [byte_level_files, sentencepiece_files])
def test_the_usual_tokens_are_the_tokenizers_own(files: Callable[[], TokenizerFiles]) -> None:
    tokenizer = Tokenizer(with_merges(files()))
    vocabulary = _Vocabulary(tokenizer, [EOS], tokenizer.vocab_size)
    assert [tokenizer.token_bytes(token_id) for token_id in vocabulary(b"qxf")] == [b"q", b"xf"]
    assert [tokenizer.token_bytes(i) for i in vocabulary._longest_fitting(b"qxf")] == [b"qx", b"f"]


def test_text_that_cannot_be_encoded_as_it_is_comes_in_the_longest_tokens_that_fit() -> None:
    tokenizer = Tokenizer(byte_level_files())
    small = _Vocabulary(tokenizer, [EOS], 259)
    assert [small.tokens[token_id] for token_id in small(b"hello")] == [b"h", b"e", b"l", b"l", b"o"]
    none = _Vocabulary(tokenizer, [EOS], 40)
    assert none(b"~hello") == []


# States.


def test_masks_look_ahead_and_leave_the_state_alone(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    grammar = compiler.json_schema({"enum": ["ab", "cd"]})
    ids = [tokenizer.encode(f"\n{character}", special=False)[-1] for character in '"ab"']
    state, stepped = grammar.start(), grammar.start()
    expected = [stepped.masks(())[0]]
    for token_id in ids:
        stepped.advance([token_id])
        expected.append(stepped.masks(())[0])
    assert allowed(expected[-1]) == [EOS]
    for length in range(5):
        for _ in range(2):
            assert state.masks(ids[:length]) == expected[: length + 1]
    # Whatever comes after an impossible token or an EOS, there is a mask for it, and the state is as it was.
    for draft in ([ids[1]], [*ids, ids[0]], [*ids, EOS, EOS], [EOS], [*ids[:2], EOS]):
        masks = state.masks(draft)
        assert len(masks) == len(draft) + 1
        assert all(allowed(mask) for mask in masks)
        assert masks[: len(expected)][:1] == expected[:1]
        assert state.masks(()) == expected[:1]


def test_an_answer_is_complete_at_its_end(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    state = compiler.json_schema({"enum": [True, False]}).start()
    while not state.is_complete:
        state.advance(allowed(state.masks(())[0])[:1])
    assert allowed(state.masks(())[0]) == [EOS]
    state.advance([EOS])
    assert state.is_complete
    assert [allowed(mask) for mask in state.masks([5, 6])] == [[EOS]] * 3
    with pytest.raises(StepFailed, match="after the end"):
        state.advance([EOS])


def test_an_answer_may_end_where_it_could_go_on(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    state = compiler.json_schema({"type": "integer", "minimum": 0}).start()
    one = next(i for i in allowed(state.masks(())[0]) if tokenizer.token_bytes(i) == b"1")
    with pytest.raises(StepFailed, match="ended before the grammar did"):
        state.advance([EOS])
    state.advance([one])
    assert not state.is_complete
    assert {EOS, one} <= set(allowed(state.masks(())[0]))
    state.advance([EOS])
    assert state.is_complete
    assert [allowed(mask) for mask in state.masks([one])] == [[EOS]] * 2


def test_a_token_that_is_not_allowed_is_refused(plain: GrammarCompiler) -> None:
    state = plain.json_object().start()
    with pytest.raises(StepFailed, match="the grammar cannot go on: .*satisfy the grammar"):
        state.advance([40])
    with pytest.raises(StepFailed, match="cannot go on"):
        state.masks(())


def test_a_grammar_that_stops_for_another_reason_is_an_error(plain: GrammarCompiler) -> None:
    class Stuck:
        def compute_bitmask(self) -> bytes:
            return b"\x01"

        def is_error(self) -> bool:
            return False

        def stop_reason(self) -> str:
            return "ParserTooComplex"

    with pytest.raises(StepFailed, match="cannot go on: ParserTooComplex"):
        GrammarState(Stuck(), frozenset([EOS]), b"\x01").masks(())


def test_special_tokens_and_padding_are_never_allowed(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    known = {i for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)} | {EOS}
    free = compiler.tool_calls(TOOLS, required=False, parallel=True).start()
    ids = set(allowed(free.masks(())[0]))
    assert ids <= known
    assert len(ids) > 100


@pytest.mark.parametrize("eos", [[], [0, 2]])
def test_a_model_may_have_no_eos_or_several(eos: list[int]) -> None:
    tokenizer = Tokenizer(byte_level_files())
    compiler = GrammarCompiler(tokenizer, eos, tokenizer.vocab_size)
    state = compiler.json_schema({"const": 1}).start()
    state.advance(allowed(state.masks(())[0]))
    assert state.is_complete
    assert [i for i in allowed(state.masks(())[0]) if i < tokenizer.vocab_size] == eos


def test_an_eos_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="EOS token 900 is not in the vocabulary of 300 tokens"):
        GrammarCompiler(Tokenizer(byte_level_files()), [2, 900], 300)


def test_a_vocabulary_smaller_than_the_tokenizers(plain: GrammarCompiler) -> None:
    tokenizer = Tokenizer(byte_level_files())
    small = GrammarCompiler(tokenizer, [EOS], 259)  # bytes, and no merges
    text = write(tokenizer, small.json_schema({"enum": ["hello", "world"]}).start(), 3)
    assert json.loads(text) in ("hello", "world")


# Tools.


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
    calls = parse_tool_calls(write(tokenizer, grammar.start(), seed))
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


# Refusals.


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (False, r"json_schema cannot be compiled at #: .*schema is false"),
        ({"type": "strin"}, "at #: Invalid type: strin"),
        ({"not": {}}, r'at #: Unimplemented keys: \["not"\]'),
        (
            {"properties": {"a/b": {"items": {"anyOf": [{"type": "null"}, {"pattern": "(?=x)"}]}}}},
            r"at #/properties/a~1b/items/anyOf/1: regex parse error",
        ),
        ({"$defs": {"n": {"type": "strin"}}, "items": {"$ref": "#/$defs/n"}}, r"at #/\$defs/n: Invalid"),
        ({"items": {"type": "integer", "multipleOf": -1}}, "at #/items: multipleOf must be above 0"),
        ({"$ref": "#"}, "json_schema allows no answer at all"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "at #/properties/a: .*/none"),
        ({"items": {"$ref": "https://example.org/s.json"}}, "at #/items: "),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "at #: Unsatisfiable"),
        ({"prefixItems": [{}, {"format": "zip-code"}]}, "at #/prefixItems/1: Unknown format"),
        ({"properties": 5}, "at #: properties must be an object"),
        ({"properties": {"a": {"minProperties": 2}}}, "guaranteed at #/properties/a: minProperties"),
        ({"minProperties": 3, "required": ["a", "a", "b"]}, "guaranteed at #: minProperties"),
        ({"x-guidance": {"lenient": True}}, "x-guidance is not a keyword"),
        ({"minimum": float("nan")}, "is not JSON"),
        ({"default": object()}, "is not JSON"),
        ({"description": "x" * 300_000}, "300019 characters long, 262144 are allowed"),
    ],
)
def test_a_schema_that_cannot_be_honoured_is_refused_with_its_place(
    plain: GrammarCompiler, schema: Any, problem: str
) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        plain.json_schema(schema)


@pytest.mark.parametrize("depth", [200, 100_000])
def test_a_bottomless_schema_is_refused(plain: GrammarCompiler, depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    with pytest.raises(InvalidArgument, match="is not JSON|cannot be compiled"):
        plain.json_schema(schema)


def test_known_properties_may_be_counted(plain: GrammarCompiler) -> None:
    tokenizer = Tokenizer(byte_level_files())
    schema = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"], "minProperties": 2}
    assert accepts(tokenizer, plain.json_schema(schema), '{"a": 1, "b": 2}')


# What is remembered.


def test_the_last_grammars_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "KEPT_GRAMMARS", 2)
    tokenizer = Tokenizer(byte_level_files())
    compiler = GrammarCompiler(tokenizer, [EOS], tokenizer.vocab_size)
    first = compiler.json_object()
    calls = compiler.tool_calls(TOOLS, required=True, parallel=True)
    assert compiler.json_schema({"type": "object"}) is first
    assert compiler.tool_calls(list(TOOLS), required=True, parallel=True) is calls
    assert compiler.json_object() is first  # used last now
    third = compiler.tool_calls(TOOLS, required=False, parallel=True)
    assert compiler.json_object() is first
    assert third is compiler.tool_calls(TOOLS, required=False, parallel=True)
    assert compiler.tool_calls(TOOLS, required=True, parallel=True) is not calls


def test_the_order_of_properties_is_part_of_a_schema(plain: GrammarCompiler) -> None:
    ab, ba = (
        {"properties": {name: {"const": 1} for name in names}, "required": ["a", "b"]}
        for names in ("ab", "ba")
    )
    assert plain.json_schema(ab) is not plain.json_schema(ba)
    assert accepts(Tokenizer(byte_level_files()), plain.json_schema(ba), '{"b": 1, "a": 1}')


def test_threads_may_share_a_compiler() -> None:
    tokenizer = Tokenizer(byte_level_files())
    compiler = GrammarCompiler(tokenizer, [EOS], tokenizer.vocab_size)
    schema = {"type": "array", "items": {"enum": ["abc", 1, None]}, "minItems": 3, "maxItems": 5}
    texts: list[str] = []

    def work(seed: int) -> None:
        texts.extend(write(tokenizer, compiler.json_schema(schema).start(), seed + i) for i in range(10))

    threads = [threading.Thread(target=work, args=(seed * 100,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 40
    for text in texts:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
