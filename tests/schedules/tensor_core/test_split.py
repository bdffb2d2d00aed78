"""Tensor-core kernels whose reduction the blocks of a cluster share: values of every form, choice, resources."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tvm import relax
from tvm_fusion.schedules.base import MEMBER

from tvm_fusion.guards.split_tiles import SLICES
from tvm_fusion.guards.tensor_tiles import Tile
from tvm_fusion.guards.warpgroup_tiles import is_possible
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs
from tvm_fusion.testing.plans import DEVICE

op = relax.op
LAST = {"data_layout": "NHWC", "kernel_layout": "OHWI"}


def split(*sizes: int, slices: int, warpgroup: bool = False) -> Tile:
    """A tile of several slices."""
    return Tile(*sizes, warpgroup=warpgroup, slices=slices)


#: rows, columns, depth, warp_rows, warp_columns, warp_depth, stages.
TILES = [
    split(16, 16, 32, 1, 1, 2, 2, slices=2),
    split(16, 64, 64, 1, 4, 1, 3, slices=4),
    split(32, 96, 32, 1, 3, 2, 6, slices=8),
    split(64, 32, 64, 2, 1, 4, 2, slices=4),
    split(64, 64, 32, 2, 2, 1, 4, slices=8),
    split(64, 48, 64, 4, 1, 1, 4, slices=4, warpgroup=True),
    split(64, 64, 64, 4, 1, 1, 3, slices=8, warpgroup=True),
]


def named(tile: Tile) -> str:
    """A tile's sizes."""
    return ("wgmma-" if tile.warpgroup else "") + f"{tile.rows}x{tile.columns}-{tile.slices}"


def arch_of(tile: Tile) -> str:
    """An arch that has a tile's instructions."""
    return "sm_90a" if tile.warpgroup else "sm_90"


def convolution(emit, data, weight, bias, shortcut):
    """A strided 3x3 convolution with bias, another tensor and ReLU."""
    total = emit(op.nn.conv2d(data, weight, padding=1, strides=2, **LAST))
    return emit(op.nn.relu(emit(op.add(emit(op.add(total, bias)), shortcut))))


def product(emit, left, right, bias):
    """A product of computed rows with bias: the reduction innermost in both."""
    value = emit(op.matmul(emit(op.nn.relu(left)), emit(op.permute_dims(right))))
    return emit(op.add(value, bias))


def batched(emit, left, right):
    """Products and a function of them, both returned."""
    total = emit(op.matmul(left, right))
    return emit(op.tanh(total)), total


FUNCTIONS = {
    # 24 x 9 = 216 products: the slices end inside of tiles, some blocks have none.
    "convolution": (convolution, ((1, 15, 15, 24), (40, 3, 3, 24), (40,), (1, 8, 8, 40)), (), 1),
    "odd": (
        convolution,
        ((1, 15, 9, 18), (21, 3, 3, 18), (21,), (1, 8, 5, 21)),
        (1,),
        1,
    ),
    "long": (product, ((7, 520), (50, 520), (50,)), (1,), 1),
    "batched": (batched, ((2, 33, 72), (2, 72, 40)), (), 2),
}


@pytest.mark.parametrize("tile", TILES, ids=named)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(tensor, name, tile):
    build, shapes, constants, outputs = FUNCTIONS[name]
    function = tensor.function(build, *shapes, constants=constants, outputs=outputs)
    if tile.warpgroup and name == "batched":
        assert not is_possible(tensor.problem(function), DEVICE)
        return
    made = tensor.tiled(function, tile)
    assert cuda_emulation.launch_of(made).cluster == (tile.slices, 1, 1)
    tensor.check(function, made, values=(tensor.positions,), arch=arch_of(tile))


@pytest.mark.parametrize("tile", TILES[1:5:3], ids=named)
@pytest.mark.parametrize("name", ["convolution", "long"])
def test_tf32(tensor, name, tile):
    """Small whole numbers are exact in TF32."""
    build, shapes, constants, _ = FUNCTIONS[name]
    function = tensor.function(build, *shapes, dtype="float32", constants=constants)
    made = tensor.tiled(function, tile)
    assert cuda_emulation.launch_of(made).cluster == (tile.slices, 1, 1)
    source = tensor.check(function, made, values=(tensor.positions,))
    assert "tvmf_mma_tf32(" in source


