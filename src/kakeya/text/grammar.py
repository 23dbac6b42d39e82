"""Grammars that hold a model's answer to a form: any JSON object, a JSON Schema, tool calls.

Masks over the vocabulary come from llguidance. It is given our own tokenizer's bytes for each token, so that
what a grammar accepts is exactly what our detokenizer shows.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kakeya.errors import InvalidArgument, StepFailed
from kakeya.text.grammar_vocabulary import build_vocabulary
from kakeya.text.schema_faults import Schema, check_schema, find_fault
from kakeya.text.tokenizer import Tokenizer
from kakeya.text.tool_calls import ToolSpec
from kakeya.text.tool_grammar import arguments_schema, tool_call_lark

__all__ = ["Grammar", "GrammarCompiler", "GrammarState", "ToolSpec"]

KEPT_GRAMMARS = 64
MAX_SCHEMA_CHARACTERS = 256 * 1024
# One space, or a new line and its indentation: with more, a small model may write white space for ever.
_OPTIONS = {"whitespace_pattern": r"( |\n[ \t]{0,32})"}
_GOOD_ENDS = ("NotStopped", "NoExtension", "EndOfSentence")


class GrammarState:
    """How far one answer has come in a grammar. The engine's `Constraint`; for one thread at a time."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int], end_mask: bytes) -> None:
        self._matcher = matcher
        self._eos = eos_token_ids
        self._end_mask = end_mask
        self._ended = False

    @property
    def is_complete(self) -> bool:
        """Nothing may follow but the end."""
        return self._ended or self._matcher.is_stopped()

    def masks(self, draft: Sequence[int]) -> list[bytes]:
        """One bitmask of allowed tokens more than `draft` has tokens. Leaves the state as it was.

        Raises StepFailed when the grammar turns out to be too complex to go on.
        """
        if self._ended:
            return [self._end_mask] * (len(draft) + 1)
        masks, tried = [self._mask()], 0
        for token_id in self._possible(draft):
            self._consume(token_id)
            masks.append(self._mask())
            tried += 1
        if tried:
            self._matcher.rollback(tried)
        return masks + masks[-1:] * (len(draft) - tried)

    def advance(self, token_ids: Sequence[int]) -> None:
        """These were chosen. Raises StepFailed for one that the grammar does not allow."""
        for token_id in token_ids:
            if self._ended:
                raise StepFailed(f"token {token_id} after the end of the grammar")
            if token_id in self._eos:
                self._end()
            else:
                self._consume(token_id)

    def _possible(self, draft: Sequence[int]) -> Sequence[int]:
        """The draft up to an EOS or to what the grammar does not allow."""
        end = next((at for at, token_id in enumerate(draft) if token_id in self._eos), len(draft))
        tokens = list(draft[:end])
        return tokens[: self._matcher.validate_tokens(tokens)] if tokens else tokens

    def _mask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask

    def _consume(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    def _end(self) -> None:
        # The matcher does not get it: it would not count an EOS that it was waiting for.
        if not self._matcher.is_accepting():
            raise StepFailed("the answer ended before the grammar did")
        self._ended = True

    def _check(self) -> None:
        if self._matcher.is_error():
            raise StepFailed(f"the grammar cannot go on: {_first_line(self._matcher.get_error())}")
        if (reason := self._matcher.stop_reason()) not in _GOOD_ENDS:
            raise StepFailed(f"the grammar cannot go on: {reason}")


class Grammar:
    """A compiled grammar. Any number of answers can be held to it at the same time, from any thread."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int], end_mask: bytes) -> None:
        self._matcher = matcher
        self._eos = eos_token_ids
        self._end_mask = end_mask

    def start(self) -> GrammarState:
        """The state of a new answer, to be given to one generate."""
        return GrammarState(self._matcher.deep_copy(), self._eos, self._end_mask)


class GrammarCompiler:
    """Compiles grammars for one tokenizer and remembers the last ones. Threads may share it.

    `vocab_size` is the model's, which may be padded beyond the tokenizer's; an EOS id outside of it raises
    InvalidArgument. The vocabulary is prepared at the first use, which takes a moment.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Iterable[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        for token_id in self._eos:
            if not 0 <= token_id < vocab_size:
                raise InvalidArgument(f"EOS token {token_id} is not in the vocabulary of {vocab_size} tokens")
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Grammar] = OrderedDict()

    def json_object(self) -> Grammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Schema) -> Grammar:
        """JSON that obeys a schema, its properties in the schema's order.

        Raises InvalidArgument, with a pointer to the place, for a schema that cannot be honoured.
        """
        written = _written(schema, "json_schema")
        return self._remembered(f"schema {written}", lambda: self._compile_schema(schema, "json_schema"))

    def tool_calls(self, tools: Sequence[ToolSpec], *, required: bool, parallel: bool) -> Grammar:
        """One call, or with `parallel` one or more; unless `required`, any text is fine too, also before it.

        Once `<tool_call>` is written, the call must be right. Raises InvalidArgument for no tools, two of a
        name, and parameters that cannot be honoured.
        """
        _check_names([tool.name for tool in tools])
        schemas = [(tool.name, arguments_schema(tool)) for tool in tools]
        written = [_written(schema, _parameters_of(name)) for name, schema in schemas]
        names = [name for name, _ in schemas]
        key = f"tools {json.dumps([required, parallel, names, written])}"
        return self._remembered(key, lambda: self._compile_tools(schemas, required, parallel))

    def _compile_schema(self, schema: Schema, name: str) -> Grammar:
        check_schema(schema, name)
        matcher = self._matcher_of(schema)
        if message := _error_of(matcher):
            pointer = find_fault(schema, message, lambda part: _error_of(self._matcher_of(part)))
            raise InvalidArgument(f"{name} cannot be compiled at #{pointer}: {message}")
        return self._grammar(matcher, name)

    def _compile_tools(
        self, schemas: Sequence[tuple[str, Mapping[str, Any]]], required: bool, parallel: bool
    ) -> Grammar:
        for name, schema in schemas:
            self._compile_schema(schema, _parameters_of(name))
        prepared = [(name, _with_options(schema)) for name, schema in schemas]
        lark = tool_call_lark(prepared, required=required, parallel=parallel)
        matcher = self._matcher(LLMatcher.grammar_from_lark(lark))
        if message := _error_of(matcher):
            raise InvalidArgument(f"tools cannot be compiled together: {message}")
        return self._grammar(matcher, "tools")

    def _matcher_of(self, schema: Schema) -> LLMatcher:
        return self._matcher(LLMatcher.grammar_from_json_schema(json.dumps(_with_options(schema))))

    def _matcher(self, grammar: str) -> LLMatcher:
        limits = LLParserLimits(verbose_errors=False)
        return LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)

    def _grammar(self, matcher: LLMatcher, name: str) -> Grammar:
        grammar = Grammar(matcher, self._eos, self._end_mask)
        try:
            grammar.start().masks(())
        except StepFailed as error:  # such as a schema that only refers to itself
            raise InvalidArgument(f"{name} allows no answer at all: {error}") from error
        return grammar

    def _remembered(self, key: str, compile_it: Callable[[], Grammar]) -> Grammar:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        grammar = compile_it()
        with self._lock:
            self._kept[key] = grammar
            while len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return grammar

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return build_vocabulary(self._tokenizer, self._eos, self._vocab_size)

    @cached_property
    def _end_mask(self) -> bytes:
        """EOS and nothing else."""
        return sum(1 << token_id for token_id in self._eos).to_bytes(self._vocab_size // 8 + 1, "little")


def _with_options(schema: Schema) -> Mapping[str, Any]:
    """The schema in the form that llguidance takes its options with."""
    plain = schema if isinstance(schema, Mapping) else {} if schema else {"allOf": [False]}
    return {**plain, "x-guidance": _OPTIONS}


def _error_of(matcher: LLMatcher) -> str:
    """What is wrong with a grammar, in one line; nothing when it compiled."""
    return " ".join(matcher.get_error().split())


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _written(schema: Schema, name: str) -> str:
    """The schema as JSON. Raises InvalidArgument for what is not JSON, or is too large."""
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{name} is not JSON: {error}") from error
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise InvalidArgument(f"{name} is {len(text)} characters long, {MAX_SCHEMA_CHARACTERS} are allowed")
    return text


def _parameters_of(name: str) -> str:
    return f"the parameters of tool {name!r}"


def _check_names(names: Sequence[str]) -> None:
    if not names:
        raise InvalidArgument("tools must not be empty")
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(f"tools must have different names, {name!r} is there twice")
