"""Small Relay modules of operators that importing into Relax writes as others (tvm_fusion.relay.counterparts)."""

from __future__ import annotations

import numpy as np

from ..relay.compat import relay, tvm
from .relay_case_register import behind_relu, case, feature_map
from .relay_models import constant, matrix, module, number


@case
def pools_by_equal_windows(random: np.random.RandomState) -> tvm.IRModule:
    x, row = feature_map(), relay.var("row", shape=(2, 8, 6))
    solid = relay.var("solid", shape=(1, 4, 4, 6, 8))
    pools = [
        relay.nn.adaptive_max_pool2d(relay.tanh(x), (3, 2)),
        relay.nn.adaptive_avg_pool1d(row, 3), relay.nn.adaptive_max_pool1d(row, 1),
        relay.nn.adaptive_avg_pool3d(solid, (1, 1, 1)), relay.nn.adaptive_max_pool3d(solid, (2, 3, 4)),
    ]  # fmt: skip
    return module(relay.Tuple([relay.nn.relu(pool) for pool in pools]), x, row, solid)


@case
def rounded(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    return behind_relu(relay.round(v), v)


@case
def means_of_integers(random: np.random.RandomState) -> tvm.IRModule:
    x = feature_map()
    y = relay.negative(relay.cast(relay.multiply(x, number(9.0)), "int32"))
    means = [
        relay.mean(y, axis=[1]), relay.mean(y, axis=[1], exclude=True), relay.mean(y),
        relay.nn.global_avg_pool2d(y), relay.nn.adaptive_avg_pool2d(y, (1, 1)),
    ]  # fmt: skip
    return module(relay.Tuple([relay.nn.relu(mean) for mean in means]), x)


@case
def shapes_of_others(random: np.random.RandomState) -> tvm.IRModule:
    """The tensor that gives a shape is not read."""
    v, small, long = matrix(), relay.var("small", shape=(3, 5)), relay.var("long", shape=(2, 4, 8))
    cut = relay.slice_like(relay.exp(v), relay.tanh(small))
    wide = relay.broadcast_to_like(relay.exp(v), relay.tanh(long))
    view = relay.reshape_like(relay.exp(v), relay.tanh(relay.reshape(v, (8, 4))))
    return module(relay.Tuple([relay.nn.relu(y) for y in (cut, wide, view)]), v, small, long)


@case
def layouts(random: np.random.RandomState) -> tvm.IRModule:
    x = feature_map()
    y = relay.layout_transform(relay.exp(x), "NCHW", "NHWC")
    parts = [
        relay.nn.depth_to_space(relay.tanh(x), 2), relay.nn.depth_to_space(x, 2, mode="CDR"),
        relay.nn.space_to_depth(x, 2),
    ]  # fmt: skip
    return module(relay.Tuple([relay.nn.relu(p) for p in (y, *parts)]), x)


@case
def channels_last_resized(random: np.random.RandomState) -> tvm.IRModule:
    x = relay.var("x", shape=(1, 6, 6, 8))
    return behind_relu(relay.image.resize2d(relay.exp(x), (9, 12), layout="NHWC"), x)


@case
def truths(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    less = relay.less(v, number(0.1))
    found = relay.logical_or(relay.all(less, axis=1), relay.any(less, axis=[1]))
    return module(relay.Tuple([found, relay.any(less)]), v)


@case
def filled(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    y = relay.add(relay.exp(v), relay.zeros((4, 8), "float32"))
    y = relay.multiply(y, relay.full(number(2.5), (8,)))
    return behind_relu(
        relay.nn.dense(relay.zeros((4, 8), "float32"), constant(random, 8, 8)) + y, v
    )


@case
def taken_from_the_whole(random: np.random.RandomState) -> tvm.IRModule:
    v, x = matrix(), relay.var("x", shape=(3,))
    places = relay.cast(relay.exp(x), "int32")
    return module(relay.exp(relay.take(relay.tanh(v), places)), v, x)
