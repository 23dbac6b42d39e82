"""Conversations: named places that responses move on."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from openai.types.conversations import Conversation, ConversationItem
from pydantic import TypeAdapter

from kakeya.errors import SessionBusy
from kakeya.http_server.responses.run import Run
from kakeya.http_server.responses.schema import ResponseRequest
from kakeya.serving.config import HttpConfig
from support.http_clients import OWNER, Responding, cached, history, responding, text_of
from support.serving import on_loop


def begun(api: Responding, **fields: Any) -> str:
    answer = api.http.post("/v1/conversations", json=fields)
    assert answer.status_code == 200, answer.text
    Conversation.model_validate(answer.json())
    return answer.json()["id"]


def shown(api: Responding, conversation: str) -> dict[str, Any]:
    answer = api.http.get(f"/v1/conversations/{conversation}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def said_in(api: Responding, conversation: str) -> list[str]:
    answer = api.http.get(f"/v1/conversations/{conversation}/items?order=asc&limit=100").json()
    for item in answer["data"]:
        TypeAdapter(ConversationItem).validate_python(item)
    return [item["content"][0]["text"] for item in answer["data"]]


def test_a_conversation_moves_on_with_every_response(api: Responding) -> None:
    conversation = begun(api, metadata={"topic": "foxes"})
    assert api.sessions() == {}, "an empty one takes no session"
    first = api.ask("Tell me of   the quick brown fox", conversation=conversation)
    assert first["conversation"] == {"id": conversation}
    assert first["previous_response_id"] is None
    second = api.ask("More", conversation={"id": conversation})
    assert cached(second) == history(first) - 1
    assert said_in(api, conversation) == [
        "Tell me of   the quick brown fox",
        text_of(first),
        "More",
        text_of(second),
    ]
    now = shown(api, conversation)
    assert now["title"] == "Tell me of the quick brown fox"
    assert now["message_count"] == 4
    assert now["last_response_id"] == second["id"]
    assert now["metadata"] == {"topic": "foxes"}
    assert now["is_answering"] is False
    assert api.sessions()[now["session_id"]] == history(second)


def test_a_conversation_may_begin_with_items(api: Responding) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"role": "assistant", "content": "Hi"},
    ]
    conversation = begun(api, items=items)
    assert said_in(api, conversation) == ["Be brief.", "Hello", "Hi"]
    assert shown(api, conversation)["title"] == "Hello"
    first = api.ask("More", conversation=conversation)
    stateless = api.ask([*items, {"role": "user", "content": "More"}], store=False)
    assert first["usage"] == stateless["usage"]
    assert text_of(first) == text_of(stateless)
    second = api.ask("More", conversation=conversation)
    assert cached(second) == history(first) - 1
    assert len(said_in(api, conversation)) == 7
    # A response made in it can be gone on from on its own, and knows how it began.
    api.runtime.close_session(shown(api, conversation)["session_id"], owner=OWNER)
    aside = api.ask("More", previous_response_id=second["id"])
    assert cached(aside) == 0
    assert aside["usage"]["input_tokens"] >= history(second)
    assert shown(api, conversation)["message_count"] == 7


def test_a_fork_goes_its_own_way(api: Responding) -> None:
    conversation = begun(api, metadata={"a": "b"})
    first = api.ask("Hello", conversation=conversation)
    second = api.ask("More", conversation=conversation)
    path = f"/v1/conversations/{conversation}/fork"
    at_end = api.http.post(path).json()
    assert (at_end["metadata"], at_end["message_count"]) == ({"a": "b"}, 4)
    earlier = api.http.post(path, json={"response_id": first["id"], "metadata": {"x": "y"}}).json()
    assert (earlier["metadata"], earlier["message_count"]) == ({"x": "y"}, 2)

    one = api.ask("Go on", conversation=conversation)
    other = api.ask("Go on", conversation=at_end["id"])
    assert text_of(one) == text_of(other)
    assert cached(one) == cached(other) == history(second) - 1, "neither lost its place"
    back = api.ask("More", conversation=earlier["id"])
    assert text_of(back) == text_of(second)
    assert said_in(api, earlier["id"]) == ["Hello", text_of(first), "More", text_of(second)]
    assert len(said_in(api, conversation)) == 6

    error = api.refused(404, path, response_id="resp_unknown")
    assert (error["code"], error["param"]) == ("response_not_found", "response_id")
    empty = begun(api)
    error = api.refused(404, f"/v1/conversations/{empty}/fork", response_id=first["id"])
    assert error["code"] == "response_not_found"


def test_a_forked_place_outlives_the_conversation_it_came_from(api: Responding) -> None:
    conversation = begun(api)
    first = api.ask("Hello", conversation=conversation)
    fork = api.http.post(f"/v1/conversations/{conversation}/fork").json()["id"]
    assert api.http.delete(f"/v1/conversations/{conversation}").json()["deleted"] is True
    assert api.http.get(f"/v1/conversations/{conversation}").status_code == 404
    second = api.ask("More", conversation=fork)
    assert cached(second) == history(first) - 1
    assert api.http.delete(f"/v1/conversations/{fork}").status_code == 200
    assert api.http.get(f"/v1/responses/{second['id']}").status_code == 404
    # The first was the deleted conversation's, and the fork stood there only until it went on.
    assert len(api.sessions()) <= 1


def test_deleting_frees_every_session(api: Responding) -> None:
    conversation = begun(api)
    responses = [api.ask("Hello", conversation=conversation) for _ in range(3)]
    assert api.sessions()
    answer = api.http.delete(f"/v1/conversations/{conversation}")
    assert answer.json() == {"id": conversation, "object": "conversation.deleted", "deleted": True}
    assert api.sessions() == {}
    for response in responses:
        assert api.http.get(f"/v1/responses/{response['id']}").status_code == 404


def test_deleting_a_response_does_not_take_a_conversation_its_place(api: Responding) -> None:
    conversation = begun(api)
    first = api.ask("Hello", conversation=conversation)
    assert api.http.delete(f"/v1/responses/{first['id']}").status_code == 200
    assert api.http.get(f"/v1/responses/{first['id']}").status_code == 404
    second = api.ask("More", conversation=conversation)
    assert cached(second) == history(first) - 1
    assert api.http.delete(f"/v1/conversations/{conversation}").status_code == 200
    assert api.sessions() == {}


def test_branching_off_a_conversation_leaves_it_where_it_is(api: Responding) -> None:
    conversation = begun(api)
    first = api.ask("Hello", conversation=conversation)
    session = shown(api, conversation)["session_id"]
    aside = api.ask("By the way", previous_response_id=first["id"])
    assert cached(aside) == history(first) - 1
    assert shown(api, conversation)["session_id"] == session
    assert shown(api, conversation)["message_count"] == 2
    assert cached(api.ask("More", conversation=conversation)) == history(first) - 1


def test_the_list_is_newest_first_and_in_pages(api: Responding) -> None:
    ids = [begun(api) for _ in range(4)]
    api.ask("Hello", conversation=ids[1])
    order = [ids[1], ids[3], ids[2], ids[0]]
    page = api.http.get("/v1/conversations?limit=3").json()
    assert [each["id"] for each in page["data"]] == order[:3]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (order[0], order[2], True)
    rest = api.http.get(f"/v1/conversations?after={order[2]}").json()
    assert [each["id"] for each in rest["data"]] == order[3:]
    assert rest["has_more"] is False
    end = api.http.get(f"/v1/conversations?after={order[3]}").json()
    assert (end["data"], end["first_id"], end["has_more"]) == ([], None, False)
    unknown = api.http.get("/v1/conversations?after=conv_unknown")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "after")


def test_items_come_in_pages_either_way(api: Responding) -> None:
    conversation = begun(api, items=[{"role": "user", "content": str(number)} for number in range(5)])
    client = api.openai.conversations
    assert [item.content[0].text for item in client.items.list(conversation, limit=2)] == list("43210")
    assert [item.content[0].text for item in client.items.list(conversation, order="asc", limit=3)] == list(
        "01234"
    )


def test_the_official_client_has_conversations(api: Responding) -> None:
    client = api.openai.conversations
    conversation = client.create(metadata={"a": "b"})
    assert client.retrieve(conversation.id).metadata == {"a": "b"}
    assert client.update(conversation.id, metadata={"c": "d"}).metadata == {"c": "d"}
    response = api.openai.responses.create(
        input="Hello", conversation=conversation.id, temperature=0, max_output_tokens=4
    )
    assert response.conversation is not None
    assert response.conversation.id == conversation.id
    assert client.delete(conversation.id).deleted is True


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/conversations", {"items": [{"role": "user", "content": "x"}] * 21}, "items"),
        ("/v1/conversations", {"metadata": {"a": 1}}, "metadata.a"),
        (
            "/v1/conversations",
            {"items": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "items.0.call_id",
        ),
        ("/v1/responses", {"input": "x", "conversation": "c", "store": False}, "store"),
        (
            "/v1/responses",
            {"input": "x", "conversation": "c", "previous_response_id": "r"},
            "previous_response_id",
        ),
    ],
)
def test_what_does_not_fit_is_refused(api: Responding, path: str, fields: dict[str, Any], param: str) -> None:
    if "conversation" in fields:
        fields = {**fields, "conversation": begun(api)}
    assert api.refused(400, path, **fields)["param"] == param


def test_conversations_are_bounded(chat_model: Path) -> None:
    with responding(chat_model, config=HttpConfig(bind="127.0.0.1:0", stored_responses=2)) as api:
        ids = [begun(api) for _ in range(3)]
        api.ask("Hello", conversation=ids[1])
        begun(api)
        found = [api.http.get(f"/v1/conversations/{each}").status_code for each in ids]
        assert found == [404, 200, 404], "the oldest gave way, but not the one with a session"


def test_only_who_claimed_a_conversation_gives_it_back(api: Responding) -> None:
    asked = ResponseRequest.model_validate({"input": "Hello", "conversation": begun(api)})

    async def claims() -> list[bool]:
        service = api.server.state.require_loaded().responses
        assert asked.conversation is not None
        conversation = service.conversation(OWNER, asked.conversation.id)
        first, second, late = (Run(service, OWNER, service.plan(OWNER, asked)) for _ in range(3))
        claimed = [conversation.is_busy]
        async with AsyncExitStack() as stack:
            await first.open(stack)
            claimed.append(conversation.is_busy)
            with pytest.raises(SessionBusy):
                async with AsyncExitStack() as refused:
                    await late.open(refused)
            claimed.append(conversation.is_busy)
        claimed.append(conversation.is_busy)
        async with AsyncExitStack() as stack:
            await second.open(stack)
            claimed.append(conversation.is_busy)
        return [*claimed, conversation.is_busy]

    assert on_loop(claims()) == [False, True, True, False, True, False]
