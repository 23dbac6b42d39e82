"""Tokenizers made from GGUF metadata are kept, and made anew when anything about them changed."""

from pathlib import Path

import pytest

from kakeya.models import gguf_tokenizer, kept_tokenizer
from kakeya.models.checkpoint import open_checkpoint
from kakeya.models.kept_tokenizer import kept_tokenizer_files
from kakeya.types import TokenizerFiles

FILES = TokenizerFiles(b"{}", chat_template="{{ messages }}", bos_token="<s>", eos_token="</s>")


class Maker:
    """Counts how often a tokenizer was written out."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, metadata: object) -> TokenizerFiles:
        self.calls += 1
        return FILES


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Maker:
    monkeypatch.setenv("KAKEYA_CACHE_DIR", str(tmp_path / "cache"))
    made = Maker()
    monkeypatch.setattr(gguf_tokenizer, "tokenizer_files", made)
    return made


def test_made_once_for_the_same_metadata(maker: Maker) -> None:
    assert [kept_tokenizer_files("one", {}) for _ in range(3)] == [FILES] * 3
    assert maker.calls == 1
    assert kept_tokenizer_files("another", {}) == FILES
    assert maker.calls == 2


def test_other_code_makes_it_anew(maker: Maker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept_tokenizer_files("one", {})
    changed = tmp_path / "gguf_tokenizer.py"
    changed.write_text("# better")
    monkeypatch.setattr(gguf_tokenizer, "__file__", str(changed))
    kept_tokenizer_files("one", {})
    assert maker.calls == 2


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{\n",
        "[]\n{}",
        "{}\n{}",
        '{"tokenizer_bytes": 3}\n{}',
        '{"tokenizer_bytes": 2, "colour": "red"}\n{}',
    ],
)
def test_a_damaged_one_is_made_anew(maker: Maker, damage: str) -> None:
    kept_tokenizer_files("one", {})
    kept_tokenizer._place("one").write_text(damage)
    assert kept_tokenizer_files("one", {}) == FILES
    assert kept_tokenizer_files("one", {}) == FILES
    assert maker.calls == 2


def test_a_cache_that_cannot_be_written_costs_only_time(maker: Maker, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert kept_tokenizer_files("one", {}) == kept_tokenizer_files("one", {}) == FILES
    assert maker.calls == 2


def test_the_digest_is_that_of_the_metadata(default_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        kept_tokenizer, "kept_tokenizer_files", lambda digest, _: seen.append(digest) or FILES
    )
    for _ in range(2):
        assert open_checkpoint(default_model).tokenizer_files() == FILES
    assert len(seen[0]) == 64
    assert seen[0] == seen[1]
