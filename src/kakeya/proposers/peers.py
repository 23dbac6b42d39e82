"""Proposers at addresses: which of them fit and answer, which is the nearest, and the line to that one.

Nothing here is waited for by the engine. A thread keeps looking at the addresses, and another one reads what
comes over the line.
"""

import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from kakeya.config import Calling
from kakeya.dialing import Keepalive, Retry, dial, tls_to
from kakeya.engine.blend import blend
from kakeya.errors import ConfigError
from kakeya.wire import distributed_pb2 as pb, distributed_pb2_grpc

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 3.0
_LOOKS = 3  # round trips of which the shortest counts
_LOOK_AGAIN_SECONDS = 30.0  # at the others, while one is in use
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 30.0
_DISTRUST_SECONDS = 60.0  # after a peer that does not fit, or told nonsense
_NEARER = 0.7  # of the round trip: for less nobody moves
_MOST_UNSENT = 4096  # messages
# Its own, so that pauses neither follow a program's seed nor disturb it.
_JITTER = random.Random()


@dataclass(frozen=True)
class Verifier:
    """Whom peers guess for."""

    name: str
    tokenizer_digest: str
    fingerprint: str

    def refusal_of(self, peer: pb.DescribeResponse) -> str | None:
        """Why a peer cannot guess for it; None where it can."""
        if peer.tokenizer_digest not in ("", self.tokenizer_digest):
            return (
                f"its tokenizer differs from that of {self.name} (digest {peer.tokenizer_digest[:12]}, not "
                f"{self.tokenizer_digest[:12]}), so the same ids stand for other texts"
            )
        if peer.verifier_fingerprint not in ("", self.fingerprint):
            return (
                f"it guesses only for a model with fingerprint {peer.verifier_fingerprint[:12]}, and "
                f"{self.name} has {self.fingerprint[:12]}"
            )
        return None


class Line:
    """A stream to one peer. The engine sends, a thread of its own reads; `arrived` is what came, and when."""

    def __init__(self, address: str, stub: Any, metadata: Any, changed: threading.Event) -> None:
        self.address = address
        self.arrived: deque[tuple[float, pb.ProposeResponse]] = deque()
        self.turnaround = 0.0  # seconds from a commit to the first block that knows of it; 0: not known yet
        self.block_tokens = 0.0  # of that block
        self.is_silent = False  # since a block was waited for in vain
        self.last_session_id = 0
        self.is_open = True
        self.is_distrusted = False
        self._changed = changed
        self._bell = threading.Event()
        self._outgoing: queue.SimpleQueue[pb.ProposeRequest | None] = queue.SimpleQueue()
        self._call = stub.Propose(iter(self._outgoing.get, None), metadata=metadata)
        self._reader = threading.Thread(target=self._read, name=f"kakeya-line-{address}", daemon=True)
        self._reader.start()

    def send(self, session_id: int, **change: Any) -> None:
        """Queue a message. Never waits; a peer that takes nothing any more is given up."""
        if self._outgoing.qsize() > _MOST_UNSENT:
            self._give_up("it takes no messages")
        if self.is_open:
            self._outgoing.put(pb.ProposeRequest(session_id=session_id, **change))

    def new_session_id(self) -> int:
        self.last_session_id += 1
        return self.last_session_id

    def hush(self) -> None:
        """From now on `wait` waits for something new. Look at what has arrived after this, not before."""
        self._bell.clear()

    def wait(self, seconds: float) -> None:
        """Until something has arrived since `hush`, or the line has ended."""
        self._bell.wait(seconds)

    def answered(self, seconds: float, tokens: int) -> None:
        """The first block after a commit came so long after it, with so many tokens."""
        self.is_silent = False
        self.turnaround = blend(self.turnaround, seconds)
        self.block_tokens = blend(self.block_tokens, tokens)

    def is_late(self, seconds: float) -> None:
        """A block was waited for in vain. Nobody waits until one comes, and until they come sooner."""
        self.is_silent = True
        self.turnaround = max(self.turnaround, seconds)

    def distrust(self, why: str) -> None:
        """The peer told nonsense: no more of it for a while."""
        self.is_distrusted = True
        self._give_up(why)

    def close(self) -> None:
        """End the stream, and with it the sessions at the peer. May be called again."""
        self.is_open = False
        self._outgoing.put(None)
        self._call.cancel()
        self._changed.set()
        self._bell.set()

    def join(self) -> None:
        self._reader.join()

    def _give_up(self, why: str) -> None:
        if self.is_open:
            log.warning("the proposer at %s is left: %s; sessions go on without it", self.address, why)
            self.close()

    def _read(self) -> None:
        try:
            for response in self._call:
                self.arrived.append((time.perf_counter(), response))
                self._bell.set()
            self._give_up("it ended the stream")
        except grpc.RpcError as error:  # also for bytes that are no message
            self._give_up(f"{error.code().name}: {error.details()}")


