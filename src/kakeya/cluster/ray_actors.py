"""The actors of a cluster on Ray: one has the list of homes, each other one keeps a home or a proposer.

They run on the nodes that Ray has chosen, and Ray starts them again. What tells them what to do is `on_ray`.
"""

import logging
import os
from dataclasses import dataclass, field
from typing import Any

import ray

from kakeya.cluster.keeping import Keeper
from kakeya.cluster.members import check_name
from kakeya.cluster.proposing import ProposerKeeper
from kakeya.cluster.registry import Registry
from kakeya.wire import cluster_pb2 as pb

log = logging.getLogger(__name__)
NAMESPACE = "kakeya"
REGISTRY = "registry"
ASK_S = 10.0
_NODE_CHARACTERS = 8


@dataclass(frozen=True)
class Group:
    """Homes of one model that are alike: they are called `name`-1, `name`-2 and so on.

    `arguments` are flags of `kakeya cluster home`. A home takes so many CPUs and GPUs of its node, and only
    nodes that have the `resources` of that name get one. `host` is where homes listen: the node's own
    address when left out. `proposers` guess tokens for them, with the flags `proposing` of `kakeya propose`.
    With `most_homes` above `homes` the group grows and shrinks with what is asked of it.
    """

    name: str
    homes: int
    arguments: tuple[str, ...]
    cpus: float = 1.0
    gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)
    host: str = ""
    proposers: int = 0
    proposing: tuple[str, ...] = ()
    most_homes: int = 0

    def __post_init__(self) -> None:
        check_name(self.name)


class RegistryActor:
    """The list of homes, and what else a member must know. Everything in it comes back by itself."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._registry = Registry()

    def report(self, home: bytes, group: str = "") -> bytes:
        """A sign of life of a home; who is there, and who proposes for its group."""
        view = self._registry.report(pb.Home.FromString(home))
        view.proposers.extend(self._registry.proposers(group))
        return view.SerializeToString()

    def view(self) -> bytes:
        return self._registry.view().SerializeToString()

    def drain(self, name: str, draining: bool) -> None:
        self._registry.drain(name, draining=draining)

    def remove(self, name: str) -> None:
        self._registry.remove(name)

    def secret(self) -> str:
        return self._secret

    def propose(self, group: str, address: str) -> None:
        self._registry.propose(group, address)

    def proposers(self, group: str) -> list[str]:
        return self._registry.proposers(group)


class ProposerActor:
    """Keeps the process of one proposer on the node that Ray has chosen."""

    def __init__(self, group: Group, secret: str) -> None:
        host = group.host or ray.util.get_node_ip_address()
        self._group = group.name
        self._keeper = ProposerKeeper(group.proposing, host, secret, self._tell).start()

    def ready(self) -> str:
        """Its address."""
        return self._keeper.address

    def stop(self) -> None:
        self._keeper.stop()

    def _tell(self, address: str) -> None:
        try:
            registry = ray.get_actor(REGISTRY, NAMESPACE)
            ray.get(registry.propose.remote(self._group, address), timeout=ASK_S)
        except Exception as error:  # the list is away: it is told again in a second
            log.warning("the cluster's list cannot be reached: %s", error)


class HomeActor:
    """Keeps the process of one home on the node that Ray has chosen."""

    def __init__(self, name: str, group: Group, secret: str) -> None:
        host = group.host or ray.util.get_node_ip_address()
        self._group = group
        self._registry: Any = None
        place = ["--name", name, "--node", this_node(), "--bind", f"{host}:0", "--http", f"{host}:0"]
        arguments = [*group.arguments, *place, *_remote_proposers(group, secret)]
        # Ray starts the actor again if it is still the one that Ray means.
        self._keeper = Keeper(arguments, secret, self._report, lambda: os._exit(1)).start()

    def ready(self) -> str:
        """The home's address."""
        assert self._keeper.home is not None
        return self._keeper.home.address

    def group(self) -> Group:
        """How it was started."""
        return self._group

    def process(self) -> int | None:
        """The number of the home's process, for those who end it in tests."""
        return None if self._keeper.process is None else self._keeper.process.pid

    def stop(self) -> None:
        """End the home, after it has stored what it has."""
        self._keeper.stop()

    def _report(self, home: pb.Home) -> pb.View:
        if self._registry is None:
            self._registry = ray.get_actor(REGISTRY, NAMESPACE)
        try:
            told = ray.get(
                self._registry.report.remote(home.SerializeToString(), self._group.name), timeout=ASK_S
            )
        except Exception:
            self._registry = None
            raise
        return pb.View.FromString(told)


def _remote_proposers(group: Group, secret: str) -> list[str]:
    """Flags of a home that may ask the proposers of its group. One that dies can only cost speed."""
    if not group.proposers:
        return []
    registry = ray.get_actor(REGISTRY, NAMESPACE)
    found = ray.get(registry.proposers.remote(group.name), timeout=ASK_S)
    if not found:
        log.warning("no proposer of group %s was heard of: its homes decode without", group.name)
        return []
    os.environ["KAKEYA_PROPOSER_API_KEY"] = secret  # of the home's process, and on no command line
    return ["--proposer", f"remote:{','.join(found)}"]


def this_node() -> str:
    """The name of the node that this process is on."""
    node: str = ray.get_runtime_context().get_node_id()
    return node[:_NODE_CHARACTERS]
