"""The cases that every SDK plays, played by the Python SDK against a front end over two homes.

One is left out, which wants a server to be full: homes have a disk on which more sessions sleep.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from conformance.conftest import CASES, Playing, played_in_python, write_model_of_cases
from kakeya.config import CacheConfig
from kakeya.types import KernelChoice
from support.clustering import front_of, town_of
from support.conformance import judge
from support.serving import ENGINE, KEY, OTHER_KEY
from support.untraced import unwatched

pytestmark = pytest.mark.untraced
FILLED = "crowd: 64 sessions at once say what each says alone"


@pytest.fixture(scope="module")
def played(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Playing:
    """What it made of every case. The homes have the places of the cases' one server, half of them each."""
    directory = write_model_of_cases(tmp_path_factory.mktemp("model"), default_model)
    cache = CacheConfig(sink=4, window=124, recall=32)
    engine = replace(ENGINE, cache=cache, kernels=KernelChoice.TORCH)
    shared = tmp_path_factory.mktemp("shared")
    with (
        unwatched(),
        town_of(directory, shared, "a", "b", engine=engine, capacity=32) as town,
        front_of(town, KEY, OTHER_KEY) as front,
    ):
        return played_in_python(front.address)


@pytest.mark.parametrize("title", [title for title in CASES if title != FILLED])
def test_a_front_end_serves_as_one_server_does(title: str, played: Playing) -> None:
    judge(CASES[title], played[title])
