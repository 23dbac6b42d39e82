"""The thread that plain clients share."""

import gc
import threading

import kakeya
from kakeya.client.loop_thread import LoopThread
from support.serving import KEY

PROMPT = list(range(10, 30))
LONG = 20_000


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kakeya-client"]


def test_clients_share_one_thread_and_the_last_ends_it(server: str) -> None:
    assert client_threads() == []
    clients = [kakeya.Client(server, api_key=KEY) for _ in range(5)]
    assert [one.server_info().capacity for one in clients] == [6] * 5
    assert len(client_threads()) == 1
    for one in clients:
        one.close()
        one.close()
    assert client_threads() == []


def test_nothing_is_left_behind_by_a_dropped_stream(server: str) -> None:
    with kakeya.Client(server, api_key=KEY) as client:
        session = client.create_session(ignore_eos=True)
        session.append(PROMPT)
        next(session.generate(LONG))
        assert session.close() is not None
    gc.collect()
    assert client_threads() == []
    assert LoopThread._shared is None
