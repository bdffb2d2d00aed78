"""Products, powers and reductions in forms that TVM 0.27 lacks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..onnx_editor import Editor

if TYPE_CHECKING:
    import onnx


def matmul(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """MatMul of two vectors: a sum of products."""
    a, b = node.input
    if len(editor.dims(a) or ((), ())) != 1 or len(editor.dims(b) or ((), ())) != 1:
        return None
    return [editor.reduce("ReduceSum", editor.add("Mul", a, b), [0], keep=False)]


def power(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """Pow of different types, and of whole numbers, which go through float64."""
    x, exponent = node.input
    base, other = editor.dtype(x), editor.dtype(exponent)
    if base is None or other is None or (base == other and base.kind == "f"):
        return None
    if base.kind == "f" and other.itemsize <= base.itemsize:
        return [editor.add("Pow", x, editor.cast(exponent, base))]
    wide = editor.add("Pow", editor.cast(x, "float64"), editor.cast(exponent, "float64"))
    if base.kind not in "iu":
        return [editor.cast(wide, base)]
    nearest = editor.add("Round", wide)  # the power of float64 can be just below the whole number
    if other.kind != "f":
        return [_whole(editor, nearest, base)]
    error = editor.add("Abs", editor.add("Sub", wide, nearest))
    allowed = editor.add("Mul", editor.add("Abs", nearest), np.array(1e-12))
    exact = editor.add("Not", editor.add("Greater", error, allowed))
    return [_whole(editor, editor.add("Where", exact, nearest, wide), base)]


def _whole(editor: Editor, value: str, dtype: np.dtype) -> str:
    """Convert float64 to integers; NaN and what is too large to the least of the type, as processors of x86 do.

    LLVM leaves the conversion of those undefined.
    """
    limits = np.iinfo(dtype)
    fits = editor.add("Less", editor.add("Abs", value), np.array(float(limits.max) + 1))
    known = editor.cast(editor.add("Where", fits, value, np.array(0.0)), dtype)
    return editor.add("Where", fits, known, np.array(limits.min, dtype))


def gemm(editor: Editor, node: onnx.NodeProto) -> None:
    """Refuse Gemm of integers by factors that are not whole, which TVM rounds before it multiplies."""
    attributes, dtype = editor.attributes(node), editor.dtype(node.input[0])
    if dtype is None or dtype.kind not in "iu":
        return
    for name in ("alpha", "beta"):
        factor = attributes.get(name, 1.0)
        if not float(factor).is_integer():
            editor.refuse(f"its {name} of {factor:g} is not whole, its operands are {dtype.name}")


def reduce_bool(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """ReduceMax or ReduceMin of booleans, as whole numbers."""
    if editor.dtype(node.input[0]) != np.dtype("bool"):
        return None
    wide = editor.cast(node.input[0], "int32")
    y = editor.add(node.op_type, wide, *node.input[1:], **editor.attributes(node))
    return [editor.cast(y, "bool")]


def reduce_mean_of_integers(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """ReduceMean of integers: their sum divided by their number, rounded towards zero; TVM's is of another type."""
    x = node.input[0]
    dtype, before, after = editor.dtype(x), editor.shape(x), editor.shape(node.output[0])
    if dtype is None or dtype.kind not in "iu":
        return None
    if before is None or after is None or not math.prod(after):
        editor.refuse("its shapes are computed at run time")
    attributes = editor.attributes(node)
    if editor.opset < 18:  # axes are an attribute, which ReduceSum does not have since opset 13
        axes = attributes.get("axes", range(len(before)))
        total = editor.reduce("ReduceSum", x, axes, keep=bool(attributes.get("keepdims", 1)))
    else:
        total = editor.add("ReduceSum", x, *node.input[1:], **attributes)
    count = np.array(math.prod(before) // math.prod(after), dtype)
    return [editor.add("Div", total, count)]


def reduce_in_floats(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """Roots and logarithms of sums of integers, by way of float64."""
    x, dtype = node.input[0], editor.dtype(node.input[0])
    if dtype is None or dtype.kind not in "iu":
        return None
    wide = editor.cast(x, "float64")
    y = editor.add(node.op_type, wide, *node.input[1:], **editor.attributes(node))
    return [editor.cast(y, dtype)]


def reduce_no_axes(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """A reduction over no axes (``noop_with_empty_axes``): each element by itself, as a sum of one."""
    axes = editor.operands(node, 2)[1]
    stored = editor.value(axes) if axes else np.zeros(0)
    if not editor.attributes(node).get("noop_with_empty_axes", 0) or stored is None or stored.size:
        return None
    x = node.input[0]
    if node.op_type in ("ReduceL1", "ReduceL2"):
        return [editor.add("Abs", x)]
    if node.op_type == "ReduceSumSquare":
        return [editor.add("Mul", x, x)]
    return [editor.add("Log" if node.op_type == "ReduceLogSum" else "Identity", x)]


def log_sum_exp(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """ReduceLogSumExp of infinities, which are not taken from themselves."""
    x, dtype = node.input[0], editor.dtype(node.input[0])
    attributes = editor.attributes(node)
    if dtype is None or dtype.kind != "f":
        return None
    whole = {**attributes, "keepdims": 1}
    largest = editor.add("ReduceMax", x, *node.input[1:], **whole)
    zero = np.zeros((), dtype)
    safe = editor.add("Where", editor.add("IsInf", largest), zero, largest)
    powers = editor.add("Exp", editor.add("Sub", x, safe))
    rest = list(node.input[1:])
    if editor.opset < 18 and editor.opset >= 13:  # of ReduceSum axes are an operand earlier
        axes = whole.pop("axes", None)
        rest = [] if axes is None else [editor.store(np.array(axes, "int64"))]
    total = editor.add("ReduceSum", powers, *rest, **whole)
    y = editor.add("Add", editor.add("Log", total), safe)
    if attributes.get("keepdims", 1):
        return [y]
    shape = editor.dims(node.output[0])
    if shape is None or None in shape:
        editor.refuse("the shape of its result is not known: give the model static shapes")
    return [editor.reshape(y, shape)]


#: What a reduction of nothing gives.
_OF_NOTHING = {
    "ReduceL1": 0, "ReduceL2": 0, "ReduceLogSum": -np.inf, "ReduceLogSumExp": -np.inf,
    "ReduceMax": -np.inf, "ReduceMin": np.inf, "ReduceProd": 1, "ReduceSum": 0, "ReduceSumSquare": 0,
}  # fmt: skip


def reduce_nothing(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """A reduction over an axis without elements: its neutral element."""
    shape, target = editor.shape(node.input[0]), editor.shape(node.output[0])
    if shape is None or 0 not in shape:
        return None
    number = _OF_NOTHING.get(node.op_type)
    dtype = editor.dtype(node.input[0]) or np.dtype("float32")
    if target is None or number is None:
        editor.refuse("it reduces an axis without elements")
    editor.require_room(*target)
    if np.isinf(number) and dtype.kind != "f":
        if dtype.kind == "b":
            return [editor.store(np.full(target, number > 0, dtype))]
        number = np.iinfo(dtype).min if number < 0 else np.iinfo(dtype).max
    return [editor.store(np.full(target, number, dtype))]


def prelu(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """PRelu whose slopes are not one per channel."""
    x, slope = node.input
    dims, shape = editor.dims(x), editor.shape(slope)
    if dims is None or shape is None:
        return None
    if sum(n != 1 for n in shape) == 0:
        return None
    if editor.opset < 7 and len(shape) == 1:  # one per channel; later the slopes broadcast as usual
        slope = editor.reshape(slope, [-1, *[1] * (len(dims) - 2)])
    negative = editor.add("Less", x, np.zeros((), editor.dtype(x) or "float32"))
    return [editor.add("Where", negative, editor.add("Mul", x, slope), x)]
