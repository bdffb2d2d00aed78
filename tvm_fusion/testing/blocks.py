"""Building blocks of well-known convolutional networks, with random weights.

Every builder returns a module with one binding per operator, named after what it is, ready for
``tvm_fusion.plan``. Sizes are arguments: the defaults are those of the published networks, small
ones keep tests fast. Batch norm is taken as folded into the convolution: what is left of it is a
bias. Shapes in the docstrings are NCHW; with ``layout="NHWC"`` the channels come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..compat import relax, tvm
from .modules import ModuleBuilder


def conv_bias_relu(
    b: ModuleBuilder, name: str, value: Any, channels: int, kernel: int = 3, **options: Any
) -> Any:
    """Add convolution, bias and ReLU to a module under construction; ``options`` go to ``b.conv``."""
    value = b.conv(f"{name}_conv", value, channels, kernel, **options)
    return b.relu(f"{name}_relu", b.bias(f"{name}_bias", value))


def conv_bias(
    b: ModuleBuilder, name: str, value: Any, channels: int, kernel: int = 3, **options: Any
) -> Any:
    """Add convolution and bias to a module under construction."""
    return b.bias(f"{name}_bias", b.conv(f"{name}_conv", value, channels, kernel, **options))


def _image(b: ModuleBuilder, name: str, batch: int, channels: int, size: int) -> Any:
    """An input of ``[batch, channels, size, size]`` in the builder's layout."""
    shape = {"N": batch, "C": channels, "H": size, "W": size}
    return b.input(name, [shape[axis] for axis in b.layout])


def _concat(b: ModuleBuilder, name: str, values: Sequence[Any]) -> Any:
    """Concatenate along the channels."""
    return b.op(name, relax.op.concat(list(values), axis=b.layout.index("C")))


def _max_pool(b: ModuleBuilder, name: str, value: Any, size: int, stride: int) -> Any:
    """A max pooling with "same" padding."""
    call = relax.op.nn.max_pool2d(
        value, pool_size=size, strides=stride, padding=size // 2, layout=b.layout
    )
    return b.op(name, call)


def resnet_bottleneck(
    *,
    channels: int = 256,
    width: int = 64,
    size: int = 56,
    stride: int = 1,
    projection: bool = False,
    batch: int = 1,
    dtype: str = "float32",
    layout: str = "NCHW",
    seed: int = 0,
) -> tvm.IRModule:
    """ResNet-50 bottleneck: 1×1 reduce, 3×3, 1×1 expand, shortcut, ReLU (He et al., 2016).

    ``[batch, C, size, size]`` → ``[batch, 4·width, size/stride, size/stride]``. The shortcut is the
    input itself (``channels == 4·width``, ``stride == 1``) or, with ``projection``, a strided 1×1
    convolution of it.

    Raises
    ------
    ValueError
        If an identity shortcut does not fit.
    """
    if not projection and (stride != 1 or channels != 4 * width):
        raise ValueError("an identity shortcut needs stride 1 and channels = 4 * width")
    b = ModuleBuilder(dtype, layout, seed)
    x = _image(b, "x", batch, channels, size)
    y = conv_bias_relu(b, "reduce", x, width, 1)
    y = conv_bias_relu(b, "middle", y, width, 3, stride=stride)
    y = conv_bias(b, "expand", y, 4 * width, 1)
    short = conv_bias(b, "project", x, 4 * width, 1, stride=stride) if projection else x
    return b.finish(b.relu("out", b.add("shortcut", y, short)))


def residual_block(
    *,
    channels: int = 64,
    size: int = 56,
    convs: int = 1,
    relu: bool = False,
    dtype: str = "float32",
    layout: str = "NCHW",
    seed: int = 0,
) -> tvm.IRModule:
    """``conv(x) + x``, the plain residual block.

    ``[1, channels, size, size]`` → the same shape; ``convs`` 3×3 convolutions with a bias, a ReLU
    between two of them and, with ``relu``, after the sum.
    """
    b = ModuleBuilder(dtype, layout, seed)
    x = y = _image(b, "x", 1, channels, size)
    for i in range(convs):
        y = conv_bias(b, f"c{i}", y, channels)
        if i < convs - 1:
            y = b.relu(f"c{i}_relu", y)
    y = b.add("shortcut", y, x)
    return b.finish(b.relu("out", y) if relu else y)


