"""Checks that what the docs name is there: links and their anchors, files, classes and methods.

    python scripts/check_docs.py    exit with 1 and a line for each name that is stale

Links are checked in every Markdown page. Names of files are checked in pages that speak of the tree as it is:
the log and the ADRs speak of their day. Names of classes are checked in the pages about the code.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent

_FOLDERS = (".github", "deploy", "docs", "examples", "proto", "scripts", "sdks", "src", "tests")
# Of Node: what it fetched and what it compiled.
_FETCHED = {"node_modules", "dist"}
# Pages that speak of their day.
_OF_THEIR_DAY = ("docs/log/", "docs/adr/", "CHANGELOG.md")
# Pages about the code: the classes that they name must exist.
_ABOUT_CODE = ("docs/architecture.md", "docs/glossary.md", "CONTRIBUTING.md")

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_FOREIGN = re.compile(r"\bhttps?://\S+|\S*\bllama\.cpp\b")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_ANCHOR = re.compile(r'<a id="([^"]+)">')
_FILE = re.compile(r"(?<![\w~/.*-])[\w*][\w./*-]*\.(?:py|pyi|cpp|h|hpp|proto|sh|md|svg)\b(?![\w*])")
_TREE = re.compile(rf"(?<![\w~/.*-])(?:{'|'.join(_FOLDERS)})/[\w./*-]*\w")
_SPAN = re.compile(r"`([^`\n]+)`")
# A class, or something of one: `KVSlab`, `KVSlab.rollback`, `Runtime.append(…)`.
_CLASS = re.compile(r"[A-Z]\w*[a-z]\w*(?:\.\w+)*(?=$|\()")
_WORD = re.compile(r"\w+")


class Tree:
    """The files of a repository, and what its Markdown pages name."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def problems(self) -> list[str]:
        """One line for each name that leads nowhere."""
        return [f"{page}: {problem}" for page in self.pages for problem in self._stale_in(page)]

    @cached_property
    def files(self) -> list[PurePosixPath]:
        """Every file, as a path below the root."""
        inside = (path for folder in _FOLDERS for path in (self.root / folder).rglob("*"))
        found = (path.relative_to(self.root) for path in [*self.root.glob("*"), *inside] if path.is_file())
        return sorted(PurePosixPath(path) for path in found if not _FETCHED & set(path.parts))

    @cached_property
    def pages(self) -> list[PurePosixPath]:
        """The Markdown files that readers see."""
        return [file for file in self.files if file.suffix == ".md"]

    @cached_property
    def words(self) -> set[str]:
        """Every word of the sources."""
        sources = (file for file in self.files if file.parts[0] in ("src", "proto"))
        read = (self.root / file for file in sources if file.suffix in (".py", ".cpp", ".h", ".proto"))
        return {word for path in read for word in _WORD.findall(path.read_text())}

    def _stale_in(self, page: PurePosixPath) -> Iterator[str]:
        text = (self.root / page).read_text()
        yield from self._dead_links(self.root / page, _FENCE.sub("", text))
        if not str(page).startswith(_OF_THEIR_DAY):
            yield from self._missing_files(self.root / page, _FOREIGN.sub("", text))
        if str(page) in _ABOUT_CODE:
            yield from self._missing_classes(_FENCE.sub("", text))

    def _dead_links(self, page: Path, text: str) -> Iterator[str]:
        for link in dict.fromkeys(_LINK.findall(text)):
            if re.match(r"\w+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists():
                yield f"the link {link} leads nowhere"
            elif anchor and anchor not in _anchors(target.read_text()):
                yield f"the link {link} names no heading of {target.name}"

    def _missing_files(self, page: Path, text: str) -> Iterator[str]:
        linked = set(_LINK.findall(text))
        for name in dict.fromkeys([*_FILE.findall(text), *_TREE.findall(text)]):
            if name not in linked and not (page.parent / name).exists() and not self._has(name):
                yield f"there is no {name}"

    def _has(self, name: str) -> bool:
        """Whether a file or folder has this name: a whole path, or the end of one."""
        return (self.root / name).exists() or any(file.match(name) for file in self.files)

    def _missing_classes(self, text: str) -> Iterator[str]:
        names = (match[0] for span in _SPAN.findall(text) if (match := _CLASS.match(span)))
        for name in dict.fromkeys(names):
            if not self.words.issuperset(name.split(".")):
                yield f"there is no {name} in the sources"


def _anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings, and those that the page has of its own.

    A heading that was there before gets a number.
    """
    headings = _HEADING.findall(_FENCE.sub("", text))
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    anchors = set(_ANCHOR.findall(text))
    seen: Counter[str] = Counter()
    for anchor in (re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain):
        anchors.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return anchors


def main(root: Path = ROOT) -> int:
    problems = Tree(root).problems()
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
