"""Session state in files: what fits is restored whole, what does not is refused whole."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kakeya.engine import state as state_module
from kakeya.engine.engine import Engine
from kakeya.engine.slab import SlabGeometry
from kakeya.engine.state import SequenceState, read_state, write_state
from kakeya.errors import InvalidArgument, KakeyaError, StateMismatch
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
    with safe_open(tmp_path / "s", framework="pt") as file:
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
        ({"committed": 500}, "500 tokens computed of a history of 29"),
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


def test_foreign_files_are_refused(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a state")
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    for name in ("text", "other", "missing"):
        with pytest.raises(StateMismatch, match=name):
            read_state(tmp_path / name, "tiny", geometry(engine))


def test_a_truncated_file_is_refused(engine: Engine, exported: SequenceState, tmp_path: Path) -> None:
    write_state(tmp_path / "s", exported)
    whole = (tmp_path / "s").read_bytes()
    (tmp_path / "s").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StateMismatch):
        read_state(tmp_path / "s", "tiny", geometry(engine))


def test_token_ids_of_a_state_are_checked(engine: Engine, exported: SequenceState) -> None:
    tokens = exported.tokens.clone()
    tokens[0] = tiny.VOCAB
    with pytest.raises(InvalidArgument, match="vocabulary"):
        engine.import_state(replace(exported, tokens=tokens), "someone")


def test_a_failed_write_keeps_the_old_file(
    exported: SequenceState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(tmp_path / "s", exported)
    before = (tmp_path / "s").read_bytes()

    def full(tensors: object, path: str, metadata: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(state_module, "save_file", full)
    with pytest.raises(KakeyaError, match="No space left"):
        write_state(tmp_path / "s", exported)
    assert (tmp_path / "s").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    with pytest.raises(KakeyaError, match="cannot write"):
        write_state(tmp_path / "no" / "such" / "place", exported)
