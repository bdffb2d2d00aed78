"""What attention does to a sum before its softmax: scales, masks, biases."""

from __future__ import annotations

import dataclasses
import math

import tvm_ffi

from ....compat import ir, sym, tirx
from ...analysis import nodes_of
from ..fast_math import NARROW, dtype_of
from ..tensor_core.affine import is_conditional, uses
from .form import Limit

#: Constants up to which a mask hides a score: no other score comes near, whatever the type.
_HIDDEN = -1e4

#: The lowest float16: scores that a model holds are not below it, but for infinite ones.
_LOWEST = -65504.0

_FLOATS = (*NARROW, "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Score:
    """The softmax's argument.

    Attributes
    ----------
    whole : PrimExpr or None
        The expression; None where it is the sum times ``scale``, or minus infinity where ``limit`` hides it.
    inside : PrimExpr or None
        The expression where the causal mask hides nothing; None with ``whole``.
    limit : Limit or None
        The causal mask.
    scale : float
        See ``whole``; 1 where there is an expression.
    """

    whole: tirx.PrimExpr | None
    inside: tirx.PrimExpr | None
    limit: Limit | None
    scale: float


def split_scale(value: tirx.PrimExpr) -> tuple[float, tirx.PrimExpr]:
    """Take constant factors (and conversions of types) off an expression."""
    scale = 1.0
    while True:
        if isinstance(value, tirx.Cast) and {dtype_of(value), dtype_of(value.value)} <= set(
            _FLOATS
        ):
            value = value.value
        elif isinstance(value, tirx.Mul) and isinstance(value.b, tirx.FloatImm):
            scale, value = scale * float(value.b.value), value.a
        elif isinstance(value, tirx.Mul) and isinstance(value.a, tirx.FloatImm):
            scale, value = scale * float(value.a.value), value.b
        elif _is_division(value):
            scale, value = scale / float(value.b.value), value.a
        else:
            return scale, value


def _is_division(value: tirx.PrimExpr) -> bool:
    """Whether a value is divided by a number other than 0."""
    return (
        isinstance(value, tirx.Div)
        and isinstance(value.b, tirx.FloatImm)
        and float(value.b.value) != 0
    )


def split_score(
    value: tirx.PrimExpr, total: tirx.Var, factor: float, places: tuple[tirx.Var, tirx.Var]
) -> Score | None:
    """Describe a score; None where it depends on the sum in no way that is supported.

    Parameters
    ----------
    value : PrimExpr
        The score in float32, of the sum, parameters and iterators.
    total : Var
        The sum.
    factor : float
        What the sum is multiplied by before.
    places : tuple of Var
        The iterators of queries and keys.
    """
    row, key = places
    if not uses(value, total):
        return None
    if any(
        nodes_of(i, ir.TensorLoad) for load in nodes_of(value, ir.TensorLoad) for i in load.indices
    ):
        return None
    inside, limit = value, None
    for call in _conditionals(value):
        found = _causal(call, row, key)
        if found is not None and _hides(value, call, found, total):
            limit, side = Limit(found[0]), call.args[2 if found[1] else 1]
            inside = _unclamped(_without_zero(_swapped(value, call, side)))
            break
    scale, core = split_scale(inside)
    # The largest score is found among sums, which only a positive factor leaves in order.
    if core.same_as(total) and 0 < factor * scale < math.inf:
        return Score(None, None, limit, scale)
    return Score(value, inside, limit, 1.0)


def _conditionals(value: tirx.PrimExpr) -> list[ir.Call]:
    return [call for call in nodes_of(value, ir.Call) if is_conditional(call)]


def _causal(call: ir.Call, row: tirx.Var, key: tirx.Var) -> tuple[int, bool] | None:
    """Shift of a condition on positions, and whether the condition holds where keys are hidden."""
    condition = call.args[0]
    while isinstance(condition, tirx.Cast):
        condition = condition.value
    hidden = False
    if isinstance(condition, tirx.Not):
        condition, hidden = condition.a, True
    sides = {tirx.LE: (1, 0), tirx.LT: (1, -1), tirx.GE: (-1, 0), tirx.GT: (-1, -1)}
    if type(condition) not in sides:
        return None
    sign, strict = sides[type(condition)]
    # sign * (a - b) <= strict
    difference = sym.Analyzer().simplify(
        tirx.Cast("int32", condition.a) - tirx.Cast("int32", condition.b)
    )
    if nodes_of(difference, ir.TensorLoad):
        return None
    numbers = sym.detect_linear_equation(difference, [row, key])
    numbers = [sym.Analyzer().simplify(n) for n in numbers]
    if len(numbers) != 3 or not all(isinstance(n, tirx.IntImm) for n in numbers):
        return None
    of_row, of_key, rest = (sign * int(n) for n in numbers)
    if (of_row, of_key) == (-1, 1):  # key <= row + shift holds where the condition does
        return strict - rest, hidden
    if (of_row, of_key) == (1, -1):  # row - key <= bound: its negation is key <= row - bound - 1
        return -(strict - rest) - 1, not hidden
    return None


def _hides(value: tirx.PrimExpr, call: ir.Call, found: tuple[int, bool], total: tirx.Var) -> bool:
    """Whether a score is very negative where the conditional chooses its other side, and a row always has a key."""
    shift, negated = found
    side, other = call.args[1 if negated else 2], call.args[2 if negated else 1]
    constant = _number(side)
    # Of a row without any key, finite masks leave what minus infinity does not.
    if constant is None or constant > _HIDDEN or (shift < 0 and constant != float("-inf")):
        return False
    value = _unclamped(value)
    if value.same_as(call):
        return True
    # A sum with the mask: its other side must be 0, or it would be no mask.
    terms = _terms(value)
    return any(t.same_as(call) for t in terms) and _number(other) == 0.0 and uses(value, total)


def _unclamped(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """A score that is not let fall below the lowest float16: what a model adds to a mask lest it overflow."""
    if isinstance(value, tirx.Max):
        for one, other in ((value.a, value.b), (value.b, value.a)):
            bound = _number(other)
            if bound is not None and bound <= _LOWEST:
                return one
    return value


def _terms(value: tirx.PrimExpr) -> list[tirx.PrimExpr]:
    return [*_terms(value.a), *_terms(value.b)] if isinstance(value, tirx.Add) else [value]


def _number(value: tirx.PrimExpr) -> float | None:
    while isinstance(value, tirx.Cast):
        value = value.value
    return float(value.value) if isinstance(value, tirx.FloatImm | tirx.IntImm) else None


def _swapped(value: tirx.PrimExpr, call: ir.Call, side: tirx.PrimExpr) -> tirx.PrimExpr:
    return tvm_ffi.structural_map(
        value, [(ir.Call, lambda c: side if c.same_as(call) else c)], order="pre"
    )


def _without_zero(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """A sum without zeros."""
    terms = [term for term in _terms(value) if _number(term) != 0.0]
    if len(terms) == len(_terms(value)):
        return value
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
