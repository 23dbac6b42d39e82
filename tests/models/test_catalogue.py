"""The catalogue: names to paths, what is here, and what does not fit."""

from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.config import DEFAULT_MODEL, CacheConfig, EngineConfig
from kakeya.errors import ConfigError, ModelNotFound
from kakeya.models import catalogue, fitting
from kakeya.models.catalogue import CATALOGUE
from kakeya.models.wheel import WheelMember


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


def test_the_list_shows_what_is_here(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = "0" * 64
    tiny = WheelMember("tiny-model==1.0", 1, digest, "tiny_model/tiny.gguf", 4, digest, "tiny")
    entry = replace(CATALOGUE[DEFAULT_MODEL], name="tiny", size=tiny.size, source=tiny)
    monkeypatch.setitem(CATALOGUE, "tiny", entry)
    assert {listing.path for listing in catalogue.list_models()} == {None}
    tiny.path.parent.mkdir(parents=True)
    tiny.path.write_bytes(b"GGUF")
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


def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "available_memory", lambda: 4_000_000_000)
    expected = (
        r"qwen3-8b does not fit in memory: weights 5,530,561,836 \+ a session's slab 156,303,360 \+ "
        r"the process 350,000,000 = 6,036,865,196 bytes, and 4,000,000,000 bytes are free; `kakeya models"
    )
    for door in (catalogue.resolve, catalogue.pull):
        with pytest.raises(ConfigError, match=expected):
            door("qwen3-8b")
    wide = EngineConfig(cache=CacheConfig(window=2**20))
    with pytest.raises(ConfigError, match="qwen2.5-0.5b-instruct does not fit"):
        catalogue.resolve("qwen2.5-0.5b-instruct", config=wide)
