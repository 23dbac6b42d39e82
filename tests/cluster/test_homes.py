"""What a front end does where no home is, or none that it could ask."""

import threading

import grpc
import httpx
import pytest

from kakeya.client import Client
from kakeya.cluster.calling import HomeCalls
from kakeya.cluster.homes import Homes
from kakeya.cluster.registry import Registry
from kakeya.dialing import Retry
from kakeya.errors import ModelNotFound, SessionNotFound, Unavailable
from kakeya.wire import cluster_pb2 as pb, runtime_pb2
from support.clustering import SECRET, FrontHere, Town, front_of
from support.http_serving import eventually
from support.serving import ENGINE, connected, free_port, on_loop


def test_where_no_home_answers() -> None:
    asked = []

    async def look_up() -> list[str]:
        asked.append(1)
        return [f"127.0.0.1:{free_port()}"]

    async def scenario() -> None:
        homes = Homes(SECRET, [f"127.0.0.1:{free_port()}"], look_up, hold_s=0.0)
        with pytest.raises(Unavailable, match=r"no home of the cluster answers at 127\.0\.0\.1"):
            await homes.open()
        for ask in (homes.require_any, lambda: homes.default_model, homes.any_home):
            with pytest.raises(Unavailable, match="the cluster"):
                ask()
        with pytest.raises(Unavailable, match="home 'a' of the cluster cannot be reached"):
            await homes.reach("a")
        assert await homes.locate("a.session", "a") == ""
        with pytest.raises(ModelNotFound, match="there is no model 'tiny' in this cluster"):
            homes.serving("tiny")
        await homes.end()

    on_loop(scenario())
    assert asked == [1], "the head is not asked again at once"


def test_a_front_end_that_shuts_down_takes_nothing_new(front: FrontHere) -> None:
    with Client(front.address, retry=Retry(attempts=1)) as client, httpx.Client(base_url=front.url) as http:
        session = client.create_session()
        on_loop(front.grpc.refuse())
        on_loop(front.http.refuse())
        for call in (client.server_info, client.create_session, session.info, client.list_sessions):
            with pytest.raises(Unavailable, match="this front end is shutting down"):
                call()
        assert http.get("/readyz").status_code == 503


def test_every_kind_of_call_tells_what_the_home_said(front: FrontHere) -> None:
    with Client(front.address, retry=Retry(attempts=1)) as client:
        unknown = client.session("b.unknown")
        for call in (unknown.info, unknown.export, unknown.fork, lambda: next(unknown.generate(1))):
            with pytest.raises(SessionNotFound, match=r"b\.unknown"):
                call()
        session = client.create_session(ignore_eos=True)
        session.append([3, 5, 7])
        twin = client.import_session(session.export())
        assert twin.info().history_length == 3
        assert client.tokenizer.vocab_size > 0


def test_a_stream_of_a_home_that_goes_away_breaks_off(front: FrontHere, town: Town) -> None:
    with Client(front.address, retry=Retry(attempts=1)) as client:
        session = client.create_session(ignore_eos=True)
        session.append([3, 5, 7])
        stream = session.generate(100_000)
        next(stream)
        town.homes.pop(session.session_id[0]).stop()
        with pytest.raises(Unavailable):
            list(stream)


