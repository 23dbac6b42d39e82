"""Where sessions live: the home of a new one, and the moves of a drain, a rebalance and a scale-in.

Pure functions over small frozen values. The same values give the same plan, in whatever order they come.
Nothing here moves anything, and no plan moves a session that is working.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from kakeya.cluster.replicas import Kind, Move, Plan, Replica, Scaling, Session, Unplaced
from kakeya.errors import (
    ConfigError,
    InvalidArgument,
    KakeyaError,
    ModelNotFound,
    NoFreeSlab,
    SessionNotFound,
    StateMismatch,
    Unavailable,
)

# How much fuller than another a replica must be, as a share of places, before it gives sessions away.
EVEN = 0.1


def choose_home(session: Session, replicas: Iterable[Replica], near: str | None = None) -> Replica:
    """The replica for a new session: free slabs first, then the least load, then the first name.

    `near` names the home of the session that it was forked from: while there is room, the fork stays there,
    else on the same node. Raises ModelNotFound, InvalidArgument (labels), StateMismatch (shape),
    Unavailable (all drain) or NoFreeSlab, and says what is missing.
    """
    every = list(replicas)
    fitting = [each for each in every if each.serves(session) and each.room]
    if not fitting:
        raise _missing(session, every)
    node = next((each.node for each in every if each.name == near), None)
    return min(fitting, key=lambda each: (each.name != near, each.node != node, *_rank(each)))


def place_all(sessions: Iterable[Session], replicas: Iterable[Replica]) -> Plan:
    """A home for each of many sessions, such as those of a dead node, among these replicas.

    Each is chosen as `choose_home` does, after those before it have got theirs. Sessions that fit in few
    places choose first. Room that sessions of several labels compete for may still go to the wrong one: then
    a session is named in `unplaced` though another plan would have had a place for it.
    """
    board = _Board(replicas)
    rooms: dict[Kind, int] = {}
    waiting = list(sessions)
    for each in waiting:
        if each.kind not in rooms:
            rooms[each.kind] = board.room(each)
    moves, unplaced = [], []
    whys: dict[Kind, str] = {}  # where one of a kind has no place, all others have none
    for session in sorted(waiting, key=lambda each: (rooms[each.kind], each.id)):
        best = board.best(session)
        if best is None:
            if session.kind not in whys:
                whys[session.kind] = str(_missing(session, board.now.values()))
            unplaced.append(Unplaced(session.id, whys[session.kind]))
        else:
            moves.append(board.place(session, best.name))
    return Plan(tuple(moves), tuple(unplaced))


def drain(node: str, replicas: Iterable[Replica], sessions: Iterable[Session]) -> Plan:
    """Where each session of a node goes, by `place_all` over the other nodes.

    Raises SessionNotFound for a session whose home is none of the replicas, ConfigError for an unknown node.
    """
    every = {each.name: each for each in replicas}
    nodes = {each.node for each in every.values()}
    if node not in nodes:
        raise ConfigError(f"there is no node {node!r}; there are: {_names(nodes)}")
    mine = [each for each in sessions if _home(each, every).node == node]
    plan = place_all((each for each in mine if not each.working), _elsewhere(node, every))
    return replace(plan, working=tuple(sorted(each.id for each in mine if each.working)))


def rebalance(
    replicas: Iterable[Replica], sessions: Iterable[Session], *, share: float = 0.05, even: float = EVEN
) -> tuple[Move, ...]:
    """Few moves from the fullest replicas to the emptiest ones of the same model.

    A replica gives a session away if it is fuller than another would be with it, by more than `even`, a share
    of places. At most `share` of the sessions move, of each replica the smallest snapshots first, each once.
    Raises SessionNotFound as `drain` does.
    """
    every = {each.name: each for each in replicas}
    at_home: dict[str, list[Session]] = defaultdict(list)
    for session in sessions:
        at_home[_home(session, every).name].append(session)
    most = int(share * sum(map(len, at_home.values())))
    board = _Board(every.values(), lambda each: (each.next_fill, each.name))
    moves: list[Move] = []
    # A replica that gave sessions away may be where another one's can go, which had found no place before.
    while found := _round_of_moves(board, at_home, most - len(moves), even):
        moves += found
        gone = {move.session for move in found}
        for name in {move.source for move in found}:
            at_home[name] = [each for each in at_home[name] if each.id not in gone]
    return tuple(moves)


def _round_of_moves(
    board: "_Board", at_home: Mapping[str, list[Session]], most: int, even: float
) -> list[Move]:
    """Moves from the fullest replica at each moment, until each has found no better place once."""
    donors = [(-board.now[name].fill, name) for name in at_home if not board.now[name].draining]
    heapq.heapify(donors)
    movable: dict[str, list[Session]] = {}
    moves: list[Move] = []
    while donors and len(moves) < most:
        name = heapq.heappop(donors)[1]
        if name not in movable:
            movable[name] = _movable(board, board.now[name], at_home[name], even)
        move = _relief(board, board.now[name], movable[name], even)
        if move is not None:
            moves.append(move)
            heapq.heappush(donors, (-board.now[name].fill, name))
    return moves


def _movable(board: "_Board", donor: Replica, at_home: list[Session], even: float) -> list[Session]:
    """Sessions that a replica may give away, the largest first; in the end there are none of most."""
    idle = [each for each in at_home if not each.working]
    kinds = {each.kind: each for each in idle}
    hopeful = {kind for kind, each in kinds.items() if _better_home(board, donor, each, even) is not None}
    if not hopeful:
        return []
    return sorted((e for e in idle if e.kind in hopeful), key=lambda each: (-each.bytes, each.id))


def _relief(board: "_Board", donor: Replica, movable: list[Session], even: float) -> Move | None:
    """The next move away from a replica; those of `movable` that have nowhere to go are taken out."""
    hopeless: set[Kind] = set()
    while movable:
        session = movable.pop()
        if session.kind in hopeless:
            continue
        best = _better_home(board, donor, session, even)
        if best is not None:
            return board.place(session, best.name)
        hopeless.add(session.kind)
    return None


def _better_home(board: "_Board", donor: Replica, session: Session, even: float) -> Replica | None:
    """The emptiest replica for a session, if it stays emptier than the donor by more than `even`."""
    best = board.best(session)
    return best if best is not None and donor.fill - best.next_fill > even else None


def node_to_remove(
    replicas: Iterable[Replica], sessions: Iterable[Session], spared: Iterable[str] = ()
) -> str | None:
    """The node that costs the fewest bytes to empty, if all its sessions have a place elsewhere; else None.

    Working sessions count as if they could move: they will when they are done. Nodes that drain already and
    those of `spared` are left alone. Raises SessionNotFound as `drain` does.
    """
    every = {each.name: each for each in replicas}
    kept = {*spared, *(each.node for each in every.values() if each.draining)}
    on_node: dict[str, list[Session]] = {each.node: [] for each in every.values() if each.node not in kept}
    for session in sessions:
        node = _home(session, every).node
        if node in on_node:
            on_node[node].append(session)
    costs = {node: sum(each.bytes for each in mine) for node, mine in on_node.items()}
    for node in sorted(on_node, key=lambda each: (costs[each], each)):
        if not place_all(on_node[node], _elsewhere(node, every)).unplaced:
            return node
    return None


def wanted_replicas(replicas: Iterable[Replica], queue_s: float, scaling: Scaling | None = None) -> int:
    """How many replicas a group that serves one model should have; draining ones count as gone.

    Enough replicas of the present average size for the slabs in use and the sessions held, with a share free.
    More than there are, but at most twice as many, while requests wait too long: `queue_s` is how long.
    """
    rules = scaling or Scaling()
    group = [each for each in replicas if not each.draining]
    if not group:
        return rules.fewest
    used = sum(each.slabs - each.free_slabs for each in group)
    taken = [
        (used, sum(each.slabs for each in group)),
        (sum(each.sessions for each in group), sum(each.most_sessions for each in group)),
    ]
    fullest = max(part / whole if whole else 0.0 for part, whole in taken)
    wanted = math.ceil(round(len(group) * fullest / (1 - rules.free_share), 9))
    if queue_s > rules.longest_queue_s:
        wanted = max(wanted, math.ceil(len(group) * min(2.0, queue_s / rules.longest_queue_s)))
    return min(rules.most, max(rules.fewest, wanted))


Rank = tuple[float | bool | str, ...]


def _rank(replica: Replica) -> Rank:
    """The first is chosen. It only grows while a replica gets sessions, on which `_Board` relies."""
    return (replica.free_slabs == 0, replica.load, replica.name)


class _Board:
    """Replicas while a plan is made: `now` has each with the sessions that the plan has given it.

    For each kind of session there is a heap of the replicas that serve it. Ranks in it may be old,
    but never too high: one that is found to be old is written anew, and a replica that loses a session
    enters each heap once more.
    """

    def __init__(self, replicas: Iterable[Replica], rank: Callable[[Replica], Rank] = _rank) -> None:
        self.now = {each.name: each for each in replicas}
        self._rank = rank
        self._ranks = {each.name: rank(each) for each in self.now.values()}
        self._heaps: dict[Kind, list[tuple[Rank, str]]] = {}

    def best(self, session: Session) -> Replica | None:
        """The first by rank that serves the session and has room."""
        heap = self._heap(session)
        while heap:
            rank, name = heap[0]
            replica, present = self.now[name], self._ranks[name]
            if not replica.room:
                heapq.heappop(heap)
            elif rank == present:
                return replica
            else:
                heapq.heapreplace(heap, (present, name))
        return None

    def place(self, session: Session, target: str) -> Move:
        """Give the session to a replica, and take it from its home if that is on the board."""
        source = session.home or ""
        self._put(self.now[target].with_session())
        if source in self.now:
            self._put(self.now[source].without_session())
            self._enter_again(source)
        return Move(session.id, source, target, session.bytes)

    def _put(self, replica: Replica) -> None:
        self.now[replica.name] = replica
        self._ranks[replica.name] = self._rank(replica)

    def _enter_again(self, name: str) -> None:
        replica = self.now[name]
        for kind, heap in self._heaps.items():
            if replica.room and replica.has(kind):
                heapq.heappush(heap, (self._ranks[name], name))

    def room(self, session: Session) -> int:
        """How many places there are for sessions of this kind."""
        return sum(self.now[name].room for name in {name for _, name in self._heap(session)})

    def _heap(self, session: Session) -> list[tuple[Rank, str]]:
        kind = session.kind
        if kind not in self._heaps:
            fitting = (each for each in self.now.values() if each.serves(session) and each.room)
            self._heaps[kind] = [(self._ranks[each.name], each.name) for each in fitting]
            heapq.heapify(self._heaps[kind])
        return self._heaps[kind]


def _home(session: Session, replicas: Mapping[str, Replica]) -> Replica:
    if session.home is None or session.home not in replicas:
        raise SessionNotFound(f"the home of session {session.id}, {session.home}, is none of the replicas")
    return replicas[session.home]


def _elsewhere(node: str, replicas: Mapping[str, Replica]) -> list[Replica]:
    return [each for each in replicas.values() if each.node != node]


def _missing(session: Session, replicas: Iterable[Replica]) -> KakeyaError:
    """Why no replica fits, as an error to raise."""
    every = list(replicas)
    of_model = [each for each in every if each.model == session.model]
    if not of_model:
        models = _names(each.model for each in every)
        return ModelNotFound(f"no replica serves the model {session.model!r}; there are: {models}")
    shaped = [each for each in of_model if session.shape in ("", each.shape)]
    if not shaped:
        return StateMismatch(
            f"no replica of {session.model} beside its own has the weights and the window of the session"
        )
    labelled = [each for each in shaped if each.serves(session)]
    if not labelled:
        found = _names(",".join(sorted(each.labels)) or "none" for each in of_model)
        wanted = ",".join(sorted(session.labels))
        return InvalidArgument(f"no replica of {session.model} has the labels {wanted}; there are: {found}")
    if all(each.draining for each in labelled):
        return Unavailable(f"all replicas that would fit are draining: {_names(e.name for e in labelled)}")
    places = sum(each.most_sessions for each in labelled if not each.draining)
    wanted = f" with labels {','.join(sorted(session.labels))}" if session.labels else ""
    return NoFreeSlab(f"all {places} places of replicas of {session.model}{wanted} are taken")


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names))) or "none"
