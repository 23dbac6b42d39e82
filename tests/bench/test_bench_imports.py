"""Conclusions can be drawn anywhere: they need nothing that is not in the standard library."""

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "kakeya" / "bench"
RESULTS = sorted(path.stem for path in SOURCE.glob("*_results.py"))
PURE = ["stats", "gates", "session_page", "capacity_page", "gpu_page", "gpu_plan"]


def test_there_are_conclusions_to_check() -> None:
    assert {"session_results", "http_session_results", "capacity_results", "gpu_results"} <= set(RESULTS)


@pytest.mark.parametrize("module", [*RESULTS, *PURE])
def test_conclusions_import_nothing_foreign(module: str) -> None:
    program = (
        f"import sys; before = set(sys.modules); import kakeya.bench.{module}; "
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(*sorted(names - set(sys.stdlib_module_names) - {'kakeya'}))"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert outcome.stdout.strip() == ""
