"""Opening the device backend: which one, with what weights, in how much memory; and with how few packages."""

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from kakeya import loading
from kakeya.config import EngineConfig
from kakeya.engine import backends
from kakeya.engine.cuda.memory import DeviceMemory, device_memory, weight_elements
from kakeya.engine.cuda.shapes import StepBuckets
from kakeya.engine.cuda.weights import load_weights
from kakeya.engine.cuda.workspace import Workspace, WorkspacePlan
from kakeya.engine.device import DeviceEvent, deliver, fetch, host_buffer, on_side_stream, receive
from kakeya.engine.slab import SlabPool, slab_geometry
from kakeya.errors import ConfigError, CorruptCheckpoint
from kakeya.kernels.gpu.torch_kernels import TorchKernels
from kakeya.models.checkpoint import Checkpoint, open_checkpoint
from kakeya.models.config import ModelConfig
from kakeya.types import BackendChoice, DType, KernelChoice, Numerics, TokenEvent, WeightFormat
from support import families, gguf_files, tiny
from support.engines import FunctionProposer
from support.tiny import answer, new_session, tiny_runtime

CPU = torch.device("cpu")
CUDA_CONFIG = EngineConfig(backend=BackendChoice.CUDA, capacity=4)


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_auto_takes_a_device_where_there_is_one(with_cuda: None) -> None:
    chosen = backends.chosen_backend(EngineConfig())
    assert chosen.backend is BackendChoice.CUDA
    assert (chosen.block_tokens, chosen.step_tokens) == (2048, 2304)
    assert backends.chosen_backend(EngineConfig(backend=BackendChoice.CPU)).backend is BackendChoice.CPU


def test_what_was_asked_for_stays(with_cuda: None) -> None:
    asked = replace(EngineConfig(max_batch_tokens=256), capacity=7)
    chosen = backends.chosen_backend(asked)
    assert (chosen.block_tokens, chosen.step_tokens, chosen.capacity) == (256, 256, 7)
    assert asked.max_batch_tokens == chosen.max_batch_tokens == 256
    assert EngineConfig().max_batch_tokens is None
    assert replace(chosen, max_batch_tokens=1024).block_tokens == 1024


@pytest.mark.parametrize(
    ("capacity", "batch"), [(1, 2304), (256, 2304), (257, 2560), (4096, 6144), (6144, 8192), (2**20, 8192)]
)
def test_a_block_fits_beside_a_token_of_every_session(with_cuda: None, capacity: int, batch: int) -> None:
    for first in (1, 5000):
        chosen = replace(backends.chosen_backend(EngineConfig(capacity=first)), capacity=capacity)
        assert (chosen.block_tokens, chosen.step_tokens) == (2048, batch)
        assert chosen.max_batch_tokens is None
    longer = EngineConfig(backend=BackendChoice.CUDA, capacity=capacity, prefill_block=4096)
    assert longer.step_tokens == 2048 + batch
    assert EngineConfig(backend=BackendChoice.CPU, capacity=capacity).step_tokens == 256


def test_without_a_device_auto_is_the_cpu_and_cuda_is_refused(without_cuda: None) -> None:
    chosen = backends.chosen_backend(EngineConfig())
    assert (chosen.backend, chosen.step_tokens) == (BackendChoice.CPU, 256)
    with pytest.raises(ConfigError, match="there is no CUDA device that torch .* can use"):
        backends.chosen_backend(CUDA_CONFIG)


@pytest.mark.parametrize("dtype", DType)
def test_weights_are_dense_and_a_tied_head_is_the_embedding(tiny_llama: Path, dtype: DType) -> None:
    weights = load_weights(open_checkpoint(tiny_llama), dtype=dtype, weights=WeightFormat.AUTO, device=CPU)
    name = "float32" if dtype is DType.FLOAT32 else "bf16"
    assert weights.description == f"{name} (layers), {name} (head)"
    assert weights.head.weight.data_ptr() == weights.embedding.data_ptr()
    assert weights.layers[0].qkv.outputs == 64 + 2 * 32
    assert weights.is_plain
    reference = tiny.load(tiny_llama, tiny.engine_config(dtype=dtype, weights=WeightFormat.AUTO))
    assert weights.num_parameters == reference.num_parameters
    assert weights.description == reference.describe_weights()


