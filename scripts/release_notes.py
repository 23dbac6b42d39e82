"""Prints what CHANGELOG.md says about a version, for the page of its release.

    python scripts/release_notes.py 0.1.0          the section of that version
    python scripts/release_notes.py Unreleased     what the next version will say
    python scripts/release_notes.py --tag v0.1.0   the same for a tag, which must be of this version

Exits with 1 and a line for a version without a section, and for a tag of another version.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


def section(changelog: str, version: str) -> str | None:
    """The body of the section `## [version] …`, or None where there is none or it is empty."""
    headings = rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## |^\[[^\]]+\]: |\Z)"
    found = re.search(headings, changelog, re.MULTILINE | re.DOTALL)
    return (found[1].strip() or None) if found is not None else None


def version_of_tag(tag: str, root: Path) -> str:
    """The version that a tag names. Raises ValueError when the package has another."""
    found = _VERSION.search((root / "src/kakeya/__init__.py").read_text())
    assert found is not None
    if tag != f"v{found[1]}":
        raise ValueError(f"the tag is {tag}, and the package has version {found[1]}: tag it v{found[1]}")
    return found[1]


def main(arguments: list[str], root: Path = ROOT) -> int:
    try:
        version = version_of_tag(arguments[1], root) if arguments[0] == "--tag" else arguments[0]
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    notes = section((root / "CHANGELOG.md").read_text(), version)
    if notes is None:
        sys.stderr.write(f"CHANGELOG.md says nothing about {version}\n")
        return 1
    sys.stdout.write(f"{notes}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
