"""Models in the hub's own cache, laid out as its library does, are used there and not fetched again."""

import hashlib
import json
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants, scan_cache_dir

from kakeya.models import catalogue, hub, store
from kakeya.models.checkpoint import open_checkpoint
from support import tiny

REVISION = "c0ffee" * 6 + "c0de"
SMALL = {"config.json": b"{}", "tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}
PARTS = [f"m-Q4_K_M-0000{number}-of-00002.gguf" for number in (1, 2)]


class HubCache:
    """The library's layout: blobs by their digest, snapshots of links to them, a commit for each branch."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fetched: list[str] = []

    def add(self, hub_id: str, files: dict[str, bytes]) -> Path:
        folder = self.root / f"models--{hub_id.replace('/', '--')}"
        snapshot = folder / "snapshots" / REVISION
        for name, data in files.items():
            large = name.endswith((".gguf", ".safetensors"))
            digest = (hashlib.sha256 if large else hashlib.sha1)(data).hexdigest()
            for path in (folder / "blobs" / digest, snapshot / name, folder / "refs" / "main"):
                path.parent.mkdir(parents=True, exist_ok=True)
            (folder / "blobs" / digest).write_bytes(data)
            (snapshot / name).symlink_to(folder / "blobs" / digest)
            (folder / "refs" / "main").write_text(REVISION)
        return snapshot


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubCache:
    """The user's cache of the hub, and a hub that only says that it was asked."""
    cache = HubCache(tmp_path / "hub")
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "ours"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache.root))

    def fetch(repository: hub.Repository, progress: store.Progress) -> Path:
        cache.fetched.append(str(repository))
        return tmp_path / "fetched"

    monkeypatch.setattr(hub.Repository, "fetch", fetch)
    monkeypatch.setattr(HfApi, "repo_info", lambda *_, **__: pytest.fail("the hub was asked"))
    return cache


def test_the_cache_is_one_that_the_library_knows(hub_cache: HubCache) -> None:
    hub_cache.add("org/name", {"m-Q8_0.gguf": b"8"})
    [repository] = scan_cache_dir(hub_cache.root).repos
    assert repository.repo_id == "org/name"


def test_a_gguf_file_is_used_where_it_lies(hub_cache: HubCache) -> None:
    snapshot = hub_cache.add("org/name", {"m-Q8_0.gguf": b"8", "deep/m-Q6_K.gguf": b"6", "README.md": b"r"})
    assert catalogue.resolve("org/name:q8_0") == snapshot / "m-Q8_0.gguf"
    assert catalogue.resolve("org/name/deep/m-Q6_K.gguf") == snapshot / "deep/m-Q6_K.gguf"
    usual = catalogue.resolve("org/name")
    assert usual == snapshot / "deep/m-Q6_K.gguf"
    assert catalogue.quant_taken("org/name", usual) == "Q6_K"
    assert hub_cache.fetched == []
    assert not store.cache_dir().exists(), "nothing is copied"


@pytest.mark.parametrize("name", ["org/name:Q4_K_M", "org/other:Q8_0", "org/name/m-Q4_0.gguf"])
def test_what_is_not_there_is_fetched(hub_cache: HubCache, name: str) -> None:
    hub_cache.add("org/name", {"m-Q8_0.gguf": b"8"})
    catalogue.resolve(name)
    assert hub_cache.fetched == [name]


def test_a_split_model_is_used_when_all_parts_are_there(hub_cache: HubCache) -> None:
    hub_cache.add("org/name", {PARTS[1]: b"2"})
    catalogue.resolve("org/name:Q4_K_M")
    assert hub_cache.fetched == ["org/name:Q4_K_M"]
    snapshot = hub_cache.add("org/name", {PARTS[0]: b"1"})
    assert catalogue.resolve("org/name:Q4_K_M") == catalogue.pull("org/name") == snapshot / PARTS[0]


def test_a_whole_checkpoint_opens_from_there(hub_cache: HubCache, tmp_path: Path) -> None:
    written = tiny.write_llama(tmp_path / "written")
    files = {path.name: path.read_bytes() for path in written.iterdir()}
    snapshot = hub_cache.add("org/name", SMALL | files)
    assert catalogue.resolve("org/name") == snapshot
    assert open_checkpoint(snapshot).fingerprint == open_checkpoint(written).fingerprint


INDEX = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}).encode()


@pytest.mark.parametrize(
    "files",
    [
        SMALL,
        {**SMALL, "tokenizer.model": b"t"},
        {"config.json": b"{}", "model.safetensors": b"w"},
        {**SMALL, hub._INDEX: INDEX, "one.safetensors": b"w"},
        {**SMALL, hub._INDEX: b"[]", "model.safetensors": b"w"},
        {**SMALL, hub._INDEX: b"no JSON", "model.safetensors": b"w"},
    ],
)
def test_half_a_checkpoint_is_none(hub_cache: HubCache, files: dict[str, bytes]) -> None:
    hub_cache.add("org/name", files)
    catalogue.resolve("org/name")
    assert hub_cache.fetched == ["org/name"]


def test_shards_are_counted_by_their_index(hub_cache: HubCache) -> None:
    shards = {"one.safetensors": b"1", "two.safetensors": b"2"}
    snapshot = hub_cache.add("org/name", {**SMALL, hub._INDEX: INDEX, **shards})
    assert catalogue.resolve("org/name") == snapshot


def test_ours_comes_first(hub_cache: HubCache) -> None:
    hub_cache.add("org/name", {"m-Q8_0.gguf": b"theirs"})
    ours = hub.Repository("org", "name").gguf("m-Q8_0.gguf")
    ours.parent.mkdir(parents=True)
    ours.write_bytes(b"ours")
    assert catalogue.resolve("org/name") == ours


def test_the_catalogue_lists_what_is_there(hub_cache: HubCache) -> None:
    entry = catalogue.CATALOGUE["qwen3-4b"]
    assert isinstance(entry.source, hub.Repository)
    snapshot = hub_cache.add(entry.source.hub_id, {"Qwen3-4B-Q4_K_M.gguf": b"4"})
    [listed] = [each for each in catalogue.list_models() if each.name == "qwen3-4b"]
    assert listed.path == snapshot / "Qwen3-4B-Q4_K_M.gguf"


@pytest.mark.parametrize("name", ["m-Q8_0.gguf", "model.safetensors"])
def test_pull_checks_it_and_fetches_a_damaged_one_into_our_own(
    hub_cache: HubCache, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = hub_cache.add("org/name", {**SMALL, name: b"weights"})
    whole = catalogue.pull("org/name")
    assert whole in (snapshot, snapshot / name)
    assert hub_cache.fetched == []
    (snapshot / name).resolve().write_bytes(b"changed")
    catalogue.pull("org/name")
    assert hub_cache.fetched == ["org/name"]
    assert (snapshot / name).read_bytes() == b"changed", "what is not ours stays as it is"
    assert f"{name} is damaged" in caplog.text


def test_a_cache_without_links_states_no_digests(hub_cache: HubCache) -> None:
    snapshot = hub_cache.add("org/name", {"m-Q8_0.gguf": b"8"})
    (snapshot / "m-Q8_0.gguf").unlink()
    (snapshot / "m-Q8_0.gguf").write_bytes(b"8")
    assert catalogue.pull("org/name") == snapshot / "m-Q8_0.gguf"


def test_a_name_that_no_repository_has_is_not_looked_for(hub_cache: HubCache) -> None:
    catalogue.resolve("org/name--with--dashes")
    assert hub_cache.fetched == ["org/name--with--dashes"]
