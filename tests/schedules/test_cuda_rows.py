"""Reductions and normalisations over rows, and pooling; values by emulation, resources by nvcc."""

from __future__ import annotations

import math
import re

import ml_dtypes
import numpy as np
import pytest
from tvm import relax
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.cuda.row_along import AlongRows
from tvm_fusion.schedules.cuda.row_pieces import RowShape
from tvm_fusion.schedules.cuda.row_stages import row_function
from tvm_fusion.schedules.cuda.rows import row_kernel

from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.groups import group_function, group_module

op = relax.op


def unary(operator, *args, **attrs):
    """A single operator."""
    return lambda emit, *inputs: emit(operator(*inputs, *args, **attrs))


def mean(axes, **attrs):
    """Mean with a prologue and an epilogue."""
    return lambda emit, x: emit(op.nn.relu(emit(op.mean(emit(op.exp(x)), axes, **attrs))))


def norm(emit, x, y, gamma, beta):
    """Residual add, layer norm, ReLU."""
    total = emit(op.nn.layer_norm(emit(op.add(x, y)), gamma, beta, axes=[-1]))
    return emit(op.nn.relu(total))


def gelu_norm(emit, x, bias, residual, gamma, beta):
    """Bias, GELU, residual, layer norm."""
    total = emit(op.add(emit(op.nn.gelu(emit(op.add(x, bias)))), residual))
    return emit(op.nn.layer_norm(total, gamma, beta, axes=[-1]))


def padded_norm(emit, x, gamma, beta):
    """Layer norm of rows that zeros make longer."""
    longer = emit(op.nn.pad(x, [0, 0, 0, 4]))
    return emit(op.nn.layer_norm(longer, gamma, beta, axes=[-1]))


def sum_and_share(emit, x):
    """Two outputs, a number and a row."""
    total = emit(op.sum(emit(op.exp(x)), [-1], keepdims=True))
    return total, emit(op.divide(emit(op.exp(x)), total))


ROWS = [
    pytest.param(unary(op.nn.softmax), ((8, 1000),), 1, "float32", id="softmax"),
    pytest.param(unary(op.nn.softmax), ((1, 77),), 1, "float32", id="softmax of one row"),
    pytest.param(
        unary(op.nn.softmax, axis=1), ((1, 64, 8, 8),), 1, "float32", id="softmax channels"
    ),
    pytest.param(unary(op.nn.softmax, axis=1), ((2, 37, 5, 7),), 1, "float32", id="softmax tails"),
    pytest.param(unary(op.nn.softmax), ((8, 100),), 1, "float16", id="softmax half"),
    pytest.param(unary(op.nn.log_softmax), ((8, 100),), 1, "float32", id="log softmax"),
    pytest.param(norm, ((8, 5, 76), (8, 5, 76), (76,), (76,)), 1, "float32", id="layer norm"),
    pytest.param(norm, ((3, 768), (3, 768), (768,), (768,)), 1, "float16", id="layer norm half"),
    pytest.param(unary(op.nn.rms_norm, axes=[-1]), ((8, 64), (64,)), 1, "float32", id="rms norm"),
    pytest.param(
        unary(op.nn.instance_norm, 1, [2, 3]),
        ((2, 16, 8, 8), (16,), (16,)),
        1,
        "float32",
        id="instance norm",
    ),
    pytest.param(unary(op.variance, [-1]), ((8, 64),), 1, "float32", id="variance"),
    pytest.param(unary(op.argmax, -1), ((8, 40),), 1, "float32", id="argmax"),
    pytest.param(mean([2, 3]), ((1, 300, 7, 7),), 1, "float32", id="7x7 pool"),
    pytest.param(unary(op.sum), ((8, 65),), 1, "float32", id="sum of all"),
    pytest.param(mean([2, 3]), ((1, 205, 9, 9),), 1, "float32", id="global pool"),
    pytest.param(
        mean([2, 3], keepdims=True), ((1, 80, 13, 13),), 1, "float16", id="global pool half"
    ),
    pytest.param(mean([1, 2]), ((1, 9, 9, 256),), 1, "float32", id="global pool nhwc"),
    pytest.param(
        mean([1, 2], keepdims=True), ((1, 9, 9, 37),), 1, "float32", id="global pool nhwc, prime"
    ),
    pytest.param(sum_and_share, ((8, 65),), 2, "float32", id="two outputs"),
    pytest.param(sum_and_share, ((3, 40000),), 2, "float32", id="rows in rounds"),
    pytest.param(unary(op.nn.softmax), ((2, 9001),), 1, "float16", id="odd rows in rounds"),
    pytest.param(
        gelu_norm,
        ((3, 4096), (4096,), (3, 4096), (4096,), (4096,)),
        1,
        "float16",
        id="gelu and norm",
    ),
    pytest.param(mean([1, 2]), ((1, 7, 7, 2048),), 1, "float16", id="global pool nhwc half"),
    pytest.param(unary(op.nn.softmax, axis=1), ((2, 24, 8, 8),), 1, "float16", id="channels half"),
    pytest.param(unary(op.variance, [1, 2]), ((2, 7, 7, 24),), 1, "float32", id="variance nhwc"),
    pytest.param(norm, ((5, 100), (5, 1), (100,), (100,)), 1, "float32", id="broadcast in a row"),
    pytest.param(padded_norm, ((6, 60), (64,), (64,)), 1, "float16", id="padded rows"),
    pytest.param(unary(op.sum, [-1]), ((3, 7),), 1, "float32", id="shorter than a warp"),
]

