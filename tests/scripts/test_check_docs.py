"""The check of the docs finds every kind of stale name, and leaves alone what is right."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_docs", ROOT / "scripts/check_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with two sources, and docs that name them as they are."""
    files = {
        "src/kakeya/engine/slab.py": "class KVSlab:\n    def rollback(self) -> None: ...\n",
        "src/kakeya/kernels/src/formats.h": "",
        "README.md": "See [the map](docs/architecture.md#the-ring-of-a-slab) and `slab.py`.\n",
        "docs/architecture.md": "# Map\n\n## The ring of a slab\n\n`engine/slab.py`, `KVSlab.rollback()`.\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def problems(check_docs: ModuleType, tree: Path, page: str, text: str) -> list[str]:
    path = tree / page
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    found: list[str] = check_docs.Tree(tree).problems()
    return found


def test_docs_that_name_what_is_there_pass(check_docs: ModuleType, tree: Path) -> None:
    assert check_docs.main(tree) == 0


def test_a_repeated_heading_has_a_number(check_docs: ModuleType, tree: Path) -> None:
    page = '# Map\n\n## Again\n\n## Again\n\n<a id="own"></a> [one](#again) [two](#again-1) [own](#own)\n'
    assert problems(check_docs, tree, "docs/other.md", page) == []
    assert problems(check_docs, tree, "docs/other.md", page + "[three](#again-2)\n") == [
        "docs/other.md: the link #again-2 names no heading of other.md"
    ]


def test_a_stale_name_fails_the_check(
    check_docs: ModuleType, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "src/kakeya/engine/slab.py").rename(tree / "src/kakeya/engine/cache.py")
    assert check_docs.main(tree) == 1
    assert capsys.readouterr().err.splitlines() == [
        "README.md: there is no slab.py",
        "docs/architecture.md: there is no engine/slab.py",
    ]


@pytest.mark.parametrize(
    "named",
    [
        "`engine/slab.py`",
        "`kernels/src/formats.h`",
        "`src/kakeya/engine`",
        "`engine/*.py`",
        "llama.cpp",
        "https://example.org/some/page.md",
        "[the map](architecture.md)",
        "`server.pem`",
    ],
)
def test_what_exists_or_is_foreign_is_right(check_docs: ModuleType, tree: Path, named: str) -> None:
    assert problems(check_docs, tree, "docs/guide.md", named) == []


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ("`models/slab.py`", "there is no models/slab.py"),
        ("`lab.py`", "there is no lab.py"),
        ("`cuda/*.py`", "there is no cuda/*.py"),
        ("`src/kakeya/models`", "there is no src/kakeya/models"),
        ("```\npython scripts/gone.py\n```", "there is no scripts/gone.py"),
        ("[gone](gone.md)", "the link gone.md leads nowhere"),
        ("[gone](architecture.md#gone)", "the link architecture.md#gone names no heading of architecture.md"),
    ],
)
def test_what_is_missing_is_named(check_docs: ModuleType, tree: Path, named: str, problem: str) -> None:
    assert problems(check_docs, tree, "docs/guide.md", named) == [f"docs/guide.md: {problem}"]


def test_pages_about_the_code_name_classes_that_exist(check_docs: ModuleType, tree: Path) -> None:
    text = "`KVSlab`, `KVSlab.shift` and `SlabDesk` hold `Q4_K` blocks."
    assert problems(check_docs, tree, "CONTRIBUTING.md", text) == [
        "CONTRIBUTING.md: there is no KVSlab.shift in the sources",
        "CONTRIBUTING.md: there is no SlabDesk in the sources",
    ]
    assert problems(check_docs, tree, "CONTRIBUTING.md", "`KVSlab`") == []


@pytest.mark.parametrize("page", ["docs/log/2026-11-15-ring.md", "docs/adr/0001-ring.md"])
def test_the_log_and_the_adrs_speak_of_their_day(check_docs: ModuleType, tree: Path, page: str) -> None:
    assert problems(check_docs, tree, page, "`engine/gone.py`") == []
    dead = f"{page}: the link gone.md leads nowhere"
    assert problems(check_docs, tree, page, "[even then](gone.md)") == [dead]
