"""The plan of a device's memory beside what is really allocated there."""

import pytest
import torch

from kakeya.bench.gpu.shapes import SHAPES, Shape
from kakeya.config import EngineConfig
from kakeya.engine.cuda.decoder import EXACT_SPLITS, attention_shape
from kakeya.engine.cuda.memory import device_memory
from kakeya.engine.cuda.shapes import StepBuckets
from kakeya.engine.cuda.tables import Layout
from kakeya.engine.cuda.workspace import Workspace, WorkspacePlan
from kakeya.kernels.gpu import SamplingScratch, kv_splits
from kakeya.models.config import ModelConfig
from kakeya.types import BackendChoice, Numerics


def most_split(rows: int, model: ModelConfig) -> int:
    splits = kv_splits(rows, model.num_kv_heads)
    return rows * splits if splits > 1 else 0


@pytest.mark.parametrize("numerics", Numerics)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("capacity", [1, 256, 4096])
def test_the_plan_holds_every_buffer_of_a_step(shape: Shape, numerics: Numerics, capacity: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed here")
    from kakeya.kernels.gpu.triton_kernels import TritonKernels

    config = EngineConfig(backend=BackendChoice.CUDA, capacity=capacity, numerics=numerics)
    model, limits, meta = shape.model, StepBuckets(config).limits, torch.device("meta")
    space = Workspace(WorkspacePlan(model, limits, torch.bfloat16), meta)
    heads = attention_shape(model, config.cache)
    exact = numerics is Numerics.EXACT
    scratch = TritonKernels().scratch(
        heads,
        torch.bfloat16,
        meta,
        prefill_rows=0 if exact else limits.rows,
        partials=EXACT_SPLITS * limits.rows
        if exact
        else max(most_split(rows, model) for rows in range(1, 513)),
    )
    sampling = SamplingScratch.of(*space.logits.shape, meta)
    tensors = [each for held in (space, scratch, sampling) for each in vars(held).values()]
    tables = max(place.stop for place in Layout(limits).places().values()) * 4
    held = tables + sum(each.nbytes for each in tensors)
    planned = device_memory(model, config).workspace
    assert held <= planned
    assert planned < 2 * held
