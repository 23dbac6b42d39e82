"""Sessions in files of one's own: whole or not at all, and suspected like those that servers are sent."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kakeya.engine.state import SequenceState
from kakeya.engine.state_bytes import encode_state
from kakeya.errors import KakeyaError, StateDamaged, StateMismatch
from kakeya.runtime import Runtime
from kakeya.sessions import state_files
from kakeya.sessions.state_files import read_state, write_state
from support.tiny import answer, new_session, sequence_of


@pytest.fixture
def runtime(open_tiny: Callable[..., Runtime]) -> Runtime:
    return open_tiny()


@pytest.fixture
def state(runtime: Runtime) -> SequenceState:
    session = new_session(runtime)
    answer(runtime, session, 20)
    return runtime._engine.export_state(sequence_of(runtime, session), "a note")


def read(runtime: Runtime, path: Path) -> SequenceState:
    return read_state(path, runtime.fingerprint, runtime._pool.geometry)


def test_a_file_is_what_servers_export(runtime: Runtime, state: SequenceState, tmp_path: Path) -> None:
    write_state(tmp_path / "s", state)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    assert torch.equal(read(runtime, tmp_path / "s").storage, state.storage)
    _, length = runtime.import_bytes((tmp_path / "s").read_bytes())
    assert length == len(state.tokens)


def test_a_file_of_an_earlier_version_is_read(runtime: Runtime, state: SequenceState, tmp_path: Path) -> None:
    """It had no envelope."""
    (tmp_path / "s").write_bytes(b"".join(encode_state(state)))
    assert read(runtime, tmp_path / "s").notes == "a note"


def changed(state: SequenceState, what: str) -> SequenceState:
    storage, positions = state.storage.clone(), state.positions.clone()
    if what == "keys":
        storage[0, 0, 0, 0, 0] = float("nan")
    else:
        positions[0] = 1
    return replace(state, storage=storage, positions=positions)


@pytest.mark.parametrize(("what", "message"), [("keys", "not numbers"), ("positions", "do not follow")])
@pytest.mark.parametrize("is_enveloped", [True, False])
def test_what_no_session_has_is_refused(
    runtime: Runtime, state: SequenceState, tmp_path: Path, what: str, message: str, is_enveloped: bool
) -> None:
    forged = changed(state, what)
    if is_enveloped:
        write_state(tmp_path / "s", forged)
    else:
        (tmp_path / "s").write_bytes(b"".join(encode_state(forged)))
    with pytest.raises(StateMismatch, match=message):
        runtime.import_session(tmp_path / "s")


def test_a_damaged_file_is_refused(runtime: Runtime, state: SequenceState, tmp_path: Path) -> None:
    write_state(tmp_path / "s", state)
    whole = bytearray((tmp_path / "s").read_bytes())
    (tmp_path / "s").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StateDamaged, match="should hold"):
        read(runtime, tmp_path / "s")
    whole[-3] ^= 1
    (tmp_path / "s").write_bytes(whole)
    with pytest.raises(StateDamaged, match="digest"):
        read(runtime, tmp_path / "s")


def test_a_file_beyond_all_bounds_is_not_read(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "s").open("wb") as file:
        file.truncate(runtime.longest_import + 1)

    def refuse(*_: Any) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(state_files, "decode_state", refuse)
    with pytest.raises(StateMismatch, match="no session here has over"):
        read(runtime, tmp_path / "s")


def test_foreign_files_are_refused(runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a state")
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    for name in ("text", "other", "missing"):
        with pytest.raises(StateMismatch, match=name):
            read(runtime, tmp_path / name)


def test_a_failed_write_keeps_the_old_file(
    state: SequenceState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(tmp_path / "s", state)
    before = (tmp_path / "s").read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(KakeyaError, match="No space left"):
        write_state(tmp_path / "s", state)
    assert (tmp_path / "s").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    with pytest.raises(KakeyaError, match="cannot write"):
        write_state(tmp_path / "no" / "such" / "place", state)
