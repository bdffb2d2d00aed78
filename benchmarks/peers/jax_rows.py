"""The rows written in ``jax.numpy``, from the weights of the PyTorch modules.

Weights of convolutions are stored as cuDNN reads them, so that no call has to transpose them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Weights = Mapping[str, Any]


def arranged_weights(state: Mapping[str, np.ndarray], layout: str) -> dict[str, np.ndarray]:
    """Floating-point weights of a PyTorch module: of convolutions ``[O, I, H, W]``, or ``[O, H, W, I]``
    where maps are channels last."""
    found = {k: v for k, v in state.items() if v.dtype.kind == "f"}
    if layout == "NCHW":
        return found
    return {k: v.transpose(0, 2, 3, 1) if v.ndim == 4 else v for k, v in found.items()}


def conv(x: Any, weight: Any, layout: str, groups: int = 1) -> Any:
    """Stride-1 convolution with equal padding; ``weight`` as in `arranged_weights`."""
    numbers = (layout, "OHWI" if layout == "NHWC" else "OIHW", layout)
    return lax.conv_general_dilated(
        x, weight, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def channels(v: Any, layout: str) -> Any:
    """A vector over channels, to be combined with a map."""
    return v if layout == "NHWC" else v[:, None, None]


def batch_norm(x: Any, w: Weights, name: str, layout: str) -> Any:
    """Batch norm with the running statistics."""
    scale = w[f"{name}.weight"].astype(jnp.float32) * lax.rsqrt(
        w[f"{name}.running_var"].astype(jnp.float32) + 1e-5
    )
    shift = (
        w[f"{name}.bias"].astype(jnp.float32)
        - w[f"{name}.running_mean"].astype(jnp.float32) * scale
    )
    y = x.astype(jnp.float32) * channels(scale, layout) + channels(shift, layout)
    return y.astype(x.dtype)


def dense(x: Any, w: Weights, name: str) -> Any:
    """Linear layer."""
    y = jnp.matmul(x, w[f"{name}.weight"].T)
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def layer_norm(x: Any, w: Weights, name: str) -> Any:
    """Layer norm over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    y = (wide - mean) * lax.rsqrt(variance + 1e-5)
    return (y * w[f"{name}.weight"] + w[f"{name}.bias"]).astype(x.dtype)


def gelu(x: Any) -> Any:
    """GELU by the error function."""
    return jax.nn.gelu(x, approximate=False)


def empty(w: Weights, layout: str, x: Any) -> Any:
    """The almost empty kernel."""
    return jax.nn.relu(x)


def conv_sum(w: Weights, layout: str, x: Any, relu: bool = False) -> Any:
    """Parallel convolutions, summed."""
    parts = [conv(x, w[f"convs.{i}.weight"], layout) for i in range(len(w))]
    parts = [jax.nn.relu(p) for p in parts] if relu else parts
    return sum(parts[1:], parts[0])


def conv_relu_sum(w: Weights, layout: str, x: Any) -> Any:
    """The same with a ReLU in each branch."""
    return conv_sum(w, layout, x, relu=True)


def dense_norm_heads(w: Weights, layout: str, x: Any) -> Any:
    """Heads of Linear and LayerNorm."""
    return tuple(layer_norm(dense(x, w, f"dense.{i}"), w, f"norms.{i}") for i in range(4))


def projections(w: Weights, layout: str, x: Any) -> Any:
    """Q, K and V of every head."""
    return tuple(dense(x, w, f"dense.{i}") for i in range(24))


def conv_bn_relu(w: Weights, layout: str, x: Any) -> Any:
    """Convolution, batch norm, ReLU; as often as there are weights."""
    for i in range(0, 3 * sum(v.ndim == 4 for v in w.values()), 3):
        x = jax.nn.relu(batch_norm(conv(x, w[f"{i}.weight"], layout), w, f"{i + 1}", layout))
    return x


def cross(w: Weights, layout: str, x: Any) -> Any:
    """Two convolutions with ReLU, their sum, ReLU."""
    a, b = (
        jax.nn.relu(conv(x, w[f"{n}.weight"], layout) + channels(w[f"{n}.bias"], layout))
        for n in ("left", "right")
    )
    return jax.nn.relu(a + b)


def depthwise_pointwise(w: Weights, layout: str, x: Any) -> Any:
    """A MobileNet pair."""
    groups = w["0.weight"].shape[0]
    x = jax.nn.relu6(batch_norm(conv(x, w["0.weight"], layout, groups), w, "1", layout))
    return jax.nn.relu6(batch_norm(conv(x, w["3.weight"], layout), w, "4", layout))


def gelu_norm(w: Weights, layout: str, x: Any, residual: Any) -> Any:
    """Bias, GELU, residual, LayerNorm."""
    return layer_norm(gelu(x + w["bias"]) + residual, w, "norm")


def bert_block(w: Weights, layout: str, x: Any, heads: int = 12) -> Any:
    """Encoder block of BERT-base, with the library's attention."""
    batch, tokens, hidden = x.shape
    q, k, v = (
        dense(x, w, n).reshape(batch, tokens, heads, hidden // heads)
        for n in ("query", "key", "value")
    )
    mixed = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
    y = layer_norm(dense(mixed, w, "output") + x, w, "attention_norm")
    return layer_norm(dense(gelu(dense(y, w, "grow")), w, "shrink") + y, w, "norm")


FORMULAS: dict[str, Callable[..., Any]] = {
    "empty": empty, "convsum4": conv_sum, "convsum3": conv_sum, "convrelusum4": conv_relu_sum,
    "fcln4": dense_norm_heads, "qkv8": projections, "cbr1": conv_bn_relu, "cbr3": conv_bn_relu,
    "cbr_map": conv_bn_relu, "cross31": cross, "cross33": cross, "dwpw": depthwise_pointwise,
    "gelu_ln": gelu_norm, "bert128": bert_block, "bert512x8": bert_block,
}  # fmt: skip
