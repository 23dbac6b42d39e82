"""The decoder network, every family by configuration. It does not know the cache: it is handed `attend`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kakeya.kernels.network import AttentionContext
from kakeya.models.config import LayerHeads, ModelConfig
from kakeya.models.embedding import Embedding
from kakeya.models.fused import RunLayers, Tap
from kakeya.models.layer import Layer
from kakeya.models.linear import Linear, PackedLinear
from kakeya.models.row_ops import RowOps, softcap

# attend(layer, q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim]) -> [rows, heads * head_dim],
# with the heads of that layer. q and k are not rotated yet; all three may be views with a row stride.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Decoder:
    """Token ids to hidden states to logits. Rows are tokens of any sessions; only `attend` relates them.

    Call under torch.inference_mode.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: RowOps,
        embedding: Embedding,
        layers: Sequence[Layer[Linear]],
        final_norm: Tensor,
        head: Linear,
        num_parameters: int,
        fused: RunLayers | None = None,
    ) -> None:
        self.config = config
        self.fused = fused
        self.num_parameters = num_parameters
        self._ops = ops
        self._embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._head = head
        self._heads = [config.heads_of(layer) for layer in range(config.num_layers)]
        self._ones = {heads.head_dim: torch.ones(heads.head_dim) for heads in self._heads}

    def embed(self, token_ids: Tensor) -> Tensor:
        """What the first layer is given, new float32 rows [n, hidden]."""
        hidden = self._embedding(token_ids)
        scale = self.config.embed_scale
        return hidden if scale == 1.0 else hidden.mul_(scale)

    def forward(self, token_ids: Tensor, attend: Attend, tap: Tap | None = None) -> Tensor:
        """The hidden state of each row after the final norm, float32 [rows, hidden]."""
        hidden = self.embed(token_ids)
        for index, layer in enumerate(self._layers):
            hidden = self._attention_block(index, layer, hidden, attend)
            hidden = self._mlp_block(layer, hidden)
            if layer.scalar is not None:
                hidden.mul_(layer.scalar)
            if tap is not None:
                tap(index, hidden)
        return self._normed(hidden, self._final_norm)

    def forward_fused(
        self,
        token_ids: Tensor,
        attention: AttentionContext,
        tap: Tap | None = None,
        tapped: Sequence[int] = (),
    ) -> Tensor:
        """The same bits as `forward`, where `fused` is there; only the layers `tapped` are shown."""
        assert self.fused is not None
        hidden = self.embed(token_ids)
        self.fused(hidden, attention, tap, tapped)
        return self._normed(hidden, self._final_norm)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """float32 [n, vocab] for final hidden states [n, hidden]. In `out` where kernels can write there."""
        logits = self._head(hidden, out=out) if isinstance(self._head, PackedLinear) else self._head(hidden)
        cap = self.config.logit_softcap
        return logits if cap is None else softcap(logits, cap)

    def shorten_head(self, count: int) -> int:
        """From now on give logits for the first `count` tokens alone, where the head can be cut; how many it
        gives."""
        head = self._head
        if isinstance(head, PackedLinear) and count < self.config.vocab_size == head.matrix.parts[0].outputs:
            self._head = head.first_outputs(count)
            return count
        return self.config.vocab_size

    def describe_weights(self) -> str:
        """How the matrices are held, such as "Q4_K and Q6_K (layers), Q6_K (head)"."""
        matrices = [matrix for layer in self._layers for matrix in layer.matrices.values()]
        formats = dict.fromkeys(name for matrix in matrices for name in matrix.formats)
        return f"{' and '.join(formats)} (layers), {' and '.join(self._head.formats)} (head)"

    def _attention_block(self, index: int, layer: Layer[Linear], hidden: Tensor, attend: Attend) -> Tensor:
        q, k, v = self._split_heads(self._heads[index], layer.qkv(self._normed(hidden, layer.input_norm)))
        if self.config.value_norm:
            v = self._head_norm(v, self._ones[v.shape[-1]])
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = self._head_norm(q, layer.query_norm), self._head_norm(k, layer.key_norm)
        attended = attend(index, q, k, v)
        if layer.post_attention_norm is None:
            return layer.output(attended, hidden)
        return self._normed(layer.output(attended), layer.post_attention_norm).add_(hidden)

    def _mlp_block(self, layer: Layer[Linear], hidden: Tensor) -> Tensor:
        gate_up = layer.gate_up(self._normed(hidden, layer.mlp_norm))
        gated = self._ops.gated(gate_up, self.config.activation)
        if layer.post_mlp_norm is None:
            return layer.down(gated, hidden)
        return self._normed(layer.down(gated), layer.post_mlp_norm).add_(hidden)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._ops.rms_norm(x, weight, self.config.norm_eps)

    def _split_heads(self, heads: LayerHeads, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the fused result [rows, (heads + 2 kv_heads) * head_dim]."""
        by_head = qkv.view(qkv.shape[0], -1, heads.head_dim)
        if heads.values_are_keys:
            q, k = by_head.split_with_sizes((self.config.num_heads, heads.kv_heads), 1)
            return q, k, k
        counts = (self.config.num_heads, heads.kv_heads, heads.kv_heads)
        q, k, v = by_head.split_with_sizes(counts, 1)  # half the time of three slices
        return q, k, v

    def _head_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Each head of each row normed on its own, or all heads of a row together: as wide as the weight."""
        return self._ops.rms_norm(x.reshape(-1, weight.shape[0]), weight, self.config.norm_eps).view(x.shape)