def test_a_home_that_does_not_answer_may_have_a_session(
    front: FrontHere, town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that moved, and whose first home does not remember where to."""
    with Client(front.address, retry=Retry(attempts=4)) as client:
        session = client.create_session(ignore_eos=True)
        session.append([3, 5, 7])
        (maker, *_), others = session.session_id, {home.name: home for home in town.beat().homes}
        other = others[next(name for name in others if name != maker)]
        with HomeCalls(town.homes[maker].server.address, SECRET) as calls:
            calls.move(session.session_id, other)
        town.homes.pop(maker).stop()
        town.settle(maker)
        ask, mute = front.homes._asked, [other.name] * 2

        async def asked(name: str, session_id: str) -> pb.FindSessionResponse | None:
            if name in mute:
                mute.remove(name)
                return None
            return await ask(name, session_id)

        monkeypatch.setattr(front.homes, "_asked", asked)
        assert session.info().history_length == 3
        assert not mute
        session.close()
        mute += [other.name] * 10_000
        front.homes.hold_s = 0.2
        with pytest.raises(Unavailable, match=f"may be at '{other.name}', which does not answer"):
            client.session(f"{maker}.unknown").info()
        mute.clear()
        for name in (session.session_id, f"{maker}.unknown"):
            with pytest.raises(SessionNotFound):
                client.session(name).info()


def test_a_new_list_has_not_heard_of_every_home(front: FrontHere, town: Town) -> None:
    """After the death of the list: homes come back one after another, and no session is told to be gone."""
    with Client(front.address, retry=Retry(attempts=4)) as client:
        session = client.create_session(ignore_eos=True)
        session.append([3, 5, 7])
        name = session.session_id[0]
        town.homes.pop(name).stop()
        town.registry = Registry()
        front.homes.hold_s = 1.5
        with pytest.raises(Unavailable, match=f"home '{name}' of the cluster cannot be reached"):
            session.info()
        assert front.homes.homes[name].silent
        assert name not in {home.name for home in town.registry.view().homes}
        front.homes.hold_s = 30.0
        town.settle(name)
        assert session.info().history_length == 3
        assert not front.homes.homes[name].silent
        # One that was taken off this list is gone.
        town.homes.pop(name).stop()
        town.registry.remove(name)
        eventually(lambda: name not in front.homes.homes)
        with pytest.raises(SessionNotFound):
            session.info()


def created(front: FrontHere, model: str) -> str:
    """The id of a new session with a model."""
    with connected(front.address) as stub:
        answer = stub.CreateSession(runtime_pb2.CreateSessionRequest(), metadata=[("kakeya-model", model)])
        return str(answer.session_id)


def test_a_model_whose_homes_are_away_is_not_unknown(town: Town) -> None:
    """An outage is told as one, so that clients ask again; a home that comes back in time answers."""
    town.homes.pop("b").stop()
    town.settle("b", model="other")
    with front_of(town, hold_s=0.5) as front, httpx.Client(base_url=front.url, timeout=60.0) as http:
        assert created(front, "other").startswith("b.")
        town.homes.pop("b").stop()
        eventually(lambda: front.homes.homes["b"].silent)
        with pytest.raises(grpc.RpcError) as refused:
            created(front, "other")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        for path in ("/v1/responses", "/v1/chat/completions"):
            away = http.post(path, json={"model": "other", "input": "hello"})
            assert (away.status_code, "retry-after" in away.headers) == (503, True)
        with pytest.raises(grpc.RpcError) as unknown:
            created(front, "nonsense")
        assert unknown.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert created(front, "tiny").startswith("a.")
        front.homes.hold_s = 30.0
        back = threading.Timer(1.0, town.settle, ("b",), {"model": "other"})
        back.start()
        assert created(front, "other").startswith("b.")
        back.join()


def test_metadata_names_the_model_that_is_described(town: Town) -> None:
    town.homes.pop("b").stop()
    town.registry.remove("b")
    town.settle("wide", model="other", window=60)
    with front_of(town) as front, connected(front.address) as stub:
        for model, window in (("tiny", ENGINE.cache.window), ("other", 60)):
            named = [("kakeya-model", model)]
            info = stub.GetServerInfo(runtime_pb2.GetServerInfoRequest(), metadata=named)
            assert (info.model_id, info.window, info.capacity) == (model, window, 4)
            assert stub.GetTokenizer(runtime_pb2.GetTokenizerRequest(), metadata=named).tokenizer_json
        with pytest.raises(grpc.RpcError, match="there is no model 'nonsense'"):
            stub.GetTokenizer(runtime_pb2.GetTokenizerRequest(), metadata=[("kakeya-model", "nonsense")])
