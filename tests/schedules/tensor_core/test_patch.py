"""Convolutions of few channels whose windows are read from a patch of the image in shared memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tvm import relax
from tvm_fusion.schedules.base import PACKED
from tvm_fusion.schedules.cuda.tensor_core.patch import patch_kernel
from tvm_fusion.schedules.cuda.tensor_core.patch_form import patch_form, patch_problem
from tvm_fusion.schedules.cuda.tensor_core.template import kernel_of, products_of
from tvm_fusion.schedules.cuda.tensor_core.tile import problem_of

from tvm_fusion.devices import DEVICES
from tvm_fusion.guards.patch_tiles import PatchTile, patch_choices, predict, shared_bytes
from tvm_fusion.guards.tensor_tiles import best_tiles

op = relax.op
DEVICE = DEVICES["sm_90"]


def conv(emit, data, weight, *rest, **attrs):
    """Convolution, and bias and ReLU where there is a bias."""
    layout = {"data_layout": "NHWC", "kernel_layout": "OHWI"}
    value = emit(op.nn.conv2d(data, weight, **layout, **attrs))
    return emit(op.nn.relu(emit(op.add(value, rest[0])))) if rest else value


def planes(emit, data, weight, **attrs):
    """A convolution of an image whose channels are planes."""
    return conv(emit, emit(op.permute_dims(data, [0, 2, 3, 1])), weight, **attrs)


def before(emit, data, weight, **attrs):
    """A ReLU in front: elements are computed, not read."""
    return conv(emit, emit(op.nn.relu(data)), weight, **attrs)


def enlarged(emit, data, weight):
    """Each row of an image twice: which one a place of the window reads is no sum of the place's and the output's."""
    return conv(emit, emit(op.repeat(data, 2, axis=1)), weight, padding=1)


def form_of(tensor, function):
    """The function as a product, and its permuted parameters."""
    forms, packed = products_of(function.func, tensor.target("sm_90"))
    return forms[1], packed


def tiled(tensor, function, tile: PatchTile, arch: str = "sm_90"):
    """The kernel of a tile."""
    form, packed = form_of(tensor, function)
    made = patch_kernel(form, tile, DEVICES[arch.removesuffix("a")]).without_attr("global_symbol")
    return made.with_attr(PACKED, packed) if packed else made


def tile_of(problem, height: int, width: int, warps: tuple[int, int], columns: int) -> PatchTile:
    """A tile that the search might choose."""
    down, across = warps
    rows = -(-height * width // (16 * down)) * 16 * down
    return PatchTile(rows, columns, problem.depth, down, across, 1, 1, height=height, width=width)


#: Shapes, attributes, rectangle, warps and columns of a tile.
CASES = {
    "7x7": (((2, 19, 21, 3), (64, 7, 7, 3), (64,)), {"padding": 3, "strides": 2}, (4, 8, (2, 2), 64)),
    "every place odd": (((1, 9, 11, 3), (16, 3, 3, 3), (16,)), {"padding": 1}, (4, 8, (2, 1), 16)),
    "rectangles overlap": (((2, 11, 13, 1), (24, 5, 5, 1)), {"padding": 2}, (8, 8, (2, 1), 16)),
    "rows to spare": (((1, 7, 7, 3), (16, 3, 3, 3), (16,)), {"padding": 1}, (7, 7, (2, 1), 16)),
    "one row": (((3, 1, 33, 3), (16, 1, 7, 3)), {"padding": [0, 3]}, (2, 16, (2, 1), 16)),
    "dilated": (
        ((1, 13, 13, 5), (16, 3, 3, 5)), {"padding": 2, "dilation": 2}, (4, 8, (2, 1), 16),
    ),
    "gaps": (((1, 17, 23, 5), (16, 2, 2, 5)), {"strides": [3, 4]}, (4, 6, (2, 1), 16)),
    "one-sided": (
        ((1, 9, 10, 3), (40, 2, 4, 3), (40,)), {"padding": [0, 1, 1, 2]}, (2, 8, (1, 2), 32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_values(tensor, name, dtype):
    shapes, attrs, (height, width, warps, columns) = CASES[name]
    build = lambda emit, *inputs: conv(emit, *inputs, **attrs)  # noqa: E731
    constants = range(1, len(shapes))
    function = tensor.function(build, *shapes, dtype=dtype, constants=constants)
    problem = patch_problem(form_of(tensor, function)[0])
    tile = tile_of(problem, height, width, warps, columns)
    source = tensor.check(function, tiled(tensor, function, tile))
    assert "tvmf_load_shared_word" in source


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_planes_and_what_the_search_finds_first(tensor, arch):
    build = lambda emit, *inputs: planes(emit, *inputs, padding=1, strides=2)  # noqa: E731
    function = tensor.function(build, (2, 3, 17, 19), (16, 3, 3, 3), constants=(1,))
    problem = patch_problem(form_of(tensor, function)[0])
    # Lines of three places; 9 of them, of which each fills two pairs.
    assert (problem.spans, problem.depth) == ((1, 3, 3, 3), 48)
    found = patch_choices(problem, DEVICES[arch.removesuffix("a")])[0].tile
    tensor.check(function, tiled(tensor, function, found, arch), arch=arch)


def test_elements_of_windows_one_by_one(tensor):
    """The way of images whose patch no tile has room for, and of kernels that are merged."""
    build = lambda emit, *inputs: conv(emit, *inputs, padding=1, strides=2)  # noqa: E731
    function = tensor.function(build, (2, 9, 11, 3), (16, 3, 3, 3), (16,), constants=(1, 2))
    form, packed = form_of(tensor, function)
    tile = best_tiles(problem_of(form), DEVICE)[0].tile
    made = kernel_of(form, tile).without_attr("global_symbol").with_attr(PACKED, packed)
    source = tensor.check(function, made)
    assert "tvmf_read_or_zero_2" in source
    assert "tvmf_load_shared_word" not in source


def test_what_fills_pairs_does_not_reach_the_result(tensor):
    """An element that is no number changes the outputs whose windows have it, and no others."""
    build = lambda emit, *inputs: conv(emit, *inputs, padding=1)  # noqa: E731
    function = tensor.function(build, (1, 9, 9, 3), (16, 3, 3, 3), constants=(1,))
    problem = patch_problem(form_of(tensor, function)[0])
    data, weight = function.make(tensor.positions)
    weight[:] = 1
    clean = tensor.run(tiled(tensor, function, tile_of(problem, 4, 8, (2, 1), 16)), [data, weight])
    for place in ((4, 5, 0), (4, 5, 2), (0, 0, 0), (8, 8, 2)):
        poisoned = data.copy()
        poisoned[(0, *place)] = np.nan
        kernel = tiled(tensor, function, tile_of(problem, 4, 8, (2, 1), 16))
        (result,) = tensor.run(kernel, [poisoned, weight])
        y, x, _ = place
        expected = np.zeros((9, 9), bool)
        expected[max(0, y - 1) : y + 2, max(0, x - 1) : x + 2] = True
        np.testing.assert_array_equal(np.isnan(np.ma.getdata(result))[0].all(-1), expected)
        np.testing.assert_array_equal(
            np.ma.getdata(result)[0][~expected], np.ma.getdata(clean[0])[0][~expected]
        )


@pytest.mark.parametrize(
    ("build", "shapes", "constants"),
    [
        (conv, ((1, 9, 9, 16), (16, 3, 3, 16)), (1,)),  # pieces of 16 bytes
        (conv, ((1, 9, 9, 4), (16, 3, 3, 4)), (1,)),  # pieces of 8 bytes
        (before, ((1, 9, 9, 3), (16, 3, 3, 3)), (1,)),  # computed
        (enlarged, ((1, 6, 9, 3), (16, 3, 3, 3)), (1,)),  # no sum of places
        (conv, ((1, 9, 9, 3), (12, 3, 3, 3)), (1,)),  # weights without whole pieces
    ],
)
def test_other_rows_are_left_alone(tensor, build, shapes, constants):
    function = tensor.function(build, *shapes, constants=constants)
    found = products_of(function.func, tensor.target("sm_90"))
    assert found is None or patch_form(found[0][1]) is None


def first_layer(tensor, batch: int = 32):
    """A 7x7 convolution of stride 2 of an image of 3 channels."""
    build = lambda emit, *inputs: conv(emit, *inputs, padding=3, strides=2)  # noqa: E731
    shapes = ((batch, 224, 224, 3), (64, 7, 7, 3), (64,))
    return tensor.function(build, *shapes, constants=(1, 2))


def test_large_images_have_it_and_the_search_has_both(tensor):
    function = first_layer(tensor)
    source = tensor.source(tensor.scheduled(function, arch="sm_90a"))
    assert "tvmf_load_shared_word" in source
    assert "tvmf_read_or_zero_2" in source


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nothing_spills_and_four_warps_of_a_scheduler_have_room(tensor, arch):
    function = first_layer(tensor)
    problem = patch_problem(form_of(tensor, function)[0])
    for choice in patch_choices(problem, DEVICES[arch.removesuffix("a")], 3):
        found = tensor.resources(tiled(tensor, function, choice.tile, arch), arch)
        assert found.registers <= 128


def test_choices_fit_and_are_ranked(tensor):
    problem = patch_problem(form_of(tensor, first_layer(tensor))[0])
    choices = patch_choices(problem, DEVICE, 1 << 16)
    times = [choice.microseconds for choice in choices]
    assert times == sorted(times)
    for choice in choices:
        assert shared_bytes(problem, choice.tile) <= DEVICE.shared_memory_per_block_optin
        assert choice.tile.height * choice.tile.width <= choice.tile.rows
    more = dataclasses.replace(problem, extents=(64, *problem.extents[1:]))
    assert predict(more, DEVICE, choices[0].tile) > 1.8 * times[0]
