"""Elementwise operators whose special values or forms TVM 0.27 imports otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..onnx_editor import Editor

if TYPE_CHECKING:
    import onnx


#: Default of Selu's gamma in the specification.
_SELU_GAMMA = 1.05070102214813232421875


def mod(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """Float Mod with ``fmod=0`` (since opset 28): C's fmod, moved by y where it has the other sign."""
    dtype = editor.dtype(node.input[0])
    if dtype is None or dtype.kind != "f" or editor.attributes(node).get("fmod", 0):
        return None
    x, y = node.input
    rest = editor.add("Mod", x, y, fmod=1)
    zero = np.zeros((), dtype)
    less, negative = editor.add("Less", rest, zero), editor.add("Less", y, zero)
    nonzero = editor.add("Not", editor.add("Equal", rest, zero))
    moved = editor.add("And", editor.add("Xor", less, negative), nonzero)
    return [editor.add("Where", moved, editor.add("Add", rest, y), rest)]


def bit_shift(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """Shifts by the width or more give what shifting bit by bit would; C leaves them open."""
    dtype = editor.dtype(node.input[0])
    if dtype is None:
        return None
    x, amount = node.input
    known = editor.value(amount)
    width = 8 * dtype.itemsize
    if known is not None and (known.astype("int64") >= 0).all() and (known < width).all():
        return None
    direction = editor.attributes(node)["direction"]
    last = np.array(width - 1, dtype)
    zero = np.zeros((), dtype)
    over = editor.add("Greater", amount, last)
    if dtype.kind == "i":  # as a C cast to unsigned has it, a negative amount is a large one
        over = editor.add("Or", over, editor.add("Less", amount, zero))
    safe = editor.add("Where", over, last, amount)
    shifted = editor.add("BitShift", x, safe, direction=direction)
    if direction == "RIGHT" and dtype.kind == "i":
        return [shifted]  # the last possible shift leaves the sign alone
    return [editor.add("Where", over, zero, shifted)]


def is_inf(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """IsInf of one sign only."""
    attributes = editor.attributes(node)
    positive, negative = attributes.get("detect_positive", 1), attributes.get("detect_negative", 1)
    dtype = editor.dtype(node.input[0])
    if (positive and negative) or dtype is None:
        return None
    limit = np.array(np.inf if positive else -np.inf, dtype)
    if not positive and not negative:
        return [
            editor.add(
                "And", *[editor.add("Not", editor.add("Equal", *node.input, node.input[0]))] * 2
            )
        ]
    return [editor.add("Equal", node.input[0], limit)]


def _log1p(editor: Editor, value: str, dtype: np.dtype) -> str:
    """Return log(1 + t) of t in [0, 1], by its series where the sum would lose t's digits."""

    def number(x: float) -> np.ndarray:
        return np.array(x, dtype)

    # t - t^2/2 + t^3/3 - t^4/4, to 2e-9 below 0.01
    series = number(-1 / 4)
    inner: str | np.ndarray = series
    for coefficient in (1 / 3, -1 / 2, 1.0):
        inner = editor.add("Add", editor.add("Mul", inner, value), number(coefficient))
    small = editor.add("Mul", inner, value)
    whole = editor.add("Log", editor.add("Add", value, number(1)))
    return editor.add("Where", editor.add("Less", value, number(0.01)), small, whole)


def softplus(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """max(x, 0) + log1p(exp(-|x|)): neither overflows for large x nor rounds to 0 for small ones."""
    dtype = editor.dtype(node.input[0])
    if dtype is None:
        return None
    if dtype.itemsize > 2:
        return [_softplus(editor, node.input[0], dtype)]
    wide = _softplus(editor, editor.cast(node.input[0], "float32"), np.dtype("float32"))
    return [editor.cast(wide, dtype)]


def _softplus(editor: Editor, x: str, dtype: np.dtype) -> str:
    decay = editor.add("Exp", editor.add("Neg", editor.add("Abs", x)))
    positive = editor.add("Relu", x)
    return editor.add("Add", positive, _log1p(editor, decay, dtype))


def mish(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """x * tanh(softplus(x)) as x * n / (n + 2) with n = e^x (e^x + 2), of min(x, 20) against overflow."""
    dtype = editor.dtype(node.input[0])
    if dtype is None:
        return None
    x = node.input[0]
    bound = np.array(20 if dtype.itemsize > 2 else 5, dtype)  # e^(2 * bound) is in range
    two = np.array(2, dtype)
    power = editor.add("Exp", editor.add("Where", editor.add("Greater", x, bound), bound, x))
    n = editor.add("Mul", power, editor.add("Add", power, two))
    return [editor.add("Mul", x, editor.add("Div", n, editor.add("Add", n, two)))]


def extreme(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """Max or Min of several values, one after the other; TVM would stack them and reduce the stack."""
    dtype = editor.dtype(node.input[0])
    if dtype is None or dtype.kind != "f" or len(node.input) < 3:
        return None
    total, *rest = node.input
    for value in rest:
        total = editor.add(node.op_type, total, value)
    return [total]


def sign(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """Sign of floats: of NaN it is NaN, of which TVM makes 0. Sign of what cannot be negative: 0 or 1."""
    x, dtype = node.input[0], editor.dtype(node.input[0])
    if dtype is not None and dtype.kind == "u":
        zero = np.zeros((), dtype)
        return [editor.add("Where", editor.add("Equal", x, zero), zero, np.ones((), dtype))]
    if dtype is None or dtype.kind != "f":
        return None
    return [editor.add("Where", editor.add("IsNaN", x), x, editor.add("Sign", x))]


def negative(editor: Editor, node: onnx.NodeProto) -> None:
    """Refuse Neg of unsigned integers, which ONNX does not define."""
    dtype = editor.dtype(node.input[0])
    if dtype is not None and dtype.kind in "ub":
        editor.refuse(f"{dtype.name} values have no negatives: cast them to a signed type first")


def thresholded_relu(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """``x > alpha ? x : 0``, which is 0 for NaN; TVM multiplies by the comparison."""
    dtype = editor.dtype(node.input[0])
    if dtype is None:
        return None
    x = node.input[0]
    alpha = np.array(editor.attributes(node).get("alpha", 1.0), dtype)
    zero = np.zeros((), dtype)
    return [editor.add("Where", editor.add("Greater", x, alpha), x, zero)]


def shrink(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """``x < -lambd ? x + bias : x > lambd ? x - bias : 0``; TVM adds both where a negative lambd lets both hold."""
    attributes, dtype = editor.attributes(node), editor.dtype(node.input[0])
    bias, limit = attributes.get("bias", 0.0), attributes.get("lambd", 0.5)
    if dtype is None or limit >= 0:
        return None
    if dtype.kind != "f":
        editor.refuse(f"a negative limit of {dtype.name} values is not supported")
    x, shift = node.input[0], np.array(bias, dtype)
    low, high = np.array(-limit, dtype), np.array(limit, dtype)
    above = editor.add(
        "Where", editor.add("Greater", x, high), editor.add("Sub", x, shift), np.zeros((), dtype)
    )
    return [editor.add("Where", editor.add("Less", x, low), editor.add("Add", x, shift), above)]


def equal_truths(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """Equal of truth values, which LLVM is given as numbers by TVM: neither without the other."""
    if editor.dtype(node.input[0]) != np.dtype("bool"):
        return None
    return [editor.add("Not", editor.add("Xor", *node.input))]


def of_itself(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """A value compared with itself or taken from itself: true or 0, but for NaN and infinity.

    TVM's simplifier takes the exceptions for none.
    """
    x, y = (*node.input, "")[:2]
    dtype = editor.dtype(x)
    if x != y or dtype is None or dtype.kind != "f":
        return None
    nan = editor.add("IsNaN", x)
    if node.op_type != "Sub":
        return [editor.add("Not", nan)]
    undefined = editor.add("Or", nan, editor.add("IsInf", x))
    return [editor.add("Where", undefined, np.array(np.nan, dtype), np.zeros((), dtype))]


def times_zero(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """A product with a stored 0: NaN of NaN and infinities, of which TVM's simplifier makes 0."""
    dtype = editor.dtype(node.input[0])
    if dtype is None or dtype.kind != "f":
        return None
    for factor, x in (node.input, node.input[::-1]):
        stored = editor.value(factor)
        if stored is None or stored.size == 0 or stored.any() or editor.value(x) is not None:
            continue
        undefined = editor.add("Or", editor.add("IsNaN", x), editor.add("IsInf", x))
        zero = editor.add("Where", undefined, np.array(np.nan, dtype), np.zeros((), dtype))
        return [editor.add("Add", zero, factor)]  # of the shape that both have together
    return None


def divided_by_zero(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """A value by a stored 0, which TVM refuses: the value times the infinity of its sign."""
    x, zero = node.input
    dtype, stored = editor.dtype(zero), editor.value(zero)
    if dtype is None or dtype.kind != "f" or stored is None or stored.size == 0 or stored.any():
        return None
    return [editor.add("Mul", x, np.copysign(np.array(np.inf, dtype), stored).astype(dtype))]


def divided_zero(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """A stored 0 by a value: NaN by NaN and 0, of which TVM's simplifier makes 0."""
    zero, x = node.input
    dtype, stored = editor.dtype(zero), editor.value(zero)
    if dtype is None or dtype.kind != "f" or stored is None or stored.size == 0 or stored.any():
        return None
    if editor.value(x) is not None:
        return None
    undefined = editor.add(
        "Or", editor.add("IsNaN", x), editor.add("Equal", x, np.zeros((), dtype))
    )
    quotient = editor.add("Where", undefined, np.array(np.nan, dtype), np.zeros((), dtype))
    return [editor.add("Add", quotient, zero)]


def in_float32(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """Compute a node on float16 or bfloat16 in float32, and round its results.

    For operators that TVM mixes with float32 constants, or whose 16-bit forms do not compile.
    """
    dtype = editor.dtype(node.input[0])
    if dtype is None or dtype.name not in ("float16", "bfloat16"):
        return None
    inputs = [
        editor.cast(name, "float32") if name and editor.dtype(name) == dtype else name
        for name in node.input
    ]
    y = editor.add(node.op_type, *inputs, **editor.attributes(node))
    return [y if node.op_type.startswith("Arg") else editor.cast(y, dtype)]


def exponential(editor: Editor, node: onnx.NodeProto) -> list[str] | None:
    """Elu and Selu of float64, which TVM mixes with float32 constants."""
    x, dtype = node.input[0], editor.dtype(node.input[0])
    if dtype != np.dtype("float64"):
        return None
    attributes = editor.attributes(node)
    default = 1.0 if node.op_type == "Elu" else 1.67326319217681884765625
    return [
        _exponential(
            editor,
            x,
            dtype,
            attributes.get("alpha", default),
            attributes.get("gamma", _SELU_GAMMA) if node.op_type == "Selu" else 1.0,
        )
    ]


def _exponential(editor: Editor, x: str, dtype: np.dtype, alpha: float, gamma: float) -> str:
    """Return gamma * (x above 0, alpha * (e^x - 1) elsewhere)."""
    zero, one = np.zeros((), dtype), np.ones((), dtype)
    below = editor.add("Sub", editor.add("Exp", editor.add("Min", x, zero)), one)
    below = editor.add("Mul", below, np.array(alpha, dtype))
    y = editor.add("Where", editor.add("Greater", x, zero), x, below)
    return y if gamma == 1 else editor.add("Mul", y, np.array(gamma, dtype))


def celu(editor: Editor, node: onnx.NodeProto) -> list[str]:
    """Celu: alpha * Elu(x / alpha); for a negative alpha its definition, of which both halves may count."""
    x = node.input[0]
    alpha = editor.attributes(node).get("alpha", 1.0)
    dtype = editor.dtype(x) or np.dtype("float32")
    wide = editor.cast(x, "float32") if dtype.itemsize == 2 else x
    number = np.array(alpha, "float32" if dtype.itemsize == 2 else dtype)
    ratio = editor.add("Div", wide, number)
    if alpha > 0:
        wide_elu = number.dtype == np.dtype("float64")
        y = (
            _exponential(editor, ratio, number.dtype, 1.0, 1.0)
            if wide_elu
            else editor.add("Elu", ratio)
        )
        y = editor.add("Mul", y, number)
    else:
        zero, one = np.zeros((), number.dtype), np.ones((), number.dtype)
        grown = editor.add("Mul", editor.add("Sub", editor.add("Exp", ratio), one), number)
        y = editor.add("Add", editor.add("Max", wide, zero), editor.add("Min", grown, zero))
    return [editor.cast(y, dtype) if dtype.itemsize == 2 else y]
