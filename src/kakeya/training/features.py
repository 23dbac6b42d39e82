"""The verifier's features of conversations: computed by the engine's own backend, kept on its device.

Whole conversations are prefilled, many at once. What is kept is the outputs of the tapped layers in bfloat16,
each dimension less its mean and divided by its deviation: what differs little between tokens is then as
precise as what differs much.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from kakeya.engine.backend import Backend
from kakeya.engine.batch import Segment
from kakeya.engine.sequence import TokenSequence
from kakeya.errors import ConfigError
from kakeya.loading import LoadedModel
from kakeya.training.conversations import Conversation
from kakeya.training.network import Standard

_SAMPLED = 256  # conversations whose features tell mean and deviation
_LEAST_DEVIATION = 1e-4
KEPT = torch.bfloat16


class FeatureReader:
    """Computes the outputs of some layers for conversations, on slabs that nobody else uses."""

    def __init__(self, model: LoadedModel, taps: Sequence[int], longest: int) -> None:
        cache = model.config.cache
        if longest > cache.capacity:
            raise ConfigError(
                f"conversations of {longest} tokens do not fit into the window: "
                f"sink {cache.sink} + window {cache.window}"
            )
        self._backend: Backend = model.backend
        self._taps = tuple(taps)
        self._rows, self._block = model.config.step_tokens, model.config.block_tokens
        self._width = len(taps) * model.model_config.hidden_size

    @property
    def width(self) -> int:
        return self._width

    @property
    def device(self) -> torch.device:
        return self._backend.pool.device

    def read(self, conversations: Sequence[Conversation]) -> Iterator[tuple[int, Tensor]]:
        """For each conversation its place among them and its raw features, float32 [tokens, taps * n].

        They come in any order and in pieces, each conversation's in the order of its tokens.
        """
        waiting = list(enumerate(conversations))[::-1]
        open_ones: list[_Prefill] = []
        try:
            while waiting or open_ones:
                while waiting and self._backend.pool.free_count:
                    place, conversation = waiting.pop()
                    open_ones.append(_Prefill(place, conversation, self._new_sequence()))
                yield from self._step(open_ones)
                for done in [each for each in open_ones if each.is_done]:
                    self._backend.pool.release(done.sequence.slab)
                    open_ones.remove(done)
        finally:
            for each in open_ones:
                self._backend.pool.release(each.sequence.slab)

    def _new_sequence(self) -> TokenSequence:
        return TokenSequence(self._backend.pool.allocate(), "", (), None)

    def _step(self, open_ones: "Sequence[_Prefill]") -> Iterator[tuple[int, Tensor]]:
        room, taken = self._rows, []
        for each in open_ones:
            segment = each.next_segment(min(room, self._block))
            if segment is None:
                break
            taken.append((each.place, segment))
            room -= segment.rows
        with torch.inference_mode():
            launched = self._backend.launch([segment for _, segment in taken], (), self._taps)
            hidden = launched.result().hidden
            features = torch.cat([hidden[tap].float() for tap in self._taps], -1)
        first = 0
        for place, segment in taken:
            yield place, features[first : first + segment.rows]
            first += segment.rows


@dataclass(eq=False)
class _Prefill:
    """A conversation that is being computed."""

    place: int
    conversation: Conversation
    sequence: TokenSequence

    @property
    def is_done(self) -> bool:
        return self.sequence.slab.written == len(self.conversation.tokens)

    def next_segment(self, most: int) -> Segment | None:
        """Its next rows, already reserved; None if there is no room for any."""
        slab = self.sequence.slab
        tokens = self.conversation.tokens[slab.written : slab.written + most].tolist()
        if not tokens:
            return None
        start = slab.reserve(len(tokens))
        slab.commit(slab.written)
        return Segment(self.sequence, start, tokens, 0, 0)


def measure_standard(reader: FeatureReader, conversations: Sequence[Conversation]) -> Standard:
    """Mean and deviation of each dimension over the first conversations."""
    total = torch.zeros(reader.width, dtype=torch.float64, device=reader.device)
    squares, count = torch.zeros_like(total), 0
    for _, features in reader.read(conversations[:_SAMPLED]):
        wide = features.double()
        total += wide.sum(0)
        squares += wide.square().sum(0)
        count += len(wide)
    mean = total / max(count, 1)
    deviation = (squares / max(count, 1) - mean.square()).clamp(min=0).sqrt().clamp(min=_LEAST_DEVIATION)
    return Standard(mean.float(), deviation.float())


@dataclass(frozen=True)
class FeatureBatch:
    """Some conversations, padded to the longest: tokens and answers [B, L + margin], features [B, L, …]."""

    tokens: Tensor
    answers: Tensor
    features: Tensor
    answers_on_host: Tensor


class FeatureStore:
    """Conversations with their features in one tensor on the device."""

    def __init__(
        self,
        reader: FeatureReader,
        standard: Standard,
        conversations: Sequence[Conversation],
        lengths: Sequence[int],
        tell: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Keep the first of each conversation's tokens, so many as `lengths` has for it."""
        self._device = reader.device
        self._lengths = torch.tensor(lengths)
        self._longest = max(lengths)
        cut = [_cut(*each) for each in zip(conversations, lengths, strict=True)]
        self._answers = self._padded([each.answers for each in cut], torch.bool)
        self._tokens = self._padded([each.tokens for each in cut], torch.int64).to(self._device)
        self._device_lengths = self._lengths.to(self._device)
        self._device_answers = self._answers.to(self._device)
        self._offsets = self._device_lengths.cumsum(0) - self._device_lengths
        self._features = torch.empty(sum(lengths), reader.width, dtype=KEPT, device=self._device)
        self._fill(reader, standard, cut, tell)

    def _padded(self, rows: Sequence[npt.NDArray[Any]], dtype: torch.dtype) -> Tensor:
        table = torch.zeros(len(rows), self._longest, dtype=dtype)
        for place, row in enumerate(rows):
            table[place, : len(row)] = torch.from_numpy(row)
        return table

    def _fill(
        self,
        reader: FeatureReader,
        standard: Standard,
        conversations: Sequence[Conversation],
        tell: Callable[[int, int], None],
    ) -> None:
        next_rows, done = self._offsets.tolist(), 0
        for place, features in reader.read(conversations):
            first = next_rows[place]
            next_rows[place] += len(features)
            self._features[first : next_rows[place]] = standard(features)
            done += len(features)
            tell(done, len(self._features))

    def __len__(self) -> int:
        return len(self._lengths)

    def batch(self, places: Tensor, margin: int) -> FeatureBatch:
        """The conversations at `places`, with `margin` more columns of tokens than any has.

        Nothing here waits for the device.
        """
        longest = int(self._lengths[places].max())
        there = places.to(self._device, non_blocking=True)
        columns = torch.arange(longest, device=self._device)
        inside = torch.minimum(columns, self._device_lengths[there, None] - 1)
        pad = (0, margin)
        return FeatureBatch(
            tokens=functional.pad(self._tokens[there, :longest], pad),
            answers=functional.pad(self._device_answers[there, :longest], pad),
            features=self._features[self._offsets[there, None] + inside],
            answers_on_host=functional.pad(self._answers[places, :longest], pad),
        )


def _cut(conversation: Conversation, length: int) -> Conversation:
    return Conversation(conversation.number, conversation.tokens[:length], conversation.answers[:length])


def shards(lengths: Sequence[int], width: int, budget: int) -> list[range]:
    """Neighbouring conversations whose features fit into `budget` bytes together. Raises ConfigError."""
    bytes_each = width * KEPT.itemsize
    ends = np.cumsum(lengths, dtype=np.int64) * bytes_each
    if max(lengths) * bytes_each > budget:
        raise ConfigError(
            f"the features of one conversation take {max(lengths) * bytes_each:,} bytes, "
            f"and {budget:,} are free for them"
        )
    cuts, base = [0], 0
    for place, end in enumerate(ends.tolist()):
        if end - base > budget:
            cuts.append(place)
            base = int(ends[place - 1])
    return [range(*pair) for pair in zip(cuts, [*cuts[1:], len(lengths)], strict=True)]
