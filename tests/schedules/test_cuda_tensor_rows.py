"""Products on tensor cores whose rows are reduced, in a block or a cluster; values by emulation, resources by nvcc."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from tvm import relax
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.base import CONSTANTS, PACKED
from tvm_fusion.schedules.cuda.tensor_core.row_form import row_products
from tvm_fusion.schedules.cuda.tensor_core.row_kernel import (
    blocks_of_row,
    row_blocks,
    row_kernel,
    row_shared_bytes,
)
from tvm_fusion.schedules.cuda.tensor_core.row_template import row_problem

from tvm_fusion.build.ptxas import kernel_resources
from tvm_fusion.devices import device_for
from tvm_fusion.guards.clusters import most_blocks
from tvm_fusion.guards.tensor_rows import best_row_tiles, row_tile_bytes
from tvm_fusion.guards.tensor_tiles import Tile
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.modules import as_group
from tvm_fusion.testing.transformer_blocks import dense_norm, dense_norm_heads
from tvm_fusion.transform.legalize_horizontal import emit_unstack_store
from tvm_fusion.verification.reference import Reference

op = relax.op


def norm(emit, data, weight, bias, gamma, beta):
    """Dense layer, bias, layer norm, ReLU."""
    total = emit(op.add(emit(op.matmul(data, weight)), bias))
    return emit(op.nn.relu(emit(op.nn.layer_norm(total, gamma, beta, axes=[-1]))))


def residual_norm(emit, data, weight, bias, other, gamma, beta):
    """Dense layer, bias, residual, which is a result itself, layer norm: the end of a block of BERT."""
    total = emit(op.add(emit(op.add(emit(op.matmul(data, weight)), bias)), other))
    return total, emit(op.nn.layer_norm(total, gamma, beta, axes=[-1]))


def own_residual(emit, data, weight, gamma, beta):
    """The product's own input as the residual."""
    total = emit(op.add(emit(op.matmul(data, weight)), data))
    return emit(op.nn.layer_norm(total, gamma, beta, axes=[-1]))


def scores(emit, query, key):
    """Scaled products of queries and keys, softmax."""
    total = emit(op.matmul(query, emit(op.permute_dims(key, [0, 1, 3, 2]))))
    scale = relax.const(0.125, str(query.ty.dtype))
    return emit(op.nn.softmax(emit(op.multiply(total, scale))))


def classes(emit, data, weight):
    """Product and softmax, nothing between them."""
    return emit(op.nn.softmax(emit(op.matmul(data, weight))))


def gated_norm(emit, data, weight, gamma):
    """A prologue, SiLU, RMS norm, and an epilogue."""
    total = emit(op.nn.silu(emit(op.matmul(emit(op.nn.relu(data)), weight))))
    return emit(op.tanh(emit(op.nn.rms_norm(total, gamma, axes=[-1]))))


def reduced(emit, data, weight, operator=op.sum, **attrs):
    """A number for each row."""
    return emit(op.sigmoid(emit(operator(emit(op.matmul(data, weight)), [-1], **attrs))))


def members(builder, data, weight):
    """Softmax of each member of a stacked product, returned apart."""
    value = builder.emit(op.nn.softmax(builder.emit(op.matmul(data, weight))))
    parts = builder.emit(emit_unstack_store(builder, value))
    return [builder.emit(relax.TupleGetItem(parts, k)) for k in range(int(weight.ty.shape[0]))]


def case(name, build, shapes, tile, outputs=1, with_builder=False, **attrs):
    """A function with a tile: rows, columns, depth, warps along each, stages."""

    def make(emit, *inputs):
        return build(emit, *inputs, **attrs)

    return pytest.param(make, shapes, Tile(*tile), outputs, with_builder, id=name)


