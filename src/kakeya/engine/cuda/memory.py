"""What a model takes on the device and what is left for sessions: arithmetic, before anything is loaded."""

from dataclasses import dataclass

import torch

from kakeya.config import EngineConfig
from kakeya.engine.cuda.shapes import StepBuckets, StepLimits
from kakeya.engine.cuda.tables import Layout
from kakeya.engine.cuda.workspace import WorkspacePlan, whole_tiles
from kakeya.engine.slab import slab_geometry
from kakeya.errors import ConfigError
from kakeya.kernels.gpu import ChoiceScratch
from kakeya.models.config import ModelConfig
from kakeya.models.float_types import FLOAT_TYPES

# What libraries, compiled kernels and a graph take beside our own buffers: generous guesses, which the table
# of memory in `kakeya bench gpu` holds against what a device has really lost. Loading comes before them and
# takes less (weights.LOADING_BYTES), so it needs no line of its own.
_LIBRARIES = 512 * 2**20
_PER_GRAPH = 8 * 2**20
_STEPS_OBSERVED = 2  # one is shown to the proposer while the next is computed


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes by purpose. As text it is the sum."""

    weights: int
    workspace: int
    graphs: int
    moves: int
    """What exports, imports, the undoing of a prompt block, logits for the host and layers' outputs for a
    proposer take while they last."""

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.graphs + self.moves

    def room(self, free: int) -> int:
        """What is left for the slabs. Raises ConfigError with the arithmetic when that is nothing."""
        if free > self.total:
            return free - self.total
        raise ConfigError(f"the model does not fit on the device: {self}, and {free:,} bytes are free")

    def check(self, slabs: int, slab_bytes: int, free: int) -> None:
        """Raises ConfigError with the arithmetic when the slabs do not fit beside the rest."""
        if slabs * slab_bytes <= self.room(free):
            return
        raise ConfigError(
            f"the KV pool does not fit on the device: {slabs:,} slabs x {slab_bytes:,} bytes "
            f"= {slabs * slab_bytes:,} beside {self}, and {free:,} bytes are free: "
            f"room for {self.room(free) // slab_bytes:,} slabs"
        )

    def __str__(self) -> str:
        return (
            f"weights {self.weights:,} + workspace {self.workspace:,} + graphs {self.graphs:,} "
            f"+ moves {self.moves:,} = {self.total:,} bytes"
        )


def device_memory(model: ModelConfig, config: EngineConfig, observed_layers: int = 0) -> DeviceMemory:
    """What `model` takes beside its slabs. Never less for fewer sessions than the batch may hold.

    `observed_layers`: how many a proposer is shown the outputs of.
    """
    element = FLOAT_TYPES[config.dtype]
    buckets = StepBuckets(config)
    geometry = slab_geometry(model, config)
    limits, logits = buckets.limits, buckets.limits.head_rows * model.vocab_size * 4
    return DeviceMemory(
        weights=weight_elements(model) * element.itemsize,
        workspace=WorkspacePlan(model, limits, element).nbytes + _scratch_bytes(model, limits),
        graphs=_LIBRARIES + len(buckets.captured) * _PER_GRAPH,
        moves=2 * geometry.slab_bytes
        + config.step_tokens * geometry.bytes_per_token
        + logits
        + _STEPS_OBSERVED * observed_layers * limits.rows * model.hidden_size * 4,
    )


def _scratch_bytes(model: ModelConfig, limits: StepLimits) -> int:
    # Attention: prompt rows rotated three ways, or the splits of a row in float32.
    attention = limits.rows * (2 * model.query_size + model.kv_size) * 2 * 4
    choice = ChoiceScratch.of(whole_tiles(limits.head_rows), model.vocab_size, torch.device("meta")).nbytes
    tables = sum(Layout(limits).sizes.values()) * 4
    return attention + choice + tables


def weight_elements(model: ModelConfig) -> int:
    attention = model.hidden_size * (2 * model.query_size + 2 * model.kv_size)
    layer = attention + 3 * model.hidden_size * model.intermediate_size + 4 * model.hidden_size
    tables = model.vocab_size * model.hidden_size * (1 if model.tied_head else 2)
    return tables + model.num_layers * layer + model.hidden_size