def repvgg_block(
    *,
    channels: int = 64,
    size: int = 56,
    dtype: str = "float32",
    layout: str = "NCHW",
    seed: int = 0,
) -> tvm.IRModule:
    """RepVGG block as trained: ReLU of 3×3 + 1×1 + identity (Ding et al., 2021).

    ``[1, channels, size, size]`` → the same shape.
    """
    b = ModuleBuilder(dtype, layout, seed)
    x = _image(b, "x", 1, channels, size)
    large, small = conv_bias(b, "three", x, channels, 3), conv_bias(b, "one", x, channels, 1)
    return b.finish(b.relu("out", b.add("sum2", b.add("sum1", large, small), x)))


def squeeze_excite(
    *,
    channels: int = 64,
    reduced: int = 16,
    size: int = 28,
    dense: bool = False,
    residual: bool = False,
    batch: int = 1,
    dtype: str = "float32",
    layout: str = "NCHW",
    seed: int = 0,
) -> tvm.IRModule:
    """Squeeze-and-excite: global average pool, two dense layers, sigmoid, multiply (Hu et al., 2018).

    ``[batch, channels, size, size]`` → the same shape. The two layers are 1×1 convolutions, or with
    ``dense`` matrix products on ``[batch, channels]``; with ``residual`` the input is added and a
    ReLU follows.
    """
    b = ModuleBuilder(dtype, layout, seed)
    x = _image(b, "x", batch, channels, size)
    axes = [layout.index("H"), layout.index("W")]
    if dense:
        gate = b.op("pool", relax.op.mean(x, axis=axes))
        gate = b.op("fc1", relax.op.matmul(gate, b.const(channels, reduced, scale=channels**-0.5)))
        gate = b.relu("fc1_relu", b.op("fc1_bias", relax.op.add(gate, b.const(reduced))))
        gate = b.op("fc2", relax.op.matmul(gate, b.const(reduced, channels, scale=reduced**-0.5)))
        gate = b.op(
            "gate", relax.op.sigmoid(b.op("fc2_bias", relax.op.add(gate, b.const(channels))))
        )
        shape = [{"N": batch, "C": channels}.get(axis, 1) for axis in layout]
        gate = b.op("gate_image", relax.op.reshape(gate, shape))
    else:
        gate = b.op("pool", relax.op.mean(x, axis=axes, keepdims=True))
        gate = conv_bias_relu(b, "fc1", gate, reduced, 1)
        gate = b.op("gate", relax.op.sigmoid(conv_bias(b, "fc2", gate, channels, 1)))
    y = b.op("scale", relax.op.multiply(x, gate))
    return b.finish(b.relu("out", b.add("shortcut", y, x)) if residual else y)


def segmentation_head(
    *,
    channels: int = 128,
    outputs: int = 64,
    size: int = 64,
    join: str = "add",
    dtype: str = "float32",
    layout: str = "NCHW",
    seed: int = 0,
) -> tvm.IRModule:
    """Two branches of one feature map, 1×1 and 3×3 (with bias and ReLU each), added or concatenated.

    ``[1, channels, size, size]`` → ``[1, outputs, size, size]`` (``join="add"``) or twice the
    channels (``join="concat"``).

    Raises
    ------
    ValueError
        If ``join`` is another word.
    """
    if join not in ("add", "concat"):
        raise ValueError(f"join must be add or concat, got {join!r}")
    b = ModuleBuilder(dtype, layout, seed)
    x = _image(b, "x", 1, channels, size)
    parts = [
        conv_bias_relu(b, "one", x, outputs, 1),
        conv_bias_relu(b, "three", x, outputs, 3),
    ]
    return b.finish(b.add("sum", *parts) if join == "add" else _concat(b, "cat", parts))


