"""A BlockBuilder that keeps operators where TVM's ONNX importer would already lower them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..compat import BlockBuilder, ir, relax, topi


class OperatorBuilder(BlockBuilder):
    """``emit_te`` of a TOPI function that has a Relax operator emits that operator.

    TVM 0.27 imports Clip, Pad, Tile, Einsum and the padding of ``auto_pad`` as calls of PrimFuncs,
    which no pass can look into. Functions without an operator are lowered as before, and refused
    later with their node's name.
    """

    def emit_te(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> ir.Expr:
        operator = _OPERATORS.get(func)
        if operator is None:
            return super().emit_te(func, *args, **kwargs)
        expr = operator(*args, **kwargs)
        return expr if isinstance(expr, relax.Var) else self.emit(expr)


def _bounded(operator: Callable[[ir.Expr, ir.Expr], ir.Expr]) -> Callable[[ir.Expr, Any], ir.Expr]:
    """Return maximum or minimum with a bound that may be a number; an infinite one changes nothing.

    The bound comes first: TVM computes ``a > b ? a : b``, which keeps a NaN that comes second.
    """

    def bound(value: ir.Expr, limit: Any) -> ir.Expr:
        if isinstance(limit, ir.Expr):
            return operator(limit, value)
        return (
            value if math.isinf(limit) else operator(relax.const(limit, str(value.ty.dtype)), value)
        )

    return bound


def _pad(mode: str) -> Callable[..., ir.Expr]:
    def pad(
        data: ir.Expr, before: Sequence[int], after: Sequence[int], value: Any = 0.0
    ) -> ir.Expr:
        width = [int(n) for pair in zip(before, after, strict=True) for n in pair]
        number = float(value) if mode == "constant" and value is not None else 0.0
        return relax.op.nn.pad(data, width, pad_mode=mode, pad_value=number)

    return pad


def _einsum(equation: str, *operands: ir.Expr) -> ir.Expr:
    return relax.op.einsum(operands, equation)


def _flip(data: ir.Expr, axis: int) -> ir.Expr:
    return relax.op.flip(data, axis)


def _tile(data: ir.Expr, repeats: Sequence[int]) -> ir.Expr:
    return relax.op.tile(data, [int(n) for n in repeats])


_OPERATORS: dict[Callable[..., Any], Callable[..., ir.Expr]] = {
    topi.maximum: _bounded(relax.op.maximum),
    topi.minimum: _bounded(relax.op.minimum),
    topi.nn.pad: _pad("constant"),
    topi.nn.mirror_pad: _pad("reflect"),
    topi.nn.replicate_pad: _pad("replicate"),
    topi.nn.circular_pad: _pad("circular"),
    topi.einsum: _einsum,
    topi.flip: _flip,
    topi.tile: _tile,
}
