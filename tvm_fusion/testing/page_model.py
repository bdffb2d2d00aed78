"""The model that examples of the pages name: small, with every node and input that they mention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

#: Modules of a squeezing convolution and two expanding ones side by side, as the pages number their groups.
_MODULES = ("resnetv17_stage1", "layer2", "layer3", "layer4")


def write_model(file: Path, batch: int | str = 1) -> None:
    """Write a network of one image of 224x224 called ``data``, of four equal modules and a classifier.

    Parameters
    ----------
    file : Path
        Where it is written, as ONNX.
    batch : int or str
        Images, or the name of a dimension that is left open.
    """
    rng = np.random.default_rng(0)
    weights: list[onnx.TensorProto] = []
    nodes: list[onnx.NodeProto] = []

    def conv(source: str, name: str, *shape: int, **attributes: object) -> str:
        scale = np.float32(np.prod(shape[1:]) ** -0.5)
        weight = rng.standard_normal(shape, dtype="float32") * scale
        weights.append(numpy_helper.from_array(weight, f"{name}.weight"))
        inputs = [source, f"{name}.weight"]
        nodes.append(helper.make_node("Conv", inputs, [f"{name}.y"], name, **attributes))
        nodes.append(helper.make_node("Relu", [f"{name}.y"], [f"{name}.r"], f"{name}.relu"))
        return f"{name}.r"

    value = conv("data", "conv1", 8, 3, 8, 8, strides=[8, 8])
    value = conv(value, "layer1.0.conv2", 8, 8, 1, 1)
    for name in _MODULES:
        squeezed = conv(value, f"{name}_conv0_fwd", 8, 8, 1, 1)
        left = conv(squeezed, f"{name}.left", 4, 8, 1, 1)
        right = conv(squeezed, f"{name}.right", 4, 8, 3, 3, pads=[1, 1, 1, 1])
        value = f"{name}.joined"
        nodes.append(helper.make_node("Concat", [left, right], [value], f"{name}.join", axis=1))
    weights.append(numpy_helper.from_array(rng.standard_normal((8, 10), dtype="float32"), "fc"))
    nodes += [
        helper.make_node("GlobalAveragePool", [value], ["pool"], "pool"),
        helper.make_node("Flatten", ["pool"], ["flat"], "flatten"),
        helper.make_node("MatMul", ["flat", "fc"], ["scores"], "classifier"),
        helper.make_node("Softmax", ["scores"], ["y"], "softmax"),
    ]
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "small", [tensor("data", TensorProto.FLOAT, [batch, 3, 224, 224])],
        [tensor("y", TensorProto.FLOAT, [batch, 10])], weights,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, file)
