"""State as bytes: what was exported is read back, and whatever else comes is refused, never believed."""

import json
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kakeya.engine.engine import Engine
from kakeya.engine.state import SequenceState
from kakeya.engine.state_bytes import NO_TOKENS, check_values, decode_state, encode_state
from kakeya.errors import InvalidArgument, StateMismatch
from support.engines import say

PROMPT = [5, 9, 22, 13, 7] * 5


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


@pytest.fixture
def exported(engine: Engine) -> SequenceState:
    sequence = engine.open("someone", [1], 3)
    say(engine, sequence, PROMPT, 4)
    return engine.export_state(sequence, "a note")


def encoded(state: SequenceState) -> bytes:
    return b"".join(encode_state(state))


def decoded(engine: Engine, contents: bytes) -> SequenceState:
    state = decode_state(contents, "it", "tiny", engine._backend.pool.geometry)
    check_values(state, "it")
    return state


def test_what_was_exported_is_read_back(engine: Engine, exported: SequenceState) -> None:
    state = decoded(engine, encoded(exported))
    assert torch.equal(state.storage, exported.storage)
    assert torch.equal(state.tokens, exported.tokens)
    assert (state.committed, state.sink, state.notes) == (exported.committed, 3, "a note")
    # An odd place in memory is as good.
    assert torch.equal(decoded(engine, memoryview(b"x" + encoded(exported))[1:]).storage, exported.storage)


def test_a_history_may_be_stored_elsewhere(engine: Engine, exported: SequenceState) -> None:
    contents = encoded(replace(exported, tokens=NO_TOKENS))
    tokens = engine.open("someone", []).tokens
    tokens.extend(exported.tokens.tolist())
    geometry = engine._backend.pool.geometry
    assert torch.equal(decode_state(contents, "it", "tiny", geometry, tokens).tokens, exported.tokens)
    with pytest.raises(StateMismatch, match="28 tokens computed of a history of 5"):
        decode_state(contents, "it", "tiny", geometry, tokens[:5])


def changed(contents: bytes, **entries: object) -> bytes:
    """The same with another header; metadata by name, tensors with dots for spaces."""
    size = int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8 : 8 + size])
    for name, value in entries.items():
        (header if name in header else header["__metadata__"])[name] = value
    new = json.dumps(header).encode()
    return len(new).to_bytes(8, "little") + new + contents[8 + size :]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model": "another"}, "another model"),
        ({"geometry": "{}"}, "geometry"),
        ({"sink": "-1"}, "pins -1"),
        ({"sink": "10"}, "pins 10"),
        ({"sink": "4"}, "positions do not follow"),
        ({"committed": "27"}, "positions do not follow"),
        ({"committed": "x"}, "damaged"),
        ({"eos_token_ids": '["a"]'}, "not token ids"),
        ({"eos_token_ids": "[" * 100_000}, "damaged"),
        ({"__metadata__": {"format": 7}}, "not text"),
        ({"tokens": {"dtype": "I32", "shape": [2**40], "data_offsets": [0, 4]}}, "does not lie"),
        ({"tokens": {"dtype": "I32", "shape": [1], "data_offsets": [-4, 0]}}, "no sound shape"),
        ({"tokens": {"dtype": "I32", "shape": [True], "data_offsets": [0, 4]}}, "no sound shape"),
        ({"tokens": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4, 8]}}, "damaged"),
        ({"tokens": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "another type"),
        ({"tokens": {"dtype": "I32", "shape": [1] * 9, "data_offsets": [0, 4]}}, "no sound shape"),
        ({"keys": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}, "another type"),
        ({"keys": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "damaged"),
        ({"positions": {"dtype": "I64", "shape": [0], "data_offsets": [0, 0]}}, "too few"),
        ({"values": {"dtype": "X9", "shape": [], "data_offsets": [0, 0]}}, "damaged"),
        ({"values": 3}, "damaged"),
    ],
)
def test_what_does_not_agree_is_refused(
    engine: Engine, exported: SequenceState, entries: dict[str, object], message: str
) -> None:
    with pytest.raises(StateMismatch, match=message):
        decoded(engine, changed(encoded(exported), **entries))


@pytest.mark.parametrize("contents", [b"", b"1234567", b"\xff" * 64, b"\x02" + bytes(7) + b"[]", bytes(8)])
def test_what_is_no_state_is_refused(engine: Engine, contents: bytes) -> None:
    with pytest.raises(StateMismatch, match="damaged"):
        decoded(engine, contents)


def test_values_that_are_no_numbers_are_refused(engine: Engine, exported: SequenceState) -> None:
    storage = exported.storage.clone()
    storage[0, 0, 0, 0, 0] = float("nan")
    with pytest.raises(StateMismatch, match="not numbers"):
        decoded(engine, encoded(replace(exported, storage=storage)))


@pytest.mark.unwatched
def test_mutated_bytes_never_do_harm(engine: Engine, exported: SequenceState) -> None:
    """Without the envelope, whose digest would refuse them all: refused, or a session that works."""
    whole, chance = encoded(exported), random.Random(9)
    header = int.from_bytes(whole[:8], "little") + 8
    for _ in range(3000):
        contents = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            end = chance.choice([8, header, len(contents)])
            contents[chance.randrange(min(end, len(contents)))] = chance.randrange(256)
        if chance.random() < 0.2:
            del contents[chance.randrange(len(contents)) :]
        try:
            state = decoded(engine, bytes(contents))
            sequence = engine.import_state(state, "someone")
        except (StateMismatch, InvalidArgument):
            continue
        engine.close(sequence)
