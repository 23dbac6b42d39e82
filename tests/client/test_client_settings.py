"""Settings and the pauses between attempts, without a server."""

import asyncio

import pytest

from kakeya.client import Keepalive, Retry
from kakeya.client.connection import Attempts, Deadline
from kakeya.client.settings import channel_options
from kakeya.client.values import generate_result
from kakeya.errors import ConfigError, HistoryMismatch, InvalidArgument, RemoteError, SessionBusy, Unavailable
from kakeya.wire import runtime_pb2 as pb


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("kakeya.client.connection.asyncio.sleep", sleep)
    return slept


@pytest.mark.parametrize(
    "settings", [{"attempts": 0}, {"first_delay": 0.0}, {"first_delay": 2.0, "longest_delay": 1.0}]
)
def test_bad_retries_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="Retry"):
        Retry(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"interval": 0.0}, {"timeout": -1.0}])
def test_bad_keepalives_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="Keepalive"):
        Keepalive(**settings)


def test_keepalive_reaches_the_channel() -> None:
    options = dict(channel_options(Retry(), Keepalive(interval=7, timeout=2.5)))
    assert options["grpc.keepalive_time_ms"] == 7000
    assert options["grpc.keepalive_timeout_ms"] == 2500


def test_pauses_double_up_to_the_longest_and_differ(pauses: list[float]) -> None:
    async def fail(attempts: Attempts) -> None:
        for _ in range(5):
            await attempts.pause_or_raise(Unavailable("away"))
        with pytest.raises(Unavailable):
            await attempts.pause_or_raise(Unavailable("away"))

    for _ in range(20):
        asyncio.run(fail(Attempts(Retry(6, 1.0, 5.0), Deadline(None))))
    for turn, longest in enumerate([1, 2, 4, 5, 5]):
        drawn = pauses[turn::5]
        assert all(longest / 2 <= pause <= longest for pause in drawn)
        assert len(set(drawn)) > 1


def test_no_pause_reaches_past_the_deadline(pauses: list[float]) -> None:
    async def fail() -> None:
        attempts = Attempts(Retry(6, 1.0, 5.0), Deadline(0.4))
        with pytest.raises(Unavailable):
            await attempts.pause_or_raise(Unavailable("away"))

    asyncio.run(fail())
    assert pauses == []


def test_a_deadline_runs_down_to_zero() -> None:
    assert Deadline(None).left() is None
    assert Deadline(-5.0).left() == 0.0
    left = Deadline(100.0).left()
    assert left is not None
    assert 99.0 < left <= 100.0


def test_progress_renews_patience(pauses: list[float]) -> None:
    async def fail() -> None:
        attempts = Attempts(Retry(2, 1.0, 5.0), Deadline(None))
        for _ in range(4):
            await attempts.pause_or_raise(Unavailable("away"))
            attempts.progressed()

    asyncio.run(fail())
    assert len(pauses) == 4


@pytest.mark.parametrize(
    "error, passes, waits",
    [
        (SessionBusy("b"), True, True),
        (SessionBusy("b"), False, False),
        (HistoryMismatch("h"), True, False),
        (InvalidArgument("i"), True, False),
    ],
)
def test_only_a_conflict_that_passes_is_waited_for(
    pauses: list[float], error: Exception, passes: bool, waits: bool
) -> None:
    async def fail() -> bool:
        attempts = Attempts(Retry(), Deadline(None))
        try:
            await attempts.pause_or_raise(error, conflict_passes=passes)  # type: ignore[arg-type]
        except type(error):
            return False
        assert not attempts.after_a_break
        return True

    assert asyncio.run(fail()) is waits
    assert bool(pauses) is waits


def test_a_stop_reason_from_the_future_is_an_error() -> None:
    with pytest.raises(RemoteError, match="number 0"):
        generate_result(pb.Done(), 0)
