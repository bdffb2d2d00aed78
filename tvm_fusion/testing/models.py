"""Model builders shared by tests, tutorials and demos: real architectures with sensible weights, small graphs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

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

    The shipped weights are all equal, which hides errors: a permuted channel gives the same result.
    Weights get the scale that keeps activations of the same size from layer to layer (He), batch
    norm is close to the identity, biases are small. Integer constants (shapes) stay.

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
        # A shortcut adds the variances of its branches: without a smaller scale there, 16 of them
        # saturate softmax.
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
