"""Model builders shared by tests, tutorials and demos: real architectures with sensible weights, small graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..compat import BlockBuilder, ir, relax, tvm
from ..frontend.canonical import canonicalize

if TYPE_CHECKING:
    import onnx

#: Architectures that the onnx package ships without weights.
LIGHT_MODELS: tuple[str, ...] = (
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19",
    "zfnet512",
)  # fmt: skip


def light_model_path(name: str) -> Path:
    """Return the file of a light model as the onnx package ships it."""
    import onnx.backend.test

    if name not in LIGHT_MODELS:
        raise ValueError(f"unknown light model {name!r}; choose from {', '.join(LIGHT_MODELS)}")
    return Path(onnx.backend.test.__file__).parent / "data" / "light" / f"light_{name}.onnx"


def light_model(name: str, seed: int = 0) -> onnx.ModelProto:
    """Return a light model with seeded random weights in place of its constant ones.

    The shipped weights are all equal, which hides errors: a permuted channel gives the same result. Weights get the
    scale that keeps activations of the same size from layer to layer (He), batch norm is close to the identity,
    biases are small. Integer constants (shapes) stay.

    Parameters
    ----------
    name : str
        One of ``LIGHT_MODELS``.
    seed : int
        Seed of the weights.
    """
    import onnx
    import onnx.numpy_helper

    model = onnx.load(str(light_model_path(name)))
    graph = model.graph
    shapes = {
        t.name: onnx.numpy_helper.to_array(t)
        for t in graph.initializer
        if t.data_type == onnx.TensorProto.INT64
    }
    filled = {
        node.output[0]: tuple(int(n) for n in shapes[node.input[0]])
        for node in graph.node
        if node.op_type == "ConstantOfShape" and node.input[0] in shapes
    }
    roles = _weight_roles(graph)
    generator = np.random.default_rng(seed)
    weights = [
        onnx.numpy_helper.from_array(
            _weight(generator, shape, *roles.get(name, ("small", 1.0))), name
        )
        for name, shape in filled.items()
    ]
    kept = [
        node
        for node in graph.node
        if node.op_type != "ConstantOfShape" or node.output[0] not in filled
    ]
    used = {name for node in kept for name in node.input}
    del graph.node[:]
    graph.node.extend(kept)
    initializers = [tensor for tensor in graph.initializer if tensor.name in used]
    stored = {tensor.name for tensor in graph.initializer}
    del graph.initializer[:]
    graph.initializer.extend([*initializers, *weights])
    inputs = [value for value in graph.input if value.name not in stored]
    del graph.input[:]
    graph.input.extend(inputs)
    model.ir_version = max(model.ir_version, 4)  # from here on initializers need not be inputs
    return model


def _weight_roles(graph: onnx.GraphProto) -> dict[str, tuple[str, float]]:
    """Return what each weight is ("conv", "gemm", "scale", "variance", "small") and its gain."""
    roles: dict[str, tuple[str, float]] = {}
    producer = {output: node for node in graph.node for output in node.output}
    source = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Unsqueeze"}
    heads = {node.input[0] for node in graph.node if node.op_type == "Softmax"}
    for node in graph.node:
        names = [source.get(name, name) for name in node.input]
        if node.op_type == "Conv":
            roles[names[1]] = (
                "conv",
                np.sqrt(2.0) if _follows_relu(node.input[0], producer) else 1.0,
            )
        elif node.op_type == "Gemm":
            transposed = any(attr.name == "transB" and attr.i for attr in node.attribute)
            gain = 0.2 if node.output[0] in heads else np.sqrt(2.0)
            roles[names[1]] = ("gemm_transposed" if transposed else "gemm", gain)
        elif node.op_type == "BatchNormalization":
            roles.update({names[1]: ("scale", 1.0), names[4]: ("variance", 1.0)})
        elif node.op_type == "Mul":
            roles.setdefault(names[1], ("scale", 1.0))
    norms = {
        node.output[0]: node.input[1] for node in graph.node if node.op_type == "BatchNormalization"
    }
    for node in graph.node:
        # A shortcut adds the variances of its branches: without a smaller scale there, 16 of them saturate softmax.
        ends = (
            [norms[name] for name in node.input if name in norms] if node.op_type == "Sum" else []
        )
        roles.update(dict.fromkeys(ends, ("scale", 0.25 if len(ends) == 1 else 0.7)))
    return roles


def _follows_relu(value: str, producer: dict[str, onnx.NodeProto]) -> bool:
    """Return whether half of ``value`` is zero, which He's gain makes up for."""
    node = producer.get(value)
    while node is not None and node.op_type in (
        "Concat",
        "Dropout",
        "LRN",
        "MaxPool",
        "Reshape",
        "Transpose",
    ):
        node = producer.get(node.input[0])
    return node is not None and node.op_type == "Relu"


def _weight(
    generator: np.random.Generator, shape: tuple[int, ...], role: str, gain: float
) -> np.ndarray:
    if role in ("scale", "variance"):
        return generator.uniform(0.8 * gain, 1.2 * gain, shape).astype("float32")
    if role == "small":
        return generator.uniform(-0.1, 0.1, shape).astype("float32")
    fan_in = {"conv": shape[1:], "gemm": shape[:1], "gemm_transposed": shape[1:]}[role]
    return generator.standard_normal(shape, dtype="float32") * np.float32(
        gain / np.sqrt(np.prod(fan_in))
    )


def random_constant(
    generator: np.random.Generator, *shape: int, gain: float = 1.0
) -> ir.GenericConst:
    """Return a float32 Relax constant of normally distributed numbers, scaled by ``gain``."""
    return relax.const(generator.standard_normal(shape, dtype="float32") * np.float32(gain))


