"""The cluster on Ray, from a driver: it comes up, grows, moves its sessions, and goes down.

Ray places the actors (`ray_actors`), starts them again when their process or their machine dies, and carries
who is there. Nothing of a client passes through it.
"""

import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kakeya.cluster.calling import Balancing, Drained, Draining, HomeCalls, home_to_end, name_of
from kakeya.cluster.ray_actors import (
    ASK_S,
    NAMESPACE,
    REGISTRY,
    Group,
    HomeActor,
    ProposerActor,
    RegistryActor,
)
from kakeya.cluster.replicas import Scaling
from kakeya.cluster.scaling import Scaler
from kakeya.errors import ConfigError, Unavailable
from kakeya.wire import cluster_pb2 as pb

log = logging.getLogger(__name__)
_HOME, _PROPOSER, _SCALER = "home:", "proposer:", "scaler:"
_SCALE_S, _EVEN_S = 5.0, 60.0
# The group cannot grow while one of its homes is emptied.
_SHRINK_S = 120.0
_AWAY_S = 60.0
_END_S = 120.0
_DIAL_S = 10.0


class ScalerActor:
    """Evens the homes of a group out, and lets it grow and shrink where it may. A home for which there is no
    node is what Ray's autoscaler answers."""

    def __init__(self, group: Group, secret: str) -> None:
        self._secret = secret
        self._balancing = Balancing(secret)
        self._even_at = 0.0
        self.follow(group)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="kakeya-scaler", daemon=True)
        self._thread.start()

    def follow(self, group: Group) -> str:
        """Keep the group as it is wanted from now on."""
        self._group = group
        self._scaler = Scaler(Scaling(fewest=group.homes, most=max(group.homes, group.most_homes)))
        return group.name

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _live(self) -> None:
        cluster = RayCluster()
        while not self._over.wait(_SCALE_S):
            try:
                self._look(cluster)
            except Exception as error:  # somebody is away: look again later
                log.warning("group %s cannot be scaled now: %s", self._group.name, error)

    def _look(self, cluster: "RayCluster") -> None:
        group = self._group
        names = [name for name in _names(ray.util.list_named_actors()) if _is_of(group, name)]
        homes = [home for home in cluster.view().homes if home.name in names]
        if group.most_homes > group.homes:
            self._scale(cluster, names, homes)
        if time.monotonic() - self._even_at > _EVEN_S:
            self._even_at = time.monotonic()
            moved = self._balancing.step(homes)
            if moved:
                log.warning("group %s is evened out: %d sessions moved", group.name, moved)

    def _scale(self, cluster: "RayCluster", names: Sequence[str], homes: Sequence[pb.Home]) -> None:
        group = self._group
        wish = self._scaler.look(homes, starting=len(names) - len(homes))
        free = (f"{group.name}-{number}" for number in itertools.count(1))
        for name in itertools.islice((name for name in free if name not in names), wish.more):
            log.warning("group %s grows by home %s", group.name, name)
            cluster.start(name, group, self._secret)
        least = home_to_end(homes, self._secret) if wish.fewer else None
        if least is not None:
            log.warning("group %s shrinks: home %s is emptied", group.name, least)
            cluster.retire(least, _SHRINK_S)


def _names(actors: Sequence[str]) -> list[str]:
    """The homes that have an actor."""
    return [name.removeprefix(_HOME) for name in actors if name.startswith(_HOME)]


def _is_of(group: Group, home: str) -> bool:
    """Whether a home is of a group, and not of another one whose name only begins like it."""
    name, _, number = home.rpartition("-")
    return name == group.name and number.isdecimal()


def _another_node(not_on: str, group: Group) -> str:
    """A node of Ray's that could have a home of the group. Raises Unavailable."""
    needs = {"CPU": group.cpus, "GPU": group.gpus, **group.resources}
    for node in ray.nodes():
        there = node["Alive"] and not node["NodeID"].startswith(not_on)
        if there and all(node["Resources"].get(name, 0.0) >= amount for name, amount in needs.items()):
            found: str = node["NodeID"]
            return found
    told = ", ".join(f"{name} {amount:g}" for name, amount in needs.items() if amount)
    raise Unavailable(f"no node beside {not_on} has {told} for what its homes keep")


