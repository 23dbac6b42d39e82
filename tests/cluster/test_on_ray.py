"""A real Ray: homes as actors on two nodes, one of which is drained. Needs the extra `cluster`."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya.client import AsyncClient
from kakeya.cluster.lookup import look_up
from kakeya.cluster.members import make_secret
from kakeya.dialing import Retry
from kakeya.errors import ConfigError, Unavailable
from support.clustering import FrontHere, alone, front_at

ray = pytest.importorskip("ray", reason="the extra `cluster` is not installed: pip install 'kakeya[cluster]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PATIENT = Retry(attempts=4000, first_delay=0.05, longest_delay=0.2)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    nodes.add_node(num_cpus=2)
    yield nodes.address
    nodes.shutdown()


def test_homes_on_ray_die_are_drained_and_come_back(address: str, model: Path, tmp_path: Path) -> None:
    from kakeya.cluster.on_ray import Group, RayCluster, connected

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
