"""Two dependent sums of products in one kernel; values by emulation, resources by nvcc."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm_fusion.schedules import limits, schedule
from tvm_fusion.schedules.analysis import planned_shared_bytes, shared_bytes
from tvm_fusion.schedules.cuda.back_to_back import with_tile
from tvm_fusion.schedules.cuda.pair_form import recognise
from tvm_fusion.schedules.cuda.pair_tiles import pair_tiles
from tvm_fusion.schedules.steps import allow_registers

from tvm_fusion.build.ptxas import kernel_resources
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.transform import lower_groups

op = relax.op

NHWC = {"data_layout": "NHWC", "kernel_layout": "OHWI"}


def conv(emit, data, weight, **attrs):
    """A convolution."""
    return emit(op.nn.conv2d(data, weight, **attrs))


def channels(data, attrs):
    """Channels of a value in the layout that the attributes name."""
    return int(data.ty.shape[str(attrs.get("data_layout", "NCHW")).index("C")])


def separable(emit, data, depthwise, bias, pointwise, *rest, **attrs):
    """Depthwise convolution, bias, ReLU, pointwise convolution, and a residual where one is given."""
    layout = {key: value for key, value in attrs.items() if key in NHWC}
    total = conv(emit, data, depthwise, groups=channels(data, attrs), **attrs)
    total = conv(emit, emit(op.nn.relu(emit(op.add(total, bias)))), pointwise, **layout)
    for other in rest:
        total = emit(op.add(total, other))
    return emit(op.nn.relu(total))


def reduced(emit, data, weight, pointwise, **attrs):
    """Dense convolution, sigmoid, pointwise convolution, clip."""
    layout = {key: value for key, value in attrs.items() if key in NHWC}
    total = emit(op.sigmoid(conv(emit, data, weight, **attrs)))
    return emit(op.clip(conv(emit, total, pointwise, **layout), 0.0, 6.0))


def expanded(emit, data, pointwise, bias, depthwise, padding=1, strides=1, **attrs):
    """Pointwise convolution, a function that is not zero at zero, padding, depthwise convolution."""
    total = emit(op.sigmoid(emit(op.add(conv(emit, data, pointwise, **attrs), bias))))
    groups = channels(total, attrs)
    return conv(emit, total, depthwise, padding=padding, strides=strides, groups=groups, **attrs)


def products(emit, left, right, other):
    """Two products with a GELU between them."""
    return emit(op.matmul(emit(op.nn.gelu(emit(op.matmul(left, right)))), other))


def plain(emit, left, right, other):
    """Two products with nothing between them."""
    return emit(op.matmul(emit(op.matmul(left, right)), other))


def transposed(emit, left, right, other, bias):
    """Two dense layers with transposed weights."""
    total = emit(op.nn.relu(emit(op.matmul(left, emit(op.permute_dims(right))))))
    return emit(op.add(emit(op.matmul(total, emit(op.permute_dims(other)))), bias))


def reversed_(emit, left, right, other):
    """The first product is the right operand of the second."""
    return emit(op.matmul(other, emit(op.nn.relu(emit(op.matmul(left, right))))))


def two_results(emit, left, right, other):
    """Two functions of the second product."""
    total = plain(emit, left, right, other)
    return emit(op.nn.relu(total)), emit(op.tanh(total))


def case(name, build, *shapes, outputs=1, **attrs):
    """One function under test."""

    def make(emit, *inputs):
        return build(emit, *inputs, **attrs)

    return pytest.param(make, shapes, outputs, id=name)


SEPARABLE = ((1, 16, 13, 13), (16, 1, 3, 3), (1, 16, 1, 1), (24, 16, 1, 1))
SEPARABLE_NHWC = ((1, 13, 13, 16), (16, 3, 3, 1), (1, 1, 1, 16), (24, 1, 1, 16))
CASES = [
    case("separable", separable, *SEPARABLE, padding=1),
    case("separable stride 2", separable, *SEPARABLE, padding=1, strides=2),
    case("separable dilated", separable, *SEPARABLE, padding=2, dilation=2),
    case("separable residual", separable, *SEPARABLE, (1, 24, 13, 13), padding=1),
    case(
        "separable 5x5",
        separable,
        (2, 12, 9, 9),
        (12, 1, 5, 5),
        (1, 12, 1, 1),
        (20, 12, 1, 1),
        padding=2,
    ),
    case("separable nhwc", separable, *SEPARABLE_NHWC, padding=1, **NHWC),
    case("separable nhwc stride 2", separable, *SEPARABLE_NHWC, padding=1, strides=2, **NHWC),
    case("conv 1x1", reduced, (1, 8, 14, 14), (16, 8, 3, 3), (24, 16, 1, 1), padding=1),
    case("conv stride 2", reduced, (1, 8, 25, 25), (16, 8, 3, 3), (24, 16, 1, 1), strides=2),
    case("stem", reduced, (1, 3, 29, 29), (16, 3, 7, 7), (8, 16, 1, 1), padding=3, strides=2),
    case("grouped", reduced, (1, 12, 9, 9), (24, 4, 3, 3), (10, 24, 1, 1), padding=1, groups=3),
    case("1x1 1x1", reduced, (1, 24, 13, 13), (8, 24, 1, 1), (17, 8, 1, 1)),
    case("conv nhwc", reduced, (1, 14, 14, 8), (16, 3, 3, 8), (24, 1, 1, 16), padding=1, **NHWC),
    case("1x1 depthwise", expanded, (1, 16, 13, 13), (24, 16, 1, 1), (1, 24, 1, 1), (24, 1, 3, 3)),
    case(
        "1x1 depthwise stride 2",
        expanded,
        (2, 8, 14, 14),
        (24, 8, 1, 1),
        (1, 24, 1, 1),
        (24, 1, 3, 3),
        strides=2,
    ),
    case(
        "1x1 depthwise one sided",
        expanded,
        (1, 8, 9, 9),
        (8, 8, 1, 1),
        (1, 8, 1, 1),
        (8, 1, 2, 4),
        padding=[0, 1, 1, 2],
    ),
    case(
        "1x1 depthwise nhwc",
        expanded,
        (1, 13, 13, 16),
        (24, 1, 1, 16),
        (1, 1, 1, 24),
        (24, 3, 3, 1),
        **NHWC,
    ),
    case("products", products, (64, 96), (96, 32), (32, 80)),
    case("products, tails", products, (61, 95), (95, 33), (33, 77)),
    case("products, batched", products, (3, 33, 40), (40, 32), (32, 80)),
    case("products, all batched", plain, (3, 33, 40), (3, 40, 32), (3, 32, 50)),
    case("products, transposed", transposed, (64, 96), (32, 96), (80, 32), (80,)),
    case("products, reversed", reversed_, (32, 40), (40, 50), (60, 32)),
    case("two results", two_results, (40, 30), (30, 20), (20, 50), outputs=2),
]


def coded(func, outputs):
    """Small integers that tell positions apart, so that sums of products are exact."""
    arrays = []
    for param in list(func.params)[:-outputs]:
        shape = [int(extent) for extent in param.ty.shape]
        places = np.arange(np.prod(shape))
        codes = (places * 7 + places // 11) % 5 - 2
        arrays.append(codes.reshape(shape).astype(str(param.ty.dtype)))
    return arrays


def for_chip(func, target, multiprocessors):
    """The schedule for a chip of some size: small ones get large tiles, with many registers a thread."""
    found = recognise(func)
    bounds = dataclasses.replace(limits(target), multiprocessors=multiprocessors)
    for tile in pair_tiles(found[2], bounds):
        scheduled = with_tile(*found, tile, bounds)
        if scheduled is not None:
            return scheduled
    raise AssertionError("no tile fits")


@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize(("build", "shapes", "outputs"), CASES)
def test_positions(cuda, build, shapes, outputs, multiprocessors):
    func = cuda.function(build, *shapes)
    target = cuda.target("cuda:sm_90")
    scheduled = for_chip(func, target, multiprocessors)
    arrays = coded(func, outputs)
    expected = cuda.expected(func, arrays)
    source = cuda_emulation.cuda_source(scheduled, target)
    for backward in (False, True):
        results = cuda_emulation.run(scheduled, arrays, target, source=source, backward=backward)
        for result, reference in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("build", "shapes", "outputs"), CASES)
def test_values(cuda, build, shapes, outputs, dtype):
    cuda.check(cuda.function(build, *shapes, dtype=dtype), "back_to_back", outputs)
