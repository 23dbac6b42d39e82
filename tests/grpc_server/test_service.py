"""The calls through a real channel."""

import time
from typing import Any

import grpc
import pytest

import kakeya
from kakeya.runtime import Runtime
from kakeya.types import SamplingParams, TokenEvent
from kakeya.wire import runtime_pb2 as pb
from support.serving import ENGINE, VOCAB, new_session, token_ids
from support.tiny import byte_level_files

PROMPT = [5, 6, 7, 8, 9]


def generate(stub: Any, session_id: str, count: int, **options: Any) -> list[pb.GenerateEvent]:
    return list(stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=count, **options)))


def info(stub: Any, session_id: str) -> pb.GetSessionInfoResponse:
    return stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session_id))


def direct(
    runtime: Runtime, prompt: list[int], count: int, sampling: SamplingParams | None = None
) -> list[int]:
    """What the runtime says without a server in between."""
    session_id = runtime.create_session(owner="local", eos_token_ids=())
    runtime.append(session_id, prompt, owner="local")
    events = list(runtime.generate(session_id, count, sampling, owner="local"))
    runtime.close_session(session_id, owner="local")
    return [event.token_id for event in events if isinstance(event, TokenEvent)]


def until_idle(stub: Any, session_id: str) -> pb.GetSessionInfoResponse:
    deadline = time.monotonic() + 5
    while (seen := info(stub, session_id)).state != "idle":
        assert time.monotonic() < deadline, "the session is still busy"
        time.sleep(0.005)
    return seen


def test_a_session_lives_and_ends(stub: Any, runtime: Runtime) -> None:
    created = stub.CreateSession(pb.CreateSessionRequest(client_label="my agent", ignore_eos=True))
    session_id = created.session_id
    appended = stub.AppendTokens(pb.AppendTokensRequest(session_id=session_id, token_ids=PROMPT))
    assert appended.history_length == 5
    events = generate(stub, session_id, 6)
    assert [event.WhichOneof("event") for event in events] == ["token"] * 6 + ["done"]
    assert token_ids(iter(events)) == direct(runtime, PROMPT, 6)
    done = events[-1].done
    assert (done.stop_reason, done.generated_token_count, done.cached_token_count) == (pb.MAX_TOKENS, 6, 0)
    assert 0 < done.prefill_duration_seconds <= done.total_duration_seconds
    seen = info(stub, session_id)
    assert (seen.history_length, seen.state, seen.client_label) == (11, "idle", "my agent")
    assert seen.session_id == session_id
    assert seen.kv_live_bytes == 10 * runtime.describe().bytes_per_token
    assert seen.kv_capacity_bytes == runtime.describe().session_bytes
    assert seen.cache_invariant_inv1_violations == seen.cache_invariant_inv2_violations == 0
    assert seen.idle_seconds < 5
    closed = stub.CloseSession(pb.CloseSessionRequest(session_id=session_id))
    assert closed.final_history_length == 11
    with pytest.raises(grpc.RpcError) as refused:
        info(stub, session_id)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_tokens_travel_together_for_a_client_that_understands_it(stub: Any, runtime: Runtime) -> None:
    """In whatever groups they come, they are the same tokens, and the other events are as ever."""
    session_id = new_session(stub, PROMPT * 20)
    events = generate(stub, session_id, 40, group_tokens=True, logprobs=2)
    kinds = [event.WhichOneof("event") for event in events]
    assert (kinds[0], kinds[-1]) == ("truncated", "done")
    assert set(kinds[1:-1]) == {"tokens"}
    sent = [token for event in events for token in event.tokens.tokens]
    assert [token.id for token in sent] == direct(runtime, PROMPT * 20, 40)
    assert all(len(token.top_logprobs) == 2 for token in sent)
    assert events[-1].done.generated_token_count == 40


def test_the_next_turn_finds_its_history_computed(stub: Any) -> None:
    session_id = new_session(stub, PROMPT)
    generate(stub, session_id, 4)
    stub.AppendTokens(pb.AppendTokensRequest(session_id=session_id, token_ids=[3]))
    assert generate(stub, session_id, 1)[-1].done.cached_token_count == 8


