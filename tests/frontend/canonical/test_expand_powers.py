"""ExpandPowers: small constant exponents become products, roots and quotients; others stay powers."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.build.inputs import numpy_dtype
from tvm_fusion.compat import relax
from tvm_fusion.frontend.canonical import ExpandPowers
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.emulated_plan import EmulatedPlan
from tvm_fusion.testing.modules import ModuleBuilder


def power_of(exponent: np.ndarray, shape=(3, 8), dtype: str = "float32"):
    """A module that raises its input to a constant power."""
    b = ModuleBuilder(dtype)
    return b.finish(b.op("pow", relax.op.power(b.input("x", shape), b.array(exponent))))


@pytest.mark.parametrize(
    ("exponent", "names"),
    [
        (2, ["square"]),
        (3, ["square", "multiply"]),
        (4, ["square", "square"]),
        (0.5, ["sqrt"]),
        (-0.5, ["rsqrt"]),
        (-1, ["divide"]),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 8)])
def test_small_exponents(operators, run_module, check_pass, exponent, names, shape):
    before = power_of(np.full(shape, exponent))
    after = ExpandPowers()(before)
    assert operators(after) == [("pow", name) for name in names]
    check_pass(ExpandPowers(), before, after)
    x = np.random.default_rng(0).uniform(0.5, 2, (3, 8)).astype("float32")
    np.testing.assert_allclose(run_module(after, x)[0], x.astype("float64") ** exponent, rtol=1e-6)


def test_other_powers_stay(check_pass):
    check_pass(ExpandPowers(), power_of(np.array(1.5)))
    check_pass(ExpandPowers(), power_of(np.array(5.0)))
    check_pass(ExpandPowers(), power_of(np.arange(8)))
    # A constant that broadcasts the base: the power has another shape than the base.
    check_pass(ExpandPowers(), power_of(np.full((4, 1, 1), 2.0)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("exponent", [2.0, 5.0])
def test_norms_by_powers_of_negative_numbers(dtype, exponent):
    """How torch exports an RMS norm: CUDA's fast power is NaN for negative numbers, and TVM has none for bfloat16."""
    b = ModuleBuilder(dtype)
    x = b.input("x", (5, 67))
    power = b.op("power", relax.op.power(x, b.array(np.array(exponent))))
    mean = b.op("mean", relax.op.mean(power, [-1], keepdims=True))
    root = b.op("root", relax.op.rsqrt(b.op("eps", relax.op.add(mean, b.array(np.array(40.0))))))
    module = tf.frontend.from_relax(b.finish(b.op("norm", relax.op.multiply(x, root))))
    plan = EmulatedPlan(module, parse_target("cuda:sm_90"))
    kind = numpy_dtype(dtype)
    x = np.random.default_rng(0).standard_normal((5, 67)).clip(-2, 2).astype(kind)
    wide = x.astype("float64")
    expected = wide / np.sqrt((wide**exponent).mean(-1, keepdims=True) + 40)
    tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    (result,) = plan(x)
    assert np.abs(result.astype("float64") - expected).max() <= tolerance
