"""The plain client: the asynchronous one on a thread."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

import kakeya
from kakeya.client import StopReason
from kakeya.errors import SessionBusy, SessionNotFound
from support.serving import KEY

PROMPT = list(range(10, 30))
LONG = 20_000


@pytest.fixture
def client(server: str) -> Iterator[kakeya.Client]:
    with kakeya.Client(server, api_key=KEY) as client:
        yield client


def test_a_turn(client: kakeya.Client) -> None:
    with client.create_session(label="plain", ignore_eos=True) as session:
        assert session.append(PROMPT, expected_history_length=0) == len(PROMPT)
        stream = session.generate(max_tokens=7, temperature=0.5, seed=3)
        tokens = list(stream)
        assert len(tokens) == 7
        assert session.last_result is stream.result
        assert session.last_result is not None
        assert session.last_result.stop_reason is StopReason.MAX_TOKENS
        assert session.info().history_length == len(PROMPT) + 7
        with session.fork() as twin:
            assert twin.info().history_length == len(PROMPT) + 7
        attached = client.session(session.session_id)
        assert attached.append([]) == len(PROMPT) + 7
        assert [info.client_label for info in client.list_sessions()] == ["plain"]
    with pytest.raises(SessionNotFound):
        session.info()


def test_the_server_and_its_tokenizer(client: kakeya.Client) -> None:
    assert client.server_info().capacity == 6
    assert client.tokenizer.decode(client.tokenizer.encode("naïve")) == "naïve"
    assert client.tokenizer is client.tokenizer


def test_a_chat(client: kakeya.Client) -> None:
    with client.create_session(system="hello") as session:
        pieces = list(session.chat("the quick brown fox", max_tokens=20))
        assert "".join(pieces)
        assert all(pieces)
        assert session.close() is not None


def test_leaving_early_lets_the_next_call_in(client: kakeya.Client) -> None:
    with client.create_session(ignore_eos=True) as session:
        session.append(PROMPT)
        for _token in session.generate(LONG):
            break
        assert session.append([3]) < LONG
        with session.generate(LONG) as stream:
            next(stream)
        assert session.append([3]) < LONG


def test_a_stream_that_is_still_read_keeps_the_session_busy(client: kakeya.Client) -> None:
    with client.create_session(ignore_eos=True) as session:
        session.append(PROMPT)
        stream = session.generate(LONG)
        next(stream)
        with pytest.raises(SessionBusy):
            session.append([3])
        stream.close()
        assert session.append([3]) < LONG


def test_cancel_from_another_thread(client: kakeya.Client) -> None:
    with client.create_session(ignore_eos=True) as session:
        session.append(PROMPT)
        stream = session.generate(LONG)
        next(stream)
        threading.Timer(0.1, stream.cancel).start()
        said = 1 + sum(1 for _ in stream)
        assert stream.result is not None
        assert stream.result.stop_reason is StopReason.CANCELLED
        assert session.info().history_length == len(PROMPT) + said


def test_an_interrupt_leaves_the_session_usable(
    client: kakeya.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.create_session(ignore_eos=True) as session:
        session.append(PROMPT)
        stream = session.generate(LONG)
        next(stream)
        # Ctrl-C reaches a plain client while it waits for the outcome of a call.
        with monkeypatch.context() as patch:
            patch.setattr("concurrent.futures.Future.result", _interrupted_here)
            with pytest.raises(KeyboardInterrupt):
                next(stream)
        stream.close()
        assert session.append([3]) < LONG


_wait_for = Future.result


def _interrupted_here(self: "Future[object]", timeout: float | None = None) -> object:
    """Homes of a cluster are threads of this process, and wait for outcomes, too. Ctrl-C is not for them."""
    if threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt
    return _wait_for(self, timeout)


def test_threads_share_a_client(client: kakeya.Client) -> None:
    def talk(seed: int) -> list[int]:
        with client.create_session(ignore_eos=True) as session:
            session.append(PROMPT)
            return [token.id for token in session.generate(20, temperature=1.2, seed=seed)]

    alone = [talk(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(talk, range(4))) == alone


def test_a_closed_client_says_so(server: str) -> None:
    client = kakeya.Client(server, api_key=KEY)
    session = client.create_session()
    client.close()
    for call in (client.server_info, client.create_session, session.info):
        with pytest.raises(RuntimeError, match="this client is closed"):
            call()
    with kakeya.Client(server, api_key=KEY) as again:
        again.session(session.session_id).close()
