"""FoldScaleIntoWeights: scales around convolutions and matmuls go into the weights, and only where that is right."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.frontend.canonical import FlattenBindings, FoldScaleIntoWeights


def build(anchor, data_shape, weight_shape, *, scale=None, before=None, dtype="float32", **attrs):
    """Return main(x) = anchor(x * before, w) * scale."""
    generator = np.random.default_rng(0)
    x = relax.Var("x", relax.TensorType(data_shape, dtype))
    weight = relax.const(generator.standard_normal(weight_shape).astype(dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            value = (
                x
                if before is None
                else builder.emit(relax.op.multiply(x, relax.const(before)), "before")
            )
            value = builder.emit(anchor(value, weight, **attrs), "anchor")
            if scale is not None:
                value = builder.emit(relax.op.multiply(value, relax.const(scale)), "scale")
            value = builder.emit_output(value)
        builder.emit_func_output(value)
    return FlattenBindings()(builder.get())


def vector(*shape):
    """Return random numbers around one."""
    return np.random.default_rng(1).uniform(0.5, 2, shape).astype("float32")


CASES = {
    "plain": (relax.op.nn.conv2d, (1, 4, 6, 6), (8, 4, 3, 3), {"padding": 1}, (1, 8, 1, 1)),
    "scalar": (relax.op.nn.conv2d, (1, 4, 6, 6), (8, 4, 3, 3), {}, ()),
    "grouped": (relax.op.nn.conv2d, (1, 4, 6, 6), (8, 2, 3, 3), {"groups": 2}, (8, 1, 1)),
    "depthwise": (relax.op.nn.conv2d, (1, 4, 6, 6), (4, 1, 3, 3), {"groups": 4}, (1, 4, 1, 1)),
    "nhwc": (
        relax.op.nn.conv2d, (1, 6, 6, 4), (8, 3, 3, 4), {"data_layout": "NHWC", "kernel_layout": "OHWI"}, (8,),
    ),
    "1d": (relax.op.nn.conv1d, (1, 4, 6), (8, 4, 3), {}, (1, 8, 1)),
    "transposed": (relax.op.nn.conv2d_transpose, (1, 4, 6, 6), (4, 8, 3, 3), {}, (1, 8, 1, 1)),
    "transposed, groups": (relax.op.nn.conv2d_transpose, (1, 4, 6, 6), (4, 3, 3, 3), {"groups": 2}, (1, 6, 1, 1)),
    "matmul": (relax.op.matmul, (5, 4), (4, 8), {}, (8,)),
    "batched matmul": (relax.op.matmul, (2, 5, 4), (2, 4, 8), {}, (1, 8)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_output_scale(run_module, operators, case):
    anchor, data, weight, attrs, scale = CASES[case]
    before = build(anchor, data, weight, scale=vector(*scale), **attrs)
    after = FoldScaleIntoWeights()(before)
    assert [name for name, _ in operators(after)] == ["anchor"]
    x = np.random.default_rng(2).standard_normal(data, dtype="float32")
    np.testing.assert_allclose(
        run_module(after, x)[0], run_module(before, x)[0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("anchor", "data", "weight", "attrs", "scale"),
    [
        (relax.op.nn.conv2d, (1, 4, 6, 6), (8, 4, 3, 3), {"padding": 1}, (1, 4, 1, 1)),
        (relax.op.nn.conv2d, (1, 4, 6, 6), (8, 2, 3, 3), {"groups": 2}, ()),
        (relax.op.matmul, (5, 4), (4, 8), {}, (4,)),
    ],
)
def test_input_scale(run_module, operators, anchor, data, weight, attrs, scale):
    before = build(anchor, data, weight, before=vector(*scale), **attrs)
    after = FoldScaleIntoWeights()(before)
    assert operators(after)[0][0] == "anchor" and len(operators(after)) == 1
    x = np.random.default_rng(2).standard_normal(data, dtype="float32")
    np.testing.assert_allclose(
        run_module(after, x)[0], run_module(before, x)[0], rtol=1e-4, atol=1e-5
    )


def test_values_are_rounded_once(bound, check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((2, 4), "float32"),
            w: R.Tensor((4, 3), "float32"),
            s: R.Tensor((3,), "float32"),
        ):
            with R.dataflow():
                product = R.matmul(x, w)
                out = R.multiply(product, s)
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((2, 4), "float32"), w: R.Tensor((4, 3), "float32")):
            with R.dataflow():
                out = R.matmul(x, w)
                R.output(out)
            return out

    w, s = vector(4, 3), vector(3)
    exact = (w.astype("float64") * s.astype("float64")).astype("float32")
    check_pass(FoldScaleIntoWeights(), bound(Before, w=w, s=s), bound(After, w=exact))


@pytest.mark.parametrize(
    ("scale", "before", "groups"),
    [
        (vector(1, 1, 6, 6), None, 1),  # varies over the image
        (None, vector(1, 4, 1, 1), 2),  # input channels of a grouped convolution
        (np.full((1, 8, 1, 1), 3e38, "float32"), None, 1),  # infinite weights
    ],
)
def test_no_fire(check_pass, scale, before, groups):
    mod = build(
        relax.op.nn.conv2d,
        (1, 4, 6, 6),
        (8, 4 // groups, 3, 3),
        scale=scale,
        before=before,
        groups=groups,
        padding=1,
    )
    check_pass(FoldScaleIntoWeights(), mod)


def test_a_second_reader_keeps_the_convolution(check_pass, bound):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 4), "float32"), w: R.Tensor((4, 3), "float32")):
            with R.dataflow():
                product = R.matmul(x, w)
                scaled = R.multiply(product, R.const(2.0, "float32"))
                out = R.add(product, scaled)
                R.output(out)
            return out

    check_pass(FoldScaleIntoWeights(), bound(Before, w=vector(4, 3)))
