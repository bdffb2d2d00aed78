"""Relay modules for tests, with random parameters bound; for a TVM that has Relay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..relay.compat import relay, tvm

#: The wheel's own default triple is another architecture's.
CPU = "llvm -mtriple=x86_64-linux-gnu"


def matrix(name: str = "v", rows: int = 4) -> Any:
    """A parameter of some rows of 8 elements."""
    return relay.var(name, shape=(rows, 8))


def number(value: float) -> Any:
    """A float32 constant."""
    return relay.const(value, "float32")


def constant(random: np.random.RandomState, *shape: int, scale: float = 0.5) -> Any:
    """A random constant of small float32 numbers."""
    return relay.const(random.uniform(-scale, scale, shape).astype("float32"))


def conv(random: np.random.RandomState, x: Any, inputs: int, outputs: int, kernel: int) -> Any:
    """A convolution that keeps height and width."""
    weight = constant(random, outputs, inputs, kernel, kernel)
    padding = (kernel // 2, kernel // 2)
    # Winograd's rules want sizes that type inference could read from the weight.
    return relay.nn.conv2d(
        x, weight, padding=padding, channels=outputs, kernel_size=(kernel, kernel)
    )


def module(body: Any, *params: Any) -> tvm.IRModule:
    """A module whose ``main`` returns an expression."""
    return tvm.IRModule.from_expr(relay.Function(list(params), body))


def conv_chain(channels: int = 16, extent: int = 14) -> tvm.IRModule:
    """Convolution, batch norm, ReLU."""
    random = np.random.RandomState(0)
    x = relay.var("x", shape=(1, channels, extent, extent))
    y = conv(random, x, channels, channels, 3)
    y = relay.nn.relu(batch_norm(random, y, channels))
    return module(y, x)


def batch_norm(random: np.random.RandomState, x: Any, channels: int) -> Any:
    """Inference batch normalisation with random statistics."""
    statistics = [constant(random, channels) for _ in range(3)]
    variance = relay.const(random.uniform(0.5, 1.5, channels).astype("float32"))
    return relay.nn.batch_norm(x, *statistics, variance)[0]


def branches(members: int = 3, channels: int = 16, extent: int = 14) -> tvm.IRModule:
    """Convolutions of one input, each followed by ReLU, returned apart."""
    random = np.random.RandomState(1)
    x = relay.var("x", shape=(1, channels, extent, extent))
    out = []
    for _ in range(members):
        y = conv(random, x, channels, channels, 3)
        out.append(relay.nn.relu(y))
    return module(relay.Tuple(out), x)


def residual(channels: int = 16, extent: int = 14) -> tvm.IRModule:
    """Two branches of equal work and their sum, then ReLU; and the sum itself."""
    random = np.random.RandomState(2)
    x = relay.var("x", shape=(1, channels, extent, extent))
    left = conv(random, x, channels, channels, 3)
    right = conv(random, x, channels, channels, 1)
    total = relay.add(relay.nn.relu(left), relay.nn.relu(right))
    return module(relay.Tuple([relay.nn.relu(total), total]), x)


def bert(
    layers: int = 2, batch: int = 1, length: int = 16, hidden: int = 32, heads: int = 4
) -> tvm.IRModule:
    """A BERT encoder as ``relay.frontend.from_onnx`` writes it: products of two and three axes, norms in pieces."""
    random = np.random.RandomState(3)
    x = relay.var("data", shape=(batch, length, hidden))
    y: Any = x
    for _ in range(layers):
        y = _layer_norm(
            random, relay.add(y, _attention(random, y, (batch, length, hidden), heads)), hidden
        )
        inner = _gelu(_linear(random, y, (batch, length), hidden, 4 * hidden))
        inner = _linear(random, inner, (batch, length), 4 * hidden, hidden)
        y = _layer_norm(random, relay.add(y, inner), hidden)
    return module(y, x)


def _linear(
    random: np.random.RandomState, x: Any, lead: tuple[int, int], inputs: int, outputs: int
) -> Any:
    """MatMul of three and two axes, then a bias."""
    flat = relay.reshape(x, (-1, inputs))
    weight = constant(random, inputs, outputs, scale=1 / math.sqrt(inputs))
    out = relay.nn.dense(flat, relay.transpose(weight, (1, 0)))
    out = relay.reshape(out, (*lead, outputs))
    return relay.add(constant(random, outputs), out)


def _attention(
    random: np.random.RandomState, x: Any, shape: tuple[int, int, int], heads: int
) -> Any:
    batch, length, hidden = shape
    size = hidden // heads
    query, key, value = (_linear(random, x, (batch, length), hidden, hidden) for _ in range(3))
    query, key, value = (
        relay.transpose(relay.reshape(y, (batch, length, heads, size)), axes)
        for y, axes in ((query, (0, 2, 1, 3)), (key, (0, 2, 3, 1)), (value, (0, 2, 1, 3)))
    )
    scores = _product(query, key, (batch * heads, length, size, length))
    scores = relay.reshape(scores, (batch, heads, length, length))
    scores = relay.divide(scores, relay.const(math.sqrt(size), "float32"))
    weights = relay.nn.softmax(scores, axis=-1)
    mixed = _product(weights, value, (batch * heads, length, length, size))
    mixed = relay.reshape(mixed, (batch, heads, length, size))
    mixed = relay.reshape(relay.transpose(mixed, (0, 2, 1, 3)), (batch, length, hidden))
    return _linear(random, mixed, (batch, length), hidden, hidden)


def _product(a: Any, b: Any, sizes: tuple[int, int, int, int]) -> Any:
    """A product over the last two axes; Relay's takes three, and its second operand transposed."""
    batch, rows, inner, columns = sizes
    left = relay.reshape(a, (batch, rows, inner))
    right = relay.transpose(relay.reshape(b, (batch, inner, columns)), (0, 2, 1))
    return relay.nn.batch_matmul(left, right)


