"""RecognizeSoftmax: a softmax that a model spells out becomes one operator."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fusion.compat import relax
from tvm_fusion.frontend.canonical import RecognizeSoftmax
from tvm_fusion.testing.modules import ModuleBuilder

op = relax.op
SHAPE = (2, 5, 8)


class Written:
    """Writes a softmax out, operator by operator."""

    def __init__(self, axis=-1, keepdims=True):
        self.b, self.axis, self.keepdims = ModuleBuilder("float32"), axis, keepdims
        self.x = self.b.input("x", SHAPE)

    def __call__(self, operator, *operands, **attrs):
        return self.b.op("s", operator(*operands, **attrs))

    def over(self, operator, x):
        found = self(operator, x, [self.axis], keepdims=self.keepdims)
        if self.keepdims:
            return found
        shape = [1 if i == self.axis % 3 else n for i, n in enumerate(SHAPE)]
        return self(op.reshape, found, shape)

    def power(self):
        return self(op.exp, self(op.subtract, self.x, self.over(op.max, self.x)))

    def softmax(self):
        power = self.power()
        return self(op.divide, power, self.over(op.sum, power))


def softmax(x, axis=-1):
    power = np.exp(x - x.max(axis, keepdims=True))
    return power / power.sum(axis, keepdims=True)


def check(before, operators, run_module, axis=-1):
    """One operator is left; both modules have the values of a softmax, of rows that are not finite, too."""
    after = RecognizeSoftmax()(before)
    assert [name for _, name in operators(after)] == ["nn.softmax"]
    x = np.random.default_rng(0).standard_normal(SHAPE).astype("float32") * 30
    x[0, 0], x[0, 1, :], x[0, 2, 3], x[1, 2, 3] = -np.inf, 1e30, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        wanted = softmax(x.astype("float64"), axis)
    for module in (before, after):
        (got,) = run_module(module, x)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize("axis", [-1, 1, 0])
def test_by_division(axis, keepdims, operators, run_module):
    w = Written(axis, keepdims)
    check(w.b.finish(w.softmax()), operators, run_module, axis)


@pytest.mark.parametrize("left", [True, False])
def test_by_reciprocal(left, operators, run_module):
    w = Written()
    power = w.power()
    factors = (power, w(op.divide, relax.const(1.0, "float32"), w.over(op.sum, power)))
    check(w.b.finish(w(op.multiply, *(factors if left else factors[::-1]))), operators, run_module)


@pytest.mark.parametrize("left", [True, False])
def test_as_jax_writes_it(left, operators, run_module):
    """The largest is compared with minus infinity, and broadcast, as is the sum."""
    w = Written()
    most = (w.over(op.max, w.x), relax.const(-np.inf, "float32"))
    most = w(op.maximum, *(most[::-1] if left else most))
    power = w(op.exp, w(op.subtract, w.x, w(op.broadcast_to, most, SHAPE)))
    total = w(op.broadcast_to, w.over(op.sum, power), SHAPE)
    check(w.b.finish(w(op.divide, power, total)), operators, run_module)


def test_exponentials_of_a_log_softmax(operators, run_module):
    w = Written()
    check(w.b.finish(w(op.exp, w(op.nn.log_softmax, w.x))), operators, run_module)


def unshifted(w):
    """It overflows where a softmax does not."""
    power = w(op.exp, w.x)
    return [w(op.divide, power, w.over(op.sum, power))]


def another_axis(w):
    power = w.power()
    return [w(op.divide, power, w(op.sum, power, [1], keepdims=True))]


def another_largest(w):
    power = w(op.exp, w(op.subtract, w.x, w(op.max, w.b.input("y", SHAPE), [-1], keepdims=True)))
    return [w(op.divide, power, w.over(op.sum, power))]


def square(w):
    power = w(op.exp, w(op.subtract, w.x, w(op.min, w.x, [-1], keepdims=True)))
    return [w(op.divide, power, w.over(op.sum, power))]


def bounded(w):
    most = w(op.maximum, w.over(op.max, w.x), relax.const(0.0, "float32"))
    power = w(op.exp, w(op.subtract, w.x, most))
    return [w(op.divide, power, w.over(op.sum, power))]


def read_elsewhere(w):
    power = w.power()
    return [w(op.divide, power, w.over(op.sum, power)), power]


def read_log(w):
    log = w(op.nn.log_softmax, w.x)
    return [w(op.exp, log), log]


def another_rank(w):
    """The sum is broadcast, and then has one axis more than the tensor; so has the quotient."""
    power = w.power()
    total = w(op.broadcast_to, w.over(op.sum, power), SHAPE)
    return [w(op.divide, power, w(op.reshape, total, (1, *SHAPE)))]


@pytest.mark.parametrize(
    "make",
    [
        unshifted, another_axis, another_largest, square, bounded, read_elsewhere, read_log,
        another_rank,
    ],
)  # fmt: skip
def test_what_stays(make, operators):
    w = Written()
    before = w.b.finish(*make(w))
    assert "nn.softmax" not in [name for _, name in operators(RecognizeSoftmax()(before))]


@pytest.mark.parametrize("kind", [op.nn.softmax, op.nn.log_softmax])
@pytest.mark.parametrize("axis", [-1, 1])
def test_what_a_softmax_subtracts_itself_is_not_subtracted_before(
    kind, axis, operators, run_module
):
    w = Written(axis)
    before = w.b.finish(w(kind, w(op.subtract, w.x, w.over(op.max, w.x)), axis=axis))
    after = RecognizeSoftmax()(before)
    assert len(operators(after)) == 1
    x = np.random.default_rng(0).standard_normal(SHAPE).astype("float32") * 30
    for one, other in zip(run_module(before, x), run_module(after, x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_what_else_is_subtracted_stays(operators):
    w = Written()
    for largest in (w(op.max, w.x, [1], True), w(op.mean, w.x, [-1], True)):
        before = w.b.finish(w(op.nn.softmax, w(op.subtract, w.x, largest)))
        assert len(operators(RecognizeSoftmax()(before))) == 3
