"""Make Relay modules with a TVM that has Relay: saved JSON, parameters, inputs and Relay's own results.

Run by that TVM's Python (3.6 of TVM 0.8 included), not by this package's::

    python relay_models.py OUT NAME...

writes ``NAME.json``, ``NAME.params`` (if the model keeps its weights apart) and ``NAME.npz`` with the
arrays ``in_<parameter>`` and ``out_<number>`` for each name.
"""

import sys

import numpy as np
import tvm
from tvm import relay

TARGET = "llvm -mtriple=x86_64-linux-gnu"


class Builder:
    """Collects the inputs and results of a module of many operators."""

    def __init__(self):
        self.inputs, self.values, self.outputs = [], {}, []
        self.random = np.random.RandomState(0)

    def input(self, *shape, **options):
        """A new input; ``low``, ``high``: range of its values; ``dtype``."""
        dtype = options.get("dtype", "float32")
        name = f"x{len(self.inputs)}"
        low, high = options.get("low", -1), options.get("high", 1)
        values = self.random.uniform(low, high, shape)
        self.values[name] = (
            np.floor(values).astype(dtype) if "int" in dtype else values.astype(dtype)
        )
        self.inputs.append(relay.var(name, shape=shape, dtype=dtype))
        return self.inputs[-1]

    def weight(self, *shape, **options):
        """A constant."""
        low, high = options.get("low", -1), options.get("high", 1)
        return relay.const(self.random.uniform(low, high, shape).astype("float32"))

    def out(self, *values):
        """Results."""
        self.outputs.extend(values)

    def module(self):
        """The module, with inferred types."""
        body = self.outputs[0] if len(self.outputs) == 1 else relay.Tuple(self.outputs)
        return relay.transform.InferType()(
            tvm.IRModule.from_expr(relay.Function(self.inputs, body))
        )


def elementwise(b):
    x, y, p = b.input(2, 3, 4), b.input(3, 1), b.input(2, 3, 4, low=0.5, high=2)
    for name in ("abs", "atan", "ceil", "cos", "erf", "exp", "floor", "negative", "sigmoid", "sin", "tan", "tanh",
                 "sign", "round", "trunc", "copy"):  # fmt: skip
        b.out(getattr(relay, name)(x))
    for name in ("log", "log2", "log10", "sqrt", "rsqrt"):
        b.out(getattr(relay, name)(p))
    for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum"):
        b.out(getattr(relay, name)(x, y))
    b.out(
        relay.power(p, x), relay.mod(p, relay.const(0.3)), relay.floor_divide(x, relay.const(0.3))
    )
    b.out(relay.floor_mod(x, relay.const(0.3)))
    for name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"):
        b.out(getattr(relay, name)(x, y))
    less = relay.less(x, y)
    b.out(relay.where(less, x, p), relay.logical_not(less), relay.logical_and(less, less))
    b.out(
        relay.clip(x, -0.5, 0.25),
        relay.nn.relu(x),
        relay.nn.leaky_relu(x, 0.1),
        relay.cast(x, "float16"),
    )
    b.out(
        relay.cast(relay.multiply(x, relay.const(9.0)), "int32"), relay.cast_like(relay.const(2), x)
    )
    b.out(relay.nn.prelu(x, b.weight(3)), relay.nn.dropout(x))
    for name in ("acos", "asin", "asinh", "atanh", "cosh", "sinh", "isfinite", "isinf", "isnan"):
        b.out(getattr(relay, name)(x))
    b.out(relay.acosh(relay.add(p, relay.const(1.0))), relay.annotation.stop_fusion(x))
    b.out(relay.logical_or(less, relay.logical_not(less)), relay.logical_xor(less, less))
    n = b.input(2, 3, low=0, high=9, dtype="int32")
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"):
        b.out(getattr(relay, name)(n, relay.const(3)))
    b.out(relay.bitwise_not(n), relay.clip(n, 2, 5))


