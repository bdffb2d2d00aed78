"""Legal ONNX that has no counterpart in TVM 0.27: refused by name, not imported wrongly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import InvalidModelError, UnsupportedOperatorError

if TYPE_CHECKING:
    import onnx

#: Element types that every step from the import to machine code knows.
_TYPES = (
    "BFLOAT16", "BOOL", "DOUBLE", "FLOAT", "FLOAT16", "INT16", "INT32", "INT64", "INT8", "UINT16", "UINT32",
    "UINT64", "UINT8",
)  # fmt: skip


def refuse_types(graph: onnx.GraphProto, weights: Mapping[str, onnx.TensorProto]) -> None:
    """Refuse texts, complex numbers, numbers of 4 or fewer bits, float8, sequences and optionals.

    Parameters
    ----------
    graph : GraphProto
        A graph with inferred types; every node has a name.
    weights : mapping of name to TensorProto
        Large initializers kept apart from the graph.

    Raises
    ------
    UnsupportedOperatorError
        Naming the first node that takes or returns such a value, and the type.
    """
    types: dict[str, str] = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.WhichOneof("value")
        if kind == "tensor_type":
            types[value.name] = _type_name(value.type.tensor_type.elem_type)
        elif kind is not None:
            types[value.name] = kind.removesuffix("_type")
    for tensor in (*graph.initializer, *weights.values()):
        types[tensor.name] = _type_name(tensor.data_type)
    for node in graph.node:
        if node.op_type == "Constant":
            types.update(
                (node.output[0], _type_name(a.t.data_type))
                for a in node.attribute
                if a.name == "value"
            )
        for name in (*node.input, *node.output):
            found = types.get(name, "UNDEFINED")
            if found not in (*_TYPES, "UNDEFINED"):
                raise UnsupportedOperatorError(
                    f"operator {node.op_type} (node {node.name!r}) cannot be imported: the type "
                    f"{found.lower()} of {name!r} is not supported"
                )


def _type_name(code: int) -> str:
    """Name of an element type; a number that stands for none names itself."""
    import onnx

    known = onnx.TensorProto.DataType.values()
    return onnx.TensorProto.DataType.Name(code) if code in known else f"number {code}"


#: Attributes that may be infinite: a limit that nothing reaches, what is filled in outside.
_MAY_BE_INFINITE = ("max", "min", "value", "value_float", "value_floats", "extrapolation_value")


def refuse_undefined_attributes(graph: onnx.GraphProto) -> None:
    """Refuse attributes that are NaN, and infinite factors, limits and powers, whose products with 0 are NaN.

    Each runtime compares or multiplies by them in its own order.

    Parameters
    ----------
    graph : GraphProto
        A graph whose nodes have names. The values of ``Constant`` may be NaN.

    Raises
    ------
    UnsupportedOperatorError
        Naming the operator, the node and the attribute.
    """
    for node in graph.node:
        for attribute in node.attribute:
            values = (attribute.f, *attribute.floats)
            reason = ""
            if node.op_type != "Constant" and any(value != value for value in values):
                reason = f"its {attribute.name} is not a number"
            elif attribute.name not in _MAY_BE_INFINITE and any(map(math.isinf, values)):
                reason = f"its {attribute.name} is infinite"
            elif attribute.name == "softcap" and attribute.f < 0:
                reason = f"its softcap of {attribute.f:g} is negative"
            if reason:
                raise UnsupportedOperatorError(
                    f"operator {node.op_type} (node {node.name!r}) cannot be imported: {reason}"
                )


#: Operands that say sizes, axes and counts: their first place, and what they are.
_SETTINGS = {
    **dict.fromkeys(("ConstantOfShape",), (0, "shape")),
    **dict.fromkeys(("Expand", "Reshape"), (1, "shape")),
    **dict.fromkeys(("Squeeze", "Unsqueeze"), (1, "axes")),
    **{
        f"Reduce{name}": (1, "axes")
        for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
    },
    "CumSum": (1, "axis"), "Pad": (1, "padding"), "Range": (0, "length"), "Split": (1, "sizes"),
    "Tile": (1, "number of repeats"), "TopK": (1, "number of values"),
}  # fmt: skip


def refuse_computed_settings(graph: onnx.GraphProto, weights: Mapping[str, object]) -> None:
    """Refuse sizes, axes and counts that follow from the values of inputs; those from their sizes are symbolic.

    Parameters
    ----------
    graph : GraphProto
        A graph whose nodes have names, in order.
    weights : mapping of name to TensorProto
        Large initializers kept apart from the graph.

    Raises
    ------
    UnsupportedOperatorError
        Naming the operator, the node and what is computed.
    """
    stored = {tensor.name for tensor in graph.initializer} | set(weights)
    data = {value.name for value in graph.input} - stored
    for node in graph.node:
        if node.op_type in ("Shape", "Size"):
            continue
        first, what = _SETTINGS.get(node.op_type, (len(node.input), ""))
        # The last operand of a padding is its value.
        places = (1, 3) if node.op_type == "Pad" else range(first, len(node.input))
        if any(place < len(node.input) and node.input[place] in data for place in places):
            raise UnsupportedOperatorError(
                f"operator {node.op_type} (node {node.name!r}) cannot be imported: it takes its {what} "
                "from the values of an input at run time; store that input in the model"
            )
        if not data.isdisjoint(node.input):
            data.update(name for name in node.output if name)


def refuse_missing_operands(graph: onnx.GraphProto, opset: int) -> None:
    """Refuse nodes without an operand that their operator needs: onnx's checker counts empty names as operands.

    Parameters
    ----------
    graph : GraphProto
        A graph whose nodes have names.
    opset : int
        The opset of the default domain.

    Raises
    ------
    InvalidModelError
        Naming the operator, the node and the operand's position.
    """
    import onnx

    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    for node in graph.node:
        if node.domain not in ("", "ai.onnx") or "" not in node.input:
            continue
        try:
            schema = onnx.defs.get_schema(node.op_type, opset)
        except onnx.defs.SchemaError:
            continue
        for place, name in enumerate(node.input):
            formal = schema.inputs[min(place, len(schema.inputs) - 1)]
            if not name and formal.option != optional:
                raise InvalidModelError(
                    f"operator {node.op_type} (node {node.name!r}) needs operand {place}, which the model leaves out"
                )
