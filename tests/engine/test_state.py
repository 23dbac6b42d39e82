"""Session state: what fits is restored whole, what does not is refused whole."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from kakeya.engine.engine import Engine
from kakeya.engine.slab import SlabGeometry
from kakeya.engine.state import SequenceState
from kakeya.errors import InvalidArgument, StateMismatch
from kakeya.sessions.state_files import read_state, write_state
from kakeya.storage.envelope import contents_of
from kakeya.types import DType
from support import tiny
from support.engines import say
from support.reference import Oracle

MakeEngine = Callable[..., Engine]
PROMPT = [5, 9, 22, 13, 7] * 5


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


@pytest.fixture
def exported(engine: Engine) -> SequenceState:
    sequence = engine.open("someone", [1], 3)
    say(engine, sequence, PROMPT, 4)
    return engine.export_state(sequence, "a note")


def geometry(engine: Engine) -> SlabGeometry:
    return engine._backend.pool.geometry


def test_a_session_continues_where_it_was_saved(
    engine: Engine, exported: SequenceState, oracle: Oracle, tmp_path: Path
) -> None:
    write_state(tmp_path / "s.safetensors", exported)
    loaded = read_state(tmp_path / "s.safetensors", "tiny", geometry(engine))
    assert loaded.notes == "a note"
    sequence = engine.import_state(loaded, "someone")
    assert sequence.eos_token_ids == {1}
    history = engine.read(sequence, lambda s: s.tokens.tolist())
    assert history[: len(PROMPT)] == PROMPT
    assert sequence.slab.sink == 3
    assert say(engine, sequence, [4, 6], 5) == oracle.greedy([*history, 4, 6], 5, 3, 7)


@pytest.mark.parametrize("spare", [2, 9])
def test_a_session_moves_to_slabs_with_other_spare_slots(
    make_engine: MakeEngine, exported: SequenceState, oracle: Oracle, tmp_path: Path, spare: int
) -> None:
    write_state(tmp_path / "s", exported)
    other = make_engine(tiny.engine_config(spare=spare))
    loaded = read_state(tmp_path / "s", "tiny", geometry(other))
    sequence = other.import_state(loaded, "someone")
    assert loaded.positions.tolist() == sequence.slab.slot_positions().tolist()
    history = exported.tokens.tolist()
    assert say(other, sequence, [4, 6], 5) == oracle.greedy([*history, 4, 6], 5, 3, 7)


def test_an_empty_session_can_be_saved(engine: Engine, tmp_path: Path) -> None:
    write_state(tmp_path / "s", engine.export_state(engine.open("someone", [])))
    loaded = read_state(tmp_path / "s", "tiny", geometry(engine))
    assert engine.read(engine.import_state(loaded, "someone"), lambda s: s.committed) == 0


def test_the_file_says_what_it_holds(exported: SequenceState, tmp_path: Path) -> None:
    write_state(tmp_path / "s", exported)
    (tmp_path / "contents").write_bytes(contents_of((tmp_path / "s").read_bytes()))
    with safe_open(tmp_path / "contents", framework="pt") as file:
        metadata, names = file.metadata(), set(file.keys())
        positions = file.get_tensor("positions")
    assert names == {"tokens", "keys", "values", "positions"}
    assert metadata["model"] == "tiny"
    assert metadata["ring_index"] == str(3 + (len(PROMPT) + 3 - 3) % 11)
    assert sorted(p for p in positions.tolist() if p >= 0) == [
        0,
        1,
        2,
        *range(len(PROMPT) + 3 - 6, len(PROMPT) + 3),
    ]


def test_uncommitted_and_evicted_tokens_do_not_travel(exported: SequenceState) -> None:
    stale = exported.positions < 0
    assert exported.storage[:, :, :, stale].abs().sum() == 0
    assert exported.storage[:, :, :, ~stale].abs().sum() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "another"}, "another model"),
        ({"geometry": "{}"}, "another cache geometry"),
        ({"geometry": "no JSON"}, "another cache geometry"),
        ({"committed": 500}, "damaged"),
        ({"committed": -1}, "damaged"),
        ({"storage": torch.zeros(1, 2, 3, 4, 5)}, "damaged"),
    ],
)
def test_what_does_not_fit_is_refused(
    engine: Engine, exported: SequenceState, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    write_state(tmp_path / "s", replace(exported, **change))
    free = engine._backend.pool.free_count
    with pytest.raises(StateMismatch, match=message):
        read_state(tmp_path / "s", "tiny", geometry(engine))
    assert engine._backend.pool.free_count == free


def test_another_dtype_is_another_geometry(engine: Engine, exported: SequenceState, tmp_path: Path) -> None:
    write_state(tmp_path / "s", exported)
    with pytest.raises(StateMismatch, match="geometry"):
        read_state(tmp_path / "s", "tiny", replace(geometry(engine), dtype=DType.BFLOAT16))


def test_token_ids_of_a_state_are_checked(engine: Engine, exported: SequenceState) -> None:
    tokens = exported.tokens.clone()
    tokens[0] = tiny.VOCAB
    with pytest.raises(InvalidArgument, match="vocabulary"):
        engine.import_state(replace(exported, tokens=tokens), "someone")
