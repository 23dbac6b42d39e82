"""Listing sessions in pages, labels, and closing."""

from collections.abc import Callable

import pytest

from kakeya.errors import InvalidArgument, InvariantViolation, SessionNotFound
from kakeya.runtime import Runtime
from kakeya.sessions.paging import page_token
from support import tiny
from support.runtimes import PROMPT, answer, new_session, sequence_of

OpenTiny = Callable[..., Runtime]


@pytest.fixture
def runtime(open_tiny: OpenTiny) -> Runtime:
    return open_tiny(tiny.engine_config(threads=1, capacity=12))


def pages(runtime: Runtime, size: int) -> list[list[str]]:
    found, token = [], ""
    while True:
        infos, token = runtime.list_sessions(page_size=size, page_token=token)
        found.append([info.session_id for info in infos])
        if not token:
            return found


def test_pages_hold_every_session_once_oldest_first(runtime: Runtime) -> None:
    mine = [runtime.create_session(client_label=str(number)) for number in range(5)]
    stranger = runtime.create_session(owner="other")
    assert pages(runtime, 2) == [mine[:2], mine[2:4], mine[4:]]
    assert pages(runtime, 5) == [mine]
    assert pages(runtime, 1000) == [mine]
    assert [info.session_id for info in runtime.list_sessions(owner="other")[0]] == [stranger]
    assert runtime.list_sessions(owner="nobody") == ([], "")


def test_a_page_tells_what_info_tells(runtime: Runtime) -> None:
    session = new_session(runtime, client_label="a label")
    answer(runtime, session, 2)
    (listed,), _ = runtime.list_sessions()
    alone = runtime.info(session)
    assert (listed.client_label, listed.state, listed.history_length) == ("a label", "idle", len(PROMPT) + 2)
    assert listed.kv_live_bytes == alone.kv_live_bytes > 0


def test_sessions_may_come_and_go_between_pages(runtime: Runtime) -> None:
    mine = [runtime.create_session() for _ in range(6)]
    first, token = runtime.list_sessions(page_size=3)
    for gone in (mine[0], mine[2], mine[3]):
        runtime.close_session(gone)
    late = runtime.create_session()
    second, token = runtime.list_sessions(page_size=3, page_token=token)
    assert [info.session_id for info in first] == mine[:3]
    assert [info.session_id for info in second] == [mine[4], mine[5], late]
    assert token == ""


def test_a_session_closed_while_it_is_looked_at_is_left_out(runtime: Runtime) -> None:
    stays, goes = runtime.create_session(), runtime.create_session()
    runtime._engine.close(sequence_of(runtime, goes))
    assert [info.session_id for info in runtime.list_sessions()[0]] == [stays]
    with pytest.raises(SessionNotFound):
        runtime.info(goes)


@pytest.mark.parametrize("token", ["x", "YWZ0ZXI6", "****", "é", "MTc=", page_token(3)[:-1]])
def test_a_made_up_page_token_is_refused(runtime: Runtime, token: str) -> None:
    with pytest.raises(InvalidArgument, match="page_token"):
        runtime.list_sessions(page_token=token)


@pytest.mark.parametrize("size", [0, -1, 1001, 2.0, True])
def test_a_page_size_out_of_range_is_refused(runtime: Runtime, size: int) -> None:
    with pytest.raises(InvalidArgument, match="page_size must be a whole number from 1 to 1000"):
        runtime.list_sessions(page_size=size)


def test_a_label_has_a_limit(runtime: Runtime) -> None:
    runtime.create_session(client_label="é" * 256)
    with pytest.raises(InvalidArgument, match="client_label must have at most 256 characters, got 257"):
        runtime.create_session(client_label="x" * 257)
    assert len(runtime.list_sessions()[0]) == 1


def test_a_session_is_closed_once(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    session = runtime.create_session()
    found = runtime._store.get(session, "local")
    runtime.close_session(session)
    with pytest.raises(SessionNotFound):
        runtime.close_session(session)
    # Two that close at once both find the session; one of them is too late.
    monkeypatch.setattr(runtime._store, "get", lambda *_: found)
    with pytest.raises(SessionNotFound):
        runtime.close_session(session)


def test_a_failed_session_says_so_until_it_is_closed(runtime: Runtime) -> None:
    session = new_session(runtime)
    answer(runtime, session, 2)
    sequence_of(runtime, session).slab.committed = 99
    with pytest.raises(InvariantViolation):
        runtime.append(session, [3])
    info = runtime.info(session)
    assert (info.state, info.kv_live_bytes, info.cache_invariant_inv2_violations) == ("failed", 0, 1)
    runtime.close_session(session)
    assert runtime.list_sessions() == ([], "")


def test_draining_lets_what_runs_finish(runtime: Runtime) -> None:
    session = new_session(runtime)
    stream = runtime.generate(session, 10_000)
    assert not runtime.drain(0.05)
    stream.cancel()
    assert runtime.drain(10)
