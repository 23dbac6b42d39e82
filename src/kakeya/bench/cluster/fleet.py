"""A cluster on this machine: Ray's head and nodes as processes, the homes on them, and a front end."""

import os
import random
import signal
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kakeya.bench.cluster.ray_nodes import RayNodes
from kakeya.bench.cluster.rows import ACTOR, FRONT, NODE
from kakeya.bench.processes import KAKEYA, ChildProcess, clean_environment, serve_flags
from kakeya.errors import PeerFailed, Unavailable
from kakeya.options import EngineOptions, flags

if TYPE_CHECKING:
    from kakeya.cluster.on_ray import RayCluster

_START_S = 120.0
# Below those that systems give to outgoing connections.
_PORTS = 10_000, 30_000
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
        self._port, self._head = _free_port(), ""
        self._front: ChildProcess | None = None
        self._nodes: list[str] = []

    @property
    def address(self) -> str:
        """Of the front end. It stays the same when that is started again."""
        return f"127.0.0.1:{self._port}"

    def __enter__(self) -> "Fleet":
        from kakeya.cluster.members import make_secret

        try:
            self._ray = self._stack.enter_context(RayNodes(_free_port()))
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

    def process_of(self, home: Any) -> int:
        """The number of a home's process, once its actor tells it. Raises Unavailable when it never does."""
        deadline = time.monotonic() + _START_S
        while True:
            try:
                pid = self.cluster.process_of(home.name)
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
                pid = None
            if pid is not None:
                return pid
            time.sleep(0.1)

    # What is started.

    def start_head(self) -> None:
        """Ray's head, always at the same address. It knows of no node."""
        self._head = self._ray.start_head()

    def settle(self) -> None:
        """Start the homes that do not live."""
        from kakeya.cluster.ray_actors import Group

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
        serve = ("serve", "--cluster", self._head, "--bind", self.address, "--http", "off")
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
        pid = self.process_of(home)
        if kind == NODE:
            self._end(next(each for each in self._nodes if each.startswith(home.node)))
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
        self._ray.kill()

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

        self.cluster: RayCluster = self._joined.enter_context(connected(self._head))

    def _add_nodes(self) -> None:
        for _ in range(self._size.nodes):
            self._add_node()

    def _add_node(self) -> None:
        self._nodes.append(self._ray.add())

    def _end(self, node: str) -> None:
        self._nodes.remove(node)
        self._ray.kill(node)


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
    """One that no outgoing connection gets.

    Whoever dials a dead server here could otherwise be given that very port, and keep the next one from it.
    """
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(*_PORTS)))
            return int(probe.getsockname()[1])
