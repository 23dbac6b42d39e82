"""A GGUF file of a given shape with random weights in Q4_K_M's mix, for sizes that nobody has a file of.

    python scripts/random_gguf.py OUT.gguf --tokenizer-of SOME.gguf [--shape qwen3-4b]

Speed and memory do not depend on what the weights are. The tokenizer comes from a real file, since peers
refuse to open one without; it must have the shape's vocabulary or a smaller one.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

Blocks = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Shape:
    """A dense network of the Qwen3 family with a tied head."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


SHAPES = {
    "qwen3-0.6b": Shape(28, 1024, 3072, 16, 8, 128, 151936),
    "qwen3-4b": Shape(36, 2560, 9728, 32, 8, 128, 151936),
    "qwen3-8b": Shape(36, 4096, 12288, 32, 8, 128, 151936),
}
# Float16 numbers of a block, chosen so that weights have a mean of about 0 and a deviation of about 0.02.
SCALES = {Kind.Q4_K: {0: 1e-4, 2: 7.5e-4}, Kind.Q6_K: {208: 1.5e-5}}


def random_blocks(random: np.random.Generator, kind: Kind, rows: int, columns: int) -> Blocks:
    width, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows, columns // width, size), dtype=np.uint8)
    for offset, scale in SCALES[kind].items():
        blocks[..., offset : offset + 2] = np.array([scale], dtype=np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def matrices(shape: Shape, layer: int) -> dict[str, tuple[Kind, int, int]]:
    """Name to format, rows and columns. Half of the layers have finer values and down projections."""
    fine = Kind.Q6_K if layer % 2 else Kind.Q4_K
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "attn_q": (Kind.Q4_K, query, shape.hidden),
        "attn_k": (Kind.Q4_K, kv, shape.hidden),
        "attn_v": (fine, kv, shape.hidden),
        "attn_output": (Kind.Q4_K, shape.hidden, query),
        "ffn_gate": (Kind.Q4_K, shape.inner, shape.hidden),
        "ffn_up": (Kind.Q4_K, shape.inner, shape.hidden),
        "ffn_down": (fine, shape.hidden, shape.inner),
    }


def vectors(shape: Shape) -> dict[str, int]:
    return {
        "attn_norm": shape.hidden,
        "ffn_norm": shape.hidden,
        "attn_q_norm": shape.head_dim,
        "attn_k_norm": shape.head_dim,
    }


def add_metadata(writer: gguf.GGUFWriter, shape: Shape, tokenizer_of: Path) -> None:
    writer.add_block_count(shape.layers)
    writer.add_context_length(40960)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    for field in gguf.GGUFReader(tokenizer_of).fields.values():
        if not field.name.startswith("tokenizer."):
            continue
        value, kind = field.contents(), field.types[0]
        if kind == gguf.GGUFValueType.ARRAY:
            if field.name.endswith((".tokens", ".token_type")):
                filler = "<unused{}>" if field.name.endswith(".tokens") else 5
                missing = range(shape.vocabulary - len(value))
                value += [filler.format(i) if isinstance(filler, str) else filler for i in missing]
            writer.add_array(field.name, value)
        else:
            writer.add_key_value(field.name, value, kind)


def write(path: Path, shape: Shape, tokenizer_of: Path) -> None:
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen3")
    add_metadata(writer, shape, tokenizer_of)

    def add(name: str, kind: Kind, rows: int, columns: int) -> None:
        writer.add_tensor(f"{name}.weight", random_blocks(random, kind, rows, columns), raw_dtype=kind)

    add("token_embd", Kind.Q6_K, shape.vocabulary, shape.hidden)
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, dtype=np.float32))
    for layer in range(shape.layers):
        for name, size in vectors(shape).items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(size, dtype=np.float32))
        for name, matrix in matrices(shape, layer).items():
            add(f"blk.{layer}.{name}", *matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer-of", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b")
    asked = parser.parse_args()
    write(asked.out, SHAPES[asked.shape], asked.tokenizer_of)


if __name__ == "__main__":
    main()