def convolutions(b):
    x, last = b.input(1, 4, 9, 8), b.input(1, 9, 8, 4)
    b.out(relay.nn.conv2d(x, b.weight(6, 4, 3, 3), padding=(1, 1), kernel_size=(3, 3), channels=6))
    b.out(relay.nn.conv2d(x, b.weight(6, 2, 3, 2), strides=(2, 1), padding=(0, 1, 2, 3), groups=2))
    b.out(
        relay.nn.conv2d(
            x, b.weight(4, 1, 3, 3), dilation=(2, 2), groups=4, channels=4, kernel_size=(3, 3)
        )
    )
    b.out(relay.nn.conv2d(last, b.weight(3, 3, 4, 6), data_layout="NHWC", kernel_layout="HWIO", channels=6,
                          kernel_size=(3, 3), padding=(1, 1)))  # fmt: skip
    b.out(relay.nn.conv2d(last, b.weight(3, 3, 4, 1), data_layout="NHWC", kernel_layout="HWOI", channels=4,
                          kernel_size=(3, 3), groups=4))  # fmt: skip
    b.out(relay.nn.conv2d_transpose(x, b.weight(4, 6, 3, 3), strides=(2, 2), padding=(1, 1), output_padding=(1, 1),
                                    channels=6, kernel_size=(3, 3)))  # fmt: skip
    b.out(
        relay.nn.conv2d_transpose(
            x, b.weight(4, 4, 2, 2), strides=(2, 2), channels=4, kernel_size=(2, 2)
        )
    )
    b.out(relay.nn.conv1d_transpose(b.input(1, 4, 9), b.weight(4, 6, 3), strides=(2,), padding=(1,), channels=6,
                                    kernel_size=(3,)))  # fmt: skip
    b.out(relay.nn.conv3d_transpose(b.input(1, 2, 3, 4, 5), b.weight(2, 3, 3, 3, 3), strides=(2, 2, 2), channels=3,
                                    padding=(1, 1, 1), kernel_size=(3, 3, 3)))  # fmt: skip
    b.out(
        relay.nn.conv1d(b.input(1, 4, 9), b.weight(6, 4, 3), padding=1, kernel_size=3, channels=6)
    )
    b.out(relay.nn.conv3d(b.input(1, 2, 5, 6, 7), b.weight(3, 2, 3, 3, 3), padding=(1, 1, 1), channels=3,
                          kernel_size=(3, 3, 3)))  # fmt: skip


def pools(b):
    x, last = b.input(1, 3, 9, 8), b.input(1, 9, 8, 3)
    b.out(relay.nn.max_pool2d(x, (3, 3), (2, 2), padding=(1, 1)))
    b.out(relay.nn.max_pool2d(x, (2, 2), (2, 2), ceil_mode=True))
    b.out(relay.nn.max_pool2d(last, (3, 2), (1, 2), padding=(1, 0, 1, 0), layout="NHWC"))
    b.out(relay.nn.avg_pool2d(x, (3, 3), (2, 2), padding=(1, 1)))
    b.out(relay.nn.avg_pool2d(x, (3, 3), (1, 1), padding=(1, 1), count_include_pad=True))
    b.out(relay.nn.avg_pool2d(x, (2, 2), (2, 2), ceil_mode=True))
    b.out(relay.nn.global_avg_pool2d(x), relay.nn.global_max_pool2d(x))
    b.out(relay.nn.global_avg_pool2d(last, layout="NHWC"))
    b.out(relay.nn.adaptive_avg_pool2d(x, (3, 2)), relay.nn.adaptive_avg_pool2d(x, (1, 1)))
    b.out(relay.nn.adaptive_avg_pool2d(x), relay.nn.adaptive_max_pool2d(x, (3, 4)))
    line, solid = b.input(1, 3, 8), b.input(1, 2, 4, 6, 8)
    b.out(relay.nn.adaptive_avg_pool1d(line, 3), relay.nn.adaptive_max_pool1d(line, 4))
    b.out(
        relay.nn.adaptive_avg_pool3d(solid, (2, 4, 3)),
        relay.nn.adaptive_max_pool3d(solid, (2, 3, 4)),
    )
    b.out(
        relay.nn.max_pool1d(b.input(1, 3, 9), (3,), (2,)),
        relay.nn.avg_pool1d(b.input(1, 3, 8), (2,), (2,)),
    )
    b.out(relay.nn.max_pool3d(b.input(1, 2, 4, 4, 4), (2, 2, 2), (2, 2, 2)))
    b.out(relay.nn.avg_pool3d(b.input(1, 2, 4, 4, 4), (2, 2, 2), (2, 2, 2)))


