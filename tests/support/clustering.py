"""A cluster in this process: homes over the tiny model, their list, and a front end."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kakeya.cluster.calling import HomeCalls
from kakeya.cluster.grpc_front import ClusterServer
from kakeya.cluster.home import HomeConfig, HomeServer
from kakeya.cluster.homes import Homes, LookUp
from kakeya.cluster.http_front import ClusterHttp
from kakeya.cluster.members import prefix_of
from kakeya.cluster.registry import Registry
from kakeya.config import EngineConfig, Quotas, RuntimeConfig, StateConfig
from kakeya.errors import KakeyaError
from kakeya.http_server import HttpServer
from kakeya.metrics import Metrics
from kakeya.runtime import Runtime
from kakeya.serving.admission import Admission
from kakeya.serving.commons import Commons
from kakeya.serving.config import HttpConfig, ServerConfig
from kakeya.serving.keys import hash_key
from kakeya.wire import cluster_pb2 as pb, runtime_pb2
from support.serving import ENGINE, connected, new_session, on_loop, serving, token_ids

SECRET = "a-secret-of-the-cluster"
BEAT_S = 0.05


@dataclass
class HomeHere:
    """One home: its servers and its runtime. `fenced` has the reason once another one has followed it."""

    name: str
    server: HomeServer
    http: HttpServer
    runtime: Runtime
    fenced: list[str] = field(default_factory=list)

    def stop(self) -> None:
        """End it as a signal would."""

        async def stopped() -> None:
            for front in (self.server, self.http):
                await front.refuse()
            for front in (self.server, self.http):
                await front.stop(0.0)

        on_loop(stopped())
        self.runtime.close()


class Town:
    """Homes that come and go, in one shared directory."""

    def __init__(
        self,
        model: Path,
        shared: Path,
        quotas: Quotas | None = None,
        capacity: int = 4,
        engine: EngineConfig = ENGINE,
    ) -> None:
        self.registry = Registry()
        self.homes: dict[str, HomeHere] = {}
        self._model, self._shared = model, shared
        self._quotas = quotas or Quotas()
        self._engine = replace(engine, capacity=capacity)
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def settle(self, name: str, node: str = "", window: int | None = None, model: str = "tiny") -> HomeHere:
        """Open a home, or open it again: whoever was it before is fenced off. It may have another window, and
        call its model otherwise."""
        engine = self._engine
        if window is not None:
            engine = replace(engine, cache=replace(engine.cache, window=window))
        state = StateConfig(self._shared / "homes" / name, snapshot_tokens=6, fenced=True)
        settings = RuntimeConfig(
            session_idle_ttl_s=None, quotas=self._quotas, state=state, session_prefix=prefix_of(name)
        )
        metrics = Metrics()
        runtime = Runtime.open(str(self._model), engine, settings, metrics, name=model)
        fenced: list[str] = []

        async def started() -> HomeHere:
            front_hash = hash_key(SECRET)
            commons = Commons(Admission())
            grpc = ServerConfig(bind="127.0.0.1:0", front_hash=front_hash, shutdown_grace_s=1.0)
            home = HomeConfig(name, SECRET, node or name)
            server = HomeServer(grpc, commons, home, fenced.append)
            http = HttpServer(HttpConfig(bind="127.0.0.1:0", front_hash=front_hash), commons, metrics)
            await server.start()
            await http.start()
            server.home.http_url = http.url
            await server.open(runtime)
            await http.open(runtime)
            return HomeHere(name, server, http, runtime, fenced)

        found = self.homes[name] = on_loop(started())
        self.beat()
        return found

    def beat(self) -> pb.View:
        """Everybody is heard of now."""
        for home in tuple(self.homes.values()):
            try:
                with HomeCalls(home.server.address, SECRET) as calls:
                    self.registry.report(calls.beat(self.registry.view()))
            except KakeyaError:
                pass  # it is being stopped: silence is what the others hear
        return self.registry.view()

    def close(self) -> None:
        self._over.set()
        self._beating.join()
        for home in self.homes.values():
            home.stop()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            self.beat()


@dataclass
class FrontHere:
    """A front end of a town."""

    grpc: ClusterServer
    http: ClusterHttp
    homes: Homes

    @property
    def address(self) -> str:
        return self.grpc.address

    @property
    def url(self) -> str:
        return self.http.url


@contextmanager
def front_of(town: Town, *keys: str, hold_s: float = 10.0, **http: Any) -> Iterator[FrontHere]:
    """A front end that knows one home at first."""
    with front_at(
        SECRET, [home.address for home in town.beat().homes[:1]], None, *keys, hold_s=hold_s, **http
    ) as front:
        yield front


@contextmanager
def front_at(
    secret: str, seeds: list[str], look_up: LookUp | None, *keys: str, hold_s: float, **http: Any
) -> Iterator[FrontHere]:
    """A front end over homes, some of whose addresses are known."""
    hashes = tuple(map(hash_key, keys))

    async def opened() -> FrontHere:
        homes = Homes(secret, seeds, look_up, hold_s=hold_s)
        grpc = ClusterServer(ServerConfig(bind="127.0.0.1:0", key_hashes=hashes))
        web = ClusterHttp(HttpConfig(bind="127.0.0.1:0", key_hashes=hashes, **http))
        for front in (grpc, web):
            await front.start()
            await front.open(homes)
        return FrontHere(grpc, web, homes)

    async def stopped(found: FrontHere) -> None:
        for front in (found.grpc, found.http):
            await front.refuse()
            await front.stop(0.5)

    found = on_loop(opened())
    try:
        yield found
    finally:
        on_loop(stopped(found))


@contextmanager
def ray_of_two_nodes() -> Iterator[str]:
    """The address of a Ray on this machine, which takes itself for two."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    nodes.add_node(num_cpus=2)
    try:
        yield nodes.address
    finally:
        nodes.shutdown()


@contextmanager
def town_of(model: Path, shared: Path, *names: str, **settings: object) -> Iterator[Town]:
    """A town with these homes."""
    with ExitStack() as stack:
        town = Town(model, shared, **settings)  # type: ignore[arg-type]
        stack.callback(town.close)
        for name in names:
            town.settle(name)
        yield town


def alone(model: Path, prompt: list[int], *turns: tuple[int, int], temperature: float = 1.0) -> list[int]:
    """What a single server says, over all turns of (tokens, seed)."""
    with serving(model) as (server, _), connected(server.address) as stub:
        session, found = new_session(stub, prompt), []
        for tokens, seed in turns:
            request = runtime_pb2.GenerateRequest(
                session_id=session, max_tokens=tokens, seed=seed, temperature=temperature
            )
            found += token_ids(stub.Generate(request))
        return found