def test_heads_of_different_sizes_are_refused_by_name(tmp_path: Path) -> None:
    families.save_random(
        transformers.Gemma4TextConfig(**families.GEMMA4, num_global_key_value_heads=1, attention_k_eq_v=True),
        tmp_path,
    )
    with pytest.raises(
        ConfigError, match="gemma4 models, whose layers have heads of different sizes, .* cpu"
    ):
        load_weights(open_checkpoint(tmp_path), dtype=DType.FLOAT32, weights=WeightFormat.AUTO, device=CPU)


def test_weights_that_a_matmul_cannot_take_are_refused_by_name(tiny_llama: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama)
    for weights in (WeightFormat.INT4, WeightFormat.INT8):
        with pytest.raises(ConfigError, match=f"weights={weights.value} is not available on cuda"):
            load_weights(checkpoint, dtype=DType.BFLOAT16, weights=weights, device=CPU)
    with pytest.raises(ConfigError, match="weights=float32 needs dtype=float32"):
        load_weights(checkpoint, dtype=DType.BFLOAT16, weights=WeightFormat.FLOAT32, device=CPU)
    held = load_weights(checkpoint, dtype=DType.FLOAT32, weights=WeightFormat.BF16, device=CPU)
    assert held.description == "bf16 held as float32 (layers), bf16 held as float32 (head)"
    assert torch.equal(held.embedding, held.embedding.bfloat16().float())


def test_an_untied_head_and_a_missing_tensor(tmp_path: Path) -> None:
    directory = tiny.write_llama(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CorruptCheckpoint, match=r"lm_head\.weight"):
        load_weights(open_checkpoint(directory), dtype=DType.FLOAT32, weights=WeightFormat.AUTO, device=CPU)


def test_a_quantized_file_is_expanded(default_model: Path) -> None:
    weights = load_weights(
        open_checkpoint(default_model), dtype=DType.BFLOAT16, weights=WeightFormat.NATIVE, device=CPU
    )
    assert weights.description == "bf16 (layers), bf16 (head)"
    assert {layer.down.weight.dtype for layer in weights.layers} == {torch.bfloat16}
    assert weights.num_parameters == 134_515_008


def test_the_arithmetic_is_that_of_the_real_tensors(tiny_llama: Path) -> None:
    config = tiny.engine_config()
    checkpoint = open_checkpoint(tiny_llama)
    memory = device_memory(checkpoint.config, config)
    weights = load_weights(checkpoint, dtype=config.dtype, weights=config.weights, device=CPU)
    assert memory.weights == weights.num_parameters * 4 + 2 * 2 * 32 * 4  # two norms a layer that llama lacks
    plan = WorkspacePlan(checkpoint.config, StepBuckets(config).limits, torch.float32)
    space = Workspace(plan, CPU)
    held = [tensor for tensor in vars(space).values() if isinstance(tensor, torch.Tensor)]
    assert plan.nbytes == sum(tensor.nbytes for tensor in held) < memory.workspace


def test_what_does_not_fit_is_refused_with_the_arithmetic() -> None:
    memory = DeviceMemory(weights=1000, workspace=200, graphs=30, moves=4)
    assert memory.room(2234) == 1000
    sum_of_it = r"weights 1,000 \+ workspace 200 \+ graphs 30 \+ moves 4 = 1,234 bytes"
    with pytest.raises(ConfigError, match=f"the model does not fit on the device: {sum_of_it}, and 1,234 "):
        memory.room(1234)
    memory.check(slabs=10, slab_bytes=100, prefix_bytes=0, free=2234)
    words = (
        rf"10 slabs x 100 bytes = 1,000 beside 50 of shared prefixes and {sum_of_it}, "
        "and 2,234 bytes are free: room for 9 slabs"
    )
    with pytest.raises(ConfigError, match=words):
        memory.check(slabs=10, slab_bytes=100, prefix_bytes=50, free=2234)


