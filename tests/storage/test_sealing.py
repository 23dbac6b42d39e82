"""Encryption: what was changed, moved or sealed with another key is refused."""

from pathlib import Path

import pytest

from kakeya.errors import ConfigError, StateDamaged
from kakeya.storage.sealing import AesSealer, open_sealer


def test_what_is_sealed_can_be_opened_in_its_place_alone() -> None:
    sealer = AesSealer(b"a secret of some length")
    sealed = sealer.seal(b"contents", "place 1")
    assert b"contents" not in sealed
    assert sealer.open(sealed, "place 1") == b"contents"
    for bad, place in [
        (sealed, "place 2"),
        (sealed[:-1], "place 1"),
        (b"", "place 1"),
        (b"x" + sealed, "place 1"),
    ]:
        with pytest.raises(StateDamaged):
            sealer.open(bad, place)
    with pytest.raises(StateDamaged, match="another key"):
        AesSealer(b"another secret of some length").open(sealed, "place 1")


def test_key_files(tmp_path: Path) -> None:
    assert open_sealer(None).seal(b"x", "") == b"x"
    with pytest.raises(ConfigError, match="cannot be read"):
        open_sealer(tmp_path / "none")
    (tmp_path / "short").write_text("short\n")
    with pytest.raises(ConfigError, match="at least 16 bytes, got 5"):
        open_sealer(tmp_path / "short")
    (tmp_path / "key").write_text("sixteen bytes or more\n")
    assert open_sealer(tmp_path / "key").name == AesSealer(b"sixteen bytes or more").name
