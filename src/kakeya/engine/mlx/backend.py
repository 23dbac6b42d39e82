"""Runs planned batches with MLX. A step is over when its launch returns; one evaluation computes it."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import TypeVar

import mlx.core as mx
import torch
from torch import Tensor

from kakeya.config import EngineConfig
from kakeya.engine.backend import Reduction, StepOutput
from kakeya.engine.batch import Segment
from kakeya.engine.device import CPU
from kakeya.engine.host import HostBackend
from kakeya.engine.mlx.arrays import end_streams_with_thread, shared_zeros, to_mlx, to_torch
from kakeya.engine.mlx.decoder import GroupOutput, MlxDecoder
from kakeya.engine.mlx.tables import Group, groups_of
from kakeya.engine.mlx.weights import MlxWeights
from kakeya.engine.shared_prefixes import GRANULE
from kakeya.engine.slab import SlabGeometry, SlabPool, prefix_cache_bytes, slab_geometry
from kakeya.errors import ConfigError
from kakeya.kernels import Kernels
from kakeya.models.config import ModelConfig
from kakeya.models.float_types import FLOAT_TYPES
from kakeya.types import Numerics

T = TypeVar("T")

# What MLX may keep of memory that steps have freed. By itself it would keep nearly all of the machine's.
_CACHE_BYTES = 256 * 2**20


class MlxPool(SlabPool):
    """Slabs that MLX reads and the host writes: `array` and `storage` are the same memory."""

    def __init__(self, geometry: SlabGeometry, count: int, granule: int = 1, prefix_bytes: int = 0) -> None:
        super().__init__(geometry, count, CPU, granule, prefix_bytes)

    def _slabs(self, count: int) -> Tensor:
        shape, taken = (count, *self.geometry.shape), count * self.geometry.slab_bytes
        most = mx.device_info().get("max_buffer_length", taken)
        if taken > int(most):
            raise ConfigError(
                f"the KV pool does not fit in one buffer of MLX: {count} slabs x "
                f"{self.geometry.slab_bytes:,} bytes, {most:,} bytes are allowed; "
                "lower --capacity or --window"
            )
        self.array, storage = shared_zeros(shape, FLOAT_TYPES[self.geometry.dtype])
        return storage


def mlx_pool(model: ModelConfig, config: EngineConfig) -> MlxPool:
    """The slabs and shared prefixes that a configuration asks for."""
    geometry = slab_geometry(model, config)
    return MlxPool(geometry, config.capacity, GRANULE, prefix_cache_bytes(config, geometry))


def check_mlx(numerics: Numerics) -> None:
    """Raises ConfigError for numerics that the device does not have."""
    if numerics is Numerics.EXACT and mx.default_device().type != mx.DeviceType.cpu:
        raise ConfigError(
            "numerics=exact is not available on MLX's GPU, which chooses kernels by shape: a row's bits "
            "depend on the rows beside it; use numerics=fast, or --backend cpu"
        )


def device_name() -> str:
    """What computes, for people."""
    where = "CPU" if gpu_name() is None else "GPU"
    return f"mlx {version('mlx')} ({where}: {_chip()})"


def gpu_name() -> str | None:
    """The GPU that computes; None where the CPU does."""
    return None if mx.default_device().type == mx.DeviceType.cpu else _chip()


def _chip() -> str:
    info = mx.device_info()
    return str(info.get("device_name", info.get("architecture")))


class MlxBackend(HostBackend):
    """The decoder and its slabs in memory that MLX and the host share."""

    pool: MlxPool
    # On a CPU MLX has one arithmetic for any number of rows. On a GPU bits depend on a row's company anyway.
    any_cut = True

    def __init__(self, weights: MlxWeights, pool: MlxPool, kernels: Kernels | None, fingerprint: str) -> None:
        mx.set_cache_limit(_CACHE_BYTES)
        super().__init__(pool, weights.config.vocab_size, kernels, fingerprint)
        self._model = weights.config
        self._decoder = MlxDecoder(weights, pool.geometry)

    def score(self, segment: Segment, reduce: Reduction[T]) -> list[T]:
        return [reduce(segment.start, self.run([segment]).logits)]

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._evaluated(self._decoder.embed(to_mlx(token_ids)))

    def logits(self, normed: Tensor) -> Tensor:
        return self._evaluated(self._decoder.logits(to_mlx(normed)))

    def _evaluated(self, array: mx.array) -> Tensor:
        end_streams_with_thread()
        mx.eval(array)
        return to_torch(array)

    def run(self, segments: Sequence[Segment], hidden_layers: Sequence[int] = ()) -> StepOutput:
        end_streams_with_thread()
        groups = list(groups_of(segments, hidden_layers))
        outputs = [
            self._decoder.run(group.shape, group.inputs(self._model, self._decoder, self.pool.array))
            for group in groups
        ]
        mx.eval(outputs)
        for group, output in zip(groups, outputs, strict=True):
            self._store(group, output)
        logits, hidden = _in_order(groups, outputs, hidden_layers)
        joined = torch.cat(logits) if logits else torch.empty(0, self.vocab_size)
        return StepOutput(joined, {layer: torch.cat(parts) for layer, parts in hidden.items()})

    def _store(self, group: Group, output: GroupOutput) -> None:
        storage = self.pool.storage
        rows, slabs, slots = map(torch.from_numpy, group.stored_rows())
        kept = to_torch(output.kept, storage.dtype).permute(2, 0, 1, 3, 4)
        storage[slabs, :, :, :, slots] = kept[rows]


def _in_order(
    groups: Sequence[Group], outputs: Sequence[GroupOutput], hidden_layers: Sequence[int]
) -> tuple[list[Tensor], dict[int, list[Tensor]]]:
    """The logits and the hidden states of each segment, in the order of the step."""
    logits: dict[int, Tensor] = {}
    hidden: dict[int, dict[int, Tensor]] = {layer: {} for layer in hidden_layers}
    for group, output in zip(groups, outputs, strict=True):
        taps = [to_torch(tap) for tap in output.hidden]
        first = 0
        for place, (segment, at) in enumerate(zip(group.segments, group.places, strict=True)):
            if output.logits is not None:
                logits[at] = to_torch(output.logits)[first : first + segment.logit_rows]
                first += segment.logit_rows
            for layer, tap in zip(hidden_layers, taps, strict=True):
                hidden[layer][at] = tap[group.rows_of(place)]
    return _sorted(logits), {layer: _sorted(parts) for layer, parts in hidden.items()}


def _sorted(parts: dict[int, Tensor]) -> list[Tensor]:
    return [parts[place] for place in sorted(parts)]
