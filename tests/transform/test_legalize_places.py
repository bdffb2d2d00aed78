"""argmax and argmin of integers and truth values, at the limits of their types too."""

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.compat import relax
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.emulated_plan import EmulatedPlan
from tvm_fusion.verification.reference import Reference

DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
SEARCHES = {"argmax": (relax.op.argmax, np.argmax), "argmin": (relax.op.argmin, np.argmin)}


def rows(dtype):
    """Rows of one limit of the type, of both in some order, and of other numbers."""
    low, high = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    table = [
        [low] * 4, [high] * 4, [low, high, low, high], [high, low, high, low], [low, low, low, high], [1, 0, 1, 0],
        [high, high, high, low], [0, 1, 1, 0],
    ]  # fmt: skip
    return np.array([[int(number) for number in row] for row in table], dtype)


def module(dtype, search, axis=1, keepdims=False, before=lambda x: x):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((8, 4), dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            made = builder.emit(search(before(x), axis, keepdims))
            result = builder.emit_output(made)
        builder.emit_func_output(result)
    return tf.frontend.from_relax(builder.get())


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_cpus(dtype, name):
    search, wanted = SEARCHES[name]
    x = rows(dtype)
    mod = module(dtype, search)
    (got,) = tf.compile(mod, "llvm", verify=False)(x)
    np.testing.assert_array_equal(got, wanted(x, 1))
    np.testing.assert_array_equal(Reference(mod, "float32")(x)[0], wanted(x, 1))


@pytest.mark.parametrize("axis", [0, None])
@pytest.mark.parametrize("dtype", ["uint8", "int64"])
def test_other_axes(dtype, axis):
    x = np.zeros((8, 4), dtype)
    x[:, 2] = 1
    for place in (x, x[::-1, ::-1].copy(), np.zeros_like(x)):
        mod = module(dtype, relax.op.argmax, axis, keepdims=axis is not None)
        (got,) = tf.compile(mod, "llvm", verify=False)(place)
        np.testing.assert_array_equal(got, place.argmax(axis, keepdims=axis is not None))


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
def test_on_gpus(dtype, name):
    """A kernel of two operators, from its generated source."""
    search, wanted = SEARCHES[name]
    x = rows(dtype)
    mod = module(dtype, search, before=lambda v: relax.op.maximum(v, relax.const(1, dtype)))
    plan = EmulatedPlan(mod, parse_target("cuda:sm_90"))
    np.testing.assert_array_equal(plan(x)[0], wanted(np.maximum(x, 1), 1))
