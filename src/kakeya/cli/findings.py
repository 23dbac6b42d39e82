"""What this machine has for us: processor, memory, kernels, compiler, GPUs, cache directory, free ports."""

import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kakeya.bench.machine import cpu_model, memory_bytes, usable_cores
from kakeya.config import DEFAULT_MODEL, EngineConfig
from kakeya.models import catalogue, store
from kakeya.models.fitting import available_memory
from kakeya.serving.config import HttpConfig, Listening, ServerConfig
from kakeya.types import BackendChoice, KernelChoice

if TYPE_CHECKING:
    from types import ModuleType

# The features of a processor that kernels make use of: ours, and those in torch.
FEATURES = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8",
    "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip
# macOS has names of its own for the same features.
_APPLE_NAMES = {"FEAT_DotProd": "asimddp", "FEAT_I8MM": "i8mm", "FEAT_BF16": "bf16", "AdvSIMD": "asimd"}
COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Gpu:
    """A device that torch can use."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Torch:
    """What torch is, and what it says about the machine. `error` is set where it cannot be imported."""

    version: str | None
    error: str | None
    cuda: str | None
    """The version of CUDA that torch was built for."""
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True)
class Mlx:
    """What MLX is, and the GPU that it computes on. `error` is set where it cannot be imported."""

    version: str
    error: str | None
    gpu: str | None


@dataclass(frozen=True)
class Kernels:
    """What computes on the CPU: `native` with an instruction set, or `torch` with the reason."""

    name: str
    isa: str | None
    reason: str | None


@dataclass(frozen=True)
class Cache:
    """The folder of fetched models."""

    path: str
    writable: bool
    free_bytes: int
    models: tuple[str, ...]


@dataclass(frozen=True)
class Port:
    """Where a server listens unless it is told otherwise."""

    use: str
    address: str
    free: bool


@dataclass(frozen=True)
class Findings:
    """Everything that was found."""

    system: str
    python: str
    cpu: str
    cores: int
    features: tuple[str, ...]
    memory_bytes: int
    free_memory_bytes: int
    compiler: str | None
    nvidia_driver: bool
    torch: Torch
    mlx: Mlx | None
    """None where the package is not there, or torch cannot be imported."""
    kernels: Kernels | None
    """None where torch cannot be imported."""
    backend: BackendChoice | None
    """What `--backend auto` chooses; None where nothing computes."""
    default_model_bytes: int
    """What the default model needs to serve one session."""
    cache: Cache
    ports: tuple[Port, ...]
    missing_packages: tuple[str, ...]


def look(optional_packages: Iterable[str] = ()) -> Findings:
    """Look at the machine. `optional_packages` are modules whose absence is reported."""
    torch = find_torch()
    works = torch.error is None
    return Findings(
        system=platform.platform(),
        python=platform.python_version(),
        cpu=cpu_model(),
        cores=usable_cores(),
        features=cpu_features(),
        memory_bytes=memory_bytes(),
        free_memory_bytes=available_memory(),
        compiler=find_compiler(),
        nvidia_driver=shutil.which("nvidia-smi") is not None,
        torch=torch,
        mlx=find_mlx() if works else None,
        kernels=find_kernels() if works else None,
        backend=_chosen_backend() if works else None,
        default_model_bytes=catalogue.CATALOGUE[DEFAULT_MODEL].memory_need(EngineConfig()).total,
        cache=look_at_cache(),
        ports=tuple(
            _port(use, listening) for use, listening in (("gRPC", ServerConfig()), ("HTTP", HttpConfig()))
        ),
        missing_packages=tuple(name for name in optional_packages if not _is_installed(name)),
    )


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Those of `FEATURES` that the processor has, as far as the system tells."""
    if cpuinfo.exists():
        words = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
        has = set(" ".join(words[:1]).split())
    else:
        has = apple_features(_printed(["sysctl", "hw.optional"]))
    return tuple(feature for feature in FEATURES if feature in has)


def apple_features(listing: str) -> set[str]:
    """The features in lines such as `hw.optional.arm.FEAT_DotProd: 1`."""
    present = re.findall(r"^hw\.optional\.(?:arm\.)?(\w+): 1$", listing, re.MULTILINE)
    return {_APPLE_NAMES[name] for name in present if name in _APPLE_NAMES}


def find_compiler() -> str | None:
    """The C++ compiler that would build the kernels: $CXX, or the first of the usual names."""
    named = os.environ.get("CXX")
    candidates: Sequence[str] = [named.split()[0]] if named and named.split() else COMPILERS
    return next((path for name in candidates if (path := shutil.which(name)) is not None), None)


def find_torch() -> Torch:
    """Import torch, and ask it for devices. Whatever goes wrong is part of the answer."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library that it loads is missing
        return Torch(None, _one_line(error), None, ())
    return Torch(torch.__version__, None, torch.version.cuda, _gpus(torch))


def _gpus(torch: "ModuleType") -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple(Gpu(each.name, each.total_memory) for each in properties)


def find_mlx() -> Mlx | None:
    """Import MLX, if it is there, and ask it for its device. Torch must be there."""
    if not _is_installed("mlx"):
        return None
    try:
        from kakeya.engine.mlx.backend import gpu_name
    except (ImportError, OSError) as error:
        return Mlx(version("mlx"), _one_line(error), None)
    return Mlx(version("mlx"), None, gpu_name())


def find_kernels() -> Kernels:
    """What computes on a CPU by default. Torch must be there."""
    from kakeya import kernels
    from kakeya.errors import ConfigError

    try:
        native = kernels.load(KernelChoice.NATIVE)
    except ConfigError as error:
        return Kernels("torch", None, _one_line(error.__cause__ or error))
    assert native is not None
    return Kernels("native", native.isa, None)


def _chosen_backend() -> BackendChoice:
    from kakeya.engine.backends import chosen_backend

    return chosen_backend(EngineConfig()).backend


def look_at_cache() -> Cache:
    """The cache directory, or what it would be made in."""
    root = store.cache_dir()
    standing = next(folder for folder in (root, *root.parents) if folder.exists())
    models = tuple(each.name for each in catalogue.list_models() if each.path is not None)
    writable = standing.is_dir() and os.access(standing, os.W_OK | os.X_OK)
    return Cache(str(root), writable, shutil.disk_usage(standing).free, models)


def _port(use: str, listening: Listening) -> Port:
    return Port(use, listening.bind, is_free(listening.host, listening.port))


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of `a.b`, even `a` is missing
        return False


def _printed(command: Sequence[str]) -> str:
    """What a program prints; nothing where there is no such program, or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