def inception_module(
    *,
    channels: int = 192,
    widths: Sequence[int] = (64, 96, 128, 16, 32, 32),
    size: int = 28,
    dtype: str = "float32",
    layout: str = "NCHW",
    seed: int = 0,
) -> tvm.IRModule:
    """Inception v1 module (Szegedy et al., 2015), by default module 3a.

    ``[1, channels, size, size]`` → ``[1, w0 + w2 + w4 + w5, size, size]``. ``widths`` are the output
    channels of: 1×1; 1×1 before 3×3, 3×3; 1×1 before 5×5, 5×5; 1×1 after the pool.
    """
    b = ModuleBuilder(dtype, layout, seed)
    x = _image(b, "x", 1, channels, size)
    one, reduce3, three, reduce5, five, projected = widths
    branches = [
        conv_bias_relu(b, "one", x, one, 1),
        conv_bias_relu(b, "three", conv_bias_relu(b, "reduce3", x, reduce3, 1), three, 3),
        conv_bias_relu(b, "five", conv_bias_relu(b, "reduce5", x, reduce5, 1), five, 5),
        conv_bias_relu(b, "pooled", _max_pool(b, "pool", x, 3, 1), projected, 1),
    ]
    return b.finish(_concat(b, "cat", branches))


def inverted_residual(
    *,
    channels: int = 32,
    outputs: int | None = None,
    expand: int = 6,
    size: int = 28,
    stride: int = 1,
    dtype: str = "float32",
    layout: str = "NCHW",
    seed: int = 0,
) -> tvm.IRModule:
    """MobileNetV2 block: 1×1 expand, depthwise 3×3, 1×1 project (Sandler et al., 2018).

    ``[1, channels, size, size]`` → ``[1, outputs, size/stride, size/stride]``, ReLU6 after the first
    two. The shortcut is there when shapes allow it (``stride == 1``, ``outputs == channels``).
    ``expand == 1`` leaves the expansion out, as the network's first block does.
    """
    b = ModuleBuilder(dtype, layout, seed)
    outputs = channels if outputs is None else outputs
    x = y = _image(b, "x", 1, channels, size)
    hidden = channels * expand
    if expand > 1:
        y = _relu6(b, "expand_relu6", conv_bias(b, "expand", y, hidden, 1))
    y = conv_bias(b, "depthwise", y, hidden, 3, stride=stride, groups=hidden)
    y = conv_bias(b, "project", _relu6(b, "depthwise_relu6", y), outputs, 1)
    return b.finish(b.add("shortcut", y, x) if stride == 1 and outputs == channels else y)


def _relu6(b: ModuleBuilder, name: str, value: Any) -> Any:
    return b.op(name, relax.op.clip(value, 0, 6))


def fire(
    *,
    channels: int = 64,
    squeeze: int = 16,
    expand: int = 64,
    size: int = 55,
    dtype: str = "float32",
    layout: str = "NCHW",
    seed: int = 0,
) -> tvm.IRModule:
    """SqueezeNet fire module: 1×1 squeeze, then 1×1 and 3×3 expand, concatenated (Iandola, 2016).

    ``[1, channels, size, size]`` → ``[1, 2·expand, size, size]``.
    """
    b = ModuleBuilder(dtype, layout, seed)
    y = conv_bias_relu(b, "squeeze", _image(b, "x", 1, channels, size), squeeze, 1)
    parts = [conv_bias_relu(b, "one", y, expand, 1), conv_bias_relu(b, "three", y, expand, 3)]
    return b.finish(_concat(b, "cat", parts))


