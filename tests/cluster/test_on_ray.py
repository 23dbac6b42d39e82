"""A real Ray: homes as actors on two nodes, one of which is drained. Needs the extra `cluster`."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kakeya.client import AsyncClient
from kakeya.cluster.lookup import look_up
from kakeya.cluster.members import make_secret
from kakeya.dialing import Retry
from kakeya.errors import ConfigError, Unavailable
from kakeya.wire import cluster_pb2 as pb
from support.clustering import FrontHere, alone, front_at, ray_of_two_nodes
from support.serving import free_port

if TYPE_CHECKING:
    from kakeya.cluster.on_ray import RayCluster

ray = pytest.importorskip("ray", reason="the extra `cluster` is not installed: pip install 'kakeya[cluster]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PATIENT = Retry(attempts=4000, first_delay=0.05, longest_delay=0.2)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ray_of_two_nodes() as address:
        yield address


@pytest.fixture
def secret(tmp_path: Path) -> str:
    return make_secret(tmp_path / "secret")


@pytest.fixture
def cluster(address: str, tmp_path: Path, secret: str) -> Iterator["RayCluster"]:
    """A cluster without homes."""
    from kakeya.cluster.on_ray import connected
    from kakeya.cluster.ray_actors import Group

    with connected(address) as cluster:
        assert cluster.up(Group("none", 0, ("--shared", str(tmp_path))), secret) == []
        yield cluster
        # Who is listed and has no actor is only made up.
        for home in cluster.view().homes:
            cluster._ask("remove", home.name)
        cluster.down()


def test_homes_on_ray_die_are_drained_and_come_back(address: str, model: Path, tmp_path: Path) -> None:
    from kakeya.cluster.on_ray import RayCluster, connected
    from kakeya.cluster.ray_actors import Group

    secret = make_secret(tmp_path / "secret")
    arguments = (
        "--shared", str(tmp_path), "--model", str(model), "--capacity", "4", "--sink", "2", "--window", "30",
        "--numerics", "exact", "--dtype", "float32", "--weights", "float32", "--threads", "1",
        "--log-level", "warning",
    )  # fmt: skip
    group = Group("h", 2, arguments, host="127.0.0.1", proposers=1)

    async def talk(cluster: RayCluster, front: FrontHere) -> None:
        async with AsyncClient(front.address, retry=PATIENT, timeout=500.0) as client:
            assert (await client.server_info()).proposer.startswith("remote")
            sessions = [await client.create_session(ignore_eos=True) for _ in range(4)]
            for number, session in enumerate(sessions):
                await session.append([3, 5, 7 + number])
            said = [[token.id async for token in session.generate(20)] for session in sessions]
            pid = await asyncio.to_thread(cluster.process_of, "h-1")
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert [(await session.info()).history_length for session in sessions] == [23] * 4
            homes = {home.name: home for home in cluster.view().homes}
            assert homes["h-1"].epoch == 2
            drained, relocated = await asyncio.to_thread(cluster.drain, homes["h-1"].node)
            assert (drained.sessions, relocated) == (2, [])
            assert [home.name for home in cluster.view().homes] == ["h-2"]
            for tokens, session in zip(said, sessions, strict=True):
                tokens += [token.id async for token in session.generate(20)]
            assert said == [alone(model, [3, 5, 7 + number], (40, 0), temperature=0.0) for number in range(4)]
            assert [(await session.info()).history_length for session in sessions] == [43] * 4

    with connected(address) as cluster:
        with pytest.raises(Unavailable, match="kakeya cluster up"):
            cluster.view()
        homes = cluster.up(group, secret)
        assert sorted(home.name for home in homes) == ["h-1", "h-2"]
        assert len({home.node for home in homes}) == 2
        found = look_up(address)
        assert (found.secret, sorted(found.addresses)) == (secret, sorted(home.address for home in homes))

        async def ask() -> list[str]:
            return (await asyncio.to_thread(look_up, address)).addresses

        with front_at(secret, found.addresses, ask, hold_s=300.0) as front:
            asyncio.run(talk(cluster, front))
        with pytest.raises(ConfigError, match="there is no home on a node 'nowhere'"):
            cluster.drain("nowhere")
        assert cluster.down() == 1
        # All is stored: what was drained is not needed, and what was not comes back.
        again = {home.name: home for home in cluster.up(group, secret)}
        assert again["h-2"].sessions == 4
        assert cluster.down() == 2


def eventually(found: Callable[[], Any], seconds: float = 120.0) -> Any:
    """What it gives, once that is something."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value


