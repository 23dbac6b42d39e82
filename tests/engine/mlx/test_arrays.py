"""Memory that torch and MLX share, and threads that end."""

import subprocess
import sys

import mlx.core as mx
import pytest
import torch

from kakeya.engine.mlx.arrays import bits_of, shared_zeros, to_mlx, to_torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_host_writes_the_device_reads(dtype: torch.dtype) -> None:
    array, tensor = shared_zeros((3, 4), dtype)
    tensor[1] = 1.5
    seen = array.view(mx.bfloat16) if dtype == torch.bfloat16 else array
    assert seen.sum(axis=1).tolist() == [0.0, 6.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_have_the_same_bits(dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(dtype).T
    array = bits_of(to_mlx(tensor))
    mx.eval(array)
    assert torch.equal(to_torch(array, dtype), tensor)


PROGRAM = """
import threading
import mlx.core as mx
from kakeya.engine.mlx.arrays import end_streams_with_thread

def work():
    end_streams_with_thread()
    mx.eval(mx.compile(lambda x: mx.exp(x) * x)(mx.ones((3, 4))))

for _ in range(3):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


@pytest.mark.slow
def test_a_process_whose_threads_ran_compiled_steps_ends_in_peace() -> None:
    """MLX aborts it otherwise, now and then."""
    for _ in range(2):
        subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
