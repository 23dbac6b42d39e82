"""Tests are found by name: a file is called after the module that it tests, or after a listed behaviour."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The folders that mirror the sources, and the behaviours across modules that have files of their own there.
BEHAVIOURS: dict[str, set[str]] = {
    "": {"constrained", "dashboard", "deploy", "examples", "names", "workflows"},
    "bench": {"imports", "verbs"},
    "bench/cluster": set(),
    "bench/gpu": set(),
    "bench/peers": set(),
    "bench/quality": set(),
    "bench/recall": set(),
    "bridge": set(),
    "cli": set(),
    "client": set(),
    "cluster": {"conformance", "console", "dying", "openai", "quotas"},
    "engine": {"against_oracle", "families_bounded", "numerics", "one_token", "real_weights"},
    "engine/cpu": set(),
    "engine/mlx": {"opening"},
    "engine/cuda": {"engine", "gpu", "numerics", "opening", "scheduling", "triton"},
    "grpc_server": {"chaos", "security"},
    "http_server": {"restart", "shared_prefixes"},
    "http_server/completions": set(),
    "http_server/messages": set(),
    "http_server/responses": {"branches", "streaming", "tools"},
    "kernels": set(),
    "kernels/gpu": {"attention", "compiles", "drafts", "interpreted", "rowwise", "sampling", "waits"},
    "models": {"families"},
    "proposers": {"lossless"},
    "recall": set(),
    "scripts": set(),
    "serving": set(),
    "sessions": set(),
    "storage": set(),
    "text": set(),
    "training": set(),
}
# These mirror no folder of the sources: their files are about clients, SDKs, the console and whole processes.
ACROSS = {"compat", "conformance", "console", "e2e"}


def modules(folder: str) -> set[str]:
    sources = ROOT / "scripts" if folder == "scripts" else ROOT / "src/kakeya" / folder
    return {"conftest"} | {path.stem for path in sources.glob("*.py")}


def files(folder: str) -> set[str]:
    return {path.stem.removeprefix("test_") for path in (ROOT / "tests" / folder).glob("test_*.py")}


def test_every_folder_with_tests_is_listed() -> None:
    tests = ROOT / "tests"
    folders = {path.parent.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")}
    assert {"" if folder == "." else folder for folder in folders} == BEHAVIOURS.keys() | ACROSS


@pytest.mark.parametrize("folder", BEHAVIOURS)
def test_a_file_is_called_after_what_it_tests(folder: str) -> None:
    """`test_hub_cache.py` is about one side of `hub.py`."""
    subjects = modules(folder) | BEHAVIOURS[folder]
    # A package has one file of its own name.
    named = files(folder) - {Path(folder).name}
    strays = [name for name in named if not any(f"{name}_".startswith(f"{s}_") for s in subjects)]
    assert strays == []
    assert files(folder) >= BEHAVIOURS[folder]
