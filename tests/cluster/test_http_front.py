"""HTTP through a front end: the same answers as a server's own, from the home that has them."""

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from kakeya.cluster.members import home_in
from support.clustering import SECRET, FrontHere, Town, front_of, town_of

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}


@pytest.fixture
def http(front: FrontHere) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=front.url, timeout=30.0) as client:
        yield client


def test_a_chat_is_continued_where_it_began(front: FrontHere, town: Town) -> None:
    with OpenAI(base_url=f"{front.url}/v1", api_key="any") as client:
        messages: list[dict[str, str]] = []
        cached = []
        for turn in range(3):
            messages.append({"role": "user", "content": f"this is turn {turn}"})
            answer = client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=6, temperature=0
            )  # type: ignore[arg-type]
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        assert cached[0] == 0
        assert 0 < cached[1] < cached[2]
        streamed = client.chat.completions.create(
            model="tiny",
            messages=messages[:1],
            max_tokens=6,
            temperature=0,
            stream=True,  # type: ignore[arg-type]
        )
        said = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
        assert said == messages[1]["content"]
    assert sorted(len(home.runtime.home.session_ids()) for home in town.homes.values()) == [0, 2]


def test_responses_and_conversations_name_their_home(http: httpx.Client) -> None:
    made = [
        http.post("/v1/responses", json={"model": "tiny", "input": "hello", "max_output_tokens": 16}).json()
        for _ in range(2)
    ]
    assert {home_in(each["id"]) for each in made} == {"a", "b"}
    for each in made:
        asked = {
            "model": "tiny",
            "input": "more",
            "previous_response_id": each["id"],
            "max_output_tokens": 16,
        }
        more = http.post("/v1/responses", json=asked).json()
        assert home_in(more["id"]) == home_in(each["id"])
        assert more["usage"]["input_tokens_details"]["cached_tokens"] > 0
        assert http.get(f"/v1/responses/{more['id']}").json()["id"] == more["id"]
    talks = [http.post("/v1/conversations", json={}).json()["id"] for _ in range(4)]
    listed = http.get("/v1/conversations", params={"limit": 3}).json()
    rest = http.get("/v1/conversations", params={"limit": 3, "after": listed["last_id"]}).json()
    assert listed["has_more"]
    assert not rest["has_more"]
    assert sorted(each["id"] for page in (listed, rest) for each in page["data"]) == sorted(talks)
    asked = {"model": "tiny", "input": "hello", "conversation": talks[0], "max_output_tokens": 16}
    assert home_in(http.post("/v1/responses", json=asked).json()["id"]) == home_in(talks[0])
    assert http.get("/v1/conversations", params={"limit": 0}).status_code == 400
    assert http.delete(f"/v1/conversations/{talks[1]}").json()["deleted"]
    assert http.get(f"/v1/conversations/{talks[1]}").status_code == 404
    assert http.get("/v1/responses/resp_unknown").status_code == 404


def test_what_belongs_to_all_homes_is_put_together(http: httpx.Client) -> None:
    for number in range(4):
        http.post("/v1/responses", json={"model": "tiny", "input": f"{number}", "max_output_tokens": 16})
    (model,) = http.get("/v1/models").json()["data"]
    assert model["capacity"] == 8
    table = http.get("/console/sessions").json()
    assert table["session_count"] == len(table["sessions"]) == 4
    assert table["facts"]["capacity"] == 8
    for each in table["sessions"]:
        turns = http.get(f"/console/sessions/{each['session_id']}").json()["turns"]
        assert len(turns) == 1
    pages: list[str] = []

    def both_are_counted() -> bool:
        pages.append(http.get("/metrics").text)
        counted = [line for line in pages[-1].splitlines() if line.startswith("kakeya_sessions{")]
        return {line.split('home="')[1][0] for line in counted} == {"a", "b"}

    eventually(both_are_counted)  # a home that is slow to tell is left out
    assert pages[-1].count("# TYPE kakeya_sessions ") == 1
    for path in ("/readyz", "/healthz", "/health", "/ping", "/", "/version", "/openapi.json"):
        assert http.get(path).status_code == 200, path


def test_a_model_is_described_as_the_list_has_it(http: httpx.Client) -> None:
    (listed,) = http.get("/v1/models").json()["data"]
    assert http.get("/v1/models/tiny").json() == listed
    unknown = http.get("/v1/models/some/other")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert http.delete("/v1/models/tiny").status_code == 405


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_ends_its_work_at_the_home_and_is_no_error(
    front: FrontHere, town: Town, caplog: pytest.LogCaptureFixture, streams: bool
) -> None:
    body = {"model": "tiny", "input": "go on", "max_output_tokens": 100_000, "stream": streams}
    host, _, port = front.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as client:
        sent = json.dumps(body).encode()
        head = f"POST /v1/responses HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
        if streams:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        eventually(lambda: working(town) == 1)
    eventually(lambda: working(town) == 0)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def working(town: Town) -> int:
    """How many generates run, anywhere."""
    return sum(used.requests for home in town.homes.values() for used in home.runtime.home.usage().values())


