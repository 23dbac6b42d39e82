from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kakeya.grpc_server import Server
from kakeya.runtime import Runtime
from support import serving


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def live(model: Path) -> Iterator[tuple[Server, Runtime]]:
    """A server that a whole module shares."""
    with serving.serving(model) as live:
        yield live


@pytest.fixture
def server(live: tuple[Server, Runtime]) -> Server:
    return live[0]


@pytest.fixture
def runtime(live: tuple[Server, Runtime]) -> Iterator[Runtime]:
    """The runtime behind the shared server, left without sessions."""
    yield live[1]
    for info in live[1].list_sessions(owner="local")[0]:
        live[1].close_session(info.session_id, owner="local")


@pytest.fixture
def stub(server: Server, runtime: Runtime) -> Iterator[Any]:
    with serving.connected(server.address) as stub:
        yield stub