@dataclass
class Peer:
    """An address, and what is known of who answers there. It has a `round_trip` while it can be used."""

    address: str
    channel: grpc.Channel
    round_trip: float | None = None
    failures: int = 0
    due: float = 0.0
    last_fault: str = ""
    described: pb.DescribeResponse | None = field(default=None, repr=False)

    def look(self, metadata: Any, looks: int = _LOOKS) -> None:
        """Ask what it is, and measure the round trip. Raises grpc.RpcError."""
        describe = distributed_pb2_grpc.CapabilityServiceStub(self.channel).Describe
        shortest = _ANSWER_SECONDS
        for _ in range(looks):
            began = time.perf_counter()
            self.described = describe(pb.DescribeRequest(), timeout=_ANSWER_SECONDS, metadata=metadata)
            shortest = min(shortest, time.perf_counter() - began)
        self.round_trip, self.failures, self.last_fault = shortest, 0, ""
        self.due = time.monotonic() + _LOOK_AGAIN_SECONDS

    def failed(self, fault: str, pause: float | None = None) -> None:
        """It cannot be used. Tried again after a pause that doubles each time, or after the one given."""
        if fault and fault != self.last_fault:
            log.warning("the proposer at %s cannot be used: %s; it is tried again", self.address, fault)
        self.round_trip, self.last_fault = None, fault
        longest = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(self.failures, 16))
        self.failures += 1
        self.due = time.monotonic() + (pause or longest * _JITTER.uniform(0.5, 1.0))


