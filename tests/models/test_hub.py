"""Fetching from a hub: the real library against a hub that runs on this machine."""

import builtins
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import HfApi, constants, errors, file_download
from huggingface_hub.utils import are_progress_bars_disabled

from kakeya.errors import ConfigError, DownloadFailed, KakeyaError, ModelNotFound, UnsupportedModel
from kakeya.models import catalogue, hub, store
from kakeya.models.checkpoint import open_checkpoint
from support import tiny
from support.fakes import FakeHub, running_hub

WEIGHTS = b"weights of the model" * 50
CHUNK = 100
DIGEST = hashlib.sha256(WEIGHTS).hexdigest()
GATED = (403, {"X-Error-Code": "GatedRepo"})


@pytest.fixture
def fake(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running_hub() as fake:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        template = fake.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        # Small pieces, so that small files break in the middle; and no pause before the library tries again.
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
        monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda _: None))
        yield fake


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "name, expected",
    [
        ("org/name", hub.Repository("org", "name")),
        ("Org-1/some.model_2", hub.Repository("Org-1", "some.model_2")),
        ("org/name/q4.gguf", hub.Repository("org", "name", "q4.gguf")),
        ("org/name/deep/q4.gguf", hub.Repository("org", "name", "deep/q4.gguf")),
        ("org/name:Q4_K_M", hub.Repository("org", "name", quant="Q4_K_M")),
        ("org/name:ud-q4_k_xl", hub.Repository("org", "name", quant="ud-q4_k_xl")),
        ("name", None),
        ("name:Q4_K_M", None),
        ("./name", None),
        ("org/name/other.bin", None),
        ("org/name:", None),
        ("org/../x.gguf", None),
        ("", None),
    ],
)
def test_what_is_a_hub_id(name: str, expected: hub.Repository | None) -> None:
    assert hub.parse(name) == expected
    assert expected is None or str(expected) == name


def test_safetensors_come_with_their_json_and_nothing_else(fake: FakeHub, cache: Path) -> None:
    wanted = {"model-1-of-1.safetensors": WEIGHTS, "config.json": b"{}", "chat_template.jinja": b"x"}
    noise = {"README.md": b"r", "model.bin": b"b", "onnx/model.safetensors": b"o", "q.gguf": b"g"}
    fake.add("org/name", {**wanted, **noise})
    path = catalogue.resolve("org/name")
    assert {file.name: file.read_bytes() for file in path.iterdir()} == wanted
    record = path.with_name("checkpoint.sha256").read_text()
    assert record == f"{DIGEST}  model-1-of-1.safetensors\n"
    assert list(cache.glob(".*")) == list((cache / "partial").iterdir()) == []
    assert not are_progress_bars_disabled()
    assert catalogue.resolve("org/name") == path
    assert len(fake.downloads) == 1


@pytest.mark.parametrize("index", [None, {"weight_map": {"a": "model-1-of-1.safetensors"}}])
def test_weights_are_not_fetched_twice(index: dict[str, Any] | None, fake: FakeHub) -> None:
    """Mistral's repositories have a second copy for a reader of their own."""
    name = "model.safetensors" if index is None else "model-1-of-1.safetensors"
    fake.add("org/name", {name: WEIGHTS, "consolidated.safetensors": WEIGHTS[1:], "config.json": b"{}"})
    if index is not None:
        fake.add("org/name", {"model.safetensors.index.json": json.dumps(index).encode()})
    path = catalogue.resolve("org/name")
    assert [file.name for file in path.glob("*.safetensors")] == [name]
    assert path.with_name("checkpoint.sha256").read_text() == f"{DIGEST}  {name}\n"
    assert catalogue.pull("org/name") == path


@pytest.mark.parametrize("damaged", [b"[", b"3", b'{"weight_map": 3}'])
def test_damage_beside_weights_is_left_to_the_reader(damaged: bytes, fake: FakeHub) -> None:
    files = {"model.safetensors": WEIGHTS, "config.json": damaged, "model.safetensors.index.json": damaged}
    fake.add("org/name", files)
    assert files_in(catalogue.resolve("org/name")) == sorted(files)


def test_a_network_that_is_refused_is_not_fetched(fake: FakeHub) -> None:
    refused = {"config.json": b'{"model_type": "qwen3_moe"}', "model.safetensors": WEIGHTS}
    fake.add("org/experts", refused)
    message = "^org/experts: architecture 'qwen3_moe' is not supported: this network has no router"
    with pytest.raises(UnsupportedModel, match=message):
        catalogue.resolve("org/experts")
    fake.add("org/files", {"model-Q4_K_M.gguf": WEIGHTS})
    fake.architectures["org/files"] = "qwen3moe"
    with pytest.raises(UnsupportedModel, match="^org/files: architecture 'qwen3moe' is not supported: this"):
        catalogue.pull("org/files:Q4_K_M")
    assert fake.downloads == []
    fake.architectures["org/files"] = "clip"  # a projector's: the model beside it may well run
    assert catalogue.pull("org/files:Q4_K_M").read_bytes() == WEIGHTS


