"""A cluster on this machine: Ray's head and nodes as processes, the homes on them, and a front end."""

import os
import signal
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kakeya.bench.cluster.rows import ACTOR, FRONT, NODE
from kakeya.bench.processes import KAKEYA, ChildProcess, clean_environment, serve_flags
from kakeya.errors import PeerFailed
from kakeya.options import EngineOptions, flags

if TYPE_CHECKING:
    from kakeya.cluster.on_ray import RayCluster

# A node is known to be dead after a few seconds. Ray's own defaults take half a minute.
_HEALTH = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 4,
}
_START_S = 120.0
_DIES_S = 60.0
# What Ray calls its workers that have nothing to do. They end when they like.
_IDLE = "ray::IDLE"


@dataclass(frozen=True)
class Size:
    """How many nodes there are, each with one home, and what a home takes."""

    nodes: int
    slabs: int
    at_once: int
    queue: int


class Fleet:
    """Use it as a context manager. What it does takes seconds, and may be done from any thread."""

    def __init__(self, engine: EngineOptions, size: Size, directory: Path) -> None:
        self._engine, self._size = engine, size
        self._shared = directory / "shared"
        self._stack, self._joined = ExitStack(), ExitStack()
        self._head_port, self._port = _free_port(), _free_port()
        self._front: ChildProcess | None = None
        self._nodes: list[Any] = []

    @property
    def address(self) -> str:
        """Of the front end. It stays the same when that is started again."""
        return f"127.0.0.1:{self._port}"

    def __enter__(self) -> "Fleet":
        from ray.cluster_utils import Cluster

        from kakeya.cluster.members import make_secret

        try:
            # Its hooks for the end want the main thread, and nodes come from others.
            self._ray = Cluster(shutdown_at_exit=False)
            self._stack.callback(self._ray.shutdown)
            self.start_head()
            self._add_nodes()
            self.secret = make_secret(self._shared / "secret")
            self._join()
            self.settle()
            self.start_front()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._front is not None:
            self._front.kill()
            self._front.close()
        self._joined.close()
        self._stack.close()

    def family(self) -> list[int]:
        """This process and those that it has started, as far as they stay."""
        import psutil

        found = [os.getpid()]
        for each in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if not " ".join(each.cmdline()).startswith(_IDLE):
                    found.append(each.pid)
        return found

    # What is started.

    def start_head(self) -> None:
        """Ray's head, always at the same address. It knows of no node."""
        place = {"num_cpus": 0, "include_dashboard": False, "gcs_server_port": self._head_port}
        self._ray.add_node(**place, _system_config=_HEALTH)

    def settle(self) -> None:
        """Start the homes that do not live."""
        from kakeya.cluster.on_ray import Group

        size = self._size
        settings = {
            "shared": self._shared,
            "log-level": "error",
            "max-concurrent": size.at_once,
            "queue-depth": size.queue,
            "queue-max-wait-s": 0,
            "shutdown-grace-s": 5,
        }
        arguments = [*serve_flags(self._engine, size.slabs), *flags(settings)]
        self.cluster.up(Group("home", size.nodes, tuple(arguments), host="127.0.0.1"), self.secret)

    def start_front(self) -> None:
        """Raises PeerFailed when it does not come."""
        if self._front is not None:
            self._front.close()
        serve = ("serve", "--cluster", self._ray.address, "--bind", self.address, "--http", "off")
        self._front = ChildProcess(["-c", KAKEYA, *serve, "--log-level", "error"], env=clean_environment())
        deadline = time.monotonic() + _START_S
        while "serves a cluster" not in self._front.said():
            if not self._front.running or time.monotonic() > deadline:
                raise PeerFailed(f"the front end does not start: {self._front.last_words()}")
            time.sleep(0.05)

    # What dies.

    def kill(self, kind: str, home: Any) -> None:
        """End something at once: the home's process, its actor, its node, or the front end."""
        if kind == FRONT:
            assert self._front is not None
            self._front.kill()
            return
        pid = self.cluster.process_of(home.name)
        assert pid is not None
        if kind == NODE:
            self._end(next(each for each in self._nodes if each.node_id.startswith(home.node)))
        else:
            os.kill(_parent(pid) if kind == ACTOR else pid, signal.SIGKILL)
        _until_gone(pid)

    def mend(self, kind: str) -> None:
        """Start the next one of a kind that nobody else does."""
        if kind == FRONT:
            self.start_front()
        elif kind == NODE:
            self._add_node()

    def kill_head(self) -> None:
        """End Ray's head at once. Who has joined must leave before, or ends with it a minute later."""
        self._joined.close()
        self._ray.remove_node(self._ray.head_node, allow_graceful=False)

    def join_next_head(self) -> None:
        """The nodes end what they have of the former head's and join the one that is there now, which starts
        the homes."""
        for node in list(self._nodes):
            self._end(node)
        self._add_nodes()
        self._join()
        self.settle()

    # Behind the door.

    def _join(self) -> None:
        from kakeya.cluster.on_ray import connected

        self.cluster: RayCluster = self._joined.enter_context(connected(self._ray.address))

    def _add_nodes(self) -> None:
        for _ in range(self._size.nodes):
            self._add_node()

    def _add_node(self) -> None:
        """One more node, with room for its own home and for one that had to leave another node."""
        self._nodes.append(self._ray.add_node(num_cpus=2))

    def _end(self, node: Any) -> None:
        self._nodes.remove(node)
        self._ray.remove_node(node, allow_graceful=False)


def _parent(pid: int) -> int:
    import psutil

    return int(psutil.Process(pid).ppid())


def _until_gone(pid: int) -> None:
    """Raises PeerFailed when it does not end."""
    import psutil

    deadline = time.monotonic() + _DIES_S
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                raise PeerFailed("a home outlives what keeps it")
            time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
