"""Triton's programs without a device: every case of this folder, interpreted, in a process of its own.

Triton reads the switch when it is first imported, and by the time these tests run, others have imported it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="this is that process")
@pytest.mark.timeout(600)
def test_triton_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed here")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    # Without coverage, which makes the interpreter take three times as long.
    unwatched = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    interpreted = subprocess.run(
        command, env=unwatched | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert interpreted.returncode == 0, interpreted.stdout[-10_000:] + interpreted.stderr[-2_000:]
