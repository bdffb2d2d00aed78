"""Maxima, minima and places of rows of infinities and NaN."""

import ml_dtypes
import numpy as np
import pytest
from tvm_fusion.schedules.analysis import nodes_of

import tvm_fusion as tf
from tvm_fusion.compat import relax, s_tir, tirx, tvm
from tvm_fusion.config import FusionConfig
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.emulated_plan import EmulatedPlan
from tvm_fusion.transform.legalize import legalize
from tvm_fusion.verification.reference import Reference

op = relax.op
INF, NAN = np.inf, np.nan
KINDS = {"bfloat16": ml_dtypes.bfloat16}


def rows(dtype):
    """Rows of infinities of either sign, with a number, with the largest number, and with NaN behind an infinity."""
    kind = np.dtype(KINDS.get(dtype, dtype))
    large = float(tirx.max_value(dtype).value)
    table = [
        [-INF] * 8, [INF] * 8, [-INF] * 7 + [-large], [INF] * 7 + [large], [1, -INF, 2, INF, 0, 0, 0, 0],
        [-INF, NAN, NAN, 1, 2, 3, 4, 5], [INF, NAN, NAN, 1, 2, 3, 4, 5], [0.0, -0.0, 0, 0, -1, -1, 0, 0],
    ]  # fmt: skip
    return np.array(table).astype(kind)


def module(dtype, *steps, shape=(8, 8)):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            made = [builder.emit(step(x)) for step in steps]
            result = builder.emit_output(relax.Tuple(made))
        builder.emit_func_output(result)
    return tf.frontend.from_relax(builder.get())


def pooled(x):
    """Maximum of up to three neighbours in a row."""
    padded = np.pad(x.astype("float64"), ((0, 0), (1, 1)), constant_values=-INF)
    with np.errstate(invalid="ignore"):
        return np.max([padded[:, i : i + x.shape[1]] for i in range(3)], axis=0)


STEPS = (
    lambda x: op.max(x, axis=1),
    lambda x: op.min(x, axis=1),
    lambda x: op.argmax(x, axis=1),
    lambda x: op.argmin(x, axis=1),
)


def check(results, x):
    wide = x.astype("float64")
    with np.errstate(invalid="ignore"):
        expected = [wide.max(1), wide.min(1), wide.argmax(1), wide.argmin(1)]
    for got, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(got).astype("float64"), wanted)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_on_cpus(dtype):
    x = rows(dtype)
    check(tf.compile(module(dtype, *STEPS), "llvm", verify=False)(x), x)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_reference_agrees(dtype):
    x = rows(dtype)
    check(Reference(module(dtype, *STEPS), dtype)(x), x)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("step", range(4))
def test_on_gpus(step, dtype):
    """A kernel of two operators, from its generated source."""
    x = rows(dtype)
    mod = module(dtype, lambda v: STEPS[step](op.negative(op.negative(v))))
    plan = EmulatedPlan(mod, parse_target("cuda:sm_90"))
    assert len(plan.plan.groups) == 1 and "default" not in plan.templates.values()
    with np.errstate(invalid="ignore"):
        wide = x.astype("float64")
        wanted = [wide.max(1), wide.min(1), wide.argmax(1), wide.argmin(1)][step]
    np.testing.assert_array_equal(plan(x)[0].astype("float64"), wanted)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_pooling_pads_with_infinity(dtype):
    x = rows(dtype)[None, None]

    def pool(v):
        return op.nn.max_pool2d(v, (1, 3), padding=(0, 1))

    mod = module(dtype, pool, shape=x.shape)
    (got,) = tf.compile(mod, "llvm", verify=False)(x)
    np.testing.assert_array_equal(got[0, 0].astype("float64"), pooled(x[0, 0]))
    chain = module(dtype, lambda v: pool(op.negative(op.negative(v))), shape=x.shape)
    plan = EmulatedPlan(chain, parse_target("cuda:sm_90"))
    assert "default" not in plan.templates.values()
    np.testing.assert_array_equal(plan(x)[0][0, 0].astype("float64"), pooled(x[0, 0]))


@pytest.mark.nvcc
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_nvcc_takes_infinities(dtype):
    mod = module(dtype, *(lambda v, s=s: s(op.negative(v)) for s in STEPS))
    tf.compile(mod, "cuda:sm_90", config=FusionConfig(), verify=False, strict=True)


def starts(mod):
    """What the reductions of a legalised module start from."""
    functions = [f for f in legalize(mod).functions.values() if isinstance(f, tirx.PrimFunc)]
    blocks = [b for f in functions for b in nodes_of(f.body, s_tir.SBlock) if b.init is not None]
    return {float(b.init.value.value) for b in blocks}


def test_other_reductions_start_as_before():
    assert starts(module("float32", lambda x: op.max(x, axis=1))) == {-INF}
    assert starts(module("float32", lambda x: op.sum(x, axis=1))) == {0.0}
    # What a softmax takes away does not matter: rows of minus infinity are NaN.
    lowest = float(tirx.min_value("float32").value)
    soft = module("float32", op.nn.softmax)
    assert starts(soft) == {lowest, 0.0}
    got = tf.compile(soft, tvm.target.Target("llvm"), verify=False)(rows("float32"))[0]
    assert np.isnan(got[:2]).all()


def test_integers_start_from_their_limits():
    x = np.full((8, 8), np.iinfo("int32").min, "int32")
    mod = module("int32", lambda v: op.max(v, axis=1), lambda v: op.min(v, axis=1))
    for got in tf.compile(mod, "llvm", verify=False)(x):
        np.testing.assert_array_equal(got, x[:, 0])
