"""A long ordinary text to read: a file of the user's, or a book out of a Debian package.

The book is fetched when it is first wanted, under the machine's own apt settings and without root, and kept
as plain text. It is free to redistribute, but there is no need to: whoever can install packages can have it.
"""

import hashlib
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from kakeya.bench.html_prose import linked_pages, paragraphs
from kakeya.bench.prose import prose
from kakeya.errors import ConfigError

PACKAGE = "debian-handbook"
PAGES = "usr/share/doc/debian-handbook/html/en-US"
FETCH_SECONDS = 600.0


@dataclass(frozen=True)
class LongText:
    """A text and where it comes from, as a report says it."""

    text: str = field(repr=False)
    source: dict[str, str]

    @property
    def facts(self) -> dict[str, str | int]:
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return {**self.source, "sha256": digest, "characters": len(self.text)}


def packaged_text() -> LongText:
    """The short text that travels with us."""
    return LongText(prose(), {"file": "bench/data/galapagos.txt"})


def text_of_file(path: Path) -> LongText:
    """Raises ConfigError for what cannot be read as UTF-8."""
    try:
        return LongText(path.read_text(encoding="utf-8"), {"file": path.name})
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the text {path} cannot be read as UTF-8: {error}") from error


def book(folder: Path) -> LongText:
    """The book, kept in `folder`; it is fetched when it is not there.

    Raises ConfigError, naming --text, where there is no apt or the package cannot be had.
    """
    kept = sorted(folder.glob(f"{PACKAGE}_*.txt"))
    path = kept[-1] if kept else _fetched(folder)
    version = path.stem.removeprefix(f"{PACKAGE}_")
    return LongText(path.read_text(encoding="utf-8"), {"package": PACKAGE, "version": version})


def _fetched(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as name:
            workspace = Path(name)
            _output(["apt-get", "download", "--quiet", PACKAGE], workspace)
            archives = list(workspace.glob("*.deb"))
            if not archives:
                raise _unavailable("apt-get left no package behind")
            version = _output(["dpkg-deb", "--field", str(archives[0]), "Version"], workspace).strip()
            finished = workspace / "text"
            finished.write_text(text_of_package(archives[0]), encoding="utf-8")
            # A report needs the version, and the name is where it is not lost.
            return finished.replace(folder / f"{PACKAGE}_{version}.txt")
    except OSError as error:
        raise _unavailable(f"it cannot be kept in {folder}: {error}") from error


def text_of_package(archive: Path) -> str:
    """The book's paragraphs in reading order, out of a .deb that holds it as HTML pages."""
    pages = _pages(archive)
    order = [name for name in linked_pages(pages.get("index.html", "")) if name in pages]
    text = "\n\n".join(paragraph for name in order for paragraph in paragraphs(pages[name]))
    if not text:
        raise _unavailable(f"there is no prose under {PAGES}")
    return text + "\n"


def _pages(archive: Path) -> dict[str, str]:
    """The English pages by name. Nothing else is unpacked: the other languages are many."""
    command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
    with tempfile.TemporaryFile(dir=archive.parent) as unpacked:
        _run(command, stdout=unpacked.fileno())
        unpacked.seek(0)
        with tarfile.open(fileobj=unpacked) as files:
            pages = {}
            for member in files:
                path = PurePosixPath(member.name)
                if str(path.parent) == PAGES and path.suffix == ".html" and member.isfile():
                    page = files.extractfile(member)
                    assert page is not None, "a plain file has contents"
                    pages[path.name] = page.read().decode("utf-8", errors="replace")
            return pages


def _output(command: Sequence[str], folder: Path) -> str:
    return _run(command, stdout=subprocess.PIPE, folder=folder)


def _run(command: Sequence[str], *, stdout: int, folder: Path | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=FETCH_SECONDS,
        )
    except FileNotFoundError as error:
        raise _unavailable(f"there is no {command[0]} here") from error
    except subprocess.TimeoutExpired as error:
        raise _unavailable(f"{command[0]} took more than {FETCH_SECONDS:.0f} seconds") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
        raise _unavailable(f"{command[0]} said: {said[-1]}")
    return (done.stdout or b"").decode(errors="replace")


def _unavailable(why: str) -> ConfigError:
    return ConfigError(
        f"the default text comes from the Debian package {PACKAGE}, and {why}; "
        "give a text of your own with --text FILE"
    )