def test_the_only_gguf_file_is_taken(fake: FakeHub) -> None:
    fake.add("org/name", {"deep/model.gguf": WEIGHTS, "mmproj-f16.gguf": b"m", "README.md": b"r"})
    path = catalogue.resolve("org/name")
    assert path.name == "model.gguf"
    assert path.read_bytes() == WEIGHTS
    assert catalogue.resolve("org/name") == path
    assert catalogue.resolve("org/name/deep/model.gguf") == path
    assert len(fake.downloads) == 1
    assert hub.fetched_checkpoints() == [hub.Fetched("org/name/deep/model.gguf", path, len(WEIGHTS))]


def test_a_gguf_file_so_small_that_the_hub_keeps_it_in_git(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("support.fakes._LARGE", ())
    fake.add("org/name", {"m.gguf": WEIGHTS})
    assert catalogue.pull("org/name").read_bytes() == WEIGHTS
    assert catalogue.pull("org/name").read_bytes() == WEIGHTS


def test_files_are_picked_by_quant(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    quants = ["Q8_0", "q4_k_m", "UD-Q4_K_XL", "IQ4_XS", "BF16"]
    fake.add("org/name", {f"model-{quant}.gguf": quant.encode() for quant in quants})
    fake.add("org/name", {"model.safetensors": b"only without a tag"})
    for asked, sent in [("Q8_0", b"Q8_0"), ("Q4_K_M", b"q4_k_m"), ("ud-q4_k_xl", b"UD-Q4_K_XL")]:
        assert catalogue.resolve(f"org/name:{asked}").read_bytes() == sent
    assert catalogue.resolve("org/name:iq4_xs").read_bytes() == b"IQ4_XS"
    # Once fetched, no hub is needed, in whatever case the tag is written.
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: pytest.fail("the hub was asked"))
    assert catalogue.resolve("org/name:q8_0").read_bytes() == b"Q8_0"
    assert catalogue.resolve("org/name").read_bytes() == b"q4_k_m"
    names = [fetched.name for fetched in hub.fetched_checkpoints()]
    assert names == [f"org/name:{quant}" for quant in ("IQ4_XS", "Q8_0", "UD-Q4_K_XL", "Q4_K_M")]


def test_without_a_tag_the_usual_quant_is_taken_and_named(fake: FakeHub) -> None:
    fake.add("org/name", {"m-Q2_K.gguf": b"2", "m-Q8_0.gguf": b"8", "m-Q6_K.gguf": b"6"})
    steps: list[str] = []
    path = catalogue.resolve("org/name", lambda step, *_: steps.append(step))
    assert path.read_bytes() == b"6"
    assert "checking m-Q6_K.gguf" in steps
    assert catalogue.quant_taken("org/name", path) == "Q6_K"
    assert catalogue.quant_taken("org/name:Q6_K", path) is None
    assert catalogue.quant_taken("qwen3-4b", path) is None
    assert catalogue.quant_taken("org/name", Path("elsewhere-Q6_K.gguf")) is None
    assert catalogue.quant_taken("org/name", hub.Repository("org", "name").checkpoint) is None


@pytest.mark.parametrize(
    "files, name, message",
    [
        (["m-Q8_0.gguf", "m-F16.gguf"], "org/name:Q4_K_M", "no GGUF file of quant Q4_K_M; it has: F16, Q8_0"),
        (["a.gguf", "b.gguf"], "org/name", "none of the usual quants; it has: a.gguf, b.gguf"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "org/name:Q8_0", "several files of Q8_0; name one as org/name/FILE"),
        (["a.gguf", "b[1].gguf"], "org/name/c.gguf", r"has no file c.gguf; its GGUF files: a.gguf, b\[1\]"),
        (["README.md"], "org/name/c.gguf", "its GGUF files: none"),
        (["model.safetensors"], "org/name:Q8_0", "no GGUF file of quant Q8_0; it has: none"),
        (["m-Q8_0-00001-of-00002.gguf"], "org/name:Q8_0", "lacks parts of a split model: m-Q8_0-00002"),
    ],
)
def test_what_cannot_be_picked_is_listed(fake: FakeHub, files: list[str], name: str, message: str) -> None:
    fake.add("org/name", dict.fromkeys(files, b"x"))
    with pytest.raises(ModelNotFound, match=message):
        catalogue.resolve(name)
    assert fake.downloads == []


def test_files_are_named_one_by_one(fake: FakeHub) -> None:
    fake.add("org/name", {"a[1]-Q8_0.gguf": b"a", "a1-Q8_0.gguf": b"1"})
    assert catalogue.resolve("org/name/a[1]-Q8_0.gguf").read_bytes() == b"a"
    assert catalogue.resolve("org/name/a1-Q8_0.gguf").read_bytes() == b"1"
    names = {fetched.name for fetched in hub.fetched_checkpoints()}
    assert names == {"org/name/a[1]-Q8_0.gguf", "org/name/a1-Q8_0.gguf"}


PARTS = [f"m-Q4_K_M-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.mark.parametrize("name", ["org/name:q4_k_m", f"org/name/{PARTS[1]}", "org/name"])
def test_all_parts_of_a_split_model_come(fake: FakeHub, name: str) -> None:
    fake.add("org/name", {part: part.encode() for part in PARTS} | {"m-Q8_0.gguf": b"8"})
    path = catalogue.resolve(name)
    assert path.name == PARTS[0]
    assert files_in(path.parent) == [PARTS[0], f"{PARTS[0]}.sha256", *PARTS[1:]]
    assert hub.fetched_checkpoints()[0].size == sum(len(part) for part in PARTS)
    assert catalogue.resolve(name) == catalogue.pull(name) == path
    assert [name for name, _ in fake.downloads] == PARTS


def test_a_split_model_that_lost_a_part_is_not_here(fake: FakeHub) -> None:
    fake.add("org/name", {part: part.encode() for part in PARTS})
    path = catalogue.resolve("org/name")
    path.with_name(PARTS[1]).unlink()
    assert hub.fetched_checkpoints() == []
    assert catalogue.resolve("org/name:Q4_K_M") == path
    assert path.with_name(PARTS[1]).read_bytes() == PARTS[1].encode()


def test_what_was_fetched_opens_as_a_checkpoint(fake: FakeHub, tmp_path: Path) -> None:
    folder = tiny.write_llama(tmp_path / "written")
    fake.add("org/name", {path.name: path.read_bytes() for path in folder.iterdir()})
    checkpoint = open_checkpoint(catalogue.resolve("org/name"))
    assert checkpoint.fingerprint == open_checkpoint(folder).fingerprint
    assert [fetched.path for fetched in hub.fetched_checkpoints()] == [catalogue.resolve("org/name")]


def test_a_repository_without_weights(fake: FakeHub) -> None:
    fake.add("org/name", {"config.json": b"{}"})
    with pytest.raises(UnsupportedModel, match="neither safetensors at its top nor GGUF"):
        catalogue.resolve("org/name")


@pytest.mark.parametrize(
    "beginning, refusal, expected, message",
    [
        ("/api", (404, {"X-Error-Code": "RepoNotFound"}), ModelNotFound, "the hub has no model org/name"),
        (
            "/api",
            (401, {"X-Error-Code": "RepoNotFound"}),
            ModelNotFound,
            "or it is private: then log in with `hf auth login`",
        ),
        ("/api", GATED, ModelNotFound, "org/name is gated: accept its terms"),
        ("/org/name/resolve", GATED, ModelNotFound, "org/name is gated: accept its terms"),
        ("/cdn", (403, {}), DownloadFailed, r"403 Forbidden.*; 0 of 1,000 bytes are here"),
        ("/api", (500, {}), DownloadFailed, "could not be fetched from the hub: .*500"),
    ],
)
def test_what_the_hub_refuses(
    fake: FakeHub,
    beginning: str,
    refusal: tuple[int, dict[str, str]],
    expected: type[KakeyaError],
    message: str,
) -> None:
    fake.add("org/name", {"model.gguf": WEIGHTS})
    fake.refusals[beginning] = refusal
    with pytest.raises(expected, match=message) as caught:
        catalogue.resolve("org/name")
    assert "\n" not in str(caught.value)
    assert not are_progress_bars_disabled()
    assert hub.fetched_checkpoints() == []


@pytest.mark.parametrize(
    "trouble, expected, message",
    [
        (errors.HFValidationError("bad"), ModelNotFound, "the hub has no model org/name"),
        (errors.OfflineModeIsEnabled("offline mode"), DownloadFailed, "could not be fetched .*offline mode"),
        (ConnectionError(errno.ECONNRESET, "reset"), DownloadFailed, "could not be fetched .*reset"),
        (RuntimeError("of some\nHTTP library"), DownloadFailed, "could not be fetched .*some HTTP library"),
        (RuntimeError(), DownloadFailed, "could not be fetched from the hub: RuntimeError"),
    ],
)
def test_what_the_library_raises_becomes_ours(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    trouble: Exception,
    expected: type[KakeyaError],
    message: str,
) -> None:
    def model_info(*_: object, **__: object) -> None:
        raise trouble

    monkeypatch.setattr(HfApi, "model_info", model_info)
    with pytest.raises(expected, match=message):
        catalogue.resolve("org/name")
    assert not are_progress_bars_disabled()


def test_a_line_that_breaks_is_taken_up_at_once(fake: FakeHub, capfd: pytest.CaptureFixture[str]) -> None:
    fake.add("org/name", {"model.gguf": WEIGHTS})
    fake.cuts = [350, 200]
    assert catalogue.resolve("org/name").read_bytes() == WEIGHTS
    assert [wanted for _, wanted in fake.downloads] == [None, "bytes=300-", "bytes=500-"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_a_broken_fetch_goes_on_where_it_broke(fake: FakeHub, cache: Path, knows_ranges: bool) -> None:
    fake.add("org/name", {"model.gguf": WEIGHTS})
    fake.cuts = [650] + [0] * 100
    with pytest.raises(DownloadFailed, match=r"600 of 1,000 bytes are here, and the next fetch goes on"):
        catalogue.resolve("org/name")
    assert files_in(cache) == [f"partial/{DIGEST}"]
    fake.knows_ranges = knows_ranges
    fake.cuts.clear()
    fake.downloads.clear()
    reports: list[tuple[str, int, int | None]] = []
    path = catalogue.resolve("org/name", lambda *report: reports.append(report))
    assert path.read_bytes() == WEIGHTS
    assert fake.downloads == [("model.gguf", "bytes=600-")]
    assert reports[-1] == ("checking model.gguf", 1000, 1000)
    assert not store.partial_path(DIGEST).exists()


def test_a_part_that_is_whole_is_not_fetched_again(fake: FakeHub) -> None:
    fake.add("org/name", {part: part.encode() * 10 for part in PARTS})
    fake.cuts = [1000] + [0] * 100  # the first comes whole, the second never
    with pytest.raises(DownloadFailed, match="0 of 280 bytes"):
        catalogue.resolve("org/name")
    fake.cuts.clear()
    fake.downloads.clear()
    catalogue.resolve("org/name")
    assert [name for name, _ in fake.downloads] == PARTS[1:]


def test_what_is_longer_than_it_should_be_begins_anew(fake: FakeHub) -> None:
    fake.add("org/name", {"model.gguf": WEIGHTS})
    store.partial_path(DIGEST).parent.mkdir(parents=True)
    store.partial_path(DIGEST).write_bytes(WEIGHTS + b"x")
    assert catalogue.resolve("org/name").read_bytes() == WEIGHTS
    assert fake.downloads == [("model.gguf", None)]


def test_a_wrong_digest_is_told_and_leaves_nothing(fake: FakeHub, cache: Path) -> None:
    fake.add("org/name", {"config.json": b"{}", "model.safetensors": WEIGHTS})
    fake.stated["model.safetensors"] = WEIGHTS[::-1]
    stated = hashlib.sha256(WEIGHTS[::-1]).hexdigest()
    expected = f"model.safetensors has SHA-256 {DIGEST} instead of {stated}; .* what arrived was deleted"
    with pytest.raises(DownloadFailed, match=expected):
        catalogue.resolve("org/name")
    assert files_in(cache) == []


def test_a_damaged_beginning_is_found_out(fake: FakeHub, cache: Path) -> None:
    fake.add("org/name", {"model.gguf": WEIGHTS})
    store.partial_path(DIGEST).parent.mkdir(parents=True)
    store.partial_path(DIGEST).write_bytes(b"damaged")
    with pytest.raises(DownloadFailed, match="what arrived was deleted"):
        catalogue.resolve("org/name")
    assert files_in(cache) == []
    assert catalogue.resolve("org/name").read_bytes() == WEIGHTS


def test_pull_finds_damage_without_the_hub_and_fetches_again(
    fake: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    fake.add("org/name", {part: part.encode() for part in PARTS})
    path = catalogue.pull("org/name")
    path.with_name(PARTS[1]).write_bytes(b"damaged")
    fake.downloads.clear()
    assert catalogue.pull("org/name") == path
    assert fake.downloads == [(PARTS[1], None)]
    (told,) = caplog.messages
    assert f"{PARTS[1]} is damaged: it has SHA-256" in told
    assert path.with_name(PARTS[1]).read_bytes() == PARTS[1].encode()


def test_pull_of_a_damaged_folder(fake: FakeHub) -> None:
    files = {"a.safetensors": WEIGHTS, "b.safetensors": b"b", "config.json": b"{}"}
    fake.add("org/name", files)
    path = catalogue.pull("org/name")
    (path / "b.safetensors").write_bytes(b"?")
    fake.refusals["/api"] = (500, {})
    with pytest.raises(DownloadFailed):
        catalogue.pull("org/name")
    assert hub.fetched_checkpoints() == []  # nothing half-broken is left to be opened
    fake.refusals.clear()
    fake.downloads.clear()
    assert {file.name: file.read_bytes() for file in catalogue.pull("org/name").iterdir()} == files
    assert fake.downloads == [("b.safetensors", None)]


def test_pull_of_something_unreadable(fake: FakeHub) -> None:
    fake.add("org/name", {"a.safetensors": WEIGHTS})
    (catalogue.pull("org/name") / "a.safetensors").unlink()
    with pytest.raises(DownloadFailed, match=r"a.safetensors cannot be read: No such file"):
        catalogue.pull("org/name")


def test_what_has_no_record_is_taken_as_it_is(fake: FakeHub) -> None:
    fake.add("org/name", {"model.gguf": WEIGHTS})
    path = catalogue.pull("org/name")
    path.with_name("model.gguf.sha256").unlink()
    path.write_bytes(b"other")
    assert catalogue.pull("org/name").read_bytes() == b"other"


def test_a_disk_that_is_full(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.add("org/name", {"model.gguf": WEIGHTS})

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_download, "http_get", full)
    with pytest.raises(DownloadFailed, match=r"is full \(No space left on device\)"):
        catalogue.resolve("org/name")


def test_bars_that_were_off_stay_off(fake: FakeHub) -> None:
    fake.add("org/name", {"model.gguf": WEIGHTS})
    huggingface_hub.utils.disable_progress_bars()
    try:
        catalogue.resolve("org/name")
        assert are_progress_bars_disabled()
    finally:
        huggingface_hub.utils.enable_progress_bars()


def test_without_the_library_the_extra_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_hub(name: str, *rest: Any) -> ModuleType:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_hub)
    with pytest.raises(ConfigError, match=r"pip install 'kakeya\[hub\]'"):
        catalogue.resolve("org/name")


PULL = [sys.executable, "-c", "from kakeya.cli import main; main()", "pull"]


def test_the_real_library_offline_gives_one_line(tmp_path: Path) -> None:
    environment = {"HF_HUB_OFFLINE": "1", store.CACHE_VARIABLE: str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [*PULL, "org/name"],
        env=environment | _source_path(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("kakeya: org/name could not be fetched from the hub: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_killed_pull_is_taken_up_by_the_next(tmp_path: Path) -> None:
    """The verb itself, killed in the middle of a file of two pieces as large as the library's own."""
    weights = os.urandom(2 * constants.DOWNLOAD_CHUNK_SIZE)
    environment = {
        **os.environ,
        **_source_path(),
        "HF_HUB_OFFLINE": "0",
        "TRANSFORMERS_OFFLINE": "0",
        store.CACHE_VARIABLE: str(tmp_path),
    }
    partial = tmp_path / "partial" / hashlib.sha256(weights).hexdigest()
    with running_hub() as fake:
        fake.add("org/name", {"m-Q4_K_M.gguf": weights})
        fake.cuts = [len(weights) * 3 // 4] + [0] * 100  # so that it cannot be whole before it is killed
        environment["HF_ENDPOINT"] = fake.url
        pull = subprocess.Popen([*PULL, "org/name"], env=environment, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while (not partial.exists() or not partial.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.01)
        pull.send_signal(signal.SIGKILL)
        pull.wait()
        kept = partial.stat().st_size
        assert 0 < kept < len(weights)
        fake.cuts.clear()
        fake.downloads.clear()
        again = subprocess.run([*PULL, "org/name"], env=environment, capture_output=True, text=True)
        assert again.returncode == 0, again.stderr
        # The killed one's last request may still be on its way when the next begins.
        assert fake.downloads[-1] == ("m-Q4_K_M.gguf", f"bytes={kept}-")
    assert Path(again.stdout.strip()).read_bytes() == weights
    # What was left of it may be here before anybody could say so.
    assert [line for line in again.stderr.splitlines() if not line.startswith("fetching")] == [
        "checking m-Q4_K_M.gguf",
        "org/name is Q4_K_M here; another quant is named as org/name:TAG",
    ]


def _source_path() -> dict[str, str]:
    return {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
