"""Rewrites of an ONNX graph into forms that TVM imports well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


def split_sums(graph: onnx.GraphProto) -> None:
    """Rewrite Sum and Mean of n values as chains of Add (and one Div), in place.

    TVM would broadcast and stack the values and reduce the stack. Each new node keeps the name of
    the node it comes from.
    """
    nodes, taken = [], {name for node in graph.node for name in (*node.input, *node.output)}
    types = {
        v.name: v.type.tensor_type.elem_type
        for v in (*graph.value_info, *graph.output, *graph.input)
    }
    for node in graph.node:
        if (
            node.op_type not in ("Sum", "Mean")
            or node.domain not in ("", "ai.onnx")
            or not node.input
        ):
            nodes.append(node)
            continue
        total, *rest = node.input
        for value in rest:
            out = _fresh(node.output[0], taken)
            nodes.append(_node("Add", node, [total, value], out))
            total = out
        if node.op_type == "Sum" or not rest:
            nodes.append(_node("Identity", node, [total], node.output[0]))
        else:
            count = _fresh(f"{node.output[0]}_count", taken)
            graph.initializer.append(
                _scalar(count, len(node.input), types.get(node.output[0]) or 1)
            )
            nodes.append(_node("Div", node, [total, count], node.output[0]))
    del graph.node[:]
    graph.node.extend(nodes)


def store_constants(graph: onnx.GraphProto) -> None:
    """Rewrite Constant nodes whose number or list is an attribute of its own, in place; TVM reads tensors only."""
    import numpy as np
    import onnx.numpy_helper

    types = {
        "value_float": "float32",
        "value_floats": "float32",
        "value_int": "int64",
        "value_ints": "int64",
    }
    for node in graph.node:
        if node.op_type != "Constant" or not node.attribute or node.attribute[0].name not in types:
            continue
        value = onnx.helper.get_attribute_value(node.attribute[0])
        array = np.array(value, types[node.attribute[0].name])
        del node.attribute[:]
        tensor = onnx.numpy_helper.from_array(array)
        node.attribute.append(onnx.helper.make_attribute("value", tensor))


#: Operators whose rules say which windows do not fit.
_WINDOWED = (
    "AveragePool", "Conv", "ConvInteger", "ConvTranspose", "LpPool", "MaxPool", "QLinearConv",
)  # fmt: skip


def store_empty_results(graph: onnx.GraphProto) -> None:
    """Replace nodes whose results have no elements by constants, in place; TVM's operators do not expect such tensors.

    A slice of nothing that the model returns stays computed, and rules refuse windows that do not fit.
    """
    import numpy as np
    import onnx.numpy_helper

    shapes, returned = {}, {value.name for value in graph.output}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        known = tensor.HasField("shape") and all(
            d.HasField("dim_value") and d.dim_value >= 0 for d in tensor.shape.dim
        )
        if known and tensor.elem_type not in (0, onnx.TensorProto.STRING):
            shapes[value.name] = ([d.dim_value for d in tensor.shape.dim], tensor.elem_type)
    nodes = []
    for node in graph.node:
        names = [name for name in node.output if name]
        if node.op_type == "Reshape":  # one that drops elements is an error
            kept = 0 not in shapes.get(node.input[0], ((), 0))[0]
        elif node.op_type == "Slice":
            kept = not returned.isdisjoint(names)
        else:
            kept = node.op_type == "Constant" or node.op_type in _WINDOWED
        if kept or not all(0 in shapes.get(name, ((), 0))[0] for name in names):
            nodes.append(node)
            continue
        for name in names:
            shape, code = shapes[name]
            empty = np.zeros(shape, onnx.helper.tensor_dtype_to_np_dtype(code))
            made = onnx.helper.make_node("Constant", [], [name], name=node.name)
            made.attribute.append(
                onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(empty))
            )
            nodes.append(made)
    del graph.node[:]
    graph.node.extend(nodes)


def _scalar(name: str, number: int, elem_type: int) -> onnx.TensorProto:
    import onnx

    return onnx.helper.make_tensor(name, elem_type, [], [number])


def settle_reshapes(graph: onnx.GraphProto) -> None:
    """Give each Reshape to a computed shape a constant one where shape inference leaves at most one size open.

    Exports with a free batch size compute ``[Shape(x)[0], -1]``, which TVM cannot take as a shape;
    the constant ``[0, -1]`` says the same. Nodes that nothing needs any more are dropped.
    """
    import onnx

    values = (*graph.value_info, *graph.output, *graph.input)
    shapes = {
        v.name: v.type.tensor_type.shape.dim for v in values if v.type.tensor_type.HasField("shape")
    }
    stored = {tensor.name for tensor in graph.initializer}
    stored.update(node.output[0] for node in graph.node if node.op_type == "Constant")
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    for node in graph.node:
        if node.op_type != "Reshape" or len(node.input) < 2 or node.input[1] in stored:
            continue
        before, after = shapes.get(node.input[0]), shapes.get(node.output[0])
        if (
            before is None
            or after is None
            or any(attr.name == "allowzero" and attr.i for attr in node.attribute)
        ):
            continue
        target = [
            dim.dim_value if dim.dim_value > 0 else 0 if _same_symbol(dim, i, before) else -1
            for i, dim in enumerate(after)
        ]
        if target.count(-1) <= 1:
            name = _fresh(f"{node.output[0]}_shape", taken)
            graph.initializer.append(
                onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [len(target)], target)
            )
            node.input[1] = name
    _drop_dead_nodes(graph)


def _same_symbol(dim: onnx.TensorShapeProto.Dimension, axis: int, before: Sequence[object]) -> bool:
    return bool(dim.dim_param) and axis < len(before) and before[axis].dim_param == dim.dim_param


def _drop_dead_nodes(graph: onnx.GraphProto) -> None:
    needed, kept = {value.name for value in graph.output}, []
    for node in reversed(graph.node):
        if any(output in needed for output in node.output):
            needed.update(node.input)
            needed.update(
                name
                for attr in node.attribute
                if attr.HasField("g")
                for n in attr.g.node
                for name in n.input
            )
            kept.append(node)
    kept.reverse()
    del graph.node[:]
    graph.node.extend(kept)


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _node(op_type: str, source: onnx.NodeProto, inputs: list[str], output: str) -> onnx.NodeProto:
    import onnx

    return onnx.helper.make_node(op_type, inputs, [output], name=source.name)
