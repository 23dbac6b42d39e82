"""`kakeya doctor`: what this machine has, what will run on it, and what to install for more."""

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

import kakeya
from kakeya.cli.console import Screen, human_bytes
from kakeya.config import DEFAULT_MODEL
from kakeya.options import Json
from kakeya.types import BackendChoice

if TYPE_CHECKING:
    from kakeya.cli.findings import Cache, Findings, Mlx, Torch

# Extras of the package by the module that each brings, and what it is for. One for each optional feature.
EXTRAS = {
    "huggingface_hub": ("hub", "models by hub id"),
    "opentelemetry.sdk": ("otel", "traces of every generate"),
    "mlx": ("mlx", "--backend mlx on Apple silicon"),
    "ray": ("cluster", "sessions on many machines"),
    "triton": ("cuda", "our kernels for NVIDIA GPUs"),
}
_FOR_NVIDIA = {"triton"}


def register(app: typer.Typer) -> None:
    app.command("doctor", help="Say what this machine has, what will run, and what to install for more.")(
        doctor
    )


def doctor(as_json: Json = False) -> None:
    """Look, and say it. Exits with 1 only when nothing can run."""
    from kakeya.cli.findings import look

    screen, found = Screen(), look(EXTRAS)
    wrong = list(problems(found))
    if as_json:
        screen.line(json.dumps(report(found)))
    else:
        for line in _lines(found):
            screen.line(line)
    raise typer.Exit(1 if wrong else 0)


def report(found: "Findings") -> dict[str, object]:
    """The same for programs."""
    return {
        "version": kakeya.__version__,
        "found": asdict(found),
        "runs": list(what_runs(found)),
        "problems": list(problems(found)),
        "advice": list(advice(found)),
    }


def problems(found: "Findings") -> Iterator[str]:
    """Why nothing can run, if so."""
    if found.torch.error is not None:
        yield f"torch cannot be imported ({found.torch.error}): pip install torch"
    if found.free_memory_bytes < found.default_model_bytes:
        yield (
            f"{human_bytes(found.free_memory_bytes)} of memory are free, and {DEFAULT_MODEL}, the smallest "
            f"model by name, needs {human_bytes(found.default_model_bytes)}: end other programs"
        )


def what_runs(found: "Findings") -> Iterator[str]:
    """What `kakeya serve` and `kakeya chat` would do now, without further flags."""
    if any(problems(found)) or found.kernels is None or found.backend is None:
        return
    if found.backend is BackendChoice.CPU:
        isa = f" ({found.kernels.isa})" if found.kernels.isa else ""
        yield f"--backend cpu: {found.kernels.name} kernels{isa} on {found.cores} cores"
    else:
        yield f"--backend {found.backend}: {', '.join(gpu.name for gpu in found.torch.gpus) or found.cpu}"
    here = DEFAULT_MODEL in found.cache.models
    yield f"the default model, {DEFAULT_MODEL}: {'is here' if here else 'is fetched at the first start'}"


def advice(found: "Findings") -> Iterator[str]:
    """What to do for more speed or more features."""
    yield from _advice_on_kernels(found)
    if found.nvidia_driver and not found.torch.gpus:
        built = f"CUDA {found.torch.cuda}" if found.torch.cuda else "no GPU"
        yield (
            f"torch is built for {built} and sees no device, though there is an NVIDIA driver: "
            "install a torch for that driver"
        )
    if not found.cache.writable:
        yield f"the cache directory {found.cache.path} cannot be written: set KAKEYA_CACHE_DIR to another"
    for port in found.ports:
        if not port.free:
            flag = "--bind" if port.use == "gRPC" else "--http"
            yield f"{port.address} is taken: give `kakeya serve` another {flag} HOST:PORT"
    if found.mlx is not None and found.mlx.gpu is not None:
        yield f"to compute on this {found.mlx.gpu}: --backend mlx"
    for module in found.missing_packages:
        if module in _FOR_NVIDIA and not found.nvidia_driver:
            continue
        extra, purpose = EXTRAS[module]
        yield f"for {purpose}: pip install 'kakeya[{extra}]'"


def _advice_on_kernels(found: "Findings") -> Iterator[str]:
    if found.kernels is None or found.kernels.name == "native":
        return
    install = "" if found.compiler else "install a C++17 compiler, then "
    yield (
        f"the native kernels are several times faster: {install}install the package again from its sources "
        "(pip install --force-reinstall --no-deps --no-binary kakeya kakeya)"
    )


def _lines(found: "Findings") -> Iterator[str]:
    yield f"kakeya {kakeya.__version__}, Python {found.python}, {found.system}"
    yield from _section("found", _found(found))
    yield from _section("will run", what_runs(found))
    yield from _section("nothing can run", problems(found))
    yield from _section("for more", advice(found))


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    indented = [f"  {line}" for line in lines]
    if indented:
        yield from ("", title, *indented)


def _found(found: "Findings") -> Iterator[str]:
    features = ", ".join(found.features) or "no features that kernels use"
    yield f"processor  {found.cpu}, {found.cores} cores; {features}"
    yield f"memory     {human_bytes(found.free_memory_bytes)} free of {human_bytes(found.memory_bytes)}"
    yield f"torch      {_torch(found.torch)}"
    if found.mlx is not None:
        yield f"mlx        {_mlx(found.mlx)}"
    if found.kernels is not None:
        built = (
            f"native, {found.kernels.isa}" if found.kernels.isa else f"torch, since {found.kernels.reason}"
        )
        yield f"kernels    {built}"
    yield f"compiler   {found.compiler or 'none'}"
    yield f"cache      {_cache(found.cache)}"
    for port in found.ports:
        yield f"port       {port.address} for {port.use}, {'free' if port.free else 'taken'}"


def _torch(torch: "Torch") -> str:
    if torch.error is not None:
        return f"cannot be imported: {torch.error}"
    gpus = ", ".join(f"{gpu.name} with {human_bytes(gpu.memory_bytes)}" for gpu in torch.gpus)
    return f"{torch.version}; {gpus or f'no GPU that it can use on this {platform.machine()}'}"


def _mlx(mlx: "Mlx") -> str:
    if mlx.error is not None:
        return f"cannot be imported: {mlx.error}"
    return f"{mlx.version}; {mlx.gpu or 'no GPU that it can use'}"


def _cache(cache: "Cache") -> str:
    models = ", ".join(cache.models) or "no models yet"
    writable = "" if cache.writable else ", cannot be written"
    return f"{cache.path}, {human_bytes(cache.free_bytes)} free{writable}; {models}"