def registry() -> Any:
    return ray.get_actor("registry", "kakeya")


def report(home: pb.Home) -> pb.View:
    return pb.View.FromString(ray.get(registry().report.remote(home.SerializeToString())))


def named(cluster: "RayCluster") -> list[str]:
    return [home.name for home in cluster.view().homes]


def test_where_no_ray_is() -> None:
    from kakeya.cluster.on_ray import connected

    for nobody in ("nowhere", f"127.0.0.1:{free_port()}"):
        with pytest.raises(Unavailable, match=f"no Ray head answers at {nobody}"), connected(nobody):
            pass


def test_the_list_has_homes_and_proposers() -> None:
    from kakeya.cluster.ray_actors import RegistryActor

    listed = RegistryActor("a-secret")
    assert listed.secret() == "a-secret"
    told = listed.report(pb.Home(name="h-1", epoch=2).SerializeToString())
    assert [home.name for home in pb.View.FromString(told).homes] == ["h-1"]
    for draining in (True, False):
        listed.drain("h-1", draining)
        assert [home.draining for home in pb.View.FromString(listed.view()).homes] == [draining]
    listed.propose("h", "here:1")
    for group, found in (("h", ["here:1"]), ("other", []), ("", [])):
        told = listed.report(pb.Home(name="h-1", epoch=2).SerializeToString(), group)
        assert list(pb.View.FromString(told).proposers) == found
    assert (listed.proposers("h"), listed.proposers("other")) == (["here:1"], [])
    listed.remove("h-1")
    assert not pb.View.FromString(listed.view()).homes


