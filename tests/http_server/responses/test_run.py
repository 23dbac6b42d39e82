"""Going on from responses: only what is new is computed, and any of them can be branched off."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from shutil import copytree

from kakeya.config import CacheConfig, RuntimeConfig
from kakeya.serving.config import HttpConfig
from kakeya.serving.keys import hash_key
from support.http_clients import ENGINE, GREEDY, OWNER, Responding, cached, history, responding, text_of
from support.http_serving import eventually


def computed_tokens(api: Responding) -> int:
    """How many tokens of prompts the engine has computed so far."""
    lines = api.http.get("/metrics").text.splitlines()
    return int(
        float(next(line for line in lines if line.startswith("kakeya_prompt_tokens_total")).split()[1])
    )


def test_fifty_turns_compute_only_what_is_new(api: Responding) -> None:
    response = api.ask("Hello there", instructions="Be brief.")
    assert cached(response) == 0
    sessions, new, computed = set(), set(), computed_tokens(api)
    for _ in range(49):
        before, response = response, api.ask("And then?", previous_response_id=response["id"])
        # The newest token of a history is computed with the next turn.
        assert cached(response) == history(before) - 1
        new.add(response["usage"]["input_tokens"] - history(before))
        # What the engine says that it computed, and not only what it says that it did not.
        before_turn, computed = computed, computed_tokens(api)
        assert computed - before_turn == response["usage"]["input_tokens"] - cached(response) < 30
        lengths = api.sessions()
        sessions.add(max(lengths, key=lambda session_id: lengths[session_id]))
    assert len(new) <= 2, "one more where the answer was cut and the turn closes it"
    assert len(sessions) == 1, "the chain stays in one session"
    assert history(response) > ENGINE.cache.capacity, "and it has outgrown the window"
    assert response["usage"]["dropped_tokens"] == history(response) - ENGINE.cache.capacity
    # The chain's own, and at most as many branch points as there may be.
    assert len(api.sessions()) <= 3


def test_a_branch_answers_as_if_later_turns_had_never_been(api: Responding) -> None:
    first = api.ask("Tell me something")
    second = api.ask("More", previous_response_id=first["id"])
    third = api.ask("Even more", previous_response_id=second["id"])
    branch = api.ask("Something else", previous_response_id=first["id"], max_output_tokens=20)
    again = api.ask("Something else", previous_response_id=first["id"], max_output_tokens=20)

    fresh_first = api.ask("Tell me something")
    fresh = api.ask("Something else", previous_response_id=fresh_first["id"], max_output_tokens=20)

    assert text_of(fresh_first) == text_of(first)
    assert text_of(branch) == text_of(again) == text_of(fresh)
    assert branch["usage"]["input_tokens"] == fresh["usage"]["input_tokens"]
    assert cached(branch) == history(first) - 1, "the branch point was still there"
    # And the chain it branched off goes on undisturbed.
    fourth = api.ask("Go on", previous_response_id=third["id"])
    assert cached(fourth) == history(third) - 1


def test_branch_points_that_gave_way_are_built_anew(api: Responding) -> None:
    chain = [api.ask("One")]
    for text in ("Two", "Three", "Four", "Five"):
        chain.append(api.ask(text, previous_response_id=chain[-1]["id"]))
    eventually(lambda: len(api.sessions()) == 3)  # the head and two branch points

    branch = api.ask("Other", previous_response_id=chain[0]["id"], max_output_tokens=12)

    said = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": text_of(chain[0])},
        {"role": "user", "content": "Other"},
    ]
    stateless = api.ask(said, store=False, max_output_tokens=12)
    assert cached(branch) == 0, "honest: nothing of it was there"
    assert branch["usage"]["input_tokens"] == stateless["usage"]["input_tokens"]
    assert text_of(branch) == text_of(stateless)
    # Newer ones are still there.
    near = api.ask("Other", previous_response_id=chain[-2]["id"])
    assert cached(near) == history(chain[-2]) - 1


def test_a_head_whose_session_was_closed_elsewhere_is_built_anew(api: Responding) -> None:
    first = api.ask("Hello")
    api.runtime.close_session(*api.sessions(), owner=OWNER)
    second = api.ask("Still there?", previous_response_id=first["id"])
    assert cached(second) == 0
    assert second["usage"]["input_tokens"] >= history(first)


def test_a_session_that_somebody_wrote_to_is_left_alone(api: Responding) -> None:
    first = api.ask("Hello")
    (session_id,) = api.sessions()
    api.runtime.append(session_id, [5, 6, 7], owner=OWNER)
    second = api.ask("Go on", previous_response_id=first["id"])
    assert cached(second) == 0
    assert second["usage"]["input_tokens"] < history(first) + 40
    assert api.sessions()[session_id] == history(first) + 3, "it is its writer's now"


def test_store_false_keeps_nothing(api: Responding) -> None:
    first = api.ask("Hello")
    sessions = api.sessions()
    passing = api.ask("Forget this", previous_response_id=first["id"], store=False)
    assert passing["store"] is False
    assert cached(passing) == history(first) - 1
    eventually(lambda: api.sessions() == sessions)
    assert api.http.get(f"/v1/responses/{passing['id']}").status_code == 404
    error = api.refused(404, input="x", previous_response_id=passing["id"])
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
    kept = api.ask("Forget this", previous_response_id=first["id"])
    assert text_of(kept) == text_of(passing), "what came in between left no trace"


def test_truncation_disabled_refuses_before_anything_changes(api: Responding) -> None:
    first = api.ask("Hello")
    sessions = api.sessions()
    long = "word " * 600
    asked = {"previous_response_id": first["id"], "truncation": "disabled"}
    error = api.refused(400, input=long, **asked)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert str(ENGINE.cache.capacity) in error["message"]
    assert api.sessions() == sessions
    room = ENGINE.cache.capacity - history(first)
    error = api.refused(400, input="Hi", max_output_tokens=room, **asked)
    assert error["code"] == "context_length_exceeded"
    assert api.sessions() == sessions
    # What fits is answered, and no longer than fits.
    answered = api.ask("Hi", max_output_tokens=room - 40, **asked)
    assert answered["truncation"] == "disabled"
    assert answered["usage"]["dropped_tokens"] == 0
    assert cached(answered) == history(first) - 1
    # The default is to let the oldest go, and to say how many went.
    dropped = api.ask(long, previous_response_id=first["id"])
    assert dropped["truncation"] == "auto"
    assert dropped["usage"]["dropped_tokens"] > 0


def test_truncation_disabled_bounds_an_answer_without_a_bound(chat_model: Path) -> None:
    engine = replace(ENGINE, cache=CacheConfig(sink=2, window=62, spare=8))
    with responding(chat_model, engine) as api:
        response = api.ask("Hello", truncation="disabled", max_output_tokens=None, seed=1, temperature=1.0)
        assert history(response) <= engine.cache.capacity
        assert response["usage"]["dropped_tokens"] == 0
        error = api.refused(400, input="word " * 60, truncation="disabled")
        assert error["code"] == "context_length_exceeded"
        assert len(api.sessions()) == 1


def test_delete_frees_the_session(api: Responding) -> None:
    first = api.ask("Hello")
    second = api.ask("More", previous_response_id=first["id"])
    assert len(api.sessions()) == 2
    answer = api.http.delete(f"/v1/responses/{second['id']}")
    assert answer.json() == {"id": second["id"], "object": "response.deleted", "deleted": True}
    assert len(api.sessions()) == 1
    assert api.http.get(f"/v1/responses/{second['id']}").status_code == 404
    third = api.ask("More", previous_response_id=first["id"])
    assert text_of(third) == text_of(second)
    for response in (first, third):
        assert api.http.delete(f"/v1/responses/{response['id']}").status_code == 200
    assert api.sessions() == {}


def test_instructions_are_kept_until_others_are_given(api: Responding) -> None:
    first = api.ask("Hello", instructions="Speak of foxes.")
    same = api.ask("Go on", previous_response_id=first["id"])
    assert same["instructions"] == "Speak of foxes."
    assert cached(same) == history(first) - 1
    repeated = api.ask("Go on", previous_response_id=first["id"], instructions="Speak of foxes.")
    assert cached(repeated) == history(first) - 1
    other = api.ask(
        "Go on", previous_response_id=first["id"], instructions="Speak of hens, and of hens only."
    )
    assert other["instructions"] == "Speak of hens, and of hens only."
    assert cached(other) == 0
    assert other["usage"]["input_tokens"] > repeated["usage"]["input_tokens"]


def test_one_slab_is_enough_for_a_chain(chat_model: Path) -> None:
    with responding(chat_model, replace(ENGINE, capacity=1)) as api:
        first = api.ask("Hello")
        second = api.ask("More", previous_response_id=first["id"])
        assert cached(second) == history(first) - 1
        third = api.ask("More", previous_response_id=second["id"])
        assert cached(third) == history(second) - 1
        # There is no slab for another conversation, and this one does not give way.
        assert api.refused(429, input="Hello")["code"] == "rate_limit_exceeded"
        assert api.refused(429, input="x", previous_response_id=third["id"], store=False)
        fourth = api.ask("More", previous_response_id=third["id"])
        assert cached(fourth) == history(third) - 1
        api.http.delete(f"/v1/responses/{fourth['id']}")
        # Now there is one: going back builds the first anew.
        back = api.ask("More", previous_response_id=first["id"])
        assert cached(back) == 0
        assert back["previous_response_id"] == first["id"]


def test_first_responses_that_nobody_continued_give_way_and_chains_do_not(chat_model: Path) -> None:
    with responding(chat_model, replace(ENGINE, capacity=2)) as api:
        chain = api.ask("Hello")
        chain = api.ask("More", previous_response_id=chain["id"])
        lone = [api.ask(f"Question {number}") for number in range(3)]
        after = api.ask("More", previous_response_id=chain["id"])
        assert cached(after) == history(chain) - 1
        continued = api.ask("More", previous_response_id=lone[0]["id"])
        assert cached(continued) == 0
        assert api.http.get(f"/v1/responses/{lone[1]['id']}").json() == lone[1]
        assert api.refused(429, input="Hello")["code"] == "rate_limit_exceeded"


def test_a_common_beginning_can_be_gone_on_from_any_number_of_times(chat_model: Path) -> None:
    with responding(chat_model, replace(ENGINE, capacity=4)) as api:
        beginning = api.ask("Hello")
        for number in range(6):
            answer = api.ask(f"Question {number}", previous_response_id=beginning["id"])
            assert cached(answer) == history(beginning) - 1
        follow_up = api.ask("More", previous_response_id=answer["id"])
        assert cached(follow_up) == history(answer) - 1


def test_stored_responses_are_bounded_and_still_reachable_through_newer_ones(chat_model: Path) -> None:
    with responding(chat_model, config=HttpConfig(bind="127.0.0.1:0", stored_responses=3)) as api:
        chain = [api.ask("Hello")]
        for _ in range(4):
            chain.append(api.ask("More", previous_response_id=chain[-1]["id"]))
        found = [api.http.get(f"/v1/responses/{response['id']}").status_code for response in chain]
        assert found == [404, 404, 200, 200, 200]
        (longest,) = [session for session, length in api.sessions().items() if length == history(chain[-1])]
        api.runtime.close_session(longest, owner=OWNER)
        rebuilt = api.ask("More", previous_response_id=chain[-1]["id"])
        assert rebuilt["usage"]["input_tokens"] > history(chain[-2]), "all of the chain is in it"


def test_what_nobody_used_for_too_long_is_gone(chat_model: Path) -> None:
    with responding(chat_model, sessions=RuntimeConfig(session_idle_ttl_s=0.4)) as api:
        response = api.ask("Hello")
        conversation = api.http.post("/v1/conversations", json={}).json()
        eventually(lambda: api.sessions() == {})
        path = f"/v1/conversations/{conversation['id']}"
        eventually(lambda: api.http.get(path).status_code == 404)
        eventually(lambda: api.http.get(f"/v1/responses/{response['id']}").status_code == 404)
        error = api.refused(404, input="x", previous_response_id=response["id"])
        assert error["code"] == "previous_response_not_found"
        assert api.http.get("/v1/conversations").json()["data"] == []


def test_others_do_not_see_a_response(chat_model: Path) -> None:
    config = HttpConfig(bind="127.0.0.1:0", key_hashes=(hash_key("first"), hash_key("second")))
    with responding(chat_model, config=config, key="first") as api:
        response = api.ask("Hello")
        conversation = api.http.post("/v1/conversations", json={}).json()
        other = {"authorization": "Bearer second"}
        for path in (f"/v1/responses/{response['id']}", f"/v1/responses/{response['id']}/input_items"):
            error = api.http.get(path, headers=other)
            assert (error.status_code, error.json()["error"]["code"]) == (404, "response_not_found")
        assert api.http.delete(f"/v1/responses/{response['id']}", headers=other).status_code == 404
        asked = {"input": "x", "previous_response_id": response["id"]}
        error = api.http.post("/v1/responses", json=asked, headers=other)
        assert (error.status_code, error.json()["error"]["code"]) == (404, "previous_response_not_found")
        asked = {"input": "x", "conversation": conversation["id"]}
        error = api.http.post("/v1/responses", json=asked, headers=other)
        assert (error.status_code, error.json()["error"]["code"]) == (404, "conversation_not_found")
        assert api.http.get("/v1/conversations", headers=other).json()["data"] == []
        assert api.http.get(f"/v1/conversations/{conversation['id']}", headers=other).status_code == 404
        assert api.http.get(f"/v1/responses/{response['id']}").json() == response
        asked = {"input": "x", **GREEDY}
        assert api.http.post("/v1/responses", json=asked, headers={"authorization": ""}).status_code == 401


def test_one_owner_does_not_close_what_another_keeps_for_its_own_quota(chat_model: Path) -> None:
    quotas = RuntimeConfig(quotas=replace(RuntimeConfig().quotas, max_sessions=2))
    config = HttpConfig(bind="127.0.0.1:0", key_hashes=(hash_key("first"), hash_key("second")))
    with responding(chat_model, config=config, sessions=quotas, key="first") as api:
        mine = api.ask("Hello")
        other = {"authorization": "Bearer second"}
        for text in "abc":
            answer = api.http.post("/v1/responses", json={"input": text, **GREEDY}, headers=other)
            assert answer.status_code == 200, "its own first responses give way"
        mine = api.ask("More", previous_response_id=mine["id"])
        assert cached(mine) > 0
        # The quota leaves room for one chain and its branch point.
        mine = api.ask("More", previous_response_id=mine["id"])
        assert cached(mine) > 0


def test_many_may_go_on_from_one_response_at_once(chat_model: Path) -> None:
    # A quarter of the slabs holds branch points: each answer leaves one, and the first must outlive them all.
    with responding(chat_model, engine=replace(ENGINE, capacity=32)) as api:
        first = api.ask("Hello")
        expected = text_of(api.ask("More", previous_response_id=first["id"], store=False))
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(api.ask, "More", previous_response_id=first["id"]) for _ in range(6)]
            answers = [each.result() for each in asked]
        assert {text_of(answer) for answer in answers} == {expected}
        assert len({answer["id"] for answer in answers}) == 6
        assert {cached(answer) for answer in answers} == {history(first) - 1}


def test_a_deleted_response_takes_the_session_of_nobody_who_went_on(api: Responding) -> None:
    first = api.ask("Hello")
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(api.ask, "More", previous_response_id=first["id"], max_output_tokens=60)
        api.http.delete(f"/v1/responses/{first['id']}")
        try:
            second = asked.result()
        except AssertionError:  # it was deleted first
            assert api.sessions() == {}
            return
    eventually(lambda: len(api.sessions()) == 1)
    assert api.ask("More", previous_response_id=second["id"])["usage"]["input_tokens"] > history(second)


def test_a_refused_turn_leaves_the_response_as_it_was(chat_model: Path) -> None:
    quotas = replace(RuntimeConfig().quotas, tokens_per_minute=200)
    with responding(chat_model, sessions=RuntimeConfig(quotas=quotas)) as api:
        first = api.ask("Hello")
        sessions = api.sessions()
        for store in (True, False):
            refused = api.refused(429, input="word " * 200, previous_response_id=first["id"], store=store)
            assert refused["code"] == "rate_limit_exceeded"
            eventually(lambda: api.sessions() == sessions)
        second = api.ask("More", previous_response_id=first["id"])
        assert cached(second) == history(first) - 1
        assert set(sessions) < set(api.sessions()), "in the same session"


def test_a_template_that_rewrites_what_came_before_starts_anew(chat_model: Path, tmp_path: Path) -> None:
    model = Path(copytree(chat_model, tmp_path / "counting"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ messages | length }}" + settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with responding(model) as api:
        first = api.ask("Hello")
        for store in (True, False):
            second = api.ask("More", previous_response_id=first["id"], store=store)
            assert cached(second) == 0
            assert second["usage"]["input_tokens"] >= history(first)
        asked = {"previous_response_id": first["id"], "truncation": "disabled"}
        assert api.refused(400, input="word " * 600, **asked)["code"] == "context_length_exceeded"
        assert api.ask("More", **asked)["usage"] == second["usage"]
        eventually(lambda: len(api.sessions()) == 3)


def test_without_room_to_branch_off_a_broken_turn_is_built_anew(chat_model: Path) -> None:
    with responding(chat_model, replace(ENGINE, capacity=1)) as api:
        first = api.ask("Hello")
        asked = {"input": "Count", "previous_response_id": first["id"], "logit_bias": {"0": -100}}
        with api.http.stream("POST", "/v1/responses", json={**asked, "stream": True}) as answer:
            chunks = answer.iter_bytes()
            next(chunks)
        eventually(lambda: api.sessions() == {})
        second = api.ask("More", previous_response_id=first["id"])
        assert cached(second) == 0
        assert second["usage"]["input_tokens"] >= history(first)


def test_a_session_in_use_elsewhere_is_left_to_its_user(api: Responding) -> None:
    first = api.ask("Hello")
    (session_id,) = api.sessions()
    stream = api.runtime.generate(session_id, 1000, owner=OWNER)
    second = api.ask("More", previous_response_id=first["id"])
    assert cached(second) == 0
    stream.cancel()


def test_without_a_free_slab_older_branch_points_give_way_to_newer_ones(chat_model: Path) -> None:
    with responding(chat_model, replace(ENGINE, capacity=4)) as api:
        chains = [api.ask("Hello"), api.ask("Hi")]
        chains = [api.ask("More", previous_response_id=each["id"]) for each in chains]
        later = [api.ask("More", previous_response_id=each["id"]) for each in chains]
        assert [cached(each) for each in later] == [history(each) - 1 for each in chains]
        eventually(lambda: len(api.sessions()) == 3)  # two heads and the one branch point there may be
        held = api.runtime.create_session(owner=OWNER)
        again = api.ask("More", previous_response_id=later[0]["id"])
        assert cached(again) == history(later[0]) - 1
        back = api.ask("Other", previous_response_id=later[0]["id"], store=False)
        assert cached(back) == history(later[0]) - 1, "the newest is the one that was kept"
        api.runtime.close_session(held, owner=OWNER)
