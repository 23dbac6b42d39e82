"""What a runtime keeps count of when its engine dies, and who else may find the device broken."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kakeya import loading
from kakeya.config import Quotas, RuntimeConfig
from kakeya.errors import Unavailable
from kakeya.metrics import Metrics
from kakeya.runtime import LOCAL_OWNER, Runtime
from kakeya.sessions import transfer
from kakeya.types import TokenEvent
from support import tiny
from support.engines import FAULT, REASON, device_of, fault, open_breakable
from support.tiny import new_session

OpenTiny = Callable[..., Runtime]


@pytest.fixture(autouse=True)
def breakable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "open_backend", open_breakable)


def test_quotas_and_gauges_of_what_ran_are_wound_back(open_tiny: OpenTiny) -> None:
    metrics = Metrics()
    settings = RuntimeConfig(None, Quotas(max_concurrent_requests=3))
    # One step holds no more than one prompt, so that some wait when the others have begun.
    config = tiny.engine_config(threads=1, max_batch_tokens=8)
    runtime = open_tiny(config, settings=settings, metrics=metrics)
    sessions = [new_session(runtime, [3] * 8) for _ in range(3)]
    streams = [runtime.generate(session, 100_000, request_id=session) for session in sessions]
    assert isinstance(streams[0].next_event(20), TokenEvent)
    device_of(runtime).breaks_at = "result"
    for stream in streams:
        with pytest.raises(Unavailable, match=FAULT):
            list(stream)
    assert runtime.ended.result(20) == REASON
    assert runtime.drain(20)
    usage = runtime._limits._owners[LOCAL_OWNER]
    assert usage.requests == 0
    value = metrics.registry.get_sample_value
    assert (value("kakeya_requests_running"), value("kakeya_requests_waiting")) == (0, 0)
    assert value("kakeya_request_duration_seconds_count") == 3
    assert value("kakeya_sessions", {"state": "generating"}) == 0
    for call in (lambda: runtime.generate(sessions[0], 1), runtime.create_session, runtime.check_alive):
        with pytest.raises(Unavailable, match=FAULT):
            call()
    assert usage.requests == 0
    assert (usage.sessions, value("kakeya_admission_total", {"result": "unavailable"})) == (3, 1)


@pytest.mark.parametrize("move", ["on_host", "on_device"])
def test_a_copy_that_loses_the_device_ends_the_engine(
    open_tiny: OpenTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: str
) -> None:
    """Copies between device and host are made by the callers' threads."""
    runtime = open_tiny()
    session, saved = new_session(runtime), tmp_path / "saved"
    runtime.export_session(session, saved)

    def broken(*_: object) -> object:
        device_of(runtime).broken = True
        raise fault()

    monkeypatch.setattr(transfer, move, broken)
    with pytest.raises(Unavailable, match=FAULT):
        if move == "on_host":
            runtime.export_session(session, saved)
        else:
            runtime.import_session(saved)
    assert runtime.ended.result(20) == REASON


def test_a_runtime_that_lives_or_was_closed_is_not_dead(open_tiny: OpenTiny) -> None:
    runtime = open_tiny()
    runtime.check_alive()
    runtime.close()
    runtime.check_alive()
