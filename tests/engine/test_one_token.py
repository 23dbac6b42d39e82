"""How much code a reader of one decode token meets: the classes whose methods run for it (ADR 43)."""

import dataclasses
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest

from kakeya.engine.backend import Backend
from kakeya.engine.engine import Engine
from kakeya.types import KernelChoice, SamplingParams, WeightFormat
from support import tiny

# Float weights are multiplied by torch, so native kernels run their layers one by one.
CPU_CONFIGS = {
    "torch": tiny.engine_config(window=1024, spare=16),
    "native": tiny.engine_config(
        window=1024, spare=16, kernels=KernelChoice.NATIVE, weights=WeightFormat.INT8
    ),
    "native, layer by layer": tiny.engine_config(window=1024, spare=16, kernels=KernelChoice.NATIVE),
}


_MORE_THAN_ARE_READ = (
    900  # however far the engine is ahead of its reader, it is neither at the end nor past a lap
)


class Watch:
    """The classes whose methods run while it `is_on`, on threads that are started in its context."""

    def __init__(self) -> None:
        self.is_on = False
        self.met: set[type] = set()

    def profile(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if self.is_on and event == "call" and code.co_argcount and code.co_varnames[0] == "self":
            self.met.add(type(frame.f_locals["self"]))

    @contextmanager
    def watching(self) -> Iterator[None]:
        before, of_threads = sys.getprofile(), threading.getprofile()
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(of_threads)


def classes_of_a_token(backend: Backend, config: tiny.EngineConfig) -> set[str]:
    """Beside the engine, whose loop has begun before, and without values: frozen ones and tuples."""
    watch = Watch()
    with watch.watching():
        engine = Engine(backend, config).start()
        try:
            sequence = engine.open("me", ())
            engine.append(sequence, tiny.PROMPT)
            stream = engine.generate(sequence, _MORE_THAN_ARE_READ, SamplingParams())
            tokens = iter(stream)
            for _ in range(10):
                next(tokens)
            watch.is_on = True
            for _ in range(20):
                next(tokens)
            watch.is_on = False
            stream.cancel()
        finally:
            engine.shutdown()
    ours = (each for each in watch.met if each.__module__.startswith("kakeya."))
    return {each.__name__ for each in ours if not _is_value(each)}


def _is_value(kind: type) -> bool:
    parameters = getattr(kind, "__dataclass_params__", None) if dataclasses.is_dataclass(kind) else None
    return issubclass(kind, tuple) or (parameters is not None and parameters.frozen)


@pytest.mark.parametrize("kernels", CPU_CONFIGS)
def test_a_token_on_a_cpu_meets_fifteen_classes_at_most(tmp_path: Path, kernels: str) -> None:
    config = CPU_CONFIGS[kernels]
    tiny.write_llama(tmp_path, hidden_size=64, intermediate_size=128)
    met = classes_of_a_token(tiny.make_backend(tiny.load(tmp_path, config), config), config)
    assert {"Stepper", "Request", "Decoder", "KVSlab", "EventStream"} <= met
    assert len(met) <= 15, sorted(met)


def test_a_token_on_cuda_meets_thirty_classes_at_most(tiny_llama: Path) -> None:
    config = replace(CPU_CONFIGS["torch"], threads=1)
    met = classes_of_a_token(tiny.make_device_backend(tiny_llama, config), config)
    assert {"Stepper", "Request", "FusedDecoder", "KVSlab", "EventStream"} <= met
    assert len(met) <= 30, sorted(met)
