"""DropInfiniteSelections: what is selected for infinities among values that have none goes away."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fusion.compat import relax
from tvm_fusion.frontend.canonical import DropInfiniteSelections
from tvm_fusion.testing.modules import ModuleBuilder

op = relax.op
SHAPE = (3, 8)


def number(value: float) -> relax.Expr:
    return relax.const(value, "float32")


def by_equality(b, x):
    """PyTorch's ``nan_to_num``, decomposed."""
    y = b.op("nan", op.where(b.op("isnan", op.isnan(x)), number(0.0), x))
    for bound, least in ((-np.inf, -3e38), (np.inf, 3e38)):
        y = b.op("y", op.where(b.op("c", op.equal(x, number(bound))), number(least), y))
    return y


def by_conjunction(b, x):
    """The same in files of its ONNX exporter, which asks for the sign."""
    y = b.op("nan", op.where(b.op("isnan", op.isnan(x)), number(0.0), x))
    for compare, least in ((op.greater, 3e38), (op.less, -3e38)):
        infinite = b.op("i", op.isinf(b.op("wide", op.astype(y, "float64"))))
        both = b.op("both", op.logical_and(infinite, b.op("sign", compare(y, number(0.0)))))
        y = b.op("y", op.where(both, number(least), y))
    return y


def names(module, operators) -> list[str]:
    return [name for _, name in operators(module)]


@pytest.mark.parametrize("make", [by_equality, by_conjunction])
@pytest.mark.parametrize("bounded", [op.nn.softmax, op.sigmoid, op.tanh])
def test_one_selection_is_left(make, bounded, operators, run_module):
    b = ModuleBuilder("float32")
    before = b.finish(make(b, b.op("bounded", bounded(b.input("x", SHAPE)))))
    after = DropInfiniteSelections()(before)
    assert names(after, operators)[1:] == ["isnan", "where"]
    x = np.random.default_rng(0).standard_normal(SHAPE).astype("float32")
    x[1], x[2, 3], x[2, 4] = -np.inf, np.nan, np.inf
    for one, other in zip(run_module(before, x), run_module(after, x), strict=True):
        np.testing.assert_array_equal(one, other)


def unbounded(b, x):
    return by_equality(b, b.op("exp", op.exp(x)))


def after_a_large_number(b, x):
    """What stands for NaN may be infinite in a narrower type."""
    y = b.op("s", op.sigmoid(x))
    y = b.op("nan", op.where(b.op("isnan", op.isnan(y)), number(1e9), y))
    return b.op("y", op.where(b.op("c", op.isinf(y)), number(0.0), y))


def another_bound(b, x):
    y = b.op("s", op.sigmoid(x))
    return b.op("y", op.where(b.op("c", op.equal(y, number(1.0))), number(0.0), y))


def disjunction(b, x):
    y = b.op("s", op.sigmoid(x))
    either = b.op("e", op.logical_or(b.op("i", op.isinf(y)), b.op("n", op.isnan(y))))
    return b.op("y", op.where(either, number(0.0), y))


def wider(b, x):
    """The selection gives more rows than the values have."""
    y = b.op("s", op.sigmoid(b.input("row", (1, 8))))
    return b.op("y", op.where(b.op("c", op.isinf(y)), x, y))


@pytest.mark.parametrize(
    "make", [unbounded, after_a_large_number, another_bound, disjunction, wider]
)
def test_what_stays(make, operators):
    b = ModuleBuilder("float32")
    before = b.finish(make(b, b.input("x", SHAPE)))
    assert names(DropInfiniteSelections()(before), operators) == names(before, operators)
