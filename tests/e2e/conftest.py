from collections.abc import Iterator
from pathlib import Path

import pytest

from support.process import SMALL_EXACT, ServerProcess, server_process
from support.served import write_chat_model


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


@pytest.fixture(scope="module")
def server(chat_model: Path) -> Iterator[ServerProcess]:
    with server_process(chat_model, *SMALL_EXACT, "--capacity", "160") as server:
        yield server
