"""Tiny random models: their files, and the decoder, the backends, the engine and the runtime over them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from kakeya import kernels as native
from kakeya.config import NO_PROPOSER, CacheConfig, EngineConfig
from kakeya.engine.cpu.backend import CpuBackend, cpu_pool
from kakeya.engine.cuda.backend import CudaBackend
from kakeya.engine.cuda.weights import load_weights
from kakeya.engine.engine import Engine
from kakeya.engine.proposer import Proposer
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.shared_prefixes import GRANULE
from kakeya.engine.slab import SlabPool, prefix_cache_bytes, slab_geometry
from kakeya.kernels.gpu import load_gpu_kernels
from kakeya.models.checkpoint import open_checkpoint
from kakeya.models.config import ModelConfig
from kakeya.models.decoder import Decoder
from kakeya.models.drafter import DrafterConfig, DrafterKind, StoredDrafter, write_drafter
from kakeya.models.hf_config import config_from_hf
from kakeya.models.loader import load_decoder
from kakeya.runtime import Runtime
from kakeya.text import Tokenizer
from kakeya.types import BackendChoice, DType, Event, KernelChoice, Numerics, TokenizerFiles, WeightFormat

if TYPE_CHECKING:  # a machine with a GPU need not have MLX
    from kakeya.engine.mlx.backend import MlxBackend
    from kakeya.engine.mlx.weights import MlxWeights

VOCAB = 61
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 100.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CORPUS = ["the quick brown fox, it's 12345", "Größe naïve 日本語", "hello hello  world\n\n"] * 4
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
PROMPT = [5, 9, 22, 13, 7]
# A config.json that nothing is written for: fingerprints and refusals are pinned to it.
CONFIG_JSON: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
}
CPU = torch.device("cpu")
# What computes: changes of an `engine_config`.
COMPUTERS = {
    "torch": {"kernels": KernelChoice.TORCH},
    "native": {"kernels": KernelChoice.NATIVE},
    "mlx": {"backend": BackendChoice.MLX},
}


def parse_config(**changes: Any) -> ModelConfig:
    """What `CONFIG_JSON` with these changes is understood as."""
    return config_from_hf(CONFIG_JSON | changes)


def write_llama(directory: Path, seed: int = 0, **changes: object) -> Path:
    """A random Llama checkpoint whose next-token distributions are well spread."""
    config = LLAMA | changes
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    tensors = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=generator),
        "model.norm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.self_attn.q_proj.weight": random(query, hidden),
            f"{prefix}.self_attn.k_proj.weight": random(key, hidden),
            f"{prefix}.self_attn.v_proj.weight": random(key, hidden),
            f"{prefix}.self_attn.o_proj.weight": random(hidden, query),
            f"{prefix}.mlp.gate_proj.weight": random(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": random(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": random(hidden, inner),
            f"{prefix}.input_layernorm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
            f"{prefix}.post_attention_layernorm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
        }
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_chat_model(directory: Path, vocab_size: int | None = None) -> Path:
    """A random Llama over the byte-level test vocabulary; its EOS is what closes a turn in the template.

    Its own vocabulary may be padded to `vocab_size`.
    """
    files = byte_level_files()
    size = vocab_size or tokenizers.Tokenizer.from_buffer(files.tokenizer_json).get_vocab_size()
    write_llama(directory, vocab_size=size, eos_token_id=0)
    (directory / "tokenizer.json").write_bytes(files.tokenizer_json)
    settings = {"chat_template": files.chat_template, "eos_token": files.eos_token}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def byte_level_files() -> TokenizerFiles:
    """Special tokens 0 to 2, then bytes and merges, and one added token that only looks like bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("ïĠ", normalized=False)])
    return TokenizerFiles(tokenizer.to_str().encode(), chat_template=TEMPLATE, eos_token="<|end|>")


