"""Reports can be drawn anywhere, and help is quick: neither needs what only measuring needs."""

import subprocess
import sys

import pytest


def imported(statement: str) -> set[str]:
    program = (
        f"import sys; before = set(sys.modules); {statement}; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(outcome.stdout.split()) - set(sys.stdlib_module_names) - {"kakeya"}


@pytest.mark.parametrize("module", ["stats", "report", "tables", "chart", "page", "cases", "text"])
def test_what_is_pure_imports_nothing_foreign(module: str) -> None:
    assert imported(f"import kakeya.bench.{module}") == set()


def test_flags_and_conclusions_do_without_what_measures() -> None:
    """Of any benchmark: help does not wait for torch."""
    benchmarks = "[registry.benchmark_of(kind) for kind in registry.KINDS]"
    heavy = {"torch", "triton", "psutil", "transformers", "tokenizers", "llama_cpp", "jinja2"}
    assert not imported(f"from kakeya.bench import registry; import kakeya.cli.bench; {benchmarks}") & heavy
