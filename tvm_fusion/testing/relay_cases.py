"""Small Relay modules, one for each form that the graph has for Relay's operators."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..relay.compat import relay, tvm
from . import relay_counterpart_cases  # noqa: F401 - registers its own
from .relay_case_register import CASES, behind_relu, case, feature_map, matrices
from .relay_models import batch_norm, constant, conv, conv_chain, matrix, module, number


def case_names() -> list[str]:
    """The names of all cases."""
    return list(CASES)


def make_case(name: str) -> tvm.IRModule:
    """A case's module, with types."""
    return relay.transform.InferType()(CASES[name](np.random.RandomState(0)))


@case
def norm_not_simplified(random: np.random.RandomState) -> tvm.IRModule:
    return conv_chain()


@case
def norm_behind_bias(random: np.random.RandomState) -> tvm.IRModule:
    x = feature_map()
    y = relay.nn.bias_add(conv(random, x, 8, 8, 3), constant(random, 8))
    return behind_relu(batch_norm(random, y, 8), x)


@case
def log2(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    return behind_relu(relay.log2(relay.exp(v)), v)


@case
def standard_deviation(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    return behind_relu(relay.std(v, axis=[1], keepdims=True), v)


@case
def l2_normalize(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    return behind_relu(relay.nn.l2_normalize(v, 1e-5, [1]), v)


@case
def local_response_norm(random: np.random.RandomState) -> tvm.IRModule:
    x = feature_map()
    return behind_relu(relay.nn.lrn(x, size=3), x)


@case
def layer_norm(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    return module(relay.nn.layer_norm(relay.exp(v), constant(random, 8), constant(random, 8)), v)


@case
def stack(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    return behind_relu(relay.stack([v, relay.exp(v)], 0), v)


@case
def dense(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    return behind_relu(
        relay.nn.bias_add(relay.nn.dense(v, constant(random, 6, 8)), constant(random, 6)), v
    )


@case
def dense_of_parameters(random: np.random.RandomState) -> tvm.IRModule:
    v, w = matrix(), matrix("w", 16)
    return behind_relu(relay.nn.dense(relay.exp(v), relay.exp(w)), v, w)


@case
def batch_matmul(random: np.random.RandomState) -> tvm.IRModule:
    b = matrices()
    return behind_relu(relay.nn.batch_matmul(b, relay.exp(b)), b)


@case
def batch_matmul_transposed_back(random: np.random.RandomState) -> tvm.IRModule:
    b = matrices()
    other = relay.transpose(relay.reshape(relay.exp(b), (2, 8, 5)), (0, 2, 1))
    return behind_relu(relay.nn.batch_matmul(b, other), b)


@case
def batch_matmul_plain(random: np.random.RandomState) -> tvm.IRModule:
    b = matrices()
    other = relay.transpose(relay.exp(b), (0, 2, 1))
    return behind_relu(relay.nn.batch_matmul(b, other, transpose_b=False), b)


@case
def powers(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    positive = relay.exp(v)
    parts = [relay.power(positive, number(n)) for n in (2.0, 3.0, 4.0, 0.5, -0.5, -1.0, 1.7)]
    return module(relay.Tuple([relay.nn.relu(part) for part in parts]), v)


@case
def difference_from_one(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    return behind_relu(relay.subtract(number(1.0), relay.tanh(v)), v)


@case
def scales_and_shifts(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    y = (relay.tanh(v) * number(2.0) + constant(random, 8)) * constant(random, 8)
    y = relay.negative((number(1.0) - (y - constant(random, 8))) / number(3.0))
    return behind_relu(y, v)


@case
def scale_with_two_readers(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    scaled = relay.tanh(v) * number(2.0)
    return module(relay.Tuple([relay.nn.relu(scaled + constant(random, 8)), relay.exp(scaled)]), v)


@case
def scale_behind_convolution(random: np.random.RandomState) -> tvm.IRModule:
    x = feature_map()
    return behind_relu(relay.multiply(conv(random, x, 8, 8, 3), constant(random, 8, 1, 1)), x)


@case
def scale_before_convolution(random: np.random.RandomState) -> tvm.IRModule:
    x = feature_map()
    scaled = relay.multiply(relay.exp(x), constant(random, 8, 1, 1))
    return behind_relu(conv(random, scaled, 8, 8, 3), x)


@case
def padding_with_two_readers(random: np.random.RandomState) -> tvm.IRModule:
    x = feature_map()
    padded = relay.nn.pad(relay.tanh(x), [[0, 0], [0, 0], [1, 1], [2, 2]])
    weight = constant(random, 8, 8, 3, 3)
    y = relay.nn.conv2d(padded, weight, channels=8, kernel_size=(3, 3))
    return module(relay.Tuple([relay.nn.relu(y), relay.exp(padded)]), x)


@case
def split_apart(random: np.random.RandomState) -> tvm.IRModule:
    x = feature_map()
    left, right = relay.split(relay.tanh(x), 2, 1)
    return module(relay.Tuple([relay.nn.relu(left), relay.exp(right)]), x)


@case
def split_and_joined(random: np.random.RandomState) -> tvm.IRModule:
    x = feature_map()
    return behind_relu(relay.concatenate(relay.split(relay.tanh(x), 2, 1).astuple(), 1), x)


@case
def pools_of_whole_maps(random: np.random.RandomState) -> tvm.IRModule:
    x = feature_map()
    y = relay.tanh(x)
    pools = [
        relay.nn.global_avg_pool2d(y), relay.nn.global_max_pool2d(y), relay.nn.adaptive_avg_pool2d(y, (1, 1)),
        relay.nn.adaptive_avg_pool2d(y, (2, 2)),
    ]  # fmt: skip
    return module(relay.Tuple([relay.nn.relu(pool) for pool in pools]), x)


@case
def mean_of_other_axes(random: np.random.RandomState) -> tvm.IRModule:
    x = feature_map()
    return behind_relu(relay.mean(relay.exp(x), axis=[1], exclude=True), x)


@case
def broadcast(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    wide = relay.broadcast_to(relay.exp(v), (3, 4, 8))
    return behind_relu(relay.add(wide, constant(random, 3, 4, 8)), v)


@case
def repeated_constant(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    return behind_relu(relay.add(relay.exp(v), relay.ones_like(v)), v)


@case
def views(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    y = relay.reshape(relay.reshape(relay.tanh(v), (8, 4)), (2, 16))
    z = relay.squeeze(relay.expand_dims(relay.exp(v), 0, 2), [0])
    return module(relay.Tuple([relay.exp(y), relay.nn.relu(z)]), v)


@case
def nothing_done(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    y = relay.nn.dropout(relay.exp(v)) * number(1.0) + number(0.0)
    y = relay.copy(relay.cast(relay.transpose(relay.transpose(y)), "float32"))
    return behind_relu(y, v)


@case
def channels_last(random: np.random.RandomState) -> tvm.IRModule:
    x = relay.var("x", shape=(1, 6, 6, 8))
    weight = constant(random, 3, 3, 8, 16)
    y = relay.nn.conv2d(
        x, weight, padding=(1, 1), channels=16, kernel_size=(3, 3), data_layout="NHWC", kernel_layout="HWIO"
    )  # fmt: skip
    return behind_relu(y, x)


@case
def transposed_convolution(random: np.random.RandomState) -> tvm.IRModule:
    x = feature_map()
    weight = constant(random, 8, 4, 3, 3)
    return behind_relu(relay.nn.conv2d_transpose(x, weight, channels=4, kernel_size=(3, 3)), x)


@case
def upsampling(random: np.random.RandomState) -> tvm.IRModule:
    x = feature_map()
    return behind_relu(relay.nn.upsampling(relay.exp(x), 2, 2), x)


@case
def choices(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    y = relay.where(relay.greater(v, number(0.0)), relay.exp(v), relay.tanh(v))
    return module(relay.clip(y, 0.0, 6.0), v)


@case
def rows_taken(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    return module(relay.exp(relay.take(v, relay.const(np.array([1, 0, 2])), axis=0)), v)


@case
def slices(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    return module(relay.exp(relay.strided_slice(relay.tanh(v), [0, 2], [4, 6])), v)


@case
def neighbours_taken(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    y = relay.tanh(v)
    rows = relay.take(y, relay.const(np.array([1, 2, 3])), axis=0)
    return module(
        relay.Tuple([relay.exp(rows), relay.exp(relay.take(y, relay.const(5), axis=1))]), v
    )


@case
def first_places_taken_clipped(random: np.random.RandomState) -> tvm.IRModule:
    """A place behind the end of the axis is no slice."""
    v = matrix()
    return module(relay.exp(relay.take(relay.tanh(v), relay.const(9), axis=0, mode="clip")), v)


@case
def part_with_two_readers(random: np.random.RandomState) -> tvm.IRModule:
    x = feature_map()
    left, right = relay.split(relay.tanh(x), 2, 1)
    return module(relay.Tuple([relay.nn.relu(left), relay.exp(left), relay.exp(right)]), x)


@case
def projections_in_one_product(random: np.random.RandomState) -> tvm.IRModule:
    b = matrices()
    y = relay.nn.dense(relay.reshape(b, (10, 8)), constant(random, 24, 8))
    y = relay.add(relay.reshape(y, (2, 5, 24)), constant(random, 24))
    query, key, value = relay.split(y, 3, 2)
    scores = relay.nn.softmax(relay.nn.batch_matmul(query, key))
    return module(relay.nn.batch_matmul(scores, value, transpose_b=False), b)


@case
def parts_of_unequal_products(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    product = relay.nn.matmul(v, constant(random, 8, 12))
    one, other = relay.split(product, [4], 1)
    return module(relay.Tuple([relay.nn.softmax(one), relay.exp(other)]), v)


@case
def split_product_with_two_readers(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    product = relay.nn.dense(v, constant(random, 12, 8))
    one, other = relay.split(product, 2, 1)
    return module(relay.Tuple([relay.nn.softmax(one), relay.exp(other), relay.exp(product)]), v)


def _norm(random: np.random.RandomState, x: Any, centred: bool) -> Any:
    """A norm in pieces."""
    data = relay.subtract(x, relay.mean(x, -1, True)) if centred else x
    squares = relay.mean(relay.multiply(data, data), -1, True)
    y = relay.multiply(data, relay.rsqrt(relay.add(squares, number(1e-5))))
    y = relay.multiply(constant(random, 8), y)
    return relay.add(y, constant(random, 8)) if centred else y


@case
def norms_in_pieces(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    y = relay.tanh(v)
    return module(relay.Tuple([_norm(random, y, True), _norm(random, y, False)]), v)


@case
def norm_whose_root_is_read(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    root = relay.sqrt(relay.add(relay.mean(relay.multiply(v, v), -1, True), number(1e-5)))
    normed = relay.divide(v, root)
    return module(relay.Tuple([relay.multiply(normed, constant(random, 8)), relay.exp(normed)]), v)


@case
def regrouped_rows(random: np.random.RandomState) -> tvm.IRModule:
    b = matrices()
    flat = relay.reshape(relay.exp(b), (10, 8))
    y = relay.nn.relu(relay.add(relay.nn.dense(flat, constant(random, 8, 8)), constant(random, 8)))
    y = relay.nn.layer_norm(y, constant(random, 8), constant(random, 8))
    y = relay.power(y, number(3.0))
    return module(relay.Tuple([relay.add(b, relay.reshape(y, (2, 5, 8))), relay.exp(y)]), b)


@case
def regrouped_projections(random: np.random.RandomState) -> tvm.IRModule:
    """Bias before the reshape, as PyTorch's linear layers leave their importer."""
    b = matrices()
    flat = relay.reshape(relay.nn.layer_norm(b, constant(random, 8), constant(random, 8)), (10, 8))
    parts = []
    for _ in range(3):
        y = relay.nn.bias_add(relay.nn.dense(flat, constant(random, 8, 8)), constant(random, 8))
        parts.append(relay.transpose(relay.reshape(y, (2, 5, 2, 4)), (0, 2, 1, 3)))
    y = relay.nn.dense(relay.reshape(relay.exp(b), (-1, 8)), constant(random, 16, 8))
    y = relay.reshape(relay.nn.bias_add(y, constant(random, 16)), (2, 5, 16))
    return module(relay.Tuple([*parts, relay.multiply(y, relay.sigmoid(y))]), b)


@case
def regrouped_towards_a_lookup(random: np.random.RandomState) -> tvm.IRModule:
    x, b = relay.var("x", shape=(2, 5)), matrices()
    places = relay.reshape(relay.cast(relay.exp(x), "int32"), (10,))
    rows = relay.take(constant(random, 20, 8), places, axis=0)
    y = relay.reshape(relay.multiply(rows, number(3.0)), (2, 5, 8))
    return behind_relu(relay.add(y, b), x, b)


@case
def regrouped_products_of_parameters(random: np.random.RandomState) -> tvm.IRModule:
    b, w = matrices(), matrix("w", 16)
    y = relay.nn.dense(relay.reshape(relay.exp(b), (10, 8)), relay.exp(w))
    return module(relay.nn.relu(relay.reshape(relay.tanh(y), (2, 5, 16))), b, w)


@case
def positions(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    return module(relay.add(relay.argmax(v, axis=1), relay.const(1, "int32")), v)


@case
def constant_expressions(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    return behind_relu(
        relay.add(relay.exp(v), relay.nn.relu(relay.transpose(constant(random, 8, 4)))), v
    )


@case
def narrow_floats(random: np.random.RandomState) -> tvm.IRModule:
    v = matrix()
    return module(relay.cast(relay.nn.relu(relay.cast(relay.exp(v), "float16")), "float32"), v)


@case
def lets(random: np.random.RandomState) -> tvm.IRModule:
    v, a, b = matrix(), relay.var("a"), relay.var("b")
    body = relay.Let(b, relay.nn.relu(relay.add(a, v)), relay.Tuple([b, relay.exp(b)]))
    return module(relay.Let(a, relay.tanh(v), body), v)
