"""`kakeya pull`: the path on stdout, and a cache that cannot be written."""

from pathlib import Path

import pytest

from kakeya.models import store
from support.programs import Run


def test_pull_prints_the_path(run: Run, default_model: Path) -> None:
    outcome = run("pull")
    assert outcome.status == 0
    assert outcome.out == f"{default_model}\n"
    assert "\033" not in outcome.err


def test_pull_into_a_file_in_place_of_the_cache(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("in the way")
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "cache"))
    outcome = run("pull")
    assert outcome.status == 1
    assert outcome.out == ""
    assert outcome.err.startswith(f"kakeya: the cache directory {tmp_path / 'cache'} cannot be written")
    assert outcome.err.count("\n") == 1