def test_what_left_the_window_is_told_first(stub: Any) -> None:
    session_id = new_session(stub, list(range(40)))
    events = generate(stub, session_id, 3)
    assert [event.WhichOneof("event") for event in events] == ["truncated", "token", "token", "token", "done"]
    assert events[0].truncated.dropped_token_count == 40 - ENGINE.cache.capacity
    assert info(stub, session_id).dropped_token_count == 43 - ENGINE.cache.capacity


def test_sampling_options_arrive(stub: Any, runtime: Runtime) -> None:
    options = {
        "temperature": 3.0,
        "top_k": 7,
        "seed": 2**64 - 1,
        "presence_penalty": 0.5,
        "logit_bias": {11: 4.0},
    }
    spoken = token_ids(iter(generate(stub, new_session(stub, PROMPT), 12, **options)))
    assert spoken == direct(runtime, PROMPT, 12, SamplingParams(**options))
    assert spoken != direct(runtime, PROMPT, 12)


def test_log_probabilities_come_only_when_asked_for(stub: Any) -> None:
    session_id = new_session(stub, PROMPT)
    plain, own, top = (
        generate(stub, session_id, 1, **options)[0].token
        for options in ({}, {"logprobs": 0}, {"logprobs": 3})
    )
    assert not plain.HasField("logprob")
    assert own.HasField("logprob")
    assert len(own.top_logprobs) == 0
    assert top.logprob == top.top_logprobs[0].logprob < 0
    assert top.top_logprobs[0].id == top.id
    assert len(top.top_logprobs) == 3


def test_eos_tokens_end_a_generate_and_are_kept(stub: Any, runtime: Runtime) -> None:
    spoken = direct(runtime, PROMPT, 8)
    created = stub.CreateSession(pb.CreateSessionRequest(eos_token_ids=[spoken[2]]))
    stub.AppendTokens(pb.AppendTokensRequest(session_id=created.session_id, token_ids=PROMPT))
    events = generate(stub, created.session_id, 8)
    assert token_ids(iter(events)) == spoken[: spoken.index(spoken[2]) + 1]
    assert events[-1].done.stop_reason == pb.EOS


def test_a_fork_goes_its_own_way(stub: Any) -> None:
    session_id = new_session(stub, PROMPT)
    spoken = token_ids(iter(generate(stub, session_id, 5)))
    fork = stub.ForkSession(pb.ForkSessionRequest(session_id=session_id))
    assert fork.history_length == 10
    assert fork.session_id != session_id
    assert token_ids(iter(generate(stub, fork.session_id, 3))) == token_ids(
        iter(generate(stub, session_id, 3))
    )
    stub.CloseSession(pb.CloseSessionRequest(session_id=session_id))
    assert info(stub, fork.session_id).history_length == 13
    assert len(spoken) == 5


def test_sessions_are_listed_page_by_page(stub: Any) -> None:
    made = [new_session(stub, PROMPT) for _ in range(3)]
    first = stub.ListSessions(pb.ListSessionsRequest(page_size=2))
    assert [session.session_id for session in first.sessions] == made[:2]
    assert first.sessions[0].history_length == 5
    last = stub.ListSessions(pb.ListSessionsRequest(page_size=2, page_token=first.next_page_token))
    assert [session.session_id for session in last.sessions] == made[2:]
    assert last.next_page_token == ""
    assert len(stub.ListSessions(pb.ListSessionsRequest()).sessions) == 3


def test_the_server_says_what_it_is(stub: Any, runtime: Runtime) -> None:
    said = stub.GetServerInfo(pb.GetServerInfoRequest())
    facts = runtime.describe()
    assert (said.version, said.model_id) == (kakeya.__version__, facts.model)
    assert (said.layers, said.kv_heads, said.head_dim, said.vocab_size) == (2, 2, 16, VOCAB)
    assert (said.sink, said.window, said.capacity) == (2, 30, 4)
    assert said.kv_bytes_per_session == facts.session_bytes
    assert said.model_fingerprint
    assert list(said.eos_token_ids) == [0]
    assert {"fork", "logprobs", "exact-numerics"} <= set(said.features)


