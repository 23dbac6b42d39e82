"""The proposing side: makes blocks of guesses for the sessions of verifiers elsewhere, ahead of them."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from kakeya.engine.blend import blend
from kakeya.engine.proposer import DraftRequest, Proposer
from kakeya.errors import InvalidArgument, Unavailable
from kakeya.metrics import ProposerMetrics
from kakeya.proposers.guessed import GuessedSession, GuessedTurn
from kakeya.wire import distributed_pb2 as pb

log = logging.getLogger(__name__)

_BLOCK_SECONDS = 0.005  # a block is as long as takes about this: messages cost, and so does reacting late
_MOST_AT_ONCE = 16
_BATCH = 64  # sessions
_IDLE_SECONDS = 1.0  # without a word of its verifier

Send = Callable[[pb.ProposeResponse], None]


@dataclass(frozen=True)
class Desk:
    """Proposers, what there is to say about them, and how much they can do.

    `capacity` sessions have their state in memory; the state of others is made anew when it is needed. Nobody
    is guessed for more than `max_ahead` tokens beyond its history.
    """

    proposers: Sequence[Proposer]
    capacity: int
    max_ahead: int
    vocab_size: int
    tokenizer_digest: str = ""
    model_fingerprint: str = ""
    verifier_fingerprint: str = ""
    held_bytes: int = 0

    @property
    def name(self) -> str:
        return "+".join(proposer.name for proposer in self.proposers)

    @property
    def chains(self) -> list[bool]:
        """Which of them guess on from their own guesses: those that need to see nothing of the verifier."""
        return [not proposer.hidden_layers for proposer in self.proposers]

    @property
    def hidden_layers(self) -> list[int]:
        return sorted({layer for proposer in self.proposers for layer in proposer.hidden_layers})


class Customer:
    """A verifier's stream. `apply` and `leave` may be called from any thread."""

    def __init__(self, maker: "BlockMaker", send: Send, fail: Callable[[Exception], None]) -> None:
        self._maker, self.send, self.fail = maker, send, fail
        self.sessions: dict[int, GuessedSession] = {}

    def apply(self, request: pb.ProposeRequest) -> None:
        """Do what a message says, soon and in order. What is wrong with it goes to `fail`."""
        self._maker.post(lambda: self._maker.apply(self, request))

    def caught_up(self) -> "Future[None]":
        """Done when all that was posted so far is done."""
        done: Future[None] = Future()
        self._maker.post(lambda: done.set_result(None))
        return done

    def leave(self) -> None:
        """Free all sessions."""
        self._maker.post(lambda: self._maker.part(self))


