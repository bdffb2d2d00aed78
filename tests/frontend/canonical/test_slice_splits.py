"""SliceSplits: a split whose parts are read where elements are computed becomes slices."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fusion.compat import relax
from tvm_fusion.frontend.canonical import SliceSplits
from tvm_fusion.frontend.canonical.rewrite import BindingRewriter
from tvm_fusion.testing.modules import ModuleBuilder

op = relax.op


def halves(b):
    """What a rotary embedding does."""
    first, second = b.split("s", b.input("x", (2, 6)), 2, axis=1)
    return [b.concat("c", [b.op("n", op.negative(second)), first], axis=1)]


def gated(b):
    value, gate = b.split("s", b.op("e", op.exp(b.input("x", (3, 8)))), 2, axis=-1)
    return [b.op("m", op.multiply(value, b.op("g", op.nn.gelu(gate))))]


def uneven(b):
    left, middle, right = b.split("s", b.input("x", (7, 2)), [1, 4], axis=0)
    return [b.op(n, op.exp(v)) for n, v in (("l", left), ("m", middle), ("r", right))]


@pytest.mark.parametrize("make", [halves, gated, uneven])
def test_it_fires(make, operators, run_module):
    b = ModuleBuilder()
    before = b.finish(*make(b))
    after = SliceSplits()(before)
    names = [name for _, name in operators(after)]
    assert "split" not in names and names.count("strided_slice") in (2, 3)
    shape = [int(n) for n in before["main"].params[0].ty.shape]
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    for got, wanted in zip(run_module(after, x), run_module(before, x), strict=True):
        np.testing.assert_array_equal(got, wanted)


def read_by_a_convolution(b):
    """ShuffleNet's: one half is convolved, one goes on."""
    left, right = b.split("s", b.input("x", (1, 8, 5, 5)), 2)
    return [b.concat("c", [left, b.conv("conv", right, 4)])]


def read_twice(b):
    left, right = b.split("s", b.input("x", (2, 6)), 2, axis=1)
    return [b.op("m", op.multiply(left, right)), b.op("e", op.exp(left))]


def returned(b):
    left, right = b.split("s", b.input("x", (2, 6)), 2, axis=1)
    return [left, b.op("e", op.exp(right))]


@pytest.mark.parametrize("make", [read_by_a_convolution, read_twice, returned])
def test_it_does_not_fire(make, check_pass):
    b = ModuleBuilder()
    check_pass(SliceSplits(), BindingRewriter().transform(b.finish(*make(b))))
