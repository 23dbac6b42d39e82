"""Fresh processes."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kakeya.bench import startup
from kakeya.bench.engine import Engine
from kakeya.bench.report import from_json
from kakeya.bench.startup import chat, launch
from kakeya.config import CacheConfig, EngineConfig
from kakeya.errors import ConfigError
from kakeya.types import DType, KernelChoice, Numerics, WeightFormat
from support.tiny import byte_level_files, write_llama

CONFIG = EngineConfig(
    cache=CacheConfig(2, 30, 5),
    capacity=7,
    numerics=Numerics.EXACT,
    dtype=DType.FLOAT32,
    weights=WeightFormat.INT8,
    kernels=KernelChoice.TORCH,
    threads=1,
)


def test_settings_survive_a_trip_through_json() -> None:
    again = from_json(EngineConfig, json.loads(json.dumps(asdict(CONFIG))))
    assert again == CONFIG
    assert isinstance(again.weights, WeightFormat)


def test_a_fresh_process_is_timed(default_model: Path) -> None:
    began = time.perf_counter()
    ready, first, chats = launch(str(default_model), EngineConfig(cache=CacheConfig(4, 64), threads=2))
    assert chats
    total = time.perf_counter() - began
    assert 0.1 < ready < total
    assert 0 < first < total - ready


def test_a_model_without_a_template_has_no_chats(tmp_path: Path) -> None:
    files = byte_level_files()
    write_llama(tmp_path, vocab_size=Tokenizer.from_buffer(files.tokenizer_json).get_vocab_size())
    (tmp_path / "tokenizer.json").write_bytes(files.tokenizer_json)
    assert not launch(str(tmp_path), EngineConfig(cache=CacheConfig(4, 64), threads=1)).chats


def test_a_process_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="could not load the model: .*absent"):
        launch(str(tmp_path / "absent.gguf"), CONFIG)
    monkeypatch.setattr(startup.sys, "executable", "true")
    with pytest.raises(ConfigError, match="no message"):
        launch("any", CONFIG)


def test_a_chat_is_timed_from_the_command(default_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_MODEL", "what the user has set counts for nothing")
    began = time.perf_counter()
    seconds = chat(Engine(model=str(default_model), threads=2))
    assert 0.5 < seconds < time.perf_counter() - began


def test_a_chat_that_says_nothing_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="gave no answer: .*absent"):
        chat(Engine(model=str(tmp_path / "absent.gguf")))
    monkeypatch.setattr(startup.sys, "executable", "true")
    with pytest.raises(ConfigError, match="no message"):
        chat(Engine())
