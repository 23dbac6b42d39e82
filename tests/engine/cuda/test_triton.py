"""The engine over the Triton kernels, interpreted: what the backend hands them is what they take."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kakeya.types import Numerics
from support import tiny
from support.gpu_kernels import interpreting

# A process of its own, because triton asks the environment when it is imported.
PROGRAM = """
import sys
import torch
from pathlib import Path
from kakeya.engine.engine import Engine
from kakeya.kernels.gpu.triton_kernels import TritonKernels
from kakeya.types import Numerics, SamplingParams
from support import tiny
from support.engines import say, tokens_of
from support.gpu_kernels import hurry_interpreter

torch.set_num_threads(1)
hurry_interpreter()
tiny.load_gpu_kernels = lambda where, choice: TritonKernels()
directory, numerics = Path(sys.argv[1]), Numerics(sys.argv[2])
config = tiny.engine_config(numerics=numerics, capacity=2, max_batch_tokens=16)
said = []
for backend in (
    tiny.make_backend(tiny.load(directory, config), config), tiny.make_device_backend(directory, config)
):
    engine = Engine(backend, config).start()
    first, second = engine.open("first", []), engine.open("second", [])
    engine.append(first, [5, 9, 22, 13, 7, 11, 2, 40, 41, 3])
    engine.append(second, [7])
    streams = [
        engine.generate(first, 2, SamplingParams()),
        engine.generate(second, 4, SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=5)),
    ]
    said.append([*map(tokens_of, streams), say(engine, first, [4], 3)])
    engine.shutdown()
assert said[0] == said[1], said
"""


# Not imported to find out: that must wait for the process below.
@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed here")
@pytest.mark.parametrize("numerics", Numerics)
def test_the_engine_says_the_same_over_triton(tmp_path: Path, numerics: Numerics) -> None:
    directory = tiny.write_llama(tmp_path, num_hidden_layers=1)
    outcome = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory), numerics.value],
        env=interpreting(),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert outcome.returncode == 0, outcome.stderr
