"""Triton's programs without a device: every case of this folder, interpreted, in a process of its own.

It begins with this folder's first test and is asked last of all (conftest.py), so that nobody waits for it.
"""

import os
import subprocess
from importlib.util import find_spec

import pytest


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="this is that process")
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed here")
@pytest.mark.timeout(600)
def test_triton_kernels_in_the_interpreter(interpreted: "subprocess.Popen[str]") -> None:
    output, _ = interpreted.communicate()
    assert interpreted.returncode == 0, output[-12_000:]
