"""ConvertLayout: channels-last from convolution to convolution, transposes only at the borders."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.frontend.canonical import ConvertLayout, FlattenBindings, RemoveNoOps

SHAPE = (1, 4, 8, 8)


def weight(*shape, seed=0):
    """Return a random weight."""
    return np.random.default_rng(seed).standard_normal(shape, dtype="float32")


def between(middle):
    """Return conv -> middle(builder, value) -> conv."""
    x = relax.Var("x", relax.TensorType(SHAPE, "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            value = builder.emit(
                relax.op.nn.conv2d(x, relax.const(weight(4, 4, 3, 3)), padding=1), "conv"
            )
            value = builder.emit(middle(builder, value), "middle")
            channels = int(value.ty.shape.values[1])
            kernel = relax.const(weight(6, channels, 1, 1, seed=1))
            value = builder.emit_output(relax.op.nn.conv2d(value, kernel), "last")
        builder.emit_func_output(value)
    return FlattenBindings()(builder.get())


def shuffle(builder, value):
    """Two groups of channels, interleaved."""
    value = builder.emit(relax.op.reshape(value, (1, 2, 2, 8, 8)))
    value = builder.emit(relax.op.permute_dims(value, [0, 2, 1, 3, 4]))
    return relax.op.reshape(value, SHAPE)


def across_channels(builder, value):
    """A local response normalisation as TVM imports it: a pool along the channels."""
    value = builder.emit(relax.op.reshape(value, (1, 1, *SHAPE[1:])))
    value = builder.emit(
        relax.op.nn.avg_pool3d(
            value, (3, 1, 1), (1, 1, 1), padding=(1, 0, 0), count_include_pad=True
        )
    )
    return relax.op.reshape(value, SHAPE)


def branches(builder, value):
    """Split, different operators, concat."""
    parts = builder.emit(relax.op.split(value, 2, axis=1))
    left = builder.emit(relax.op.nn.relu(builder.emit(relax.TupleGetItem(parts, 0))))
    right = builder.emit(relax.op.sigmoid(builder.emit(relax.TupleGetItem(parts, 1))))
    return relax.op.concat([left, right, left], axis=1)


MIDDLES = {
    "relu": lambda b, v: relax.op.nn.relu(v),
    "clip": lambda b, v: relax.op.clip(v, 0.0, 6.0),
    "bias": lambda b, v: relax.op.add(v, relax.const(weight(4, 1, 1))),
    "plane": lambda b, v: relax.op.multiply(v, relax.const(weight(8, 8))),
    "scalar": lambda b, v: relax.op.multiply(v, relax.const(2.0)),
    "residual": lambda b, v: relax.op.add(v, b.emit(relax.op.nn.relu(v))),
    "where": lambda b, v: relax.op.where(
        b.emit(relax.op.greater(v, relax.const(0.0))), v, relax.const(0.1)
    ),
    "max pool": lambda b, v: relax.op.nn.max_pool2d(v, (3, 3), (2, 2), (1, 1, 1, 1)),
    "average pool": lambda b, v: relax.op.nn.avg_pool2d(v, (2, 2), (2, 2), count_include_pad=True),
    "adaptive pool": lambda b, v: relax.op.nn.adaptive_avg_pool2d(v, (2, 2)),
    "global mean": lambda b, v: relax.op.mean(v, axis=[2, 3], keepdims=True),
    "gate": lambda b, v: relax.op.multiply(
        v, b.emit(relax.op.sigmoid(b.emit(relax.op.mean(v, [2, 3], True))))
    ),
    "softmax": lambda b, v: relax.op.nn.softmax(v, axis=1),
    "pad": lambda b, v: relax.op.nn.pad(v, [0, 0, 1, 0, 1, 2, 3, 4]),
    "resize": lambda b, v: relax.op.image.resize2d(v, (16, 16)),
    "slice": lambda b, v: relax.op.strided_slice(v, [1, 3], [1, 0], [4, 8], [1, 2]),
    "shuffle": shuffle,
    "across channels": across_channels,
    "branches": branches,
}


@pytest.mark.parametrize("name", MIDDLES)
def test_no_transpose_between_convolutions(run_module, operators, name):
    before = between(MIDDLES[name])
    after = RemoveNoOps()(ConvertLayout()(before))
    transposes = Counter(op for _, op in operators(after))["permute_dims"]
    # The input, the output (where it is more than one pixel), and the model's own.
    assert transposes == {"shuffle": 3, "global mean": 1}.get(name, 2)
    x = weight(*SHAPE, seed=2)
    np.testing.assert_allclose(
        run_module(after, x)[0], run_module(before, x)[0], rtol=1e-4, atol=1e-4
    )


def test_flatten_and_dense_layer(run_module, operators):
    x = relax.Var("x", relax.TensorType(SHAPE, "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            conv = builder.emit(relax.op.nn.conv2d(x, relax.const(weight(3, 4, 3, 3))), "conv")
            flat = builder.emit(relax.op.reshape(conv, (1, 108)), "flat")
            value = builder.emit_output(relax.op.matmul(flat, relax.const(weight(108, 5))), "dense")
        builder.emit_func_output(value)
    before = FlattenBindings()(builder.get())
    after = ConvertLayout()(before)
    assert [op for _, op in operators(after)] == ["permute_dims", "nn.conv2d", "reshape", "matmul"]
    data = weight(*SHAPE, seed=2)
    np.testing.assert_allclose(
        run_module(after, data)[0], run_module(before, data)[0], rtol=1e-4, atol=1e-4
    )


def test_structure_and_names(check_pass, bound, operators):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 4, 8, 8), "float32"), w: R.Tensor((2, 4, 3, 3), "float32")):
            with R.dataflow():
                conv = R.nn.conv2d(x, w, padding=[1, 1, 1, 1])
                out = R.nn.relu(conv)
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((1, 4, 8, 8), "float32"), w: R.Tensor((2, 3, 3, 4), "float32")):
            with R.dataflow():
                conv1 = R.permute_dims(x, [0, 2, 3, 1])
                conv = R.nn.conv2d(
                    conv1,
                    w,
                    padding=[1, 1, 1, 1],
                    data_layout="NHWC",
                    kernel_layout="OHWI",
                    out_layout="NHWC",
                )
                out1 = R.nn.relu(conv)
                out = R.permute_dims(out1, [0, 3, 1, 2])
                R.output(out)
            return out

    w = weight(2, 4, 3, 3)
    after = bound(After, w=np.ascontiguousarray(w.transpose(0, 2, 3, 1)))
    result = check_pass(ConvertLayout(), bound(Before, w=w), after)
    assert [name for name, _ in operators(result)] == ["conv", "conv", "out", "out"]


def test_without_convolutions_nothing_changes(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 4, 8, 8), "float32"), w: R.Tensor((4, 2, 3, 3), "float32")):
            with R.dataflow():
                a = R.nn.max_pool2d(x, pool_size=[2, 2])
                b = R.nn.relu(a)
                c = R.concat((a, b), axis=1)
                d = R.nn.conv2d_transpose(a, w)
                R.output(c, d)
            return (c, d)

    check_pass(ConvertLayout(), Before)
