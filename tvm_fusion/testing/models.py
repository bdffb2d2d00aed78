"""Model builders shared by tests, tutorials and demos: real architectures with sensible weights, small graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..compat import BlockBuilder, ir, relax, tvm

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
    shapes = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer if t.data_type == onnx.TensorProto.INT64}
    filled = {
        node.output[0]: tuple(int(n) for n in shapes[node.input[0]])
        for node in graph.node
        if node.op_type == "ConstantOfShape" and node.input[0] in shapes
    }
    roles = _weight_roles(graph)
    generator = np.random.default_rng(seed)
    weights = [
        onnx.numpy_helper.from_array(_weight(generator, shape, roles.get(name, "bias")), name)
        for name, shape in filled.items()
    ]
    kept = [node for node in graph.node if node.op_type != "ConstantOfShape" or node.output[0] not in filled]
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


def _weight_roles(graph: onnx.GraphProto) -> dict[str, str]:
    """Return what each weight is: "conv", "gemm", "scale", "branch", "join", "variance", "mean" or "bias"."""
    roles: dict[str, str] = {}
    source = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Unsqueeze"}
    for node in graph.node:
        names = [source.get(name, name) for name in node.input]
        if node.op_type == "Conv":
            roles[names[1]] = "conv"
        elif node.op_type == "Gemm":
            trans = any(attr.name == "transB" and attr.i for attr in node.attribute)
            roles[names[1]] = "gemm_transposed" if trans else "gemm"
        elif node.op_type == "BatchNormalization":
            roles.update({names[1]: "scale", names[3]: "mean", names[4]: "variance"})
        elif node.op_type == "Mul":
            roles.setdefault(names[1], "scale")
    norms = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "BatchNormalization"}
    for node in graph.node:
        # A shortcut adds the variance of its branches: without a smaller scale there, 16 of them overflow softmax.
        ends = [norms[name] for name in node.input if name in norms] if node.op_type == "Sum" else []
        roles.update(dict.fromkeys(ends, "branch" if len(ends) == 1 else "join"))
    return roles


def _weight(generator: np.random.Generator, shape: tuple[int, ...], role: str) -> np.ndarray:
    centre = {"scale": 1.0, "variance": 1.0, "branch": 0.25, "join": 0.7}.get(role)
    if centre is not None:
        return generator.uniform(0.8 * centre, 1.2 * centre, shape).astype("float32")
    if role in ("mean", "bias"):
        return generator.uniform(-0.1, 0.1, shape).astype("float32")
    fan_in = {"conv": shape[1:], "gemm": shape[:1], "gemm_transposed": shape[1:]}[role]
    scale = np.float32(np.sqrt(2.0 / np.prod(fan_in)))
    return generator.standard_normal(shape, dtype="float32") * scale
