"""The package as users get it, built where no compiler works; what the check finds wrong with others.

`make package` builds it with its kernels, and serves a model with it.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from types import ModuleType

import pytest

import kakeya
from support.untraced import untraced_environment

ROOT = Path(__file__).parents[2]
BUILT_FROM = (
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "constraints.txt",
)
NO_COMPILER = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def check_package() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_package", ROOT / "scripts/check_package.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was made from it in isolation."""
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, tree)
    shutil.copytree(
        ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    )
    run_program("-m", "build", "--outdir", str(folder), str(tree), **NO_COMPILER)
    return folder


def run_program(*arguments: str, cwd: Path | None = None, **environment: str) -> str:
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=untraced_environment() | environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return ended.stdout


@pytest.fixture(scope="module")
def unpacked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pip would lay it out."""
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return folder


def test_both_hold_what_they_should(check_package: ModuleType, built: Path) -> None:
    assert check_package.main(["--without-kernels", str(built)]) == 0
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for part in ("kakeya/proposers/data/", "kakeya/http_server/console/index.html", "kakeya/py.typed"):
        assert any(name.startswith(part) for name in names), part


def test_a_wheel_for_others_must_have_kernels(
    check_package: ModuleType, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_package.main([str(built)]) == 1
    assert "has 0 libraries of kernels, and should have 1" in capsys.readouterr().err


def test_what_is_missing_or_too_much_is_named(check_package: ModuleType, built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(tmp_path / wheel.name, "w") as broken:
        for name in whole.namelist():
            if name != "kakeya/http_server/console/main.js":
                broken.writestr(name, whole.read(name))
        broken.writestr("tests/test_config.py", "")
    assert list(check_package.problems(tmp_path, kernels=False)) == [
        f"there should be one sdist, of version {kakeya.__version__}: []",
        f"{wheel.name} lacks kakeya/http_server/console/main.js",
        f"{wheel.name} should not hold tests/test_config.py",
    ]
    (tmp_path / wheel.name).rename(tmp_path / "kakeya-9.9.9-py3-none-any.whl")
    assert f"kakeya-9.9.9-py3-none-any.whl is not of version {kakeya.__version__}" in list(
        check_package.problems(tmp_path, kernels=False)
    )
    assert "there is no wheel" in list(check_package.problems(tmp_path / "empty"))


def test_the_version_comes_from_one_place(unpacked: Path) -> None:
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    described = HeaderParser().parsestr(metadata.read_text())
    assert described["Version"] == kakeya.__version__
    assert {"cuda", "hub", "otel", "train"} <= set(described.get_all("Provides-Extra"))
    node = json.loads((ROOT / "sdks/typescript/package.json").read_text())
    assert node["version"] == kakeya.__version__


def test_without_kernels_torch_computes_and_says_so(unpacked: Path, tmp_path: Path) -> None:
    """The installed package, away from the tree: importing it looks for no compiler."""
    program = "import sys; from kakeya.cli import main; main(sys.argv[1:])"
    environment = {
        "PYTHONPATH": str(unpacked),
        "PATH": "/nowhere",
        "CXX": "",
        "HOME": os.environ.get("HOME", "/"),
    }
    text = run_program("-c", program, "doctor", cwd=tmp_path, **environment)
    assert f"kakeya {kakeya.__version__}" in text
    assert "kernels    torch, since No module named 'kakeya.kernels._native'" in text
    assert "--backend cpu: torch kernels" in text
    assert "install a C++17 compiler, then install the package again" in text
