"""Ray's head and nodes on this machine, started by a process of its own.

Ray forks to start them. A process in which gRPC runs must not: what it forks may crash or hang.
"""

from typing import Any

from kakeya.bench.processes import LineProcess, answer_lines, clean_environment

# A node is known to be dead after a few seconds. Ray's own defaults take half a minute.
_HEALTH = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 4,
}
_START_S = 120.0


class RayNodes(LineProcess):
    """The head is always at the same port. Raises PeerFailed when Ray does not do what is wanted."""

    name = "the process that starts Ray"

    def __init__(self, port: int) -> None:
        super().__init__(("-m", "kakeya.bench.cluster.ray_nodes"), env=clean_environment(), own_session=True)
        self._port = port

    def start_head(self) -> str:
        """A head that knows of no node; its address."""
        return str(self.ask_within(_START_S, ["start_head", self._port]))

    def add(self) -> str:
        """One more node, with room for its own home and for one that had to leave another node; its name."""
        return str(self.ask_within(_START_S, ["add", 2]))

    def kill(self, node: str = "") -> None:
        """End a node at once, with all that runs on it; the head where none is named."""
        self.ask_within(_START_S, ["kill", node])


class _Here:
    """The other end."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(shutdown_at_exit=False)
        self._nodes: dict[str, Any] = {}

    def answer(self, request: list[Any]) -> str:
        call, value = request
        return str(getattr(self, call)(value))

    def start_head(self, port: int) -> str:
        place = {"num_cpus": 0, "include_dashboard": False, "gcs_server_port": port}
        self.cluster.add_node(**place, _system_config=_HEALTH)
        return str(self.cluster.address)

    def add(self, cpus: int) -> str:
        node = self.cluster.add_node(num_cpus=cpus)
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def kill(self, name: str) -> str:
        node = self._nodes.pop(name) if name else self.cluster.head_node
        self.cluster.remove_node(node, allow_graceful=False)
        return name


def main() -> None:
    """Until the input ends. Then all of Ray does."""
    here = _Here()
    try:
        answer_lines(here.answer)
    finally:
        here.cluster.shutdown()


if __name__ == "__main__":
    main()