class Peers:
    """All addresses. `line` is to the nearest peer that fits; None while there is none."""

    def __init__(self, addresses: Sequence[str], verifier: Verifier, calling: Calling) -> None:
        """Looks at all addresses. Raises ConfigError for a peer that does not fit.

        Who does not answer is tried again in the background.
        """
        self._verifier = verifier
        key = calling.api_key
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self._tls = tls_to(calling.authority, calling.cert, calling.key)
        self._peers = [self._peer(address) for address in addresses]
        self._listed = frozenset(addresses)
        self.line: Line | None = None
        self.hidden_layers: tuple[int, ...] = ()
        self._closed = False
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="kakeya-peers", daemon=True)
        try:
            self._first_look()
        except ConfigError:
            self._close_channels()
            raise
        self._choose()
        self._thread.start()

    def learn(self, addresses: Sequence[str]) -> None:
        """Look at these from now on, and no more at others once they do not answer. From any thread.

        None at all tells nothing: whoever lists them has begun anew.
        """
        listed = frozenset(addresses)
        if listed and listed != self._listed:
            self._listed = listed
            self._changed.set()

    def close(self) -> None:
        """End the line and stop looking. May be called again."""
        self._closed = True
        self._changed.set()
        self._thread.join()
        if self.line is not None:
            self.line.close()
            self.line.join()
        self._close_channels()

    def _close_channels(self) -> None:
        for peer in self._peers:
            peer.channel.close()

    def _first_look(self) -> None:
        """At all of them at once."""
        looks = [threading.Thread(target=self._look_or_fail, args=(peer,)) for peer in self._peers]
        for look in looks:
            look.start()
        for look in looks:
            look.join()
        found = [peer.described for peer in self._peers if peer.described is not None]
        self.hidden_layers = tuple(sorted({layer for each in found for layer in each.hidden_layers}))
        for peer in self._peers:
            refusal = self._refusal(peer)
            if refusal is not None:
                raise ConfigError(f"the proposer at {peer.address} cannot be used: {refusal}")

    def _refusal(self, peer: Peer) -> str | None:
        if peer.described is None:
            return peer.last_fault if peer.last_fault.startswith(tuple(_MEANINGS.values())) else None
        unseen = set(peer.described.hidden_layers) - set(self.hidden_layers)
        if unseen:
            return (
                f"it wants to see layers {sorted(unseen)}, and this server was started without it: "
                "start it again"
            )
        return self._verifier.refusal_of(peer.described)

    def _look_or_fail(self, peer: Peer) -> None:
        try:
            peer.look(self._metadata, 1 if self.line is not None else _LOOKS)
        except grpc.RpcError as error:
            peer.described = None
            meaning = _MEANINGS.get(error.code())
            fault, pause = f"{error.code().name}: {error.details()}", None
            peer.failed(*(meaning, _DISTRUST_SECONDS) if meaning else (fault, pause))

    def _peer(self, address: str) -> Peer:
        return Peer(address, dial(address, self._tls, Retry(), Keepalive()))

    # The thread that keeps looking.

    def _keep(self) -> None:
        while not self._closed:
            self._changed.wait(self._next_due())
            self._changed.clear()
            if not self._closed:
                self._note_broken_line()
                self._meet()
                for peer in self._peers:
                    if peer.due <= time.monotonic() and not self._closed:
                        self._look_again(peer)
                self._choose()

    def _meet(self) -> None:
        """Those that were learnt of come, and those go that are listed no more and do not answer."""
        listed, used = self._listed, None if self.line is None else self.line.address
        gone = [
            peer
            for peer in self._peers
            if peer.address not in listed and peer.round_trip is None and peer.address != used
        ]
        known = {peer.address for peer in self._peers}
        come = [self._peer(address) for address in sorted(listed - known)]
        self._peers = [*(peer for peer in self._peers if peer not in gone), *come]
        for peer in gone:
            peer.channel.close()

    def _next_due(self) -> float:
        return max(0.0, min(peer.due for peer in self._peers) - time.monotonic())

    def _look_again(self, peer: Peer) -> None:
        self._look_or_fail(peer)
        refusal = self._refusal(peer) if peer.round_trip is not None else None
        if refusal is not None:
            peer.failed(refusal, _DISTRUST_SECONDS)

    def _note_broken_line(self) -> None:
        line = self.line
        if line is None or line.is_open:
            return
        self.line = None
        peer = self._peer_of(line)
        peer.failures = max(peer.failures, 1)  # one that answers and then breaks off is not tried at once
        peer.failed("", _DISTRUST_SECONDS if line.is_distrusted else None)

    def _choose(self) -> None:
        """Move to the nearest, if it is much nearer than the one in use."""
        usable = [peer for peer in self._peers if peer.round_trip is not None]
        nearest = min(usable, key=lambda peer: peer.round_trip or 0.0, default=None)
        if nearest is None:
            return
        if self.line is not None and self.line.is_open:
            mine = self._peer_of(self.line)
            assert nearest.round_trip is not None
            if mine.round_trip is not None and nearest.round_trip > _NEARER * mine.round_trip:
                return
            self.line.close()
        stub = distributed_pb2_grpc.ProposerServiceStub(nearest.channel)
        self.line = Line(nearest.address, stub, self._metadata, self._changed)
        milliseconds = 1000 * (nearest.round_trip or 0.0)
        log.info("the proposer at %s is used, %.1f ms away", nearest.address, milliseconds)

    def _peer_of(self, line: Line) -> Peer:
        return next(peer for peer in self._peers if peer.address == line.address)


_MEANINGS = {
    grpc.StatusCode.UNAUTHENTICATED: "it refuses our key (proposer_api_key)",
    grpc.StatusCode.UNIMPLEMENTED: "whoever listens there is no `kakeya propose`",
}
