"""Routes about the server: alive, ready, models, metrics, the API's description."""

import re
import socket
from dataclasses import replace

import httpx

import kakeya
from kakeya.http_server import HttpServer
from kakeya.runtime import Runtime
from kakeya.serving.keys import hash_key
from support.http_serving import ANY_PORT, client_of, eventually, start
from support.serving import on_loop


def test_alive_and_ready_are_two_things() -> None:
    server = start()
    try:
        with client_of(server) as client:
            assert client.get("/healthz").json() == {"status": "alive"}
            loading = client.get("/readyz")
            assert (loading.status_code, loading.headers["retry-after"]) == (503, "1")
            assert "still loading" in loading.json()["error"]["message"]
            assert client.get("/metrics").status_code == 404
            on_loop(server.refuse())
            assert client.get("/healthz").status_code == 200
    finally:
        on_loop(server.drain(0))


def test_what_clients_of_other_servers_ask_first(client: httpx.Client) -> None:
    for answer in (client.get("/health"), client.get("/ping"), client.post("/ping")):
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert client.head("/health").status_code == 200
    assert client.get("/version").json() == {"version": kakeya.__version__}


def test_health_means_ready() -> None:
    server = start()
    try:
        with client_of(server) as client:
            assert client.get("/health").status_code == client.get("/ping").status_code == 503
    finally:
        on_loop(server.drain(0))


def test_ready_until_it_drains(live: tuple[HttpServer, Runtime], client: httpx.Client) -> None:
    server, _ = live
    assert client.get("/readyz").json() == {"status": "ready"}
    assert client.head("/readyz").status_code == client.head("/healthz").status_code == 200
    server.state.is_draining = True
    try:
        draining = client.get("/readyz")
        assert draining.status_code == 503
        assert "shutting down" in draining.json()["error"]["message"]
        assert client.get("/v1/models").status_code == 200
    finally:
        server.state.is_draining = False


def test_no_answer_waits_for_an_acknowledgement(server: HttpServer, client: httpx.Client) -> None:
    assert client.get("/healthz").status_code == 200
    assert server._uvicorn is not None
    connections = tuple(server._uvicorn.server_state.connections)
    ends = [connection.transport.get_extra_info("socket") for connection in connections]
    assert ends
    assert all(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in ends)


def test_models(client: httpx.Client, runtime: Runtime) -> None:
    facts = runtime.describe()
    listed = client.get("/v1/models").json()
    (model,) = listed["data"]
    assert listed["object"] == "list"
    assert (model["id"], model["object"], model["owned_by"]) == (facts.model, "model", "kakeya")
    assert (model["sink"], model["window"], model["context_length"], model["capacity"]) == (2, 30, 32, 4)
    assert model["created"] > 1_700_000_000
    assert client.get(f"/v1/models/{model['id']}").json() == model
    unknown = client.get("/v1/models/some/other")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert unknown.json()["error"]["param"] == "model"


def test_metrics_are_those_of_the_runtime(client: httpx.Client, runtime: Runtime) -> None:
    session_id = runtime.create_session(eos_token_ids=())
    runtime.append(session_id, [5, 6, 7])
    list(runtime.generate(session_id, 5))
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert "kakeya_generation_tokens_total 5.0" in answer.text
    eventually(lambda: 'kakeya_sessions{state="idle"} 1.0' in client.get("/metrics").text)
    runtime.close_session(session_id)


# The description.


def test_the_description_says_what_is_answered(client: httpx.Client) -> None:
    described = client.get("/openapi.json").json()
    assert described["openapi"].startswith("3.")
    assert {"/healthz", "/readyz", "/metrics", "/v1/models", "/v1/models/{model}"} <= set(described["paths"])
    assert "securitySchemes" not in described["components"]
    for path, operations in described["paths"].items():
        shape = "MessagesError" if path.startswith("/v1/messages") else "Error"
        for operation in operations.values():
            assert "422" not in operation["responses"]
            assert operation["responses"]["default"]["content"]["application/json"]["schema"] == {
                "$ref": f"#/components/schemas/{shape}"
            }
    assert not [name for name in described["components"]["schemas"] if "__" in name]
    references = set(re.findall(r"#/components/schemas/([^\"]+)", client.get("/openapi.json").text))
    assert references <= set(described["components"]["schemas"])


def test_the_description_asks_for_a_key_where_one_is_needed() -> None:
    server = start(replace(ANY_PORT, key_hashes=(hash_key("some-key"),)))
    try:
        with client_of(server) as client:
            described = client.get("/openapi.json").json()
    finally:
        on_loop(server.drain(0))
    assert described["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    assert described["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert described["paths"]["/v1/messages"]["post"]["security"] == [{"key": []}, {"x-api-key": []}]
    assert described["paths"]["/tokenize"]["post"]["security"] == [{"key": []}]
    assert "security" not in described["paths"]["/healthz"]["get"]


def test_there_is_no_page_of_the_description(client: httpx.Client) -> None:
    assert client.get("/docs").status_code == 404