def eventually(found: Callable[[], bool]) -> None:
    until = time.monotonic() + 10.0
    while not found():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_wrong_requests_are_refused_as_a_server_does(http: httpx.Client) -> None:
    unknown = http.post("/v1/chat/completions", json=CHAT | {"model": "other"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    wrong = http.post("/v1/chat/completions", json=CHAT | {"max_tokens": -1})
    assert wrong.status_code == 400
    broken = http.post("/v1/chat/completions", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 400
    assert http.get("/v1/nothing").status_code == 404


def test_keys_are_checked_in_front_and_owners_kept_apart(town: Town) -> None:
    with front_of(town, "first", "second") as front, httpx.Client(base_url=front.url, timeout=30.0) as http:
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 401
        forged = {"kakeya-cluster-secret": SECRET, "kakeya-owner": "key-0"}
        assert http.post("/v1/chat/completions", json=CHAT, headers=forged).status_code == 401
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("first", "second"))
        body = {"model": "tiny", "input": "hello", "max_output_tokens": 16}
        made = http.post("/v1/responses", json=body, headers=mine).json()["id"]
        assert http.get(f"/v1/responses/{made}", headers=mine).status_code == 200
        assert http.get(f"/v1/responses/{made}", headers=other).status_code == 404
        assert http.get("/console/sessions", headers=other).json()["session_count"] == 0


def test_nobody_but_a_front_end_may_call_a_home(town: Town) -> None:
    home = town.homes["a"]
    assert httpx.post(f"{home.http.url}/v1/chat/completions", json=CHAT).status_code == 401
    wrong = {"kakeya-cluster-secret": "a-guess", "kakeya-owner": "local"}
    assert httpx.get(f"{home.http.url}/v1/models", headers=wrong).status_code == 401


def test_a_home_that_is_away_holds_up_its_own_and_nobody_else(model: Path, tmp_path: Path) -> None:
    with (
        town_of(model, tmp_path, "a", "b") as town,
        front_of(town, hold_s=1.0) as front,
        httpx.Client(base_url=front.url, timeout=30.0) as http,
    ):
        body = {"model": "tiny", "input": "hello", "max_output_tokens": 16}
        made = {
            home_in(each): each for each in (http.post("/v1/responses", json=body).json()["id"] for _ in "ab")
        }
        town.homes.pop("a").stop()
        for number in range(4):  # whoever would have had it, one that is there answers
            chat = CHAT | {"messages": [{"role": "user", "content": f"{number}"}]}
            assert http.post("/v1/chat/completions", json=chat).status_code == 200
        lost = http.get(f"/v1/responses/{made['a']}")
        assert (lost.status_code, "retry-after" in lost.headers) == (503, True)
        assert http.get(f"/v1/responses/{made['b']}").status_code == 200
        town.settle("a")
        until = time.monotonic() + 5
        while (
            back := http.get(f"/v1/responses/{made['a']}")
        ).status_code == 503 and time.monotonic() < until:
            pass
        assert back.json()["id"] == made["a"]


@pytest.fixture
def bilingual(model: Path, tmp_path: Path) -> Iterator[FrontHere]:
    """A front end over a home for each of two models; calls that name none go to the first."""
    with town_of(model, tmp_path, "a") as town:
        town.settle("b", model="other")
        with front_of(town) as front:
            yield front


def test_a_conversation_is_where_its_model_is(bilingual: FrontHere) -> None:
    with OpenAI(base_url=f"{bilingual.url}/v1", api_key="any") as client:
        for model, home in (("tiny", "a"), ("other", "b")):
            talk = client.conversations.create(extra_body={"model": model})
            assert home_in(talk.id) == home
            made = client.responses.create(
                model=model, conversation=talk.id, input="hello", max_output_tokens=16
            )
            assert (made.model, home_in(made.id)) == (model, home)
        usual = client.conversations.create()
        assert home_in(usual.id) == "a"
        for before in ({"conversation": usual.id}, {"previous_response_id": made.id}):
            model = "other" if "conversation" in before else "tiny"
            with pytest.raises(BadRequestError, match="stays with it") as refused:
                client.responses.create(model=model, input="hello", **before)  # type: ignore[call-overload]
            assert refused.value.param == "model"
        with pytest.raises(NotFoundError, match="there is no model 'unknown'"):
            client.conversations.create(extra_body={"model": "unknown"})
        with pytest.raises(NotFoundError, match="there is no model 'unknown' here"):
            client.responses.create(model="unknown", input="hello", conversation=usual.id)


def test_what_names_no_model_is_about_the_first(
    bilingual: FrontHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bilingual.homes, "any_home", lambda: "b")
    with httpx.Client(base_url=bilingual.url) as http:
        asked: list[str] = []
        reach = bilingual.homes.reach

        async def reached(*names: str) -> Any:
            asked.extend(names)
            return await reach(*names)

        monkeypatch.setattr(bilingual.homes, "reach", reached)
        for body in ({"content": "hello"}, {"model": "other", "prompt": "hello"}):
            tokens = http.post("/tokenize", json=body).json()["tokens"]
            assert http.post("/detokenize", json={"tokens": tokens}).status_code == 200
        assert asked == ["a", "a", "b", "a"]


@pytest.mark.parametrize("says", [True, False])
def test_a_front_end_says_itself_whether_chats_are_deprecated(town: Town, says: bool) -> None:
    """Whatever its homes say."""
    with front_of(town, chat_deprecation=says) as front:
        answer = httpx.post(f"{front.url}/v1/chat/completions", json=CHAT, timeout=30.0)
        assert answer.status_code == 200
        assert [name in answer.headers for name in ("deprecation", "sunset", "link")] == [says] * 3
