"""Calls to homes from threads: signs of life, moves, a whole drain, and what evens homes out."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import grpc

from kakeya.cluster.members import CHANNEL, credentials, replica_of
from kakeya.cluster.placement import EVEN, drain, node_to_remove, rebalance
from kakeya.cluster.replicas import Move, Replica, Session
from kakeya.errors import KakeyaError, RemoteError, Unavailable
from kakeya.wire import cluster_pb2 as pb, cluster_pb2_grpc

_TIMEOUT_S = 5.0
_MOVE_TIMEOUT_S = 180.0
_PAUSE_S, _AWAY_S = 0.05, 0.5
# Moves that travel together, as the arithmetic of the guide has it.
AT_ONCE = 4
# After so long no front end gives a new session to a home that drains.
_ALL_KNOW_S = 2.0


class HomeCalls:
    """One home, called from a thread. Close it, or use it as a context manager."""

    def __init__(self, address: str, secret: str) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, CHANNEL)
        self._stub: Any = cluster_pb2_grpc.HomeServiceStub(self._channel)
        self._metadata = credentials(secret)

    def beat(self, view: pb.View) -> pb.Home:
        """Tell it who is there; how it is. Raises Unavailable when it does not answer."""
        home: pb.Home = self._call(self._stub.Beat, pb.BeatRequest(view=view)).home
        return home

    def movable(self) -> dict[str, bool]:
        """Its sessions that could live elsewhere, and whether each generates."""
        answer = self._call(self._stub.ListMovable, pb.ListMovableRequest())
        return {each.session_id: each.working for each in answer.sessions}

    def documents(self) -> int:
        """How many responses and conversations are stored there."""
        kept: int = self._call(self._stub.ListMovable, pb.ListMovableRequest()).documents
        return kept

    def move(self, session_id: str, target: pb.Home) -> int | None:
        """Let it hand a session over; how many bytes that took, or None when it generates or is gone.

        Raises Unavailable when nobody knows yet what became of it.
        """
        request = pb.MoveSessionRequest(
            session_id=session_id, target=target.name, target_address=target.address
        )
        try:
            moved: int = self._call(self._stub.MoveSession, request, _MOVE_TIMEOUT_S).bytes
        except RemoteError as error:
            if error.status in (grpc.StatusCode.ABORTED, grpc.StatusCode.NOT_FOUND):
                return None
            raise
        return moved

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "HomeCalls":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(self, method: Any, request: Any, timeout: float = _TIMEOUT_S) -> Any:
        try:
            return method(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _translated(self.address, error) from error


@dataclass(frozen=True)
class Drained:
    """What a drain took."""

    sessions: int
    bytes: int
    seconds: float
    held: int
    """Sessions that HTTP keeps for its clients: they stay with their home, wherever that goes."""


class Moving:
    """Carries moves out, a few at once."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def sessions_at(self, home: pb.Home) -> list[Session]:
        """What could move away from a home. Raises Unavailable when it does not answer."""
        with HomeCalls(home.address, self._secret) as calls:
            found = calls.movable()
        return [
            Session(name, home.model, home.session_bytes, frozenset(), home.name, working, home.shape)
            for name, working in found.items()
        ]

    def documents_at(self, home: pb.Home) -> int:
        """How many responses and conversations a home keeps."""
        with HomeCalls(home.address, self._secret) as calls:
            return calls.documents()

    def carry_out(self, moves: Sequence[Move], homes: Mapping[str, pb.Home]) -> Iterator[int | None]:
        """The bytes of each move as it is done; None for one that did not come about, or that nobody knows
        about: the next look tells."""
        with ExitStack() as stack:
            sources = {
                name: stack.enter_context(HomeCalls(homes[name].address, self._secret))
                for name in {move.source for move in moves}
            }

            def carry(move: Move) -> int | None:
                try:
                    return sources[move.source].move(move.session, homes[move.target])
                except Unavailable:
                    return None

            pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE, "kakeya-move"))
            yield from pool.map(carry, moves)


def node_of(home: pb.Home) -> str:
    return home.node


def name_of(home: pb.Home) -> str:
    """Where homes go one by one: each counts as a node of its own, though some may share a machine."""
    return home.name


