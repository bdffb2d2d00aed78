"""CompactConstants: what ``where`` selects becomes a scalar where it is one number."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fusion.compat import relax
from tvm_fusion.frontend.canonical import CompactConstants
from tvm_fusion.testing.modules import ModuleBuilder

op = relax.op


def selected(constant, shape=(2, 3)):
    b = ModuleBuilder("float32")
    x = b.input("x", shape)
    condition = b.op("condition", op.isnan(x))
    return b.finish(b.op("y", op.where(condition, relax.const(constant), x)))


def side(module):
    return module["main"].body.blocks[0].bindings[1].value.args[1]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_number(shape, run_module):
    before = selected(np.full(shape, 7, "float32"))
    after = CompactConstants()(before)
    assert side(after).ty.ndim == 0
    x = np.array([[1, np.nan, 3], [np.nan, 5, 6]], "float32")
    for module in (before, after):
        np.testing.assert_array_equal(run_module(module, x)[0], np.where(np.isnan(x), 7, x))


def test_what_stays():
    assert side(CompactConstants()(selected(np.arange(3, dtype="float32")))).ty.ndim == 1
    # It gives the result its third axis.
    assert side(CompactConstants()(selected(np.zeros((1, 1, 1), "float32")))).ty.ndim == 3


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("shape", [(), (3,), (2, 1)])
def test_a_condition_that_is_the_same_everywhere(shape, shown, operators, run_module):
    """As ONNX's attention has it where no row is without a key."""
    b = ModuleBuilder("float32")
    x = b.op("y", op.negative(b.input("x", (2, 3))))
    sides = (x, relax.const(7.0, "float32")) if shown else (relax.const(7.0, "float32"), x)
    condition = relax.const(np.full(shape, shown))
    before = b.finish(b.op("z", op.where(condition, *sides)))
    after = CompactConstants()(before)
    assert [name for _, name in operators(after)] == ["negative"]
    x = np.arange(6, dtype="float32").reshape(2, 3)
    np.testing.assert_array_equal(run_module(after, x)[0], -x)


def test_conditions_that_stay(operators):
    b = ModuleBuilder("float32")
    x, seven = b.input("x", (2, 3)), relax.const(7.0, "float32")
    mixed = b.op("y", op.where(relax.const(np.array([True, False, True])), x, seven))
    # It gives the result another shape, or the number.
    wide = b.op("z", op.where(relax.const(np.ones((4, 1, 1), bool)), mixed, seven))
    number = b.op("w", op.where(relax.const(np.ones((2, 3), bool)), seven, x))
    names = [name for _, name in operators(CompactConstants()(b.finish(wide, number)))]
    assert names.count("where") == 3
