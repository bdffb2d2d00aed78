"""Every tile gives the same values: fixed ones over several functions, then random shapes and tiles."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st
from tvm import relax

from tvm_fusion.devices import DEVICES, capability
from tvm_fusion.guards.tensor_tiles import Problem, Tile, best_tiles
from tvm_fusion.guards.warpgroup_tiles import warpgroup_tiles
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs

op = relax.op
LAST = {"data_layout": "NHWC", "kernel_layout": "OHWI"}

#: Most shared memory of a block on the chip with least (sm_86).
_SMALL = 99 * 1024

#: rows, columns, depth, warp_rows, warp_columns, warp_depth, stages.
TILES = [
    Tile(16, 16, 32, 1, 1, 2, 2),
    Tile(16, 64, 64, 1, 4, 1, 3),
    Tile(16, 48, 128, 1, 3, 1, 2),
    Tile(32, 32, 64, 2, 1, 4, 2),
    Tile(32, 96, 32, 1, 3, 2, 6),
    Tile(64, 16, 128, 4, 1, 2, 2),
    Tile(64, 64, 32, 2, 2, 1, 4),
    Tile(64, 128, 64, 2, 2, 2, 3),
    Tile(128, 32, 64, 4, 1, 1, 6),
    Tile(128, 64, 32, 8, 1, 1, 3),
    Tile(256, 32, 32, 4, 1, 2, 2),
]

#: Tiles that warpgroups multiply, where both operands have the reduction innermost.
WARPGROUPS = [
    Tile(64, 16, 64, 4, 1, 1, 3, warpgroup=True),
    Tile(64, 48, 64, 4, 1, 1, 4, warpgroup=True),
    Tile(64, 128, 64, 4, 2, 1, 3, warpgroup=True),
    Tile(128, 32, 64, 8, 1, 1, 6, warpgroup=True),
    Tile(128, 96, 64, 8, 1, 1, 3, warpgroup=True),
]


def named(tile: Tile) -> str:
    """A tile's sizes."""
    kind = "wgmma-" if tile.warpgroup else ""
    return kind + "-".join(map(str, dataclasses.astuple(tile)[:7]))


def convolution(emit, data, weight, bias):
    """A strided 3x3 convolution with bias and ReLU."""
    total = emit(op.nn.conv2d(data, weight, padding=1, strides=2, **LAST))
    return emit(op.nn.relu(emit(op.add(total, bias))))


def plain(emit, left, right):
    """A product whose operands have rows and columns innermost."""
    return emit(op.matmul(emit(op.permute_dims(left)), right))


def before(emit, left, right):
    """A product of computed rows."""
    return emit(op.matmul(emit(op.nn.relu(left)), emit(op.permute_dims(right))))


def batched(emit, left, right, bias):
    """Products with a bias per column."""
    return emit(op.add(emit(op.matmul(left, right)), bias))


FUNCTIONS = {
    "convolution": (convolution, ((1, 15, 15, 24), (40, 3, 3, 24), (40,)), ()),
    "18 to 21 channels": (convolution, ((1, 15, 9, 18), (21, 3, 3, 18), (21,)), ()),
    "mn operands": (plain, ((136, 72), (136, 104)), ()),
    "computed rows": (before, ((65, 72), (24, 72)), ()),
    "batched packed": (batched, ((2, 33, 72), (2, 72, 36), (36,)), (1,)),
}


def pairs(names, tiles) -> list:
    """Every name with every tile; a third of them, each tile and name among them, is not slow."""
    return [
        pytest.param(
            name, tile, id=f"{name}-{named(tile)}", marks=pytest.mark.slow if (i + j) % 3 else ()
        )
        for i, name in enumerate(names)
        for j, tile in enumerate(tiles)
    ]


@pytest.mark.parametrize(("name", "tile"), pairs(FUNCTIONS, TILES + WARPGROUPS))
def test_functions(tensor, name, tile):
    build, shapes, constants = FUNCTIONS[name]
    function = tensor.function(build, *shapes, constants=constants)
    if tile.warpgroup and name == "mn operands":
        assert not warpgroup_tiles(tensor.problem(function), DEVICES["sm_90"])
        return
    tensor.check(
        function, tensor.tiled(function, tile), values=(tensor.positions,), arch=arch_of(tile)
    )


def arch_of(tile: Tile) -> str:
    """An arch that has a tile's instructions."""
    return "sm_90a" if tile.warpgroup else "sm_90"


