"""`kakeya bench gpu` from the command line to the exit status, on a machine that lacks what it may lack."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from kakeya.bench.gpu import steps
from support.cli import Run


def test_the_verb_writes_prints_and_draws(kakeya_verb: Run, tmp_path: Path) -> None:
    output, drawing = tmp_path / "g.json", tmp_path / "g.svg"
    files = ("--output", str(output), "--picture", str(drawing))
    quick = ("--device", "cpu", "--quick", "--part", "steps", *files)
    outcome = kakeya_verb("bench", "gpu", *quick)
    assert outcome.status == 0, outcome.err
    assert "Bare steps past the wrap" in outcome.out
    assert json.loads(output.read_text())["kind"] == "gpu"
    assert output.with_suffix(".html").read_text().startswith("<!doctype html>")
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")


def test_the_verb_prints_json_and_draws_nothing_without_steps(
    kakeya_verb: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "step_seconds", lambda *_: 1 / 0)
    files = ("--output", str(tmp_path / "g.json"), "--picture", str(tmp_path / "g.svg"))
    outcome = kakeya_verb("bench", "gpu", "--device", "cpu", "--quick", "--part", "steps", *files, "--json")
    assert json.loads(outcome.out)["results"]["steps"] == []
    assert outcome.status == 1
    assert "cannot draw the picture" in outcome.err
    assert not (tmp_path / "g.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cpu"), "only --quick runs"),
        (("--device", "cpu", "--quick", "--part", "prompt", "--picture", "p.svg"), "draws the part steps"),
        (("--output", "g.txt"), "*.json"),
        pytest.param(
            (),
            "bench gpu needs a CUDA device; torch sees none",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_the_verb_refuses_what_cannot_be(
    kakeya_verb: Run,
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = kakeya_verb("bench", "gpu", *arguments)
    assert outcome.status == 2
    assert message in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_the_package_is_run_only_when_asked() -> None:
    assert callable(import_module("kakeya.__main__").main)


# What a machine with a GPU may lack: it needs torch, triton, transformers, safetensors, tokenizers, numpy,
# rich, typer and grpcio, and what those bring.
ABSENT = (
    "fastapi", "gguf", "google", "grpc_health", "grpc_reflection", "httptools", "httpx", "llguidance",
    "opentelemetry", "platformdirs", "prometheus_client", "psutil", "starlette", "uvicorn",
)  # fmt: skip


@pytest.mark.parametrize("room", ["gpu", "quality"])
def test_flags_and_conclusions_need_no_more_than_the_command_line_does(room: str) -> None:
    """They can be read anywhere, and help does not wait for torch."""
    modules = f"kakeya.bench.{room}.benchmark, kakeya.bench.{room}.results, kakeya.bench.registry"
    program = f"import sys, {modules}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "triton", "transformers", "tokenizers", "psutil"} & set(outcome.stdout.split())


def test_it_runs_from_a_source_tree_with_few_packages(tmp_path: Path) -> None:
    program = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({ABSENT!r})); "
        "runpy.run_module('kakeya', run_name='__main__', alter_sys=True)"
    )
    parts = [flag for part in ("runtime", "transformers", "exact") for flag in ("--part", part)]
    command = [sys.executable, "-c", program, "bench", "gpu", "--device", "cpu", "--quick", *parts, "--json"]
    outcome = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    results = json.loads(outcome.stdout)["results"]
    assert results["runtime"]
    assert results["transformers"]
    assert {each["why"] for each in results["absent"]} == {"not asked for", "it needs a CUDA device"}
