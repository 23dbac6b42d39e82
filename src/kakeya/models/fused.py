"""Runs a decoder's layers as one native call, where the kernels can compute all of them."""

from collections.abc import Sequence

from kakeya.kernels import Kernels
from kakeya.kernels.network import Network, NetworkLayer, NetworkProjection, NetworkShape
from kakeya.models.config import ModelConfig
from kakeya.models.layer import Layer
from kakeya.models.linear import Linear, PackedLinear


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
