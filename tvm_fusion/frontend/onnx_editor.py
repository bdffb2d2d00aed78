"""Rewriting of single nodes of an ONNX graph: what a rule can ask, and how it says the replacement."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..errors import UnsupportedOperatorError
from .onnx_native import first_line

if TYPE_CHECKING:
    import onnx

#: No constant that a rule makes is larger.
LARGEST_BYTES = 512 << 20

#: No node is written out as more nodes: a size in a damaged file can ask for any number.
MOST_NODES = 50_000

#: What a rule raises on attributes or operands that no checker has looked at.
_RULE_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)

#: Looks at a node; returns the values that replace its outputs, or None to leave it.
Rule = Callable[["Editor", "onnx.NodeProto"], "Sequence[str] | None"]


def key_of(node: onnx.NodeProto) -> str:
    """The name under which rules for a node are kept: its operator, with the domain unless that is ONNX's own."""
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"


class Editor:
    """Replaces nodes of a graph with inferred shapes, in place.

    Parameters
    ----------
    graph : GraphProto
        The graph; every node has a name, which the nodes that replace it keep.
    weights : mapping of name to TensorProto
        Large initializers kept apart from the graph.
    opset : int
        The opset of the default domain.
    """

    def __init__(
        self, graph: onnx.GraphProto, weights: Mapping[str, onnx.TensorProto], opset: int
    ) -> None:
        self.graph, self.opset = graph, opset
        self._stored = {tensor.name: tensor for tensor in graph.initializer} | dict(weights)
        self._arrays: dict[str, np.ndarray] = {}
        values = (*graph.value_info, *graph.output, *graph.input)
        self._types = {value.name: value.type.tensor_type for value in values}
        self._taken = {n for node in graph.node for n in (*node.input, *node.output)} | set(
            self._stored
        )
        self._nodes: list[onnx.NodeProto] = []
        self._source: onnx.NodeProto | None = None
        self._before = 0
        for node in graph.node:
            if node.op_type == "Constant":
                self._remember_constant(node)

    def apply(self, rules: Mapping[str, Sequence[Rule]]) -> None:
        """Replace every node that one of the rules of its operator replaces; the first one counts."""
        used = {name for node in self.graph.node for name in node.input}
        used.update(value.name for value in self.graph.output)
        for node in self.graph.node:
            # The number of a Split's results decides their sizes.
            while len(node.output) > 1 and node.output[-1] not in used and node.op_type != "Split":
                del node.output[-1]  # exporters name masks and statistics that nobody reads
            outputs = self._replaced(node, rules.get(key_of(node), ()))
            if outputs is None:
                self._nodes.append(node)
                continue
            for name, value in zip(node.output, outputs, strict=False):
                if name:
                    self._emit("Identity", [value], [name], {})
        del self.graph.node[:]
        self.graph.node.extend(self._nodes)

    def _replaced(self, node: onnx.NodeProto, rules: Sequence[Rule]) -> list[str] | None:
        """What the first rule that replaces a node says; rules take the node for a legal one."""
        self._source, self._before = node, len(self._nodes)
        try:
            return next((made for rule in rules if (made := rule(self, node)) is not None), None)
        except _RULE_ERRORS as error:
            reason = first_line(str(error)) or type(error).__name__
            raise UnsupportedOperatorError(
                f"operator {node.op_type} (node {node.name!r}) cannot be imported, or its attributes and operands "
                f"are not what ONNX allows: {reason}"
            ) from error

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a value, if all its sizes are known."""
        if name in self._stored:
            return tuple(self._stored[name].dims)
        if name in self._arrays:
            return self._arrays[name].shape
        dims = self.dims(name)
        return None if dims is None or any(dim is None for dim in dims) else tuple(dims)

    def dims(self, name: str) -> list[int | None] | None:
        """Return the sizes of a value, None where not known; None if not even their number is."""
        if name in self._stored:
            return list(self._stored[name].dims)
        known = self._types.get(name)
        if known is None or not known.HasField("shape"):
            return None
        return [
            dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else None
            for dim in known.shape.dim
        ]

    def dtype(self, name: str) -> np.dtype | None:
        """Return the element type of a value, if it is known."""
        import onnx.helper

        code = (
            self._stored[name].data_type
            if name in self._stored
            else self._types[name].elem_type
            if name in self._types
            else 0
        )
        if name in self._arrays:
            return self._arrays[name].dtype
        return onnx.helper.tensor_dtype_to_np_dtype(code) if code else None

    def value(self, name: str) -> np.ndarray | None:
        """Return a constant's value; None for a value that is computed, or an absent operand."""
        from .onnx_importer import tensor_array

        if name in self._arrays:
            return self._arrays[name]
        return tensor_array(name, self._stored[name]) if name in self._stored else None

    def attributes(self, node: onnx.NodeProto) -> dict[str, Any]:
        """Return the attributes of a node by name, texts decoded."""
        import onnx.helper

        values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        return {
            name: value.decode(errors="replace") if isinstance(value, bytes) else value
            for name, value in values.items()
        }

    def operands(self, node: onnx.NodeProto, count: int) -> list[str]:
        """Return the first operands of a node, empty names for those that it lacks."""
        return [*node.input, *[""] * count][:count]

    def add(self, op_type: str, *inputs: str | np.ndarray | np.generic, **attributes: Any) -> str:
        """Append a node with one output and return its name; arrays are stored."""
        return self.add_many(op_type, 1, *inputs, **attributes)[0]

    def add_many(
        self, op_type: str, count: int, *inputs: str | np.ndarray | np.generic, **attributes: Any
    ) -> list[str]:
        """Append a node with ``count`` outputs and return their names; arrays are stored."""
        names = [value if isinstance(value, str) else self.store(value) for value in inputs]
        outputs = [self._fresh() for _ in range(count)]
        self._emit(op_type, names, outputs, attributes)
        return outputs

    def store(self, array: Any) -> str:
        """Store a constant and return its name."""
        import onnx.numpy_helper

        name = self._fresh()
        self._arrays[name] = np.asarray(array)
        if self._arrays[name].nbytes > LARGEST_BYTES:
            self.refuse(f"it needs a constant of {self._arrays[name].nbytes} bytes")
        self.graph.initializer.append(onnx.numpy_helper.from_array(self._arrays[name], name))
        return name

    def cast(self, name: str, dtype: Any) -> str:
        """Return the value converted to a numpy dtype."""
        import onnx.helper

        return self.add("Cast", name, to=onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def reshape(self, name: str, shape: Sequence[int]) -> str:
        """Return the value in another shape."""
        return self.add("Reshape", name, np.array(shape, "int64"))

    def unsqueeze(self, name: str, axis: int) -> str:
        """Return the value with an axis of length 1 put in, in the form that the opset has."""
        if self.opset < 13:
            return self.add("Unsqueeze", name, axes=[axis])
        return self.add("Unsqueeze", name, np.array([axis], "int64"))

    def split(self, name: str, sizes: Sequence[int], axis: int) -> list[str]:
        """Return the parts of a value along an axis, in the form that the opset has."""
        if self.opset < 13:
            return self.add_many("Split", len(sizes), name, axis=axis, split=list(sizes))
        return self.add_many("Split", len(sizes), name, np.array(sizes, "int64"), axis=axis)

    def pad(self, name: str, amounts: Sequence[int], number: float = 0.0) -> str:
        """Return the value padded with a number, in the form that the opset has."""
        if self.opset < 11:
            return self.add("Pad", name, pads=[int(n) for n in amounts], value=float(number))
        stored = np.array(number, self.dtype(name) or "float32")
        return self.add("Pad", name, np.array(amounts, "int64"), stored)

    def slice(self, name: str, axis: int, start: int, stop: int, step: int = 1) -> str:
        """Return a part of the value along an axis."""
        return self.add("Slice", name, *(np.array([n], "int64") for n in (start, stop, axis, step)))

    def reduce(self, op_type: str, name: str, axes: Sequence[int], *, keep: bool = True) -> str:
        """Return a reduction over axes, in the form that the model's opset has."""
        since = 13 if op_type == "ReduceSum" else 18
        if self.opset < since:
            return self.add(op_type, name, axes=list(axes), keepdims=int(keep))
        return self.add(op_type, name, np.array(axes, "int64"), keepdims=int(keep))

    def require_room(self, *sizes: int) -> None:
        """Refuse the node at hand when a constant of these sizes would be too large: files can ask for anything."""
        if min(sizes, default=0) < 0:
            self.refuse(f"a size of {min(sizes)} cannot be")
        if 8 * math.prod(int(size) for size in sizes) > LARGEST_BYTES:
            self.refuse(f"it needs a constant of {'x'.join(str(size) for size in sizes)} elements")

    def refuse(self, reason: str) -> NoReturn:
        """Refuse the node at hand.

        Raises
        ------
        UnsupportedOperatorError
            With operator, node and reason.
        """
        node = self._source
        raise UnsupportedOperatorError(
            f"operator {node.op_type} (node {node.name!r}) cannot be imported: {reason}"
        )

    def _emit(
        self, op_type: str, inputs: list[str], outputs: list[str], attributes: dict[str, Any]
    ) -> None:
        import onnx.helper

        if len(self._nodes) - self._before >= MOST_NODES:
            self.refuse(
                f"it would be written out as more than {MOST_NODES} nodes; its sizes may be wrong"
            )
        self._nodes.append(
            onnx.helper.make_node(op_type, inputs, outputs, name=self._source.name, **attributes)
        )

    def _fresh(self) -> str:
        stem = next((name for name in self._source.output if name), self._source.name)
        number = len(self._taken)
        while (name := f"{stem}__{number}") in self._taken:
            number += 1
        self._taken.add(name)
        return name

    def _remember_constant(self, node: onnx.NodeProto) -> None:
        for attribute in node.attribute:
            if attribute.name == "value":
                self._stored[node.output[0]] = attribute.t
            elif attribute.name in ("value_float", "value_floats"):
                value = attribute.f if attribute.name == "value_float" else list(attribute.floats)
                self._arrays[node.output[0]] = np.array(value, "float32")
            elif attribute.name in ("value_int", "value_ints"):
                value = attribute.i if attribute.name == "value_int" else list(attribute.ints)
                self._arrays[node.output[0]] = np.array(value, "int64")