class BlockMaker:
    """One thread owns the proposers. It does what verifiers say, and guesses in between, for whoever has the
    fewest guesses first."""

    def __init__(self, desk: Desk, metrics: ProposerMetrics | None = None) -> None:
        self.desk = desk
        self._metrics = metrics or ProposerMetrics()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._customers: list[Customer] = []
        self._stopping = False
        self._seconds_per_token = 0.0
        self.ended: Future[str | None] = Future()
        self.ended.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, name="kakeya-proposer", daemon=True)

    def start(self) -> "BlockMaker":
        self._metrics.watch(lambda: len(self._customers), lambda: len(self._sessions()))
        self._thread.start()
        return self

    def join(self, send: Send, fail: Callable[[Exception], None]) -> Customer:
        """A new stream; both are called on the maker's thread, and must return at once."""
        customer = Customer(self, send, fail)
        self.post(lambda: self._customers.append(customer))
        return customer

    def load(self) -> pb.Load:
        """What it does at this moment, as far as another thread can tell."""
        sessions = self._sessions()
        return pb.Load(
            sessions=len(sessions),
            capacity=self.desk.capacity,
            busy_sessions=sum(self._room(session) > 0 for session in sessions),
            seconds_per_token=self._seconds_per_token,
        )

    # What a server process wants of whatever it serves.

    def drain(self, timeout: float | None = None) -> bool:
        """Nothing has to end: whoever loses a proposer goes on without it."""
        return True

    def close(self) -> None:
        """Stop the thread. May be called again."""
        self._stopping = True
        self.post(lambda: None)
        if self._thread.ident is not None:
            self._thread.join()

    def check_alive(self) -> None:
        """Raises Unavailable when the thread has died."""
        reason = self.ended.result() if self.ended.done() else None
        if reason is not None:
            raise Unavailable(reason)

    def post(self, work: Callable[[], None]) -> None:
        """Have something done on the thread, soon and in order."""
        self._inbox.put(work)

    # On the thread.

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._answer(wait=not self._make_blocks())
        except BaseException:
            log.critical("the proposer died", exc_info=True)
            self.ended.set_result("the proposer died; its log says why")
            for customer in self._customers:
                customer.fail(Unavailable("the proposer died"))
        else:
            self.ended.set_result(None)

    def _answer(self, *, wait: bool) -> None:
        """Do all that is posted; with `wait`, sleep until there is something."""
        try:
            while True:
                self._inbox.get(block=wait)()
                wait = False
        except queue.Empty:
            return

    def apply(self, customer: Customer, request: pb.ProposeRequest) -> None:
        """Do what a message says. A stream that makes no sense is ended, and its sessions with it."""
        try:
            self._change(customer, request)
        except Exception as error:  # one of a proposer's own is told as INTERNAL, and logged there
            self.part(customer)
            customer.fail(error)

    def part(self, customer: Customer) -> None:
        """A stream is over. May be called again."""
        for session in customer.sessions.values():
            with suppress(Exception):  # it may be what has failed
                session.give_back()
        customer.sessions = {}
        self._customers = [each for each in self._customers if each is not customer]

    def _change(self, customer: Customer, request: pb.ProposeRequest) -> None:
        kind, session_id = request.WhichOneof("change"), request.session_id
        if kind in ("open", "fork"):
            if session_id in customer.sessions:
                raise InvalidArgument(f"there is a session {session_id} already")
            session = GuessedSession(session_id, customer.send, self.desk.chains)
            if kind == "fork":
                self._copy(_found(customer, request.fork.from_session_id), session)
            customer.sessions[session_id] = session
            return
        if kind == "drop":
            if session_id in customer.sessions:  # it may have been refused
                customer.sessions.pop(session_id).give_back()
            return
        session = _found(customer, session_id)
        if kind == "commit":
            self._commit(session, request.commit)
        elif kind == "observe":
            self._observe(session, request.observe)
        elif kind == "rollback":
            session.epoch = request.rollback.epoch
            session.wanted = 0
            self._metrics.discarded(session.rollback(request.rollback.length))
        else:
            raise InvalidArgument(f"a message for session {session_id} says nothing that is known here")

    def _copy(self, original: GuessedSession, copy: GuessedSession) -> None:
        copy.tokens, copy.told, copy.turn = original.tokens[: original.told], original.told, original.turn
        if original.states is not None and self._holders() < self.desk.capacity:
            copy.states = [state.fork() for state in original.states]
            for state, chains in zip(copy.states, self.desk.chains, strict=True):
                if chains:
                    state.rollback(copy.told)

    def _commit(self, session: GuessedSession, commit: pb.Commit) -> None:
        if commit.token_ids and max(commit.token_ids) >= self.desk.vocab_size:
            self._refuse(session, f"its vocabulary has {self.desk.vocab_size} tokens, and an id is beyond it")
            return
        if commit.HasField("turn"):
            session.turn = GuessedTurn.of(commit.turn)
        self._metrics.told(len(commit.token_ids))
        self._metrics.discarded(session.commit(commit.start, commit.token_ids))
        session.epoch, session.wanted = commit.epoch, commit.wanted
        session.used = time.monotonic()

    def _observe(self, session: GuessedSession, seen: pb.Observe) -> None:
        """Show the proposers hidden states once those of all layers are there."""
        if seen.layer not in self.desk.hidden_layers:
            raise InvalidArgument(f"layer {seen.layer} was not asked for")
        values = torch.frombuffer(bytearray(seen.values), dtype=torch.bfloat16)
        if not seen.rows or values.numel() % seen.rows:
            raise InvalidArgument(f"{values.numel()} values are not {seen.rows} rows")
        layers = session.seen.setdefault(seen.start, {})
        layers[seen.layer] = values.float().view(seen.rows, -1)
        if len(layers) == len(self.desk.hidden_layers):
            del session.seen[seen.start]
            if self._has_states(session):
                self._show(session, seen.start, layers)

    def _show(self, session: GuessedSession, start: int, layers: Mapping[int, Tensor]) -> None:
        assert session.states is not None
        for proposer, state in zip(self.desk.proposers, session.states, strict=True):
            if proposer.hidden_layers:
                proposer.observe(state, start, {layer: layers[layer] for layer in proposer.hidden_layers})

    def _refuse(self, session: GuessedSession, reason: str) -> None:
        session.give_back()
        session.wanted = 0
        session.send(pb.ProposeResponse(session_id=session.session_id, refused=pb.Refused(reason=reason)))

    # Guessing.

    def _sessions(self) -> list[GuessedSession]:
        return [session for each in list(self._customers) for session in list(each.sessions.values())]

    def _holders(self) -> int:
        return sum(session.states is not None for session in self._sessions())

    def _room(self, session: GuessedSession) -> int:
        """How many more tokens to guess for it."""
        if session.tries > len(session.tokens) or not session.told:
            return 0
        return min(session.wanted, self.desk.max_ahead) - session.ahead

    def _make_blocks(self) -> bool:
        """Guess a little for those that have the fewest guesses; whether there was anybody to guess for."""
        ready = [session for session in self._sessions() if self._room(session) > 0]
        ready.sort(key=lambda session: session.ahead)
        batch = served = list(filter(self._has_states, ready[: min(_BATCH, self.desk.capacity)]))
        for place in range(len(self.desk.proposers)):
            batch = self._ask(place, batch)
        for session in batch:  # nobody has a guess: whoever still reads a history is asked again
            reads_on = any(not proposer.is_free for proposer in self.desk.proposers)
            session.tries = session.tries + 1 if reads_on else len(session.tokens) + 1
        return bool(served)

    def _ask(self, place: int, batch: Sequence[GuessedSession]) -> list[GuessedSession]:
        """Send what the proposer at `place` guesses. Returns those that it has no guess for."""
        proposer = self.desk.proposers[place]
        asked = [each for each in batch if not proposer.hidden_layers or not each.ahead]
        if not asked:
            return list(batch)
        began = time.perf_counter()
        try:
            found = proposer.propose([self._draft_request(place, session) for session in asked])
        except Exception:
            log.exception("the proposer %s failed", proposer.name)
            for session in asked:
                self._refuse(session, f"the proposer {proposer.name} failed")
            return [each for each in batch if each not in asked]
        seconds, without = time.perf_counter() - began, [each for each in batch if each not in asked]
        longest = max(map(len, found))
        if longest and not proposer.is_free:
            self._seconds_per_token = blend(self._seconds_per_token, seconds / longest)
        for session, guess in zip(asked, found, strict=True):
            if guess:
                self._send(session, proposer.name, guess)
            else:
                without.append(session)
        return without

    def _draft_request(self, place: int, session: GuessedSession) -> DraftRequest:
        assert session.states is not None
        proposer, turn, room = self.desk.proposers[place], session.turn, self._room(session)
        if not proposer.hidden_layers:
            room = min(room, self._at_once(proposer))
        limit = min(room, proposer.max_draft)
        return DraftRequest(
            session.states[place], session.tokens, limit, turn.sampling, turn.prompt_length, turn.prediction
        )

    def _at_once(self, proposer: Proposer) -> int:
        if proposer.is_free or not self._seconds_per_token:
            return _MOST_AT_ONCE if proposer.is_free else 1
        return max(1, min(_MOST_AT_ONCE, round(_BLOCK_SECONDS / self._seconds_per_token)))

    def _send(self, session: GuessedSession, name: str, guess: Sequence[int]) -> None:
        block = pb.Block(epoch=session.epoch, position=len(session.tokens), token_ids=guess)
        session.tokens.extend(guess)
        session.tries = 0
        self._metrics.guessed(name, len(guess))
        session.send(pb.ProposeResponse(session_id=session.session_id, block=block))

    def _has_states(self, session: GuessedSession) -> bool:
        """Make sure that proposers have a state for it; False where there is no room.

        Who was used longest ago gives its own back, but nobody who is in use: to read histories again and
        again would help none.
        """
        if session.states is not None:
            return True
        if self._holders() >= self.desk.capacity:
            idle = [each for each in self._sessions() if each.states is not None and self._is_idle(each)]
            if not idle:
                return False
            min(idle, key=lambda each: each.used).give_back()
        session.states = [proposer.new_state() for proposer in self.desk.proposers]
        return True

    def _is_idle(self, session: GuessedSession) -> bool:
        return self._room(session) <= 0 and time.monotonic() - session.used > _IDLE_SECONDS


def _found(customer: Customer, session_id: int) -> GuessedSession:
    if session_id not in customer.sessions:
        raise InvalidArgument(f"there is no session {session_id}")
    return customer.sessions[session_id]
