"""The tests of the console that only look at it, against a front end over two homes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from console.conftest import browser, page, wordy  # noqa: F401 (fixtures)
from console.test_console_chat import *  # noqa: F403
from console.test_console_chat import _clean  # noqa: F401
from support.clustering import front_of, town_of
from support.serving import ENGINE


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        town_of(model, tmp_path_factory.mktemp("shared"), "a", "b", engine=ENGINE, capacity=12) as town,
        front_of(town) as front,
    ):
        yield front.url
