"""The tests of the official Python package, against a front end over two homes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from compat.conftest import client, run_async  # noqa: F401 (fixtures)
from compat.test_openai_python import *  # noqa: F403
from compat.test_openai_python_responses import *  # noqa: F403
from kakeya.config import CacheConfig
from support.clients import KEY, SINK, WINDOW, Served
from support.clustering import front_of, town_of
from support.serving import ENGINE, write_model

pytestmark = pytest.mark.untraced


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_model(tmp_path_factory.mktemp("model"))
    engine = replace(ENGINE, cache=CacheConfig(sink=SINK, window=WINDOW))
    with (
        town_of(directory, tmp_path_factory.mktemp("shared"), "a", "b", engine=engine, capacity=16) as town,
        front_of(town, KEY) as front,
    ):
        yield Served(f"{front.url}/v1", "tiny")


@pytest.fixture
def model(served: Served) -> str:
    """Not the directory that other tests of the cluster have."""
    return served.model