def test_a_home_and_its_proposer_outlive_the_list(
    cluster: "RayCluster",
    model: Path,
    tmp_path: Path,
    secret: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The actors are in this process, and what they keep are processes of their own."""
    from kakeya.cluster.ray_actors import Group, HomeActor, ProposerActor, this_node

    monkeypatch.setenv("KAKEYA_PROPOSER_API_KEY", "")  # which a home's actor sets
    size = ("--capacity", "2", "--window", "30", "--dtype", "float32", "--threads", "1")
    arguments = ("--shared", str(tmp_path), "--model", str(model), *size)
    group = Group("a", 1, arguments, host="127.0.0.1", proposers=1)
    proposer = ProposerActor(group, secret)
    try:
        home = HomeActor("a-1", group, secret)
        try:
            (seen,) = cluster.view().homes
            assert (seen.name, seen.address, seen.node) == ("a-1", home.ready(), this_node())
            assert home.group() == group
            pid = home.process()
            assert pid is not None
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            assert f"remote:{proposer.ready()}" in command
            assert secret not in command
            ray.kill(registry())
            nobody = Group("none", 0, ("--shared", str(tmp_path)))
            without = {"kakeya.cluster.ray_actors", "kakeya.cluster.keeping"}  # both go on
            eventually(lambda: without <= {record.name for record in caplog.records})
            cluster.up(nobody, secret)
            eventually(lambda: named(cluster) == ["a-1"])
            eventually(lambda: ray.get(registry().proposers.remote("a")) == [proposer.ready()])
            assert home.process() == pid
        finally:
            home.stop()
    finally:
        proposer.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_homes_whose_proposers_are_silent_decode_without(
    cluster: "RayCluster", tmp_path: Path, secret: str
) -> None:
    from kakeya.cluster.ray_actors import Group, _remote_proposers

    group = Group("a", 1, ("--shared", str(tmp_path)), proposers=1)
    assert _remote_proposers(group, secret) == []
    assert _remote_proposers(replace(group, proposers=0), secret) == []


def test_a_list_that_is_away_is_waited_for(
    cluster: "RayCluster", secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kakeya.cluster import on_ray

    pid = ray.get(registry().__ray_call__.remote(lambda actor: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    try:
        monkeypatch.setattr(on_ray, "ASK_S", 0.3)
        monkeypatch.setattr(on_ray, "_AWAY_S", 0.0)
        with pytest.raises(Unavailable, match="an actor of the cluster cannot be reached"):
            cluster.secret()
        monkeypatch.setattr(on_ray, "_AWAY_S", 120.0)
        waker = threading.Timer(1.0, os.kill, (pid, signal.SIGCONT))
        waker.start()
        assert cluster.secret() == secret
        waker.join()
    finally:
        os.kill(pid, signal.SIGCONT)
    os.kill(pid, signal.SIGKILL)  # as with its node: Ray starts another one, which knows the secret
    monkeypatch.undo()
    assert cluster.secret() == secret
    assert eventually(lambda: ray.get(registry().__ray_call__.remote(lambda actor: os.getpid()))) != pid


def test_a_home_that_ray_is_still_starting_again_is_waited_for(
    cluster: "RayCluster", monkeypatch: pytest.MonkeyPatch
) -> None:
    from kakeya.cluster import on_ray

    class Slow:
        """In the place of a home's actor, which Ray has back after a while."""

        def __init__(self) -> None:
            time.sleep(1.0)

        def process(self) -> int:
            return os.getpid()

    actor = on_ray._remote(Slow, name="home:a-1", num_cpus=0).remote()
    pid = cluster.process_of("a-1")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert cluster.process_of("a-1") != pid
    monkeypatch.setattr(on_ray, "_AWAY_S", 0.0)
    os.kill(cluster.process_of("a-1") or 0, signal.SIGKILL)
    with pytest.raises(Unavailable, match="an actor of the cluster cannot be reached"):
        cluster.process_of("a-1")
    ray.kill(actor)
    cluster._until_gone("a-1")


def test_what_cannot_come_up_is_told(cluster: "RayCluster", tmp_path: Path, secret: str) -> None:
    from kakeya.cluster.ray_actors import Group

    group = Group("a", 1, ("--shared", str(tmp_path), "--nonsense"), host="127.0.0.1")
    with pytest.raises(ConfigError, match="home a-1 cannot be started: .*status 2"):
        cluster.up(group, secret)
    with pytest.raises(ConfigError, match="another cluster, with another secret"):
        cluster.up(group, "another-secret")
    with pytest.raises(Unavailable, match="Ray knows of no home 'a-7'"):
        cluster.process_of("a-7")


def test_a_group_has_the_homes_of_its_name_only(tmp_path: Path) -> None:
    from kakeya.cluster.on_ray import RayCluster
    from kakeya.cluster.ray_actors import Group

    for stored in ("a-2", "a-12", "a-gpu-1", "b-1"):
        (tmp_path / "homes" / stored).mkdir(parents=True)
    assert RayCluster()._names(Group("a", 1, ("--shared", str(tmp_path)))) == ["a-1", "a-2", "a-12"]


def test_what_homes_keep_goes_only_where_it_fits(cluster: "RayCluster") -> None:
    from kakeya.cluster.on_ray import _another_node
    from kakeya.cluster.ray_actors import Group, this_node

    group = Group("a", 1, ())
    here, (other,) = this_node(), [node["NodeID"] for node in ray.nodes() if not is_here(node)]
    assert _another_node(here, group) == other
    for greedy in (replace(group, cpus=99.0), replace(group, gpus=1.0), replace(group, resources={"x": 1})):
        with pytest.raises(Unavailable, match=f"no node beside {here} has"):
            _another_node(here, greedy)


def is_here(node: dict[str, Any]) -> bool:
    from kakeya.cluster.ray_actors import this_node

    return str(node["NodeID"]).startswith(this_node())


def test_a_home_that_came_back_elsewhere_is_not_ended_by_a_drain(cluster: "RayCluster") -> None:
    from kakeya.cluster.on_ray import RayCluster

    class Dying(RayCluster):
        """The home dies when it is looked at, and comes back at another node."""

        def view(self) -> pb.View:
            seen = super().view()
            report(pb.Home(name="a-1", node="second", epoch=2))
            return seen

    report(pb.Home(name="a-1", node="first", epoch=1))
    drained, moved = Dying().drain("first")
    assert (drained.sessions, moved) == (0, [])
    assert [(home.node, home.draining) for home in cluster.view().homes] == [("second", False)]


def test_a_drain_that_fails_leaves_no_mark(cluster: "RayCluster", secret: str) -> None:
    report(pb.Home(name="a-1", node="one", address=f"127.0.0.1:{free_port()}", epoch=1))

    def draining() -> list[bool]:
        return [home.draining for home in cluster.view().homes]

    for empty in (lambda: cluster.drain("one", 0.0), lambda: cluster.retire("a-1", 0.0)):
        with pytest.raises(Unavailable, match="the home at"):
            empty()
        assert draining() == [False]
    cluster._ask("drain", "a-1", True)  # by one that was killed
    assert draining() == [True]
    assert cluster.undrain("one") == ["a-1"]
    assert cluster.undrain("one") == []
    assert draining() == [False]


def test_a_home_is_retired_unless_it_keeps_documents(
    cluster: "RayCluster", model: Path, tmp_path: Path, secret: str
) -> None:
    size = ("--capacity", "2", "--window", "30", "--dtype", "float32", "--threads", "1")
    arguments = ("--shared", str(tmp_path), "--model", str(model), *size)
    from kakeya.cluster.ray_actors import Group

    homes = cluster.up(Group("a", 2, arguments, host="127.0.0.1"), secret)
    headers = {"kakeya-cluster-secret": secret, "kakeya-owner": "local"}
    made = httpx.post(f"{homes[0].http_url}/v1/conversations", json={}, headers=headers)
    assert made.status_code == 200, made.text
    assert cluster.retire("a-1", 60.0) is False
    assert cluster.retire("a-2", 60.0) is True
    assert [(home.name, home.draining) for home in cluster.view().homes] == [("a-1", False)]
    assert cluster.retire("a-2", 60.0) is False  # it is no more


def test_a_full_group_grows_and_an_idle_one_shrinks(
    cluster: "RayCluster",
    tmp_path: Path,
    secret: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from kakeya.cluster import on_ray, ray_actors
    from kakeya.cluster.replicas import Scaling
    from kakeya.cluster.scaling import Scaler

    class Idle:
        """An actor in the place of a home's."""

    class Watched(on_ray.RayCluster):
        retired: list[str]

        def retire(self, name: str, patience_s: float) -> bool:
            self.retired = [name]
            return True

    monkeypatch.setattr(on_ray, "_SCALE_S", 0.1)
    # There is no such node: what it starts only waits for one.
    group = ray_actors.Group("a", 1, ("--shared", str(tmp_path)), resources={"gold": 1.0}, most_homes=3)
    place: dict[str, Any] = {"namespace": "kakeya", "num_cpus": 0}
    others = [ray.remote(Idle).options(name=f"home:{name}", **place).remote() for name in ("a-1", "a-x-1")]
    full = pb.Home(name="a-1", node="one", slabs=4, sessions=4, most_sessions=4, epoch=1)
    report(full)
    scaler = on_ray.ScalerActor(group, secret)
    try:
        assert scaler.follow(group) == "a"
        eventually(lambda: "home:a-2" in ray.util.list_named_actors())
    finally:
        scaler.stop()
    assert "home:a-4" not in ray.util.list_named_actors()
    idle = pb.Home(name="a-2", node="two", slabs=4, free_slabs=4, most_sessions=4, epoch=1)
    watched = Watched()
    scaler._scaler = Scaler(Scaling(fewest=1, most=3), calm_s=0.0)
    report(pb.Home(name="a-1", node="one", slabs=4, free_slabs=3, sessions=1, most_sessions=4, epoch=1))
    report(idle)
    asked: list[str] = []

    def least(homes: list[pb.Home], secret: str) -> str | None:
        asked.extend(home.name for home in homes)
        return "a-2" if len(asked) > 2 else None

    monkeypatch.setattr(on_ray, "home_to_end", least)
    scaler._look(watched)  # nobody can take what the others have
    scaler._look(watched)
    assert asked == ["a-1", "a-2"] * 2
    assert watched.retired == ["a-2"]
    scaler.follow(replace(group, most_homes=0))  # one that is not to grow or shrink is only evened out
    stepped: list[int] = []
    monkeypatch.setattr(scaler._balancing, "step", lambda homes: stepped.append(len(homes)) or 3)
    scaler._even_at = 0.0
    for _ in range(2):
        scaler._look(watched)
    assert stepped == [2]
    assert "group a is evened out: 3 sessions moved" in caplog.text
    for other in others:
        ray.kill(other)
    for name in ("a-1", "a-2"):
        cluster._ask("remove", name)
    assert cluster.down() == 0
    eventually(lambda: "home:a-2" not in ray.util.list_named_actors())
    ended = on_ray.ScalerActor(group, secret)  # which has nobody to ask, and goes on
    eventually(lambda: "group a cannot be scaled now: no Kakeya cluster is up" in caplog.text)
    assert ended._thread.is_alive()
    ended.stop()
    cluster.up(replace(group, homes=0, name="b", most_homes=2), secret)
    assert "scaler:b" in ray.util.list_named_actors()
