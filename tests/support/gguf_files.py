"""Tiny GGUF files, written by the `gguf` package in the way its converter lays tensors out."""

import itertools
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from support.families import SHAPE

Array = npt.NDArray[np.float32]

LLAMA = transformers.LlamaConfig(**SHAPE)
# Where the architecture has another name than the model type.
ARCHITECTURE_OF = {
    "mistral": "llama",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
}
INTERLEAVED = ("llama", "mistral3", "smollm3", "granite")


def write_model(
    path: Path,
    model: transformers.PreTrainedModel,
    tensors: Mapping[str, Array] | None = None,
    **metadata: object,
) -> Path:
    """A `transformers` model as a float32 GGUF file; `tensors` are those that the model does not have."""
    config = model.config
    architecture = ARCHITECTURE_OF.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    add_geometry(writer, config, stated=metadata)
    add_metadata(writer, metadata)
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config.num_hidden_layers)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("layer_scalar"):
            name += ".weight"
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(stored, _laid_out(name, parameter.numpy(), architecture, config))
    for stored, array in (tensors or {}).items():
        writer.add_tensor(stored, array)
    return finish(writer, path)


def write_bare(
    path: Path,
    config: transformers.PreTrainedConfig = LLAMA,
    architecture: str = "llama",
    tensors: Mapping[str, Array] | None = None,
    **metadata: object,
) -> Path:
    """The geometry of `config`, these metadata and tensors, and an embedding of five tokens: nothing else."""
    writer = gguf.GGUFWriter(path, architecture)
    add_geometry(writer, config, stated=metadata)
    add_metadata(writer, metadata)
    writer.add_tensor("token_embd.weight", np.zeros((5, config.hidden_size), dtype=np.float32))
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    return finish(writer, path)


def add_geometry(
    writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig, stated: Mapping[str, object] | None = None
) -> None:
    """What `stated` has metadata of its own for is left out."""
    stated = stated or {}
    head_dim = None if "attention__key_length" in stated else getattr(config, "head_dim", None)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if "attention__head_count_kv" not in stated:
        writer.add_head_count_kv(config.num_key_value_heads)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in config.rope_parameters:
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def add_metadata(writer: gguf.GGUFWriter, metadata: dict[str, object]) -> None:
    """Keys are spelled with two underscores for a dot, after the architecture's own prefix."""
    for key, value in metadata.items():
        name = f"{writer.arch}.{key.replace('__', '.')}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


MIXED = transformers.LlamaConfig(
    vocab_size=71,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)


def write_mixed(path: Path, config: transformers.LlamaConfig = MIXED) -> Path:
    """A random Llama with a matrix of every block format, and several in each stack of projections.

    The layers' weights are large beside the embedding's, so that it does not say one word for ever.
    """
    writer = gguf.GGUFWriter(path, "llama")
    add_geometry(writer, config)
    hidden, inner = config.hidden_size, config.intermediate_size
    key_size = config.head_dim * config.num_key_value_heads
    kinds = itertools.cycle(BLOCK_KINDS)
    matrices = {"attn_q": (hidden, hidden), "attn_k": (key_size, hidden), "attn_v": (key_size, hidden)}
    matrices |= {"attn_output": (hidden, hidden), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden)}
    matrices |= {"ffn_down": (hidden, inner)}
    for layer in range(config.num_hidden_layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(hidden, dtype=np.float32))
        for seed, (name, shape) in enumerate(matrices.items(), len(matrices) * layer):
            kind = next(kinds)
            data = random_weights(kind, *shape, deviation=4 / shape[1] ** 0.5, seed=seed)
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=kind)
    table = random_weights(Kind.Q6_K, config.vocab_size, hidden, deviation=0.1, seed=99)
    writer.add_tensor("token_embd.weight", table, raw_dtype=Kind.Q6_K)
    writer.add_tensor("output_norm.weight", np.ones(hidden, dtype=np.float32))
    return finish(writer, path)


def write_tensor(path: Path, data: npt.NDArray[np.uint8], kind: Kind, columns: int) -> Path:
    """A Qwen-shaped file whose embedding table is `data` [rows, row_bytes] of `kind`: no row is reordered."""
    writer = gguf.GGUFWriter(path, "qwen2")
    config = transformers.Qwen2Config(
        hidden_size=columns, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1
    )
    add_geometry(writer, config)
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    return finish(writer, path)


def interleaved(rows: Array, heads: int) -> Array:
    """Rows of each head in pair order, as GGUF's `llama` architecture wants them."""
    by_half = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return by_half.swapaxes(1, 2).reshape(rows.shape)


ARCHITECTURES = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}


def _laid_out(name: str, array: Array, architecture: str, config: transformers.PreTrainedConfig) -> Array:
    if architecture in INTERLEAVED and ".q_proj." in name:
        return interleaved(array, config.num_attention_heads)
    if architecture in INTERLEAVED and ".k_proj." in name:
        return interleaved(array, config.num_key_value_heads)
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return array + 1
    return array


def random_blocks(kind: Kind, rows: int, columns: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Random bytes of `kind`, with scales that are ordinary numbers. uint8 [rows, row_bytes]."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for offset in SCALE_OFFSETS[kind]:
        scales = random.normal(0, 0.05, (rows, columns // block, 1)).astype(np.float16)
        blocks[..., offset : offset + 2] = scales.view(np.uint8)
    if kind == Kind.MXFP4:  # its scale is a power of two, of which a byte holds the exponent
        blocks[..., 0] = random.integers(118, 124, blocks.shape[:2])
    return blocks.reshape(rows, -1)


def random_weights(
    kind: Kind, rows: int, columns: int, deviation: float, seed: int = 0
) -> npt.NDArray[np.uint8]:
    """Random blocks whose weights have about that standard deviation."""
    data = random_blocks(kind, rows, columns, seed)
    factor = deviation / gguf.dequantize(data, kind).std()
    blocks = data.reshape(rows, -1, gguf.GGML_QUANT_SIZES[kind][1])
    for offset in SCALE_OFFSETS[kind]:
        scales = np.ascontiguousarray(blocks[..., offset : offset + 2]).view(np.float16)
        blocks[..., offset : offset + 2] = (scales * factor).astype(np.float16).view(np.uint8)
    if kind == Kind.MXFP4:
        blocks[..., 0] += np.round(np.log2(factor)).astype(np.int8).view(np.uint8)
    return data


# Where a block has its float16 scale and minimum.
SCALE_OFFSETS = {
    Kind.Q4_0: [0],
    Kind.Q4_1: [0, 2],
    Kind.Q5_0: [0],
    Kind.Q5_1: [0, 2],
    Kind.Q8_0: [0],
    Kind.Q2_K: [80, 82],
    Kind.Q3_K: [108],
    Kind.Q4_K: [0, 2],
    Kind.Q5_K: [0, 2],
    Kind.Q6_K: [208],
    Kind.IQ4_NL: [0],
    Kind.IQ4_XS: [0],
    Kind.MXFP4: [],
    Kind.IQ2_XXS: [0],
    Kind.TQ2_0: [64],
}


# Those that are kept as they are; the others are expanded by the gguf package.
BLOCK_KINDS = [kind for kind in SCALE_OFFSETS if kind not in (Kind.IQ2_XXS, Kind.TQ2_0)]


def float_bytes(kind: Kind, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    dtype = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}[kind]
    return values.to(dtype).view(torch.uint8).numpy()
