"""Normalisations, softmax and additions of biases."""

from __future__ import annotations

import math

from ....compat import ir, relax
from ..site import Site
from .registry import operator


def _check_channels(site: Site, channels: int, **vectors: ir.Expr) -> None:
    for name, vector in vectors.items():
        if site.shape(vector) != (channels,):
            site.damaged(f"its {name} has the shape {site.shape(vector)} for {channels} channels")


def _check_dtypes(site: Site, *operands: ir.Expr) -> None:
    dtypes = {str(operand.ty.dtype) for operand in operands}
    if len(dtypes) > 1:
        site.damaged(f"its operands are of dtypes {' and '.join(sorted(dtypes))}")
    if not all("float" in dtype for dtype in dtypes):
        site.refuse(f"its operands are of dtype {dtypes.pop()}: cast them to float32")


def _affine(site: Site, gamma: ir.Expr, beta: ir.Expr) -> list[ir.Expr]:
    """Return the scales and shifts that count: TVM's lowering applies them whatever ``scale`` and ``center`` say."""
    dtype, shape = str(gamma.ty.dtype), site.shape(gamma)
    return [
        gamma if site.flag("scale", True) else site.made(shape, dtype, 1),
        beta if site.flag("center", True) else site.made(shape, dtype, 0),
    ]


@operator("nn.bias_add")
def bias_add(site: Site, data: ir.Expr, bias: ir.Expr) -> ir.Expr:
    """An addition of one number for each channel: a reshape and an addition."""
    rank = site.rank(data)
    axis = site.axis("axis", rank, 1)
    _check_channels(site, site.shape(data)[axis], bias=bias)
    if str(data.ty.dtype) != str(bias.ty.dtype):
        site.damaged(f"its operands are of dtypes {data.ty.dtype} and {bias.ty.dtype}")
    bias = site.reshape(bias, [*site.shape(bias), *[1] * (rank - 1 - axis)])
    return site.emit(relax.op.add(data, bias))


@operator("nn.batch_norm")
def batch_norm(
    site: Site, data: ir.Expr, gamma: ir.Expr, beta: ir.Expr, mean: ir.Expr, variance: ir.Expr
) -> tuple[ir.Expr, ir.Expr, ir.Expr]:
    """Batch normalisation in inference; its statistics come back as they were."""
    axis = site.axis("axis", site.rank(data), 1)
    channels = site.shape(data)[axis]
    _check_channels(site, channels, gamma=gamma, beta=beta, mean=mean, variance=variance)
    _check_dtypes(site, data, gamma, beta, mean, variance)
    result = relax.op.nn.batch_norm(
        data, gamma, beta, mean, variance, axis=axis, epsilon=site.number("epsilon"),
        center=site.flag("center", True), scale=site.flag("scale", True), training=False,
    )  # fmt: skip
    return site.emit(relax.TupleGetItem(site.emit(result), 0)), mean, variance


@operator("nn.layer_norm")
def layer_norm(site: Site, data: ir.Expr, gamma: ir.Expr, beta: ir.Expr) -> ir.Expr:
    """Layer normalisation over one axis."""
    axis = site.axis("axis", site.rank(data), -1)
    _check_channels(site, site.shape(data)[axis], gamma=gamma, beta=beta)
    _check_dtypes(site, data, gamma, beta)
    factors = _affine(site, gamma, beta)
    return site.emit(
        relax.op.nn.layer_norm(data, *factors, axes=[axis], epsilon=site.number("epsilon"))
    )


@operator("nn.instance_norm")
def instance_norm(site: Site, data: ir.Expr, gamma: ir.Expr, beta: ir.Expr) -> ir.Expr:
    """Normalisation of each channel of each image."""
    rank = site.rank(data, 3, 4, 5)
    axis = site.axis("axis", rank, 1)
    if axis == 0:
        site.damaged("its axis is that of the batch")
    _check_channels(site, site.shape(data)[axis], gamma=gamma, beta=beta)
    _check_dtypes(site, data, gamma, beta)
    result = relax.op.nn.instance_norm(
        data, *_affine(site, gamma, beta), channel_axis=axis, axes=[i for i in range(1, rank) if i != axis],
        epsilon=site.number("epsilon"),
    )  # fmt: skip
    return site.emit(result)


