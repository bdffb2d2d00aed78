"""Evaluation of a graph's shape arithmetic, once its inputs have fixed sizes.

The ONNX simplifier does this too, but it has been seen to fold wrong sizes where ONNX's inference needs more than one
round (a Shape behind a Reshape whose target is computed from another Shape), and importing it takes 2 s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidModelError
from . import child, onnx_native

if TYPE_CHECKING:
    import onnx

#: Operators on sizes that are evaluated.
_OPERATORS = frozenset(
    (
        "Add", "And", "Cast", "Ceil", "Concat", "Div", "Equal", "Expand", "Floor", "Gather", "Greater",
        "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or",
        "ReduceMax", "ReduceProd", "ReduceSum", "Reshape", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where",
    )
)  # fmt: skip
#: Sizes are few: what holds more elements is data.
_MOST = 64
#: Each round of inference sees what the last one made constant.
_ROUNDS = 16


def fold_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model, shapes inferred, with what follows from fixed sizes stored as initializers.

    Parameters
    ----------
    model : ModelProto
        Checked, with inferred shapes; changed in place.

    Raises
    ------
    InvalidModelError
        If sizes turn out to contradict each other, for the ONNX simplifier as well.
    """
    for _ in range(_ROUNDS):
        if not any(node.op_type == "Shape" for node in model.graph.node):
            return model
        before = type(model)()
        before.CopyFrom(model)
        if not _fold_once(model):
            return model
        del model.graph.value_info[:]  # inference states what it knows now
        try:
            model = onnx_native.check_and_infer(model)
        except InvalidModelError as error:  # the model contradicts itself, or inference does
            try:
                return onnx_native.check_and_infer(onnx_native.simplify(before))
            except (child.ChildFailure, InvalidModelError):
                raise error from None
    return model


def _fold_once(model: onnx.ModelProto) -> bool:
    """Evaluate what can be with the shapes that are known; return whether a Shape was among it."""
    import onnx

    graph = model.graph
    known = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in graph.initializer
        if np.prod(tensor.dims, dtype="int64") <= _MOST
        and tensor.data_location != onnx.TensorProto.EXTERNAL
    }
    sizes = {value.name: _static(value) for value in (*graph.input, *graph.value_info)}
    returned = {value.name for value in graph.output}
    found, left, progress = [], [], False
    for node in graph.node:
        value = None
        if len(node.output) == 1 and node.domain in ("", "ai.onnx"):
            value = small_value(node, known, sizes, model.opset_import)
        if value is None or value.size > _MOST:
            left.append(node)
            continue
        name = node.output[0]
        known[name] = value
        if node.op_type == "Constant" or name in returned:
            left.append(node)
            continue
        found.append(onnx.numpy_helper.from_array(value, name))
        progress |= node.op_type == "Shape"
    if progress:
        del graph.node[:]
        graph.node.extend(left)
        graph.initializer.extend(found)
    return progress


def _static(value: onnx.ValueInfoProto) -> list[int] | None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape") or not all(d.HasField("dim_value") for d in tensor.shape.dim):
        return None
    return [dim.dim_value for dim in tensor.shape.dim]


def small_value(
    node: onnx.NodeProto,
    known: Mapping[str, np.ndarray],
    sizes: Mapping[str, list[int] | None],
    opsets: Sequence[onnx.OperatorSetIdProto],
) -> np.ndarray | None:
    """Return the value of a node's only result, or None where it is unknown or no arithmetic of sizes.

    Parameters
    ----------
    node : NodeProto
        Of the default domain.
    known : mapping of name to array
        Values of operands.
    sizes : mapping of name to list of int, or None
        Shapes of operands, where all their sizes are known.
    opsets : sequence of OperatorSetIdProto
        Those of the model.
    """
    import onnx
    from onnx.reference import ReferenceEvaluator

    if node.op_type == "Shape":
        shape = sizes.get(node.input[0])
        if shape is None:
            return None
        limits = {attribute.name: attribute.i for attribute in node.attribute}
        return np.array(shape[limits.get("start", 0) : limits.get("end")], "int64")
    if node.op_type == "Constant":
        tensors = [a.t for a in node.attribute if a.name == "value"]
        small = tensors and np.prod(tensors[0].dims, dtype="int64") <= _MOST
        return onnx.numpy_helper.to_array(tensors[0]) if small else None
    inputs = [name for name in node.input if name]
    if node.op_type not in _OPERATORS or not all(name in known for name in inputs):
        return None
    values = {name: known[name] for name in inputs}
    graph = onnx.helper.make_graph(
        [node],
        "sizes",
        [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in values],
        [onnx.helper.make_value_info(node.output[0], onnx.TypeProto())],
    )
    try:
        single = onnx.helper.make_model(graph, opset_imports=list(opsets))
        (result,) = ReferenceEvaluator(single).run(None, values)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, ArithmeticError):
        return None  # left to the importer, which says what is wrong with it
    return np.asarray(result)
