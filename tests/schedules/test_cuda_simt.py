"""Kernels of float32 multiply-adds: forms, layouts, tails, tiles; values by emulation, resources by nvcc."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tvm import relax
from tvm_fusion.schedules.base import CONSTANTS, PACKED
from tvm_fusion.schedules.cuda.simt.kernel import kernel
from tvm_fusion.schedules.cuda.simt.problem import accesses, problem_of
from tvm_fusion.schedules.cuda.simt.template import MultiplyAdd
from tvm_fusion.schedules.cuda.tensor_core.recognition import products

from tvm_fusion.build.ptxas import kernel_resources
from tvm_fusion.guards.fma_tiles import Tile
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.groups import emit_joined
from tvm_fusion.transform.legalize_horizontal import emit_split_store

op = relax.op

#: An H200.
TARGET = parse_target("cuda:sm_90")

#: Largest error relative to the largest value.
_TOLERANCE = 2e-5


def conv(emit, data, weight, **attrs):
    """A convolution without epilogue."""
    return emit(op.nn.conv2d(data, weight, **attrs))


def block(emit, data, weight, bias, **attrs):
    """Convolution, bias, ReLU."""
    return emit(op.nn.relu(emit(op.add(conv(emit, data, weight, **attrs), bias))))


def residual(emit, data, weight, bias, shortcut):
    """An epilogue that reads another tensor."""
    total = emit(op.add(conv(emit, data, weight, padding=1), bias))
    return emit(op.clip(emit(op.add(total, shortcut)), -1.0, 1.0))


def joined(emit, data, other, weight, weight1, weight2):
    """Three convolutions of two inputs that meet in one sum."""
    parts = [
        conv(emit, data, weight, padding=1),
        conv(emit, data, weight1),
        conv(emit, other, weight2, padding=1, strides=2),
    ]
    total = emit(op.add(emit(op.nn.relu(parts[0])), emit(op.nn.relu(parts[1]))))
    return emit(op.add(total, emit(op.nn.relu(parts[2]))))


def prologue(emit, data, weight, bias):
    """A function of the input first, zero in the padding all the same."""
    return conv(emit, emit(op.exp(emit(op.add(data, bias)))), weight, padding=1)


def several_outputs(emit, data, weight):
    """The sum itself and two functions of it."""
    total = conv(emit, data, weight, padding=1)
    return emit(op.nn.relu(total)), emit(op.tanh(total)), total


def separable(emit, data, depthwise, bias, pointwise):
    """A depthwise convolution, ReLU, and a product over its channels."""
    groups = int(data.ty.shape[1])
    inner = emit(op.nn.conv2d(data, depthwise, padding=1, groups=groups))
    inner = emit(op.nn.relu(emit(op.add(inner, bias))))
    return emit(op.nn.relu(conv(emit, inner, pointwise)))


def dense(emit, data, weight, bias):
    """A product with bias."""
    return emit(op.add(emit(op.matmul(data, weight)), bias))


def scores(emit, query, key):
    """Batched products whose columns have the reduction innermost."""
    return emit(op.matmul(query, emit(op.permute_dims(key, [0, 2, 1]))))


def case(name, build, *shapes, outputs=1, constants=(), **attrs):
    """One function under test."""

    def make(emit, *inputs):
        return build(emit, *inputs, **attrs)

    return pytest.param(make, shapes, outputs, constants, id=name)


CASES = [
    case("3x3", block, (1, 16, 14, 14), (24, 16, 3, 3), (1, 24, 1, 1), padding=1),
    case(
        "3x3 packed",
        block,
        (2, 16, 14, 14),
        (24, 16, 3, 3),
        (1, 24, 1, 1),
        padding=1,
        constants=(1, 2),
    ),
    case("7x7", block, (1, 48, 7, 7), (32, 48, 3, 3), (1, 32, 1, 1), padding=1, constants=(1, 2)),
    case("stem", block, (1, 3, 33, 33), (16, 3, 7, 7), (1, 16, 1, 1), strides=2, padding=3),
    case("1x1", block, (1, 64, 14, 14), (40, 64, 1, 1), (1, 40, 1, 1)),
    case("1x1 stride 2", block, (1, 16, 15, 15), (8, 16, 1, 1), (1, 8, 1, 1), strides=2),
    case("dilation", conv, (1, 10, 13, 17), (9, 10, 3, 3), padding=2, dilation=2, strides=[1, 2]),
    case("residual", residual, (1, 16, 13, 13), (16, 16, 3, 3), (1, 16, 1, 1), (1, 16, 13, 13)),
    case(
        "joined",
        joined,
        (1, 16, 13, 13),
        (1, 8, 26, 26),
        (16, 16, 3, 3),
        (16, 16, 1, 1),
        (16, 8, 3, 3),
        constants=(2, 3, 4),
    ),
    case("one sided padding", conv, (1, 6, 9, 9), (4, 6, 2, 4), padding=[0, 1, 1, 2]),
    case("prologue", prologue, (1, 16, 13, 13), (24, 16, 3, 3), (1, 16, 1, 1), constants=(1, 2)),
    case("outputs", several_outputs, (1, 16, 14, 14), (16, 16, 3, 3), outputs=3),
    case(
        "nhwc",
        conv,
        (1, 13, 13, 16),
        (32, 3, 3, 16),
        padding=1,
        data_layout="NHWC",
        kernel_layout="OHWI",
    ),
    case(
        "separable",
        separable,
        (1, 24, 14, 14),
        (24, 1, 3, 3),
        (1, 24, 1, 1),
        (40, 24, 1, 1),
        constants=(1, 2, 3),
    ),
    case("dense", dense, (37, 50), (50, 83), (83,)),
    case("dense, wide", dense, (64, 64), (64, 128), (128,), constants=(1, 2)),
    case("scores", scores, (3, 40, 16), (3, 48, 16)),
]

#: Few tiles, and tiles with every kind of rest.
TILES = [
    Tile(8, 8, 4, 1, 1, 2, 16, 3),
    Tile(4, 4, 4, 2, 1, 1, 8, 2),
    Tile(2, 4, 8, 1, 2, 4, 32, 4),
    Tile(4, 12, 16, 1, 1, 8, 16, 3),
    Tile(8, 16, 1, 2, 1, 1, 8, 2),
]


def scheduled_by(func, constants, tile: Tile | None = None, target=TARGET):
    """The kernel, and the permutation of each of its constants."""
    named = func.with_attr(CONSTANTS, list(constants)) if constants else func
    if tile is None:
        made = MultiplyAdd().apply(named, target)
    else:
        made = kernel(products(func, symmetric=True), tile)
    assert made is not None
    packed = made.attrs.get(PACKED) if tile is None else None
    return made, {int(n): [int(a) for a in axes] for n, axes in (packed or {}).items()}


def check(cuda, func, made, packed, outputs: int) -> str:
    """Right in both thread orders; returns the kernel's code."""
    source = cuda_emulation.cuda_source(made, TARGET)
    assert len(cuda_emulation.kernels(source)) == 1
    inputs = cuda.inputs(func, outputs)
    expected = cuda.expected(func, inputs)
    given = [
        np.ascontiguousarray(array.transpose(packed[number])) if number in packed else array
        for number, array in enumerate(inputs)
    ]
    for backward in (False, True):
        results = cuda_emulation.run(made, given, TARGET, source=source, backward=backward)
        for result, reference in zip(results, expected, strict=True):
            error = np.abs(result.astype("float64") - reference).max() / np.abs(reference).max()
            assert error <= _TOLERANCE, f"error {error}, backward={backward}"
    return source


