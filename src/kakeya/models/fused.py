"""Runs a decoder's layers as one native call, where the kernels can compute all of them."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from kakeya.kernels import Kernels
from kakeya.kernels.network import AttentionContext, Network, NetworkLayer, NetworkProjection, NetworkShape
from kakeya.models.config import ModelConfig
from kakeya.models.layer import Layer
from kakeya.models.linear import Linear, PackedLinear

# tap(layer, hidden): shown a layer's output, float32 [rows, hidden].
Tap = Callable[[int, Tensor], None]
# run(hidden, attention, tap, tapped): changes hidden to what it is after the last layer. The tap is shown the
# layers `tapped`.
RunLayers = Callable[[Tensor, AttentionContext, Tap | None, Sequence[int]], None]


def fused_layers(kernels: Kernels, config: ModelConfig, layers: Sequence[Layer[Linear]]) -> RunLayers | None:
    """One native call, or a few with taps in between. None where an operation is not native."""
    network = _network(kernels, config, layers)
    return None if network is None else partial(_run, kernels, network)


def _run(
    kernels: Kernels,
    network: Network,
    hidden: Tensor,
    attention: AttentionContext,
    tap: Tap | None,
    tapped: Sequence[int],
) -> None:
    first, count = 0, len(network.layers)
    if tap is not None:
        for layer in sorted(tapped):
            kernels.run_network(network, hidden, attention, first, layer + 1)
            tap(layer, hidden)
            first = layer + 1
    if first < count:
        kernels.run_network(network, hidden, attention, first, count)


def _network(kernels: Kernels, config: ModelConfig, layers: Sequence[Layer[Linear]]) -> Network | None:
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
