"""What a request may take, and what becomes of one that breaks: over real connections."""

import json
import logging
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from kakeya.http_server import HttpServer, app
from kakeya.serving.config import AdmissionConfig, HttpConfig
from support import odd_routes
from support.http_serving import ANY_PORT, client_of, connection_to, eventually, raw, start
from support.odd_routes import seen
from support.serving import on_loop

SMALL = replace(ANY_PORT, max_body_bytes=1024, receive_timeout_s=0.3, max_connections=8, keepalive_s=0.5)


@pytest.fixture(scope="module", params=[{}])
def small(request: pytest.FixtureRequest) -> Iterator[HttpServer]:
    """A server with tight bounds; a test may name its own."""
    config: HttpConfig = replace(SMALL, **request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "_ROUTERS", (*app._ROUTERS, odd_routes.router))
        server = start(config, AdmissionConfig(max_concurrent=256))
    yield server
    on_loop(server.drain(0))


@pytest.fixture(autouse=True)
def afresh(small: HttpServer) -> None:
    """What the test before left has ended."""
    eventually(lambda: nobody_is_connected(small))
    seen.clear()


def head(method: str, path: str, *headers: str) -> bytes:
    lines = (f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers)
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def parsed(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    top, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, body


def nobody_is_connected(server: HttpServer) -> bool:
    assert server._uvicorn is not None
    return not server._uvicorn.server_state.connections and not server._uvicorn.server_state.tasks


def code_of(answer: bytes) -> str:
    return str(json.loads(parsed(answer)[2])["error"]["code"])


# Bodies.


def test_a_body_up_to_the_limit_arrives_whole(small: HttpServer) -> None:
    with client_of(small) as client:
        assert client.post("/odd/size", content=b"x" * 1024).json() == 1024
        assert client.post("/odd/size", content=iter([b"x" * 500, b"y" * 524])).json() == 1024
        assert client.post("/odd/size").json() == 0


def test_a_body_beyond_it_is_refused_whoever_says_how_long_it_is(small: HttpServer) -> None:
    with client_of(small) as client:
        for content in (b"x" * 1025, iter([b"x" * 1000, b"y" * 25]), b"x" * 10_000):
            refused = client.post("/odd/size", content=content)
            assert refused.status_code == 413
            assert refused.json()["error"]["code"] == "request_too_large"
            assert "1,024 bytes" in refused.json()["error"]["message"]
        assert client.post("/odd/size", content=b"x").json() == 1, "and the connection goes on"
    assert seen["read"] == 1


@pytest.mark.parametrize(
    "headers", [("Content-Length: 100000",), ("Content-Length: 1025", "Expect: 100-continue")]
)
def test_a_body_that_is_far_too_long_is_not_waited_for(small: HttpServer, headers: tuple[str, ...]) -> None:
    answer = raw(small, head("POST", "/odd/size", *headers))
    assert (parsed(answer)[0], code_of(answer)) == (413, "request_too_large")
    assert parsed(answer)[1]["connection"] == "close"


def test_nor_is_one_that_goes_on_and_on(small: HttpServer) -> None:
    chunk = b"1000\r\n" + b"x" * 0x1000 + b"\r\n"
    answer = raw(small, head("POST", "/odd/size", "Transfer-Encoding: chunked"), chunk * 6, pause=0.05)
    assert (parsed(answer)[0], code_of(answer)) == (413, "request_too_large")


def test_a_body_that_does_not_come_is_given_up(small: HttpServer) -> None:
    began = time.monotonic()
    answer = raw(small, head("POST", "/odd/size", "Content-Length: 10"), b"12345")
    assert 0.2 < time.monotonic() - began < 10
    assert (parsed(answer)[0], code_of(answer)) == (408, "request_timeout")
    assert seen["read"] == 0


def test_a_client_that_goes_while_it_sends_is_no_error(
    small: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    with connection_to(small) as connection:
        connection.sendall(head("POST", "/odd/size", "Content-Length: 10") + b"123")
    with client_of(small) as client:
        assert client.get("/healthz").status_code == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# Heads and connections.


def test_a_head_that_does_not_come_is_given_up(small: HttpServer) -> None:
    for begun in (b"", b"GET /healthz HT"):
        began = time.monotonic()
        assert raw(small, begun) == b""
        assert 0.2 < time.monotonic() - began < 10


def test_a_second_head_has_no_longer(small: HttpServer) -> None:
    began = time.monotonic()
    answer = raw(small, head("GET", "/healthz"), b"GET /heal", pause=0.05)
    assert parsed(answer)[0] == 200
    assert 0.2 < time.monotonic() - began < 10


def test_a_head_behind_a_running_request_waits_for_it(small: HttpServer) -> None:
    with connection_to(small, timeout=1) as connection:
        connection.sendall(head("GET", "/odd/stream?ending=wait") + b"GET /half")
        time.sleep(0.8)
        connection.setblocking(False)
        assert b"data: 2" in connection.recv(65536)
        with pytest.raises(BlockingIOError):
            connection.recv(1)


def test_a_silent_connection_is_closed_after_its_time(small: HttpServer) -> None:
    began = time.monotonic()
    answer = raw(small, head("GET", "/healthz"))
    assert parsed(answer)[0] == 200
    assert 0.4 < time.monotonic() - began < 10


def test_a_head_that_goes_on_and_on_is_refused(small: HttpServer) -> None:
    line = b"X-Long: " + b"y" * 1000 + b"\r\n"
    answer = raw(small, b"GET /healthz HTTP/1.1\r\n", *(line * 11 for _ in range(7)), pause=0.01)
    assert (parsed(answer)[0], code_of(answer)) == (431, "headers_too_large")


@pytest.mark.parametrize("small", [{"max_body_bytes": 2**20}], indirect=True)
def test_a_long_body_is_no_long_head(small: HttpServer) -> None:
    with client_of(small) as client:
        for _ in range(2):
            assert client.post("/odd/size", content=b"x" * 500_000).json() == 500_000


def test_what_is_not_http_is_told_so(small: HttpServer) -> None:
    answer = raw(small, b"\x16\x03\x01 hello\r\n\r\n")
    assert (parsed(answer)[0], code_of(answer)) == (400, "bad_request")
    assert parsed(answer)[1]["content-type"] == "application/json"


def test_an_offer_of_another_protocol_is_not_taken(
    small: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    offer = (
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: eA==",
    )
    answer = raw(small, head("GET", "/healthz", *offer))
    assert parsed(answer)[0] == 200
    assert caplog.records == []


def test_a_connection_too_many_is_closed(small: HttpServer) -> None:
    open_ones = [connection_to(small) for _ in range(8)]
    try:
        answer = raw(small)
        assert (parsed(answer)[0], code_of(answer)) == (503, "too_many_connections")
    finally:
        for connection in open_ones:
            connection.close()
    with client_of(small) as client:
        eventually(lambda: _is_alive(client))


def _is_alive(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


# Time.

HASTY = {"request_timeout_s": 0.3}


@pytest.mark.parametrize("small", [HASTY], indirect=True)
def test_a_request_that_takes_too_long_is_ended(small: HttpServer) -> None:
    with client_of(small) as client:
        late = client.post("/odd/work")
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    assert "0.3 s" in late.json()["error"]["message"]
    assert (seen["begun"], seen["ended"], small.state.admission.running) == (1, 1, 0)


@pytest.mark.parametrize("small", [HASTY], indirect=True)
def test_a_stream_that_takes_too_long_says_so_at_its_end(small: HttpServer) -> None:
    with client_of(small) as client:
        events = events_of(client.get("/odd/stream?ending=wait"))
    assert events[:2] == [1, 2]
    assert events[2]["error"]["code"] == "timeout"
    assert (len(events), seen["closed"], seen["released"]) == (3, 1, 1)


@pytest.mark.parametrize("small", [HASTY], indirect=True)
def test_a_client_that_does_not_read_is_not_waited_for(
    small: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    with connection_to(small) as connection:
        connection.sendall(head("GET", "/odd/flood"))
        eventually(lambda: seen["released"] and nobody_is_connected(small))
        assert (seen["closed"], seen["released"]) == (1, 1)
    assert caplog.records == []


# Errors.


def events_of(answer: httpx.Response) -> list:
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]


def test_what_breaks_is_one_answer_and_one_line_in_the_log(
    small: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    with client_of(small) as client:
        broken = client.get("/odd/boom")
    assert (broken.status_code, broken.json()["error"]["code"]) == (500, "internal_error")
    assert "nobody" not in broken.text
    assert [record.getMessage() for record in caplog.records] == ["a request failed"]
    assert "something that nobody may see" in caplog.text


def test_what_breaks_in_a_stream_is_its_last_event(
    small: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    with client_of(small) as client:
        refused = events_of(client.get("/odd/stream?ending=refusal"))
        assert caplog.records == []
        broken = events_of(client.get("/odd/stream?ending=error"))
    assert refused[2]["error"]["message"] == "what a client may see"
    assert broken[2]["error"]["code"] == "internal_error"
    assert (len(refused), len(broken), seen["closed"], seen["released"]) == (3, 3, 2, 2)
    assert [record.getMessage() for record in caplog.records] == ["a request failed"]


def test_what_breaks_after_the_answer_is_in_the_log(
    small: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    with client_of(small) as client:
        assert events_of(client.get("/odd/stream?ending=late-error")) == [1, 2]
    eventually(lambda: caplog.records)
    assert [record.getMessage() for record in caplog.records] == ["a request failed after its answer"]


@pytest.mark.parametrize("small", [{"request_timeout_s": 0}], indirect=True)
def test_without_a_limit_errors_are_the_same(small: HttpServer) -> None:
    with client_of(small) as client:
        assert client.get("/odd/boom").json()["error"]["code"] == "internal_error"


def test_what_breaks_in_the_middle_of_anything_else_breaks_the_connection(small: HttpServer) -> None:
    with client_of(small) as client, pytest.raises(httpx.RemoteProtocolError):
        client.get("/odd/text")


def test_every_answer_has_an_id_and_none_says_what_serves_it(small: HttpServer) -> None:
    with client_of(small) as client:
        answers = [
            client.get(path) for path in ("/healthz", "/nowhere", "/odd/boom", "/odd/stream?ending=error")
        ]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 4
    assert all(name.startswith("req_") for name in ids)
    assert not any("server" in answer.headers for answer in answers)
    assert answers[3].headers["cache-control"] == "no-store"


def test_paths_and_methods_that_are_not_there(small: HttpServer) -> None:
    with client_of(small) as client:
        nowhere, wrong = client.get("/v1/nowhere"), client.delete("/healthz")
        broken = client.post("/odd/size", content=b"")
    assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"]
    assert broken.status_code == 200


# Clients that go.


@pytest.mark.parametrize("small", [{"max_connections": 512}], indirect=True)
def test_rude_clients_leave_nothing_behind(small: HttpServer) -> None:
    """Half of them wait for an answer, half read a stream; all hang up, some with a reset."""
    rude = []
    for number in range(200):
        connection = connection_to(small)
        waits = number % 2
        connection.sendall(
            head("POST", "/odd/work", "Content-Length: 0")
            if waits
            else head("GET", "/odd/stream?ending=wait")
        )
        if number % 4 < 2:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        rude.append(connection)
    eventually(lambda: seen["begun"] == 100)
    for connection in rude:
        connection.close()
    eventually(lambda: (seen["ended"], seen["released"]) == (100, 100))
    assert seen["closed"] == 100
    assert (small.state.admission.running, small.state.admission.waiting) == (0, 0)
    eventually(lambda: nobody_is_connected(small))
