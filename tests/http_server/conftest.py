from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kakeya.http_server import HttpServer
from kakeya.runtime import Runtime
from support import serving
from support.http_serving import client_of, eventually, serving_http
from support.responding import OWNER, Responding, responding
from support.served import write_chat_model


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


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def shared_api(chat_model: Path) -> Iterator[Responding]:
    with responding(chat_model) as api:
        yield api


@pytest.fixture
def api(shared_api: Responding) -> Iterator[Responding]:
    """The Responses of a server that a module shares, left without conversations and sessions."""
    yield shared_api
    eventually(lambda: shared_api.server.state.admission.running == 0)
    for each in shared_api.http.get("/v1/conversations?limit=100").json()["data"]:
        shared_api.http.delete(f"/v1/conversations/{each['id']}")
    for session_id in shared_api.sessions():
        shared_api.runtime.close_session(session_id, owner=OWNER)
