"""RecognizeNorms: RMS norms and layer norms that a model spells out become one operator."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fusion.compat import relax
from tvm_fusion.frontend.canonical import RecognizeNorms
from tvm_fusion.testing.modules import ModuleBuilder

op = relax.op
EPS = 1e-3


class Norms:
    """Writes norms out, operator by operator, in a module under construction."""

    def __init__(self, shape=(2, 5, 8), dtype="float32"):
        self.b = ModuleBuilder(dtype)
        self.x = self.b.input("x", shape)
        self.scale = self.b.const(shape[-1])

    def __call__(self, operator, *operands, **attrs):
        return self.b.op("n", operator(*operands, **attrs))

    def variance(self, x, axis=-1):
        return self(
            op.add,
            self(op.mean, self(op.square, x), [axis], keepdims=True),
            relax.const(EPS, "float32"),
        )

    def finish(self, *results):
        return self.b.finish(*results)


def by_rsqrt(n, x):
    return n(op.multiply, x, n(op.rsqrt, n.variance(x)))


def by_division(n, x):
    return n(op.divide, x, n(op.sqrt, n.variance(x)))


def by_reciprocal(n, x):
    one = relax.const(1.0, "float32")
    return n(op.multiply, n(op.divide, one, n(op.sqrt, n.variance(x))), x)


def by_product(n, x):
    mean = n(op.mean, n(op.multiply, x, x), [2], keepdims=True)
    root = n(op.rsqrt, n(op.add, relax.const(EPS, "float32"), mean))
    return n(op.multiply, root, x)


@pytest.mark.parametrize("make", [by_rsqrt, by_division, by_reciprocal, by_product])
@pytest.mark.parametrize("left", [False, True])
def test_rms_norm(make, left, operators, run_module):
    n = Norms()
    normed = make(n, n.x)
    factors = (n.scale, normed) if left else (normed, n.scale)
    before = n.finish(n(op.multiply, *factors))
    after = RecognizeNorms()(before)
    assert [name for _, name in operators(after)] == ["nn.rms_norm"]
    x = np.random.default_rng(0).standard_normal((2, 5, 8))
    wanted = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * n.scale.value.numpy()
    for module in (before, after):
        (got,) = run_module(module, x.astype("float32"))
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_casts_around_it_belong_to_it(operators):
    """As Hugging Face's LlamaRMSNorm has it: the norm in float32, the scale in the model's type."""
    n = Norms(dtype="float16")
    wide = n(op.astype, n.x, "float32")
    normed = n(op.astype, by_rsqrt(n, wide), "float16")
    after = RecognizeNorms()(n.finish(n(op.multiply, n.scale, normed)))
    assert [name for _, name in operators(after)] == ["nn.rms_norm"]
    (binding,) = after["main"].body.blocks[0].bindings
    assert str(binding.value.ty.dtype) == "float16"
    assert abs(float(binding.value.attrs.epsilon) - EPS) < 1e-9


def test_layer_norm(operators, run_module):
    """As ONNX files before opset 17 have it."""
    n = Norms()
    centred = n(op.subtract, n.x, n(op.mean, n.x, [-1], keepdims=True))
    shift = n.b.const(8)
    before = n.finish(n(op.add, n(op.multiply, by_division(n, centred), n.scale), shift))
    after = RecognizeNorms()(before)
    assert [name for _, name in operators(after)] == ["nn.layer_norm"]
    x = np.random.default_rng(1).standard_normal((2, 5, 8)) + 3
    wanted = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPS)
    wanted = wanted * n.scale.value.numpy() + shift.value.numpy()
    for module in (before, after):
        (got,) = run_module(module, x.astype("float32"))
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def other_axis(n):
    return n(op.multiply, n(op.multiply, n.x, n(op.rsqrt, n.variance(n.x, 1))), n.scale)


def mean_of_another(n):
    y = n(op.exp, n.x)
    return n(op.multiply, n(op.multiply, n.x, n(op.rsqrt, n.variance(y))), n.scale)


def without_scale(n):
    return by_rsqrt(n, n.x)


def scale_of_every_row(n):
    return n(op.multiply, by_rsqrt(n, n.x), n.b.const(5, 8))


def read_elsewhere(n):
    normed = by_rsqrt(n, n.x)
    return n(op.add, n(op.multiply, normed, n.scale), normed)


def mean_that_loses_its_axis(n):
    mean = n(op.mean, n(op.square, n.x), [-1])
    root = n(op.rsqrt, n(op.add, mean, relax.const(EPS, "float32")))
    return n(op.multiply, n(op.multiply, n.x, n(op.expand_dims, root, -1)), n.scale)


def no_epsilon(n):
    mean = n(op.mean, n(op.square, n.x), [-1], keepdims=True)
    return n(op.multiply, n(op.multiply, n.x, n(op.rsqrt, mean)), n.scale)


@pytest.mark.parametrize(
    "make",
    [other_axis, mean_of_another, without_scale, scale_of_every_row, read_elsewhere,
     mean_that_loses_its_axis, no_epsilon],
)  # fmt: skip
def test_it_does_not_fire(make, check_pass):
    n = Norms()
    check_pass(RecognizeNorms(), n.finish(make(n)))


def test_a_cast_on_one_side_only_keeps_the_chain(check_pass):
    n = Norms()
    normed = n(op.astype, n(op.astype, by_rsqrt(n, n.x), "float16"), "float32")
    check_pass(RecognizeNorms(), n.finish(n(op.multiply, normed, n.scale)))
