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


def run(mod, values, executor="graph"):
    """Relay's results."""
    evaluate = relay.create_executor(executor, mod=mod, device=tvm.cpu(), target=TARGET).evaluate()
    names = [p.name_hint for p in mod["main"].params]
    result = evaluate(*[values[name] for name in names])
    return flat(result)


def flat(result):
    """The arrays of a result."""
    if hasattr(result, "numpy"):
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
            file.write(relay.save_param_dict(params))
    arrays = {"in_" + key: value for key, value in values.items()}
    arrays.update({f"out_{i}": value for i, value in enumerate(results)})
    np.savez_compressed(f"{folder}/{name}.npz", **arrays)


def main(folder, names):
    """Make the models of these names."""
    functions = {function.__name__: function for function in ZOO}
    for name in names:
        mod, values = zoo(functions[name])
        save(folder, name, mod, values, run(mod, values))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
