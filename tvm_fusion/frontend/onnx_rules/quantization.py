"""Quantised operators written out from their formulas in the ONNX operator specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..onnx_editor import Editor

if TYPE_CHECKING:
    import onnx


def requantized(editor: Editor, total: str, scale: str, y_scale: str, y_zero: str) -> str:
    """Return saturate(round(total * scale / y_scale) + y_zero) in the type of the zero point."""
    real = editor.add("Mul", editor.cast(total, "float32"), editor.add("Div", scale, y_scale))
    return _saturated(editor, real, y_zero, editor.dtype(y_zero) or np.dtype("uint8"))


def _saturated(editor: Editor, real: str, zero: str, dtype: np.dtype) -> str:
    """Return the value rounded to even, moved to the zero point and clipped to the type."""
    bounds = np.iinfo(dtype)
    value = editor.add("Round", real)
    if zero:
        value = editor.add("Add", value, editor.cast(zero, "float32"))
    value = editor.add("Max", value, np.array(bounds.min, "float32"))
    value = editor.add("Min", value, np.array(bounds.max, "float32"))
    return editor.cast(value, dtype)


def _along(editor: Editor, value: str, x: str, axis: int, block: int) -> str:
    """Return a scale or zero point in a shape that broadcasts with ``x``."""
    shape, rank = editor.shape(value), len(editor.dims(x) or ())
    if shape is None or not rank:
        editor.refuse("the shapes of its operands are not known: give the model static shapes")
    if shape in ((), (1,)):
        return editor.reshape(value, []) if shape else value
    axis %= rank
    if not block:
        return editor.reshape(value, [1] * axis + [-1] + [1] * (rank - 1 - axis))
    full = editor.shape(x)
    if full is None:
        editor.refuse("the shapes of its operands are not known: give the model static shapes")
    # Each element once per element of its block.
    index = np.arange(full[axis]) // block
    return editor.add("Gather", value, index, axis=axis)


def quantize(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """QuantizeLinear: saturate(round(x / scale) + zero)."""
    import onnx.helper

    attributes = editor.attributes(node)
    x, scale, zero = editor.operands(node, 3)
    code = attributes.get("output_dtype", 0)
    dtype = editor.dtype(zero) if zero else None
    if dtype is None:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(code) if code else np.dtype("uint8")
    if dtype.kind not in "iu" or dtype.itemsize > 2:
        editor.refuse(f"quantising to {dtype.name} is not supported")
    axis, block = attributes.get("axis", 1), attributes.get("block_size", 0)
    scale = editor.cast(_along(editor, scale, x, axis, block), "float32")
    zero = _along(editor, zero, x, axis, block) if zero else ""
    real = editor.add("Div", editor.cast(x, "float32"), scale)
    return [_saturated(editor, real, zero, dtype)]


def dequantize(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """DequantizeLinear: (x - zero) * scale, in the type of the scale."""
    import onnx.helper

    attributes = editor.attributes(node)
    x, scale, zero = editor.operands(node, 3)
    dtype = editor.dtype(scale) or np.dtype("float32")
    if attributes.get("output_dtype", 0):
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(attributes["output_dtype"]))
    axis, block = attributes.get("axis", 1), attributes.get("block_size", 0)
    value = editor.cast(x, "int32")
    if zero:
        value = editor.add("Sub", value, editor.cast(_along(editor, zero, x, axis, block), "int32"))
    wide = editor.cast(_along(editor, scale, x, axis, block), "float32")
    y = editor.add("Mul", editor.cast(value, "float32"), wide)
    return [editor.cast(y, dtype) if dtype != np.dtype("float32") else y]


def dynamic_quantize(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """DynamicQuantizeLinear: scale and zero point from the range of x, which includes 0.

    The specification divides by a range of 0; the scale of zeros is 1, as in onnxruntime.
    """
    x = node.input[0]
    rank = len(editor.dims(x) or ())
    axes, zero = list(range(rank)), np.zeros((), "float32")
    high = editor.add("Max", editor.reduce("ReduceMax", x, axes, keep=False), zero)
    low = editor.add("Min", editor.reduce("ReduceMin", x, axes, keep=False), zero)
    last = np.array(255, "float32")
    scale = editor.add("Div", editor.add("Sub", high, low), last)
    scale = editor.add("Where", editor.add("Equal", scale, zero), zero + 1, scale)
    start = editor.add("Div", editor.add("Neg", low), scale)
    point = editor.add("Round", editor.add("Min", editor.add("Max", start, zero), last))
    point = editor.cast(point, "uint8")
    return [_saturated(editor, editor.add("Div", x, scale), point, np.dtype("uint8")), scale, point]


def quantized_matmul(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """QLinearMatMul: a product in int32, scaled and rounded once."""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = node.input
    total = _integer_product(editor, a, b, a_zero, b_zero)
    # Per row of a: [M] -> [M, 1]; per column of b: [N], as it is.
    rows = editor.shape(a_scale)
    left = editor.reshape(a_scale, [-1, 1]) if rows and rows != (1,) and len(rows) == 1 else a_scale
    scale = editor.add("Mul", editor.cast(left, "float32"), editor.cast(b_scale, "float32"))
    return [requantized(editor, total, scale, editor.cast(y_scale, "float32"), y_zero)]


def integer_matmul(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """MatMulInteger: a product of the values less their zero points, in int32."""
    a, b, a_zero, b_zero = editor.operands(node, 4)
    return [_integer_product(editor, a, b, a_zero, b_zero)]


def _integer_product(editor: Editor, a: str, b: str, a_zero: str, b_zero: str) -> str:
    def centred(value: str, zero: str, *, rows: bool) -> str:
        wide = editor.cast(value, "int32")
        if not zero:
            return wide
        point, shape = editor.cast(zero, "int32"), editor.shape(zero)
        if rows and shape and shape != (1,) and len(shape) == 1:
            point = editor.reshape(point, [-1, 1])
        return editor.add("Sub", wide, point)

    return editor.add("MatMul", centred(a, a_zero, rows=True), centred(b, b_zero, rows=False))
