"""The hub is played by a folder: `FakeHub` answers as huggingface_hub does, held to its signatures."""

import builtins
import errno
import hashlib
import inspect
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import HfApi, errors
from huggingface_hub.hf_api import BlobLfsInfo, ModelInfo, RepoSibling
from huggingface_hub.utils import are_progress_bars_disabled, filter_repo_objects

from kakeya.errors import ConfigError, DownloadFailed, KakeyaError, ModelNotFound, UnsupportedModel
from kakeya.models import catalogue, hub, store
from kakeya.models.checkpoint import open_checkpoint
from support import tiny

REAL_SNAPSHOT_DOWNLOAD = huggingface_hub.snapshot_download
REAL_MODEL_INFO = HfApi.model_info
WEIGHTS = b"weights of the model" * 50


class FakeHub:
    """Repositories of one hub: what is in them, and what goes wrong."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.trouble: Exception | None = None
        self.trouble_while_downloading: Exception | None = None
        self.downloads = 0
        self.damage = False

    def add(self, hub_id: str, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            path = self.root / hub_id / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def model_info(self, _: HfApi, repo_id: str, **options: Any) -> ModelInfo:
        inspect.signature(REAL_MODEL_INFO).bind(None, repo_id, **options)
        if self.trouble is not None:
            raise self.trouble
        folder = self.root / repo_id
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        info = ModelInfo(id=repo_id, sha="c0ffee", private=False, downloads=0, likes=0, tags=[])
        info.siblings = [self._sibling(path, path.relative_to(folder).as_posix()) for path in paths]
        return info

    def _sibling(self, path: Path, name: str) -> RepoSibling:
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        is_large = name.endswith((".safetensors", ".gguf"))
        lfs = BlobLfsInfo(size=len(content), sha256=digest, pointer_size=1) if is_large else None
        return RepoSibling(rfilename=name, size=len(content), lfs=lfs)

    def snapshot_download(self, repo_id: str, **options: Any) -> str:
        inspect.signature(REAL_SNAPSHOT_DOWNLOAD).bind(repo_id, **options)
        assert options["revision"] == "c0ffee"
        assert are_progress_bars_disabled()
        self.downloads += 1
        source, target = self.root / repo_id, Path(options["local_dir"])
        notes = target / ".cache" / "huggingface"
        notes.mkdir(parents=True)
        names = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
        for name in filter_repo_objects(names, allow_patterns=options["allow_patterns"]):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
            if self.trouble_while_downloading is not None:
                raise self.trouble_while_downloading
            if self.damage:
                (target / name).write_bytes(bytes(len((target / name).read_bytes())))
        return str(target)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(HfApi, "model_info", lambda *args, **options: fake.model_info(*args, **options))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def response_error(kind: type[Exception]) -> Exception:
    """An error as the library builds it, without the HTTP response that only it can have."""
    error = kind.__new__(kind)
    Exception.__init__(error, "as the hub says it")
    return error


@pytest.mark.parametrize(
    "name, expected",
    [
        ("org/name", hub.Repository("org", "name")),
        ("Org-1/some.model_2", hub.Repository("Org-1", "some.model_2")),
        ("org/name/q4.gguf", hub.Repository("org", "name", "q4.gguf")),
        ("org/name/deep/q4.gguf", hub.Repository("org", "name", "deep/q4.gguf")),
        ("name", None),
        ("./name", None),
        ("org/name/other.bin", None),
        ("org/../x.gguf", None),
        ("", None),
    ],
)
def test_what_is_a_hub_id(name: str, expected: hub.Repository | None) -> None:
    assert hub.parse(name) == expected


def test_safetensors_come_with_their_json_and_nothing_else(fake: FakeHub, tmp_path: Path) -> None:
    wanted = {"model-1-of-1.safetensors": WEIGHTS, "config.json": b"{}", "chat_template.jinja": b"x"}
    noise = {"README.md": b"r", "model.bin": b"b", "onnx/model.safetensors": b"o", "q.gguf": b"g"}
    fake.add("org/name", {**wanted, **noise})
    path = catalogue.resolve("org/name")
    assert {file.name: file.read_bytes() for file in path.iterdir()} == wanted
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["models"]
    assert not are_progress_bars_disabled()
    assert catalogue.resolve("org/name") == path
    assert fake.downloads == 1


def test_the_only_gguf_file_is_taken(fake: FakeHub) -> None:
    fake.add("org/name", {"deep/model.gguf": WEIGHTS, "README.md": b"r"})
    path = catalogue.resolve("org/name")
    assert path.name == "model.gguf"
    assert path.read_bytes() == WEIGHTS
    assert catalogue.resolve("org/name") == path
    assert catalogue.resolve("org/name/deep/model.gguf") == path
    assert fake.downloads == 1
    assert hub.fetched_checkpoints() == [("org/name/deep/model.gguf", path)]


def test_of_several_gguf_files_one_must_be_named(fake: FakeHub) -> None:
    fake.add("org/name", {"a[1].gguf": b"a", "a1.gguf": b"1", "b.gguf": b"b"})
    with pytest.raises(ModelNotFound, match=r"name one as org/name/FILE: a1.gguf, a\[1\].gguf, b.gguf"):
        catalogue.resolve("org/name")
    assert catalogue.resolve("org/name/a[1].gguf").read_bytes() == b"a"
    assert catalogue.resolve("org/name/b.gguf").read_bytes() == b"b"
    assert catalogue.resolve("org/name/a[1].gguf").read_bytes() == b"a"
    assert fake.downloads == 2
    with pytest.raises(ModelNotFound, match=r"has no file c.gguf; its GGUF files: a1.gguf"):
        catalogue.resolve("org/name/c.gguf")


def test_what_was_fetched_opens_as_a_checkpoint(fake: FakeHub, tmp_path: Path) -> None:
    folder = tiny.write_llama(tmp_path / "written")
    fake.add("org/name", {path.name: path.read_bytes() for path in folder.iterdir()})
    checkpoint = open_checkpoint(catalogue.resolve("org/name"))
    assert checkpoint.fingerprint == open_checkpoint(folder).fingerprint
    assert hub.fetched_checkpoints() == [("org/name", catalogue.resolve("org/name"))]


def test_a_repository_without_weights(fake: FakeHub) -> None:
    fake.add("org/name", {"config.json": b"{}"})
    with pytest.raises(UnsupportedModel, match="neither safetensors nor GGUF"):
        catalogue.resolve("org/name")


@pytest.mark.parametrize(
    "trouble, expected, message",
    [
        (response_error(errors.RepositoryNotFoundError), ModelNotFound, "the hub has no model org/name"),
        (response_error(errors.GatedRepoError), ModelNotFound, "org/name is gated: accept its terms"),
        (errors.HFValidationError("bad"), ModelNotFound, "the hub has no model org/name"),
        (errors.OfflineModeIsEnabled("offline mode"), DownloadFailed, "could not be fetched .*offline mode"),
        (ConnectionError(errno.ECONNRESET, "reset"), DownloadFailed, "could not be fetched .*reset"),
        (RuntimeError("of some HTTP library"), DownloadFailed, "could not be fetched .*HTTP library"),
    ],
)
def test_what_the_hub_raises_becomes_ours(
    fake: FakeHub, trouble: Exception, expected: type[KakeyaError], message: str
) -> None:
    fake.trouble = trouble
    with pytest.raises(expected, match=message):
        catalogue.resolve("org/name")
    assert not are_progress_bars_disabled()


@pytest.mark.parametrize(
    "trouble, message",
    [
        (OSError(errno.ENOSPC, "No space left on device"), "is full"),
        (ConnectionError("the line broke"), "the line broke"),
    ],
)
def test_a_broken_download_leaves_nothing(
    fake: FakeHub, tmp_path: Path, trouble: Exception, message: str
) -> None:
    fake.add("org/name", {"model.safetensors": WEIGHTS})
    fake.trouble_while_downloading = trouble
    with pytest.raises(DownloadFailed, match=message):
        catalogue.resolve("org/name")
    assert list((tmp_path / "cache").rglob("*")) == []


def test_a_damaged_download_is_refused(fake: FakeHub, tmp_path: Path) -> None:
    fake.add("org/name", {"model.safetensors": WEIGHTS})
    fake.damage = True
    with pytest.raises(DownloadFailed, match=r"model.safetensors has SHA-256"):
        catalogue.resolve("org/name")
    assert list((tmp_path / "cache").rglob("*")) == []


def test_a_file_that_did_not_come(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.add("org/name", {"model.safetensors": WEIGHTS})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, local_dir, **__: str(local_dir))
    with pytest.raises(DownloadFailed, match=r"did not send model.safetensors"):
        catalogue.resolve("org/name")


def test_bars_that_were_off_stay_off(fake: FakeHub) -> None:
    fake.add("org/name", {"model.gguf": WEIGHTS})
    huggingface_hub.utils.disable_progress_bars()
    try:
        catalogue.resolve("org/name")
        assert are_progress_bars_disabled()
    finally:
        huggingface_hub.utils.enable_progress_bars()


def test_without_the_library_the_extra_is_named(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_hub(name: str, *rest: Any) -> ModuleType:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_hub)
    with pytest.raises(ConfigError, match=r"pip install 'kakeya\[hub\]'"):
        catalogue.resolve("org/name")


def test_the_real_library_offline_gives_one_line(tmp_path: Path) -> None:
    environment = {"HF_HUB_OFFLINE": "1", store.CACHE_VARIABLE: str(tmp_path), "PATH": ""}
    command = [sys.executable, "-c", "from kakeya.cli import main; main()", "pull", "org/name"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("kakeya: org/name could not be fetched from the hub: ")
    assert done.stderr.count("\n") == 1
