"""Checks that the sdist and the wheels in a folder hold what the package needs, and nothing else.

    python scripts/check_package.py dist    exit with 1 and a line for each thing that is wrong

`--without-kernels` is for wheels that were built where no compiler works.
"""

import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_SOURCES = "kakeya/kernels/src/"
_NATIVE = re.compile(r"kakeya/kernels/_native\..*\.so$")
# What an sdist needs to build a wheel, and what readers of it look for.
_BESIDE = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt")


def problems(folder: Path, root: Path = ROOT, *, kernels: bool = True) -> Iterator[str]:
    """One line for each thing that is wrong with what `folder` holds."""
    version, package = version_of(root), package_files(root)
    sdists, wheels = sorted(folder.glob("*.tar.gz")), sorted(folder.glob("*.whl"))
    if [each.name for each in sdists] != [f"kakeya-{version}.tar.gz"]:
        yield f"there should be one sdist, of version {version}: {[each.name for each in sdists]}"
    if not wheels:
        yield "there is no wheel"
    for sdist in sdists:
        needed = {f"src/{name}" for name in package} | set(_BESIDE)
        yield from _missing(sdist.name, needed, sdist_files(sdist))
    for wheel in wheels:
        if not wheel.name.startswith(f"kakeya-{version}-"):
            yield f"{wheel.name} is not of version {version}"
        yield from _wrong_in_wheel(
            wheel, {name for name in package if not name.startswith(_SOURCES)}, kernels
        )


def version_of(root: Path) -> str:
    """The version that `kakeya.__version__` names; read, so that nothing must be installed."""
    found = re.search(r'^__version__ = "(.+)"$', (root / "src/kakeya/__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def package_files(root: Path) -> set[str]:
    """The package in the tree, without what was compiled there."""
    source = root / "src"
    paths = (path for path in (source / "kakeya").rglob("*") if path.is_file())
    kept = (path for path in paths if path.suffix not in (".so", ".pyc"))
    return {path.relative_to(source).as_posix() for path in kept}


def sdist_files(sdist: Path) -> set[str]:
    """What an sdist holds, below its one folder."""
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


def _wrong_in_wheel(wheel: Path, needed: set[str], kernels: bool) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.endswith("/")}
    native = {name for name in held if _NATIVE.match(name)}
    described = {name for name in held if re.match(r"kakeya-[^/]+\.dist-info/", name)}
    yield from _missing(wheel.name, needed, held)
    if len(native) != int(kernels):
        yield f"{wheel.name} has {len(native)} libraries of kernels, and should have {int(kernels)}"
    for name in sorted(held - needed - native - described):
        yield f"{wheel.name} should not hold {name}"


def _missing(archive: str, needed: set[str], held: set[str]) -> Iterator[str]:
    for name in sorted(needed - held):
        yield f"{archive} lacks {name}"


def main(arguments: list[str], root: Path = ROOT) -> int:
    *flags, folder = arguments
    wrong = list(problems(Path(folder), root, kernels="--without-kernels" not in flags))
    for line in wrong:
        sys.stderr.write(f"{line}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
