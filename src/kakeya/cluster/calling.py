"""Calls to homes from threads: signs of life, moves, and a whole drain."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from kakeya.cluster.members import CHANNEL, credentials, replica_of
from kakeya.cluster.placement import Session, drain
from kakeya.errors import KakeyaError, RemoteError, Unavailable
from kakeya.wire import cluster_pb2 as pb, cluster_pb2_grpc

_TIMEOUT_S = 5.0
_MOVE_TIMEOUT_S = 180.0
_PAUSE_S, _AWAY_S = 0.05, 0.5
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


class Draining:
    """Moves the sessions of a node's homes to homes elsewhere, until none is left that could move.

    `look` gives the cluster as it is now. Can be ended at any time and done again.
    """

    def __init__(
        self,
        look: Callable[[], pb.View],
        secret: str,
        patience_s: float = 600.0,
        progress: Callable[[int, int], None] = lambda moved, left: None,
    ) -> None:
        self._look = look
        self._secret = secret
        self._patience_s = patience_s
        self._progress = progress

    def run(self, node: str) -> Drained:
        """Raises Unavailable when sessions are still there after the patience, with the reason."""
        began, moved, size = time.monotonic(), 0, 0
        while True:
            view = self._look()
            homes = {home.name: home for home in view.homes}
            sources = [home for home in homes.values() if home.node == node]
            if not sources:  # they died, and came back elsewhere with their sessions
                return Drained(moved, size, time.monotonic() - began, 0)
            try:
                sessions = [each for home in sources for each in self._sessions(home)]
            except Unavailable:  # a home that has died is back in a moment, with its sessions
                if time.monotonic() - began > self._patience_s:
                    raise
                time.sleep(_AWAY_S)
                continue
            left = len(sessions)
            if not left and time.monotonic() - began >= _ALL_KNOW_S:
                held = sum(home.held_sessions for home in sources)
                return Drained(moved, size, time.monotonic() - began, held)
            ready = [replica_of(home) for home in homes.values() if not home.silent or home.node == node]
            plan = drain(node, ready, sessions)
            why = plan.unplaced[0].why if plan.unplaced else "they work all the time"
            for move in plan.moves:
                with HomeCalls(homes[move.source].address, self._secret) as source:
                    took = _settled(source.move, move.session, homes[move.target])
                if took is not None:
                    moved, size, left = moved + 1, size + took, left - 1
                    self._progress(moved, left)
            if time.monotonic() - began > self._patience_s:
                raise Unavailable(f"{left} sessions of node {node!r} have not moved: {why}")
            time.sleep(_PAUSE_S)

    def _sessions(self, home: pb.Home) -> Iterable[Session]:
        with HomeCalls(home.address, self._secret) as calls:
            found = calls.movable()
        return [
            Session(name, home.model, home.session_bytes, frozenset(), home.name, working)
            for name, working in found.items()
        ]


def _settled(move: Callable[[str, pb.Home], int | None], session: str, target: pb.Home) -> int | None:
    """The bytes of a move. Of one that nobody knows about, the next look tells."""
    try:
        return move(session, target)
    except Unavailable:
        return None


def _translated(address: str, error: Any) -> KakeyaError:
    code = error.code()
    unknown = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
    told = Unavailable if code in unknown else RemoteError
    found = told(f"the home at {address}: {error.details() or code.name}")
    found.status = code
    return found
