"""Converters of ATen's divisions with a rounding mode, their remainders, and powers.

``floor(x / y)`` is off by one where the quotient rounds to a whole number (1.0 // 0.1 is 9), and
``x - floor(x / y) * y`` loses all digits of a large quotient. As ATen, these take the exact remainder
of ``fmod`` first, in float32 if not wider.
"""

from __future__ import annotations

from torch import fx

from ..compat import ir, relax
from .torch_arguments import Arguments, Converter, Importer, in_dtype, result_dtype


def _operands(importer: Importer, node: fx.Node) -> tuple[ir.Expr, ir.Expr, str]:
    """Both operands in the type of the result, narrow floats in float32; and that type."""
    builder, arguments = importer.block_builder, Arguments(importer.env, node)
    dtype = result_dtype(node)
    dtype = "float32" if dtype in ("float16", "bfloat16") else dtype
    operands = []
    for argument in node.target._schema.arguments[:2]:
        value = arguments[argument.name]
        if isinstance(value, ir.Expr):  # a tensor; ATen does not round numbers to a narrow type
            value = in_dtype(builder, value, result_dtype(node))
        operands.append(in_dtype(builder, value, dtype))
    left, right = operands
    return left, right, dtype


def _divide_with_mode(importer: Importer, node: fx.Node) -> ir.Expr:
    """``div`` with rounding mode None, "floor" or "trunc"."""
    emit, op, builder = importer.block_builder.emit, relax.op, importer.block_builder
    left, right, dtype = _operands(importer, node)
    mode = Arguments(importer.env, node)["rounding_mode"]
    if "float" not in dtype:  # TVM's division of integers rounds towards zero
        return emit((op.floor_divide if mode == "floor" else op.divide)(left, right))
    quotient = emit(op.divide(left, right))
    if mode == "floor":
        quotient = _floored(importer, left, right, quotient, dtype)
    quotient = in_dtype(builder, quotient, result_dtype(node))
    return (
        emit(op.trunc(quotient)) if mode == "trunc" else quotient
    )  # ATen truncates what it rounded


def _floored(
    importer: Importer, left: ir.Expr, right: ir.Expr, quotient: ir.Expr, dtype: str
) -> ir.Expr:
    """``c10::div_floor_floating``: the quotient without its remainder, which is nearly whole, rounded."""
    emit, op = importer.block_builder.emit, relax.op
    one, half, zero = (relax.const(value, dtype) for value in (1.0, 0.5, 0.0))
    rest = emit(op.mod(left, right))
    whole = emit(op.divide(emit(op.subtract(left, rest)), right))
    whole = emit(
        op.where(_of_other_sign(importer, rest, right), emit(op.subtract(whole, one)), whole)
    )
    floor = emit(op.floor(whole))
    above = emit(op.greater(emit(op.subtract(whole, floor)), half))
    floor = emit(op.where(above, emit(op.add(floor, one)), floor))
    return emit(op.where(emit(op.equal(right, zero)), quotient, floor))


def _of_other_sign(importer: Importer, rest: ir.Expr, right: ir.Expr) -> ir.Expr:
    """Whether a remainder has to move to the divisor's side of zero."""
    emit, op = importer.block_builder.emit, relax.op
    zero = relax.const(0.0, str(rest.ty.dtype))
    below, above = emit(op.less(rest, zero)), emit(op.greater(rest, zero))
    negative, positive = emit(op.less(right, zero)), emit(op.greater(right, zero))
    opposite = emit(op.logical_and(above, negative))
    return emit(op.logical_or(emit(op.logical_and(below, positive)), opposite))


def _remainder(importer: Importer, node: fx.Node) -> ir.Expr:
    """``remainder``, of the divisor's sign."""
    emit, op, builder = importer.block_builder.emit, relax.op, importer.block_builder
    left, right, dtype = _operands(importer, node)
    if "float" not in dtype:
        return emit(op.floor_mod(left, right))
    rest = emit(op.mod(left, right))
    moved = emit(op.add(rest, right))
    rest = emit(op.where(_of_other_sign(importer, rest, right), moved, rest))
    return in_dtype(builder, rest, result_dtype(node))


def _power(importer: Importer, node: fx.Node) -> ir.Expr:
    """``pow`` in the type of the result; of integers by float64, which is exact up to 2 ** 53."""
    builder, arguments, dtype = (
        importer.block_builder, Arguments(importer.env, node), result_dtype(node),
    )  # fmt: skip
    emit, op = builder.emit, relax.op
    wide = dtype if "float" in dtype else "float64"
    names = [argument.name for argument in node.target._schema.arguments[:2]]
    exponent = arguments[names[1]]
    if dtype != wide and isinstance(exponent, int) and 0 < exponent < 4:
        base = in_dtype(builder, arguments[names[0]], dtype)
        value = base
        for _ in range(exponent - 1):
            value = emit(op.multiply(value, base))
        return value
    value = emit(op.power(*(in_dtype(builder, arguments[name], wide) for name in names)))
    # The power of float64 can be just below the whole number.
    return value if dtype == wide else in_dtype(builder, emit(op.round(value)), dtype)


#: Converters by the name of the ATen overload.
DIVISIONS: dict[str, Converter] = {
    **{f"div.{kind}_mode": _divide_with_mode for kind in ("Tensor", "Scalar")},
    **{f"remainder.{kind}": _remainder for kind in ("Tensor", "Scalar", "Scalar_Tensor")},
    **{f"pow.{kind}": _power for kind in ("Scalar", "Tensor_Scalar", "Tensor_Tensor")},
}
