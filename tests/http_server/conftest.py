from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kakeya.http_server import HttpServer
from kakeya.runtime import Runtime
from support import serving
from support.http_serving import client_of, serving_http


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def live(model: Path) -> Iterator[tuple[HttpServer, Runtime]]:
    """A server that a whole module shares."""
    with serving_http(model) as live:
        yield live


@pytest.fixture
def server(live: tuple[HttpServer, Runtime]) -> HttpServer:
    return live[0]


@pytest.fixture
def runtime(live: tuple[HttpServer, Runtime]) -> Runtime:
    return live[1]


@pytest.fixture
def client(server: HttpServer) -> Iterator[httpx.Client]:
    with client_of(server) as client:
        yield client