VECTOR = (96,)
CASES = [
    case("one block", norm, [(32, 64), (64, 96), VECTOR, VECTOR, VECTOR], (32, 96, 32, 2, 3, 1, 3)),
    case("cluster", norm, [(32, 64), (64, 96), VECTOR, VECTOR, VECTOR], (16, 32, 32, 1, 2, 1, 3)),
    case("lone warp a row", norm, [(32, 64), (64, 16), *[(16,)] * 3], (32, 16, 32, 2, 1, 1, 2)),
    case("tails", norm, [(37, 50), (50, 84), *[(84,)] * 3], (32, 32, 32, 1, 2, 1, 2)),
    case("empty block", norm, [(16, 32), (32, 66), *[(66,)] * 3], (16, 32, 32, 1, 2, 1, 2)),
    case("depth shared by rows", norm, [(16, 64), (64, 64), *[(64,)] * 3], (16, 32, 32, 1, 2, 2, 3)),
    case(
        "depth shared by columns", norm, [(16, 64), (64, 64), *[(64,)] * 3], (16, 32, 64, 1, 1, 4, 2)
    ),
    case(
        "residual kept", residual_norm, [(24, 40), (40, 72), (72,), (24, 72), (72,), (72,)],
        (16, 48, 32, 1, 1, 2, 3), 2,
    ),
    case("own residual", own_residual, [(24, 64), (64, 64), (64,), (64,)], (16, 32, 32, 1, 2, 1, 2)),
    case("scores", scores, [(1, 3, 40, 16), (1, 3, 48, 16)], (32, 48, 32, 2, 3, 1, 2)),
    case("softmax", classes, [(37, 64), (64, 100)], (16, 32, 64, 1, 2, 2, 2)),
    case("batched", classes, [(3, 10, 24), (3, 24, 50)], (16, 64, 32, 1, 2, 1, 2)),
    case("log softmax", lambda e, x, w: e(op.nn.log_softmax(e(op.matmul(x, w)))),
         [(9, 32), (32, 64)], (16, 32, 32, 1, 2, 1, 2)),
    case("rms norm", gated_norm, [(20, 64), (64, 128), (128,)], (32, 32, 32, 2, 2, 1, 2)),
    case("sum", reduced, [(20, 32), (32, 64)], (16, 32, 32, 1, 2, 1, 2)),
    case("max kept", reduced, [(4, 5, 32), (32, 64)], (16, 32, 32, 1, 2, 1, 2), operator=op.max,
         keepdims=True),
    case("min", reduced, [(20, 32), (32, 66)], (16, 32, 32, 1, 2, 1, 2), operator=op.min),
    case("stacked", members, [(20, 64), (3, 64, 64)], (16, 32, 32, 1, 2, 1, 2), 3, True),
    case("eight blocks", classes, [(16, 32), (32, 128)], (16, 16, 32, 1, 1, 2, 2)),
]  # fmt: skip


def coded_positions(number, shape):
    """Values that tell where they stand."""
    return (np.arange(np.prod(shape)).reshape(shape) % (211 + 12 * number)) / 105.0 - 1.0


def narrow(array, dtype):
    """An array in a type; bfloat16 as its bits."""
    return (
        array.astype(ml_dtypes.bfloat16).view("uint16")
        if dtype == "bfloat16"
        else array.astype(dtype)
    )


def widened(array, dtype):
    """float64 of an array in a type."""
    return (array.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else array).astype("float64")


def check_values(cuda, make, shapes, outputs, with_builder, dtype, kernel_of):
    """Run a kernel in both thread orders, on values that tell their places, against the function in float32."""
    func = cuda.function(make, *shapes, dtype=dtype, with_builder=with_builder)
    wide = cuda.function(make, *shapes, dtype="float32", with_builder=with_builder)
    rng = np.random.default_rng(7)
    inputs = [
        narrow(rng.standard_normal(s) / (s[-2] ** 0.5 if n == 1 else 1), dtype)
        for n, s in enumerate(shapes)
    ]
    expected = cuda.expected(wide, [widened(a, dtype).astype("float32") for a in inputs])
    target = cuda.target("cuda:sm_90")
    scheduled = kernel_of(func, target)
    source = cuda_emulation.cuda_source(scheduled, target)
    assert len(cuda_emulation.kernels(source)) == 1
    for backward in (False, True):
        results = cuda_emulation.run(scheduled, inputs, target, source=source, backward=backward)
        for result, reference in zip(results, expected, strict=True):
            error = np.abs(widened(result, dtype) - reference).max() / np.abs(reference).max()
            assert error <= (1e-3 if dtype == "float16" else 8e-3), f"{error}, {backward}"


@pytest.mark.parametrize(("make", "shapes", "tile", "outputs", "with_builder"), CASES)
def test_values(cuda, make, shapes, tile, outputs, with_builder):
    def kernel_of(func, target):
        form = row_products(func)
        assert form is not None
        return row_kernel(form, tile)

    check_values(cuda, make, shapes, outputs, with_builder, "float16", kernel_of)


@pytest.mark.parametrize(
    ("make", "shapes", "tile", "outputs", "with_builder"),
    [c for c in CASES if c.id in ("cluster", "scores", "rms norm", "residual kept")],
)
def test_bfloat16_by_the_registry(cuda, make, shapes, tile, outputs, with_builder):
    def kernel_of(func, target):
        scheduled, name = schedule(func, target)
        assert name == "tensor_rows"
        return scheduled

    check_values(cuda, make, shapes, outputs, with_builder, "bfloat16", kernel_of)