def parallel_convs(
    n: int,
    *,
    channels: int | Sequence[int] = 64,
    in_channels: int = 64,
    spatial: int | tuple[int, int] = 128,
    batch: int = 1,
    kernel: int | Sequence[int] = 3,
    stride: int | Sequence[int] = 1,
    groups: int = 1,
    depth: int = 1,
    bias: bool = False,
    relu: bool = False,
    join: str | None = "add",
    shared_input: bool = True,
    dtype: str | None = None,
    seed: int = 0,
) -> tvm.IRModule:
    """Return a canonical module of ``n`` branches of convolutions.

    Parameters
    ----------
    n : int
        Number of branches.
    channels, kernel, stride : int or one int a branch
        Output channels, square kernel and stride of every convolution (the stride of a branch's first one).
    in_channels, spatial, batch : int
        The input is [batch, in_channels, spatial, spatial].
    groups : int
        Groups of every convolution.
    depth : int
        Convolutions in each branch, one after the other.
    bias, relu : bool
        Follow every convolution by a bias and a ReLU.
    join : {"add", "maximum", "concat", None}
        How the branches are joined; None returns them all.
    shared_input : bool
        Whether the branches read one input ``data`` or ``data0``, ``data1``, ...
    dtype : {"float32", "float16", "bfloat16"}, optional
        See ``canonicalize``.
    seed : int
        Seed of the weights.

    Returns
    -------
    IRModule
        Bindings are called ``conv0``, ``bias0``, ``relu0`` (``conv0_1`` for the second convolution of branch 0), and
        ``join``, ``join1``, ....
    """
    height, width = (spatial, spatial) if isinstance(spatial, int) else spatial
    generator = np.random.default_rng(seed)
    names = ["data"] if shared_input else [f"data{i}" for i in range(n)]
    data = [
        relax.Var(name, relax.TensorType((batch, in_channels, height, width), "float32"))
        for name in names
    ]
    builder = BlockBuilder()

    def branch(i: int) -> relax.Var:
        value, width_in = data[0 if shared_input else i], in_channels
        size, out, first_stride = _pick(kernel, i), _pick(channels, i), _pick(stride, i)
        for level in range(depth):
            suffix = f"{i}" if level == 0 else f"{i}_{level}"
            gain = np.sqrt(groups / (width_in * size * size))
            weight = random_constant(generator, out, width_in // groups, size, size, gain=gain)
            convolution = relax.op.nn.conv2d(
                value,
                weight,
                strides=first_stride if level == 0 else 1,
                padding=size // 2,
                groups=groups,
            )
            value = builder.emit(convolution, f"conv{suffix}")
            if bias:
                value = builder.emit(
                    relax.op.add(value, random_constant(generator, 1, out, 1, 1)), f"bias{suffix}"
                )
            if relu:
                value = builder.emit(relax.op.nn.relu(value), f"relu{suffix}")
            width_in = out
        return value

    with builder.function("main", data, attrs={"num_input": len(data)}):
        with builder.dataflow():
            result = builder.emit_output(_join(builder, [branch(i) for i in range(n)], join))
        builder.emit_func_output(result)
    return canonicalize(builder.get(), dtype)


def norm_relu_branches(
    n: int,
    *,
    channels: int = 64,
    spatial: int = 56,
    batch: int = 1,
    shared_input: bool = False,
    seed: int = 0,
) -> tvm.IRModule:
    """Return a canonical module of ``n`` independent branches of inference batch norm and ReLU (no convolution).

    Inputs are ``data0``, ``data1``, ... (``data`` when shared), all [batch, channels, spatial, spatial]; all branches
    are returned. Batch norm arrives as ``norm<i>`` (multiply, then add), ReLU as ``relu<i>``.
    """
    generator = np.random.default_rng(seed)
    names = ["data"] if shared_input else [f"data{i}" for i in range(n)]
    ty = relax.TensorType((batch, channels, spatial, spatial), "float32")
    data = [relax.Var(name, ty) for name in names]
    builder = BlockBuilder()
    with builder.function("main", data, attrs={"num_input": len(data)}):
        with builder.dataflow():
            outputs = []
            for i in range(n):
                scale, shift = (random_constant(generator, channels) for _ in range(2))
                mean = random_constant(generator, channels, gain=0.1)
                variance = relax.const(generator.uniform(0.8, 1.2, channels).astype("float32"))
                norm = relax.op.nn.batch_norm(
                    data[0 if shared_input else i],
                    scale,
                    shift,
                    mean,
                    variance,
                    axis=1,
                    training=False,
                )
                whole = builder.emit(norm, f"statistics{i}")
                value = builder.emit(relax.TupleGetItem(whole, 0), f"norm{i}")
                outputs.append(builder.emit(relax.op.nn.relu(value), f"relu{i}"))
            result = builder.emit_output(_join(builder, outputs, None))
        builder.emit_func_output(result)
    return canonicalize(builder.get())


def _pick(value: int | Sequence[int], i: int) -> int:
    return value if isinstance(value, int) else value[i]


def _join(builder: BlockBuilder, values: list[relax.Var], join: str | None) -> ir.Expr:
    if join is None:
        return values[0] if len(values) == 1 else relax.Tuple(values)
    if join == "concat":
        return builder.emit(relax.op.concat(values, axis=1), "join")
    pairwise = {"add": relax.op.add, "maximum": relax.op.maximum}.get(join)
    if pairwise is None:
        raise ValueError(f'join must be "add", "maximum", "concat" or None, got {join!r}')
    total = values[0]
    for value in values[1:]:
        total = builder.emit(pairwise(total, value), "join")
    return total