def test_a_large_model_on_a_large_device(tiny_llama: Path) -> None:
    """Qwen3-8B's shape takes 16 GB of weights; most of 140 GB is left for sessions."""
    model = _eight_b(tiny_llama)
    memory = device_memory(model, replace(CUDA_CONFIG, capacity=256))
    assert 16.3e9 < memory.weights < 16.5e9
    assert memory.total < 19e9
    slab = slab_geometry(model, CUDA_CONFIG).slab_bytes
    assert memory.room(140 * 10**9) // slab > 256
    assert device_memory(model, replace(CUDA_CONFIG, capacity=768)).total < 20e9


def _eight_b(tiny_llama: Path) -> ModelConfig:
    tiny_config = open_checkpoint(tiny_llama).config
    layers = {"layer_windows": (None,) * 36, "layer_ropes": tiny_config.layer_ropes[:1] * 36}
    return replace(tiny_config, **EIGHT_B, **layers)


class Shaped(NamedTuple):
    """As much of a checkpoint as its memory depends on."""

    config: ModelConfig


EIGHT_B = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_layers": 36, "num_heads": 32,
    "num_kv_heads": 8, "head_dim": 128, "tied_head": False,
}  # fmt: skip


def test_room_for_sessions_depends_on_the_backend(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, cpu = open_checkpoint(tiny_llama), EngineConfig(backend=BackendChoice.CPU)
    weights = backends.held_bytes(checkpoint, cpu)
    assert weights == 2 * weight_elements(checkpoint.config)
    assert backends.held_bytes(checkpoint, replace(cpu, weights=WeightFormat.FLOAT32)) == 2 * weights
    free = weights + 7
    monkeypatch.setattr(backends, "free_memory", lambda device: 10**10 if device.type == "cuda" else free)
    assert backends.room_for_sessions(checkpoint, cpu, 4) == 7
    room = backends.room_for_sessions(checkpoint, CUDA_CONFIG, 4)
    assert room == 10**10 - device_memory(checkpoint.config, CUDA_CONFIG).total
    free = weights
    with pytest.raises(ConfigError, match=f"weights take {weights:,} bytes, and {weights:,} are free"):
        backends.room_for_sessions(checkpoint, cpu, 4)


def test_a_quantized_file_takes_its_own_size(default_model: Path) -> None:
    checkpoint, cpu = open_checkpoint(default_model), EngineConfig(backend=BackendChoice.CPU)
    size = default_model.stat().st_size
    assert size < backends.held_bytes(checkpoint, cpu) <= 1.1 * size
    wide = backends.held_bytes(checkpoint, replace(cpu, weights=WeightFormat.BF16))
    assert wide == pytest.approx(2 * 134_515_008, rel=0.001)


@pytest.mark.parametrize(
    "kind, kernels, each",
    [
        (Kind.Q4_K, KernelChoice.NATIVE, 1.1 * 144 / 256),
        (Kind.Q4_K, KernelChoice.TORCH, 2),
        (Kind.Q4_0, KernelChoice.TORCH, 0.625),
        (Kind.Q8_0, KernelChoice.TORCH, 1.125),
        (Kind.IQ2_XXS, KernelChoice.NATIVE, 2),
    ],
)
def test_what_is_expanded_takes_more_than_its_file(
    kind: Kind, kernels: KernelChoice, each: float, tmp_path: Path
) -> None:
    data = gguf_files.random_blocks(kind, 71, 256)
    checkpoint = open_checkpoint(gguf_files.write_tensor(tmp_path / "x.gguf", data, kind, 256))
    config = EngineConfig(backend=BackendChoice.CPU, kernels=kernels)
    assert backends.held_bytes(checkpoint, config) == int(71 * 256 * each)


@pytest.mark.parametrize("numerics", Numerics)
@pytest.mark.parametrize("free", [24e9, 80e9, 140e9])
def test_buffers_are_made_for_the_sessions_that_fit(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, free: float, numerics: Numerics
) -> None:
    """However many were asked for: their buffers would leave a small device no room at all."""
    monkeypatch.setattr(backends, "free_memory", lambda _: int(free))
    model, config = _eight_b(tiny_llama), replace(CUDA_CONFIG, numerics=numerics)
    slab = slab_geometry(model, config).slab_bytes
    capacity = backends.room_for_sessions(Shaped(model), config, 4096) // slab  # type: ignore[arg-type]
    for sessions in range(1, capacity + 1):
        device_memory(model, replace(config, capacity=sessions)).check(sessions, slab, 0, int(free))
    with pytest.raises(ConfigError, match="does not fit"):
        more = capacity + capacity // 10 + 2
        device_memory(model, replace(config, capacity=more)).check(more, slab, 0, int(free))


def test_the_device_backend_opens_on_a_cpu(tiny_llama: Path) -> None:
    opened = backends.open_device(open_checkpoint(tiny_llama), tiny.engine_config(), CPU)
    assert opened.kernels == "torch (cpu)"
    assert opened.backend.runs_ahead
    assert opened.backend.vocab_size == tiny.VOCAB
    assert opened.backend.fingerprint.endswith("/float32 (layers), float32 (head)")


def test_heads_that_kernels_do_not_take_are_announced(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Choosy(TorchKernels):
        name = "choosy"

        def supports_head_dim(self, head_dim: int) -> bool:
            return False

    monkeypatch.setattr(backends, "load_gpu_kernels", lambda device, choice: Choosy())
    with caplog.at_level(logging.WARNING):
        opened = backends.open_device(open_checkpoint(tiny_llama), tiny.engine_config(), CPU)
    assert "the choosy kernels do not take heads of 16" in caplog.text
    assert opened.kernels == "torch (cpu)"


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("CUDA error: out of memory")],
)
def test_running_out_of_memory_is_a_setting_that_cannot_be(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(backends, "open_device", full)
    words = r"4 slabs beside weights .* = .* bytes; lower --memory-budget or --capacity: CUDA .*out of memory"
    with pytest.raises(ConfigError, match=words):
        backends.open_backend(open_checkpoint(tiny_llama), CUDA_CONFIG)


@pytest.mark.parametrize(("left", "expected"), [(0, ConfigError), (10**9, RuntimeError)])
def test_a_library_that_fails_where_no_memory_is_left(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, left: int, expected: type[Exception]
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED")

    monkeypatch.setattr(backends, "open_device", full)
    monkeypatch.setattr(backends, "free_memory", lambda device: left)
    with pytest.raises(expected, match="CUBLAS_STATUS_EXECUTION_FAILED") as raised:
        backends.open_backend(open_checkpoint(tiny_llama), CUDA_CONFIG)
    assert ("ran out of memory" in str(raised.value)) == (left == 0)


def test_what_a_proposer_is_shown_is_planned(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, config = open_checkpoint(tiny_llama), tiny.engine_config()
    model, rows = checkpoint.config, StepBuckets(config).limits.rows
    alone, observed = (device_memory(model, config, layers) for layers in (0, 3))
    shown = observed.total - alone.total
    assert shown == 2 * 3 * rows * model.hidden_size * 4
    slabs = config.capacity * slab_geometry(model, config).slab_bytes
    monkeypatch.setattr(backends, "free_memory", lambda device: alone.total + slabs + shown - 1)
    backends.open_device(checkpoint, config, CPU)
    with pytest.raises(ConfigError, match="the KV pool does not fit"):
        backends.open_device(checkpoint, config, CPU, observed_layers=3)


def test_a_runtime_makes_room_for_its_proposer(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def opened(
        checkpoint: Checkpoint, config: EngineConfig, observed_layers: int, *rest: Any
    ) -> backends.OpenedBackend:
        asked.append(observed_layers)
        return backends.open_backend(checkpoint, config, observed_layers, *rest)

    monkeypatch.setattr(loading, "open_backend", opened)
    proposer = FunctionProposer(lambda tokens: [])
    proposer.hidden_layers = (0, 1)
    for given in ((), [proposer]):
        with tiny_runtime(tiny_llama, proposers=given):
            pass
    assert asked == [0, 2]


def test_a_device_that_cannot_even_be_asked(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device: torch.device) -> int:
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(backends, "free_memory", full)
    with pytest.raises(ConfigError, match="the CUDA device cannot be used; nvidia-smi .* out of memory"):
        backends.room_for_sessions(open_checkpoint(tiny_llama), CUDA_CONFIG, 4)


def test_another_error_at_the_start_stays_what_it_is(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available")

    monkeypatch.setattr(backends, "open_device", broken)
    monkeypatch.setattr(backends, "free_memory", broken)  # it can tell nothing any more
    with pytest.raises(RuntimeError, match="no kernel image"):
        backends.open_backend(open_checkpoint(tiny_llama), CUDA_CONFIG)


def test_on_a_cpu_nothing_waits() -> None:
    moment = DeviceEvent(CPU).record()
    moment.wait()
    moment.block_stream()
    tensor = torch.arange(3)
    with on_side_stream(CPU):
        copy, ready = deliver(tensor, CPU)
    assert torch.equal(receive(copy, ready), tensor)
    assert torch.equal(receive(copy, None), tensor)
    assert torch.equal(fetch(copy, ready), fetch(copy, None))
    assert not host_buffer(3, dtype=torch.int32, device=CPU).is_pinned()


def test_a_pool_that_a_device_cannot_hold(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    geometry = slab_geometry(open_checkpoint(tiny_llama).config, tiny.engine_config())
    with pytest.raises(ConfigError, match="1,000 bytes are available"):
        SlabPool(geometry, 4, torch.device("cuda", 0))


PROGRAM = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ImportError(name + " is not installed here")

sys.meta_path.insert(0, Absent())
import kakeya.engine.cuda.backend
from kakeya.models.checkpoint import open_checkpoint
from kakeya.engine.backends import open_device
from kakeya.runtime import Runtime
from kakeya.config import EngineConfig
from kakeya.text import Tokenizer
from support import tiny
from support.tiny import answer, byte_level_files, new_session, tiny_runtime
import torch

checkpoint = open_checkpoint({directory!r})
open_device(checkpoint, tiny.engine_config(), torch.device("cpu"))
tokenizer = Tokenizer(byte_level_files())
with Runtime.open(checkpoint, tiny.engine_config(threads=1), tokenizer=tokenizer) as runtime:
    session = runtime.create_session(eos_token_ids=())
    runtime.append(session, [5, 9])
    print(len(list(runtime.generate(session, 3))))
"""


def test_the_runtime_needs_none_of_what_front_ends_and_gguf_files_need(tiny_llama: Path) -> None:
    """A GPU machine may have torch, numpy, safetensors and tokenizers, and not much more."""
    absent = {"gguf", "prometheus_client", "fastapi", "pydantic", "uvicorn", "llguidance", "platformdirs",
              "jinja2", "triton"}  # fmt: skip
    program = PROGRAM.format(absent=absent, directory=str(tiny_llama))
    tests = Path(__file__).parents[2]
    outcome = subprocess.run([sys.executable, "-c", program], cwd=tests, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.split() == ["4"]


def test_the_magic_of_gguf_files_is_said_twice_and_is_the_same() -> None:
    from kakeya.models import checkpoint, gguf_file

    assert checkpoint._GGUF_MAGIC == gguf_file.MAGIC


def test_a_whole_runtime_on_the_device_backend(
    tiny_llama: Path, tmp_path: Path, with_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen by itself; what a session says, saved and restored, is what the CPU's says."""
    said = []
    for device in (None, CPU):
        choice = BackendChoice.CPU if device is None else BackendChoice.AUTO
        monkeypatch.setattr(backends, "CUDA", device)
        with tiny_runtime(tiny_llama, tiny.engine_config(threads=1, backend=choice)) as runtime:
            assert runtime.describe().backend == ("cpu" if device is None else "cuda")
            session = new_session(runtime)
            first = answer(runtime, session, 9)
            runtime.export_session(session, tmp_path / "saved", notes="remember")
            restored, notes = runtime.import_session(tmp_path / "saved")
            events = [first, answer(runtime, restored, 9), answer(runtime, runtime.fork(session)[0], 5)]
            said.append([[e.token_id for e in each if isinstance(e, TokenEvent)] for each in events])
            assert notes == "remember"
            assert runtime.info(restored).kv_live_bytes > 0
    assert said[0] == said[1]
