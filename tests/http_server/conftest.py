from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from kakeya.config import CacheConfig
from kakeya.errors import SessionNotFound
from kakeya.http_server import HttpServer
from kakeya.http_server.state import HttpState
from kakeya.http_server.text_sessions import TextSessions
from kakeya.runtime import Runtime
from kakeya.serving.commons import Commons
from kakeya.serving.config import HttpConfig
from support import serving
from support.http_clients import OWNER, Responding, responding
from support.http_serving import client_of, eventually, serving_http
from support.tiny import write_chat_model


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


@pytest.fixture
def small_runtime(model: Path) -> Iterator[Runtime]:
    """A runtime of its own: three sessions of 64 tokens."""
    cache = CacheConfig(sink=2, window=62, spare=8)
    with Runtime.open(str(model), replace(serving.ENGINE, cache=cache, capacity=3)) as runtime:
        yield runtime


@pytest.fixture
def state() -> Iterator[HttpState]:
    """That of a server which does not listen."""
    state = HttpState(HttpConfig(), Commons())
    yield state
    state.workers.close()


@pytest.fixture
def sessions(small_runtime: Runtime, state: HttpState) -> TextSessions:
    return TextSessions(small_runtime, state)


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
        with suppress(SessionNotFound):  # the server was closing it
            shared_api.runtime.close_session(session_id, owner=OWNER)
