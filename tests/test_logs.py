"""Logs: one line an event, ids on it, nothing of what was said."""

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kakeya import logs
from kakeya.errors import StepFailed
from kakeya.runtime import Runtime
from support.tiny import answer, new_session

OpenTiny = Callable[..., Runtime]


@pytest.fixture
def lines() -> Iterator[Callable[..., Callable[[], list[str]]]]:
    """Configures logging into a buffer; what was written so far."""
    logger = logging.getLogger("kakeya")
    before = logger.handlers[:], logger.level, logger.propagate

    def configure(level: str = "debug", log_format: str = "json") -> Callable[[], list[str]]:
        buffer = io.StringIO()
        logs.configure(logs.LogLevel(level), logs.LogFormat(log_format), buffer)
        return lambda: buffer.getvalue().splitlines()

    yield configure
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)


Configure = Callable[..., Callable[[], list[str]]]


def test_a_session_can_be_followed_through_its_lines(open_tiny: OpenTiny, lines: Configure) -> None:
    written = lines()
    runtime = open_tiny()
    session = runtime.create_session(eos_token_ids=(), client_label="mine", request_id="r0")
    runtime.append(session, [5, 9, 22])
    answer(runtime, session, 3, request_id="r1")
    copy, _ = runtime.fork(session)
    runtime.close_session(session)
    entries = [json.loads(line) for line in written()]
    told = [(entry["message"], entry.get("session_id"), entry.get("request_id")) for entry in entries]
    assert told == [
        ("session created", session, "r0"),
        ("generate ended", session, "r1"),
        ("session forked", copy, None),
        ("session closed", session, None),
    ]
    assert entries[0]["client_label"] == "mine"
    ended = entries[1]
    assert (ended["stop_reason"], ended["tokens"], ended["cached_tokens"]) == ("MAX_TOKENS", 3, 0)
    assert 0 < ended["prefill_s"] <= ended["total_s"]
    assert (ended["level"], ended["logger"]) == ("info", "kakeya.sessions.generating")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", ended["time"])
    assert entries[3]["history_length"] == 6


def test_private_marks_of_other_packages_are_left_out(
    lines: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray, once imported, puts a time stamp on every record of the process."""

    def marked(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = logging.LogRecord(*arguments, **named)
        record.__dict__["_ray_timestamp_ns"] = 1
        return record

    monkeypatch.setattr(logging, "_logRecordFactory", marked)
    written = lines(log_format="text")
    logging.getLogger("kakeya").info("it began", extra={"tokens": 3})
    assert [line.split(" ", 1)[1] for line in written()] == ["INFO kakeya: it began tokens=3"]


def test_no_token_is_ever_written(open_tiny: OpenTiny, lines: Configure) -> None:
    written = lines()
    runtime = open_tiny()
    session = new_session(runtime, [5, 9, 22, 13, 7])
    answer(runtime, session, 8, request_id="r")
    runtime.close_session(session)
    allowed = {
        *("time", "level", "logger", "message", "session_id", "request_id", "client_label"),
        *("stop_reason", "tokens", "cached_tokens", "prefill_s", "total_s", "history_length"),
    }
    entries = [json.loads(line) for line in written()]
    assert len(entries) == 3
    for entry in entries:
        assert entry.keys() <= allowed
        assert not any(isinstance(value, (list, dict)) for value in entry.values())


def test_a_failure_is_written_with_its_ids_and_its_trace(
    open_tiny: OpenTiny, lines: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = lines("warning")
    runtime = open_tiny()
    session = new_session(runtime)

    def break_down(*args: object) -> None:
        raise RuntimeError("no power")

    monkeypatch.setattr(runtime._engine._backend, "run", break_down)
    with pytest.raises(StepFailed):
        answer(runtime, session, 3, request_id="r")
    runtime.info(session)
    engine, failed = (json.loads(line) for line in written())
    assert "RuntimeError: no power" in engine["exception"]
    assert (failed["message"], failed["session_id"], failed["request_id"], failed["error"]) == (
        "generate failed",
        session,
        "r",
        "StepFailed",
    )


def test_text_is_one_line_too_whatever_a_client_puts_in(lines: Configure) -> None:
    written = lines(log_format="text")
    log = logging.getLogger("kakeya.sessions")
    log.info("session %s", "created", extra={"session_id": "abc", "request_id": "", "tokens": 3})
    log.info("a\nb", extra={"client_label": 'x\n2026 "forged" line', "plain": "a=b"})
    first, second = written()
    assert re.fullmatch(r"\S+Z INFO kakeya\.sessions: session created session_id=abc tokens=3", first)
    assert second.endswith(r'a\nb client_label="x\n2026 \"forged\" line" plain="a=b"')


def test_text_shows_a_trace(lines: Configure) -> None:
    written = lines(log_format="text")
    try:
        raise ValueError("oh")
    except ValueError:
        logging.getLogger("kakeya").exception("it broke")
    assert written()[0].endswith("ERROR kakeya: it broke")
    assert written()[-1] == "ValueError: oh"


def test_the_level_decides(lines: Configure) -> None:
    written = lines("error")
    log = logging.getLogger("kakeya.engine")
    log.warning("quiet")
    log.error("loud")
    assert [json.loads(line)["message"] for line in written()] == ["loud"]
