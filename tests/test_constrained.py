"""Grammars in the running engine: a random tiny model and the real one are both held to them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema  # comes with schemathesis
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from kakeya.config import CacheConfig, EngineConfig
from kakeya.errors import InvalidArgument
from kakeya.runtime import Runtime
from kakeya.text.grammar import GrammarCompiler, ToolSpec
from kakeya.types import DoneEvent, Event, Numerics, SamplingParams, StopReason, TokenEvent
from support import tiny
from support.engines import FunctionProposer
from support.grammars import parse_tool_calls, schemas
from support.tiny import tiny_runtime

VOCAB = 320  # the tokenizer knows 301 of them
PROMPT = list(range(40, 60))
LIMIT = 1500


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("constrained"), vocab_size=VOCAB, eos_token_id=[0, 2])


CONFIG = tiny.engine_config(sink=4, window=60, threads=1, numerics=Numerics.EXACT)


@pytest.fixture(scope="module")
def runtime(checkpoint: Path) -> Iterator[Runtime]:
    with tiny_runtime(checkpoint, CONFIG) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def compiler(runtime: Runtime) -> GrammarCompiler:
    return GrammarCompiler(runtime.tokenizer, runtime.model_config.eos_token_ids, VOCAB)


class Memory:
    """What the proposer guesses: the next tokens of an answer it has heard of, every third one wrong."""

    def __init__(self) -> None:
        self.answer: Sequence[int] = ()

    def __call__(self, tokens: Sequence[int]) -> list[int]:
        said = len(tokens) - len(PROMPT)
        guess = list(self.answer[said : said + 3])
        if len(guess) == 3 and said % 3 == 0:
            guess[said % 2] = (guess[said % 2] + 7) % VOCAB
        return guess


@pytest.fixture(scope="module")
def memory() -> Memory:
    return Memory()


@pytest.fixture(scope="module")
def drafting(checkpoint: Path, memory: Memory) -> Iterator[Runtime]:
    with tiny_runtime(checkpoint, CONFIG, proposers=[FunctionProposer(memory)]) as runtime:
        yield runtime


def generate(
    runtime: Runtime, sampling: SamplingParams, constraint: object, limit: int = LIMIT
) -> list[Event]:
    session_id = runtime.create_session()
    try:
        runtime.append(session_id, PROMPT)
        return list(runtime.generate(session_id, limit, sampling, constraint=constraint))
    finally:
        runtime.close_session(session_id)


def ids_of(events: Sequence[Event]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, TokenEvent)]


def text_of(runtime: Runtime, events: Sequence[Event]) -> str:
    return runtime.tokenizer.decode(ids_of(events))


def stop_reason(events: Sequence[Event]) -> StopReason:
    done = events[-1]
    assert isinstance(done, DoneEvent)
    return done.stop_reason


def check(schema: Any, text: str) -> None:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 5, 60]),
    top_p=st.sampled_from([1.0, 1.0, 0.6]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {}, {50: 1e4, 310: 1e4}, {0: -1e4, 2: -1e4}]),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(schemas(), samplings)
def test_what_a_random_model_says_obeys_the_schema_with_and_without_drafts(
    runtime: Runtime,
    drafting: Runtime,
    memory: Memory,
    compiler: GrammarCompiler,
    schema: Any,
    sampling: SamplingParams,
) -> None:
    grammar = compiler.json_schema(schema)
    events = generate(runtime, sampling, grammar.start())
    assert stop_reason(events) is StopReason.EOS
    check(schema, text_of(runtime, events))
    memory.answer = ids_of(events)
    drafted = generate(drafting, sampling, grammar.start())
    assert ids_of(drafted) == ids_of(events)
    assert stop_reason(drafted) is StopReason.EOS
    done = drafted[-1]
    assert isinstance(done, DoneEvent)
    assert len(memory.answer) < 8 or done.accepted_draft_tokens > 0


SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 20},
        "pages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 6},
        "kind": {"enum": ["novel", "essay", "poem"]},
    },
    "required": ["title", "pages", "kind"],
    "additionalProperties": False,
}


def test_neighbours_in_a_batch_are_unchanged(runtime: Runtime, compiler: GrammarCompiler) -> None:
    grammar = compiler.json_schema(SCHEMA)
    free = [SamplingParams(temperature=9.0, seed=seed, logprobs=True) for seed in (1, 2)]
    bound = [SamplingParams(temperature=9.0, seed=seed, logprobs=True) for seed in (3, 4)]
    alone = [generate(runtime, sampling, None, 80) for sampling in free]
    alone += [generate(runtime, sampling, grammar.start(), 400) for sampling in bound]
    sessions = [runtime.create_session() for _ in range(4)]
    for session_id in sessions:
        runtime.append(session_id, PROMPT)
    streams = [runtime.generate(s, 80, p) for s, p in zip(sessions[:2], free, strict=True)]
    streams += [
        runtime.generate(s, 400, p, constraint=grammar.start())
        for s, p in zip(sessions[2:], bound, strict=True)
    ]
    together: list[list[Event]] = [[] for _ in streams]
    running = set(range(4))
    while running:
        for index in sorted(running):
            together[index].append(streams[index].next_event(30))
            if isinstance(together[index][-1], DoneEvent):
                running.remove(index)
    for session_id in sessions:
        runtime.close_session(session_id)
    for once, again in zip(alone, together, strict=True):
        assert once[:-1] == again[:-1]  # tokens and log-probabilities; the last event has times in it
    for events in together[2:]:
        check(SCHEMA, text_of(runtime, events))
    assert all(len(set(ids_of(events))) > 15 for events in together)  # no model that repeats itself


def test_log_probabilities_are_those_of_the_raw_distribution(
    runtime: Runtime, compiler: GrammarCompiler
) -> None:
    sampling = SamplingParams(temperature=0.8, seed=9, top_logprobs=4, logit_bias={60: 3.0})
    events = generate(runtime, sampling, compiler.json_schema(SCHEMA).start(), 400)
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    logits = runtime.score([*PROMPT, *(event.token_id for event in tokens)])[len(PROMPT) - 1 : -1]
    reference = logits.double().log_softmax(-1)
    assert len(tokens) == len(reference)
    for event, row in zip(tokens, reference, strict=True):
        assert event.logprob == pytest.approx(float(row[event.token_id]), abs=1e-5)
        assert [e.logprob for e in event.top_logprobs] == pytest.approx(row.topk(4).values.tolist(), abs=1e-5)
    # Much of what was chosen was not among the best: the constraint decided, and the numbers do not hide it.
    assert any(event.token_id not in [e.token_id for e in event.top_logprobs] for event in tokens)


@pytest.mark.parametrize("taken", [0, 3, 10])
def test_a_cancelled_answer_is_a_beginning_and_the_session_goes_on(
    runtime: Runtime, compiler: GrammarCompiler, taken: int
) -> None:
    sampling = SamplingParams(temperature=1.0, seed=5)
    whole = ids_of(generate(runtime, sampling, compiler.json_schema(SCHEMA).start()))
    session_id = runtime.create_session()
    runtime.append(session_id, PROMPT)
    stream = runtime.generate(session_id, LIMIT, sampling, constraint=compiler.json_schema(SCHEMA).start())
    kept = [event.token_id for event in (stream.next_event(10) for _ in range(taken))]  # type: ignore[union-attr]
    stream.cancel()
    kept += ids_of(list(stream))
    assert kept == whole[: len(kept)]
    assert runtime.info(session_id).history_length == len(PROMPT) + len(kept)
    events = list(
        runtime.generate(session_id, 400, sampling, constraint=compiler.json_schema(SCHEMA).start())
    )
    check(SCHEMA, text_of(runtime, events))
    runtime.close_session(session_id)


def test_a_repeated_request_id_tells_the_constrained_answer_again(
    runtime: Runtime, compiler: GrammarCompiler
) -> None:
    session_id = runtime.create_session()
    runtime.append(session_id, PROMPT)
    options: dict[str, Any] = {"request_id": "once", "sampling": SamplingParams(temperature=1.0, seed=2)}
    first = list(runtime.generate(session_id, 400, constraint=compiler.json_object().start(), **options))
    again = list(runtime.generate(session_id, 400, constraint=compiler.json_object().start(), **options))
    assert again == first
    runtime.close_session(session_id)


def test_a_refused_generate_leaves_the_constraint_unused(runtime: Runtime, compiler: GrammarCompiler) -> None:
    session_id = runtime.create_session()
    state = compiler.json_schema({"const": 1}).start()
    with pytest.raises(InvalidArgument, match="empty session"):
        runtime.generate(session_id, 5, constraint=state)
    runtime.append(session_id, PROMPT)
    assert text_of(runtime, list(runtime.generate(session_id, 5, constraint=state))) == "1"
    runtime.close_session(session_id)


# The real model.


@pytest.fixture(scope="module")
def real(default_model: Path) -> Iterator[Runtime]:
    with Runtime.open(str(default_model), EngineConfig(cache=CacheConfig(window=512), capacity=3)) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def real_compiler(real: Runtime) -> GrammarCompiler:
    model = real.model_config
    return GrammarCompiler(real.tokenizer, model.eos_token_ids, model.vocab_size)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "languages": {"type": "array", "items": {"enum": ["French", "German", "English"]}, "maxItems": 3},
        "address": {"$ref": "#/$defs/address"},
    },
    "required": ["name", "age", "languages", "address"],
    "additionalProperties": False,
    "$defs": {
        "address": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        }
    },
}


def ask(runtime: Runtime, question: str, constraint: object, sampling: SamplingParams | None = None) -> str:
    session_id = runtime.create_session()
    try:
        runtime.append(session_id, runtime.tokenizer.chat_ids([{"role": "user", "content": question}]))
        events = list(runtime.generate(session_id, 256, sampling, constraint=constraint))
        assert stop_reason(events) is StopReason.EOS
        assert ids_of(events)[-1] in runtime.model_config.eos_token_ids
        return text_of(runtime, events)
    finally:
        runtime.close_session(session_id)


@pytest.mark.parametrize(
    "sampling", [None, SamplingParams(temperature=1.0, seed=1), SamplingParams(temperature=2.0, seed=2)]
)
def test_the_real_model_obeys_a_schema(
    real: Runtime, real_compiler: GrammarCompiler, sampling: SamplingParams | None
) -> None:
    question = "Describe a person named Marie, aged 34, who lives in Paris, as JSON."
    text = ask(real, question, real_compiler.json_schema(PERSON).start(), sampling)
    check(PERSON, text)
    if sampling is None:
        assert json.loads(text)["name"].startswith("Marie")


def test_the_real_model_calls_a_tool(real: Runtime, real_compiler: GrammarCompiler) -> None:
    city = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    }
    tools = [ToolSpec("get_weather", {**city, "additionalProperties": False}), ToolSpec("get_time")]
    grammar = real_compiler.tool_calls(tools, required=True, parallel=False)
    text = ask(real, "What is the weather in Paris? Call get_weather.", grammar.start())
    [(name, arguments)] = parse_tool_calls(text)
    assert name in ("get_weather", "get_time")
    if name == "get_weather":
        assert "Paris" in json.loads(arguments)["city"]


def test_free_text_stays_what_the_model_would_say(real: Runtime, real_compiler: GrammarCompiler) -> None:
    question = "What is the capital of France? Answer with one word."
    grammar = real_compiler.tool_calls([ToolSpec("get_time")], required=False, parallel=True)
    assert ask(real, question, grammar.start()) == ask(real, question, None)
