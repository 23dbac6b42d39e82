"""Who may call over HTTP: keys, web pages, TLS."""

import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from kakeya.errors import ConfigError
from kakeya.http_server import HttpServer, app
from kakeya.serving.config import HttpConfig, TlsConfig
from kakeya.serving.keys import hash_key
from support import odd_routes
from support.http_serving import ANY_PORT, client_of, start
from support.network import Papers
from support.odd_routes import seen
from support.serving import on_loop

KEY = "a-key-0123456789"
OPEN_PATHS = ("/healthz", "/openapi.json")


@pytest.fixture(scope="module", params=[{}])
def server(request: pytest.FixtureRequest) -> Iterator[HttpServer]:
    """A server without a model; a test may name its settings."""
    server = start(replace(ANY_PORT, **request.param))
    yield server
    on_loop(server.drain(0))


WITH_KEY = {"key_hashes": (hash_key(KEY),)}


@pytest.mark.parametrize("server", [WITH_KEY], indirect=True)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": KEY},
        {"x-api-key": KEY},
    ],
)
def test_the_api_needs_a_known_key_and_the_rest_does_not(server: HttpServer, headers: dict[str, str]) -> None:
    with client_of(server) as client:
        for path in ("/v1/models", "/v1/models/x", "/v1/nowhere", "/v1"):
            refused = client.get(path, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
        assert [client.get(path).status_code for path in OPEN_PATHS] == [200] * 2


@pytest.mark.parametrize("server", [WITH_KEY], indirect=True)
def test_a_known_key_gets_as_far_as_the_model(server: HttpServer) -> None:
    with client_of(server, KEY) as client:
        loading = client.get("/v1/models")
    assert loading.status_code == 503


@pytest.mark.parametrize("server", [WITH_KEY], indirect=True)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/responses/resp_1", "/console/sessions"])
def test_a_key_is_looked_at_once(server: HttpServer, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, owner_of = [], server.state.keys.owner_of
    monkeypatch.setattr(server.state.keys, "owner_of", lambda given: looked.append(1) or owner_of(given))
    with client_of(server, KEY) as client:
        assert client.get(path).status_code == 503
    assert len(looked) == 1


@pytest.mark.parametrize("server", [WITH_KEY | {"max_body_bytes": 1024}], indirect=True)
def test_a_body_without_a_key_is_not_read(server: HttpServer) -> None:
    """Else anybody could make the server hold as many bytes as it accepts."""
    with client_of(server) as client:
        assert client.post("/v1/models", content=b"x" * 2000).status_code == 401


# Web pages that are open on the server's machine.


@pytest.mark.parametrize(
    "host, welcome",
    [
        ("127.0.0.1:8000", True), ("localhost:8000", True), ("LOCALHOST", True), ("[::1]:8000", True),
        ("127.8.8.8", True), ("evil.example", False), ("evil.example:8000", False), ("192.168.0.7", False),
        ("localhost.evil.example", False), ("[", False), ("", False),
    ],
)  # fmt: skip
def test_without_keys_no_foreign_name_may_point_here(server: HttpServer, host: str, welcome: bool) -> None:
    with client_of(server) as client:
        answer = client.get("/healthz", headers={"host": host})
    assert answer.status_code == (200 if welcome else 403)
    if not welcome:
        assert answer.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize("server", [WITH_KEY], indirect=True)
def test_with_keys_any_name_may(server: HttpServer) -> None:
    with client_of(server, KEY) as client:
        answer = client.get("/healthz", headers={"host": "kakeya.example", "origin": "https://evil.example"})
    assert answer.status_code == 200


def test_without_keys_no_foreign_page_may_call(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with client_of(server) as client:
        for origin in ("https://evil.example", "null", f"http://localhost:{server.address[-5:]}1"):
            refused = client.post("/v1/models", headers={"origin": origin})
            assert refused.status_code == 403
            assert refused.json()["error"]["code"] == "origin_not_allowed"
        assert client.get("/healthz", headers={"origin": server.url}).status_code == 200


# CORS.

PAGE = "https://page.example"


def preflight(client: httpx.Client, origin: str) -> httpx.Response:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    return client.options("/v1/models", headers={"origin": origin} | asked)


def test_cors_is_off_by_default(server: HttpServer) -> None:
    with client_of(server) as client:
        refused = preflight(client, PAGE)
        same = client.get("/healthz", headers={"origin": server.url})
    assert refused.status_code == 403
    assert not any(name.startswith("access-control") for name in (*refused.headers, *same.headers))


@pytest.mark.parametrize("server", [{"cors_origins": (PAGE,)}, {"cors_origins": ("*",)}], indirect=True)
def test_a_page_that_is_named_may_call_and_read_the_errors_too(server: HttpServer) -> None:
    with client_of(server) as client:
        asked, answered = preflight(client, PAGE), client.get("/v1/models", headers={"origin": PAGE})
        other = client.get("/healthz", headers={"origin": "https://evil.example"})
    everybody = server.state.config.cors_origins == ("*",)
    expected = "*" if everybody else PAGE
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, expected)
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"].lower() == "authorization"
    assert (answered.status_code, answered.headers["access-control-allow-origin"]) == (503, expected)
    assert "retry-after" in answered.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answered.headers
    assert other.status_code == (200 if everybody else 403)


@pytest.mark.parametrize(
    "origin", ["page.example", "ftp://page.example", "https://", "https://a/b", "https://*.x"]
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins must be like https://example.org"):
        HttpConfig(cors_origins=(origin,))


# TLS.


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers.make(tmp_path_factory.mktemp("papers"))


def says(server: HttpServer, context: ssl.SSLContext) -> str:
    url = f"https://localhost:{server.address.rpartition(':')[2]}/healthz"
    try:
        with httpx.Client(verify=context, trust_env=False) as client:
            return str(client.get(url).json()["status"])
    except httpx.TransportError as error:
        return type(error).__name__


def trusting(papers: Papers) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(papers.authority.cert))


def test_tls_proves_the_server(papers: Papers) -> None:
    server = start(replace(ANY_PORT, tls=TlsConfig(papers.server.cert, papers.server.key)))
    try:
        assert server.url.startswith("https://")
        assert says(server, trusting(papers)) == "alive"
        assert says(server, ssl.create_default_context()) == "ConnectError"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://{server.address}/healthz")
    finally:
        on_loop(server.drain(0))


def test_mutual_tls_proves_the_client_too(papers: Papers) -> None:
    tls = TlsConfig(papers.server.cert, papers.server.key, papers.authority.cert)
    server = start(replace(ANY_PORT, tls=tls))
    try:
        known = trusting(papers)
        known.load_cert_chain(papers.client.cert, papers.client.key)
        assert says(server, known) == "alive"
        assert says(server, trusting(papers)) != "alive"
        stranger = trusting(papers)
        stranger.load_cert_chain(papers.stranger.cert, papers.stranger.key)
        assert says(server, stranger) != "alive"
    finally:
        on_loop(server.drain(0))


def test_papers_that_do_not_fit_are_found_before_listening(papers: Papers, tmp_path: Path) -> None:
    (tmp_path / "garbage.pem").write_text("not a certificate")
    for tls, words in (
        (TlsConfig(papers.server.cert, papers.client.key), "server.pem"),
        (TlsConfig(papers.server.cert, papers.server.key, tmp_path / "garbage.pem"), "client authority"),
    ):
        with pytest.raises(ConfigError, match=words):
            start(replace(ANY_PORT, tls=tls))


# Listening.


def test_the_exposure_rule_is_the_same_as_for_grpc(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:8000 is not a loopback address, and anybody"):
        HttpConfig(bind="0.0.0.0:8000")
    tls = TlsConfig(tmp_path / "c", tmp_path / "k")
    assert HttpConfig(bind="0.0.0.0:8000", tls=tls, key_hashes=(hash_key(KEY),)).exposures == ()
    assert len(HttpConfig(bind="0.0.0.0:8000", insecure=True).exposures) == 2


def test_a_place_that_is_taken_is_said_so(server: HttpServer) -> None:
    with pytest.raises(ConfigError, match=rf"cannot listen on {server.address}: .* --http off"):
        start(HttpConfig(bind=server.address))


@pytest.mark.parametrize("server", [{"bind": "[::1]:0"}], indirect=True)
def test_ipv6(server: HttpServer) -> None:
    assert server.url.startswith("http://[::1]:")
    with client_of(server) as client:
        assert client.get("/healthz").status_code == 200


def test_a_form_of_a_foreign_page_reaches_nothing(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_ROUTERS", (*app._ROUTERS, odd_routes.router))
    seen.clear()
    other = start()
    try:
        with client_of(other) as client:
            assert client.post("/odd/size", headers={"origin": PAGE}).status_code == 403
        assert seen["read"] == 0
    finally:
        on_loop(other.drain(0))