class RayCluster:
    """A cluster on Ray, from a driver. Use it as `connected` gives it."""

    # Its life.

    def up(self, group: Group, secret: str, timeout_s: float = 600.0) -> list[pb.Home]:
        """Start the homes of a group, those that were there before among them, and wait until they serve.

        Homes that live already are left alone. Raises ConfigError and Unavailable.
        """
        registry = _remote(RegistryActor, num_cpus=0, name=REGISTRY).remote(secret)
        if _answer(registry.secret.remote(), timeout_s) != secret:
            raise ConfigError("another cluster, with another secret, is up on this Ray: end it first")
        proposers = {f"{group.name}-{number}": number for number in range(1, group.proposers + 1)}
        started = {name: self._start_proposer(name, group, secret) for name in proposers}
        self._wait(started, timeout_s)
        names = self._names(group)
        actors = {name: self.start(name, group, secret) for name in names}
        self._wait(actors, timeout_s)
        if max(group.homes, group.most_homes) > 1:
            scaler = _remote(ScalerActor, num_cpus=0, name=f"{_SCALER}{group.name}").remote(group, secret)
            _answer(scaler.follow.remote(group), timeout_s)
        return [home for home in self.view().homes if home.name in names]

    def view(self) -> pb.View:
        """Who is there. Raises Unavailable when there is no cluster."""
        return pb.View.FromString(self._ask("view"))

    def secret(self) -> str:
        secret: str = self._ask("secret")
        return secret

    def drain(
        self,
        node: str,
        patience_s: float = 600.0,
        progress: Callable[[int, int], None] = lambda moved, left: None,
    ) -> tuple[Drained, list[str]]:
        """Move the sessions of a node elsewhere and end its homes; what it took, and the homes that had to go
        on at another node, because they keep responses or conversations.

        Raises ConfigError for an unknown node, and what `Draining` raises.
        """
        sources = self._homes_on(node)
        with self._marked([home.name for home in sources]):
            drained = Draining(self.view, self.secret(), patience_s, progress).run(node)
            now = {home.name: home for home in self.view().homes}
            # One that died meanwhile came back elsewhere.
            left = [now[home.name] for home in sources if home.name in now and now[home.name].node == node]
            return drained, [home.name for home in left if not self._ended(home, node)]

    def retire(self, name: str, patience_s: float) -> bool:
        """Move the sessions of one home to the others of its kind and end it; whether it has ended. One that
        keeps responses or conversations goes on. Raises what `Draining` raises."""
        with self._marked([name]):
            Draining(self.view, self.secret(), patience_s, node_of=name_of).run(name)
            home = next((home for home in self.view().homes if home.name == name), None)
            if home is None or self._documents_of(home):
                return False
            self._remove(name)
            return True

    def undrain(self, node: str) -> list[str]:
        """Give homes of a node new sessions again, after a drain that was cut off; which ones."""
        names = [home.name for home in self._homes_on(node) if home.draining]
        for name in names:
            self._ask("drain", name, False)
        return names

    def down(self) -> int:
        """End every home, after it has stored what it has; how many there were."""
        for name in ray.util.list_named_actors():
            if name.startswith((_PROPOSER, _SCALER)):
                ray.kill(ray.get_actor(name, NAMESPACE))
        homes = list(self.view().homes)
        for home in homes:
            self._end(home.name)
        for name in _names(ray.util.list_named_actors()):  # Ray has no node with room for them
            ray.kill(self._actor(name))
        ray.kill(self._registry())
        return len(homes)

    def process_of(self, name: str) -> int | None:
        """The number of a home's process on its node."""
        pid: int | None = self._ask_home(name, "process")
        return pid

    def start(self, name: str, group: Group, secret: str, node: str = "") -> Any:
        """The actor of a home, which is started unless it lives: on this node of Ray's, or on any."""
        options: dict[str, Any] = {"num_cpus": group.cpus, "scheduling_strategy": "SPREAD"}
        if group.gpus:
            options["num_gpus"] = group.gpus
        if group.resources:
            options["resources"] = group.resources
        if node:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        return _remote(HomeActor, name=_actor_name(name), **options).remote(name, group, secret)

    # Behind the door.

    @contextmanager
    def _marked(self, names: Sequence[str]) -> Iterator[None]:
        """Homes that get no new session until this ends, however it does."""
        try:
            for name in names:
                self._ask("drain", name, True)
            yield
        finally:
            for name in names:
                self._ask("drain", name, False)

    def _ended(self, home: pb.Home, node: str) -> bool:
        """End a home that has been emptied. One that keeps documents goes on at another node than this."""
        if not self._documents_of(home):
            self._remove(home.name)
            return True
        group = self._ask_home(home.name, "group")
        elsewhere = _another_node(node, group)  # before the home ends: there may be none
        self._end(home.name)
        self._wait({home.name: self.start(home.name, group, self.secret(), elsewhere)}, 600.0)
        return False

    def _documents_of(self, home: pb.Home) -> int:
        """How many responses and conversations it keeps."""
        with HomeCalls(home.address, self.secret()) as calls:
            return calls.documents()

    def _remove(self, name: str) -> None:
        self._end(name)
        self._ask("remove", name)

    def _names(self, group: Group) -> list[str]:
        """Those that are wanted, and those that have sessions from before."""
        wanted = [f"{group.name}-{number}" for number in range(1, group.homes + 1)]
        shared = Path(group.arguments[group.arguments.index("--shared") + 1])
        stored = (path.name for path in (shared / "homes").glob("*") if path.is_dir())
        names = {*wanted, *(name for name in stored if _is_of(group, name))}
        return sorted(names, key=lambda name: (len(name), name))

    def _start_proposer(self, name: str, group: Group, secret: str) -> Any:
        options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "name": f"{_PROPOSER}{name}"}
        return _remote(ProposerActor, **options).remote(group, secret)

    def _wait(self, actors: dict[str, Any], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for name, actor in actors.items():
            try:
                ray.get(actor.ready.remote(), timeout=max(0.1, deadline - time.monotonic()))
            except ray.exceptions.GetTimeoutError:
                raise Unavailable(
                    f"home {name} does not serve after {timeout_s:g} s; Ray may have no node with room for it"
                ) from None
            except ray.exceptions.RayActorError as error:
                ray.kill(actor)
                reason = str(error).strip().splitlines()[-1]
                raise ConfigError(f"home {name} cannot be started: {reason}") from error

    def _homes_on(self, node: str) -> list[pb.Home]:
        homes = self.view().homes
        found = [home for home in homes if home.node == node]
        if not found:
            nodes = ", ".join(sorted({home.node for home in homes})) or "none"
            raise ConfigError(f"there is no home on a node {node!r}; there are: {nodes}")
        return found

    def _end(self, name: str) -> None:
        self._ask_home(name, "stop", timeout_s=_END_S)
        ray.kill(self._actor(name))
        self._until_gone(name)

    def _until_gone(self, name: str) -> None:
        """Ray forgets the name of an actor a moment after its end."""
        for _ in range(100):
            try:
                ray.get_actor(_actor_name(name), NAMESPACE)
            except ValueError:
                return
            time.sleep(0.1)

    def _actor(self, name: str) -> Any:
        try:
            return ray.get_actor(_actor_name(name), NAMESPACE)
        except ValueError as error:
            raise Unavailable(f"Ray knows of no home {name!r}") from error

    def _registry(self) -> Any:
        try:
            return ray.get_actor(REGISTRY, NAMESPACE)
        except ValueError:
            raise Unavailable(
                "no Kakeya cluster is up on this Ray: start one with `kakeya cluster up`"
            ) from None

    def _ask(self, call: str, *arguments: object) -> Any:
        """What the list says. If its node has died, Ray brings it back at another one: it is waited for."""
        return _waited_for(lambda: _answer(getattr(self._registry(), call).remote(*arguments), ASK_S))

    def _ask_home(self, name: str, call: str, timeout_s: float = ASK_S) -> Any:
        """What a home's actor says. Its home may serve before Ray knows that it is back: it is waited for."""
        return _waited_for(lambda: _answer(getattr(self._actor(name), call).remote(), timeout_s))


class _Away(Unavailable):
    """An actor has died, is on its way back, or does not answer in time."""


def _answer(reference: Any, timeout_s: float) -> Any:
    """What an actor answers. Raises Unavailable where it does not."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.RayError as error:
        raise _Away(f"an actor of the cluster cannot be reached: {error}") from error


def _waited_for(ask: Callable[[], Any]) -> Any:
    """The answer of an actor that may be on its way back. Raises Unavailable when it is not there in time."""
    deadline = time.monotonic() + _AWAY_S
    while True:
        try:
            return ask()
        except _Away:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@contextmanager
def connected(address: str) -> Iterator[RayCluster]:
    """The cluster on the Ray whose head is at `address`. Raises Unavailable when nobody is there."""
    _dial(address)
    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise Unavailable(f"no Ray head answers at {address}: {error}") from error
    try:
        yield RayCluster()
    finally:
        ray.shutdown()


def _dial(address: str) -> None:
    """Ray itself takes minutes to tell that nobody listens there."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in host:  # `auto`, and what only Ray understands
        return
    try:
        socket.create_connection((host, int(port)), _DIAL_S).close()
    except OSError as error:
        raise Unavailable(f"no Ray head answers at {address}: {error}") from error


def _remote(kind: type, **options: Any) -> Any:
    """An actor that outlives whoever starts it, and is started again when it dies."""
    lasting = {"namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1, "get_if_exists": True}
    return ray.remote(kind).options(**lasting, **options)


def _actor_name(home: str) -> str:
    return f"{_HOME}{home}"


def main(arguments: Sequence[str]) -> None:
    """Print what a front end must know, as JSON: see `lookup`."""
    with connected(arguments[0]) as cluster:
        addresses = [home.address for home in cluster.view().homes]
        told = json.dumps({"secret": cluster.secret(), "addresses": addresses})
    sys.stdout.write(told + "\n")
    sys.stdout.flush()
    os._exit(0)  # Ray takes seconds to clean up after itself


if __name__ == "__main__":
    main(sys.argv[1:])
