"""A proposer on another machine. It is told of every commit at once, and guesses ahead.

It goes on while its last guesses are verified, and `propose` takes what has arrived. So nobody waits for the
round trip as long as guesses are right. After a wrong one a block is waited for only if it is known to come
soon enough to pay.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kakeya.engine.blend import blend
from kakeya.engine.proposer import DraftRequest, WorksAhead
from kakeya.proposers.peers import Line, Peers
from kakeya.types import SamplingParams
from kakeya.wire import distributed_pb2 as pb

_UNLIKELY = 0.05  # of a guess to be right: nobody needs to guess on from there
_REMEMBERED = 256  # commits of a session
_MOST_IDS = 2**18  # in a message
_MOST_BYTES = 2**20  # of hidden states in a message


@dataclass(frozen=True)
class _Told:
    """A commit: how long the history was with it, and when it was sent."""

    length: int
    at: float


@dataclass(frozen=True)
class _Awaited:
    """A block: when it should be here, and how many seconds it is worth to wait for it."""

    due: float
    worth: float


class RemoteState:
    """What is known of one session at the far end. `chain` is what it guesses from `base` on."""

    def __init__(self, proposer: "RemoteProposer") -> None:
        self._proposer = proposer
        self.line: Line | None = None
        self.session_id = 0
        self.is_refused = False
        self.told = 0
        self.epoch = 0
        self.answered = 0  # the newest epoch that a block knew of
        self._given_up = 0  # the newest epoch that nobody waits for
        self._commits: dict[int, _Told] = {}
        self._turn: tuple[int, SamplingParams | None] = (0, None)  # the generate that was told of last
        self._base = 0
        self._chain: list[int] = []
        self.left_at = 0.0
        self.step_seconds = 0.0

    # Telling.

    def tell(self, line: Line, request: DraftRequest, wanted: int) -> None:
        """Send what has become history since, if anything has."""
        if self.line is not line or (self.is_refused and self._is_new(request)):
            self.open(line)
        turn = _turn(request) if self._is_new(request) else None
        self._turn = request.prompt_length, request.sampling
        if not self.is_refused and (turn is not None or self.told < len(request.tokens)):
            self._commit(line, request.tokens, wanted, turn)

    def _is_new(self, request: DraftRequest) -> bool:
        """Whether it is of another generate than the last one."""
        return self._turn[0] != request.prompt_length or self._turn[1] is not request.sampling

    def open(self, line: Line) -> None:
        """Begin anew, under another id."""
        if self.line is line:
            line.send(self.session_id, drop=pb.Drop())
        self._enter(line)
        line.send(self.session_id, open=pb.Open())

    def _enter(self, line: Line) -> None:
        self._proposer.enter(self, line)
        self.told = self.epoch = self.answered = self._given_up = 0
        self.is_refused, self._turn, self._commits = False, (0, None), {}
        self._forget()

    def _commit(self, line: Line, tokens: Sequence[int], wanted: int, turn: pb.Turn | None) -> None:
        while True:
            news = tokens[self.told : self.told + _MOST_IDS]
            self.epoch += 1
            is_last = self.told + len(news) == len(tokens)
            commit = pb.Commit(
                epoch=self.epoch, start=self.told, token_ids=news, wanted=wanted if is_last else 0, turn=turn
            )
            line.send(self.session_id, commit=commit)
            self.told += len(news)
            if is_last:
                break
        self._commits[self.epoch] = _Told(self.told, time.perf_counter())
        self._commits.pop(self.epoch - _REMEMBERED, None)

    # Hearing.

    def fault_in(self, block: pb.Block, most: int, vocab_size: int) -> str | None:
        """What no honest peer would send."""
        if block.epoch > self.epoch:
            return f"a block for epoch {block.epoch} of a session that has had {self.epoch}"
        if any(token >= vocab_size for token in block.token_ids):
            return f"a token id beyond the vocabulary of {vocab_size}"
        known = self._commits.get(block.epoch)
        if known is None:
            return None
        if block.position < known.length or block.position + len(block.token_ids) > known.length + most:
            return (
                f"{len(block.token_ids)} tokens from position {block.position} on, where the history had "
                f"{known.length} and at most {most} more were asked for"
            )
        return None

    def take(self, block: pb.Block, at: float, line: Line) -> None:
        """Keep a block if it follows the history as it was told, or what was guessed from there."""
        known = self._commits.get(block.epoch)
        if known is None:  # before a rollback, or long ago
            return
        if block.epoch > self.answered:
            self.answered = block.epoch
            line.answered(at - known.at, len(block.token_ids))
        if block.position == known.length:
            self._base, self._chain = known.length, []
        elif block.position != self._base + len(self._chain):
            return  # it follows guesses that were wrong
        self._chain.extend(block.token_ids)

    def guess(self, tokens: Sequence[int]) -> Sequence[int]:
        """What the chain says after these tokens. One that says otherwise than the tokens is forgotten."""
        past = len(tokens) - self._base
        if self._chain[:past] != list(tokens[self._base : self._base + len(self._chain)]):
            self._forget()
        if past >= len(self._chain):
            return ()
        self._base, self._chain = len(tokens), self._chain[past:]
        return self._chain

    def on_its_way(self, request: DraftRequest, line: Line) -> "_Awaited | None":
        """The next block that is to come and can still be used; None, also where the session has a guess.

        A commit is answered by a block that begins where the history ended then. What has come since must be
        what the block says.
        """
        if self.guess(request.tokens):
            return None
        for epoch, told in self._commits.items():
            behind = len(request.tokens) - told.length
            left = round(line.block_tokens) - behind
            if epoch > max(self.answered, self._given_up) and left > 0:
                return _Awaited(told.at + line.turnaround, request.worth(left) * request.chance**behind)
        return None

    def give_up(self) -> None:
        """Nobody waits for an answer to what was told so far."""
        self._given_up = self.epoch

    def _forget(self) -> None:
        self._base, self._chain = -1, []

    # The session.

    def show(self, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Send hidden states, some rows at a time."""
        line = self.line
        if line is None or self.is_refused:
            return
        rows, width = next(iter(hidden.values())).shape
        at_once = max(1, _MOST_BYTES // (2 * width))
        for first in range(0, rows, at_once):
            for layer, values in hidden.items():
                part = values[first : first + at_once].to("cpu", torch.bfloat16).contiguous()
                data = part.view(torch.uint8).numpy().tobytes()
                seen = pb.Observe(layer=layer, start=start + first, rows=len(part), values=data)
                line.send(self.session_id, observe=seen)

    def fork(self) -> "RemoteState":
        twin, line = RemoteState(self._proposer), self.line
        if line is not None and line.is_open and not self.is_refused:
            twin._enter(line)
            line.send(twin.session_id, fork=pb.Fork(from_session_id=self.session_id))
            twin.told = self.told
        return twin

    def rollback(self, length: int) -> None:
        if self.line is None or (self.told <= length and not self._proposer.hidden_layers):
            return  # what it guesses is compared with what comes
        self._forget()
        self.told = min(self.told, length)
        self.epoch += 1
        self._commits.clear()  # blocks that knew them come in vain
        self.line.send(self.session_id, rollback=pb.Rollback(epoch=self.epoch, length=length))

    def export(self) -> Mapping[str, Tensor]:
        return {}  # it is told anew

    def close(self) -> None:
        if self.line is not None:
            self._proposer.leave(self)
            self.line.send(self.session_id, drop=pb.Drop())
            self.line = None


class RemoteProposer(WorksAhead):
    """Guesses of the nearest of some peers. Without any it has none."""

    name = "remote"
    is_free = True

    def __init__(self, peers: Peers, vocab_size: int, max_draft: int, ahead: int) -> None:
        self._peers, self._vocab_size = peers, vocab_size
        self.max_draft, self._ahead = max_draft, ahead
        self.hidden_layers = peers.hidden_layers
        self._states: dict[int, RemoteState] = {}  # by their ids on the line in use
        self._line: Line | None = None

    def new_state(self) -> RemoteState:
        return RemoteState(self)

    def restore(self, tensors: Mapping[str, Tensor]) -> RemoteState:
        return self.new_state()

    def observe(self, state: object, start: int, hidden: Mapping[int, Tensor]) -> None:
        assert isinstance(state, RemoteState)
        line = self._open_line()
        if line is not None:
            if state.line is not line:
                state.open(line)
            state.show(start, hidden)

    def expect(self, request: DraftRequest) -> None:
        line = self._open_line()
        if line is not None:
            state = _state(request)
            state.left_at = 0.0
            state.tell(line, request, self.max_draft)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        line, now = self._open_line(), time.perf_counter()
        if line is None:
            return [()] * len(requests)
        self._take_in(line)
        for request in requests:
            state = _state(request)
            if state.left_at:
                state.step_seconds = blend(state.step_seconds, now - state.left_at)
            state.tell(line, request, self._wanted(request, line, state))
        self._wait_if_it_pays(line, requests)
        now = time.perf_counter()
        for request in requests:
            _state(request).left_at = now
        return [_state(request).guess(request.tokens)[: request.limit] for request in requests]

    def learn(self, addresses: Sequence[str]) -> None:
        self._peers.learn(addresses)

    def close(self) -> None:
        self._peers.close()

    def enter(self, state: RemoteState, line: Line) -> None:
        """A session comes to a line, under a new id."""
        self.leave(state)
        state.line, state.session_id = line, line.new_session_id()
        self._states[state.session_id] = state

    def leave(self, state: RemoteState) -> None:
        """A session goes from the line that it is on."""
        if state.line is self._line:
            self._states.pop(state.session_id, None)

    def _open_line(self) -> Line | None:
        """The line in use. Sessions come to a new one when they are next asked for."""
        line = self._peers.line
        if line is not self._line:
            self._line, self._states = line, {}
        return line if line is not None and line.is_open else None

    def _wanted(self, request: DraftRequest, line: Line, state: RemoteState) -> int:
        """How far beyond the history to guess: a draft, and what is needed until the next block can come."""
        if not self._ahead:
            return request.limit
        steps = 1 + (line.turnaround / state.step_seconds if state.step_seconds else 0.0)
        needed = request.limit + min(self._ahead, math.ceil((request.limit + 1) * steps))
        likely = math.ceil(math.log(_UNLIKELY) / math.log(min(max(request.chance, 0.01), 0.99)))
        return min(needed, max(request.limit, likely))

    def _take_in(self, line: Line) -> None:
        """Give what has arrived to its sessions. Nonsense ends the line."""
        while line.arrived:
            at, response = line.arrived.popleft()
            if not 0 < response.session_id <= line.last_session_id:
                line.distrust(f"it speaks of a session {response.session_id} that nobody opened")
                return
            state = self._states.get(response.session_id)
            if state is None:
                continue  # the session is over
            if response.WhichOneof("event") == "refused":
                state.is_refused = True
                continue
            fault = state.fault_in(response.block, self.max_draft + self._ahead, self._vocab_size)
            if fault is not None:
                line.distrust(f"it sent {fault}")
                return
            state.take(response.block, at, line)

    # Waiting.

    def _wait_if_it_pays(self, line: Line, requests: Sequence[DraftRequest]) -> None:
        """Wait for blocks that are about to come, where that costs less than they bring."""
        if line.is_silent or not line.turnaround:
            return
        began = time.perf_counter()
        awaited = self._awaited(requests, line)
        patience = sum(each.worth for each in awaited)
        if not patience or min(each.due for each in awaited) - began > patience:
            return
        while True:
            line.hush()
            self._take_in(line)
            if not line.is_open or not self._awaited(requests, line):
                return
            left = began + patience - time.perf_counter()
            if left <= 0:
                break
            line.wait(left)
        for request in requests:
            _state(request).give_up()
            line.is_late(max(4 * patience, _state(request).step_seconds))

    def _awaited(self, requests: Sequence[DraftRequest], line: Line) -> list[_Awaited]:
        found = (_state(request).on_its_way(request, line) for request in requests)
        return [each for each in found if each is not None]


def _turn(request: DraftRequest) -> pb.Turn:
    sampling = request.sampling
    return pb.Turn(
        prompt_length=request.prompt_length,
        prediction=request.prediction,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        seed=sampling.seed,
    )


def _state(request: DraftRequest) -> RemoteState:
    assert isinstance(request.state, RemoteState)
    return request.state