def sentencepiece_files() -> TokenizerFiles:
    """<unk>, <s>, </s>, the bytes, then pieces. Texts get a space in front and begin with <s>."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=120, show_progress=False, max_token_length=6)
    )
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *sorted(model["vocab"], key=model["vocab"].get)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return TokenizerFiles(tokenizer.to_str().encode(), bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def engine_config(sink: int = 2, window: int = 8, spare: int = 4, **changes: object) -> EngineConfig:
    """Small shapes, float32, torch kernels, no drafts: what a test compares with the oracle."""
    base = EngineConfig(
        cache=CacheConfig(sink, window, spare),
        capacity=4,
        numerics=Numerics.FAST,
        dtype=DType.FLOAT32,
        weights=WeightFormat.FLOAT32,
        kernels=KernelChoice.TORCH,
        threads=2,
        prefill_block=8,
        max_batch_tokens=32,
        proposer=NO_PROPOSER,
    )
    return replace(base, **changes)


Model = Union[Decoder, "MlxWeights"]


def load(directory: Path, config: EngineConfig) -> Model:
    """The model as the CPU's or MLX's backend runs it."""
    if config.backend is BackendChoice.MLX:
        from kakeya.engine.mlx.weights import load_mlx_weights

        checkpoint = open_checkpoint(directory)
        return load_mlx_weights(checkpoint, dtype=config.dtype, weights=config.weights)
    return load_decoder(
        open_checkpoint(directory),
        dtype=config.dtype,
        weights=config.weights,
        numerics=config.numerics,
        kernels=native.load(config.kernels),
    )


def make_backend(
    decoder: Model, config: EngineConfig, fingerprint: str = "tiny"
) -> "CpuBackend | MlxBackend":
    kernels = native.load(config.kernels)
    if isinstance(decoder, Decoder):
        return CpuBackend(decoder, cpu_pool(decoder, config), config.numerics, kernels, fingerprint)
    from kakeya.engine.mlx.backend import MlxBackend, mlx_pool

    return MlxBackend(decoder, mlx_pool(decoder.config, config), kernels, fingerprint)


def make_device_backend(
    directory: Path,
    config: EngineConfig,
    device: torch.device = CPU,
    fingerprint: str = "tiny",
    drafter: StoredDrafter | None = None,
) -> CudaBackend:
    """The CUDA backend over the checkpoint in `directory`; on a CPU with torch kernels and without graphs."""
    checkpoint = open_checkpoint(directory)
    weights = load_weights(checkpoint, dtype=config.dtype, weights=config.weights, device=device)
    geometry = slab_geometry(checkpoint.config, config, drafter.config.layers if drafter is not None else 0)
    pool = SlabPool(geometry, config.capacity, device, GRANULE, prefix_cache_bytes(config, geometry))
    kernels = load_gpu_kernels(device, config.kernels)
    backend = CudaBackend(weights, pool, config.numerics, kernels, fingerprint, config, device, drafter)
    backend.capture()
    return backend


def random_drafter(model: ModelConfig, kind: DrafterKind = "steps", **changes: object) -> StoredDrafter:
    """A drafter that has learned nothing."""
    shape = DrafterConfig(
        kind=kind,
        taps=tuple(range(model.num_layers)),
        block=4,
        layers=1,
        hidden_size=model.hidden_size,
        intermediate_size=24,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        draft_vocab_size=model.vocab_size,
        norm_eps=model.norm_eps,
        verifier="tiny",
    )
    shape = replace(shape, **changes)
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: torch.randn(size, generator=generator) * 0.3 + (len(size) == 1)
        for name, size in shape.shapes.items()
    }
    draft_vocab = (
        torch.randperm(shape.vocab_size, generator=generator)[: shape.draft_vocab_size].sort().values
    )
    return StoredDrafter(shape, tensors, draft_vocab, {}, "00" * 32)


def write_random_drafter(
    path: Path, model: ModelConfig, kind: DrafterKind = "steps", **changes: object
) -> Path:
    """The file of one."""
    drafter = random_drafter(model, kind, **changes)
    write_drafter(path, drafter.config, drafter.tensors, drafter.draft_vocab, {})
    return path


def make_engine(decoder: Model, config: EngineConfig, proposer: Proposer | None = None) -> Engine:
    proposers = () if proposer is None else (proposer,)
    return Engine(make_backend(decoder, config), config, proposers).start()


@contextmanager
def tiny_runtime(directory: Path, config: EngineConfig | None = None, **options: object) -> Iterator[Runtime]:
    """A runtime over the tiny checkpoint in `directory`; its tokenizer is a stranger to the model."""
    threads = torch.get_num_threads()
    config = config or engine_config(threads=1)
    checkpoint, tokenizer = open_checkpoint(directory), Tokenizer(byte_level_files())
    try:
        with Runtime.open(checkpoint, config, name="tiny", tokenizer=tokenizer, **options) as runtime:
            yield runtime
    finally:
        torch.set_num_threads(threads)


def new_session(runtime: Runtime, prompt: list[int] = PROMPT, **options: object) -> str:
    """A session that never ends by itself, with a prompt in it."""
    session_id = runtime.create_session(eos_token_ids=(), **options)
    runtime.append(session_id, prompt, owner=options.get("owner", "local"))
    return session_id


def answer(runtime: Runtime, session_id: str, count: int, **options: object) -> list[Event]:
    """All events of one generate."""
    return list(runtime.generate(session_id, count, **options))


def sequence_of(runtime: Runtime, session_id: str, owner: str = "local") -> TokenSequence:
    """The engine's half of a session, to look at or to break."""
    return runtime._store.get(session_id, owner).sequence