@pytest.mark.parametrize(("build", "shapes", "outputs", "constants"), CASES)
def test_values(cuda, build, shapes, outputs, constants):
    func = cuda.function(build, *shapes)
    check(cuda, func, *scheduled_by(func, constants), outputs)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(
    ("build", "shapes", "outputs", "constants"),
    [case for case in CASES if case.id in ("3x3", "joined", "separable", "dense")],
)
def test_values_of_other_tiles(cuda, tile, build, shapes, outputs, constants):
    func = cuda.function(build, *shapes)
    check(cuda, func, *scheduled_by(func, constants, tile), outputs)


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("build", "shapes", "outputs", "constants"), CASES)
def test_resources(cuda, arch, build, shapes, outputs, constants):
    func = cuda.function(build, *shapes)
    target = cuda.target(f"cuda:{arch}")
    made, _ = scheduled_by(func, constants, target=target)
    source = cuda_emulation.cuda_source(made, target)
    (found,) = kernel_resources(source, arch).values()
    assert (found.spill_bytes, found.stack_bytes) == (0, 0)


def test_packed_weights_are_copied_sixteen_bytes_at_a_time(cuda):
    func = cuda.function(block, (1, 16, 14, 14), (24, 16, 3, 3), (1, 24, 1, 1))
    made, packed = scheduled_by(func, (1, 2))
    assert packed == {1: [1, 2, 3, 0]}
    assert "tvmf_copy_async_16x" in cuda_emulation.cuda_source(made, TARGET)


