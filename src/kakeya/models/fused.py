"""Runs a decoder's layers as one native call, where the kernels can compute all of them."""

from collections.abc import Callable, Sequence

from torch import Tensor

from kakeya.kernels import Kernels
from kakeya.kernels.network import AttentionContext, Network, NetworkLayer, NetworkProjection, NetworkShape
from kakeya.models.config import ModelConfig
from kakeya.models.layer import Layer
from kakeya.models.linear import Linear, PackedLinear

# tap(layer, hidden): shown a layer's output, float32 [rows, hidden].
Tap = Callable[[int, Tensor], None]


class FusedLayers:
    """All layers in one native call, or in a few with taps in between."""

    def __init__(self, kernels: Kernels, network: Network) -> None:
        self._kernels, self._network = kernels, network
        self._parts: dict[tuple[int, int], Network] = {}

    def __call__(
        self, hidden: Tensor, attention: AttentionContext, tap: Tap | None = None, tapped: Sequence[int] = ()
    ) -> None:
        """Change hidden to what it is after the last layer. `tap` is shown the layers `tapped`."""
        if tap is None:
            self._kernels.run_network(self._network, hidden, attention)
            return
        first, count = 0, len(self._network.layers)
        for layer in sorted(tapped):
            self._run(first, layer + 1, hidden, attention)
            tap(layer, hidden)
            first = layer + 1
        if first < count:
            self._run(first, count, hidden, attention)

    def _run(self, first: int, end: int, hidden: Tensor, attention: AttentionContext) -> None:
        if (first, end) not in self._parts:
            layers = self._network.layers[first:end]
            self._parts[first, end] = self._kernels.network(self._network.shape, layers)
        self._kernels.run_network(self._parts[first, end], hidden, attention.of_layers(first, end))


def fused_network(kernels: Kernels, config: ModelConfig, layers: Sequence[Layer[Linear]]) -> Network | None:
    """All layers in one, or None where an operation is not native. Each is then called alone, with the same
    bits."""
    if config.layer_heads or config.value_norm or config.query_temperature is not None:
        return None
    if not kernels.supports_head_dim(config.head_dim) or any(layer.scalar is not None for layer in layers):
        return None
    shape = NetworkShape(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norms_span_heads=config.qk_norm == "width",
        eps=config.norm_eps,
        gelu=config.activation == "gelu_tanh",
    )
    native = [_layer(*each) for each in zip(layers, config.layer_windows, strict=True)]
    whole = [layer for layer in native if layer is not None]
    return kernels.network(shape, whole) if len(whole) == len(native) else None


def _layer(layer: Layer[Linear], local_window: int | None) -> NetworkLayer | None:
    qkv, output, gate_up, down = map(_projection, (layer.qkv, layer.output, layer.gate_up, layer.down))
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    return NetworkLayer(
        input_norm=layer.input_norm,
        query_norm=layer.query_norm,
        key_norm=layer.key_norm,
        post_attention_norm=layer.post_attention_norm,
        mlp_norm=layer.mlp_norm,
        post_mlp_norm=layer.post_mlp_norm,
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        local_window=local_window,
    )


def _projection(linear: Linear) -> NetworkProjection | None:
    return NetworkProjection(linear.matrix, linear.bias) if isinstance(linear, PackedLinear) else None
