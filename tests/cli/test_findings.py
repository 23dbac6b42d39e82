"""What the machine has is read from the machine: each look with the real thing, and with a prepared one."""

import os
import socket
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest
import torch

from kakeya.cli import findings
from kakeya.config import DEFAULT_MODEL
from kakeya.kernels import Kernels, load
from kakeya.models import hub, store
from kakeya.types import KernelChoice

X86 = "model name : A\nflags\t\t: fpu avx2 fma avx512_vnni\n\nmodel name : A\nflags\t\t: fpu avx2\n"
ARM = "Features\t: fp asimd asimddp i8mm\n"
APPLE = "hw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_I8MM: 0\n"
APPLE += "hw.optional.AdvSIMD: 1\nhw.optional.x: 1\n"


@pytest.mark.parametrize(
    "cpuinfo, features",
    [(X86, ("avx2", "fma", "avx512_vnni")), (ARM, ("asimd", "asimddp", "i8mm")), ("", ())],
)
def test_features_of_a_processor(tmp_path: Path, cpuinfo: str, features: tuple[str, ...]) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert findings.cpu_features(tmp_path / "cpuinfo") == features


def test_features_of_a_mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings.apple_features(APPLE) == {"asimddp", "asimd"}
    program = tmp_path / "sysctl"
    program.write_text(f"#!/bin/sh\n[ $1 = hw.optional ] && printf '{APPLE}'")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert findings.cpu_features(tmp_path / "no cpuinfo") == ("asimd", "asimddp")


def test_no_features_where_nobody_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert findings.cpu_features(tmp_path / "no cpuinfo") == ()


def test_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert findings.find_compiler() is None
    for name in ("clang++", "mine"):
        (tmp_path / name).touch(0o755)
    assert findings.find_compiler() == str(tmp_path / "clang++")
    monkeypatch.setenv("CXX", "mine -O2")
    assert findings.find_compiler() == str(tmp_path / "mine")
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert findings.find_compiler() is None


def test_torch_and_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings.find_torch().version == torch.__version__
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    class Properties:
        name, total_memory = "H200", 7

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    assert findings.find_torch().gpus == (findings.Gpu("H200", 7),)


def test_mlx_and_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    assert findings.find_mlx() == findings.Mlx(version("mlx"), None, None)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M4"})
    assert findings.find_mlx() == findings.Mlx(version("mlx"), None, "Apple M4")


def test_mlx_that_is_broken_or_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kakeya.engine.mlx.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    found = findings.find_mlx()
    assert found is not None
    assert "mlx.core" in (found.error or "")
    monkeypatch.setattr(findings, "_is_installed", lambda module: False)
    assert findings.find_mlx() is None


def test_kernels_are_those_that_load() -> None:
    found, loaded = findings.find_kernels(), load(KernelChoice.AUTO)
    assert (found.name, found.isa) == (
        ("native", loaded.isa) if isinstance(loaded, Kernels) else ("torch", None)
    )


def test_kernels_that_were_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kakeya.kernels._native", None)
    found = findings.find_kernels()
    assert (found.name, found.isa) == ("torch", None)
    assert "kakeya.kernels._native" in (found.reason or "")


def test_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "not/yet"))
    cache = findings.look_at_cache()
    assert (cache.path, cache.writable, cache.models) == (str(tmp_path / "not/yet"), True, ())
    assert cache.free_bytes > 0
    file = hub.Repository("org", "name").gguf("m-Q8_0.gguf")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"12")
    assert findings.look_at_cache().models == ("org/name:Q8_0",)


def test_a_cache_directory_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "file"))
    assert not findings.look_at_cache().writable


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not findings.is_free("127.0.0.1", port)
    assert findings.is_free("127.0.0.1", port)


def test_everything_together() -> None:
    found = findings.look(["json", "no_such_package", "no_such.part"])
    assert found.missing_packages == ("no_such_package", "no_such.part")
    assert found.backend is not None
    assert found.kernels is not None
    assert 0 < found.free_memory_bytes <= found.memory_bytes
    assert [port.use for port in found.ports] == ["gRPC", "HTTP"]
    assert found.default_model_bytes > 98_000_000, DEFAULT_MODEL
