"""Write splits as slices that their readers' kernels take in, as `frontend.canonical.SliceSplits` does."""

from __future__ import annotations

import itertools
from typing import Any

from ..graph.dataflow import SLICE
from .compat import relay
from .nodes import Node, Value
from .rewrite import NodeRewriter

#: Operators whose kernels may read a slice as well as a whole tensor.
_READERS = frozenset(
    "add subtract multiply divide power maximum minimum equal not_equal less less_equal greater greater_equal "
    "logical_and logical_or bitwise_and bitwise_or bitwise_xor negative abs sqrt rsqrt exp log square floor ceil tanh "
    "cos sin sigmoid relu isnan logical_not bitwise_not concat gelu gelu_tanh silu where".split()
)


class SliceSplits(NodeRewriter):
    """split(x) -> a slice for each part, if each is read once, by an elementwise operator or a concatenation.

    Parts that anything else reads would have to be copied one by one, so such a split stays.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._readers: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in node.inputs:
                self._readers.setdefault(value, []).append(node)

    def visit(self, node: Node) -> None:
        if not self._is_sliced(node):
            self.add(node)
            return
        data, parts = node.inputs[0], node.outputs
        axis = int(node.attrs["axis"]) % len(data.shape)
        ends = list(itertools.accumulate(part.shape[axis] for part in parts))
        for part, begin, end in zip(parts, [0, *ends], ends, strict=False):
            if self.uses[part]:
                self._slice(node, part, axis, begin, end)

    def _is_sliced(self, node: Node) -> bool:
        if node.op != "split" or not node.inputs[0].is_static:
            return False
        for part in node.outputs:
            readers = self._readers.get(part, [])
            if self.uses[part] > 1 or len(readers) != self.uses[part]:
                return False  # read twice, or returned
            if any(reader.op not in _READERS for reader in readers):
                return False
        return True

    def _slice(self, node: Node, part: Value, axis: int, begin: int, end: int) -> None:
        root = relay.strided_slice(node.origin.args[0], [begin], [end], axes=[axis])
        attrs = {SLICE: ((axis,), (begin,), (end,))}
        part.node = Node("strided_slice", attrs, node.inputs, root, part, origin=node.origin)
        self.add(part.node)