def _gelu(x: Any) -> Any:
    half, one, root = (relay.const(n, "float32") for n in (0.5, 1.0, math.sqrt(2.0)))
    inner = relay.add(relay.erf(relay.divide(x, root)), one)
    return relay.multiply(relay.multiply(x, inner), half)


def _layer_norm(random: np.random.RandomState, x: Any, hidden: int) -> Any:
    mean = relay.mean(x, axis=(-1,), keepdims=True)
    centred = relay.subtract(x, mean)
    squares = relay.power(centred, relay.const(2.0, "float32"))
    variance = relay.mean(squares, axis=(-1,), keepdims=True)
    root = relay.sqrt(relay.add(variance, relay.const(1e-12, "float32")))
    scaled = relay.multiply(relay.divide(centred, root), constant(random, hidden))
    return relay.add(scaled, constant(random, hidden))


def network(name: str, extent: int = 224) -> tvm.IRModule:
    """A network of ``relay.testing``, its parameters bound, batch norms with random statistics.

    Parameters
    ----------
    name : str
        One of ``NETWORKS``.
    extent : int
        Height and width of the image (Inception v3 takes 299).
    """
    from tvm.relay import testing  # needs pytest

    make: dict[str, Callable[[], Any]] = {
        "resnet-50": lambda: testing.resnet.get_workload(
            num_layers=50, image_shape=(3, extent, extent)
        ),
        "mobilenet": lambda: testing.mobilenet.get_workload(image_shape=(3, extent, extent)),
        "inception-v3": testing.inception_v3.get_workload,
        "squeezenet": lambda: testing.squeezenet.get_workload(image_shape=(3, extent, extent)),
        "densenet": lambda: testing.densenet.get_workload(image_shape=(3, extent, extent)),
    }
    mod, params = make[name]()
    random = np.random.RandomState(0)
    values = {name: _parameter(random, name, value) for name, value in params.items()}
    mod["main"] = relay.build_module.bind_params_by_name(mod["main"], values)
    return mod


#: The networks of ``relay.testing`` that tests annotate.
NETWORKS: tuple[str, ...] = ("resnet-50", "mobilenet", "inception-v3", "squeezenet", "densenet")


def _parameter(random: np.random.RandomState, name: str, value: Any) -> Any:
    """A parameter; those that relay.testing sets to zeros and ones, at random."""
    shape = value.shape
    if "var" in name or "gamma" in name:
        return tvm.nd.array(random.uniform(0.5, 1.5, shape).astype("float32"))
    if any(part in name for part in ("beta", "mean", "bias")):
        return tvm.nd.array(random.uniform(-0.2, 0.2, shape).astype("float32"))
    return value


def simplified(mod: tvm.IRModule) -> tvm.IRModule:
    """A module after the passes of TVM that come before annotation."""
    transform = relay.transform
    passes = tvm.transform.Sequential([
        transform.InferType(), transform.SimplifyInference(), transform.FoldConstant(),
        transform.FoldScaleAxis(), transform.FoldConstant(), transform.InferType(),
    ])  # fmt: skip
    with tvm.transform.PassContext(opt_level=3):  # FoldScaleAxis is skipped below 3
        return passes(mod)


def inputs_of(mod: tvm.IRModule, seed: int = 0) -> list[np.ndarray]:
    """Random arrays for the parameters of ``main``."""
    random = np.random.RandomState(seed)
    shapes = [p.type_annotation.shape for p in mod["main"].params]
    return [random.standard_normal([int(n) for n in s]).astype("float32") for s in shapes]


def run_vm(mod: tvm.IRModule, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Run a module on Relay's virtual machine, on the CPU."""
    with tvm.transform.PassContext(opt_level=3):
        executor = relay.create_executor("vm", mod=mod, device=tvm.cpu(), target=CPU)
        result = executor.evaluate()(*inputs)
    return [
        r.numpy()
        for r in (result if isinstance(result, list | tvm.runtime.container.ADT) else [result])
    ]


def run_graph(mod: tvm.IRModule, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Run a module on TVM's graph executor, on the CPU."""
    from tvm.contrib import graph_executor

    with tvm.transform.PassContext(opt_level=3):
        library = relay.build(mod, target=CPU)
    model = graph_executor.GraphModule(library["default"](tvm.cpu()))
    for param, array in zip(mod["main"].params, inputs, strict=True):
        model.set_input(param.name_hint, array)
    model.run()
    return [model.get_output(i).numpy() for i in range(model.get_num_outputs())]


def group_calls(mod: tvm.IRModule) -> list[Any]:
    """The calls of groups in ``main``, operands first."""
    found: list[Any] = []

    def visit(expr: Any) -> None:
        if isinstance(expr, relay.Call) and isinstance(expr.op, relay.Function):
            attrs = expr.op.attrs
            if attrs is not None and "Composite" in attrs.keys():
                found.append(expr)

    relay.analysis.post_order_visit(mod["main"].body, visit)
    return found