def groups() -> dict:
    """Merged and joined groups: several sums per element, outputs that end inside of tiles."""
    options = {"channels": 16, "spatial": 9, "dtype": "float16", "layout": "NHWC"}
    b = ModuleBuilder("float16", "NHWC")
    value = b.bias("bias0", b.conv("deep", b.input("x", (1, 9, 9, 32)), 32, 3, groups=32))
    separable = b.finish(b.conv("point", b.relu("relu0", value), 48, 1))
    return {
        "apart": (parallel_convs(3, join=None, outputs=[16, 32, 24], **options), "merged", "apart"),
        "concat": (parallel_convs(2, join="concat", **options), "merged", "concat"),
        "sum": (parallel_convs(3, relu=True, **options), "merged", "add"),
        "joined": (parallel_convs(3, relu=True, separate=True, **options), "joined", "add"),
        "separable": (separable, "back_to_back", ""),
    }


@pytest.mark.parametrize(("name", "tile"), pairs(groups(), TILES + WARPGROUPS))
def test_groups(tensor, name, tile):
    module, form, join = groups()[name]
    options = {"form": form, "join": join} if join else {"form": form}
    strategy = {"merged": "horizontal", "joined": "cross"}.get(form, "vertical")
    function = tensor.group(module, strategy, **options)
    tensor.check(
        function, tensor.tiled(function, tile), values=(tensor.positions,), arch=arch_of(tile)
    )


# ---- random shapes and tiles -----------------------------------------------------------------------


def sliced(draw, tile: Tile) -> Tile:
    """The tile, whose reduction several blocks share in one case of three, if it can be divided among them."""
    slices = draw(st.sampled_from([1, 1, 1, 1, 2, 4]))
    divides = 2 * tile.row_fragments * tile.column_fragments % slices == 0
    return dataclasses.replace(tile, slices=slices if divides else 1)


