"""The same history and seed give the same tokens, whichever door they come through."""

from pathlib import Path

import pytest

from kakeya.wire import runtime_pb2 as pb
from support.chatting import Talker, assistant, content_of, letter_bias, logprobs_of, spelt, user
from support.http_serving import client_of, serving_http
from support.serving import connected, serving


def test_http_and_grpc_say_the_same(model: Path) -> None:
    with (
        serving_http(model) as (http, runtime),
        serving(model) as (grpc, _),
        client_of(http) as client,
        connected(grpc.address) as stub,
    ):
        talker = Talker(client, runtime.describe().model)
        messages = [user("Hello")]
        said = content_of(talker.chat(messages, max_tokens=4, logit_bias=letter_bias(runtime)))
        messages += [assistant(said), user("And?")]
        settings = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 12}
        body = talker.chat(messages, max_tokens=30, logprobs=True, **settings)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

        session_id = stub.CreateSession(pb.CreateSessionRequest()).session_id
        ids = runtime.tokenizer.chat_ids(messages)
        stub.AppendTokens(pb.AppendTokensRequest(session_id=session_id, token_ids=ids))
        request = pb.GenerateRequest(session_id=session_id, max_tokens=30, logprobs=1, **settings)
        events = [event.token for event in stub.Generate(request) if event.WhichOneof("event") == "token"]
        shown = [token for token in events if token.id != 0]
        assert len(shown) > 5
        told = logprobs_of(body)
        assert [spelt(runtime, token.id) for token in shown] == [each["bytes"] for each in told]
        logprobs = [each["logprob"] for each in told]
        assert [token.logprob for token in shown] == pytest.approx(logprobs, rel=1e-6)  # 32 bits on the wire
