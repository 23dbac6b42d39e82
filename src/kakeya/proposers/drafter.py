"""The trained drafter on a CPU: reads the verifier's hidden states and guesses what comes.

`models/drafter.py` says what the network is. It shares embedding and sampler with the verifier, and of the
verifier's head the rows of the tokens that it can guess.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kakeya.config import EngineConfig
from kakeya.engine.proposer import DraftRequest, DraftState
from kakeya.engine.sampler import SampleRequest
from kakeya.kernels import Kernels
from kakeya.models.config import ModelConfig
from kakeya.models.drafter import StoredDrafter
from kakeya.proposers.draft_attention import DraftRows, draft_attention
from kakeya.proposers.draft_network import DraftNetwork
from kakeya.proposers.draft_states import DrafterState, DraftMemory
from kakeya.proposers.sampling import sample_request
from kakeya.types import TokenEvent

_UNLIKELY = -1e30  # the logit of what is not guessed, unless a grammar allows nothing else
_COLUMNS_AT_ONCE = 64  # of a head


@runtime_checkable
class Verifier(Protocol):
    """What a drafter shares with the model that it guesses for; `CpuBackend` and `MlxBackend` have it."""

    def embed(self, token_ids: Tensor) -> Tensor: ...

    def logits(self, normed: Tensor) -> Tensor: ...

    def choose(self, logits: Tensor, requests: Sequence[SampleRequest]) -> list[TokenEvent]: ...


@dataclass
class _Stream:
    """One session that is drafted for."""

    request: DraftRequest
    guessed: list[int] = field(default_factory=list)

    @property
    def state(self) -> DrafterState:
        return _state(self.request)

    @property
    def limit(self) -> int:
        return self.request.limit

    @property
    def newest(self) -> int:
        """The token that the next guess follows."""
        return self.guessed[-1] if self.guessed else self.request.tokens[-1]


class TrainedDrafter:
    """Guesses with a trained network, with the verifier's own random numbers.

    It guesses where it was shown the newest computed position, and attends to positions that it was shown.
    """

    name = "drafter"
    is_free = False

    def __init__(
        self,
        stored: StoredDrafter,
        verifier: Verifier,
        model: ModelConfig,
        config: EngineConfig,
        kernels: Kernels | None,
    ) -> None:
        self._knows_all = stored.config.draft_vocab_size == model.vocab_size
        head = None if self._knows_all else head_rows(verifier, model, stored.draft_vocab)
        self._network, self._verifier = DraftNetwork(stored, head, model, config, kernels), verifier
        self._draft_vocab = stored.draft_vocab
        self._vocab_size = model.vocab_size
        self._all_logits = torch.empty(0, model.vocab_size)
        self.memory = DraftMemory(stored.config, config)
        self._attention = draft_attention(self.memory.pool, model.query_scale, kernels)
        self._reach = config.cache.capacity
        self._digest = torch.frombuffer(bytearray.fromhex(stored.digest), dtype=torch.uint8)
        self.hidden_layers = stored.config.taps
        self.max_draft = min(config.draft_tokens, stored.config.block)

    def new_state(self) -> DrafterState:
        return DrafterState(self.memory, self._settle, self._digest)

    def restore(self, tensors: Mapping[str, Tensor]) -> DrafterState:
        state = self.new_state()
        state.restore(tensors)
        return state

    # What it is shown.

    def observe(self, state: DraftState, start: int, hidden: Mapping[int, Tensor]) -> None:
        assert isinstance(state, DrafterState)
        outputs = [hidden[layer] for layer in self.hidden_layers]
        rows = len(outputs[0])
        if state.expect(start, rows):
            torch.cat(outputs, dim=1, out=state.wait(rows))
        else:
            self._remember([state], [range(start, start + rows)], torch.cat(outputs, dim=1))

    def _settle(self, states: Sequence[DrafterState]) -> None:
        """Make keys and values of all that waits."""
        states = [state for state in states if state.waiting]
        if states:
            spans = [state.span for state in states]
            self._remember(states, spans, torch.cat([state.waited() for state in states]))

    def _remember(self, states: Sequence[DrafterState], spans: Sequence[range], outputs: Tensor) -> None:
        """Keep what is made of the verifier's outputs [rows, taps * hidden] at the positions `spans`."""
        features = self._network.features(outputs)
        history = self._network.history(features, [position for span in spans for position in span])
        row = 0
        for state, span in zip(states, spans, strict=True):
            end = row + len(span)
            state.write(history[:, :, row:end], features[end - 1])
            row = end

    # What it guesses.

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        streams = [_Stream(request) for request in requests]
        ready = [each for each in streams if each.state.is_ready and each.state.newest == _anchor(each)]
        if ready:
            self._settle([stream.state for stream in ready])
            at_once = self._network.config.kind == "block"
            (self._guess_at_once if at_once else self._guess_step_by_step)(ready)
        return [stream.guessed for stream in streams]

    def _guess_step_by_step(self, streams: Sequence[_Stream]) -> None:
        state = torch.stack([stream.state.feature for stream in streams])
        for index in range(max(stream.limit for stream in streams)):
            going = [row for row, stream in enumerate(streams) if index < stream.limit]
            streams, state = [streams[row] for row in going], state[going]
            embedded = self._verifier.embed(torch.tensor([stream.newest for stream in streams]))
            state = self._pass([(stream, range(index, index + 1)) for stream in streams], embedded, state)
            self._choose(streams, self._logits(state))

    def _guess_at_once(self, streams: Sequence[_Stream]) -> None:
        known = self._verifier.embed(torch.tensor([stream.newest for stream in streams]))
        embedded: list[Tensor] = []
        state: list[Tensor] = []
        for token, stream in zip(known, streams, strict=True):
            embedded += token[None], self._network.unknown[: stream.limit - 1]
            state.append(stream.state.feature.expand(stream.limit, -1))
        blocks = [(stream, range(stream.limit)) for stream in streams]
        logits = iter(self._logits(self._pass(blocks, torch.cat(embedded), torch.cat(state))))
        for stream in streams:
            for _ in range(stream.limit):  # one by one: penalties look at the guesses before
                self._choose([stream], next(logits)[None])

    def _pass(self, rows: Sequence[tuple[_Stream, range]], embedded: Tensor, state: Tensor) -> Tensor:
        """The states after some guesses of each stream, all of them together in each matmul."""
        parts = [DraftRows(stream.state.slab, guesses.start, len(guesses)) for stream, guesses in rows]
        positions = [_anchor(stream) + 1 + index for stream, guesses in rows for index in guesses]
        attend = self._attention(parts, *self._network.angles(positions))
        return self._network.forward(embedded, state, attend)

    def _logits(self, state: Tensor) -> Tensor:
        """float32 [rows, vocabulary]. Valid until the next call."""
        if self._knows_all:
            return self._verifier.logits(self._network.final(state))
        logits, rows = self._network.logits(state), len(state)
        if rows > len(self._all_logits):
            self._all_logits = torch.full((rows, self._vocab_size), _UNLIKELY)
        return self._all_logits[:rows].index_copy_(1, self._draft_vocab, logits)

    def _choose(self, streams: Sequence[_Stream], logits: Tensor) -> None:
        requests = [sample_request(stream.request, stream.guessed, self._reach) for stream in streams]
        for stream, token in zip(streams, self._verifier.choose(logits, requests), strict=True):
            stream.guessed.append(token.token_id)


def head_rows(verifier: Verifier, model: ModelConfig, ids: Tensor) -> Tensor:
    """The weights of the verifier's head for some tokens, float32 [ids, hidden]."""
    if model.tied_head:
        return verifier.embed(ids) / model.embed_scale
    # However a head is held, what it makes of a one in a single column is that column.
    rows, unit = torch.empty(len(ids), model.hidden_size), torch.eye(model.hidden_size)
    for first in range(0, model.hidden_size, _COLUMNS_AT_ONCE):
        part = slice(first, first + _COLUMNS_AT_ONCE)
        rows[:, part] = verifier.logits(unit[part])[:, ids].T
    return rows


def _anchor(stream: _Stream) -> int:
    """The newest computed position: the newest token is computed together with the draft."""
    return len(stream.request.tokens) - 2


def _state(request: DraftRequest) -> DrafterState:
    assert isinstance(request.state, DrafterState)
    return request.state