def norms(b):
    x, row = b.input(2, 4, 5, 3), b.input(3, 6)
    first = relay.nn.batch_norm(
        x, b.weight(4), b.weight(4), b.weight(4), b.weight(4, low=0.5, high=2)
    )
    plain = relay.nn.batch_norm(x, b.weight(4), b.weight(4), b.weight(4), b.weight(4, low=0.5, high=2), epsilon=0.01,
                                center=False, scale=False)  # fmt: skip
    last = relay.nn.batch_norm(
        x, b.weight(3), b.weight(3), b.weight(3), b.weight(3, low=0.5, high=2), axis=3
    )
    b.out(first[0], plain[0], last[0])
    b.out(
        relay.nn.layer_norm(row, b.weight(6), b.weight(6)),
        relay.nn.layer_norm(x, b.weight(4), b.weight(4), axis=1),
    )
    b.out(relay.nn.instance_norm(x, b.weight(4), b.weight(4)))
    b.out(relay.nn.group_norm(x, b.weight(4), b.weight(4), num_groups=2))
    b.out(relay.nn.softmax(row), relay.nn.softmax(x, axis=1), relay.nn.log_softmax(row))
    b.out(
        relay.nn.l2_normalize(x, 1e-6, [1]),
        relay.nn.lrn(x, size=3, axis=1, alpha=0.1, beta=0.5, bias=1.0),
    )
    b.out(relay.nn.bias_add(x, b.weight(4)), relay.nn.bias_add(x, b.weight(3), axis=-1))


def products(b):
    x, stack = b.input(3, 6), b.input(2, 3, 6)
    b.out(relay.nn.dense(x, b.weight(5, 6)), relay.nn.dense(x, b.weight(5, 6), units=5))
    b.out(relay.nn.dense(x, b.input(5, 6)))
    b.out(
        relay.nn.batch_matmul(stack, b.input(2, 4, 6)),
        relay.nn.batch_matmul(stack, b.weight(2, 4, 6)),
    )
    if hasattr(relay.nn, "matmul"):
        b.out(relay.nn.matmul(x, b.weight(6, 5)))
        b.out(relay.nn.batch_matmul(stack, b.input(2, 6, 4), transpose_b=False))


def reductions(b):
    x = b.input(2, 3, 4)
    for name in ("sum", "mean", "max", "min", "prod"):
        function = getattr(relay, name)
        b.out(function(x), function(x, axis=1), function(x, axis=[0, -1], keepdims=True))
        b.out(function(x, axis=1, exclude=True))
    b.out(relay.variance(x, axis=[1]), relay.std(x, axis=[2], keepdims=True))
    b.out(relay.argmax(x, axis=1), relay.argmin(x, axis=-1, keepdims=True), relay.argmax(x))
    less = relay.less(x, relay.const(0.5))
    b.out(relay.all(less, axis=1), relay.any(less, axis=[2]))