def test_positions(cuda):
    """A product of ones picks columns: each output tells which row, column and parameter it came from."""
    func = cuda.function(
        lambda e, x, w, b: e(op.subtract(e(op.add(e(op.matmul(x, w)), b)),
                                         e(op.max(e(op.matmul(x, w)), [-1], keepdims=True)))),
        (32, 32), (32, 64), (64,), dtype="float16",
    )  # fmt: skip
    assert row_products(func) is None  # two equal products: not one anchor that everything reads

    func = cuda.function(norm, (32, 32), (32, 64), *[(64,)] * 3, dtype="float16")
    x = np.eye(32, dtype="float16")
    w = (np.arange(32 * 64).reshape(32, 64) % 61).astype("float16")
    vectors = [np.zeros(64), np.arange(64) / 8, np.arange(64) + 1.0]
    inputs = [x, w, *(v.astype("float16") for v in vectors)]
    target = cuda.target("cuda:sm_90")
    kernel = row_kernel(row_products(func), Tile(16, 16, 32, 1, 1, 2, 2))
    (result,) = cuda_emulation.run(kernel, inputs, target)
    rows = w.astype("float64")
    rows = (rows - rows.mean(1, keepdims=True)) / np.sqrt(rows.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(
        result, np.maximum(rows * vectors[1] + vectors[2], 0), rtol=2e-3, atol=2e-3
    )


def test_large_mean(cuda):
    """The variance is that of centred values: a large mean does not swallow it."""
    func = cuda.function(norm, (16, 32), (32, 64), *[(64,)] * 3, dtype="float16")
    rng = np.random.default_rng(0)
    w = rng.standard_normal((32, 64)) / 8
    inputs = [np.ones((16, 32)), w, np.full(64, 1000.0), np.ones(64), np.full(64, 4.0)]
    inputs = [a.astype("float16") for a in inputs]
    kernel = row_kernel(row_products(func), Tile(16, 32, 32, 1, 2, 1, 2))
    (result,) = cuda_emulation.run(kernel, inputs, cuda.target("cuda:sm_90"))
    total = inputs[1].astype("float64").sum(0)
    expected = (total - total.mean()) / np.sqrt(total.var() + 1e-5) + 4
    np.testing.assert_allclose(result[0], np.maximum(expected, 0), atol=1e-2)


def lowered(module, strategy, form, dtype):
    """The function of a whole module as one group."""
    from tvm_fusion.transform.lower_groups import lower_groups

    options = {"form": form} if form == "anchor_row" else {"form": form, "join": "apart"}
    mod, kernels = lower_groups(as_group(module, strategy, **options))
    return mod[kernels[f"fused_{strategy}_0"]]


def test_merged_heads(cuda):
    """Four dense layers with layer norms are one product; each member's rows are normalised on their own."""
    module = dense_norm_heads(heads=4, rows=20, width=64, outputs=1024, relu=True, dtype="float16")
    group = cuda.group(module, "horizontal", "float16", form="merged", join="apart")
    target = cuda.target("cuda:sm_90")
    scheduled, name = schedule(group.func, target)
    assert name == "tensor_rows"
    assert "tvmf_store_cluster_4" in cuda_emulation.cuda_source(scheduled, target)
    packed = {int(n): [int(a) for a in axes] for n, axes in scheduled.attrs[PACKED].items()}
    assert packed == {1: [0, 2, 1]}
    inputs, arrays = group.arrays(coded_positions)
    arrays = [
        np.ascontiguousarray(array.transpose(packed[n])) if n in packed else array
        for n, array in enumerate(arrays)
    ]
    expected = Reference(module, "float16")(*inputs)
    for backward in (False, True):
        results = cuda_emulation.run(scheduled, arrays, target, backward=backward)
        for result, reference in zip(results, expected, strict=True):
            assert np.abs(result - reference).max() <= 2e-3 * np.abs(reference).max()


def test_weights_are_packed(cuda):
    """A constant weight is wanted with its reduction innermost; one that the stages read too is not."""
    func = cuda.function(classes, (32, 64), (64, 128), dtype="float16")
    func = func.with_attr(CONSTANTS, [1])
    scheduled, _ = schedule(func, cuda.target("cuda:sm_90"))
    assert {k: list(v) for k, v in scheduled.attrs[PACKED].items()} == {"1": [1, 0]}

    def reads_twice(emit, x, w):
        return emit(op.nn.softmax(emit(op.add(emit(op.matmul(x, w)), w))))

    func = cuda.function(reads_twice, (64, 64), (64, 64), dtype="float16").with_attr(CONSTANTS, [1])
    scheduled, name = schedule(func, cuda.target("cuda:sm_90"))
    assert name == "tensor_rows" and PACKED not in scheduled.attrs


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (norm, [(128, 768), (768, 768), *[(768,)] * 3]),
        (residual_norm, [(4096, 3072), (3072, 768), (768,), (4096, 768), (768,), (768,)]),
        (scores, [(1, 12, 128, 64), (1, 12, 128, 64)]),
        (norm, [(32, 1024), (1024, 1024), *[(1024,)] * 3]),
    ],
    ids=["BERT attention output", "BERT feed forward", "BERT scores", "one member of fcln4"],
)  # fmt: skip
def test_resources(cuda, build, shapes, arch):
    func = cuda.function(build, *shapes, dtype="float16")
    target = cuda.target(f"cuda:{arch}")
    scheduled, name = schedule(func, target)
    assert name == "tensor_rows"
    launch = cuda_emulation.launch_of(scheduled)
    assert launch.shared <= device_for(target).shared_memory_per_block_optin
    assert np.prod(launch.cluster) == 1 or arch == "sm_90"
    source = cuda_emulation.cuda_source(scheduled, target)
    (kernel,) = kernel_resources(source, arch).values()
    assert kernel.spill_bytes == 0 and kernel.stack_bytes == 0


