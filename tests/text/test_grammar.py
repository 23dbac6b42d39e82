"""Grammars over small vocabularies of both kinds: what they allow, remember and refuse."""

import json
import threading
from typing import Any

import jsonschema  # comes with schemathesis
import pytest
from hypothesis import given, settings, strategies as st

from kakeya.errors import InvalidArgument, StepFailed
from kakeya.text import Tokenizer, grammar as grammar_module
from kakeya.text.grammar import GrammarCompiler, GrammarState
from support.grammars import EOS, TOOLS, accepts, allowed, schemas, write_random
from support.tiny import byte_level_files

# JSON.


@settings(max_examples=60)
@given(schemas(), st.integers(0, 2**32))
def test_a_random_answer_obeys_its_schema(
    tokenizer: Tokenizer, compiler: GrammarCompiler, schema: Any, seed: int
) -> None:
    text = write_random(tokenizer, compiler.json_schema(schema).start(), seed)
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
    text = write_random(tokenizer, small.json_schema({"enum": ["hello", "world"]}).start(), 3)
    assert json.loads(text) in ("hello", "world")


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
        texts.extend(
            write_random(tokenizer, compiler.json_schema(schema).start(), seed + i) for i in range(10)
        )

    threads = [threading.Thread(target=work, args=(seed * 100,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 40
    for text in texts:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
