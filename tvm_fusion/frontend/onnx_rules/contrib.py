"""onnxruntime's own operators, by ONNX's: norms, activations, products; attention is in ``contrib_attention``.

Definitions: onnxruntime's ``docs/ContribOperators.md``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..onnx_editor import Editor, Rule
from . import contrib_attention
from .contrib_grouped_attention import grouped_query_attention

if TYPE_CHECKING:
    import onnx


def _type_of(editor: Editor, name: str) -> np.dtype:
    return editor.dtype(name) or np.dtype("float32")


def _norm(
    editor: Editor, x: str, scale: str, bias: str, epsilon: float, centred: bool, axes=(-1,)
) -> str:
    """Layer norm, or RMS norm where it is not centred."""
    if centred and editor.opset >= 17:
        operands = [x, scale, bias] if bias else [x, scale]
        return editor.add("LayerNormalization", *operands, axis=min(axes), epsilon=epsilon)
    dtype = _type_of(editor, x)
    wide = editor.cast(x, "float32") if dtype.itemsize == 2 else x
    number = np.array(epsilon, "float32" if dtype.itemsize == 2 else dtype)
    if centred:
        wide = editor.add("Sub", wide, editor.reduce("ReduceMean", wide, list(axes)))
    mean = editor.reduce("ReduceMean", editor.add("Mul", wide, wide), list(axes))
    normal = editor.add("Div", wide, editor.add("Sqrt", editor.add("Add", mean, number)))
    if dtype.itemsize == 2:
        normal = editor.cast(normal, dtype)
    scaled = editor.add("Mul", normal, scale)
    return editor.add("Add", scaled, bias) if bias else scaled


def layer_norm(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """LayerNormalization and SimplifiedLayerNormalization of the default domain in models before opset 17."""
    x, scale, bias = editor.operands(node, 3)
    attributes, used = editor.attributes(node), [bool(name) for name in node.output[1:]]
    centred = node.op_type == "LayerNormalization"
    if any(used):
        editor.refuse("its statistics are results")
    axis = attributes.get("axis", -1)
    dims = editor.dims(x)
    if axis != -1 and dims is None:
        editor.refuse("the rank of its input is not known")
    axes = range(axis % len(dims) - len(dims), 0) if axis != -1 else (-1,)
    return [_norm(editor, x, scale, bias, attributes.get("epsilon", 1e-5), centred, axes)]


def skip_layer_norm(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """Two values are added, and perhaps a bias; the sum is normed, and may be a result too."""
    if node.op_type == "SkipLayerNormalization":
        x, skip, scale, shift, bias = editor.operands(node, 5)
    else:
        (x, skip, scale, bias), shift = editor.operands(node, 4), ""
    if any(node.output[1:3]):
        editor.refuse("its statistics are results")
    total = editor.add("Add", x, skip)
    total = editor.add("Add", total, bias) if bias else total
    epsilon = editor.attributes(node).get("epsilon", 1e-12)
    centred = node.op_type == "SkipLayerNormalization"
    return [_norm(editor, total, scale, shift, epsilon, centred), "", "", total]


def gelu(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """Gelu, BiasGelu, FastGelu (by tanh) and QuickGelu (by the logistic function)."""
    x, bias = editor.operands(node, 2)
    dtype = _type_of(editor, x)
    x = editor.add("Add", x, bias) if bias else x

    def number(value: float) -> np.ndarray:
        return np.array(value, dtype)

    if node.op_type == "QuickGelu":
        alpha = editor.attributes(node).get("alpha", 1.702)
        return [editor.add("Mul", x, editor.add("Sigmoid", editor.add("Mul", x, number(alpha))))]
    if editor.opset >= 20:
        form = "tanh" if node.op_type == "FastGelu" else "none"
        return [editor.add("Gelu", x, approximate=form)]
    if node.op_type == "FastGelu":
        cube = editor.add("Mul", editor.add("Mul", x, x), x)
        inner = editor.add("Add", x, editor.add("Mul", cube, number(0.044715)))
        part = editor.add("Tanh", editor.add("Mul", inner, number(math.sqrt(2 / math.pi))))
    else:
        part = editor.add("Erf", editor.add("Mul", x, number(math.sqrt(0.5))))
    half = editor.add("Mul", x, number(0.5))
    return [editor.add("Mul", half, editor.add("Add", part, number(1.0)))]


def fused_matmul(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """A product of matrices that are transposed first, times a number."""
    attributes = editor.attributes(node)
    if attributes.get("transBatchA", 0) or attributes.get("transBatchB", 0):
        editor.refuse("it moves axes of the batch")
    operands = []
    for name, key in zip(node.input, ("transA", "transB"), strict=True):
        if not attributes.get(key, 0):
            operands.append(name)
            continue
        rank = len(editor.dims(name) or ())
        if rank < 2:
            editor.refuse("the rank of an operand that it transposes is not known, or below 2")
        axes = [*range(rank - 2), rank - 1, rank - 2]
        operands.append(editor.add("Transpose", name, perm=axes))
    product, alpha = editor.add("MatMul", *operands), attributes.get("alpha", 1.0)
    if alpha == 1.0:
        return [product]
    return [editor.add("Mul", product, np.array(alpha, _type_of(editor, node.input[0])))]


_NORM, _GELU = (layer_norm,), (gelu,)

#: Rules by domain and operator.
RULES: Mapping[str, Sequence[Rule]] = {
    "LayerNormalization": _NORM,
    "SimplifiedLayerNormalization": _NORM,
    "com.microsoft::Attention": (contrib_attention.attention,),
    "com.microsoft::BiasGelu": _GELU,
    "com.microsoft::FastGelu": _GELU,
    "com.microsoft::FusedMatMul": (fused_matmul,),
    "com.microsoft::Gelu": _GELU,
    "com.microsoft::GroupQueryAttention": (grouped_query_attention,),
    "com.microsoft::MultiHeadAttention": (contrib_attention.multi_head_attention,),
    "com.microsoft::QuickGelu": _GELU,
    "com.microsoft::RotaryEmbedding": (contrib_attention.rotary_embedding,),
    "com.microsoft::SkipLayerNormalization": (skip_layer_norm,),
    "com.microsoft::SkipSimplifiedLayerNormalization": (skip_layer_norm,),
}
