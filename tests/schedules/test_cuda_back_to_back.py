"""Two dependent sums of products in one kernel; values by emulation, resources by nvcc."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from tvm import relax
from tvm_fusion.schedules import limits, schedule
from tvm_fusion.schedules.allocation import planned_shared_bytes
from tvm_fusion.schedules.cuda.back_to_back import with_tile
from tvm_fusion.schedules.cuda.pair_form import recognise
from tvm_fusion.schedules.cuda.pair_tiles import pair_tiles

from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.modules import ModuleBuilder, as_group
from tvm_fusion.transform.lower_groups import lower_groups

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


def one_weight(emit, data, weight):
    """One weight for both products, and the input once more as a residual."""
    total = emit(op.nn.relu(emit(op.matmul(data, weight))))
    return emit(op.add(emit(op.matmul(total, weight)), data))


def two_results(emit, left, right, other):
    """Two functions of the second product."""
    total = plain(emit, left, right, other)
    return emit(op.nn.relu(total)), emit(op.tanh(total))


def square(emit, left, right):
    """A product with itself."""
    total = emit(op.matmul(left, right))
    return emit(op.matmul(total, total))


def reshaped(emit, left, right, other):
    """A reshape between the products, after which positions are no longer the same."""
    total = emit(op.reshape(emit(op.matmul(left, right)), (40, 20)))
    return emit(op.matmul(total, other))


def beside(emit, data, weight, weight1):
    """Two products that do not depend on each other."""
    return emit(op.add(emit(op.matmul(data, weight)), emit(op.matmul(data, weight1))))


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
    case("one weight", one_weight, (40, 32), (32, 32)),
    case("two results", two_results, (40, 30), (30, 20), (20, 50), outputs=2),
]


#: Shapes of real networks, with what they are.
REAL = [
    case(
        "MobileNet 112x112",
        separable,
        (1, 32, 112, 112),
        (32, 1, 3, 3),
        (1, 32, 1, 1),
        (64, 32, 1, 1),
        padding=1,
    ),
    case(
        "MobileNet 56x56 stride 2",
        separable,
        (1, 128, 56, 56),
        (128, 1, 3, 3),
        (1, 128, 1, 1),
        (128, 128, 1, 1),
        padding=1,
        strides=2,
    ),
    case(
        "MobileNet 14x14",
        separable,
        (1, 512, 14, 14),
        (512, 1, 3, 3),
        (1, 512, 1, 1),
        (512, 512, 1, 1),
        padding=1,
    ),
    case(
        "MobileNet 14x14 nhwc",
        separable,
        (1, 14, 14, 512),
        (512, 3, 3, 1),
        (1, 1, 1, 512),
        (512, 1, 1, 512),
        padding=1,
        **NHWC,
    ),
    case(
        "MobileNetV2 56x56",
        expanded,
        (1, 24, 56, 56),
        (144, 24, 1, 1),
        (1, 144, 1, 1),
        (144, 1, 3, 3),
    ),
    case("ResNet 56x56", reduced, (1, 64, 56, 56), (64, 64, 3, 3), (256, 64, 1, 1), padding=1),
    case("narrow products", products, (512, 768), (768, 64), (64, 512)),
]

#: Cases whose float16 version is checked too: one of each form.
HALF = ("separable nhwc", "conv stride 2", "1x1 depthwise", "transposed", "one weight")


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
    """Schedule and tile for a chip of some size: small ones get large tiles, with many registers a thread."""
    found = recognise(func)
    bounds = dataclasses.replace(limits(target), multiprocessors=multiprocessors)
    for tile in pair_tiles(found[2], bounds):
        scheduled = with_tile(*found, tile, bounds)
        if scheduled is not None:
            return scheduled.without_attr("global_symbol"), tile
    raise AssertionError("no tile fits")


@pytest.mark.parametrize(("build", "shapes", "outputs"), CASES)
def test_positions(cuda, build, shapes, outputs):
    func = cuda.function(build, *shapes)
    target = cuda.target("cuda:sm_90")
    scheduled, tile = for_chip(func, target, 1)
    assert tile.register_count > 1
    arrays = coded(func, outputs)
    expected = cuda.expected(func, arrays)
    source = cuda_emulation.cuda_source(scheduled, target)
    assert len(cuda_emulation.kernels(source)) == 1
    for backward in (False, True):
        results = cuda_emulation.run(scheduled, arrays, target, source=source, backward=backward)
        for result, reference in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-5)


#: Depthwise convolutions and 1x1 convolutions of them: newer chips multiply them as a product with a sum inside, unless
#: there are few channels.
SEPARABLES = [c for c in CASES if c.id.startswith("separable") and c.id != "separable 5x5"]


@pytest.mark.parametrize(("build", "shapes", "outputs"), [c for c in CASES if c not in SEPARABLES])
def test_values(cuda, build, shapes, outputs):
    cuda.check(cuda.function(build, *shapes), "back_to_back", outputs)


@pytest.mark.parametrize(
    ("arch", "template"), [("sm_75", "back_to_back"), ("sm_90", "multiply_add")]
)
@pytest.mark.parametrize(("build", "shapes", "outputs"), SEPARABLES)
def test_values_of_separable_convolutions(cuda, build, shapes, outputs, arch, template):
    cuda.check(cuda.function(build, *shapes), template, outputs, arch)


@pytest.mark.parametrize(("build", "shapes", "outputs"), [c for c in CASES if c.id.endswith(HALF)])
def test_half_precision(cuda, build, shapes, outputs):
    cuda.check(cuda.function(build, *shapes, dtype="float16"), "back_to_back", outputs, "sm_75")


def test_bfloat16(cuda):
    """The reference rounds what lies between the sums to bfloat16, as the function says."""
    shapes = ((1, 9, 9, 16), (16, 3, 3, 1), (1, 1, 1, 16), (24, 1, 1, 16))

    def build(emit, *inputs):
        return separable(emit, *inputs, padding=1, **NHWC)

    wide = cuda.function(build, *shapes)
    inputs = [array.astype(ml_dtypes.bfloat16) for array in cuda.inputs(wide)]
    (expected,) = cuda.expected(wide, [array.astype("float32") for array in inputs])
    target = cuda.target("cuda:sm_75")
    scheduled, name = schedule(cuda.function(build, *shapes, dtype="bfloat16"), target)
    assert name == "back_to_back"
    (result,) = cuda_emulation.run(scheduled, [array.view("uint16") for array in inputs], target)
    error = np.abs(result.view(ml_dtypes.bfloat16).astype("float32") - expected).max()
    assert error <= 2**-7 * np.abs(expected).max()


def test_a_group_goes_through_the_whole_lowering(cuda):
    b = ModuleBuilder()
    value = b.input("x", (1, 16, 13, 13))
    value = b.conv("depthwise", value, 16, 3, groups=16)
    value = b.bias("bias", value)
    value = b.relu("relu", value)
    value = b.conv("pointwise", value, 24, 1)
    mod = b.finish(b.relu("relu1", value))
    lowered, kernels = lower_groups(as_group(mod, "vertical", form="back_to_back"))
    (kernel,) = kernels.values()
    func = lowered[kernel]
    assert func.attrs["tvm_fusion.options"]["form"] == "back_to_back"
    cuda.check(func, "back_to_back", arch="sm_75")
    cuda.check_group(cuda.group(mod, "vertical", form="back_to_back"), "multiply_add")


@pytest.mark.nvcc
@pytest.mark.parametrize(("build", "shapes", "outputs"), REAL)
def test_resources(cuda, build, shapes, outputs):
    cuda.resources(cuda.function(build, *shapes), "sm_90")


@pytest.mark.slow
@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("build", "shapes", "outputs"), REAL)
def test_resources_on_other_archs(cuda, arch, build, shapes, outputs, dtype):
    cuda.resources(cuda.function(build, *shapes, dtype=dtype), arch)


@pytest.mark.slow
@pytest.mark.nvcc
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("build", "shapes", "outputs"), CASES)
def test_resources_of_small_cases(cuda, build, shapes, outputs, dtype):
    cuda.resources(cuda.function(build, *shapes, dtype=dtype), "sm_90")


@pytest.mark.parametrize(("build", "shapes", "outputs"), REAL)
def test_the_estimate_of_shared_memory_is_close(cuda, build, shapes, outputs):
    target = cuda.target("cuda:sm_90")
    scheduled, tile = for_chip(cuda.function(build, *shapes), target, 132)
    used = planned_shared_bytes(scheduled)
    assert 0.5 <= used / tile.nbytes <= 1.5


def test_blocks_that_repeat_the_first_sum_show_as_recompute(cuda):
    """Twice the output channels are twice as many channel tiles at most, and the factor counts them."""
    target = cuda.target("cuda:sm_90")
    factors = []
    for channels in (64, 2048):
        shapes = ((1, 64, 14, 14), (64, 1, 3, 3), (1, 64, 1, 1), (channels, 64, 1, 1))
        func = cuda.function(lambda e, *i: separable(e, *i, padding=1), *shapes)
        _, tile = for_chip(func, target, 132)
        grid = -(-channels // (tile.threads[1] * tile.registers[1]))
        assert tile.recompute >= grid
        factors.append(tile.recompute)
    assert factors[1] > factors[0]


NO_PAIR = [
    case("one sum", lambda e, x, w: e(op.matmul(x, w)), (20, 30), (30, 40)),
    case(
        "three sums",
        lambda e, x, w, v, u: plain(e, e(op.matmul(x, w)), v, u),
        (20, 30),
        (30, 40),
        (40, 30),
        (30, 20),
    ),
    case(
        "the first sum is needed twice",
        lambda e, x, w, v: e(op.add(plain(e, x, w, v), e(op.matmul(x, w)))),
        (20, 30),
        (30, 30),
        (30, 30),
    ),
    case("both operands", lambda e, x, w: square(e, x, w), (20, 30), (30, 20)),
    case(
        "a row between",
        lambda e, x, w, v: e(op.matmul(e(op.nn.softmax(e(op.matmul(x, w)))), v)),
        (20, 30),
        (30, 40),
        (40, 30),
    ),
    case("reshaped between", lambda e, x, w, v: reshaped(e, x, w, v), (20, 30), (30, 40), (20, 30)),
    case(
        "pooling", lambda e, x, w: e(op.nn.max_pool2d(conv(e, x, w), 2)), (1, 8, 8, 8), (8, 8, 1, 1)
    ),
    case("sums side by side", beside, (20, 30), (30, 40), (30, 40)),
]


@pytest.mark.parametrize(("build", "shapes", "outputs"), NO_PAIR)
def test_other_forms_are_left_to_others(cuda, build, shapes, outputs):
    func = cuda.function(build, *shapes)
    assert cuda.template("back_to_back").apply(func, cuda.target("cuda:sm_90")) is None


def test_too_little_shared_memory(cuda):
    target = cuda.target({"kind": "cuda", "arch": "sm_80", "max_shared_memory_per_block": 64})
    func = cuda.function(products, (64, 96), (96, 32), (32, 80))
    assert cuda.template("back_to_back").apply(func, target) is None


def test_the_tile_follows_the_limits_of_the_target(cuda):
    spec = {"kind": "cuda", "arch": "sm_80", "max_threads_per_block": 128}
    target = cuda.target({**spec, "max_shared_memory_per_block": 4096})
    func = cuda.function(products, (256, 256), (256, 64), (64, 256))
    scheduled = cuda.template("back_to_back").apply(func, target)
    assert cuda_emulation.launch_of(scheduled).block[0] <= 128
    assert 0 < planned_shared_bytes(scheduled) <= 4096
