"""Steps as large as a device is given by default: a block of a prompt beside hundreds of streams."""

from pathlib import Path

from kakeya.config import CacheConfig, EngineConfig
from kakeya.types import BackendChoice, DType, KernelChoice, WeightFormat
from support.engines import Room
from support.tiny import make_device_backend


def test_a_prompt_is_computed_beside_three_hundred_streams(tiny_llama: Path) -> None:
    config = EngineConfig(
        backend=BackendChoice.CUDA,
        cache=CacheConfig(sink=2, window=8, spare=4),
        capacity=301,
        dtype=DType.FLOAT32,
        weights=WeightFormat.FLOAT32,
        kernels=KernelChoice.TORCH,
    )
    room = Room(config, make_device_backend(tiny_llama, config))
    for index in range(300):
        room.start(f"talker {index}", 4, emitted=1)
    room.step()
    room.check_prompt_beside_streams()