def shapes(b):
    x, four = b.input(2, 3, 4), b.input(1, 8, 4, 6)
    b.out(relay.reshape(x, (0, -1)), relay.reshape(x, (-1, 2)), relay.reshape(x, (-3, 4)))
    b.out(
        relay.reshape(x, (-4, 1, 2, -2)),
        relay.reshape_like(x, b.input(6, 4)),
        relay.nn.batch_flatten(x),
    )
    b.out(
        relay.transpose(x),
        relay.transpose(x, (0, 2, 1)),
        relay.expand_dims(x, 1, 2),
        relay.expand_dims(x, -1),
    )
    b.out(relay.squeeze(b.input(1, 3, 1)), relay.squeeze(b.input(1, 3, 1), axis=[0]))
    b.out(relay.concatenate([x, x, b.input(2, 2, 4)], axis=1), relay.stack([x, x], axis=2))
    parts, cut = relay.split(x, 2, axis=2), relay.split(x, (1, 3), axis=-1)
    b.out(parts[0], parts[1], cut[0], cut[1], cut[2])
    b.out(relay.nn.pad(x, ((0, 0), (1, 2), (0, 1)), pad_value=0.5), relay.nn.pad(x, ((0, 0), (1, 1), (2, 0)),
                                                                               pad_mode="edge"))  # fmt: skip
    b.out(relay.nn.pad(x, ((0, 0), (1, 1), (2, 0)), pad_mode="reflect"))
    b.out(
        relay.nn.mirror_pad(x, ((0, 0), (1, 1), (2, 0))),
        relay.nn.mirror_pad(x, ((0, 0), (1, 2), (2, 0)), "REFLECT"),
    )
    b.out(relay.tile(x, (2, 1, 2)), relay.repeat(x, 2, axis=1), relay.reverse(x, axis=2))
    b.out(relay.layout_transform(four, "NCHW", "NHWC"))
    b.out(
        relay.nn.depth_to_space(four, 2),
        relay.nn.depth_to_space(four, 2, mode="CDR"),
        relay.nn.space_to_depth(four, 2),
    )
    b.out(relay.broadcast_to(b.input(3, 1), (2, 3, 4)), relay.broadcast_to_like(b.input(1, 4), x))
    b.out(
        relay.add(x, relay.zeros((3, 4), "float32")),
        relay.multiply(x, relay.full(relay.const(2.5), (4,))),
    )
    b.out(
        relay.zeros_like(x),
        relay.ones_like(x),
        relay.full_like(x, relay.const(1.5)),
        relay.ones((2,), "int32"),
    )
    b.out(relay.arange(relay.const(1), relay.const(9), relay.const(2), dtype="int32"))


def indexing(b):
    x, ids = b.input(5, 3, 4), b.input(2, 3, low=0, high=5, dtype="int32")
    b.out(
        relay.strided_slice(x, [1, 0], [4, 2]),
        relay.strided_slice(x, [-4, 0, 3], [5, -1, 0], [2, 1, -1]),
    )
    b.out(
        relay.strided_slice(x, [1, 1], [2, 2], slice_mode="size"),
        relay.strided_slice(x, [4], [-9], [-1]),
    )
    b.out(relay.strided_slice(x, [1], [3], axes=[2]))
    b.out(relay.slice_like(x, b.input(2, 3, 2)), relay.slice_like(x, b.input(2, 9, 2), axes=(0, 2)))
    b.out(relay.take(x, ids, axis=0), relay.take(x, ids), relay.take(x, ids, axis=0, mode="wrap"))
    b.out(relay.gather(x, 0, b.input(2, 3, 4, low=0, high=5, dtype="int32")))
    b.out(relay.gather_nd(x, b.input(2, 4, low=0, high=3, dtype="int32")))
    b.out(relay.one_hot(ids, relay.const(1.0), relay.const(0.0), 5, -1, "float32"))
    top = relay.topk(x, 2, axis=0)
    b.out(top[0], top[1], relay.argsort(x, axis=1, dtype="int32"), relay.sort(x, axis=2))


def images(b):
    x = b.input(1, 2, 5, 6)
    for method in ("nearest_neighbor", "linear", "cubic"):
        for mode in ("half_pixel", "asymmetric", "align_corners"):
            b.out(
                relay.image.resize2d(x, (8, 9), method=method, coordinate_transformation_mode=mode)
            )
    b.out(
        relay.image.resize2d(x, (3, 4), method="linear"),
        relay.image.resize2d(b.input(1, 5, 6, 2), (7, 7), layout="NHWC"),
    )
    b.out(relay.nn.upsampling(x, 2, 2), relay.nn.upsampling(x, 2, 3, method="bilinear"))
    b.out(relay.nn.upsampling(x, 2, 2, method="bilinear", align_corners=True))


ZOO = (elementwise, convolutions, pools, norms, products, reductions, shapes, indexing, images)


# -- networks --------------------------------------------------------------------------------


def batch_norm(b, x, channels, **options):
    """A batch normalisation with random statistics."""
    stats = [b.weight(channels, low=0.5, high=1.5) for _ in range(4)]
    return relay.nn.batch_norm(x, *stats, **options)[0]


