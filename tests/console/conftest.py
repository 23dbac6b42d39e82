from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from kakeya.http_server import HttpServer
from kakeya.runtime import Runtime
from support import serving
from support.browser import Console, chromium, console
from support.http_serving import serving_http

# Room for a few conversations and their branch points.
ENGINE = replace(serving.ENGINE, capacity=24)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def live(model: Path) -> Iterator[tuple[HttpServer, Runtime]]:
    with serving_http(model, engine=ENGINE) as live:
        yield live


@pytest.fixture(scope="module")
def url(live: tuple[HttpServer, Runtime]) -> str:
    return live[0].url


@pytest.fixture(scope="module")
def runtime(live: tuple[HttpServer, Runtime]) -> Runtime:
    return live[1]


# For a module, not longer: while it runs, its thread can run no other event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Console]:
    """The console on a desktop, by day, with short answers."""
    with console(browser, url) as page:
        yield page


@pytest.fixture
def wordy(browser: Browser, url: str) -> Iterator[Console]:
    """The same with answers that only end when they are stopped."""
    with console(browser, url, longest=100_000) as page:
        yield page
