"""A matrix product with what works on its rows, in one kernel; values by emulation, resources by nvcc."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tvm import relax
from tvm_fusion.schedules import limits
from tvm_fusion.schedules.allocation import planned_shared_bytes
from tvm_fusion.schedules.cuda.anchor_rows import recognise, with_tile
from tvm_fusion.schedules.cuda.row_tiles import row_tiles

from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.modules import ModuleBuilder, as_group
from tvm_fusion.transform.lower_groups import lower_groups

op = relax.op


def dense_norm(emit, data, weight, bias, gamma, beta):
    """Dense layer, bias, layer norm, ReLU."""
    total = emit(op.add(emit(op.matmul(data, weight)), bias))
    return emit(op.nn.relu(emit(op.nn.layer_norm(total, gamma, beta, axes=[-1]))))


def transposed_norm(emit, data, weight, bias, gamma, beta):
    """The same with a transposed weight."""
    return dense_norm(emit, data, emit(op.permute_dims(weight)), bias, gamma, beta)


def residual_norm(emit, data, weight, bias, other, gamma, beta):
    """Dense layer, bias, residual, layer norm: the end of a block of BERT."""
    total = emit(op.add(emit(op.add(emit(op.matmul(data, weight)), bias)), other))
    return emit(op.nn.layer_norm(total, gamma, beta, axes=[-1]))


def own_residual(emit, data, weight, gamma, beta):
    """The product's own input as the residual."""
    total = emit(op.add(emit(op.matmul(data, weight)), data))
    return emit(op.nn.layer_norm(total, gamma, beta, axes=[-1]))


def residual_norm_both(emit, data, weight, other, gamma, beta):
    """A residual sum that is a result itself, and its layer norm."""
    total = emit(op.add(emit(op.matmul(data, weight)), other))
    return total, emit(op.nn.layer_norm(total, gamma, beta, axes=[-1]))


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
    return emit(
        op.sigmoid(emit(operator(emit(op.tanh(emit(op.matmul(data, weight)))), [-1], **attrs)))
    )


def case(name, build, *shapes, outputs=1, **attrs):
    """One function under test."""

    def make(emit, *inputs):
        return build(emit, *inputs, **attrs)

    return pytest.param(make, shapes, outputs, id=name)


CASES = [
    case("layer norm", dense_norm, (32, 64), (64, 96), (96,), (96,), (96,)),
    case("layer norm, tails", dense_norm, (37, 50), (50, 83), (83,), (83,), (83,)),
    case("layer norm, transposed", transposed_norm, (37, 50), (84, 50), (84,), (84,), (84,)),
    case("residual", residual_norm, (2, 24, 40), (40, 72), (72,), (2, 24, 72), (72,), (72,)),
    case(
        "residual kept", residual_norm_both, (24, 40), (40, 72), (24, 72), (72,), (72,), outputs=2
    ),
    case("own residual", own_residual, (24, 64), (64, 64), (64,), (64,)),
    case("scores", scores, (1, 3, 40, 16), (1, 3, 48, 16)),
    case("softmax", classes, (37, 64), (64, 100)),
    case("softmax of one row", classes, (1, 64), (64, 100)),
    case("batched softmax", classes, (3, 10, 24), (3, 24, 50)),
    case(
        "log softmax", lambda e, x, w: e(op.nn.log_softmax(e(op.matmul(x, w)))), (9, 24), (24, 64)
    ),
    case("rms norm", gated_norm, (20, 64), (64, 128), (128,)),
    case("sum", reduced, (20, 32), (32, 65)),
    case("max kept", reduced, (4, 5, 32), (32, 64), operator=op.max, keepdims=True),
    case("mean", reduced, (20, 32), (32, 64), operator=op.mean),
    case("many columns", classes, (6, 24), (24, 1200)),
]

#: Shapes of real networks, with what they are.
REAL = [
    case("BERT attention output", dense_norm, (128, 768), (768, 768), (768,), (768,), (768,)),
    case(
        "BERT feed forward",
        residual_norm,
        (128, 3072),
        (3072, 768),
        (768,),
        (128, 768),
        (768,),
        (768,),
    ),
    case("BERT scores", scores, (1, 12, 128, 64), (1, 12, 128, 64)),
    case("small dense", dense_norm, (32, 256), (256, 256), (256,), (256,), (256,)),
    case("transposed", transposed_norm, (128, 768), (768, 768), (768,), (768,), (768,)),
    case("4096 columns", classes, (64, 512), (512, 4096)),
]


