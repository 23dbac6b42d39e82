"""One real server process for all tests of the client, with two API keys."""

from collections.abc import Iterator

import pytest

from kakeya.client import Client
from support.serving import CAPACITY, KEY, OTHER_KEY, serve
from support.tiny import write_chat_model


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that serves."""
    model = write_chat_model(tmp_path_factory.mktemp("model"))
    keys: list[str] = []
    for key in (KEY, OTHER_KEY):
        keys += ["--api-key", key]
    shape = ["--capacity", str(CAPACITY), "--sink", "4", "--window", "128", "--threads", "1"]
    numbers = ["--dtype", "float32", "--weights", "float32", "--numerics", "exact", "--kernels", "torch"]
    with serve(model, *keys, *shape, *numbers) as address:
        yield address


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sessions are closed after each test, so that none starves the next."""
    yield
    if "server" not in request.fixturenames:
        return
    for key in (KEY, OTHER_KEY):
        with Client(request.getfixturevalue("server"), api_key=key) as client:
            for info in client.list_sessions():
                client.session(info.session_id).close()
