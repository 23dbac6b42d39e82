"""What the tests of durable sessions share."""

import pytest

from support.crashes import Crashed, crash_copies


@pytest.fixture
def crashed(monkeypatch: pytest.MonkeyPatch) -> Crashed:
    return crash_copies(monkeypatch)