POOLING = [
    pytest.param(unary(op.nn.max_pool2d, 3, 2, 1), ((1, 8, 13, 13),), 1, "float32", id="max"),
    pytest.param(unary(op.nn.avg_pool2d, 3, 2, 1), ((3, 8, 13, 13),), 1, "float32", id="average"),
    pytest.param(
        unary(op.nn.avg_pool2d, 3, 2, 1), ((3, 8, 13, 13),), 1, "float16", id="average half"
    ),
    pytest.param(
        unary(op.nn.avg_pool2d, 2, 2, layout="NHWC"),
        ((3, 13, 13, 8),),
        1,
        "float32",
        id="average nhwc",
    ),
    pytest.param(
        lambda e, x, y: e(op.add(e(op.nn.max_pool2d(e(op.nn.relu(x)), 3, 1, 1)), y)),
        ((1, 8, 9, 9), (1, 8, 9, 9)),
        1,
        "float32",
        id="prologue and epilogue",
    ),
]


@pytest.mark.parametrize(("build", "shapes", "outputs", "dtype"), ROWS)
def test_rows(cuda, build, shapes, outputs, dtype):
    cuda.check(cuda.function(build, *shapes, dtype=dtype), "rows", outputs)


@pytest.mark.parametrize(("build", "shapes", "outputs", "dtype"), POOLING)
def test_pooling(cuda, build, shapes, outputs, dtype):
    cuda.check(cuda.function(build, *shapes, dtype=dtype), "pooling", outputs)


@pytest.mark.slow
@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize(("build", "shapes", "outputs", "dtype"), [*ROWS, *POOLING])
def test_resources(cuda, arch, build, shapes, outputs, dtype):
    cuda.resources(cuda.function(build, *shapes, dtype=dtype), arch)


def moves(source: str, pointer: str) -> list[str]:
    """Accesses of a parameter in a kernel's code."""
    return re.findall(rf"\*\((\w+)\*\)\({pointer}_ptr ", source)


