"""SplitProducts: a product whose columns are split becomes one product for each part."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fusion.compat import relax
from tvm_fusion.frontend.canonical import SplitProducts
from tvm_fusion.frontend.canonical.rewrite import BindingRewriter
from tvm_fusion.testing.modules import ModuleBuilder


def projection(b, *, bias=True, columns=9):
    x = b.input("x", (2, 3, 4))
    return b.dense("p", x, columns, bias=bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("parts", [3, [2, 7]])
def test_a_projection(bias, parts, operators, run_module):
    b = ModuleBuilder()
    before = b.finish(*b.split("s", projection(b, bias=bias), parts, axis=-1))
    after = SplitProducts()(before)
    layer = ["matmul", "add"] if bias else ["matmul"]
    assert [name for _, name in operators(after)] == 3 * layer
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype("float32")
    for got, wanted in zip(run_module(after, x), run_module(before, x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_of_several_layers(operators):
    """The second one reads what the first one's parts make."""
    b = ModuleBuilder()
    left, right = b.split("s", projection(b, columns=8), 2, axis=2)
    joined = b.op("m", relax.op.multiply(left, right))
    parts = b.split("t", b.dense("q", joined, 6), 2, axis=2)
    after = SplitProducts()(b.finish(*parts))
    assert "split" not in [name for _, name in operators(after)]


def of_rows(b):
    return b.split("s", projection(b), [1], axis=1)


def read_whole_too(b):
    value = projection(b)
    return [*b.split("s", value, 3, axis=2), b.op("e", relax.op.exp(value))]


def product_read_elsewhere(b):
    product = projection(b, bias=False)
    biased = b.op("p_bias", relax.op.add(product, b.const(9)))
    return [*b.split("s", biased, 3, axis=2), b.op("e", relax.op.exp(product))]


def behind_an_activation(b):
    return b.split("s", b.op("g", relax.op.nn.gelu(projection(b))), 3, axis=2)


def weight_that_is_no_constant(b):
    x, w = b.input("x", (3, 4)), b.input("w", (4, 6))
    return b.split("s", b.op("p", relax.op.matmul(x, w)), 2, axis=1)


def batched_weight(b):
    x = b.input("x", (2, 3, 4))
    return b.split("s", b.op("p", relax.op.matmul(x, b.const(2, 4, 6))), 2, axis=2)


@pytest.mark.parametrize(
    "make",
    [of_rows, read_whole_too, product_read_elsewhere, behind_an_activation,
     weight_that_is_no_constant, batched_weight],
)  # fmt: skip
def test_it_does_not_fire(make, check_pass):
    b = ModuleBuilder()
    check_pass(SplitProducts(), BindingRewriter().transform(b.finish(*make(b))))