@st.composite
def tiles(draw) -> Tile:
    """A tile that the search may choose, in the shared memory of a small chip."""
    if draw(st.integers(0, 3)) == 0:
        rows, stages = draw(st.sampled_from([1, 2])), draw(st.sampled_from([3, 4]))
        columns = draw(st.sampled_from([(16, 1), (32, 1), (48, 1), (64, 1), (96, 1), (128, 2)]))
        tile = Tile(64 * rows, columns[0], 64, 4 * rows, columns[1], 1, stages, warpgroup=True)
        return sliced(draw, tile)
    warps = draw(
        st.sampled_from(
            [
                (rows, columns, depth)
                for rows in (1, 2, 4)
                for columns in (1, 2, 3, 4)
                for depth in (1, 2, 4)
                if 2 <= rows * columns * depth <= 8
            ]
        )
    )
    rows = 16 * warps[0] * draw(st.sampled_from([1, 2]))
    columns = 16 * warps[1] * draw(st.sampled_from([1, 2, 3]))
    depth = draw(st.sampled_from([d for d in (32, 64, 128) if d // 16 % warps[2] == 0]))
    tile = sliced(draw, Tile(rows, columns, depth, *warps, draw(st.sampled_from([2, 3, 4, 6]))))
    hypothesis.assume(tile.shared_bytes(Problem(1, 1, 1, (1,), (1,))) <= _SMALL)
    return tile


@st.composite
def matrix_products(draw) -> tuple:
    """Layouts and sizes of a product, with what is before and after it."""
    rows, columns = draw(st.integers(4, 80)), draw(st.integers(8, 72))
    depth = draw(st.integers(16, 150))
    batch = draw(st.sampled_from([(), (), (2,), (3, 1)]))
    left, right = draw(st.booleans()), draw(st.booleans())
    relu, bias = draw(st.booleans()), draw(st.booleans())
    packed = draw(st.booleans())
    if not packed and not right:
        columns = -(-columns // 8) * 8
    else:
        depth = -(-depth // 2) * 2
    if left and draw(st.booleans()):
        rows = -(-rows // 8) * 8

    def build(emit, a, b, *rest):
        if relu:
            a = emit(op.nn.relu(a))
        rank = len(batch)
        swap = [*range(rank), rank + 1, rank]
        a = emit(op.permute_dims(a, swap)) if left else a
        b = emit(op.permute_dims(b, swap)) if right else b
        total = emit(op.matmul(a, b))
        return emit(op.add(total, rest[0])) if rest else total

    shapes = [
        (*batch, depth, rows) if left else (*batch, rows, depth),
        (*batch, columns, depth) if right else (*batch, depth, columns),
    ]
    if bias:
        shapes.append((columns,))
    return build, tuple(shapes), (1,) if packed else ()


@st.composite
def convolutions(draw) -> tuple:
    """Windows, strides, dilations, paddings and channels of a convolution."""
    inner, outer = 2 * draw(st.integers(1, 20)), draw(st.integers(8, 40))
    window = [draw(st.integers(1, 4)) for _ in range(2)]
    hypothesis.assume(inner * window[0] * window[1] >= 16)
    dilation = [draw(st.integers(1, 2)) for _ in range(2)]
    size = [draw(st.integers(d * (w - 1) + 1, 11)) for w, d in zip(window, dilation, strict=True)]
    attrs = {
        "strides": [draw(st.integers(1, 3)) for _ in range(2)],
        "padding": [draw(st.integers(0, 2)) for _ in range(4)],
        "dilation": dilation,
    }
    relu, residual = draw(st.booleans()), draw(st.booleans())
    packed = draw(st.booleans())
    layout = "HWIO" if packed and draw(st.booleans()) else "OHWI"

    def build(emit, data, weight, *rest):
        data = emit(op.nn.relu(data)) if relu else data
        total = emit(op.nn.conv2d(data, weight, data_layout="NHWC", kernel_layout=layout, **attrs))
        return emit(op.add(total, rest[0])) if rest else total

    weight = (*window, inner, outer) if layout == "HWIO" else (outer, *window, inner)
    shapes = [(draw(st.integers(1, 2)), *size, inner), weight]
    out = [
        (s + p + q - d * (w - 1) - 1) // stride + 1
        for s, p, q, d, w, stride in zip(
            size, attrs["padding"][:2], attrs["padding"][2:], dilation, window, attrs["strides"],
            strict=True,
        )
    ]  # fmt: skip
    hypothesis.assume(shapes[0][0] * out[0] * out[1] >= 4)
    if residual:
        shapes.append((shapes[0][0], *out, outer))
    return build, tuple(shapes), (1,) if packed else ()


def check_random(tensor, made: tuple, tile: Tile) -> None:
    """Check one function with one tile."""
    build, shapes, constants = made
    function = tensor.function(build, *shapes, constants=constants)
    problem = tensor.problem(function)
    if tile.warpgroup:
        hypothesis.assume(warpgroup_tiles(problem, DEVICES["sm_90"]))
    made = tensor.tiled(function, tile)
    tensor.check(function, made, values=(tensor.positions,), arch=arch_of(tile))


@hypothesis.settings(max_examples=8)
@hypothesis.given(matrix_products(), tiles())
def test_random_products(tensor, made, tile):
    check_random(tensor, made, tile)


@hypothesis.settings(max_examples=8)
@hypothesis.given(convolutions(), tiles())
def test_random_convolutions(tensor, made, tile):
    check_random(tensor, made, tile)


@pytest.mark.slow
@hypothesis.settings(max_examples=200)
@hypothesis.given(matrix_products(), tiles())
def test_many_random_products(tensor, made, tile):
    check_random(tensor, made, tile)


@pytest.mark.slow
@hypothesis.settings(max_examples=200)
@hypothesis.given(convolutions(), tiles())
def test_many_random_convolutions(tensor, made, tile):
    check_random(tensor, made, tile)


# ---- the search ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [arch for arch in DEVICES if capability(arch) >= 80])
def test_the_search_keeps_to_the_chip(arch):
    device = DEVICES[arch]
    for problem in (
        Problem(3136, 64, 1, (576,), (1,)),
        Problem(32, 4096, 1, (1024,), (1,)),
        Problem(16384, 64, 1, (576,), (4,)),
        Problem(512, 1536, 1, (512,), (1,), 64),
        Problem(7, 10, 12, (17, 300), (1, 1)),
        Problem(12544, 512, 1, (32,), (1,), 0, 512),
    ):
        for choice in best_tiles(problem, device, 40):
            tile = choice.tile
            assert tile.shared_bytes(problem) <= device.shared_memory_per_block_optin
            assert tile.requested_bytes(problem, device) <= device.shared_memory_per_block_optin
            assert 64 <= tile.threads <= 256
            assert tile.rows % (16 * tile.warp_rows) == 0
            assert tile.columns % (16 * tile.warp_columns) == 0
            assert tile.depth % (16 * tile.warp_depth) == 0
            assert tile.columns >= min(problem.least_columns, 256)
            assert not problem.part or problem.part % (tile.columns // tile.warp_columns) == 0
            assert choice.microseconds > 0


def test_a_larger_problem_takes_longer():
    device = DEVICES["sm_90"]
    times = [
        best_tiles(Problem(rows, 1024, 1, (1024,), (1,)), device)[0].microseconds
        for rows in (64, 512, 4096, 32768)
    ]
    assert times == sorted(times)
    assert times[-1] > 20 * times[0]