def conv(b, x, inputs, channels, size, **options):
    """A convolution with a random kernel of sensible size."""
    bound = (3.0 / (inputs * size * size / options.get("groups", 1))) ** 0.5
    kernel = b.weight(
        channels, inputs // options.get("groups", 1), size, size, low=-bound, high=bound
    )
    return relay.nn.conv2d(x, kernel, kernel_size=(size, size), channels=channels, **options)


def mobilenet_v2(b, size=64, width=1):
    """MobileNetV2: inverted residuals with relu6, which relay.testing lacks."""
    plan = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    x, inputs = b.input(1, 3, size, size), 32
    x = relay.clip(
        batch_norm(b, conv(b, x, 3, 32, 3, strides=(2, 2), padding=(1, 1)), 32), 0.0, 6.0
    )
    for expansion, channels, count, stride in plan:
        for i in range(count):
            inner, step = inputs * expansion, stride if i == 0 else 1
            y = x
            if expansion > 1:
                y = relay.clip(batch_norm(b, conv(b, y, inputs, inner, 1), inner), 0.0, 6.0)
            y = conv(b, y, inner, inner, 3, strides=(step, step), padding=(1, 1), groups=inner)
            y = relay.clip(batch_norm(b, y, inner), 0.0, 6.0)
            y = batch_norm(b, conv(b, y, inner, channels, 1), channels)
            x = relay.add(x, y) if step == 1 and inputs == channels else y
            inputs = channels
    x = relay.clip(batch_norm(b, conv(b, x, inputs, 1280, 1), 1280), 0.0, 6.0)
    x = relay.reshape(relay.nn.adaptive_avg_pool2d(x, (1, 1)), (1, 1280))
    b.out(
        relay.nn.bias_add(relay.nn.dense(x, b.weight(10, 1280, low=-0.1, high=0.1)), b.weight(10))
    )


def bert(b, layers=2, tokens=16, width=64, heads=4, words=100):
    """A BERT encoder as importers write it: batch_matmul with reshapes, layer norm in pieces, gelu by erf."""
    ids = b.input(1, tokens, low=0, high=words, dtype="int32")
    x = relay.take(b.weight(words, width), ids, axis=0)
    x = normal(b, relay.add(x, b.weight(tokens, width)), width)
    for _ in range(layers):
        split = [relay.reshape(linear(b, x, width, width), (0, 0, heads, -1)) for _ in range(3)]
        q, k, v = (
            relay.reshape(relay.transpose(part, (0, 2, 1, 3)), (heads, tokens, -1))
            for part in split
        )
        scores = relay.divide(relay.nn.batch_matmul(q, k), relay.const((width / heads) ** 0.5))
        mixed = relay.nn.batch_matmul(relay.nn.softmax(scores), relay.transpose(v, (0, 2, 1)))
        mixed = relay.reshape(
            relay.transpose(relay.reshape(mixed, (1, heads, tokens, -1)), (0, 2, 1, 3)), (0, 0, -3)
        )
        x = normal(b, relay.add(x, linear(b, mixed, width, width)), width)
        h = linear(b, x, width, 4 * width)
        h = relay.multiply(
            h, relay.add(relay.erf(relay.divide(h, relay.const(2.0**0.5))), relay.const(1.0))
        )
        h = linear(b, relay.multiply(h, relay.const(0.5)), 4 * width, width)
        x = normal(b, relay.add(x, h), width)
    first = relay.squeeze(relay.strided_slice(x, [0, 0, 0], [1, 1, width]), axis=[1])
    b.out(
        x,
        relay.tanh(
            relay.nn.bias_add(relay.nn.dense(first, b.weight(width, width)), b.weight(width))
        ),
    )


def linear(b, x, inputs, outputs):
    """A fully connected layer over the last axis."""
    bound = (1.0 / inputs) ** 0.5
    weight = b.weight(1, outputs, inputs, low=-bound, high=bound)
    return relay.add(relay.nn.batch_matmul(x, weight), b.weight(outputs))


