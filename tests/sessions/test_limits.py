"""Quotas: each owner's own, named when they refuse, given back when they should be."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kakeya.config import Quotas, RuntimeConfig
from kakeya.errors import InvalidArgument, ResourceExhausted
from kakeya.runtime import Runtime
from kakeya.sessions.limits import Limits
from support.tiny import PROMPT, answer, new_session

OpenTiny = Callable[..., Runtime]


class Clock:
    """Time that passes when told."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    return Clock()


def limited(**quotas: int) -> RuntimeConfig:
    return RuntimeConfig(None, Quotas(**quotas))


def test_sessions_are_counted_however_they_come(open_tiny: OpenTiny, tmp_path: Path) -> None:
    runtime = open_tiny(settings=limited(max_sessions=2))
    first, second = runtime.create_session(), runtime.create_session()
    runtime.export_session(first, tmp_path / "saved")
    for one_more in (
        runtime.create_session,
        lambda: runtime.fork(first),
        lambda: runtime.import_session(tmp_path / "saved"),
    ):
        with pytest.raises(ResourceExhausted, match="max_sessions quota of 2"):
            one_more()
    runtime.create_session(owner="other")
    runtime.close_session(second)
    copy, _ = runtime.fork(first)
    runtime.close_session(copy)
    runtime.import_session(tmp_path / "saved")
    with pytest.raises(ResourceExhausted):
        runtime.create_session()


def test_a_session_that_fails_to_open_is_not_counted(open_tiny: OpenTiny) -> None:
    runtime = open_tiny(settings=limited(max_sessions=1))
    for _ in range(3):
        with pytest.raises(InvalidArgument):
            runtime.create_session(pinned_prefix_tokens=10_000)
    runtime.create_session()


def test_generates_in_flight_are_counted_until_they_end(open_tiny: OpenTiny) -> None:
    runtime = open_tiny(settings=limited(max_concurrent_requests=1))
    first, second = new_session(runtime), new_session(runtime)
    stranger = new_session(runtime, owner="other")
    stream = runtime.generate(first, 1000)
    with pytest.raises(ResourceExhausted, match="max_concurrent_requests quota of 1"):
        runtime.generate(second, 1)
    assert len(answer(runtime, stranger, 2, owner="other")) == 3
    stream.cancel()
    list(stream)
    runtime.info(first)
    assert len(answer(runtime, second, 2)) == 3
    with pytest.raises(InvalidArgument):
        runtime.generate(second, 0)
    assert len(answer(runtime, second, 2)) == 3


def test_tokens_are_counted_as_they_are_appended_and_generated(open_tiny: OpenTiny) -> None:
    runtime = open_tiny(settings=limited(tokens_per_minute=20))
    session = new_session(runtime)
    with pytest.raises(InvalidArgument):
        runtime.append(session, [99999] * 15)
    with pytest.raises(ResourceExhausted, match="21 tokens at once are more than .* 20 ever has"):
        runtime.append(session, [3] * 21)
    assert len(answer(runtime, session, 20)) == 21
    with pytest.raises(ResourceExhausted, match=r"tokens_per_minute quota of 20 .* can be had in 1\d\.\d s"):
        runtime.append(session, [3])
    with pytest.raises(ResourceExhausted, match="tokens_per_minute"):
        runtime.generate(session, 1)
    assert runtime.info(session).history_length == len(PROMPT) + 20
    new_session(runtime, owner="other")


def test_a_repeated_request_costs_nothing(open_tiny: OpenTiny) -> None:
    runtime = open_tiny(settings=limited(tokens_per_minute=20))
    session = runtime.create_session()
    for _ in range(5):
        runtime.append(session, [3] * 15, request_id="a")
    assert runtime.append(session, [3] * 5) == 20


def test_tokens_grow_back_with_time(clock: Clock) -> None:
    limits = Limits(Quotas(tokens_per_minute=60), clock)
    with limits.appending("me", 60):
        pass
    with pytest.raises(ResourceExhausted), limits.appending("me", 1):
        pass
    clock.now += 10
    with limits.appending("me", 10):
        pass
    with (
        pytest.raises(ResourceExhausted, match="5 more can be had in 5.0 s") as refusal,
        limits.appending("me", 5),
    ):
        pass
    assert refusal.value.retry_after == pytest.approx(5.0)
    clock.now += 3600
    with limits.appending("me", 60):
        pass
    with pytest.raises(ResourceExhausted), limits.appending("me", 1):
        pass


def test_a_long_generate_leaves_a_debt(clock: Clock) -> None:
    limits = Limits(Quotas(tokens_per_minute=60), clock)
    limits.start_request("me")
    limits.end_request("me", 120)
    clock.now += 60
    with pytest.raises(ResourceExhausted, match="can be had in 1.0 s"):
        limits.start_request("me")
    clock.now += 1
    limits.start_request("me")


def test_without_quotas_nothing_is_refused(clock: Clock) -> None:
    limits = Limits(Quotas(), clock)
    for _ in range(100):
        with limits.new_session("me"), limits.appending("me", 10**9):
            limits.start_request("me")
    limits.end_request("me", 10**9)
    limits.start_request("me")