def groups() -> dict:
    """Merged and joined groups: several sums per element, outputs that end inside of tiles."""
    options = {"channels": 16, "spatial": 9, "dtype": "float16", "layout": "NHWC"}
    b = ModuleBuilder("float16", "NHWC")
    value = b.bias("bias0", b.conv("deep", b.input("x", (1, 9, 9, 32)), 32, 3, groups=32))
    separable = b.finish(b.conv("point", b.relu("relu0", value), 48, 1))
    merged = ("horizontal", "merged")
    return {
        "apart": (parallel_convs(3, join=None, outputs=[16, 32, 24], **options), *merged, "apart"),
        "concat": (parallel_convs(2, join="concat", **options), *merged, "concat"),
        "sum": (parallel_convs(3, relu=True, **options), *merged, "add"),
        "joined": (
            parallel_convs(3, relu=True, separate=True, **options),
            "cross",
            "joined",
            "add",
        ),
        "separable": (separable, "vertical", "back_to_back", ""),
    }


@pytest.mark.parametrize("tile", TILES[::2], ids=named)
@pytest.mark.parametrize("name", groups())
def test_groups(tensor, name, tile):
    module, strategy, form, join = groups()[name]
    options = {"form": form, "join": join} if join else {"form": form}
    function = tensor.group(module, strategy, **options)
    made = tensor.tiled(function, tile)
    tensor.check(function, made, values=(tensor.positions,), arch=arch_of(tile))


def test_the_order_of_the_sum_is_that_of_the_slices(tensor):
    """The same bits whichever thread runs first, and as slices that are added up one after the other."""
    function = tensor.function(
        lambda emit, a, b: emit(op.matmul(a, emit(op.permute_dims(b)))), (16, 512), (32, 512)
    )
    inputs = function.make(tensor.random)
    results = []
    for slices in (1, 4):
        tile = Tile(16, 32, 32, 1, 2, 1, 2, slices=slices)
        made = tensor.tiled(function, tile)
        target = tensor.target("sm_90")
        runs = [
            cuda_emulation.run(made, inputs, target, backward=backward)[0]
            for backward in (False, True)
        ]
        assert np.array_equal(*runs)
        results.append(runs[0].astype("float64"))
    expected = function.expect(inputs)[0]
    for result in results:
        assert np.abs(result - expected).max() <= 2.0**-10 * np.abs(expected).max()


# ---- the registry ----------------------------------------------------------------------------------


def seven(tensor):
    """ResNet's 3x3 convolution of 512 channels at 7x7, bias, ReLU."""
    b = ModuleBuilder("float16", "NHWC")
    value = b.bias("bias", b.conv("conv", b.input("x", (1, 7, 7, 512)), 512, 3))
    return tensor.group(b.finish(b.relu("relu", value)), "vertical")


def classifier(tensor):
    """A Linear of 4096 to 1000 of a few rows."""
    b = ModuleBuilder("float16")
    return tensor.group(b.finish(b.dense("dense", b.input("x", (8, 4096)), 1000)), "vertical")


def wide(tensor):
    """A convolution with enough tiles."""
    b = ModuleBuilder("float16", "NHWC")
    value = b.conv("conv", b.input("x", (1, 56, 56, 64)), 64, 3)
    return tensor.group(b.finish(b.relu("relu", value)), "vertical")


@pytest.mark.parametrize("make", [seven, classifier])
@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
def test_the_registry_splits(tensor, make, arch):
    function = make(tensor)
    made = tensor.scheduled(function, arch=arch)
    assert cuda_emulation.launch_of(made).cluster[0] in SLICES
    tensor.check(function, made, blocks=1, values=(tensor.random,), arch=arch)


def test_the_registry_does_not_split(tensor):
    function = wide(tensor)
    assert cuda_emulation.launch_of(tensor.scheduled(function)).cluster == (1, 1, 1)
    function = seven(tensor)
    assert cuda_emulation.launch_of(tensor.scheduled(function, arch="sm_80")).cluster == (1, 1, 1)


def test_members_of_a_kernel_are_no_clusters(tensor):
    function = seven(tensor)
    member = dataclasses.replace(function, func=function.func.with_attr(MEMBER, True))
    assert cuda_emulation.launch_of(tensor.scheduled(member)).cluster == (1, 1, 1)


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
@pytest.mark.parametrize("make", [seven, classifier])
def test_no_split_kernel_spills(tensor, make, arch):
    made = tensor.scheduled(make(tensor), arch=arch)
    threads = int(np.prod(cuda_emulation.launch_of(made).block))
    assert tensor.resources(made, arch).registers * threads <= 65536


@pytest.mark.nvcc
@pytest.mark.parametrize(
    "tile",
    [
        split(64, 128, 64, 2, 2, 2, 3, slices=8),
        split(128, 64, 64, 4, 1, 1, 3, slices=4),
        split(128, 192, 64, 8, 1, 1, 3, slices=8, warpgroup=True),
    ],
    ids=named,
)
def test_large_split_tiles_do_not_spill(tensor, tile):
    tensor.resources(tensor.tiled(seven(tensor), tile), arch_of(tile))
