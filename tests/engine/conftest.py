from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kakeya.config import EngineConfig
from kakeya.engine.backend import Backend
from kakeya.engine.batch import Segment
from kakeya.engine.engine import Engine
from kakeya.engine.proposer import Proposer
from support import tiny
from support.engines import Hooked, RunsAhead
from support.reference import Oracle


@pytest.fixture(autouse=True)
def on_one_thread(one_torch_thread: None) -> None:
    """Every test here computes with tiny products."""


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def oracle(tiny_llama: Path) -> Oracle:
    return Oracle.of_directory(tiny_llama)


@pytest.fixture(scope="session", params=["torch", "mlx"])
def decoder(tiny_llama: Path, request: pytest.FixtureRequest) -> tiny.Model:
    """Float32, fast numerics: shared by the tests that need nothing else."""
    return tiny.load(tiny_llama, tiny.engine_config(**tiny.COMPUTERS[request.param]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs ahead is put before one backend: the same engine then runs over it."""
    items[:] = [item for item in items if not {"ahead", "mlx"} <= set(_parameters(item))]


def _parameters(item: pytest.Item) -> list[object]:
    callspec = getattr(item, "callspec", None)
    return [] if callspec is None else [each for each in callspec.params.values() if isinstance(each, str)]


MakeEngine = Callable[..., Engine]


@pytest.fixture(params=["in step", "ahead"])
def paced(request: pytest.FixtureRequest) -> Callable[[Backend], Backend]:
    """Whatever an engine does must not depend on whether its device runs ahead."""
    return RunsAhead if request.param == "ahead" else lambda backend: backend


@pytest.fixture
def make_engine(decoder: tiny.Model, paced: Callable[[Backend], Backend]) -> Iterator[MakeEngine]:
    """Engines over the shared tiny model, shut down at the end of the test."""
    engines: list[Engine] = []

    def make(config: EngineConfig | None = None, proposer: Proposer | None = None) -> Engine:
        config = config or tiny.engine_config()
        proposers = () if proposer is None else (proposer,)
        engines.append(Engine(paced(tiny.make_backend(decoder, config)), config, proposers).start())
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def hooked(
    decoder: tiny.Model, paced: Callable[[Backend], Backend], request: pytest.FixtureRequest
) -> Callable[..., tuple[Engine, Hooked]]:
    """Engines over the shared tiny model, with something that happens before each run of their backend."""

    def make(before: Callable[[Sequence[Segment]], None], **changes: object) -> tuple[Engine, Hooked]:
        config = tiny.engine_config(**changes)
        backend = Hooked(tiny.make_backend(decoder, config), before)
        engine = Engine(paced(backend), config).start()
        request.addfinalizer(engine.shutdown)
        return engine, backend

    return make
