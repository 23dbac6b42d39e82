"""The CPU backend: the decoder in this process's memory. A step is over when its launch returns."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kakeya.config import EngineConfig
from kakeya.engine.backend import Reduction, StepOutput
from kakeya.engine.batch import Segment
from kakeya.engine.cpu.attention import AttentionStep, NativeAttention, TorchAttention, attention_context
from kakeya.engine.device import CPU
from kakeya.engine.host import HostBackend
from kakeya.engine.shared_prefixes import GRANULE
from kakeya.engine.slab import SlabPool, prefix_cache_bytes, slab_geometry
from kakeya.errors import InvariantViolation
from kakeya.kernels import Kernels
from kakeya.models.decoder import Decoder
from kakeya.models.fused import Tap
from kakeya.types import Numerics

T = TypeVar("T")


def cuts_anywhere(decoder: Decoder, numerics: Numerics) -> bool:
    """Whether bits do not depend on how many rows come together: the native kernels have one arithmetic for
    any number, torch has in exact numerics."""
    return numerics is Numerics.EXACT or decoder.fused is not None


def cpu_pool(decoder: Decoder, config: EngineConfig) -> SlabPool:
    """The slabs and shared prefixes that a configuration asks for."""
    geometry = slab_geometry(decoder.config, config)
    any_cut = cuts_anywhere(decoder, config.numerics)
    granule = GRANULE if any_cut else config.cut_by(any_cut=False).block_tokens
    return SlabPool(geometry, config.capacity, CPU, granule, prefix_cache_bytes(config, geometry))


class CpuBackend(HostBackend):
    """The decoder in this process's memory, with native kernels where they were built."""

    def __init__(
        self, decoder: Decoder, pool: SlabPool, numerics: Numerics, kernels: Kernels | None, fingerprint: str
    ) -> None:
        super().__init__(pool, decoder.config.vocab_size, kernels, fingerprint)
        self._decoder = decoder
        self.any_cut = cuts_anywhere(decoder, numerics)
        self._logits = torch.empty((0, self.vocab_size))
        model = decoder.config
        sizes = {model.heads_of(layer).head_dim for layer in range(model.num_layers)}
        self._attention: Callable[[Sequence[Segment]], AttentionStep]
        self._is_fused = False
        if kernels is not None and all(map(kernels.supports_head_dim, sizes)):
            self._attention = partial(NativeAttention, kernels, model, pool)
            self._is_fused = decoder.fused is not None
        else:
            self._attention = partial(TorchAttention, model, pool, numerics)

    def score(self, segment: Segment, reduce: Reduction[T]) -> list[T]:
        hidden, _ = self._asked([segment], ())
        return [reduce(segment.start, self._decoder.logits(hidden))]

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._decoder.embed(token_ids)

    def logits(self, normed: Tensor) -> Tensor:
        return self._decoder.logits(normed)

    def shorten_head(self, count: int) -> None:
        """From now on choose among the first `count` tokens alone, where that is quicker."""
        self.vocab_size = self._decoder.shorten_head(count)
        self._logits = torch.empty((0, self.vocab_size))

    def run(self, segments: Sequence[Segment], hidden_layers: Sequence[int] = ()) -> StepOutput:
        hidden, taps = self._asked(segments, hidden_layers)
        room = self._room_for_logits(len(hidden))
        return StepOutput(self._decoder.logits(hidden, room) if len(hidden) else room, taps)

    def _room_for_logits(self, rows: int) -> Tensor:
        """The same memory in every step: it is large, and the heap would grow and shrink with it."""
        if rows > len(self._logits):
            self._logits = torch.empty((max(rows, 2 * len(self._logits)), self.vocab_size))
        return self._logits[:rows]

    def _asked(
        self, segments: Sequence[Segment], hidden_layers: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Compute all rows: the last hidden state of those whose logits are asked for, and of all rows the
        outputs of some layers."""
        taps: dict[int, Tensor] = {}

        def keep(layer: int, output: Tensor) -> None:
            if layer in hidden_layers:
                taps[layer] = output.clone()

        tap = keep if hidden_layers else None
        token_ids = torch.tensor([token for s in segments for token in s.tokens], dtype=torch.int64)
        if self._is_fused:
            context = attention_context(self._decoder.config, self.pool, segments)
            hidden = self._decoder.forward_fused(token_ids, context, tap, hidden_layers)
        else:
            hidden = self._layer_by_layer(token_ids, segments, tap)
        rows = _logit_rows(segments)
        return hidden if len(rows) == len(token_ids) else hidden[rows], taps

    def _layer_by_layer(self, token_ids: Tensor, segments: Sequence[Segment], tap: Tap | None) -> Tensor:
        step, layers = self._attention(segments), self._decoder.config.num_layers
        hidden = self._decoder.forward(token_ids, step.attend, tap)
        if step.layers_written != layers:
            raise InvariantViolation("INV-1", f"{step.layers_written} of {layers} layers were written")
        return hidden


def _logit_rows(segments: Sequence[Segment]) -> list[int]:
    """The batch's rows whose logits are wanted: the last `logit_rows` of each segment."""
    rows: list[int] = []
    end = 0
    for segment in segments:
        end += segment.rows
        rows.extend(range(end - segment.logit_rows, end))
    return rows
