from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from support.serving import serve
from support.tiny import write_chat_model

# A window that fills quickly, and bits that can be compared.
SMALL_EXACT = (
    *("--sink", "2", "--window", "30", "--numerics", "exact"),
    *("--dtype", "float32", "--weights", "float32", "--threads", "1"),
)
ServeTiny = Callable[[int], AbstractContextManager[str]]


@pytest.fixture(scope="session")
def serve_tiny(tmp_path_factory: pytest.TempPathFactory) -> ServeTiny:
    """Starts a server process for so many sessions; gives its address."""
    model = write_chat_model(tmp_path_factory.mktemp("chat-model"))
    return lambda capacity: serve(model, *SMALL_EXACT, "--capacity", str(capacity))


@pytest.fixture(scope="module")
def address(serve_tiny: ServeTiny) -> Iterator[str]:
    with serve_tiny(160) as address:
        yield address