@operator("nn.group_norm")
def group_norm(site: Site, data: ir.Expr, gamma: ir.Expr, beta: ir.Expr) -> ir.Expr:
    """Normalisation of each group of channels, over the axes behind the channels as Relay computes it."""
    rank = site.rank(data, 3, 4, 5)
    axis = site.axis("axis", rank, 1)
    channels = site.shape(data)[axis]
    _check_channels(site, channels, gamma=gamma, beta=beta)
    _check_dtypes(site, data, gamma, beta)
    groups = site.integer("num_groups", low=1)
    if channels % groups or axis == 0:
        site.damaged(f"{channels} channels are not divisible into {groups} groups")
    shape = site.shape(data)
    if axis > 1:  # each position before the channels has statistics of its own
        data = site.reshape(data, [math.prod(shape[:axis]), channels, math.prod(shape[axis + 1 :])])
    result = relax.op.nn.group_norm(
        data, *_affine(site, gamma, beta), num_groups=groups, channel_axis=1,
        axes=list(range(2, site.rank(data))), epsilon=site.number("epsilon"),
    )  # fmt: skip
    return site.reshape(site.emit(result), shape)


@operator("nn.softmax", "nn.fast_softmax", "nn.log_softmax")
def softmax(site: Site, data: ir.Expr) -> ir.Expr:
    """Softmax or its logarithm over one axis."""
    axis = site.axis("axis", site.rank(data), -1)
    _check_dtypes(site, data)
    function = relax.op.nn.log_softmax if site.node.op == "nn.log_softmax" else relax.op.nn.softmax
    return site.emit(function(data, axis))


@operator("nn.l2_normalize")
def l2_normalize(site: Site, data: ir.Expr) -> ir.Expr:
    """Division by the Euclidean norm over some axes: x / sqrt(max(sum(x * x), eps))."""
    _check_dtypes(site, data)
    axes = [site.axis_of(axis, site.rank(data)) for axis in site.integers("axis", [])]
    if not axes:
        site.damaged("it lacks axes")
    total = site.emit(
        relax.op.sum(site.emit(relax.op.multiply(data, data)), sorted(set(axes)), True)
    )
    bounded = site.emit(relax.op.maximum(total, site.number_like(site.number("eps"), data)))
    return site.emit(relax.op.divide(data, site.emit(relax.op.sqrt(bounded))))


@operator("nn.lrn")
def local_response_norm(site: Site, data: ir.Expr) -> ir.Expr:
    """Local response normalisation across channels: x / (bias + alpha / size * sum(x * x)) ** beta.

    The sum over neighbouring channels is a pooling that counts its padding, of the map with the
    channels as rows.
    """
    site.text("norm_region", "ACROSS_CHANNELS", default="ACROSS_CHANNELS")
    site.rank(data, 4)
    _check_dtypes(site, data)
    axis, size = site.axis("axis", 4, 1), site.integer("size", low=1, high=1 << 10)
    if axis != 1 or size % 2 == 0:
        site.refuse("only an odd number of channels of axis 1 can be summed")
    n, c, h, w = site.shape(data)
    square = site.reshape(site.emit(relax.op.multiply(data, data)), [n, 1, c, h * w])
    half = size // 2
    mean = relax.op.nn.avg_pool2d(
        square, pool_size=(size, 1), padding=(half, 0, half, 0), count_include_pad=True
    )
    mean = site.reshape(site.emit(mean), [n, c, h, w])
    scaled = site.emit(relax.op.multiply(mean, site.number_like(site.number("alpha"), data)))
    shifted = site.emit(relax.op.add(scaled, site.number_like(site.number("bias"), data)))
    power = site.emit(relax.op.power(shifted, site.number_like(site.number("beta"), data)))
    return site.emit(relax.op.divide(data, power))