def shuffle_unit(
    *,
    channels: int = 136,
    outputs: int | None = None,
    groups: int = 4,
    size: int = 28,
    stride: int = 1,
    dtype: str = "float32",
    layout: str = "NCHW",
    seed: int = 0,
) -> tvm.IRModule:
    """ShuffleNet unit: grouped 1×1, channel shuffle, depthwise 3×3, grouped 1×1 (Zhang et al., 2018).

    ``[1, channels, size, size]`` → the same shape, the input added; or with ``stride=2``
    ``[1, outputs, size/2, size/2]``, the average-pooled input concatenated.
    """
    b = ModuleBuilder(dtype, layout, seed)
    outputs = channels if stride == 1 else 2 * channels if outputs is None else outputs
    width = outputs // 4 // groups * groups
    x = _image(b, "x", 1, channels, size)
    y = conv_bias_relu(b, "group1", x, width, 1, groups=groups)
    y = _channel_shuffle(b, "shuffle", y, groups)
    y = conv_bias(b, "depthwise", y, width, 3, stride=stride, groups=width)
    if stride == 1:
        y = b.add("shortcut", conv_bias(b, "group2", y, outputs, 1, groups=groups), x)
        return b.finish(b.relu("out", y))
    y = conv_bias(b, "group2", y, outputs - channels, 1, groups=groups)
    pool = relax.op.nn.avg_pool2d(
        x, pool_size=3, strides=stride, padding=1, layout=layout, count_include_pad=True
    )
    return b.finish(b.relu("out", _concat(b, "cat", [y, b.op("pool", pool)])))


def _channel_shuffle(b: ModuleBuilder, name: str, value: Any, groups: int) -> Any:
    """Transpose the channels as a ``[groups, channels/groups]`` matrix."""
    shape = [int(d) for d in value.ty.shape]
    at = b.layout.index("C")
    split = [*shape[:at], groups, shape[at] // groups, *shape[at + 1 :]]
    axes = list(range(len(split)))
    axes[at], axes[at + 1] = axes[at + 1], axes[at]
    y = b.op(f"{name}_split", relax.op.reshape(value, split))
    y = b.op(f"{name}_swap", relax.op.permute_dims(y, axes))
    return b.op(f"{name}_merge", relax.op.reshape(y, shape))


def csp_block(
    *,
    channels: int = 64,
    outputs: int | None = None,
    size: int = 28,
    dtype: str = "float32",
    layout: str = "NCHW",
    seed: int = 0,
) -> tvm.IRModule:
    """CSP block (C2f): split channels, bottleneck with a shortcut on one half, concat of three.

    ``[1, channels, size, size]`` → ``[1, outputs, size, size]``: halves a, b; y = conv(conv(b)) + b;
    concat(a, b, y); 1×1 convolution. The shortcut reads a slice, which is also a branch of the
    concat.
    """
    b = ModuleBuilder(dtype, layout, seed)
    x = _image(b, "x", 1, channels, size)
    halves = b.op("halves", relax.op.split(x, 2, axis=layout.index("C")))
    left = b.op("left", relax.TupleGetItem(halves, 0))
    right = b.op("right", relax.TupleGetItem(halves, 1))
    y = conv_bias_relu(b, "c1", right, channels // 2)
    y = b.add("shortcut", conv_bias_relu(b, "c2", y, channels // 2), right)
    y = _concat(b, "cat", [left, right, y])
    return b.finish(conv_bias_relu(b, "mix", y, outputs or channels, 1))


def depthwise_pointwise(
    *,
    channels: int = 32,
    outputs: int = 64,
    size: int = 112,
    stride: int = 1,
    dtype: str = "float32",
    layout: str = "NCHW",
    seed: int = 0,
) -> tvm.IRModule:
    """MobileNet's pair: depthwise 3×3 and 1×1 convolution, bias and ReLU after each (Howard, 2017).

    ``[1, channels, size, size]`` → ``[1, outputs, size/stride, size/stride]``.
    """
    b = ModuleBuilder(dtype, layout, seed)
    x = _image(b, "x", 1, channels, size)
    y = conv_bias_relu(b, "depthwise", x, channels, 3, stride=stride, groups=channels)
    return b.finish(conv_bias_relu(b, "pointwise", y, outputs, 1))
