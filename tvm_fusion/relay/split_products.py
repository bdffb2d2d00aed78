"""Write a product whose columns are split as one for each part, as `frontend.canonical.SplitProducts` does."""

from __future__ import annotations

import itertools
from typing import Any

from .compat import relay
from .nodes import Node, Value
from .rewrite import NodeRewriter


class SplitProducts(NodeRewriter):
    """split(x · W + b) along the columns -> x · W1 + b1, x · W2 + b2, ...

    A projection that is merged by hand (GPT-2's of queries, keys and values) becomes the separate ones
    that horizontal fusion knows how to merge, and nothing is left to copy. The weight and the bias must
    be constants, and nothing else may read the product.
    """

    def visit(self, node: Node) -> None:
        found = self._product(node) if node.op == "split" else None
        if found is None:
            self.add(node)
            return
        product, addition = found
        ends = list(itertools.accumulate(part.shape[-1] for part in node.outputs))
        for part, begin, end in zip(node.outputs, [0, *ends], ends, strict=False):
            self._part(product, addition, part, begin, end)

    def _product(self, split: Node) -> tuple[Node, Node | None] | None:
        """The product that is split along its last axis, and what adds its bias; None if it is none."""
        data = split.inputs[0]
        if not data.is_static or int(split.attrs["axis"]) % len(data.shape) != len(data.shape) - 1:
            return None
        if not self.single_use(data):
            return None
        product, addition = self.producer(data), None
        if product is not None and product.op == "add":
            addition = product
            data, bias = (
                addition.inputs if addition.inputs[1].is_constant else addition.inputs[::-1]
            )
            if not bias.is_constant or bias.shape != addition.output.shape[-1:]:
                return None
            if not self.single_use(data):
                return None
            product = self.producer(data)
        if product is None or product.op != "matmul" or not product.inputs[1].is_constant:
            return None
        if len(product.inputs[1].shape) != 2 or not self._is_written_apart(product, addition):
            return None
        whole = self.together(split, product, *([addition] if addition else []))
        return (product, addition) if whole else None

    def _is_written_apart(self, product: Node, addition: Node | None) -> bool:
        """Whether the calls that the operators came from are known ones."""
        known = isinstance(product.origin, relay.Call) and product.origin.op.name in _PRODUCTS
        return known and (addition is None or self._bias(addition) is not None)

    def _bias(self, addition: Node) -> Any:
        """The constant of an addition, as an expression."""
        value = next((v for v in addition.inputs if v.is_constant), None)
        if value is None or not isinstance(addition.origin, relay.Call):
            return None
        for expr in addition.origin.args:
            if self.values.get(expr) is value:
                return expr
        return None

    def _part(
        self, product: Node, addition: Node | None, part: Value, begin: int, end: int
    ) -> None:
        call, weight = product.origin, product.inputs[1]
        columns = Value((weight.shape[0], end - begin), weight.dtype, is_constant=True)
        if weight.array is not None:
            columns.data = weight.array[:, begin:end]
        root = relay.reshape(_PRODUCTS[call.op.name](call, begin, end), part.shape)
        result = part if addition is None else Value(part.shape, part.dtype)
        attrs, inputs = dict(product.attrs), [product.inputs[0], columns]
        result.node = Node("matmul", attrs, inputs, root, result, origin=call)
        self.add(result.node)
        if addition is None:
            return
        self.values[root] = result
        bias = next(v for v in addition.inputs if v.is_constant)
        row = Value((end - begin,), bias.dtype, is_constant=True)
        if bias.array is not None:
            row.data = bias.array[begin:end]
        total = relay.add(root, _cut(self._bias(addition), 0, begin, end))
        part.node = Node("add", {}, [result, row], total, part, origin=addition.origin)
        self.add(part.node)


def _cut(expr: Any, axis: int, begin: int, end: int) -> Any:
    """Some rows or columns of a constant."""
    return relay.strided_slice(expr, [begin], [end], axes=[axis])


def _of_dense(call: Any, begin: int, end: int) -> Any:
    weight = _cut(call.args[1], 0, begin, end)
    return relay.nn.dense(call.args[0], weight, out_dtype=call.attrs.out_dtype)


def _of_matmul(call: Any, begin: int, end: int) -> Any:
    attrs = call.attrs
    weight = _cut(call.args[1], 0 if attrs.transpose_b else 1, begin, end)
    return relay.nn.matmul(
        call.args[0],
        weight,
        out_dtype=attrs.out_dtype,
        transpose_a=bool(attrs.transpose_a),
        transpose_b=bool(attrs.transpose_b),
    )


#: How some columns of a product are written.
_PRODUCTS = {"nn.dense": _of_dense, "nn.matmul": _of_matmul}