class Draining:
    """Moves the sessions of a node's homes to homes elsewhere, until none is left that could move.

    `look` gives the cluster as it is now. `node_of` says which homes are emptied together. Can be ended at
    any time and done again.
    """

    def __init__(
        self,
        look: Callable[[], pb.View],
        secret: str,
        patience_s: float = 600.0,
        progress: Callable[[int, int], None] = lambda moved, left: None,
        node_of: Callable[[pb.Home], str] = node_of,
    ) -> None:
        self._look = look
        self._moving = Moving(secret)
        self._patience_s = patience_s
        self._progress = progress
        self._node_of = node_of

    def run(self, node: str) -> Drained:
        """Raises Unavailable when sessions are still there after the patience, with the reason."""
        began, moved, size = time.monotonic(), 0, 0
        while True:
            homes = {home.name: home for home in self._look().homes}
            sources = [home for home in homes.values() if self._node_of(home) == node]
            if not sources:  # they died, and came back elsewhere with their sessions
                return Drained(moved, size, time.monotonic() - began, 0)
            try:
                sessions = [each for home in sources for each in self._moving.sessions_at(home)]
            except Unavailable:  # a home that has died is back in a moment, with its sessions
                if time.monotonic() - began > self._patience_s:
                    raise
                time.sleep(_AWAY_S)
                continue
            left = len(sessions)
            if not left and time.monotonic() - began >= _ALL_KNOW_S:
                held = sum(home.held_sessions for home in sources)
                return Drained(moved, size, time.monotonic() - began, held)
            plan = drain(node, self._replicas(homes.values(), node), sessions)
            for took in self._moving.carry_out(plan.moves, homes):
                if took is not None:
                    moved, size, left = moved + 1, size + took, left - 1
                    self._progress(moved, left)
            if time.monotonic() - began > self._patience_s:
                why = plan.unplaced[0].why if plan.unplaced else "they work all the time"
                raise Unavailable(f"{left} sessions of {node!r} have not moved: {why}")
            time.sleep(_PAUSE_S)

    def _replicas(self, homes: Iterable[pb.Home], node: str) -> list[Replica]:
        """The homes that give and those that could take."""
        there = [home for home in homes if not home.silent or self._node_of(home) == node]
        return [replace(replica_of(home), node=self._node_of(home)) for home in there]


class Balancing:
    """Moves a few sessions from the fullest homes of a group to the emptiest ones."""

    def __init__(self, secret: str, most: int = 4 * AT_ONCE) -> None:
        self._moving = Moving(secret)
        self._most = most

    def step(self, homes: Iterable[pb.Home]) -> int:
        """How many have moved. Raises Unavailable when a home does not answer."""
        there = {home.name: home for home in homes if not home.silent}
        replicas = {name: replica_of(home) for name, home in there.items()}
        emptiest = min((each.fill for each in replicas.values() if not each.draining), default=1.0)
        full = [name for name, each in replicas.items() if each.fill - emptiest > EVEN]
        sessions = [each for name in full for each in self._moving.sessions_at(there[name])]
        moves = rebalance(replicas.values(), sessions, share=1.0)[: self._most]
        return sum(took is not None for took in self._moving.carry_out(moves, there))


def home_to_end(homes: Iterable[pb.Home], secret: str) -> str | None:
    """The home that costs the fewest bytes to empty, if the others can take all that it has; else None. One
    that keeps responses or conversations, which do not move, is no such home.

    Raises Unavailable when one does not answer.
    """
    moving, there = Moving(secret), [home for home in homes if not home.silent]
    keeping = [home.name for home in there if home.held_sessions or moving.documents_at(home)]
    sessions = [each for home in there for each in moving.sessions_at(home)]
    replicas = [replace(replica_of(home), node=name_of(home)) for home in there]
    return node_to_remove(replicas, sessions, spared=keeping)


def _translated(address: str, error: Any) -> KakeyaError:
    code = error.code()
    unknown = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
    told = Unavailable if code in unknown else RemoteError
    found = told(f"the home at {address}: {error.details() or code.name}")
    found.status = code
    return found