def normal(b, x, width):
    """Layer normalisation in pieces."""
    centred = relay.subtract(x, relay.mean(x, axis=-1, keepdims=True))
    square = relay.mean(relay.power(centred, relay.const(2.0)), axis=-1, keepdims=True)
    scaled = relay.divide(centred, relay.sqrt(relay.add(square, relay.const(1e-5))))
    return relay.add(relay.multiply(scaled, b.weight(width)), b.weight(width))


def control(b):
    """Lets, a function that is called twice, a tuple argument, a shared subexpression."""
    x = b.input(2, 3)
    a, t = relay.var("a", shape=(2, 3)), relay.var("t", shape=(2, 3))
    twice = relay.Function([a], relay.add(a, relay.tanh(a)))
    let = relay.Let(t, relay.nn.relu(x), relay.multiply(t, relay.add(t, relay.const(1.0))))
    pair = relay.Tuple([let, relay.sigmoid(x)])
    b.out(
        relay.Call(twice, [let]),
        relay.Call(twice, [relay.TupleGetItem(pair, 1)]),
        relay.concatenate(pair, axis=1),
    )


def group(strategy, inputs, body, **attrs):
    """A call of a fusion group."""
    params = [
        relay.var(f"p{i}", type_annotation=relay.TensorType(s, "float32"))
        for i, (_, s) in enumerate(inputs)
    ]
    function = relay.Function(params, body(*params)).with_attr(
        "Composite", "tvm_fusion." + strategy
    )
    function = function.with_attr("tvm_fusion.strategy", strategy)
    for key, value in attrs.items():
        function = function.with_attr("tvm_fusion." + key, value)
    return relay.Call(function, [value for value, _ in inputs])


def annotated(b):
    """One group of each strategy: a chain with a batch norm, three branches returned apart, two joined ones."""
    shape = (1, 8, 8, 8)
    x = b.input(1, 4, 8, 8)
    chain = group(
        "vertical", [(x, (1, 4, 8, 8))],
        lambda p: relay.nn.relu(batch_norm(b, conv(b, p, 4, 8, 3, padding=(1, 1)), 8)),
        depth=3, members=1, parts=[], options={},
    )  # fmt: skip
    branches = group(
        "horizontal", [(chain, shape)],
        lambda p: relay.Tuple([conv(b, p, 8, n, 1) for n in (8, 8, 4)]),
        depth=1, members=3, parts=[], options={"form": "merged"},
    )  # fmt: skip
    first, second, third = (relay.TupleGetItem(branches, i) for i in range(3))
    joined = group(
        "cross", [(first, shape), (second, shape)],
        lambda p, q: relay.nn.relu(relay.add(conv(b, p, 8, 8, 3, padding=(1, 1)), conv(b, q, 8, 8, 1))),
        depth=3, members=2, parts=[], options={"form": "joined"},
    )  # fmt: skip
    b.out(relay.concatenate([joined, third], axis=1))


def forms(b):
    """Forms of operators that TVM 0.27 computes otherwise; see test_relay_forms.py."""
    x, halves = b.input(2, 4, 3, 8), b.input(4, 6, low=-7, high=7, dtype="int32")
    rows, chosen = b.input(3, 3), relay.less(b.input(3), relay.const(0.0))
    for factors in ({"center": False}, {"scale": False}):
        b.out(relay.nn.layer_norm(x, b.weight(8), b.weight(8), **factors))
        b.out(relay.nn.instance_norm(x, b.weight(4), b.weight(4), **factors))
        b.out(relay.nn.group_norm(x, b.weight(4), b.weight(4), num_groups=2, **factors))
    b.out(relay.nn.group_norm(x, b.weight(8), b.weight(8), num_groups=1, axis=3))
    halved = relay.divide(relay.cast(halves, "float32"), relay.const(2.0))
    b.out(relay.round(halved), relay.cast(relay.round(relay.cast(halved, "float16")), "float32"))
    b.out(relay.where(chosen, rows, relay.negative(rows)))
    b.out(relay.equal(chosen, relay.logical_not(chosen)), relay.not_equal(chosen, chosen))
    b.out(relay.strided_slice(x, [0, 1, 0], [2, 4, 3], strides=[2]))
    for mode in ("half_pixel", "asymmetric", "align_corners"):
        for size in ((6, 16), (3, 12), (2, 7), (4, 9)):
            b.out(relay.image.resize2d(x, size, method="nearest_neighbor", coordinate_transformation_mode=mode,
                                       rounding_method="round"))  # fmt: skip


