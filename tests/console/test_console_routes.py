"""What the console's routes send: files with strict headers, and each caller's own sessions."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kakeya.http_server import HttpServer
from kakeya.http_server.console import figures
from kakeya.http_server.console.assets import assets
from kakeya.runtime import Runtime
from kakeya.serving.config import HttpConfig
from kakeya.serving.keys import hash_key, owner_name
from support import serving
from support.http_serving import client_of, serving_http, start


@pytest.fixture
def client(live: tuple[HttpServer, Runtime]) -> Iterator[httpx.Client]:
    with client_of(live[0]) as client:
        yield client


def test_the_page_and_its_files_carry_strict_headers(client: httpx.Client) -> None:
    for path in ("/", *(f"/console/{name}" for name in assets())):
        answer = client.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"].split("; ")
        assert policy[:8] == [
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src 'self' data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
        assert not any("unsafe" in rule for rule in policy)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert client.get("/console/main.js").headers["content-type"] == "text/javascript; charset=utf-8"


def test_what_the_files_ask_for_is_there_and_nothing_is_inline() -> None:
    files = {name: asset.content.decode() for name, asset in assets().items()}
    page = files["index.html"]
    wanted = set(re.findall(r'(?:src|href)="console/([^"]+)"', page))
    for name, text in files.items():
        if name.endswith(".js"):
            wanted |= set(re.findall(r"from '\./([^']+)'", text))
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), name
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
    assert wanted | {"index.html"} == set(files)
    assert not re.search(r"<style|style=|<script(?! (?:type=\"module\" )?src=)| on[a-z]+=", page)


def test_a_file_that_is_known_is_not_sent_again(client: httpx.Client) -> None:
    first = client.get("/console/main.js")
    again = client.get("/console/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"] != client.get("/").headers["etag"]
    assert client.head("/").status_code == 200
    assert client.head("/console/base.css").content == b""


@pytest.mark.parametrize("name", ["routes.py", "__init__.py", "nothing.js", "..%2fstate.py", "%2e%2e/x.js"])
def test_there_are_no_other_files(client: httpx.Client, name: str) -> None:
    assert client.get(f"/console/{name}").status_code == 404


def test_the_sessions_are_told_with_the_facts(client: httpx.Client, runtime: Runtime) -> None:
    before = client.get("/console/sessions").json()
    session = runtime.create_session(client_label="told", eos_token_ids=())
    runtime.append(session, [5, 6, 7])
    list(runtime.generate(session, 4))
    runtime.append(session, [5])
    list(runtime.generate(session, 2))
    answer = client.get("/console/sessions")
    told = answer.json()
    assert answer.headers["cache-control"] == "no-store"
    assert told["session_count"] == before["session_count"] + 1
    assert told["facts"]["free_slabs"] == before["facts"]["free_slabs"] - 1
    assert told["facts"]["generated_tokens"] == before["facts"]["generated_tokens"] + 6
    assert (told["facts"]["sink"], told["facts"]["window"]) == (2, 30)
    assert "path" not in told["facts"]
    row = next(row for row in told["sessions"] if row["session_id"] == session)
    info = runtime.info(session)
    assert (row["client_label"], row["state"], row["history_length"], row["turns"]) == ("told", "idle", 10, 2)
    assert row["kv_live_bytes"] == info.kv_live_bytes > 0
    assert "recent_turns" not in row
    turns = client.get(f"/console/sessions/{session}").json()["turns"]
    assert [(turn["number"], turn["generated_tokens"]) for turn in turns] == [(1, 4), (2, 2)]
    assert row["last_turn"] == turns[-1]
    runtime.close_session(session)
    gone = client.get(f"/console/sessions/{session}")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "session_not_found")


def test_of_many_sessions_the_recently_used_are_told(
    client: httpx.Client, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "MOST_ROWS", 2)
    monkeypatch.setattr(figures, "_PAGE_SIZE", 2)
    made = [runtime.create_session() for _ in range(5)]
    for used in (made[3], made[1]):
        time.sleep(0.05)  # longer than looking at all pages takes
        runtime.append(used, [5])
    told = client.get("/console/sessions").json()
    assert [row["session_id"] for row in told["sessions"]] == [made[1], made[3]]
    assert told["session_count"] == 5
    for session in made:
        runtime.close_session(session)


def test_everybody_sees_their_own_only(model: Path) -> None:
    config = HttpConfig(bind="127.0.0.1:0", key_hashes=(hash_key("one"), hash_key("two")))
    with serving_http(model, config) as (server, runtime):
        session = runtime.create_session(owner=owner_name(hash_key("one")))
        with client_of(server) as nobody, client_of(server, "one") as one, client_of(server, "two") as two:
            assert nobody.get("/").status_code == 200
            assert nobody.get("/console/sessions").status_code == 401
            assert nobody.get(f"/console/sessions/{session}").status_code == 401
            assert one.get("/console/sessions").json()["session_count"] == 1
            assert two.get("/console/sessions").json()["sessions"] == []
            assert two.get(f"/console/sessions/{session}").status_code == 404


def test_the_page_comes_while_the_model_loads() -> None:
    server = start()
    with client_of(server) as client:
        assert client.get("/").status_code == 200
        waiting = client.get("/console/sessions")
        assert (waiting.status_code, waiting.headers["retry-after"]) == (503, "1")
    serving.on_loop(server.drain(0))


def test_a_server_that_counts_nothing_says_so(runtime: Runtime) -> None:
    assert figures.overview(runtime, None, "local")["facts"]["generated_tokens"] is None
