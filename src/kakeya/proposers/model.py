"""A smaller model with the same tokenizer as proposer, on slabs of its own: bounded as the verifier's are."""

import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from kakeya.engine.backend import Backend
from kakeya.engine.batch import Segment
from kakeya.engine.blend import blend
from kakeya.engine.proposer import DraftRequest
from kakeya.engine.sampler import SampleRequest
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.slab import SlabPool
from kakeya.proposers.sampling import sample_request

# Tokenizers number tokens in the order in which they were merged, the most frequent first. Of a head over
# 150,000 of them, which is a third of a small model's bytes, the first fifth gives nearly all guesses.
COMMON_TOKENS = 32_768
_READ_AT_ONCE = 32
_FEW = 10  # tokens that are read without a thought: a draft that was right, and what followed it


class ModelState:
    """What the small model has computed of one session.

    It takes a slab when it is first asked. Rows up to `slab.committed` are history; behind them lie those of
    tokens that it guessed.
    """

    def __init__(self, pool: SlabPool) -> None:
        self._pool = pool
        self._sequence: TokenSequence | None = None
        self._guessed: list[int] = []

    @property
    def sequence(self) -> TokenSequence:
        if self._sequence is None:
            self._sequence = TokenSequence(self._pool.allocate(), "", (), None)
        return self._sequence

    def settle(self, tokens: Sequence[int]) -> None:
        """Keep the rows of guesses that have become history, and forget the others.

        The newest token is always computed, for what follows it.
        """
        slab = self.sequence.slab
        kept = 0
        for guess, token in zip(self._guessed, tokens[slab.committed : len(tokens) - 1], strict=False):
            if guess != token:
                break
            kept += 1
        slab.commit(slab.committed + kept)
        slab.rollback()
        self._guessed = []
        if slab.committed == len(tokens):  # the last draft found no room in its step
            self._go_back(len(tokens) - 1)

    def read(self, tokens: Sequence[int], most: int) -> Segment:
        """The next rows of the history, at most `most`; logits are wanted after its last token."""
        slab = self.sequence.slab
        rows = tokens[slab.written : slab.written + most]
        start = slab.reserve(len(rows))
        slab.commit(slab.written)
        return Segment(self.sequence, start, rows, 0, int(slab.written == len(tokens)))

    def go_on(self, guess: int) -> Segment:
        """The row of a token that was guessed."""
        self._guessed.append(guess)
        return Segment(self.sequence, self.sequence.slab.reserve(1), [guess], 0, 1)

    def fork(self) -> "ModelState":
        twin = ModelState(self._pool)
        if self._sequence is not None:
            twin.sequence.slab.copy_from(self._sequence.slab)
        return twin

    def rollback(self, length: int) -> None:
        if self._sequence is None:
            return
        slab = self._sequence.slab
        self._guessed = []
        slab.rollback()
        if slab.committed - length > slab.geometry.cache.spare:
            self.close()  # what it would go back to is overwritten: it is computed anew
        elif slab.committed > length:
            self._go_back(length)

    def _go_back(self, length: int) -> None:
        """Forget some last tokens of the history; the spare slots still have what lay there before."""
        slab = self.sequence.slab
        slab.written = slab.committed = length

    def export(self) -> Mapping[str, Tensor]:
        return {}  # it is computed anew from the tokens

    def close(self) -> None:
        if self._sequence is not None:
            self._pool.release(self._sequence.slab)
            self._sequence = None


class SmallModel:
    """Guesses what a small model would say, chosen with the verifier's own random numbers.

    It reads at most `at_once` tokens of histories before a step, so that streams go on while it catches up,
    and nothing of a history that takes longer to read than guesses are thought to save.
    """

    name = "model"
    is_free = False
    hidden_layers = ()

    def __init__(self, backend: Backend, max_draft: int, at_once: int = _READ_AT_ONCE) -> None:
        self._backend, self._at_once = backend, at_once
        self.max_draft = max_draft
        self._reach = backend.pool.geometry.cache.capacity
        self._read_seconds = 0.0  # for a token of a history

    def new_state(self) -> ModelState:
        return ModelState(self._backend.pool)

    def restore(self, tensors: Mapping[str, Tensor]) -> ModelState:
        return self.new_state()

    def observe(self, state: object, start: int, hidden: Mapping[int, Tensor]) -> None:
        """It looks at no hidden states."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        guesses: list[list[int]] = [[] for _ in requests]
        going = self._caught_up(requests, guesses)
        for _ in range(1, max((request.limit for request in requests), default=0)):
            going = [place for place in going if len(guesses[place]) < requests[place].limit]
            if not going:
                break
            self._one_more(requests, guesses, going)
        return guesses

    def _caught_up(self, requests: Sequence[DraftRequest], guesses: Sequence[list[int]]) -> list[int]:
        """Compute what has become history since, the least first; which requests then have a first guess."""
        for request in requests:
            _state(request).settle(request.tokens)
        room, segments, going, samples = max(self._at_once, len(requests)), [], [], []
        for place in sorted(range(len(requests)), key=lambda place: _behind(requests[place])):
            request = requests[place]
            if room and self._pays(request):
                segments.append(_state(request).read(request.tokens, room))
                room -= segments[-1].rows
                if segments[-1].logit_rows:
                    going.append(place)
                    samples.append(self._sample_request(request, ()))
        began, rows = time.perf_counter(), sum(segment.rows for segment in segments)
        self._run(segments, samples, guesses, going)
        if rows > _FEW:
            self._read_seconds = blend(self._read_seconds, (time.perf_counter() - began) / rows)
        return going

    def _pays(self, request: DraftRequest) -> bool:
        """Whether what it has not read yet is read in less time than guesses will save."""
        behind = _behind(request)
        return behind <= _FEW or behind * self._read_seconds <= request.patience

    def _one_more(
        self, requests: Sequence[DraftRequest], guesses: Sequence[list[int]], going: Sequence[int]
    ) -> None:
        """One more token for each that goes on."""
        segments, samples = [], []
        for place in going:
            request = requests[place]
            segments.append(_state(request).go_on(guesses[place][-1]))
            samples.append(self._sample_request(request, guesses[place]))
        self._run(segments, samples, guesses, going)

    def _sample_request(self, request: DraftRequest, guessed: Sequence[int]) -> SampleRequest:
        return sample_request(request, guessed, self._reach, self._backend.vocab_size)

    def _run(
        self,
        segments: Sequence[Segment],
        samples: Sequence[SampleRequest],
        guesses: Sequence[list[int]],
        going: Sequence[int],
    ) -> None:
        if segments:
            chosen = self._backend.launch(segments, samples).result().sampled
            for place, token in zip(going, chosen, strict=True):
                guesses[place].append(token.token_id)


def _behind(request: DraftRequest) -> int:
    """How many tokens of the history it has not read."""
    return len(request.tokens) - _state(request).sequence.slab.written


def _state(request: DraftRequest) -> ModelState:
    assert isinstance(request.state, ModelState)
    return request.state
