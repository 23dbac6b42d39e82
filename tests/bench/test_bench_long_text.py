"""The text that is read at length: paragraphs out of pages, pages out of a package, a package out of apt."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kakeya.bench import long_text
from kakeya.bench.html_prose import linked_pages, paragraphs
from kakeya.bench.long_text import (
    PACKAGE,
    PAGES,
    book,
    packaged_text,
    text_of_file,
    text_of_package,
)
from kakeya.bench.prose import prose
from kakeya.errors import ConfigError

PAGE = """<!doctype html><html><head><title>A title that is long enough to be taken for prose.</title>
<style>p { color: red; } /* eight words that are no prose at all. */</style></head><body>
<ul class="docnav"><li><a href="previous.html">Prev</a></li><li>Next</li></ul>
<h1>1. A heading of more than eight words without a full stop</h1>
<div class="para">The <em>first</em> paragraph runs
   over two lines &amp; has <a href="x.html">a link</a>.<pre>A listing that is long enough to count.</pre>
It goes on behind the listing, as books like this one do.</div>
<p>Too short.</p>
<table><tr><td>Cells of a table are left out, however many words they have.</td></tr></table>
<p>The last one is never closed, and it is not lost, is it?"""

needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed")


def test_paragraphs_are_whole_sentences_and_nothing_else() -> None:
    assert paragraphs(PAGE) == [
        "The first paragraph runs over two lines & has a link.",
        "It goes on behind the listing, as books like this one do.",
        "The last one is never closed, and it is not lost, is it?",
    ]


def test_a_stray_end_does_not_swallow_the_rest() -> None:
    assert paragraphs("</pre></table><p>One two three four five six seven eight.") != []


def test_pages_come_in_the_order_of_the_contents_each_once() -> None:
    index = '<a href="b.html">B</a><a name="x">none</a><a href="a.html#part">A</a><a href="b.html#2">B2</a>'
    assert linked_pages(index + '<a href="#top">top</a><link href="style.css">') == ["b.html", "a.html"]


def sentence(word: str) -> str:
    return f"This page is about {word}, and it has enough words."


def build_package(folder: Path, index: str) -> Path:
    """A package with three pages, one in another language and one that nothing leads to."""
    tree = folder / "tree"
    english = tree / PAGES
    other = english.parent / "de-DE"
    for directory in (tree / "DEBIAN", english, other):
        directory.mkdir(parents=True)
    fields = (f"Package: {PACKAGE}", "Version: 1.2~3", "Architecture: all", "Maintainer: A <a@b>")
    (tree / "DEBIAN" / "control").write_text("\n".join([*fields, "Description: a book"]) + "\n")
    (english / "index.html").write_text(index)
    for name in ("one", "two", "unlinked"):
        (english / f"{name}.html").write_text(f"<p>{sentence(name)}</p>")
    (other / "one.html").write_text(f"<p>{sentence('eins')}</p>")
    archive = folder / f"{PACKAGE}_1.2~3_all.deb"
    command = ["dpkg-deb", "--root-owner-group", "--build", str(tree), str(archive)]
    subprocess.run(command, check=True, capture_output=True)
    return archive


INDEX = '<a href="two.html">2</a><a href="one.html">1</a><a href="absent.html">?</a>'


@needs_dpkg
def test_a_package_is_read_in_the_order_of_its_contents(tmp_path: Path) -> None:
    text = text_of_package(build_package(tmp_path, INDEX))
    assert text == f"{sentence('two')}\n\n{sentence('one')}\n"


@needs_dpkg
def test_a_package_without_prose_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no prose under {PAGES}; .*--text FILE"):
        text_of_package(build_package(tmp_path, "<p>no links</p>"))


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that are found first."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def pretend(tools: Path, script: str) -> None:
    """Let `apt-get` be this script."""
    program = tools / "apt-get"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@needs_dpkg
def test_the_book_is_fetched_once_and_kept(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = build_package(tmp_path, INDEX)
    pretend(tools, f'[ "$*" = "download --quiet {PACKAGE}" ] && cp "{archive}" .')
    folder = tmp_path / "cache" / "texts"
    fetched = book(folder)
    assert fetched.source == {"package": PACKAGE, "version": "1.2~3"}
    assert fetched.text.startswith(sentence("two"))
    assert [path.name for path in folder.iterdir()] == [f"{PACKAGE}_1.2~3.txt"]
    monkeypatch.setenv("PATH", "")
    assert book(folder) == fetched


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'E: Unable to locate package' >&2; exit 100", "apt-get said: E: Unable to locate package"),
        ("exit 3", "apt-get said: nothing"),
        ("true", "apt-get left no package behind"),
    ],
)
def test_a_fetch_that_fails_names_the_way_out(tools: Path, tmp_path: Path, script: str, reason: str) -> None:
    pretend(tools, script)
    with pytest.raises(ConfigError, match=f"{reason}; give a text of your own with --text FILE"):
        book(tmp_path / "texts")
    assert list((tmp_path / "texts").iterdir()) == []


def test_a_fetch_that_hangs_is_given_up(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "FETCH_SECONDS", 0.2)
    pretend(tools, "exec sleep 20")
    with pytest.raises(ConfigError, match="apt-get took more than"):
        book(tmp_path / "texts")


def test_without_apt_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="there is no apt-get here; .* with --text FILE"):
        book(tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="it cannot be kept in .*--text FILE"):
        book(tmp_path / "file" / "texts")


def test_a_file_says_what_it_is_and_not_where(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("Größe", encoding="utf-8")
    facts = text_of_file(path).facts
    assert facts == {
        "file": "mine.txt",
        "sha256": hashlib.sha256("Größe".encode()).hexdigest(),
        "characters": 5,
    }


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("binary", "absent"):
        with pytest.raises(ConfigError, match=f"{name} cannot be read as UTF-8"):
            text_of_file(tmp_path / name)


def test_the_packaged_text_is_the_prose_of_the_other_benches() -> None:
    assert packaged_text().text == prose()
