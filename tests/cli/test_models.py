"""`kakeya models` and the names that every verb takes."""

import io
import json
from pathlib import Path

import gguf
import pytest
from rich.console import Console

from kakeya.cli import models as verb
from kakeya.cli.console import Screen
from kakeya.models import catalogue, fitting, hub, speed, store
from kakeya.models.speed import MeasuredMatmul
from support.programs import Run
from support.untraced import untraced

PRODUCT = MeasuredMatmul(weight_bytes_per_s=10e9, multiply_adds_per_s=100e9, threads=2, isa="avx2")


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four gigabytes free, and a product that was measured before."""
    monkeypatch.setattr(fitting, "available_memory", lambda: 4_000_000_000)
    monkeypatch.setattr(speed, "measure", lambda: PRODUCT)


def line_of(name: str, output: str) -> list[str]:
    (line,) = [line for line in output.splitlines() if line.startswith(f"{name} ")]
    return line.split()


def test_models_lists_the_catalogue(run: Run, default_model: Path) -> None:
    output = run("models").out
    assert line_of("smollm2-135m-instruct", output)[1:8] == [
        "yes",
        "98.4",
        "MB",
        "482.6",
        "MB",
        "Apache-2.0",
        "the",
    ]
    facts = json.loads(run("models", "--json").out)
    assert len(output.splitlines()) == 1 + len(facts)
    listing = facts[0]
    assert listing["fetched"] is True
    assert listing["path"] == str(default_model)
    assert listing["size"] == 98_362_432
    assert listing["needs_bytes"] == 482_621_075
    assert "fits" not in listing


def test_models_that_fit(run: Run, small_machine: None, default_model: Path) -> None:
    output = run("models", "--fits").out
    assert line_of("qwen3-4b", output)[2:] == ["3.3", "GB", "yes", "~4.0", "~28"]
    assert line_of("qwen3-8b", output)[2:] == ["6.0", "GB", "no", "-", "-"]
    assert line_of("smollm2-135m-instruct", output)[1:] == ["yes", "482.6", "MB", "yes", "~102", "~942"]
    assert "4.0 GB are free" in output
    assert "speeds are estimates" in output
    assert "measured now: 10.0 GB of weights a second for one row, 100 billion multiply-adds" in output
    assert "(avx2, 2 threads)" in output


def test_models_that_fit_as_json(run: Run, small_machine: None) -> None:
    facts = {fact["name"]: fact for fact in json.loads(run("models", "--fits", "--json").out)}
    large = facts["qwen3-8b"]
    assert (large["fits"], large["free_bytes"]) == (False, 4_000_000_000)
    assert large["decode_tokens_per_s"] == 2.2
    assert large["estimated_from"]["weight_bytes_per_s"] == 10e9


def test_what_is_not_known_is_said(
    run: Run, tmp_path: Path, small_machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path))
    file = hub.Repository("org", "name").gguf("m-Q8_0.gguf")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"12")
    assert line_of("org/name:Q8_0", run("models").out)[1:5] == ["yes", "2", "bytes", "-"]
    assert line_of("org/name:Q8_0", run("models", "--fits").out)[1:] == ["yes", "-", "-", "-", "-"]
    monkeypatch.setattr(speed, "measure", lambda: None)
    output = run("models", "--fits").out
    assert line_of("qwen3-4b", output)[2:] == ["3.3", "GB", "yes", "-", "-"]
    assert "no speeds: the native kernels" in output
    assert json.loads(run("models", "--fits", "--json").out)[0]["estimated_from"] is None


def test_names_are_whole_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, terminal = Screen(), io.StringIO()
    screen.out = Console(file=terminal, force_terminal=True, width=60)
    verb._print(screen, verb._table([verb._facts(listing) for listing in catalogue.list_models()]))
    assert "qwen2.5-coder-1.5b-instruct" in terminal.getvalue()


def test_a_model_that_does_not_fit_is_wrong_usage_in_one_line(run: Run, small_machine: None) -> None:
    for command in (
        ["pull", "qwen3-8b"],
        ["chat", "--model", "qwen3-8b"],
        ["bench", "engine", "--model", "qwen3-8b"],
    ):
        outcome = run(*command)
        assert outcome.status == 2
        assert outcome.err.startswith("kakeya: qwen3-8b does not fit in memory: weights 5,530,561,836 + ")
        assert outcome.err.count("\n") == 1


def test_a_quant_of_a_hub_repository_answers_offline(
    run: Run, tmp_path: Path, default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default model, split in two, lies in the cache as if it had been fetched."""
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path))
    folder = hub.Repository("org", "name").gguf("")
    folder.mkdir(parents=True)
    untraced(lambda: _split(default_model, folder / "model-Q4_1.gguf"))
    assert len(list(folder.iterdir())) == 2
    asked = [
        "generate",
        "The capital of France is",
        "--max-tokens",
        "4",
        "--temperature",
        "0",
        "--window",
        "64",
    ]
    answers = {
        name: run(*asked, "--model", name).out
        for name in ("org/name:q4_1", f"{folder}:Q4_1", str(default_model))
    }
    assert len(set(answers.values())) == 1
    assert answers["org/name:q4_1"].strip()


def _split(source: Path, target: Path) -> None:
    """Write a model again in two files, tensor by tensor and field by field."""
    reader = gguf.GGUFReader(source)
    half = len(reader.tensors) // 2 + 1
    writer = gguf.GGUFWriter(target, "llama", split_max_tensors=half)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        writer.add_key_value(field.name, field.contents(), *field.types[:1], *field.types[1:2])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
