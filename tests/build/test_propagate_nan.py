"""A NaN comes out of maxima, minima, ReLU, bounds and maximum pooling, on the CPU and on CUDA, and costs little."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.analysis import nodes_of

import tvm_fusion as tf
from tvm_fusion.build import tir_pipeline
from tvm_fusion.build.propagate_nan import PropagateNaN
from tvm_fusion.build.ptxas import assemble
from tvm_fusion.compat import BlockBuilder, relax, te, tirx, tvm
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.emulated_plan import EmulatedPlan
from tvm_fusion.testing.groups import group_function, group_module

op = relax.op


def relu(emit, x, y):
    return emit(op.nn.relu(emit(op.add(x, y))))


def bounds(emit, x, y):
    return emit(op.clip(emit(op.add(x, y)), -1.0, 1.0))


def larger(emit, x, y):
    return emit(op.maximum(x, y))


def smaller(emit, x, y):
    return emit(op.minimum(x, y))


def pool(emit, x, y):
    return emit(op.add(emit(op.nn.max_pool2d(x, (2, 2), (1, 1), layout="NHWC")), y))


def rows(emit, x, y):
    return emit(op.add(emit(op.max(x, [-1], keepdims=True)), y))


def convolution(emit, x, w):
    """Relu as the epilogue of an anchor."""
    made = emit(op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI"))
    return emit(op.nn.relu(made))


#: Function, and shapes of its operands.
CASES = {
    "relu": (relu, ((4, 64), (4, 64))),
    "bounds": (bounds, ((4, 64), (64,))),
    "larger": (larger, ((4, 64), (4, 64))),
    "smaller": (smaller, ((4, 64), (4, 64))),
    "pool": (pool, ((1, 6, 6, 16), (1, 5, 5, 16))),
    "rows": (rows, ((6, 300), (6, 1))),
    "convolution": (convolution, ((1, 4, 4, 8), (16, 1, 1, 8))),
}


def module(make, shapes, dtype):
    builder = BlockBuilder()
    inputs = [relax.Var(f"x{i}", relax.TensorType(s, dtype)) for i, s in enumerate(shapes)]
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(make(builder.emit, *inputs))
        builder.emit_func_output(result)
    return builder.get()


def values(shapes, dtype):
    """Random numbers with some NaN in each operand."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    for number, array in enumerate(arrays):
        array.reshape(-1)[5 - number :: max(197, array.size // 3)] = np.nan
    return arrays


def wanted(name, x, y):
    x, y = x.astype("float32"), y.astype("float32")
    with np.errstate(invalid="ignore"):
        if name == "relu":
            return np.maximum(x + y, 0)
        if name == "bounds":
            return np.clip(x + y, -1, 1)
        if name in ("larger", "smaller"):
            return (np.maximum if name == "larger" else np.minimum)(x, y)
        if name == "pool":
            windows = np.lib.stride_tricks.sliding_window_view(x, (2, 2), axis=(1, 2))
            return windows.max((-2, -1)) + y
        if name == "rows":
            return x.max(-1, keepdims=True) + y
        return np.maximum(x @ y[:, 0, 0].T, 0)


def check(got, name, arrays, dtype):
    right = wanted(name, *arrays)
    assert 0 < np.isnan(right).sum() < right.size
    np.testing.assert_allclose(got, right, rtol=1e-2 if dtype == "float16" else 1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_on_the_cpu(name, dtype):
    make, shapes = CASES[name]
    arrays = values(shapes, dtype)
    (got,) = tf.compile(module(make, shapes, dtype), "llvm", verify=False)(*arrays)
    check(got, name, arrays, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_on_cuda(name, dtype):
    make, shapes = CASES[name]
    plan = EmulatedPlan(module(make, shapes, dtype), parse_target("cuda:sm_90"))
    arrays = values(shapes, dtype)
    assert "default" not in plan.templates.values()
    (got,) = plan(*arrays)
    check(got, name, arrays, dtype)


def source(make, shapes, arch):
    target = parse_target(f"cuda:{arch}")
    func = group_function(group_module(shapes, "float16", lambda b, *i: make(b.emit, *i)))
    return cuda_emulation.cuda_source(schedule(func, target)[0], target)


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_compilers_take_it(arch):
    """One instruction where there is one; max.NaN begins with sm_80."""
    machine_code, _ = assemble(source(relu, ((64, 64), (64, 64)), arch), arch)
    assert machine_code


def test_one_call_for_each_maximum():
    kernel = source(bounds, ((64, 64), (64,)), "sm_90").split('extern "C" __global__')[-1]
    assert "tvmf_max_nan(" in kernel and "tvmf_min_nan(" in kernel
    assert not re.search(r"(?<!_)\b(max|min)\(", kernel)


def lowered(expression, dtype="float32"):
    """The stored value after the pass, for the CPU."""
    a, b = te.placeholder((8,), dtype, "a"), te.placeholder((8,), dtype, "b")
    func = te.create_prim_func([a, b, te.compute((8,), lambda i: expression(a[i], b[i]))])
    func = func.with_attr("target", parse_target("llvm"))
    after = PropagateNaN()(tvm.IRModule({"main": func}))["main"]
    return nodes_of(after.body, tirx.BufferStore)[0].value


def test_a_constant_comes_first_on_the_cpu():
    """LLVM's maximum keeps a NaN in its second operand: nothing is added for a ReLU."""
    value = lowered(lambda a, b: tirx.max(a, tirx.const(0.0, "float32")))
    assert isinstance(value, tirx.Max) and isinstance(value.a, tirx.FloatImm)


def test_a_constant_that_is_first_stays():
    value = lowered(lambda a, b: tirx.Max(tirx.const(0.0, "float32"), a))
    assert isinstance(value, tirx.Max) and isinstance(value.a, tirx.FloatImm)


def test_two_values_are_tested():
    assert isinstance(lowered(tirx.max), tirx.Select)


@pytest.mark.parametrize("last", ["read", "computed"])
def test_long_chains_stay_short(last):
    """Operands that are computed are not repeated: written out, 40 maxima would fill the memory."""

    def chain(a, b):
        total = a
        for _ in range(40):
            total = tirx.max(total, b if last == "read" else a + b)
            total = tirx.max(total * tirx.const(2.0, "float32"), b)
        return total

    assert len(str(lowered(chain))) < 20_000
    a, b = te.placeholder((8,), "float32", "a"), te.placeholder((8,), "float32", "b")
    func = te.create_prim_func([a, b, te.compute((8,), lambda i: chain(a[i], b[i]))])
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    kernel = tvm.compile(mod, target="llvm", tir_pipeline=tir_pipeline.NAME)["main"]
    x, y = np.arange(8, dtype="float32"), np.full(8, np.nan, "float32")
    out = tvm.runtime.tensor(np.zeros(8, "float32"))
    kernel(tvm.runtime.tensor(x), tvm.runtime.tensor(y), out)
    assert np.isnan(out.numpy()).all()


def test_integers_are_left_alone():
    assert isinstance(lowered(tirx.max, "int32"), tirx.Max)


@pytest.mark.parametrize("operator", [op.maximum, op.minimum])
def test_it_fuses_as_an_epilogue(operator):
    """Maximum and minimum are operators like any other to the strategies."""

    def epilogue(emit, x, w, y):
        made = emit(op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI"))
        return emit(operator(made, y))

    shapes = ((1, 8, 8, 16), (16, 1, 1, 16), (1, 8, 8, 16))
    plan = tf.plan(module(epilogue, shapes, "float16"), "cuda:sm_90")
    assert len(plan.groups) == 1 and plan.totals.launches_after == 1
