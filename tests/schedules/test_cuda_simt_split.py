"""Float32 kernels whose reduction the blocks of a cluster share: values of every form, choice, resources."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm_fusion.schedules.base import MEMBER
from tvm_fusion.schedules.cuda.simt.template import MultiplyAdd, kernel_of
from tvm_fusion.schedules.cuda.tensor_core.recognition import products

from tvm_fusion.build.ptxas import kernel_resources
from tvm_fusion.guards.fma_tiles import Tile
from tvm_fusion.guards.split_tiles import SLICES
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.transform.legalize_horizontal import emit_split_store

op = relax.op
TARGET = parse_target("cuda:sm_90")

#: Largest error relative to the largest value, for random inputs.
_TOLERANCE = 2e-5

#: thread_rows, thread_columns, lane_rows, warp_rows, warp_columns, warp_depth, depth, stages.
TILES = [
    Tile(8, 8, 4, 1, 1, 2, 16, 3, slices=8),
    Tile(4, 4, 4, 2, 1, 1, 8, 2, slices=4),
    Tile(2, 4, 8, 1, 2, 4, 32, 4, slices=2),
    Tile(4, 12, 16, 1, 1, 8, 16, 3, slices=4),
    Tile(8, 16, 1, 2, 1, 1, 8, 2, slices=2),
]


def residual(emit, data, weight, bias, shortcut):
    """Convolution, bias, another tensor, ReLU."""
    total = emit(op.add(emit(op.nn.conv2d(data, weight, padding=1)), bias))
    return emit(op.nn.relu(emit(op.add(total, shortcut))))


def joined(emit, data, other, weight, weight1):
    """Two convolutions of two inputs that meet in one sum."""
    first = emit(op.nn.relu(emit(op.nn.conv2d(data, weight, padding=1))))
    second = emit(op.nn.conv2d(other, weight1, padding=1, strides=2))
    return emit(op.add(first, second))


def computed(emit, left, right):
    """Two functions of a product of computed rows."""
    total = emit(op.matmul(emit(op.exp(left)), right))
    return emit(op.tanh(total)), total


def parts(builder, left, right):
    """A product whose columns go to three tensors."""
    total = builder.emit(op.nn.relu(builder.emit(op.matmul(left, right))))
    return builder.emit(emit_split_store(builder, total, [48, 32, 64], 1))


#: 144 and 70 products: slices end inside of tiles, and some blocks have none.
CASES = {
    "residual": (residual, [(1, 16, 9, 9), (21, 16, 3, 3), (1, 21, 1, 1), (1, 21, 9, 9)]),
    "joined": (joined, [(1, 16, 9, 9), (1, 8, 18, 18), (16, 16, 3, 3), (16, 8, 3, 3)]),
    "computed": (computed, [(37, 70), (70, 52)]),
}


def small_integers(number: int, shape) -> np.ndarray:
    """Small integers that tell places apart: sums of their products are exact."""
    places = np.arange(np.prod(shape, dtype=int))
    mixed = (places * (2 * number + 7) + places // 11 * 3 + places // 97 + number) * 2654435761
    return ((mixed >> 9) % 5 - 2).reshape(shape).astype("float32")


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values(cuda, name, tile):
    build, shapes = CASES[name]
    func = cuda.function(build, *shapes)
    inputs = [small_integers(number, shape) for number, shape in enumerate(shapes)]
    double = [array.astype("float64") for array in inputs]
    check(func, tile, inputs, cuda.expected(cuda.function(build, *shapes, dtype="float64"), double))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_columns_of_several_outputs(cuda, tile):
    shapes = (40, 70), (70, 144)
    func = cuda.function(parts, *shapes, with_builder=True)
    inputs = [small_integers(number, shape) for number, shape in enumerate(shapes)]
    # All sums are integers below 2**24: float32 has them exactly.
    check(func, tile, inputs, cuda.expected(func, inputs))


def check(func, tile: Tile, inputs: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """One kernel of clusters, right in both thread orders."""
    made = kernel_of(products(func, symmetric=True), tile)
    assert cuda_emulation.launch_of(made).cluster == (tile.slices, 1, 1)
    source = cuda_emulation.cuda_source(made, TARGET)
    assert len(cuda_emulation.kernels(source)) == 1
    for backward in (False, True):
        results = cuda_emulation.run(made, inputs, TARGET, source=source, backward=backward)
        for result, reference in zip(results, expected, strict=True):
            error = np.abs(result - reference).max() / np.abs(reference).max()
            assert error <= _TOLERANCE, f"error {error}, backward={backward}"


def seven(cuda):
    """ResNet's 3x3 convolution of 512 channels at 7x7."""
    shapes = (1, 512, 7, 7), (512, 512, 3, 3), (1, 512, 1, 1), (1, 512, 7, 7)
    return cuda.function(residual, *shapes)


def test_the_template_splits(cuda):
    func = seven(cuda)
    made = MultiplyAdd().apply(func, TARGET)
    assert cuda_emulation.launch_of(made).cluster[0] in SLICES
    member = MultiplyAdd().apply(func.with_attr(MEMBER, True), TARGET)
    older = MultiplyAdd().apply(func, parse_target("cuda:sm_80"))
    for other in (member, older):
        assert cuda_emulation.launch_of(other).cluster == (1, 1, 1)
    few = cuda.function(residual, (1, 64, 56, 56), (64, 64, 3, 3), (1, 64, 1, 1), (1, 64, 56, 56))
    assert cuda_emulation.launch_of(MultiplyAdd().apply(few, TARGET)).cluster == (1, 1, 1)


@pytest.mark.nvcc
@pytest.mark.parametrize("tile", [None, *TILES], ids=str)
def test_no_split_kernel_spills(cuda, tile):
    func = seven(cuda)
    made = MultiplyAdd().apply(func, TARGET)
    if tile is not None:
        made = kernel_of(products(func, symmetric=True), tile)
    (found,) = kernel_resources(cuda_emulation.cuda_source(made, TARGET), "sm_90").values()
    assert (found.spill_bytes, found.stack_bytes) == (0, 0)
