"""Request ids: a repeated call gets the first answer, and nothing is done twice."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from kakeya.config import RuntimeConfig
from kakeya.engine.request import State
from kakeya.errors import InvalidArgument, ResourceExhausted, SessionBusy, StepFailed
from kakeya.runtime import Runtime
from kakeya.sessions.answers import Answers, Call
from kakeya.types import DoneEvent, SamplingParams, StopReason, TokenEvent, TruncatedEvent
from support.tiny import PROMPT, answer, new_session, sequence_of

OpenTiny = Callable[..., Runtime]


def remembering(requests: int = 100, events: int = 1000) -> RuntimeConfig:
    return RuntimeConfig(None, remembered_requests=requests, remembered_events=events)


@contextmanager
def engine_held(runtime: Runtime) -> Iterator[None]:
    """The engine thread does nothing meanwhile."""
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert let_go.wait(10)

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(runtime._engine._inbox.ask, hold)
        assert held.wait(10)
        try:
            yield
        finally:
            let_go.set()
            holding.result(10)


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it never came true")


def test_repeated_calls_get_the_first_answer(open_tiny: OpenTiny) -> None:
    runtime = open_tiny()
    session = runtime.create_session(eos_token_ids=(), request_id="a")
    assert runtime.create_session(request_id="a") == session
    assert runtime.create_session(request_id="b") != session
    assert runtime.append(session, PROMPT, 0, request_id="a") == 5
    assert runtime.append(session, PROMPT, 0, request_id="a") == 5
    assert runtime.info(session).history_length == 5
    copy, length = runtime.fork(session, request_id="a")
    assert length == 5
    runtime.append(copy, PROMPT)
    assert runtime.fork(session, request_id="a") == (copy, 5)
    assert len(runtime.list_sessions()[0]) == 3


def test_an_id_belongs_to_one_call_one_session_and_one_owner(open_tiny: OpenTiny) -> None:
    runtime = open_tiny()
    first, second = runtime.create_session(), runtime.create_session()
    other = runtime.create_session(owner="other", request_id="a")
    assert runtime.create_session(request_id="a") != other
    runtime.append(first, PROMPT, request_id="a")
    assert runtime.append(second, [3], request_id="a") == 1
    assert runtime.append(first, PROMPT) == runtime.append(first, []) == 10


def test_a_refused_call_can_be_made_again(open_tiny: OpenTiny) -> None:
    runtime = open_tiny()
    session = runtime.create_session()
    with pytest.raises(InvalidArgument):
        runtime.append(session, [99999], request_id="a")
    assert runtime.append(session, [3], request_id="a") == 1


def test_an_id_may_not_be_endless(open_tiny: OpenTiny) -> None:
    runtime = open_tiny()
    runtime.create_session(request_id="x" * 128)
    with pytest.raises(InvalidArgument, match="request_id must have at most 128 characters, got 129"):
        runtime.create_session(request_id="x" * 129)


def test_a_finished_generate_is_told_again(open_tiny: OpenTiny) -> None:
    runtime = open_tiny()
    session = new_session(runtime, list(range(2, 16)))
    sampling = SamplingParams(temperature=1.0, seed=3, top_logprobs=2, logprobs=True)
    first = answer(runtime, session, 6, sampling=sampling, request_id="a")
    again = runtime.generate(session, 6, sampling, request_id="a")
    again.cancel()
    assert list(again) == first
    assert isinstance(first[0], TruncatedEvent)
    assert [type(event) for event in first[1:]] == [TokenEvent] * 6 + [DoneEvent]
    assert runtime.info(session).history_length == 14 + 6
    assert answer(runtime, session, 6, sampling=sampling, request_id="b") != first
    assert answer(runtime, session, 6, request_id="a") == first


def test_a_cancelled_generate_tells_what_was_taken(open_tiny: OpenTiny) -> None:
    runtime = open_tiny()
    session = new_session(runtime)
    stream = runtime.generate(session, 1000, request_id="a")
    taken = [stream.next_event(10) for _ in range(3)]
    wait_until(lambda: stream.unread > 0)
    stream.cancel()
    *tokens, done = answer(runtime, session, 1000, request_id="a")
    assert tokens == taken
    assert isinstance(done, DoneEvent)
    assert (done.stop_reason, done.generated_token_count) == (StopReason.CANCELLED, 3)
    assert runtime.info(session).history_length == len(PROMPT) + 3


def test_a_generate_cancelled_before_its_tail_is_read_forgets_the_tail(open_tiny: OpenTiny) -> None:
    runtime = open_tiny()
    session = new_session(runtime)
    stream = runtime.generate(session, 3, request_id="a")
    first = stream.next_event(10)
    wait_until(lambda: sequence_of(runtime, session).request.state is State.FINISHED)
    with pytest.raises(SessionBusy, match="still generating"):
        runtime.generate(session, 3, request_id="a")
    stream.cancel()
    again = answer(runtime, session, 3, request_id="a")
    assert again[:-1] == [first]
    assert again[-1].stop_reason is StopReason.CANCELLED


def test_a_cancel_that_comes_after_the_end_changes_nothing(open_tiny: OpenTiny) -> None:
    runtime = open_tiny()
    session = new_session(runtime)
    stream = runtime.generate(session, 3, request_id="a")
    first = list(stream)
    stream.cancel()
    assert answer(runtime, session, 3, request_id="a") == first
    assert first[-1].stop_reason is StopReason.MAX_TOKENS


def test_a_failed_generate_fails_again_without_running(
    open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = open_tiny()
    session = new_session(runtime)

    def break_down(*args: object) -> None:
        raise RuntimeError("no power")

    with monkeypatch.context() as patch:
        patch.setattr(runtime._engine._backend, "run", break_down)
        with pytest.raises(StepFailed, match="no power"):
            answer(runtime, session, 3, request_id="a")
    with pytest.raises(StepFailed, match="no power"):
        answer(runtime, session, 3, request_id="a")
    assert len(answer(runtime, session, 3, request_id="b")) == 4


def test_a_repeat_waits_for_the_call_in_flight(open_tiny: OpenTiny) -> None:
    runtime = open_tiny()
    session = runtime.create_session()
    with ThreadPoolExecutor(8) as pool:
        with engine_held(runtime):
            calls = [pool.submit(runtime.append, session, PROMPT, request_id="a") for _ in range(8)]
            assert not any(call.done() for call in calls)
        assert {call.result(10) for call in calls} == {len(PROMPT)}
    assert runtime.info(session).history_length == len(PROMPT)


def test_a_repeat_in_flight_shares_the_refusal() -> None:
    answers, started, go_on = Answers(10, 10), threading.Event(), threading.Event()

    def refuse() -> int:
        started.set()
        assert go_on.wait(10)
        raise ResourceExhausted("no")

    call = Call("append", "s", "a")
    with ThreadPoolExecutor(2) as pool:
        first: Future[int] = pool.submit(answers.once, "me", call, refuse)
        assert started.wait(10)
        second = pool.submit(answers.once, "me", call, lambda: 5)
        assert not second.done()
        go_on.set()
        for refused in (first, second):
            with pytest.raises(ResourceExhausted):
                refused.result(10)
    assert answers.once("me", call, lambda: 5) == 5


def test_only_so_many_answers_are_kept_for_each_owner(open_tiny: OpenTiny) -> None:
    runtime = open_tiny(settings=remembering(requests=3))
    session = runtime.create_session()
    stranger = runtime.create_session(owner="other")
    for request_id in "abcd":
        runtime.append(session, [3], request_id=request_id)
    for request_id in "efgh":
        runtime.append(stranger, [3], owner="other", request_id=request_id)
    assert runtime.append(session, [3], request_id="b") == 2
    assert runtime.append(session, [3], request_id="a") == 5
    assert [len(kept) for kept in runtime._answers._owners.values()] == [3, 3]


def test_only_so_many_events_are_kept_for_each_owner(open_tiny: OpenTiny) -> None:
    runtime = open_tiny(settings=remembering(events=10))
    session = new_session(runtime)
    first = answer(runtime, session, 6, request_id="a")
    second = answer(runtime, session, 6, request_id="b")
    assert answer(runtime, session, 6, request_id="a") == first
    runtime.append(session, [], request_id="c")
    assert answer(runtime, session, 6, request_id="b") == second
    assert answer(runtime, session, 6, request_id="a") != first


def test_a_generate_too_long_to_keep_is_not_run_again(open_tiny: OpenTiny) -> None:
    runtime = open_tiny(settings=remembering(events=10))
    session = new_session(runtime)
    assert len(answer(runtime, session, 12, request_id="a")) == 13
    with pytest.raises(ResourceExhausted, match="more than 10 events"):
        runtime.generate(session, 12, request_id="a")
    assert runtime.info(session).history_length == len(PROMPT) + 12


def test_listed_candidates_count_too(open_tiny: OpenTiny) -> None:
    runtime = open_tiny(settings=remembering(events=10))
    session = new_session(runtime)
    sampling = SamplingParams(logprobs=True, top_logprobs=4)
    answer(runtime, session, 2, sampling=sampling, request_id="a")
    with pytest.raises(ResourceExhausted, match="more than 10 events"):
        runtime.generate(session, 2, sampling, request_id="a")


def test_what_is_in_flight_is_never_forgotten(open_tiny: OpenTiny) -> None:
    runtime = open_tiny(settings=remembering(requests=1))
    session, other = new_session(runtime), runtime.create_session()
    stream = runtime.generate(session, 1000, request_id="a")
    for request_id in "bcd":
        runtime.append(other, [3], request_id=request_id)
    with pytest.raises(SessionBusy, match="first call with this request_id"):
        runtime.generate(session, 1000, request_id="a")
    stream.cancel()


def test_a_call_in_flight_outlives_a_crowd_of_others() -> None:
    answers, started, go_on = Answers(2, 10), threading.Event(), threading.Event()

    def slow() -> str:
        started.set()
        assert go_on.wait(10)
        return "slow"

    call = Call("append", "s", "slow")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(answers.once, "me", call, slow)
        assert started.wait(10)
        for number in range(5):
            answers.once("me", Call("append", "s", str(number)), lambda: "quick")
        go_on.set()
        assert first.result(10) == "slow"
    assert answers.once("me", call, lambda: "anew") == "slow"
    assert answers.once("me", Call("append", "s", "0"), lambda: "anew") == "anew"
