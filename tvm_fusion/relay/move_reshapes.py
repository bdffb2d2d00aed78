"""Move reshapes that only regroup leading axes out of the way of fusion, as `frontend.canonical.MoveReshapes` does."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .compat import relay
from .nodes import Node, Value
from .operators import is_view
from .rewrite import NodeRewriter

#: Operators of one tensor that compute each element by itself.
_UNARY = frozenset(
    "relu leakyrelu gelu gelu_tanh silu softplus relu6 abs astype ceil clip cos erf exp floor log negative round rsqrt "
    "sigmoid sign sin sqrt square tanh".split()
)
_BINARY = frozenset("add subtract multiply divide maximum minimum power".split())
_ROWS = frozenset(("layer_norm", "rms_norm"))

#: Shape of a tensor.
Shape = tuple[int, ...]


class MoveReshapes(NodeRewriter):
    """Let products, elementwise operators and row norms work on tensors as they were before a reshape.

    A reshape that keeps the last axis moves to the consumers, where it meets its opposite. One that
    cannot moves towards the producers, if another reshape waits there to be merged with; behind a
    lookup in a table, it moves to the indices. Equal reshapes of a tensor become one.

    The expression of an operator that has moved ends with a reshape: the model's own where there is one.
    """

    def __init__(self, nodes: Any, *rest: Any) -> None:
        nodes = list(nodes)
        # Reshapes that others were merged with, dead by now: their expressions are the model's.
        self._spare = {
            (node.inputs[0], node.output.shape): node for node in nodes if node.op == "reshape"
        }
        super().__init__(nodes, *rest)
        self._views: dict[tuple[Value, Shape], Value] = {}
        self._made: set[Value] = set()  # whose expressions are new
        self._copies: dict[Node, Node] = {}
        self._expressions = {v: expr for expr, v in self.values.items() if isinstance(v, Value)}

    def run(self) -> list[Node]:
        """Visit every operator; return those that are left."""
        super().run()
        for node in self.nodes:
            node.helpers = [self._copies.get(helper, helper) for helper in node.helpers]
        self.sweep()
        return self.nodes

    def visit(self, node: Node) -> None:
        if node.op == "reshape":
            self._reshape(node)
        elif node.op == "matmul" and _rank(node.inputs[1]) == 2:
            self._sink(node, self._with_source(node, 0))
        elif node.op in _UNARY or (node.op in _ROWS and _is_over_last_axis(node)):
            self._sink(node, self._with_source(node, 0))
        elif node.op in _BINARY:
            self._sink(node, self._binary_sources(node))
        else:
            self.add(node)

    def _source(self, value: Value) -> Value | None:
        """The tensor that ``value`` is a reshape of, where that keeps the last of at least two axes."""
        view = self.producer(value, "reshape")
        if view is None or not view.inputs[0].is_static or not value.is_static:
            return None
        before, after = view.inputs[0].shape, value.shape
        return view.inputs[0] if _keeps_last(before, after) else None

    def _with_source(self, node: Node, place: int) -> list[Value] | None:
        """The operands, one of them as it was before its reshape."""
        source = self._source(node.inputs[place])
        if source is None:
            return None
        return [source if i == place else value for i, value in enumerate(node.inputs)]

    def _binary_sources(self, node: Node) -> list[Value] | None:
        """Operands before their reshapes: both alike, or one, with one value a column."""
        sources = [self._source(value) for value in node.inputs]
        if None not in sources and sources[0].shape == sources[1].shape:
            return sources if node.inputs[0].shape == node.inputs[1].shape else None
        for place, source in enumerate(sources):
            other = node.inputs[1 - place]
            if (
                source is None
                or not other.is_static
                or node.output.shape != node.inputs[place].shape
            ):
                continue
            if len(other.shape) <= len(source.shape) and math.prod(other.shape[:-1]) == 1:
                return self._with_source(node, place)
        return None

    def _sink(self, node: Node, inputs: list[Value] | None) -> None:
        """Compute an operator on other operands, and reshape its result behind it."""
        result = node.output
        if inputs is None or not result.is_static:
            self.add(node)
            return
        moved = next(a for a, b in zip(inputs, node.inputs, strict=True) if a is not b)
        shape = (*moved.shape[:-1], result.shape[-1])
        if node.op in _ROWS:
            node.attrs = {**node.attrs, "axes": (-1,)}
        origin, root = self._expressions.get(result, node.root), node.root
        self._regroup(node, inputs, shape)
        self.add(node)
        # The expression stays whole where nothing else reads what lies between the two reshapes.
        view = Node(
            "reshape", {"arg1": result.shape}, [node.output], root, result,
            apart=relay.reshape(node.root, result.shape), helpers=[node, *node.helpers], origin=origin,
            is_implied=not is_view(origin),
        )  # fmt: skip
        result.node = view
        self._views[node.output, result.shape] = result
        self.add(view)

    def _regroup(self, node: Node, inputs: list[Value], shape: Shape) -> Value:
        """Give an operator other operands and a result of its own of another shape."""
        value = Value(shape, node.output.dtype, node)
        node.inputs, node.structure = inputs, value
        node.root = relay.reshape(node.root, shape)
        node.apart = None if node.apart is None else relay.reshape(node.apart, shape)
        self._register(node.root, value)
        self._made.add(value)
        return value

    def _register(self, expr: Any, value: Value) -> None:
        self.values[expr] = value
        self._expressions[value] = expr

    def _reshape(self, node: Node) -> None:
        data, result = node.inputs[0], node.output
        before, after = data.shape, result.shape
        if not data.is_static:
            self.add(node)
            return
        if _keeps_last(before, after) and before != after:
            raised = self._raised(data, after[:-1])
            if raised is not None:
                self._give_expression(raised, node)
                self.replace(result, raised)
                return
        source = self._behind_views(data)
        found = source if source.shape == after else self._views.get((source, after))
        if found is None:
            node.inputs = [source]
            self._views[source, after] = result
            self.add(node)
            return
        self._give_expression(found, node)
        self.replace(result, found)

    def _give_expression(self, value: Value, reshape: Node) -> None:
        """Let an operator that moved end with a reshape that the model has."""
        if value in self._made:
            self._made.discard(value)
            value.node.root = reshape.root

    def _behind_views(self, value: Value) -> Value:
        inner = self.producer(value, "reshape")
        return value if inner is None else inner.inputs[0]

    def _view(self, value: Value, shape: Shape) -> Value | None:
        """A reshape of a value, which may be there already; None where the value has no expression."""
        source = self._behind_views(value)
        if source.shape == shape:
            return source
        if (source, shape) in self._views:
            return self._views[source, shape]
        node = self._spare.get((source, shape))
        if node is None:
            expr = self._expressions.get(source)
            if expr is None:
                return None
            root = relay.reshape(expr, shape)
            result = Value(shape, source.dtype)
            node = Node("reshape", {"arg1": shape}, [source], root, result, origin=root)
            result.node = node
            self._register(root, result)
        self._views[source, shape] = node.output
        self.add(node)
        return node.output

    def _raised(self, value: Value, leading: Shape) -> Value | None:
        """``value`` computed with other leading axes, if that ends at a reshape or a lookup; None if it does not."""
        node = self.producer(value)
        if node is None or not value.is_static:
            return None
        if node.op == "reshape":
            return self._view(node.inputs[0], (*leading, value.shape[-1]))
        if not self.single_use(value):
            return None
        place, inner = self._regrouped(node), None
        if node.op == "take":
            table, index = node.inputs
            if node.attrs.get("axis") == 0 and _rank(table) == 2 and index.is_static:
                place, inner = 1, self._view(index, leading)
        elif place is not None:
            inner = self._raised(node.inputs[place], leading)
        if inner is None:
            return None
        inputs = [inner if i == place else operand for i, operand in enumerate(node.inputs)]
        copy = self._copies[node] = dataclasses.replace(node)
        raised = self._regroup(copy, inputs, (*leading, value.shape[-1]))
        self.add(copy)
        # Where an expression reads what is no more, it reads a reshape of this.
        attrs, root = {"arg1": value.shape}, relay.reshape(copy.root, value.shape)
        value.node = Node("reshape", attrs, [raised], root, value)
        return raised

    def _regrouped(self, node: Node) -> int | None:
        """The operand whose leading axes may be regrouped with the result's; None where there is none."""
        if node.op in _UNARY or (node.op == "matmul" and _rank(node.inputs[1]) == 2):
            return 0
        for place in (0, 1) if node.op in _BINARY else ():
            other, own = node.inputs[1 - place], node.inputs[place]
            if other.is_static and len(other.shape) < 2 and node.output.shape == own.shape:
                return place
        return None


def _keeps_last(before: Shape, after: Shape) -> bool:
    return min(len(before), len(after)) >= 2 and before[-1] == after[-1]


def _rank(value: Value) -> int | None:
    return len(value.shape) if value.is_static else None


def _is_over_last_axis(node: Node) -> bool:
    rank = len(node.inputs[0].shape)
    return [int(axis) % rank for axis in node.attrs["axes"]] == [rank - 1]
