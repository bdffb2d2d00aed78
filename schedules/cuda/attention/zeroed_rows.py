"""Rows that become zeros: the selection between the softmax and the product with values."""

from __future__ import annotations

import dataclasses

from ....compat import tirx
from ..fast_math import dtype_of, function_of
from ..tensor_core.affine import is_conditional

#: Types by way of which values may be converted.
_CONVERTED = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Selection:
    """What stands around a weight.

    Attributes
    ----------
    kept : PrimExpr
        The weight.
    condition : PrimExpr or None
        What makes it 0, without conversions and negations; None where nothing does.
    negated : bool
        Whether it becomes 0 where that does not hold.
    zeros : PrimExpr or None
        What makes it 0, as a truth value.
    """

    kept: tirx.PrimExpr
    condition: tirx.PrimExpr | None = None
    negated: bool = False
    zeros: tirx.PrimExpr | None = None

    @property
    def of_nan(self) -> tirx.PrimExpr | None:
        """The value that is 0 where it is NaN; None for another condition."""
        if self.condition is None or self.negated or function_of(self.condition) != "isnan":
            return None
        return without_casts(self.condition.args[0])


def selection(weight: tirx.PrimExpr) -> Selection | None:
    """Take ``condition ? 0 : weight`` apart, or the other way round; None where neither side is 0."""
    value = without_casts(weight)
    if is_conditional(value):
        condition, one, other = value.args
    elif isinstance(value, tirx.Select):
        condition, one, other = value.condition, value.true_value, value.false_value
    else:
        return Selection(value)
    swapped = not _is_zero(one)
    zero, kept = (other, one) if swapped else (one, other)
    if not _is_zero(zero):
        return None
    known, negated = truth(condition)
    zeros = tirx.Not(condition) if swapped else condition
    return Selection(without_casts(kept), known, negated is not swapped, zeros)


def not_infinite(condition: tirx.PrimExpr) -> tirx.PrimExpr | None:
    """The value that a condition says is not minus infinity; None for another condition."""
    value, negated = truth(condition)
    return infinite(value, not negated)


def infinite(condition: tirx.PrimExpr, negated: bool) -> tirx.PrimExpr | None:
    """The value that a condition, or its negation, says is minus infinity; None for another condition."""
    if not isinstance(condition, tirx.NE if negated else tirx.EQ):
        return None
    bound = without_casts(condition.b)
    known = isinstance(bound, tirx.FloatImm) and float(bound.value) == float("-inf")
    return without_casts(condition.a) if known else None


def terms(value: tirx.PrimExpr) -> list[tirx.PrimExpr]:
    """What a value is the sum of, without conversions."""
    value = without_casts(value)
    if isinstance(value, tirx.Add):
        return [*terms(value.a), *terms(value.b)]
    return [value]


def truth(value: tirx.PrimExpr) -> tuple[tirx.PrimExpr, bool]:
    """A condition without conversions to numbers and back around it, and whether it is negated."""
    negated = False
    while True:
        if isinstance(value, tirx.Cast):
            value = value.value
        elif isinstance(value, tirx.Not):
            value, negated = value.a, not negated
        elif isinstance(value, tirx.LT) and _is_zero(value.a):
            value = value.b
        elif isinstance(value, tirx.NE) and _is_zero(value.b):
            value = value.a
        else:
            return value, negated


def without_casts(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    """An expression without conversions between floating-point types around it."""
    while isinstance(expr, tirx.Cast) and {dtype_of(expr), dtype_of(expr.value)} <= set(_CONVERTED):
        expr = expr.value
    return expr


def _is_zero(value: tirx.PrimExpr) -> bool:
    value = without_casts(value)
    return isinstance(value, tirx.IntImm | tirx.FloatImm) and float(value.value) == 0.0
