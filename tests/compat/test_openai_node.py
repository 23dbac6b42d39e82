"""The official package for Node: the tests in `node/`, run by Node itself."""

import re

import pytest

from kakeya.http_server import HttpServer
from support.clients import KEY, PLACES, Served
from support.programs import NODE_FOLDER, run_node


@pytest.mark.usefixtures("node_modules")
@pytest.mark.parametrize("script", sorted(path.name for path in NODE_FOLDER.glob("*.test.mjs")))
def test_in_node(script: str, served: Served, loading: HttpServer) -> None:
    told = run_node(
        "--test",
        script,
        KAKEYA_URL=served.url,
        KAKEYA_MODEL=served.model,
        KAKEYA_KEY=KEY,
        KAKEYA_PLACES=str(PLACES),
        KAKEYA_LOADING_URL=f"{loading.url}/v1",
    )
    assert re.search(r"^\W*pass [1-9]", told, re.MULTILINE), told