def test_the_tokenizer_comes_whole(stub: Any, runtime: Runtime) -> None:
    files = byte_level_files()
    said = stub.GetTokenizer(pb.GetTokenizerRequest())
    assert said.tokenizer_json == runtime.tokenizer.files.tokenizer_json.decode()
    assert said.chat_template == files.chat_template
    assert said.eos_token == files.eos_token
    assert not said.HasField("bos_token")


def test_a_repeated_request_id_does_nothing_twice(stub: Any) -> None:
    created = [
        stub.CreateSession(pb.CreateSessionRequest(ignore_eos=True, request_id="create")) for _ in range(2)
    ]
    assert created[0] == created[1]
    session_id = created[0].session_id
    append = pb.AppendTokensRequest(session_id=session_id, token_ids=PROMPT, request_id="append")
    assert [stub.AppendTokens(append).history_length for _ in range(2)] == [5, 5]
    told = [generate(stub, session_id, 4, request_id="generate") for _ in range(2)]
    assert told[0] == told[1]
    assert info(stub, session_id).history_length == 9
    forked = [
        stub.ForkSession(pb.ForkSessionRequest(session_id=session_id, request_id="fork")) for _ in range(2)
    ]
    assert forked[0] == forked[1]
    generate(stub, forked[0].session_id, 1)
    assert stub.ForkSession(pb.ForkSessionRequest(session_id=session_id, request_id="fork")) == forked[0]
    assert len(stub.ListSessions(pb.ListSessionsRequest()).sessions) == 2


def test_a_repeated_fork_is_told_the_length_that_it_had(stub: Any) -> None:
    session_id = new_session(stub, PROMPT)
    asked = [pb.ForkSessionRequest(session_id=session_id, request_id=name) for name in ("one", "two")]
    forks = [stub.ForkSession(request) for request in asked]
    for fork in forks:
        stub.AppendTokens(pb.AppendTokensRequest(session_id=fork.session_id, token_ids=[3]))
    assert [stub.ForkSession(request) for request in asked] == forks
    assert [fork.history_length for fork in forks] == [5, 5]


def test_a_cancelled_generate_keeps_exactly_what_was_sent(stub: Any, runtime: Runtime) -> None:
    """The next generate goes on after the last token that was sent, whether or not it was read."""
    session_id = new_session(stub, PROMPT)
    call = stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=1_000_000))
    read = [next(call).token.id for _ in range(3)]
    call.cancel()
    kept = until_idle(stub, session_id).history_length - len(PROMPT)
    spoken = direct(runtime, PROMPT, kept + 4)
    assert kept >= 3
    assert read == spoken[:3]
    assert token_ids(iter(generate(stub, session_id, 4))) == spoken[kept:]


def test_a_cancel_makes_room_at_once(stub: Any) -> None:
    """The call after a cancel, on the same connection, does not find the session busy."""
    session_id = new_session(stub, PROMPT)
    for _ in range(20):
        call = stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=1_000_000))
        next(call)
        call.cancel()
        stub.AppendTokens(pb.AppendTokensRequest(session_id=session_id, token_ids=[4]))


def test_a_deadline_ends_the_work(stub: Any) -> None:
    session_id = new_session(stub, PROMPT)
    call = stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=1_000_000), timeout=0.3)
    with pytest.raises(grpc.RpcError) as ended:
        list(call)
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    until_idle(stub, session_id)


def test_a_client_that_stops_reading_stops_nobody(stub: Any) -> None:
    stalled = stub.Generate(pb.GenerateRequest(session_id=new_session(stub, PROMPT), max_tokens=1_000_000))
    next(stalled)
    assert len(token_ids(iter(generate(stub, new_session(stub, PROMPT), 50)))) == 50
    stalled.cancel()


def test_closing_a_session_ends_its_generate(stub: Any) -> None:
    session_id = new_session(stub, PROMPT)
    call = stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=1_000_000))
    next(call)
    stub.CloseSession(pb.CloseSessionRequest(session_id=session_id))
    last = list(call)[-1]
    assert last.done.stop_reason == pb.CANCELLED
