"""Triton's programs without a device: every case of this folder, interpreted, in a process of its own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.gpu_kernels import interpreting


@pytest.mark.slow
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="this is that process")
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed here")
@pytest.mark.timeout(900)
def test_triton_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    done = subprocess.run(command, env=interpreting(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-12_000:]
