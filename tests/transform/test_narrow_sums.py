"""Sums of float16 and bfloat16 values that stagnate or overflow unless they accumulate in float32."""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tvm_fusion as tf
from tvm_fusion.compat import relax

op = relax.op
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
#: Sixty thousand ones: a float16 sum of them stops at 2048, a bfloat16 one at 256.
MANY = 60_000


def module(shapes, dtype, make):
    """Return a module whose ``main`` computes ``make(emit, *inputs)``."""
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"x{i}", relax.TensorType(shape, dtype)) for i, shape in enumerate(shapes)]
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(make(builder.emit, *inputs)))
        builder.emit_func_output(result)
    return builder.get()


def rms(emit, x):
    """RMS norm as frameworks write it; the squares alone are beyond float16."""
    mean = emit(op.mean(emit(op.multiply(x, x)), [-1], keepdims=True))
    number = relax.const(1e-3, str(x.ty.dtype))
    return op.multiply(x, emit(op.rsqrt(emit(op.add(mean, number)))))


def scattered(emit, x):
    zeros = relax.const(np.zeros(2), str(x.ty.dtype))
    return op.scatter_elements(zeros, relax.const(np.zeros(MANY, "int64")), x, 0, "add")


ONE = relax.const
# name: shapes, the value of every input element, operator, the value of the last output element.
CASES = {
    "sum": ([(2, MANY)], 1, lambda e, x: op.sum(x, [1]), MANY),
    "mean": ([(2, 100_000)], 100, lambda e, x: op.mean(x, [1]), 100),
    "mean after relu": ([(2, 10_000)], 100, lambda e, x: op.mean(e(op.nn.relu(x)), [1]), 100),
    "variance": ([(2, MANY)], 100, lambda e, x: op.variance(x, [1]), 0),
    "std": ([(2, MANY)], 100, lambda e, x: op.std(x, [1]), 0),
    "avg_pool2d": ([(1, 1, 100, 100)], 100, lambda e, x: op.nn.avg_pool2d(x, (100, 100)), 100),
    "adaptive_avg_pool2d": (
        [(1, 1, 100, 100)], 100, lambda e, x: op.nn.adaptive_avg_pool2d(x, (1, 1)), 100,
    ),
    "softmax": ([(1, 8192)], 1, lambda e, x: op.nn.softmax(x), 2.0**-13),
    "log_softmax": ([(1, 8192)], 1, lambda e, x: op.nn.log_softmax(x), -13 * math.log(2)),
    "matmul": ([(1, MANY), (MANY, 1)], 1, lambda e, x, y: op.matmul(x, y), MANY),
    "matmul and relu": ([(8, 8192), (8192, 8)], 1, lambda e, x, y: op.nn.relu(e(op.matmul(x, y))), 8192),
    "conv2d": (
        [(1, 4096, 1, 1), (1, 4096, 1, 1)], 1, lambda e, x, w: op.nn.conv2d(x, w), 4096,
    ),
    "einsum": ([(1, MANY), (1, MANY)], 1, lambda e, x, y: op.einsum((x, y), "ik,jk->ij"), MANY),
    "layer_norm": (
        [(2, 30_000), (30_000,), (30_000,)], 100,
        lambda e, x, g, b: op.nn.layer_norm(x, g, b, axes=[-1]), 100,
    ),
    "rms_norm": (
        [(2, 30_000), (30_000,)], 100, lambda e, x, g: op.nn.rms_norm(x, g, axes=[-1]), 100,
    ),
    "group_norm": (
        [(1, 2, 100, 100), (2,), (2,)], 100,
        lambda e, x, g, b: op.nn.group_norm(x, g, b, 1, 1, [2, 3]), 100,
    ),
    "rms norm of primitives": ([(2, 1024)], 300, rms, 1),
    "norm": ([(2, 4096)], 300, lambda e, x: op.sqrt(e(op.sum(e(op.multiply(x, x)), [1]))), 19200),
    "cumsum": ([(2, MANY)], 1, lambda e, x: op.cumsum(x, 1), MANY),
    "scatter add": ([(MANY,)], 1, scattered, None),
}  # fmt: skip


def compiled(mod, *, fused):
    """Compile for the CPU, with the plan's groups or without any."""
    mod = tf.frontend.from_relax(mod)
    plan = tf.plan(mod, "llvm")
    if not fused:
        plan = dataclasses.replace(plan, groups=())
    return tf.compile(mod, "llvm", plan=plan, verify=False, strict=True)


#: TVM has no such operator of bfloat16; converted models have it in float32.
FLOAT16_ONLY = ("group_norm",)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, d) for n in CASES for d in TYPES if d == "float16" or n not in FLOAT16_ONLY],
)
def test_long_sums(name, dtype):
    shapes, value, make, wanted = CASES[name]
    mod = module(shapes, dtype, make)
    arrays = [np.full(shape, value, TYPES[dtype]) for shape in shapes]
    for fused in (True, False):
        (result,) = compiled(mod, fused=fused)(*arrays)
        got = np.asarray(result).astype("float64").ravel()
        last = got[0] if name == "scatter add" else got[-1]
        expected = MANY if wanted is None else wanted
        ulp = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
        assert abs(last - expected) <= 2 * ulp * abs(expected) + 1e-6, (fused, last)


REDUCTIONS = {
    "sum": (op.sum, np.sum),
    "mean": (op.mean, np.mean),
    "variance": (op.variance, np.var),
    "max": (op.max, np.max),
}


@settings(max_examples=12)
@given(data=st.data())
def test_any_reduction_is_rounded_once(data):
    """Whatever surrounds it: the operator before is exact, so that only the result is rounded."""
    dtype = data.draw(st.sampled_from(sorted(TYPES)))
    name = data.draw(st.sampled_from(sorted(REDUCTIONS)))
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    keep = data.draw(st.booleans())
    seed = data.draw(st.integers(0, 2**16))
    reduction, reference = REDUCTIONS[name]
    mod = module(
        [shape], dtype, lambda e, x: reduction(e(op.nn.relu(x)), sorted(axes), keepdims=keep)
    )
    x = (np.random.default_rng(seed).standard_normal(shape) * 8 + 4).astype(TYPES[dtype])
    (got,) = compiled(mod, fused=True)(x)
    wanted = reference(np.maximum(x.astype("float64"), 0), tuple(axes), keepdims=keep)
    ulp = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    np.testing.assert_allclose(np.asarray(got, "float64"), wanted, rtol=1.02 * ulp, atol=1e-5)
