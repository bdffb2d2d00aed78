"""Integers divided by what a tensor holds: no signal, and the same quotients elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.build.safe_division import safe_division
from tvm_fusion.compat import relax, structural_equal, te, tirx
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.emulated_plan import EmulatedPlan
from tvm_fusion.testing.modules import ModuleBuilder

OPERATORS = {
    "divide": relax.op.divide,
    "floor_divide": relax.op.floor_divide,
    "mod": relax.op.mod,
    "floor_mod": relax.op.floor_mod,
}
#: Quotients rounded down, and their remainders; toward zero for the others.
NUMPY = {
    "divide": lambda a, b: np.trunc(a.astype("float64") / b).astype(a.dtype),
    "floor_divide": np.floor_divide,
    "mod": None,
    "floor_mod": np.mod,
}


def divided(name, dtype):
    b = ModuleBuilder(dtype)
    x, y = b.input("x", (8,)), b.input("y", (8,))
    one = relax.const(np.array(1, dtype), dtype)
    return b.finish(b.op("add", relax.op.add(b.op("quotient", OPERATORS[name](x, y)), one)))


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8"])
@pytest.mark.parametrize("name", OPERATORS)
def test_no_divisor_ends_the_process(name, dtype):
    module = divided(name, dtype)
    assert tf.verify(module, "llvm", inputs=1).passed  # with zeros among the inputs
    model = tf.compile(module, "llvm")
    least = np.iinfo(dtype).min
    x = np.array([7, 7, 9, 100, 3, 4, least, least], dtype)
    y = np.array([2, 3, 5, 9, 1, 8, 0, np.array(-1).astype(dtype)], dtype)
    (got,) = model(x, y)
    if NUMPY[name] is not None:
        assert np.array_equal(got[:6], NUMPY[name](x[:6], y[:6]) + np.array(1, dtype))
    assert got[6] == 1  # 0 / 0, and the rest, are 0


def body_of(divisor):
    """A function that divides by ``divisor`` of a buffer's element and its place."""
    x, y = te.placeholder((8,), "int32", "x"), te.placeholder((8,), "int32", "y")
    return te.create_prim_func([x, y, te.compute((8,), lambda i: divisor(x, y, i))])


def test_divisors_that_the_code_states_stay_as_they_are():
    stated = body_of(lambda x, y, i: tirx.floordiv(x[i], 3) + y[tirx.floormod(i * 5, 8)])
    assert safe_division(stated) is stated
    floats = body_of(lambda x, y, i: x[i].astype("float32") / y[i].astype("float32"))
    assert safe_division(floats) is floats
    computed = body_of(lambda x, y, i: tirx.floordiv(x[i], y[i]))
    assert not structural_equal(safe_division(computed), computed)


def test_cuda_code_divides_the_same():
    emulated = EmulatedPlan(divided("floor_divide", "int32"), parse_target("cuda:sm_80"))
    x = np.array([7, -7, 9, 0, 3, 4, 5, np.iinfo("int32").min], "int32")
    y = np.array([2, 2, 0, 0, -1, 8, -2, -1], "int32")
    (got,) = emulated(x, y)
    with np.errstate(divide="ignore", over="ignore"):
        assert np.array_equal(got, np.floor_divide(x, y) + 1)
