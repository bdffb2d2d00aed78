"""Operators of onnxruntime (domain ``com.microsoft``) that its optimiser leaves in models, written out by ONNX's own.

ONNX infers no types behind operators that it does not know, so they are written out before anything else looks at the
graph. What is not written out is left to TVM's converters, or refused with its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import onnx_native
from .onnx_editor import Editor, key_of
from .onnx_rules.contrib import RULES

if TYPE_CHECKING:
    import onnx


def write_out(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Return a model in which onnxruntime's operators are replaced.

    Parameters
    ----------
    model : ModelProto
        A model whose nodes have names, large weights kept apart; it may be changed.
    opset : int
        The opset of the default domain.

    Raises
    ------
    UnsupportedOperatorError
        If a node has a form that cannot be imported; the message names operator, node and reason.
    """
    own = {(function.domain, function.name) for function in model.functions}
    found = {key_of(n) for n in model.graph.node if (n.domain, n.op_type) not in own} & set(RULES)
    if opset >= 17:
        found.discard("LayerNormalization")
    if found:
        model = onnx_native.infer(model)
        _Editor(model.graph, {}, opset).apply({key: RULES[key] for key in found})
    return model


#: Operators whose first result has the sizes of the first operand.
_ALIKE = (
    "BiasGelu", "Cast", "Dropout", "FastGelu", "Gelu", "Identity", "LayerNormalization", "QuickGelu",
    "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
)  # fmt: skip


class _Editor(Editor):
    """Guesses types and sizes behind operators that ONNX does not know, as far as models have them between such."""

    def __init__(self, graph: onnx.GraphProto, weights: dict, opset: int) -> None:
        import onnx
        import onnx.helper

        super().__init__(graph, weights, opset)
        self._guessed: dict[str, np.dtype] = {}
        self._sizes: dict[str, list[int | None]] = {}
        for node in graph.node:
            kinds = [kind for name in node.input if (kind := self.dtype(name)) is not None]
            kinds = [kind for kind in kinds if kind.kind not in "iub"]
            if node.op_type == "Cast":
                known = onnx.TensorProto.DataType.values()
                to = [a.i for a in node.attribute if a.name == "to" and a.i in known and a.i]
                kinds = [onnx.helper.tensor_dtype_to_np_dtype(code) for code in to]
            if kinds:
                self._guessed.update(dict.fromkeys(node.output, kinds[0]))
            sizes = self._sizes_of(node) if node.input and node.output else None
            if sizes is not None:
                self._sizes[node.output[0]] = sizes

    def _sizes_of(self, node: onnx.NodeProto) -> list[int | None] | None:
        """Sizes of a node's first result; None where they are not known."""
        if node.op_type in _ALIKE:
            return self.dims(node.input[0])
        found = [self.dims(name) for name in node.input[:3]]
        if len(found) < 2 or found[0] is None or found[1] is None:
            return None
        one, two = found[:2]
        if node.op_type in ("Add", "Mul"):
            long, short = (one, two) if len(one) >= len(two) else (two, one)
            fits = all(size == 1 for size in short[:-1]) and long[-1:] == short[-1:]
            return long if fits or one == two else None
        if node.op_type == "MatMul" and len(one) > 1 and len(two) == 2:
            return [*one[:-1], two[-1]]
        if key_of(node) == "com.microsoft::Attention" and len(one) == 3:
            widths = self.attributes(node).get("qkv_hidden_sizes") or [(two[-1] or 0) // 3]
            return [*one[:2], widths[-1] or None]
        if node.op_type == "GroupQueryAttention" and len(one) == 3:
            sizes = self.attributes(node)
            heads, own = (sizes.get(name, 0) for name in ("num_heads", "kv_num_heads"))
            packed = one[2] is not None and not node.input[1] and heads + 2 * own > 0
            return [*one[:2], one[2] * heads // (heads + 2 * own) if packed else one[2]]
        if node.op_type == "MultiHeadAttention" and len(one) == 3 and len(found) > 2:
            values = found[2] or []
            return [*one[:2], values[2] if len(values) == 3 else one[2]]
        return None

    def dims(self, name: str) -> list[int | None] | None:
        known = super().dims(name)
        return self._sizes.get(name) if known is None else known

    def dtype(self, name: str) -> np.dtype | None:
        known = super().dtype(name)
        return self._guessed.get(name) if known is None else known
