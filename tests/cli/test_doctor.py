"""`kakeya doctor`: what it says about machines of all kinds, and when it fails."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import kakeya
from kakeya.cli import doctor, findings
from kakeya.cli.findings import Cache, Findings, Gpu, Kernels, Mlx, Port, Torch
from kakeya.config import DEFAULT_MODEL
from kakeya.types import BackendChoice
from support.programs import Run

ROOT = Path(__file__).parents[2]
FINE = Findings(
    system="Linux", python="3.11.7", cpu="A processor", cores=4, features=("avx2",),
    memory_bytes=16_000_000_000, free_memory_bytes=8_000_000_000, compiler="/usr/bin/c++",
    nvidia_driver=False, torch=Torch("2.13.0", None, None, ()), mlx=None,
    kernels=Kernels("native", "avx2", None), backend=BackendChoice.CPU,
    default_model_bytes=482_000_000, cache=Cache("/cache", True, 10**9, (DEFAULT_MODEL,)),
    ports=(Port("gRPC", "127.0.0.1:50051", True), Port("HTTP", "127.0.0.1:8000", True)), missing_packages=(),
)  # fmt: skip
NVIDIA = Torch("2.13.0", None, "13.0", (Gpu("NVIDIA H200", 150_000_000_000),))
NO_KERNELS = Kernels("torch", None, "No module named 'kakeya.kernels._native'")
Say = Callable[[Findings], tuple[int, str, dict[str, object]]]


@pytest.fixture
def say(run: Run, monkeypatch: pytest.MonkeyPatch) -> Say:
    """What the verb says where that was found: its exit status, the text and the JSON."""

    def say(found: Findings) -> tuple[int, str, dict[str, object]]:
        monkeypatch.setattr(findings, "look", lambda extras: found)
        text, as_json = run("doctor"), run("doctor", "--json")
        assert text.status == as_json.status
        return text.status, text.out, json.loads(as_json.out)

    return say


def test_this_machine(run: Run) -> None:
    told = json.loads(run("doctor", "--json").out)
    text = run("doctor")
    assert text.status == 0
    assert told["version"] == kakeya.__version__
    assert told["problems"] == []
    assert all(line in text.out for line in told["runs"])
    assert told["found"]["torch"]["version"] in text.out


def test_a_machine_that_has_all(say: Say) -> None:
    status, text, told = say(FINE)
    assert status == 0
    assert told["advice"] == []
    assert "for more" not in text
    assert "nothing can run" not in text
    assert told["runs"] == [
        "--backend cpu: native kernels (avx2) on 4 cores",
        f"the default model, {DEFAULT_MODEL}: is here",
    ]
    for part in (
        "A processor, 4 cores; avx2",
        "8.0 GB free of 16.0 GB",
        "native, avx2",
        "no GPU",
        "/usr/bin/c++",
    ):
        assert part in text


def test_without_native_kernels(say: Say) -> None:
    status, text, told = say(replace(FINE, kernels=NO_KERNELS))
    assert status == 0
    assert "--backend cpu: torch kernels on 4 cores" in text
    assert "torch, since No module named" in text
    (advice,) = told["advice"]
    assert "several times faster: install the package again" in advice
    _, text, told = say(replace(FINE, kernels=NO_KERNELS, compiler=None, features=()))
    assert "install a C++17 compiler, then install the package again" in told["advice"][0]
    assert "compiler   none" in text
    assert "no features that kernels use" in text


def test_gpus(say: Say) -> None:
    _, text, told = say(replace(FINE, torch=NVIDIA, backend=BackendChoice.CUDA, nvidia_driver=True))
    assert told["runs"][0] == "--backend cuda: NVIDIA H200"
    assert "NVIDIA H200 with 150.0 GB" in text
    assert told["advice"] == []
    _, _, told = say(replace(FINE, nvidia_driver=True))
    assert "torch is built for no GPU and sees no device" in told["advice"][0]
    _, _, told = say(replace(FINE, nvidia_driver=True, torch=replace(NVIDIA, gpus=())))
    assert "torch is built for CUDA 13.0 and sees no device" in told["advice"][0]


def test_mlx(say: Say) -> None:
    assert "mlx" not in say(FINE)[1]
    _, text, told = say(replace(FINE, mlx=Mlx("0.32.4", None, "Apple M4")))
    assert "mlx        0.32.4; Apple M4" in text
    assert told["advice"] == ["to compute on this Apple M4: --backend mlx"]
    _, text, told = say(replace(FINE, mlx=Mlx("0.32.4", None, None)))
    assert "mlx        0.32.4; no GPU that it can use" in text
    assert told["advice"] == []
    assert "cannot be imported: no libmlx" in say(replace(FINE, mlx=Mlx("0.32.4", "no libmlx", None)))[1]


def test_an_empty_cache_that_cannot_be_written(say: Say) -> None:
    _, text, told = say(replace(FINE, cache=Cache("/cache", False, 5, ())))
    assert "is fetched at the first start" in told["runs"][1]
    assert "set KAKEYA_CACHE_DIR" in told["advice"][0]
    assert "5 bytes free, cannot be written; no models yet" in text


def test_ports_that_are_taken(say: Say) -> None:
    ports = (Port("gRPC", "127.0.0.1:50051", False), Port("HTTP", "127.0.0.1:8000", False))
    _, text, told = say(replace(FINE, ports=ports))
    assert [("--bind" in line, "--http" in line) for line in told["advice"]] == [(True, False), (False, True)]
    assert "127.0.0.1:8000 for HTTP, taken" in text


def test_every_extra_it_names_exists(say: Say) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    nvidia = replace(FINE, torch=NVIDIA, backend=BackendChoice.CUDA, nvidia_driver=True)
    _, _, told = say(replace(nvidia, missing_packages=tuple(doctor.EXTRAS)))
    assert len(told["advice"]) == len(doctor.EXTRAS)
    for extra, _ in doctor.EXTRAS.values():
        assert extra in extras
        assert any(f"pip install 'kakeya[{extra}]'" in line for line in told["advice"])


def test_triton_is_for_those_who_have_an_nvidia_gpu(say: Say) -> None:
    assert say(replace(FINE, missing_packages=("triton",)))[2]["advice"] == []


def test_every_extra_is_told_of(say: Say) -> None:
    """By the guide all of them, by the verb those that a user misses at run time."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    users = extras.keys() - {"test", "dev"}
    guide = (ROOT / "docs/guides/install.md").read_text()
    assert [extra for extra in users if f"| `kakeya[{extra}]` |" not in guide] == []
    # What these two bring is only a part of another extra, or for those who measure.
    assert users == {extra for extra, _ in doctor.EXTRAS.values()} | {"train", "peers"}


def test_it_fails_when_no_model_fits(say: Say) -> None:
    status, text, told = say(replace(FINE, free_memory_bytes=100_000_000))
    assert status == 1
    assert "nothing can run\n  100.0 MB of memory are free" in text
    assert told["runs"] == []


def test_it_fails_without_torch() -> None:
    """In a process of its own, where torch is absent from the start."""
    program = "import sys; sys.modules['torch'] = None\nfrom kakeya.cli import main\nmain(sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    ended = [
        subprocess.run(
            [sys.executable, "-c", program, "doctor", *flags],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        for flags in ([], ["--json"])
    ]
    assert [each.returncode for each in ended] == [1, 1], ended[0].stderr
    assert "nothing can run\n  torch cannot be imported" in ended[0].stdout
    told = json.loads(ended[1].stdout)
    assert told["found"]["kernels"] is None
    assert told["runs"] == []
