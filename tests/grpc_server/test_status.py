"""Every row of the error table, through the wire."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from kakeya import errors
from kakeya.config import Quotas, RuntimeConfig
from kakeya.engine.cpu.backend import CpuBackend
from kakeya.grpc_server import Server
from kakeya.grpc_server.status import STATUS_CODES, status_code, status_details
from kakeya.runtime import Runtime
from kakeya.wire import runtime_pb2 as pb
from support import serving
from support.serving import new_session

Code = grpc.StatusCode
PROMPT = [5, 6, 7]


def refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, str, str]:
    """The code, the error's name and the words a call was refused with."""
    with pytest.raises(grpc.RpcError) as refusal:
        answer = call()
        list(answer)  # type: ignore[call-overload]
    metadata = dict(refusal.value.trailing_metadata() or ())
    return refusal.value.code(), metadata.get("kakeya-error", ""), refusal.value.details()


def append(session_id: str, tokens: list[int], **more: Any) -> pb.AppendTokensRequest:
    return pb.AppendTokensRequest(session_id=session_id, token_ids=tokens, **more)


def generate(session_id: str, count: int = 1, **more: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(session_id=session_id, max_tokens=count, **more)


def test_an_unknown_session_is_not_found(stub: Any) -> None:
    for call in (
        lambda: stub.AppendTokens(append("nobody", PROMPT)),
        lambda: stub.Generate(generate("nobody")),
        lambda: stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id="nobody")),
        lambda: stub.CloseSession(pb.CloseSessionRequest(session_id="nobody")),
        lambda: stub.ForkSession(pb.ForkSessionRequest(session_id="nobody")),
    ):
        assert refused(call) == (Code.NOT_FOUND, "SessionNotFound", "no session 'nobody'")


@pytest.mark.parametrize(
    "request_of, words",
    [
        (lambda session: append(session, [5, serving.VOCAB]), "token id 320 is not in the vocabulary"),
        (lambda session: generate(session), "empty session"),
        (lambda session: generate(session, 0), "max_tokens"),
        (lambda session: generate(session, temperature=-1.0), "temperature"),
        (lambda session: generate(session, temperature=float("nan")), "temperature"),
        (lambda session: generate(session, top_p=0.0), "top_p"),
        (lambda session: generate(session, logprobs=21), "top_logprobs"),
        (lambda session: generate(session, logit_bias={serving.VOCAB: 1.0}), "vocabulary"),
        (lambda session: pb.CreateSessionRequest(eos_token_ids=[serving.VOCAB]), "vocabulary"),
        (lambda session: pb.CreateSessionRequest(eos_token_ids=[1], ignore_eos=True), "exclude each other"),
        (lambda session: pb.CreateSessionRequest(pinned_prefix_tokens=1000), "pinned prefix"),
        (lambda session: pb.CreateSessionRequest(client_label="x" * 257), "client_label"),
        (lambda session: pb.CreateSessionRequest(request_id="x" * 129), "request_id"),
        (lambda session: pb.ListSessionsRequest(page_size=1001), "page_size"),
        (lambda session: pb.ListSessionsRequest(page_token="nonsense"), "page_token"),
    ],
)
def test_a_bad_argument_is_named_and_changes_nothing(
    stub: Any, request_of: Callable[[str], Any], words: str
) -> None:
    session_id = new_session(stub)
    request = request_of(session_id)
    method = getattr(stub, type(request).__name__.removesuffix("Request"))
    code, name, details = refused(lambda: method(request))
    assert (code, name) == (Code.INVALID_ARGUMENT, "InvalidArgument")
    assert words in details
    assert stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session_id)).history_length == 0
    assert len(stub.ListSessions(pb.ListSessionsRequest()).sessions) == 1


def test_a_busy_session_is_aborted(stub: Any) -> None:
    session_id = new_session(stub, PROMPT)
    running = stub.Generate(generate(session_id, 1_000_000))
    next(running)
    for call in (
        lambda: stub.Generate(generate(session_id)),
        lambda: stub.AppendTokens(append(session_id, [4])),
        lambda: stub.ForkSession(pb.ForkSessionRequest(session_id=session_id)),
    ):
        assert refused(call)[:2] == (Code.ABORTED, "SessionBusy")
    running.cancel()


def test_a_wrong_history_length_is_aborted(stub: Any) -> None:
    session_id = new_session(stub, PROMPT)
    code, name, details = refused(
        lambda: stub.AppendTokens(append(session_id, [4], expected_history_length=2))
    )
    assert (code, name) == (Code.ABORTED, "HistoryMismatch")
    assert "the history has 3 tokens" in details
    answer = stub.AppendTokens(append(session_id, [4], expected_history_length=3))
    assert answer.history_length == 4