def coded(func, outputs):
    """Small integers that tell positions apart, so that sums of products are exact."""
    arrays = []
    for param in list(func.params)[:-outputs]:
        shape = [int(extent) for extent in param.ty.shape]
        places = np.arange(np.prod(shape))
        codes = ((places * 7 + places // 11) % 5 - 2) / 4
        arrays.append(codes.reshape(shape).astype(str(param.ty.dtype)))
    return arrays


@pytest.mark.parametrize(("build", "shapes", "outputs"), CASES)
def test_many_rows_a_block(cuda, build, shapes, outputs):
    """A chip of one multiprocessor gets large tiles, with many registers a thread."""
    func = cuda.function(build, *shapes)
    target = cuda.target("cuda:sm_90")
    bounds = dataclasses.replace(limits(target), multiprocessors=1)
    form = recognise(func)
    tile = row_tiles(form.problem, bounds, 1024)[0]
    assert tile.rows > 1 or form.problem.rows == 1
    scheduled = with_tile(form, tile, bounds).without_attr("global_symbol")
    arrays = coded(func, outputs)
    expected = cuda.expected(func, arrays)
    source = cuda_emulation.cuda_source(scheduled, target)
    for backward in (False, True):
        results = cuda_emulation.run(scheduled, arrays, target, source=source, backward=backward)
        for result, reference in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("build", "shapes", "outputs"), CASES)
def test_values(cuda, build, shapes, outputs):
    cuda.check(cuda.function(build, *shapes), "anchor_rows", outputs)


#: Cases whose float16 version is checked too. The emulation has no cross-warp maximum of float16.
HALF = ("norm", "norm, transposed", "own residual", "scores", "softmax", "sum", "many columns")


@pytest.mark.parametrize(("build", "shapes", "outputs"), [c for c in CASES if c.id.endswith(HALF)])
def test_half_precision(cuda, build, shapes, outputs):
    # From sm_80 on, tensor cores multiply narrow types.
    func = cuda.function(build, *shapes, dtype="float16")
    cuda.check(func, "anchor_rows", outputs, arch="sm_75")


def test_a_group_goes_through_the_whole_lowering(cuda):
    b = ModuleBuilder()
    data, other = b.input("x", (16, 48)), b.input("r", (16, 64))
    value = b.op("dense", op.matmul(data, b.const(48, 64, scale=0.1)))
    value = b.add("residual", b.op("bias", op.add(value, b.const(64))), other)
    value = b.op("norm", op.nn.layer_norm(value, b.const(64), b.const(64), axes=[-1]))
    mod = as_group(b.finish(value), "vertical", form="anchor_row")
    lowered, kernels = lower_groups(mod)
    (kernel,) = kernels.values()
    cuda.check(lowered[kernel], "anchor_rows")


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
    form = recognise(cuda.function(build, *shapes))
    bounds = limits(cuda.target("cuda:sm_90"))
    tile = row_tiles(form.problem, bounds, 1024)[0]
    used = planned_shared_bytes(with_tile(form, tile, bounds))
    assert abs(used - tile.nbytes) <= 0.1 * tile.nbytes


@pytest.mark.parametrize("rows", [1, 8, 128, 4096])
def test_more_rows_share_a_block_once_the_chip_is_full(cuda, rows):
    form = recognise(cuda.function(classes, (rows, 256), (256, 256)))
    bounds = limits(cuda.target("cuda:sm_90"))
    tile = row_tiles(form.problem, bounds, 1024)[0]
    assert tile.rows <= max(1, 2 * rows // bounds.multiprocessors) or rows <= 128
    assert rows < 4096 or tile.rows >= 4


OTHER_FORMS = [
    case("product alone", lambda e, x, w: e(op.matmul(x, w)), (20, 30), (30, 40)),
    case("rows alone", lambda e, x: e(op.nn.softmax(x)), (20, 30)),
    case(
        "along the rows",
        lambda e, x, w: e(op.nn.softmax(e(op.matmul(x, w)), 0)),
        (20, 30),
        (30, 40),
    ),
    case("sum of everything", lambda e, x, w: e(op.sum(e(op.matmul(x, w)))), (20, 30), (30, 40)),
    case(
        "two products",
        lambda e, x, w, v: e(op.nn.softmax(e(op.add(e(op.matmul(x, w)), e(op.matmul(x, v)))))),
        (20, 30),
        (30, 40),
        (30, 40),
    ),
    case(
        "a product after the rows",
        lambda e, x, w, v: e(op.matmul(classes(e, x, w), v)),
        (20, 30),
        (30, 40),
        (40, 30),
    ),
    case(
        "convolution",
        lambda e, x, w: e(op.nn.softmax(e(op.nn.conv2d(x, w, padding=1)))),
        (1, 8, 8, 8),
        (8, 8, 3, 3),
    ),
    case(
        "reshaped between",
        lambda e, x, w: e(op.nn.softmax(e(op.reshape(e(op.matmul(x, w)), (40, 20))))),
        (20, 30),
        (30, 40),
    ),
]


@pytest.mark.parametrize(("build", "shapes", "outputs"), OTHER_FORMS)
def test_other_forms_are_left_to_others(cuda, build, shapes, outputs):
    func = cuda.function(build, *shapes)
    assert cuda.template("anchor_rows").apply(func, cuda.target("cuda:sm_90")) is None


def test_rows_that_do_not_fit_on_chip_are_left_to_others(cuda):
    func = cuda.function(classes, (8, 64), (64, 16384))
    assert cuda.template("anchor_rows").apply(func, cuda.target("cuda:sm_90")) is None
    func = cuda.function(classes, (8, 64), (64, 8192))
    assert cuda.template("anchor_rows").apply(func, cuda.target("cuda:sm_90")) is not None
