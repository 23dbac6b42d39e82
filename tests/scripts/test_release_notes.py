"""The notes of a release are what the changelog says about its version."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import kakeya

ROOT = Path(__file__).parents[2]
CHANGELOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2027-01-02

### Added

- One [thing](docs/one.md).

## [0.1.0] - 2026-12-01

- The first.

[0.2.0]: https://example.com/0.2.0
"""


@pytest.fixture(scope="module")
def notes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_notes", ROOT / "scripts/release_notes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "src/kakeya").mkdir(parents=True)
    (tmp_path / "src/kakeya/__init__.py").write_text('"""Words."""\n\n__version__ = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


@pytest.mark.parametrize(
    "arguments, printed",
    [
        (["0.2.0"], "### Added\n\n- One [thing](docs/one.md).\n"),
        (["--tag", "v0.2.0"], "### Added\n\n- One [thing](docs/one.md).\n"),
        (["0.1.0"], "- The first.\n"),
    ],
)
def test_a_section_is_printed(
    notes: ModuleType, tree: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], printed: str
) -> None:
    assert notes.main(arguments, tree) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["0.3.0"], "CHANGELOG.md says nothing about 0.3.0"),
        (["0.2"], "CHANGELOG.md says nothing about 0.2"),
        (["Unreleased"], "CHANGELOG.md says nothing about Unreleased"),
        (["--tag", "v0.1.0"], "the tag is v0.1.0, and the package has version 0.2.0: tag it v0.2.0"),
        (["--tag", "0.2.0"], "the tag is 0.2.0, and the package has version 0.2.0: tag it v0.2.0"),
    ],
)
def test_a_version_without_notes_and_a_wrong_tag_fail(
    notes: ModuleType, tree: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert notes.main(arguments, tree) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"{message}\n")


def test_the_version_of_the_package_is_found(notes: ModuleType) -> None:
    assert notes.version_of_tag(f"v{kakeya.__version__}", ROOT) == kakeya.__version__
