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