@pytest.mark.parametrize(
    ("dtype", "width", "count"), [("float16", "uint4", 1), ("float32", "float4", 2)]
)
def test_every_tensor_is_moved_once_by_16_bytes(cuda, dtype, width, count):
    func = cuda.function(norm, (4, 1024), (4, 1024), (1024,), (1024,), dtype=dtype)
    target = cuda.target("cuda:sm_90")
    form, rows = row_function(func)
    shape = RowShape(128, 1, 16 // np.dtype(dtype).itemsize, count)
    source = cuda_emulation.cuda_source(AlongRows(form, shape).function(), target)
    assert not rows.across
    for param in func.params:
        assert moves(source, param.name) == [width] * count
    # What passes between threads is a number of each warp, and one barrier stands before each use of it.
    assert re.findall(r"__shared__ [^;]* (?:float|half) \w+\[(\d+)\]", source) == ["4"]
    assert source.count("__syncthreads();") == 3


def test_a_row_of_a_warp_needs_no_barrier(cuda):
    func = cuda.function(unary(op.nn.softmax), (4096, 256), dtype="float16")
    source = cuda.check(cuda.function(unary(op.nn.softmax), (40, 256), dtype="float16"), "rows")
    scheduled, _ = schedule(func, cuda.target("cuda:sm_90"))
    large = cuda_emulation.cuda_source(scheduled, cuda.target("cuda:sm_90"))
    assert "__shared__" not in large
    assert "__shfl_xor_sync" in source


def test_large_rows_by_samples(cuda):
    """The benchmark's shape: some blocks of it, against float64."""
    shapes = (8192, 4096), (4096,), (8192, 4096), (4096,), (4096,)
    func = cuda.function(gelu_norm, *shapes, dtype="float16")
    target = cuda.target("cuda:sm_90")
    scheduled, name = schedule(func, target)
    assert name == "rows"
    inputs = cuda.inputs(func)
    (result,) = cuda_emulation.run(scheduled, inputs, target, blocks=8)
    rows = np.flatnonzero(~result.mask.any(axis=1))
    assert len(rows) >= 8
    x, bias, residual, gamma, beta = (a.astype("float64") for a in inputs)
    x = x[rows] + bias
    erf = np.vectorize(math.erf)(x / math.sqrt(2))
    total = x * (1 + erf) / 2 + residual[rows]
    centred = total - total.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * gamma + beta
    # Half a unit of float16's last place, and what float32 adds.
    error = np.abs(result[rows].data.astype("float64") - expected)
    assert (error <= 2.0**-11 * np.abs(expected) * 1.01 + 2e-5).all()


def test_the_place_of_the_largest_is_left_to_the_other_form(cuda):
    func = cuda.function(unary(op.argmax, -1), (8, 40))
    assert row_function(func) is None
    assert cuda.template("rows").apply(func, cuda.target("cuda:sm_90")) is not None


def test_bfloat16_before_sm_80_is_left_to_the_other_form(cuda):
    func = cuda.function(unary(op.nn.softmax), (8, 64), dtype="bfloat16")
    assert row_kernel(func, cuda.target("cuda:sm_75")) is None
    assert row_kernel(func, cuda.target("cuda:sm_80")) is not None


def test_bfloat16(cuda):
    module = group_module(
        ((6, 768), (768,), (768,)),
        "bfloat16",
        lambda b, x, g, c: b.emit(op.nn.layer_norm(x, g, c, axes=[-1])),
    )
    scheduled, name = schedule(group_function(module), cuda.target("cuda:sm_90"))
    assert name == "rows"
    inputs = [
        np.random.default_rng(n).standard_normal(shape).astype(ml_dtypes.bfloat16)
        for n, shape in enumerate(((6, 768), (768,), (768,)))
    ]
    (result,) = cuda_emulation.run(
        scheduled, [a.view("uint16") for a in inputs], cuda.target("cuda:sm_90")
    )
    x, gamma, beta = (a.astype("float64") for a in inputs)
    centred = x - x.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * gamma + beta
    found = result.view(ml_dtypes.bfloat16).astype("float64")
    assert (np.abs(found - expected) <= 2.0**-8 * np.abs(expected) + 1e-5).all()


def test_channels_of_a_window_are_read_together(cuda):
    make = unary(op.nn.max_pool2d, 3, 2, 1, layout="NHWC")
    source = cuda.check(cuda.function(make, (2, 13, 13, 64), dtype="float16"), "pooling")
    assert len(moves(source, "x0")) == 9
    scalar = cuda.check(cuda.function(make, (1, 13, 13, 5)), "pooling")
    assert not moves(scalar, "x0")


@pytest.mark.parametrize("name", ["rows", "pooling"])
def test_functions_without_reduction_are_left_to_others(cuda, name):
    func = cuda.function(unary(op.nn.relu), (8, 64))
    assert cuda.template(name).apply(func, cuda.target("cuda:sm_90")) is None


def test_reductions_over_different_rows_are_left_to_others(cuda):
    func = cuda.function(lambda e, x: e(op.sum(e(op.exp(e(op.sum(x, [2])))), [1])), (5, 66, 70))
    assert cuda.template("rows").apply(func, cuda.target("cuda:sm_90")) is None


def test_large_windows_are_left_to_others(cuda):
    func = cuda.function(unary(op.nn.avg_pool2d, 9), (1, 8, 18, 18))
    assert cuda.template("pooling").apply(func, cuda.target("cuda:sm_90")) is None
