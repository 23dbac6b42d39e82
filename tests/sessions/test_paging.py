"""Listing sessions in pages."""

from collections.abc import Callable

import pytest

from kakeya.errors import InvalidArgument, SessionNotFound
from kakeya.runtime import Runtime
from kakeya.sessions.paging import page_token
from support import tiny
from support.tiny import PROMPT, answer, new_session, sequence_of

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
