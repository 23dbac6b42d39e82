"""Packages are installed and TypeScript is compiled when something is newer, and only then."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def node_packages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("node_packages", ROOT / "scripts/node_packages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for npm and Node, which write down that they ran, one line each."""
    log, folder = tmp_path / "log", tmp_path / "bin"
    folder.mkdir()
    bodies = {
        "npm": "mkdir -p node_modules dist; touch node_modules/.package-lock.json",
        "node": "true",
    }
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/sh\necho {name} $1 >> {log}\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return log


def test_each_is_done_once(node_packages: ModuleType, programs: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    for name in ("package-lock.json", "tsconfig.json", "src/a.ts"):
        (project / name).touch()
        os.utime(project / name, (1, 1))
    os.utime(project / "src", (1, 1))
    assert node_packages.main([str(project)]) == 0
    assert node_packages.main([str(project)]) == 0
    assert programs.read_text().splitlines() == ["npm ci", "node node_modules/typescript/bin/tsc"]
    (project / "src/a.ts").touch()
    later = (project / "dist/.built").stat().st_mtime + 5
    os.utime(project / "src/a.ts", (later, later))
    node_packages.prepare(project)
    assert programs.read_text().splitlines()[2:] == ["node node_modules/typescript/bin/tsc"]
    os.utime(project / "package-lock.json", (later, later))
    node_packages.prepare(project)
    assert programs.read_text().splitlines()[3] == "npm ci"


def test_a_folder_without_typescript_is_only_installed(
    node_packages: ModuleType, programs: Path, tmp_path: Path
) -> None:
    (tmp_path / "package-lock.json").touch()
    node_packages.prepare(tmp_path)
    assert programs.read_text().splitlines() == ["npm ci"]


def test_a_machine_without_npm_is_told(
    node_packages: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert node_packages.main([]) == 1
    assert "npm is needed" in capsys.readouterr().err
