from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kakeya.config import EngineConfig
from kakeya.engine.backend import Backend
from kakeya.engine.engine import Engine
from kakeya.engine.proposer import Proposer
from kakeya.models.decoder import Decoder
from support import tiny
from support.ahead import RunsAhead
from support.oracle import Oracle


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Products this small only lose by being shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def oracle(tiny_llama: Path) -> Oracle:
    return Oracle.of_directory(tiny_llama)


@pytest.fixture(scope="session")
def decoder(tiny_llama: Path) -> Decoder:
    """Float32 torch, fast numerics: shared by the tests that need nothing else."""
    return tiny.load(tiny_llama, tiny.engine_config())


MakeEngine = Callable[..., Engine]


@pytest.fixture(params=["in step", "ahead"])
def paced(request: pytest.FixtureRequest) -> Callable[[Backend], Backend]:
    """Whatever an engine does must not depend on whether its device runs ahead."""
    return RunsAhead if request.param == "ahead" else lambda backend: backend


@pytest.fixture
def make_engine(decoder: Decoder, paced: Callable[[Backend], Backend]) -> Iterator[MakeEngine]:
    """Engines over the shared tiny model, shut down at the end of the test."""
    engines: list[Engine] = []

    def make(config: EngineConfig | None = None, proposer: Proposer | None = None) -> Engine:
        config = config or tiny.engine_config()
        engines.append(Engine(paced(tiny.make_backend(decoder, config)), config, proposer).start())
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()
