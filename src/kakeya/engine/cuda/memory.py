"""How much memory a model takes on the device, and how much is left for slabs, before anything is loaded."""

from dataclasses import dataclass

import torch

from kakeya.config import EngineConfig
from kakeya.engine.cuda.drafter import DrafterPlan
from kakeya.engine.cuda.shapes import StepBuckets, StepLimits
from kakeya.engine.cuda.tables import Layout
from kakeya.engine.cuda.workspace import WorkspacePlan, whole_tiles
from kakeya.engine.slab import slab_geometry
from kakeya.errors import ConfigError
from kakeya.kernels.gpu import SamplingScratch
from kakeya.models.config import ModelConfig
from kakeya.models.drafter import DrafterConfig
from kakeya.models.float_types import FLOAT_TYPES

# Libraries, compiled kernels and graphs, beside our own buffers: generous estimates, which the memory table
# of `kakeya bench gpu` compares with what a device really uses. Loading happens before and takes less
# (weights.LOADING_BYTES), so it is not counted.
_LIBRARIES = 512 * 2**20
_PER_GRAPH = 8 * 2**20
_STEPS_OBSERVED = 2  # the proposer reads one while the next is computed


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes by purpose. As text it is the sum, spelled out."""

    weights: int
    workspace: int
    graphs: int
    moves: int
    """Temporary copies: exports, imports, saved slots of a prefill block, logits for the host, and layer
    outputs for a proposer."""

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.graphs + self.moves

    def room(self, free: int) -> int:
        """The bytes left for slabs. Raises ConfigError with the arithmetic when nothing is left."""
        if free > self.total:
            return free - self.total
        raise ConfigError(f"the model does not fit on the device: {self}, and {free:,} bytes are free")

    def check(self, slabs: int, slab_bytes: int, prefix_bytes: int, free: int, undo_bytes: int = 0) -> None:
        """Raise ConfigError with the arithmetic if slabs, shared prefixes and copies of slots for recall do
        not fit beside the rest."""
        room = self.room(free) - prefix_bytes - undo_bytes
        if slabs * slab_bytes <= room:
            return
        recall = f", {undo_bytes:,} for recall" if undo_bytes else ""
        raise ConfigError(
            f"the KV pool does not fit on the device: {slabs:,} slabs x {slab_bytes:,} bytes "
            f"= {slabs * slab_bytes:,} beside {prefix_bytes:,} of shared prefixes{recall} and {self}, "
            f"and {free:,} bytes are free: room for {max(room, 0) // slab_bytes:,} slabs"
        )

    def __str__(self) -> str:
        return (
            f"weights {self.weights:,} + workspace {self.workspace:,} + graphs {self.graphs:,} "
            f"+ moves {self.moves:,} = {self.total:,} bytes"
        )


def device_memory(
    model: ModelConfig,
    config: EngineConfig,
    observed_layers: int = 0,
    drafter: DrafterConfig | None = None,
) -> DeviceMemory:
    """The memory of `model` without its slabs. Fewer sessions than a batch can hold do not make it less.

    `observed_layers`: how many layers' outputs a proposer gets. `drafter`: the one on the device.
    """
    element = FLOAT_TYPES[config.dtype]
    buckets = StepBuckets(config, drafter.block if drafter is not None else 0)
    geometry = slab_geometry(model, config)
    limits, logits = buckets.limits, buckets.limits.head_rows * model.vocab_size * 4
    return DeviceMemory(
        weights=weight_elements(model) * element.itemsize,
        workspace=WorkspacePlan(model, limits, element).nbytes
        + _scratch_bytes(model, limits)
        + (drafter_bytes(model, config, drafter) if drafter is not None else 0),
        graphs=_LIBRARIES + len(buckets.captured) * _PER_GRAPH,
        moves=2 * geometry.slab_bytes
        + config.step_tokens * geometry.bytes_per_token
        + logits
        + _STEPS_OBSERVED * observed_layers * limits.rows * model.hidden_size * 4,
    )


def drafter_bytes(model: ModelConfig, config: EngineConfig, drafter: DrafterConfig) -> int:
    """What a drafter takes beside its layers of the slabs."""
    buckets = StepBuckets(config, drafter.block)
    element = FLOAT_TYPES[config.dtype]
    return DrafterPlan(drafter, model, buckets.limits.rows, buckets.most_drafting, element).nbytes


def _scratch_bytes(model: ModelConfig, limits: StepLimits) -> int:
    # Attention: prefill rows rotated three ways, or the partial outputs of KV splits in float32.
    attention = limits.rows * (2 * model.query_size + model.kv_size) * 2 * 4
    head_rows, meta = whole_tiles(limits.head_rows), torch.device("meta")
    sampling = SamplingScratch.of(head_rows, model.vocab_size, meta).nbytes
    tables = sum(Layout(limits).sizes.values()) * 4
    return attention + sampling + tables


def weight_elements(model: ModelConfig) -> int:
    attention = model.hidden_size * (2 * model.query_size + 2 * model.kv_size)
    layer = attention + 3 * model.hidden_size * model.intermediate_size + 4 * model.hidden_size
    tables = model.vocab_size * model.hidden_size * (1 if model.tied_head else 2)
    return tables + model.num_layers * layer + model.hidden_size