def test_model_and_kernel_agree(cuda):
    """The planner's numbers of a kernel are those of the kernel."""
    func = cuda.function(norm, (64, 64), (64, 384), *[(384,)] * 3, dtype="float16")
    form, device = row_products(func), device_for(cuda.target("cuda:sm_90"))
    problem = row_problem(form)
    for choice in best_row_tiles(problem, device, 40):
        tile = choice.tile
        assert row_tile_bytes(problem, tile) == row_shared_bytes(form, tile)
        assert 1 <= blocks_of_row(form, tile) <= most_blocks(device)
        assert row_blocks(form, tile) % blocks_of_row(form, tile) == 0
        launch = cuda_emulation.launch_of(row_kernel(form, tile))
        assert (launch.grid[0], launch.cluster[0]) == (
            row_blocks(form, tile),
            blocks_of_row(form, tile),
        )


def test_long_rows_without_clusters():
    """Where blocks cannot share a row and it fits into none, no tile is found."""
    from tvm_fusion.guards.tensor_rows import RowProblem
    from tvm_fusion.guards.tensor_tiles import Problem
    from tvm_fusion.targets import parse_target

    problem = RowProblem(Problem(64, 4096, 1, (512,), (1,)), 4096, 2)
    assert best_row_tiles(problem, device_for(parse_target("cuda:sm_90")))
    assert not best_row_tiles(problem, device_for(parse_target("cuda:sm_80")))
    fitting = dataclasses.replace(problem, length=512, product=Problem(64, 512, 1, (512,), (1,)))
    assert best_row_tiles(fitting, device_for(parse_target("cuda:sm_80")))


def over_rows(emit, data, weight):
    """A reduction across the rows."""
    return emit(op.sum(emit(op.matmul(data, weight)), [0]))


def chained(emit, data, weight, second):
    """The row operator's result multiplies again."""
    return emit(op.matmul(emit(op.nn.softmax(emit(op.matmul(data, weight)))), second))


@pytest.mark.parametrize(
    ("build", "shapes", "dtype"),
    [
        (over_rows, [(32, 64), (64, 64)], "float16"),
        (chained, [(32, 64), (64, 64), (64, 32)], "float16"),
        (classes, [(32, 64), (64, 99)], "float16"),  # columns in pairs only
        (classes, [(2, 64), (64, 64)], "float16"),  # too few rows
        (classes, [(32, 64), (64, 64)], "float32"),
        (lambda e, x, w: e(op.matmul(x, w)), [(32, 64), (64, 64)], "float16"),
    ],
    ids=["across rows", "two products", "odd", "few rows", "float32", "no row operator"],
)  # fmt: skip
def test_refused(cuda, build, shapes, dtype):
    func = cuda.function(build, *shapes, dtype=dtype)
    assert cuda.template("tensor_rows").apply(func, cuda.target("cuda:sm_90")) is None


def test_single_path_by_the_planner(cuda):
    """The end of a BERT block as the planner lowers it."""
    func = lowered(
        dense_norm(rows=32, width=64, outputs=64, dtype="float16"),
        "vertical",
        "anchor_row",
        "float16",
    )
    _, name = schedule(func, cuda.target("cuda:sm_90"))
    assert name == "tensor_rows"
    _, name = schedule(func, cuda.target("cuda:sm_75"))
    assert name == "anchor_rows"
