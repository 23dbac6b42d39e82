"""The shapes that `bench gpu` measures: public models' sizes, whatever the weights. Pure arithmetic."""

from dataclasses import dataclass

from kakeya.models.config import FAMILIES, ModelConfig
from kakeya.models.rope import RopeConfig

# Of weights, activations and cache alike.
ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Shape:
    """A model's sizes under a name, and the traffic and work that they imply."""

    name: str
    model: ModelConfig

    @property
    def layer_weights(self) -> int:
        """Elements of all layers' matrices. Norms are a thousandth of that and not counted."""
        model = self.model
        attention = model.hidden_size * (2 * model.query_size + 2 * model.kv_size)
        return model.num_layers * (attention + 3 * model.hidden_size * model.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.model.vocab_size * self.model.hidden_size

    @property
    def weight_bytes(self) -> int:
        """What a step must read: layers and head, each once. Of the embedding it reads a row a token."""
        return (self.layer_weights + self.head_weights) * ELEMENT_BYTES

    @property
    def kv_bytes_per_token(self) -> int:
        return self.model.num_layers * 2 * self.model.kv_size * ELEMENT_BYTES

    def step_bytes(self, rows: int, tokens: int) -> int:
        """What a step of `rows` sessions must read, each with so many tokens in its cache."""
        return self.weight_bytes + rows * tokens * self.kv_bytes_per_token

    def floor_seconds(self, rows: int, tokens: int, bytes_per_second: float) -> float:
        """No step can be shorter: its bytes at the speed that memory was measured at."""
        return self.step_bytes(rows, tokens) / bytes_per_second

    def prompt_flops(self, rows: int) -> int:
        """Of the products for a prompt of so many rows, of which the last goes through the head.
        Attention's own are not counted."""
        return 2 * (rows * self.layer_weights + self.head_weights)


def _shape(
    name: str,
    family: str,
    *,
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    tied: bool,
    theta: float = 1e6,
    eps: float = 1e-6,
) -> Shape:
    rope = RopeConfig(theta, head_dim)
    model = ModelConfig(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=eps,
        norm_offset=0.0,
        activation="silu",
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=FAMILIES[family].qk_norm,
        post_norms=False,
        tied_head=tied,
        embed_scale=1.0,
        query_scale=head_dim**-0.5,
        attention_softcap=None,
        logit_softcap=None,
        layer_windows=(None,) * layers,
        layer_ropes=(rope,) * layers,
        bos_token_id=None,
        eos_token_ids=(),  # nothing ends before it has its length
        max_positions=2**20,
    )
    return Shape(name, model)


QWEN3_8B = _shape(
    "qwen3-8b", "qwen3", vocab=151_936, hidden=4096, inner=12_288, layers=36, heads=32, kv_heads=8,
    head_dim=128, tied=False,
)  # fmt: skip
QWEN3_06B = _shape(
    "qwen3-0.6b", "qwen3", vocab=151_936, hidden=1024, inner=3072, layers=28, heads=16, kv_heads=8,
    head_dim=128, tied=True,
)  # fmt: skip
SMOLLM2 = _shape(
    "smollm2-135m", "llama", vocab=49_152, hidden=576, inner=1536, layers=30, heads=9, kv_heads=3,
    head_dim=64, tied=True, theta=1e5, eps=1e-5,
)  # fmt: skip
TINY_QWEN3 = _shape(
    "tiny-qwen3",
    "qwen3",
    vocab=64,
    hidden=32,
    inner=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    tied=False,
)
TINY_LLAMA = _shape(
    "tiny-llama",
    "llama",
    vocab=64,
    hidden=48,
    inner=64,
    layers=2,
    heads=3,
    kv_heads=1,
    head_dim=16,
    tied=True,
)

SHAPES = {shape.name: shape for shape in (QWEN3_8B, QWEN3_06B, SMOLLM2, TINY_QWEN3, TINY_LLAMA)}
