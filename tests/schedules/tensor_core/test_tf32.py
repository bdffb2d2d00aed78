"""Float32 products in TF32: within its error bound, beyond float32's; and none where it is not asked for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tvm import relax
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.cuda.tensor_core.access import access_of
from tvm_fusion.schedules.cuda.tensor_core.evaluate import integer
from tvm_fusion.schedules.cuda.tensor_core.recognition import products

from tvm_fusion.compat import structural_equal
from tvm_fusion.devices import DEVICES
from tvm_fusion.guards.tensor_tiles import Tile, best_tiles, predict
from tvm_fusion.guards.warpgroup_tiles import best_choices
from tvm_fusion.targets import parse_target, with_products
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs
from tvm_fusion.testing.transformer_blocks import dense_norm

op = relax.op
LAST = {"data_layout": "NHWC", "kernel_layout": "OHWI"}


def conv(emit, data, weight, **attrs):
    """A convolution, channels last."""
    return emit(op.nn.conv2d(data, weight, **LAST, **attrs))


def product(emit, left, right):
    """A product alone."""
    return emit(op.matmul(left, right))


def turned(emit, left, right):
    """The right operand has the reduction innermost."""
    return emit(op.matmul(left, emit(op.permute_dims(right))))


def turned_left(emit, left, right):
    """The left operand has the rows innermost, the right one the columns."""
    return emit(op.matmul(emit(op.permute_dims(left)), right))


def block(emit, data, weight, bias, **attrs):
    """ReLU, convolution, bias, ReLU."""
    total = conv(emit, emit(op.nn.relu(data)), weight, **attrs)
    return emit(op.nn.relu(emit(op.add(total, bias))))


def dense_gelu(emit, data, weight, bias):
    """Bias and the GELU with erf."""
    return emit(op.nn.gelu(emit(op.add(emit(op.matmul(data, weight)), bias))))


#: What is linear in each operand, so that its error bound is 2**-10 of the same function of absolute values.
LINEAR = {
    "3x3": (lambda *a: conv(*a, padding=1), ((1, 14, 14, 16), (24, 3, 3, 16)), ()),
    "strided, 3 channels": (
        lambda *a: conv(*a, padding=1, strides=2),
        ((1, 15, 15, 3), (24, 3, 3, 3)),
        (),
    ),
    "5 channels to 13": (lambda *a: conv(*a, padding=1), ((1, 9, 9, 5), (13, 3, 3, 5)), ()),
    "matmul": (product, ((65, 96), (96, 72)), ()),
    "matmul packed": (product, ((33, 70), (70, 21)), (1,)),
    "matmul turned": (turned, ((40, 50), (30, 50)), ()),
    "left turned": (turned_left, ((40, 48), (40, 64)), ()),
    "batched": (product, ((2, 33, 36), (2, 36, 40)), ()),
}
#: With what stands before and after the sums.
FUSED = {
    "block": (
        lambda *a: block(*a, padding=1),
        ((1, 9, 9, 16), (24, 3, 3, 16), (24,)),
        (),
    ),
    "gelu": (dense_gelu, ((50, 64), (64, 96), (96,)), (1,)),
}


def target(arch: str, products: str = "tf32"):
    """A target that allows TF32, or not."""
    return with_products(parse_target(f"cuda:{arch}"), products)


def scheduled(function, arch: str = "sm_80", template: str = "tensor_core"):
    """The kernel in TF32."""
    made, name = schedule(function.func, target(arch))
    assert name == template
    return made


def errors(tensor, function, made) -> tuple[np.ndarray, np.ndarray]:
    """Errors of random values, and the values."""
    inputs = function.make(tensor.random)
    (result,), (expected,) = tensor.run(made, inputs, "sm_80"), function.expect(inputs)
    return np.abs(result.astype("float64") - expected), expected


@pytest.mark.parametrize("name", LINEAR)
def test_values_within_the_bound_and_beyond_float32(tensor, name):
    build, shapes, constants = LINEAR[name]
    function = tensor.function(build, *shapes, dtype="float32", constants=constants)
    made = scheduled(function)
    # Small whole numbers are exact, so that a wrong place shows.
    tensor.check(function, made, values=(tensor.positions,), arch="sm_80")
    found, expected = errors(tensor, function, made)
    (bound,) = function.expect([np.abs(array) for array in function.make(tensor.random)])
    assert (found <= 2.0**-10 * 1.01 * bound).all()
    assert found.max() > 2.0**-16 * np.abs(expected).max()


@pytest.mark.parametrize("name", FUSED)
def test_values_with_an_epilogue(tensor, name):
    build, shapes, constants = FUSED[name]
    function = tensor.function(build, *shapes, dtype="float32", constants=constants)
    made = scheduled(function, "sm_90")
    tensor.check(function, made, values=(tensor.positions,), arch="sm_90", tolerance=8.0)
    found, expected = errors(tensor, function, made)
    assert 2.0**-16 < found.max() / np.abs(expected).max() < 2.0**-9


def groups() -> dict:
    """Groups in every form that the template takes, and what makes them."""
    options = {"channels": 12, "spatial": 9, "layout": "NHWC"}
    b = ModuleBuilder("float32", "NHWC")
    value = b.bias("bias0", b.conv("deep", b.input("x", (1, 9, 9, 32)), 32, 3, groups=32))
    separable = b.finish(b.conv("point", b.relu("relu0", value), 48, 1))
    b = ModuleBuilder("float32", "NHWC")
    grouped = b.finish(b.conv("conv", b.input("x", (1, 14, 14, 64)), 64, 3, groups=4))
    return {
        "grouped": (grouped, "", ""),
        "apart": (parallel_convs(2, join=None, outputs=[16, 24], **options), "merged", "apart"),
        "sum": (parallel_convs(3, relu=True, **options), "merged", "add"),
        "joined": (parallel_convs(2, relu=True, separate=True, **options), "joined", "add"),
        "separable": (separable, "back_to_back", ""),
        "rows": (dense_norm(rows=24, width=64, outputs=96), "anchor_row", ""),
    }


def group(tensor, name: str):
    """One of the groups above."""
    module, form, join = groups()[name]
    options = {key: value for key, value in (("form", form), ("join", join)) if value}
    strategy = {"merged": "horizontal", "joined": "cross"}.get(form, "vertical")
    return tensor.group(module, strategy, "float32", **options)


@pytest.mark.parametrize("name", groups())
def test_groups(tensor, name):
    function = group(tensor, name)
    made = scheduled(function, "sm_90", "tensor_rows" if name == "rows" else "tensor_core")
    inputs = function.make(tensor.random)
    found = tensor.run(made, inputs, "sm_90")
    for result, expected in zip(found, function.expect(inputs), strict=True):
        error = np.abs(result.reshape(expected.shape) - expected).max() / np.abs(expected).max()
        assert 2.0**-16 < error < 2.0**-8


#: rows, columns, depth, warp_rows, warp_columns, warp_depth, stages.
TILES = [
    Tile(16, 16, 16, 1, 1, 2, 2),
    Tile(32, 96, 32, 1, 3, 2, 3),
    Tile(64, 48, 64, 4, 1, 1, 2),
    Tile(128, 64, 16, 8, 1, 1, 4),
]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", ["left turned", "strided, 3 channels"])
def test_tiles(tensor, name, tile):
    build, shapes, constants = LINEAR[name]
    function = tensor.function(build, *shapes, dtype="float32", constants=constants)
    tensor.check(function, tensor.tiled(function, tile), values=(tensor.positions,), arch="sm_80")


# ---- rounding --------------------------------------------------------------------------------------


def rounded(tensor, name: str, value: float) -> np.ndarray:
    """Sums of 96 of a value, of which one operand is made and the other is ones."""
    build, shapes, constants = LINEAR[name]
    function = tensor.function(build, *shapes, dtype="float32", constants=constants)
    inputs = [np.full(shapes[0], value, "float32"), np.ones(shapes[1], "float32")]
    return tensor.run(scheduled(function), inputs, "sm_80")[0]


@pytest.mark.parametrize("name", ["matmul", "left turned"])
def test_operands_are_rounded_to_nearest(tensor, name):
    """Without rounding, the hardware would cut 1 + 3/4 * 2**-10 off to 1."""
    depth = LINEAR[name][1][0][-1 if name == "matmul" else 0]
    assert (rounded(tensor, name, 1 + 0.75 * 2.0**-10) == depth * (1 + 2.0**-10)).all()
    assert (rounded(tensor, name, -1 - 0.75 * 2.0**-10) == -depth * (1 + 2.0**-10)).all()
    assert (rounded(tensor, name, 1 + 0.25 * 2.0**-10) == depth).all()


def test_what_is_no_number_stays_what_it_is(tensor):
    """A NaN of all ones would become zero, were it rounded."""
    build, shapes, _ = LINEAR["matmul"]
    function = tensor.function(build, *shapes, dtype="float32")
    left, right = np.ones(shapes[0], "float32"), np.ones(shapes[1], "float32")
    left[0, 0], left[1, 1] = np.inf, -np.inf
    left[2, 2] = np.array(0x7FFFFFFF, "uint32").view("float32")
    (result,) = tensor.run(scheduled(function), [left, right], "sm_80")
    assert (result[0] == np.inf).all() and (result[1] == -np.inf).all()
    assert np.isnan(result[2]).all() and (result[3:] == shapes[0][1]).all()


# ---- where it is not asked for, or not possible ----------------------------------------------------


def test_by_default_products_are_exact(tensor):
    for build, shapes, constants in (*LINEAR.values(), *FUSED.values()):
        function = tensor.function(build, *shapes, dtype="float32", constants=constants)
        for arch in ("sm_80", "sm_90a"):
            made, name = schedule(function.func, parse_target(f"cuda:{arch}"))
            assert name == "multiply_add"
            assert "tf32" not in made.script()
    function = group(tensor, "rows")
    assert schedule(function.func, parse_target("cuda:sm_90"))[1] != "tensor_rows"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_narrow_kernels_are_the_same(tensor, dtype, arch):
    for build, shapes, constants in (LINEAR["3x3"], LINEAR["batched"], FUSED["gelu"]):
        function = tensor.function(build, *shapes, dtype=dtype, constants=constants)
        exact, name = schedule(function.func, parse_target(f"cuda:{arch}"))
        other, same = schedule(function.func, target(arch))
        assert name == same == "tensor_core"
        assert structural_equal(exact, other)


def test_what_tensor_cores_do_not_take_is_exact(tensor):
    """Channels first, a short reduction, few rows; and chips without TF32."""

    def first(emit, data, weight):
        return emit(op.nn.conv2d(data, weight, padding=1))

    for build, shapes in (
        (first, ((1, 16, 9, 9), (24, 16, 3, 3))),
        (product, ((64, 12), (12, 64))),
        (product, ((3, 64), (64, 64))),
    ):
        function = tensor.function(build, *shapes, dtype="float32")
        made, _ = schedule(function.func, target("sm_80"))
        assert "tf32" not in made.script()
    for other in (parse_target("cuda:sm_75"), parse_target("llvm")):
        assert with_products(other, "tf32").same_as(other)


# ---- tiles and resources ---------------------------------------------------------------------------


def test_the_model_knows_elements_of_four_bytes(tensor):
    wide = tensor.function(product, (512, 512), (512, 512), dtype="float32", constants=(1,))
    narrow = tensor.function(product, (512, 512), (512, 512), dtype="float16", constants=(1,))
    problem, half = tensor.problem(wide), tensor.problem(narrow)
    assert (problem.element_bytes, problem.instruction_depth) == (4, 8)
    assert dataclasses.replace(problem, element_bytes=2) == half
    for arch in ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120"):
        device = DEVICES[arch]
        chosen = best_tiles(problem, device)[0]
        assert chosen.tile.depth in (16, 32, 64)
        assert chosen.tile.shared_bytes(problem) <= device.shared_memory_per_block_optin
        # As deep in bytes, twice the work: slower, but not by more than that.
        same = dataclasses.replace(chosen.tile, depth=2 * chosen.tile.depth)
        assert 1 < chosen.microseconds / predict(half, device, same) < 3.0
        assert not any(c.tile.warpgroup for c in best_choices(problem, device, 50))


def test_rows_of_32_bit_words_are_exchanged_in_pairs(tensor):
    """Four rows and two pieces of each, which a warp reads at once, lie in different banks."""
    build, shapes, _ = LINEAR["left turned"]
    form = products(tensor.function(build, *shapes, dtype="float32").func)
    (anchor,) = form.anchors
    access = access_of(anchor.rows, form.rows, anchor.reduced)
    assert (access.major, access.size, access.width) == ("mn", 4, 4)
    for pieces in (8, 16, 24, 12, 4):
        for first in range(0, pieces, 2):
            banks = set()
            for row in range(4):
                change = int(access.swizzle(integer(row), 16 * pieces))
                banks |= {(row * pieces + (first + i ^ change)) % 8 for i in range(2)}
            assert len(banks) == 8


def large(name: str):
    """Groups of the sizes of networks."""
    if name == "convolutions, ReLU":
        return parallel_convs(4, relu=True, layout="NHWC"), {"form": "merged", "join": "add"}
    b = ModuleBuilder("float32", "NHWC")
    if name == "dense":
        value = b.dense("dense", b.input("x", (4096, 768)), 3072)
        return b.finish(b.op("gelu", op.nn.gelu(value))), {}
    value = b.conv("conv", b.input("x", (1, 56, 56, 64)), 64, 3)
    return b.finish(b.relu("relu", b.bias("bias", value))), {}


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", ["convolution", "convolutions, ReLU", "dense"])
def test_no_kernel_spills(tensor, name, arch):
    module, options = large(name)
    function = tensor.group(module, "horizontal" if options else "vertical", "float32", **options)
    tensor.resources(scheduled(function, arch), arch)


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("tile", [Tile(128, 128, 16, 2, 4, 1, 3), Tile(128, 64, 32, 2, 2, 2, 3)])
@pytest.mark.parametrize("name", ["matmul", "left turned"])
def test_the_largest_tiles_do_not_spill(tensor, name, tile, arch):
    build, _, _ = LINEAR[name]
    function = tensor.function(build, (512, 512), (512, 512), dtype="float32")
    made = tensor.tiled(function, tile)
    source = tensor.source(made, arch)
    assert "mma.sync.aligned.m16n8k8.row.col.f32.tf32" in source
    tensor.resources(made, arch)
