"""Reductions and normalisations over rows, and pooling; values by emulation, resources by nvcc."""

from __future__ import annotations

import pytest
from tvm import relax

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


def test_intermediates_of_a_row_are_computed_once(cuda):
    source = cuda.check(cuda.function(norm, (4, 70), (4, 70), (70,), (70,)), "rows")
    # The sum of the inputs is staged: three stages read it, one line reads the second input.
    assert len({line for line in source.splitlines() if "x1_ptr[" in line}) == 1


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