NETWORKS = (mobilenet_v2, bert, control, annotated, forms)


def workload(name):
    """A model of relay.testing with small images, its parameters, and values for its inputs."""
    from tvm.relay import testing

    options = {
        "resnet": {"num_layers": 50, "image_shape": (3, 64, 64)}, "mobilenet": {"image_shape": (3, 64, 64)},
        "squeezenet": {"image_shape": (3, 64, 64)}, "vgg": {"num_layers": 11, "image_shape": (3, 64, 64)},
        "densenet": {"image_shape": (3, 224, 224)}, "resnet_3d": {"num_layers": 18, "image_shape": (3, 8, 32, 32)},
        "lstm": {"iterations": 3, "num_hidden": 16},
    }.get(name, {})  # fmt: skip
    module = getattr(testing, name)
    if name in ("lstm", "synthetic"):
        mod, params = module.get_workload(**options)
    elif name == "densenet":
        mod, params = module.get_workload(densenet_size=121, batch_size=1, **options)
    else:
        mod, params = module.get_workload(batch_size=1, **options)
    random, values = np.random.RandomState(1), {}
    for key in sorted(params):
        # relay.testing's own initial values make every class equally likely: nothing to compare.
        shape = params[key].shape
        scale = (6.0 if len(shape) > 2 else 1.0) / max(np.prod(shape[1:]), 1)
        low, high = (-(scale**0.5), scale**0.5) if len(shape) > 1 else (-0.3, 0.3)
        if "var" in key or "gamma" in key:
            low, high = 0.3, 0.7
        params[key] = random.uniform(low, high, shape).astype("float32")
    for var in mod["main"].params:
        if var.name_hint not in params:
            shape = [int(n) for n in var.type_annotation.shape]
            values[var.name_hint] = random.uniform(-1, 1, shape).astype(var.type_annotation.dtype)
    return relay.transform.InferType()(mod), params, values


def run(mod, values, executor="graph"):
    """Relay's results."""
    evaluate = relay.create_executor(executor, mod=mod, device=tvm.cpu(), target=TARGET).evaluate()
    names = [p.name_hint for p in mod["main"].params]
    result = evaluate(*[values[name] for name in names])
    return flat(result)


def flat(result):
    """The arrays of a result."""
    if isinstance(result, tvm.nd.NDArray):
        return [result.numpy()]
    return [array for field in result for array in flat(field)]


def zoo(function):
    """A module of many operators, with its values."""
    b = Builder()
    function(b)
    return b.module(), b.values


def save(folder, name, mod, values, results, params=None):
    """Write a model's files."""
    with open(f"{folder}/{name}.json", "w") as file:
        file.write(tvm.ir.save_json(mod))
    if params:
        with open(f"{folder}/{name}.params", "wb") as file:
            file.write(relay.save_param_dict({k: tvm.nd.array(v) for k, v in params.items()}))
    arrays = {"in_" + key: value for key, value in values.items()}
    arrays.update({f"out_{i}": value for i, value in enumerate(results)})
    np.savez_compressed(f"{folder}/{name}.npz", **arrays)


def main(folder, names):
    """Make the models of these names; ``NAME+params`` keeps the weights in a file of their own."""
    functions = {function.__name__: function for function in ZOO + NETWORKS}
    for name in names:
        if name in functions:
            mod, values = zoo(functions[name])
            save(
                folder,
                name,
                mod,
                values,
                run(mod, values, "vm" if name in ("annotated", "control") else "graph"),
            )
            continue
        plain, _, apart = name.partition("+")
        mod, params, values = workload(plain)
        results = run(mod, dict(values, **params), "vm" if plain == "lstm" else "graph")
        if apart:
            save(folder, plain + "_apart", mod, values, results, params)
        else:
            arrays = {key: tvm.nd.array(value) for key, value in params.items()}
            bound = relay.build_module.bind_params_by_name(mod["main"], arrays)
            mod = relay.transform.InferType()(tvm.IRModule.from_expr(bound))
            save(folder, plain, mod, values, results)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
