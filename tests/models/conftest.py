from pathlib import Path

import pytest

from kakeya.models import store


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own, which is not made yet."""
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"
