"""What nvcc makes of tensor-core kernels at the sizes of real networks: no spills; sampled blocks give the values."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm_fusion.schedules.cuda.tensor_core.packing import pack
from tvm_fusion.schedules.cuda.tensor_core.recognition import products
from tvm_fusion.schedules.cuda.tensor_core.tile import problem_of

from tvm_fusion.guards.tensor_tiles import Tile
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs
from tvm_fusion.testing.transformer_blocks import head_projections

op = relax.op
ARCHS = ("sm_80", "sm_86", "sm_90", "sm_90a", "sm_120")


def block(size: int, channels: int, outputs: int, kernel: int, stride: int = 1, dtype="float16"):
    """Convolution, bias and ReLU."""
    b = ModuleBuilder(dtype, "NHWC")
    x = b.input("x", (1, size, size, channels))
    value = b.conv("conv", x, outputs, kernel, stride=stride)
    return b.finish(b.relu("relu", b.bias("bias", value)))


def cross(size: int, kernels: tuple[int, ...]):
    """Convolutions of one input, each with bias and ReLU, that meet in a sum and a ReLU."""
    b = ModuleBuilder("float16", "NHWC")
    x = b.input("x", (1, size, size, 64))
    parts = [
        b.relu(f"relu{i}", b.bias(f"bias{i}", b.conv(f"conv{i}", x, 64, kernel)))
        for i, kernel in enumerate(kernels)
    ]
    return b.finish(b.relu("relu", b.add("add", *parts)))


def dense(rows: int, inner: int, columns: int, activation=None):
    """A product with bias and perhaps an activation."""
    b = ModuleBuilder("float16")
    value = b.dense("dense", b.input("x", (rows, inner)), columns)
    return b.finish(b.op("activation", activation(value)) if activation else value)


def separable(size: int, channels: int, outputs: int):
    """MobileNet's depthwise and pointwise convolutions."""
    b = ModuleBuilder("float16", "NHWC")
    value = b.input("x", (1, size, size, channels))
    value = b.conv("deep", value, channels, 3, groups=channels)
    value = b.op("six0", op.clip(b.bias("bias0", value), 0, 6))
    value = b.bias("bias1", b.conv("point", value, outputs, 1))
    return b.finish(b.op("six1", op.clip(value, 0, 6)))


def convs(members: int, **options):
    """Parallel convolutions, 64 channels."""
    return parallel_convs(members, **{"dtype": "float16", "layout": "NHWC", **options})


VERTICAL, JOINED = ("vertical", {}), ("cross", {"form": "joined"})

#: name: module, (strategy, options).
REAL = {
    "four convolutions": (
        lambda: convs(4),
        ("horizontal", {"form": "collapsed"}),
    ),
    "four convolutions, ReLU": (
        lambda: convs(4, relu=True),
        ("horizontal", {"form": "merged", "join": "add"}),
    ),
    "cross 3 and 1": (lambda: cross(56, (3, 1)), JOINED),
    "cross 3 and 3": (lambda: cross(128, (3, 3)), JOINED),
    "24 projections": (
        lambda: head_projections(tokens=512, dtype="float16"),
        ("horizontal", {"form": "merged", "join": "apart"}),
    ),
    "depthwise and pointwise": (
        lambda: separable(112, 32, 64),
        ("vertical", {"form": "back_to_back"}),
    ),
    "ResNet 56": (lambda: block(56, 64, 64, 3), VERTICAL),
    "ResNet 7": (lambda: block(7, 512, 512, 3), VERTICAL),
    "ResNet 28, strided": (lambda: block(56, 128, 128, 3, 2), VERTICAL),
    "few rows": (lambda: dense(32, 1024, 4096), VERTICAL),
    "many rows, GELU": (lambda: dense(4096, 768, 3072, op.nn.gelu), VERTICAL),
    "bfloat16": (lambda: block(14, 256, 256, 3, dtype="bfloat16"), VERTICAL),
}


def kernel(tensor, name: str, arch: str):
    """The registry's kernel of one of the groups above, and its function."""
    make, (strategy, options) = REAL[name]
    dtype = "bfloat16" if name == "bfloat16" else "float16"
    function = tensor.group(make(), strategy, dtype, **options)
    return function, tensor.scheduled(function, arch=arch)


def check_registers(tensor, scheduled, arch: str) -> None:
    """No spills, and registers for all threads of a block."""
    threads = int(np.prod(cuda_emulation.launch_of(scheduled).block))
    assert tensor.resources(scheduled, arch).registers * threads <= 65536


@pytest.mark.nvcc
@pytest.mark.parametrize("name", REAL)
def test_no_kernel_spills(tensor, name):
    _, scheduled = kernel(tensor, name, "sm_90")
    check_registers(tensor, scheduled, "sm_90")


@pytest.mark.slow
@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", REAL)
def test_no_kernel_spills_on_other_archs(tensor, name, arch):
    _, scheduled = kernel(tensor, name, arch)
    check_registers(tensor, scheduled, arch)


#: Those whose reference takes seconds.
LARGE = ("four convolutions", "four convolutions, ReLU", "cross 3 and 3", "many rows, GELU")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LARGE else ()) for n in REAL]
)
def test_sampled_blocks_of_real_sizes(tensor, name):
    function, scheduled = kernel(tensor, name, "sm_90")
    tensor.check(function, scheduled, blocks=9, values=(tensor.random,))


@pytest.mark.nvcc
@pytest.mark.parametrize(
    "tile",
    [Tile(128, 128, 32, 2, 4, 1, 3), Tile(128, 64, 64, 2, 2, 2, 3), Tile(64, 256, 32, 2, 4, 1, 2)],
)
def test_the_largest_tiles_do_not_spill(tensor, tile):
    """As many sums in a thread as the search allows."""
    function = tensor.group(dense(512, 512, 512), "vertical")
    tensor.resources(tensor.tiled(function, tile), "sm_80")


def test_shared_memory_is_what_the_tile_says(tensor):
    function = tensor.group(dense(512, 512, 512), "vertical")
    form, _ = pack(products(function.func), set(function.constants))
    for tile in (Tile(64, 64, 64, 2, 2, 1, 3), Tile(32, 32, 128, 1, 1, 4, 2)):
        launch = cuda_emulation.launch_of(tensor.tiled(function, tile))
        assert launch.shared == tile.shared_bytes(problem_of(form))
        assert np.prod(launch.block) == tile.threads
        assert launch.grid == (tile.blocks(problem_of(form)), 1, 1)