def test_a_broken_invariant_fails_the_session_alone(
    stub: Any, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, other = new_session(stub, PROMPT), new_session(stub, PROMPT)
    list(stub.Generate(generate(broken, 2)))
    session = runtime._used(broken, "local")
    session.sequence.slab.committed = 99
    assert refused(lambda: stub.Generate(generate(broken)))[:2] == (
        Code.FAILED_PRECONDITION,
        "InvariantViolation",
    )
    assert len(list(stub.Generate(generate(other, 2)))) == 3


def test_no_free_slab_is_exhausted(stub: Any) -> None:
    sessions = [new_session(stub, PROMPT) for _ in range(serving.ENGINE.capacity)]
    for call in (
        lambda: stub.CreateSession(pb.CreateSessionRequest()),
        lambda: stub.ForkSession(pb.ForkSessionRequest(session_id=sessions[0])),
    ):
        assert refused(call)[:2] == (Code.RESOURCE_EXHAUSTED, "NoFreeSlab")
    assert len(stub.ListSessions(pb.ListSessionsRequest()).sessions) == 4


def test_a_used_up_quota_is_exhausted_and_named(model: Path) -> None:
    quotas = RuntimeConfig(quotas=Quotas(max_sessions=1, tokens_per_minute=10))
    with (
        serving.serving(model, sessions=quotas) as (server, _),
        serving.connected(server.address) as stub,
    ):
        session_id = new_session(stub, PROMPT)
        code, _, details = refused(lambda: stub.CreateSession(pb.CreateSessionRequest()))
        assert (code, "max_sessions" in details) == (Code.RESOURCE_EXHAUSTED, True)
        code, _, details = refused(lambda: stub.AppendTokens(append(session_id, [3] * 9)))
        assert (code, "tokens_per_minute" in details) == (Code.RESOURCE_EXHAUSTED, True)


def test_a_loading_server_is_unavailable() -> None:
    server = serving.start()
    try:
        with serving.connected(server.address) as stub:
            assert refused(lambda: stub.GetServerInfo(pb.GetServerInfoRequest())) == (
                Code.UNAVAILABLE,
                "Restarting",
                "the model is still loading",
            )
            assert refused(lambda: stub.Generate(generate("any")))[0] is Code.UNAVAILABLE
    finally:
        serving.on_loop(server.drain(0))


def test_a_failed_step_is_internal_and_the_session_goes_on(
    stub: Any, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = new_session(stub, PROMPT)

    def broken(*_: object) -> None:
        raise MemoryError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(CpuBackend, "run", broken)
        code, name, _ = refused(lambda: stub.Generate(generate(session_id)))
    assert (code, name) == (Code.INTERNAL, "StepFailed")
    assert len(list(stub.Generate(generate(session_id, 2)))) == 3


def test_a_handler_that_raises_tells_nothing(
    stub: Any, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session_id = new_session(stub, PROMPT)

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a secret")

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "info", broken)
        code, name, details = refused(
            lambda: stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session_id))
        )
    assert (code, name) == (Code.INTERNAL, "InternalError")
    assert details == "the server failed; its log says why"
    assert "a secret" in caplog.text
    assert stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session_id)).history_length == 3


def test_a_call_that_does_not_exist_is_unimplemented(server: Server) -> None:
    with serving.channel_to(server.address) as channel:
        call = channel.unary_unary("/kakeya.v1.RuntimeService/Frobnicate")
        assert refused(lambda: call(b""))[0] is Code.UNIMPLEMENTED


def test_bytes_that_are_no_message_hurt_nobody(server: Server, stub: Any) -> None:
    with serving.channel_to(server.address) as channel:
        call = channel.unary_unary("/kakeya.v1.RuntimeService/CreateSession")
        assert refused(lambda: call(b"\xff\xff\xff"))[0] is Code.UNKNOWN  # gRPC says so itself
    new_session(stub)


def test_unknown_fields_are_ignored(server: Server, runtime: Runtime) -> None:
    with serving.channel_to(server.address) as channel:
        call = channel.unary_unary(
            "/kakeya.v1.RuntimeService/CreateSession",
            response_deserializer=pb.CreateSessionResponse.FromString,
        )
        # Field 999, a varint.
        assert call(b"\xb8\x3e\x01").session_id


def test_the_table_knows_every_error_a_caller_can_cause() -> None:
    rows = {
        errors.SessionNotFound("x"): Code.NOT_FOUND,
        errors.PresetNotFound("x"): Code.NOT_FOUND,
        errors.RunNotFound("x"): Code.NOT_FOUND,
        errors.InvalidArgument("x"): Code.INVALID_ARGUMENT,
        errors.StateMismatch("x"): Code.INVALID_ARGUMENT,
        errors.SessionBusy("x"): Code.ABORTED,
        errors.HistoryMismatch("x"): Code.ABORTED,
        errors.InvariantViolation("INV-1", "x"): Code.FAILED_PRECONDITION,
        errors.ModelNotFound("x"): Code.INVALID_ARGUMENT,
        errors.Fenced("x"): Code.UNAVAILABLE,
        errors.ResourceExhausted("x"): Code.RESOURCE_EXHAUSTED,
        errors.Unauthenticated("x"): Code.UNAUTHENTICATED,
        errors.Unavailable("x"): Code.UNAVAILABLE,
        errors.StepFailed("x"): Code.INTERNAL,
    }
    assert {type(error): code for error, code in rows.items()} == STATUS_CODES
    assert all(status_code(error) is code for error, code in rows.items())
    assert status_code(ValueError("x")) is Code.INTERNAL
    assert status_details(ValueError("a secret")) == "the server failed; its log says why"


def test_callers_that_go_before_the_answer_leave_no_session(
    stub: Any, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A create whose caller gave up while it waited for the engine is undone."""
    hold, made, real = threading.Event(), threading.Event(), runtime.create_session

    def slow(**options: Any) -> str:
        hold.wait(5)
        session_id = real(**options)
        made.set()
        return session_id

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "create_session", slow)
        lost = stub.CreateSession.future(pb.CreateSessionRequest(), timeout=0.2)
        assert lost.code() is Code.DEADLINE_EXCEEDED
        hold.set()
        assert made.wait(5)
    for _ in range(100):
        if not runtime.list_sessions(owner="local")[0]:
            break
        threading.Event().wait(0.02)
    assert runtime.list_sessions(owner="local")[0] == []