def test_weights_that_change_are_not_packed(cuda):
    func = cuda.function(block, (1, 16, 14, 14), (24, 16, 3, 3), (1, 24, 1, 1))
    made, packed = scheduled_by(func, ())
    assert not packed
    assert "tvmf_copy_async_16x" not in cuda_emulation.cuda_source(made, TARGET)


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


@pytest.mark.parametrize("tile", [None, Tile(2, 4, 8, 2, 1, 2, 8, 3)], ids=str)
def test_several_sums_an_output(cuda, tile):
    """The channels are rows, each with a sum a branch."""
    func = branches(cuda, 3)
    form = products(func, symmetric=True)
    assert form.anchors[0].copy_count == 3
    assert products(func) is None
    check(cuda, func, *scheduled_by(func, (1, 2), tile), 1)


def split(cuda, shape):
    """One convolution whose channels go to three outputs, by one block that stores under conditions."""

    def build(builder, data, weight):
        total = builder.emit(op.nn.relu(builder.emit(op.nn.conv2d(data, weight, padding=1))))
        return builder.emit(emit_split_store(builder, total, [24, 16, 7], 1))

    return cuda.function(build, shape, (47, shape[1], 3, 3), with_builder=True)


@pytest.mark.parametrize("tile", [None, Tile(8, 4, 8, 1, 1, 4, 16, 3)], ids=str)
def test_rows_of_several_outputs(cuda, tile):
    func = split(cuda, (1, 16, 14, 12))
    source = check(cuda, func, *scheduled_by(func, (1,), tile), 3)
    assert "(float4*)" in source  # a condition on rows does not split the vectors of columns


@pytest.mark.parametrize("tile", [None, Tile(4, 12, 4, 1, 1, 2, 16, 3)], ids=str)
def test_columns_of_several_outputs(cuda, tile):
    """Parts of one value: a vector's tensor is selected, and the value is computed once."""

    def build(builder, data, weight):
        total = builder.emit(op.nn.relu(builder.emit(op.matmul(data, weight))))
        return builder.emit(emit_split_store(builder, total, [48, 48, 48], 1))

    func = cuda.function(build, (40, 32), (32, 144), with_builder=True)
    source = check(cuda, func, *scheduled_by(func, (), tile), 3)
    assert "tvmf_select(" in source


def test_half_precision_is_left_to_others(cuda):
    func = cuda.function(dense, (64, 64), (64, 128), (128,), dtype="float16")
    assert MultiplyAdd().apply(func, TARGET) is None


def test_single_rows_are_left_to_others(cuda):
    func = cuda.function(dense, (1, 64), (64, 128), (128,))
    assert MultiplyAdd().apply(func, TARGET) is None


def test_sums_of_sums_are_left_to_others(cuda):
    def chain(emit, data, weight, weight1):
        return conv(emit, conv(emit, data, weight, padding=1), weight1)

    func = cuda.function(chain, (1, 8, 9, 9), (8, 8, 3, 3), (8, 8, 1, 1))
    assert MultiplyAdd().apply(func, TARGET) is None


def test_how_operands_are_read(cuda):
    func = cuda.function(dense, (32, 64), (64, 128), (128,))
    form = products(func, symmetric=True)
    rows, columns = accesses(form, form.anchors[0])
    assert (rows.transposed, rows.width, columns.transposed, columns.width) == (True, 1, False, 4)
    problem = problem_of(form)
    assert (problem.depths, problem.sums) == ((64,), (1,))
    assert dataclasses.asdict(problem.rows) == {
        "count": 32, "copies": 1, "width": 1, "transposed": True, "taps": 1,
    }  # fmt: skip
