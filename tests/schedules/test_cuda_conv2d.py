"""Direct convolution: forms, tails, joins; values by emulation, resources by nvcc."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from tvm import relax
from tvm_fusion.schedules import schedule

from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.groups import emit_joined
from tvm_fusion.transform.legalize_horizontal import emit_split_store

op = relax.op


def conv(emit, data, weight, **attrs):
    """A convolution without epilogue."""
    return emit(op.nn.conv2d(data, weight, **attrs))


def block(emit, data, weight, bias, **attrs):
    """Convolution, bias, ReLU."""
    return emit(op.nn.relu(emit(op.add(conv(emit, data, weight, **attrs), bias))))


def residual(emit, data, weight, bias, shortcut):
    """A prologue, and an epilogue that reads another tensor."""
    total = emit(op.add(conv(emit, emit(op.nn.relu(data)), weight, padding=1), bias))
    return emit(op.clip(emit(op.nn.gelu(emit(op.add(total, shortcut)))), -1.0, 1.0))


def joined(emit, data, other, weight, weight1, weight2):
    """Three convolutions of two inputs that meet in one sum."""
    parts = [
        conv(emit, data, weight, padding=1),
        conv(emit, data, weight1),
        conv(emit, other, weight2, padding=1, strides=2),
    ]
    total = emit(op.add(emit(op.nn.relu(parts[0])), emit(op.nn.relu(parts[1]))))
    return emit(op.add(total, emit(op.nn.relu(parts[2]))))


def several_outputs(emit, data, weight):
    """The sum itself and two functions of it."""
    total = conv(emit, data, weight, padding=1)
    return emit(op.nn.relu(total)), emit(op.tanh(total)), total


def nhwc(emit, data, weight, shortcut):
    """Half precision, NHWC."""
    total = conv(
        emit, data, weight, padding=1, data_layout="NHWC", kernel_layout="OHWI", out_dtype="float32"
    )
    return emit(op.nn.relu(emit(op.add(emit(op.astype(total, "float16")), shortcut))))


def case(name, build, *shapes, outputs=1, dtype="float32", **attrs):
    """One function under test."""

    def make(emit, *inputs):
        return build(emit, *inputs, **attrs)

    return pytest.param(make, shapes, dtype, outputs, id=name)


CASES = [
    case("7x7 batch 3", block, (3, 20, 7, 7), (24, 20, 3, 3), (1, 24, 1, 1), padding=1),
    case("13x13", block, (1, 12, 13, 13), (37, 12, 3, 3), (1, 37, 1, 1), padding=1),
    case("stem 55x55", block, (1, 3, 55, 55), (16, 3, 7, 7), (1, 16, 1, 1), strides=2, padding=3),
    case("valid stride 2", block, (1, 3, 224, 40), (8, 3, 3, 3), (1, 8, 1, 1), strides=2),
    case("11x11", block, (1, 3, 59, 59), (16, 3, 11, 11), (1, 16, 1, 1), strides=4),
    case("1x1", block, (1, 64, 14, 14), (96, 64, 1, 1), (1, 96, 1, 1)),
    case("1x1 stride 2", block, (1, 16, 15, 15), (8, 16, 1, 1), (1, 8, 1, 1), strides=2),
    case("dilation", conv, (1, 10, 13, 17), (9, 10, 3, 3), padding=2, dilation=2, strides=[1, 2]),
    case("one sided padding", conv, (1, 4, 9, 9), (4, 4, 2, 4), padding=[0, 1, 1, 2]),
    case("depthwise", conv, (1, 40, 20, 20), (40, 1, 3, 3), padding=1, groups=40),
    case("depthwise multiplier", conv, (1, 12, 9, 9), (24, 1, 3, 3), padding=1, groups=12),
    case("grouped", conv, (1, 48, 13, 13), (96, 16, 3, 3), padding=1, groups=3),
    case("grouped 1x1", conv, (1, 272, 14, 14), (272, 68, 1, 1), groups=4),
    case("17 channels a group", conv, (2, 136, 13, 14), (40, 17, 5, 5), padding=1, groups=8),
    case("residual", residual, (1, 16, 13, 13), (16, 16, 3, 3), (1, 16, 1, 1), (1, 16, 13, 13)),
    case(
        "joined",
        joined,
        (1, 16, 13, 13),
        (1, 8, 26, 26),
        (16, 16, 3, 3),
        (16, 16, 1, 1),
        (16, 8, 3, 3),
    ),
    case("outputs", several_outputs, (1, 16, 14, 14), (16, 16, 3, 3), outputs=3),
    case("nhwc half", nhwc, (1, 13, 13, 16), (32, 3, 3, 16), (1, 13, 13, 32), dtype="float16"),
]


#: From sm_80 on other templates take dense convolutions: of float32, and of 16-bit types with channels last.
ARCH = "sm_75"
#: Templates of those with groups, whose strips need no new instructions, on sm_75 and on sm_90.
GROUPED = {
    "depthwise": ("strips", "strips"),
    "depthwise multiplier": ("strips", "strips"),
    "grouped": ("strips", "strips"),
    "grouped 1x1": ("conv2d", "multiply_add"),
    "17 channels a group": ("strips", "multiply_add"),
}


@pytest.mark.parametrize(("build", "shapes", "dtype", "outputs"), CASES)
def test_values(cuda, request, build, shapes, dtype, outputs):
    func = cuda.function(build, *shapes, dtype=dtype)
    template, _ = GROUPED.get(request.node.callspec.id, ("conv2d", None))
    cuda.check(func, template, outputs, arch=ARCH)


@pytest.mark.parametrize(
    ("build", "shapes", "dtype", "outputs"), [case for case in CASES if case.id in GROUPED]
)
def test_groups_on_newer_chips(cuda, request, build, shapes, dtype, outputs):
    _, template = GROUPED[request.node.callspec.id]
    cuda.check(cuda.function(build, *shapes, dtype=dtype), template, outputs, arch="sm_90")


@pytest.mark.parametrize(
    ("build", "shapes", "dtype", "outputs"), [case for case in CASES if case.id in GROUPED]
)
def test_groups_by_this_template(cuda, build, shapes, dtype, outputs):
    """The template still takes them where no other one does."""
    func = cuda.function(build, *shapes, dtype=dtype)
    target = cuda.target("cuda:sm_90")
    made = cuda.template("conv2d").apply(func, target)
    inputs = cuda.inputs(func)
    (expected,) = cuda.expected(func, inputs)
    (result,) = cuda_emulation.run(made, inputs, target)
    assert np.abs(result - expected).max() <= 2e-5 * np.abs(expected).max()


def test_dense_convolutions_on_newer_chips_are_left_to_others(cuda):
    (build, shapes, _, _) = next(case.values for case in CASES if case.id == "1x1")
    cuda.check(cuda.function(build, *shapes), "multiply_add", arch="sm_90")


@pytest.mark.nvcc
@pytest.mark.parametrize(("build", "shapes", "dtype", "outputs"), CASES)
def test_resources(cuda, build, shapes, dtype, outputs):
    cuda.resources(cuda.function(build, *shapes, dtype=dtype), ARCH)


@pytest.mark.slow
@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("build", "shapes", "dtype", "outputs"), CASES)
def test_resources_on_other_archs(cuda, arch, build, shapes, dtype, outputs):
    cuda.resources(cuda.function(build, *shapes, dtype=dtype), arch)


def test_anchors_that_depend_on_each_other_are_left_to_others(cuda):
    def chain(emit, data, weight, weight1):
        return conv(emit, conv(emit, data, weight, padding=1), weight1)

    func = cuda.function(chain, (1, 8, 9, 9), (8, 8, 3, 3), (8, 8, 1, 1))
    assert cuda.template("conv2d").apply(func, cuda.target("cuda:sm_90")) is None


def test_no_window_is_left_to_others(cuda):
    func = cuda.function(lambda e, x, w: e(op.matmul(x, w)), (20, 30), (30, 40))
    assert cuda.template("conv2d").apply(func, cuda.target("cuda:sm_90")) is None


def branches(cuda, count: int):
    """One anchor with a branch axis that the epilogue joins, as LowerGroups makes it of a horizontal group."""
    member = [
        relax.Var("v", relax.TensorType(shape, "float32"))
        for shape in ((1, 16, 13, 13), (24, 16, 3, 3))
    ]
    attrs = op.nn.conv2d(*member, padding=1).attrs

    def build(builder, data, weight, bias):
        return builder.emit(
            emit_joined(builder, data, weight, bias, ["relu"], "add", attrs, "float32")
        )

    shapes = ((1, 16, 13, 13), (count, 24, 16, 3, 3), (count, 24))
    return cuda.function(build, *shapes, with_builder=True)


@pytest.mark.parametrize("count", [2, 6])
def test_branch_axis_stays_in_registers(cuda, count):
    source = cuda.check(branches(cuda, count), "conv2d", arch=ARCH)
    (size,) = re.findall(r"^  alignas\(64\) float \w+_local_ptr\[(\d+)\];", source, re.M)
    assert int(size) % count == 0 and int(size) <= 64


@pytest.mark.nvcc
def test_branch_axis_does_not_spill(cuda):
    cuda.resources(branches(cuda, 6), ARCH)


def split(cuda, shape=(1, 16, 14, 14)):
    """One convolution whose channels go to three outputs, by one block that stores under conditions."""

    def build(builder, data, weight):
        total = builder.emit(op.nn.relu(builder.emit(op.nn.conv2d(data, weight, padding=1))))
        return builder.emit(emit_split_store(builder, total, [24, 16, 7], 1))

    return cuda.function(build, shape, (47, shape[1], 3, 3), with_builder=True)


@pytest.mark.parametrize("shape", [(1, 16, 14, 14), (2, 6, 7, 7)])
def test_split_store(cuda, shape):
    cuda.check(split(cuda, shape), "conv2d", outputs=3, arch=ARCH)


@pytest.mark.nvcc
def test_split_store_does_not_spill(cuda):
    cuda.resources(split(cuda), ARCH)


def test_bfloat16(cuda):
    def build(emit, data, weight):
        total = conv(emit, data, weight, padding=1, data_layout="NHWC", kernel_layout="OHWI")
        return emit(op.nn.relu(total))

    shapes = ((1, 9, 9, 16), (24, 3, 3, 16))
    func = cuda.function(build, *shapes, dtype="bfloat16")
    wide = cuda.function(build, *shapes)
    inputs = [array.astype(ml_dtypes.bfloat16) for array in cuda.inputs(wide)]
    (expected,) = cuda.expected(wide, [array.astype("float32") for array in inputs])
    target = cuda.target(f"cuda:{ARCH}")
    scheduled, name = schedule(func, target)
    assert name == "conv2d"
    (result,) = cuda_emulation.run(scheduled, [array.view("uint16") for array in inputs], target)
    error = np.abs(result.view(ml_dtypes.bfloat16).astype("float32") - expected).max()
    assert error <= 2**-8 * np.abs(expected).max()
