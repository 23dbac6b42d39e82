"""Towns of two homes, each with a front end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.clustering import FrontHere, Town, front_of, town_of
from support.serving import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cluster-model"))


@pytest.fixture
def town(model: Path, tmp_path: Path) -> Iterator[Town]:
    with town_of(model, tmp_path, "a", "b") as town:
        yield town


@pytest.fixture
def front(town: Town) -> Iterator[FrontHere]:
    with front_of(town) as front:
        yield front
